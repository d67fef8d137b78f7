"""Memory bandwidth by size: stream read, copy, triad. On a GPU through cupy and NVRTC where cupy is there (no torch), else torch.

Bytes moved per element of one array: read 1 array, copy 2, triad 3 (two read, one written; a CPU may read the written line as well).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from microbench.plan import Point
from microbench.timing import Device, Work

ARRAYS_MOVED = {"read": 1, "copy": 2, "triad": 3}

#: Grid-stride kernels on 16-byte words; `read` folds so that the compiler keeps the loads. Compiles with nvcc and NVRTC, sm_80 on.
SOURCE = r"""
extern "C" __global__ void stream_read(const float4* __restrict__ a, float* __restrict__ out, size_t n) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
  float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
  for (; i < n; i += step) { float4 v = a[i]; s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w; }
  float total = s.x + s.y + s.z + s.w;
  if (total == 123.456f) out[0] = total;
}
extern "C" __global__ void stream_copy(const float4* __restrict__ a, float4* __restrict__ c, size_t n) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
  for (; i < n; i += step) c[i] = a[i];
}
extern "C" __global__ void stream_triad(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c, size_t n) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
  for (; i < n; i += step) {
    float4 x = a[i], y = b[i];
    c[i] = make_float4(x.x + 3.f * y.x, x.y + 3.f * y.y, x.z + 3.f * y.z, x.w + 3.f * y.w);
  }
}
extern "C" __global__ void empty() {}
"""
KERNELS = ("stream_read", "stream_copy", "stream_triad", "empty")


def moved_bytes(p: Point) -> float:
    """Bytes that cross the memory bus at one launch."""
    return float(ARRAYS_MOVED[p.text("pattern")] * p.num("size_bytes"))


def work(p: Point, device: Device) -> Work:
    """The stream kernel of a point through torch."""
    torch = import_module("torch")
    count = p.num("size_bytes") // 4
    a, b = device.tensor((count,), "fp32", 0), device.tensor((count,), "fp32", 1)
    out = torch.empty_like(a)
    patterns: dict[str, Callable[[int], Any]] = {
        "read": lambda i: torch.sum(a),
        "copy": lambda i: out.copy_(a),
        "triad": lambda i: torch.add(a, b, alpha=3.0, out=out),
    }
    return Work(patterns[p.text("pattern")])


def cupy_measure(p: Point, repeats: int = 20) -> list[float]:
    """Seconds per launch of the RawKernel, measured with cupy alone on its own stream (never shared with torch)."""
    cupy = import_module("cupy")
    count = p.num("size_bytes") // 16
    names = {"read": "stream_read", "copy": "stream_copy", "triad": "stream_triad"}
    kernel = cupy.RawKernel(SOURCE, names[p.text("pattern")], options=("-std=c++17",))
    arrays = [cupy.random.standard_normal(count * 4, dtype=cupy.float32) for _ in range(ARRAYS_MOVED[p.text("pattern")])]
    if p.text("pattern") == "read":
        arrays.append(cupy.zeros(1, dtype=cupy.float32))
    blocks = 8 * cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    args = (*arrays, cupy.uint64(count))
    stream = cupy.cuda.Stream(non_blocking=True)
    launches = max(1, min(50, int(2e9 // max(moved_bytes(p), 1.0))))
    samples = []
    with stream:
        kernel((blocks,), (256,), args)
        stream.synchronize()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(repeats):
            begin.record(stream)
            for _ in range(launches):
                kernel((blocks,), (256,), args)
            end.record(stream)
            end.synchronize()
            samples.append(float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3 / launches)
    return samples


def cupy_properties() -> dict[str, float]:
    """Device properties and the peak bandwidth they imply: 2 x memory clock x bus width (double data rate)."""
    cupy = import_module("cupy")
    p = cupy.cuda.runtime.getDeviceProperties(0)
    clock_hz, bus_bits = float(p.get("memoryClockRate", 0)) * 1e3, float(p.get("memoryBusWidth", 0))
    return {
        "sm_count": float(p["multiProcessorCount"]), "l2_bytes": float(p["l2CacheSize"]), "memory_bytes": float(p["totalGlobalMem"]),
        "peak_bytes_per_s": 2.0 * clock_hz * bus_bits / 8.0, "driver": float(cupy.cuda.runtime.driverGetVersion()),
        "runtime": float(cupy.cuda.runtime.runtimeGetVersion()),
    }  # fmt: skip
