"""Where a deployment's rows stand between the steps of its kernels: B(1+D) for GEMMs, G(1+D) for attention, captured graph sizes."""

from __future__ import annotations

import math

from planner.deployment import Deployment
from planner.kernels import padded_rows
from planner.models.spec import KvAttention
from planner.ops import gqa_group_size
from planner.roofline import gemm_key

STEP_WORTH_NAMING = 0.08
"""A GEMM step below 8 % is not worth a sentence."""


def gemm_steps(dep: Deployment) -> tuple[tuple[int, float], ...]:
    """(last M before a step, factor of the step) of the target's main GEMM stack, from measured per-M factors."""
    dtype = dep.dtypes.weights.get("mlp", "bf16")
    fit = dep.machine.fit("gemm", gemm_key(dtype, dep.dtypes.act[dtype], dep.dtypes.block_scaled)).value
    nodes, logs = getattr(fit, "step_m", ()), getattr(fit, "step_log", ())
    found = []
    for (m0, y0), (m1, y1) in zip(zip(nodes, logs, strict=True), zip(nodes[1:], logs[1:], strict=True), strict=False):
        if m1 == m0 + 1 and math.expm1(y1 - y0) > STEP_WORTH_NAMING:
            found.append((int(m0), math.exp(y1 - y0)))
    return tuple(found)


def attention_tiles(dep: Deployment) -> tuple[tuple[int, int, int], ...]:
    """(G on one rank, head_dim, tile rows of the kernel) for each distinct attention shape."""
    kernel = dep.machine.attention_kernel("gqa")
    shapes = {
        (gqa_group_size(core.num_heads, core.num_kv_heads, dep.layout.tp), core.head_dim)
        for core, _ in dep.model.attention_cores()
        if isinstance(core, KvAttention) and core.sparse_topk is None
    }
    return tuple((g, d, kernel.tiles_for(d)[-1]) for g, d in sorted(shapes))


def edges_of(dep: Deployment, num_seqs: int, draft_len: int) -> tuple[str, ...]:
    """One sentence per kernel class that has steps: where this point stands and what comes next."""
    out: list[str] = []
    per_rank = math.ceil(math.ceil(num_seqs / dep.layout.dp) / dep.layout.pp)
    rows = per_rank * (1 + draft_len)
    above = [(m, f) for m, f in gemm_steps(dep) if m >= rows]
    if above:
        m, f = above[0]
        out.append(f"GEMM rows {per_rank} x {1 + draft_len} = {rows}: the next step is above {m} (+{f - 1:.0%})")
    kernel = dep.machine.attention_kernel("gqa")
    for g, d, tile in attention_tiles(dep):
        padded = float(padded_rows(1.0 + draft_len, float(g), d, kernel)[0])
        used = g * (1 + draft_len)
        out.append(f"attention rows G(1+D) = {g} x {1 + draft_len} = {used}, padded to {padded:.0f} by {kernel.id} (tile {tile})")
    return tuple(out)
