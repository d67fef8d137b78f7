"""Where a deployment's rows stand between the steps of its kernels: B(1+D) for GEMMs, G(1+D) for attention, captured graph sizes."""

from __future__ import annotations

import math

from planner.deployment import Deployment
from planner.kernels import padded_rows
from planner.models.spec import KvAttention
from planner.ops import gqa_group_size
from planner.round import verify_rows

STEP_WORTH_NAMING = 0.08
"""A GEMM step below 8 % is not worth a sentence."""


def gemm_steps(dep: Deployment) -> tuple[tuple[int, float], ...]:
    """(last M before a step, factor of the step) of the target's main GEMM stack, from measured per-M factors."""
    dtype = dep.dtypes.weights.get("mlp", "bf16")
    fit = dep.machine.gemm_fit(dtype, dep.dtypes.act[dtype], dep.dtypes.block_scaled)
    nodes = tuple(zip(fit.step_m, fit.step_log, strict=True))
    found = []
    for (m0, y0), (m1, y1) in zip(nodes, nodes[1:], strict=False):
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
    width = int(verify_rows(dep, float(draft_len)))
    rows = per_rank * width
    following = per_rank * int(verify_rows(dep, float(draft_len + 1)))
    for edge, factor in gemm_steps(dep):
        if rows <= edge < following:
            out.append(
                f"D={draft_len} keeps {per_rank} x {width} = {rows} GEMM rows under the step at {edge};"
                f" D={draft_len + 1} would cost {factor - 1:.0%} more GEMM time for it"
            )
        elif edge < rows <= edge + per_rank and draft_len:
            out.append(f"D={draft_len} has {rows} GEMM rows, past the step at {edge} (+{factor - 1:.0%}): D={draft_len - 1} stays under it")
    kernel = dep.machine.attention_kernel("gqa")
    for g, d, tile in attention_tiles(dep):
        padded = float(padded_rows(float(width), float(g), d, kernel)[0])
        used = g * width
        out.append(f"attention rows G(1+D) = {g} x {width} = {used}, padded to {padded:.0f} by {kernel.id} (tile {tile})")
    return tuple(out)
