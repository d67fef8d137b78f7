"""Dense matrix multiplication [M, K] x [N, K]^T at few rows, with the weights cold at every launch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microbench.plan import Point
from microbench.timing import Device, Work, torch_dtype

#: int8 weights, one scale an output row, multiplied with bf16 activations by torch's packed CPU kernel.
INT8_WEIGHTS = "int8/bf16"


def gemm_flop(p: Point) -> float:
    return 2.0 * p.num("m") * p.num("n") * p.num("k")


def weight_bytes(p: Point) -> float:
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, INT8_WEIGHTS: 1}[p.text("dtype")]
    return float(p.num("n") * p.num("k") * size)


def gemm_work(p: Point, device: Device) -> Work:
    """x @ W^T for every copy of W in turn: each launch finds its weights cold."""
    torch = import_module("torch")
    m, n, k, dtype = p.num("m"), p.num("n"), p.num("k"), p.text("dtype")
    copies = device.copies(weight_bytes(p))
    if dtype == INT8_WEIGHTS:
        return _int8_weights(torch, device, p, copies)
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


def _int8_weights(torch: Any, device: Device, p: Point, copies: int) -> Work:
    """torch._weight_int8pack_mm; any bytes do as weights."""
    m, n, k = p.num("m"), p.num("n"), p.num("k")
    weights = [device.tensor((n, k // 2), "bf16", i).view(torch.int8) for i in range(copies)]
    x, scale = device.tensor((m, k), "bf16", 7).clone(), device.tensor((n,), "bf16", 3).clone()

    def launch(i: int) -> Any:
        return torch._weight_int8pack_mm(x, weights[i % copies], scale)

    return Work(launch, copies)


def supported(p: Point, device: Device) -> bool:
    """Whether this device multiplies in the dtype of the point."""
    if p.text("dtype") == INT8_WEIGHTS:
        return device.kind == "cpu" and p.num("k") % 2 == 0
    if p.text("dtype") != "fp8":
        return True
    torch = import_module("torch")
    return device.kind == "cuda" and torch.cuda.get_device_capability() >= (8, 9) and torch_dtype("fp8") is not None
