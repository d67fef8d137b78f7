"""Dense matrix multiplication [M, K] x [N, K]^T at few rows, with the weights cold at every launch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microbench.plan import Point
from microbench.timing import Device, Work, torch_dtype


def gemm_flop(p: Point) -> float:
    return 2.0 * p.num("m") * p.num("n") * p.num("k")


def weight_bytes(p: Point) -> float:
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[p.text("dtype")]
    return float(p.num("n") * p.num("k") * size)


def gemm_work(p: Point, device: Device) -> Work:
    """x @ W^T for every copy of W in turn: each launch finds its weights cold."""
    torch = import_module("torch")
    m, n, k, dtype = p.num("m"), p.num("n"), p.num("k"), p.text("dtype")
    copies = device.copies(weight_bytes(p))
    weights = [device.tensor((n, k), dtype, i) for i in range(copies)]
    if dtype == "fp8":
        return _fp8(torch, device, m, weights)
    x = device.tensor((m, k), dtype, 7).clone()
    linear = torch.nn.functional.linear

    def launch(i: int) -> Any:
        return linear(x, weights[i % copies])

    return Work(launch, copies)


def _fp8(torch: Any, device: Device, m: int, weights: list[Any]) -> Work:
    """torch._scaled_mm, per-tensor scales; rows are padded to 16 as the library asks."""
    n, k = weights[0].shape
    x = device.tensor((-(-m // 16) * 16, k), "fp8", 7).clone()
    one = torch.ones((), device=x.device, dtype=torch.float32)

    def launch(i: int) -> Any:
        return torch._scaled_mm(x, weights[i % len(weights)].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return Work(launch, len(weights))


def supported(p: Point, device: Device) -> bool:
    """Whether this device multiplies in the dtype of the point."""
    if p.text("dtype") != "fp8":
        return True
    torch = import_module("torch")
    return device.kind == "cuda" and torch.cuda.get_device_capability() >= (8, 9) and torch_dtype("fp8") is not None
