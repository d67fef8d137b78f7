"""Grouped expert multiplication against touched experts: gate, up and down of each on its rows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microbench.plan import Point
from microbench.timing import Device, Work


def expert_bytes(p: Point) -> float:
    """Weights of the touched experts: gate, up and down."""
    size = {"fp32": 4, "bf16": 2}[p.text("dtype")]
    return float(p.num("touched") * 3 * p.num("width") * p.num("ffn") * size)


def work(p: Point, device: Device) -> Work:
    """Gate, up and down of every touched expert on its rows: one grouped call where torch has it on this GPU, else expert by expert."""
    torch = import_module("torch")
    touched, rows, dtype = p.num("touched"), p.num("rows_per_expert"), p.text("dtype")
    width, ffn, experts = p.num("width"), p.num("ffn"), p.num("experts")
    up = [device.tensor((2 * ffn, width), dtype, i) for i in range(experts)]
    down = [device.tensor((width, ffn), dtype, i + experts) for i in range(experts)]
    x = device.tensor((touched, rows, width), dtype, 3).clone()
    functional, grouped = torch.nn.functional, getattr(torch, "_grouped_mm", None)
    if device.kind == "cuda" and grouped is not None and dtype == "bf16":
        flat = x.reshape(touched * rows, width)
        ends = torch.arange(rows, rows * touched + 1, rows, device=x.device, dtype=torch.int32)
        sets = min(device.copies(expert_bytes(p)), 6) if expert_bytes(p) < 4 * device.cache_bytes else 1
        stacked = [
            tuple(torch.stack([w[(s * touched + e) % experts] for e in range(touched)]).transpose(-2, -1) for w in (up, down)) for s in range(sets)
        ]

        def launch_grouped(i: int) -> Any:
            up_all, down_all = stacked[i % sets]
            gate, value = grouped(flat, up_all, offs=ends).chunk(2, dim=-1)
            return grouped(functional.silu(gate) * value, down_all, offs=ends)

        return Work(launch_grouped, sets)

    def launch(i: int) -> Any:
        out = None
        for e in range(touched):
            at = (i * touched + e) % experts
            gate, value = functional.linear(x[e], up[at]).chunk(2, dim=-1)
            out = functional.linear(functional.silu(gate) * value, down[at])
        return out

    return Work(launch, experts)
