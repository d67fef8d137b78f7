"""The five guidelines of the primary source as checks, each with this deployment's numbers (DESIGN section 3).

Source: NVIDIA technical blog "Co-Designing AI Models Using Speculative Decoding for Faster LLM Inference", 2026-09-02, read through
summaries: raise D toward the GEMM ridge; D = 128/G - 1 where attention dominates; beyond it keep G(1+D) on a tile multiple; at low
latency raise D only while the AL gain beats the draft cost; choose the drafter by AL, draft latency and training cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.deployment import Deployment
from planner.edges import attention_tiles
from planner.kernels import padded_rows
from planner.ops import Gemm, KvOp, LatentOp
from planner.round import round_time, step_ops
from planner.search import Arm
from planner.units import bytes_per_element

SOURCE_TILE = 128


def guideline_checks(
    off: Deployment, arm: Arm | None, concurrency: Sequence[int], context_len: float, recommendations: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Five objects {"id", "guideline", "holds", "text", "numbers"}; holds is None where the check does not apply."""
    middle = sorted(concurrency)[len(concurrency) // 2]  # one that was asked, so that its recommendation can be checked
    batch = max(1, math.ceil(math.ceil(middle / off.layout.dp) / off.layout.pp))
    chosen = {int(r["concurrency"]): r["draft_len"] for r in recommendations if r["draft_len"] is not None}
    at_batch = chosen.get(middle)
    return [
        _toward_ridge(off, batch, context_len, at_batch),
        _tile_rule(off, batch, context_len, at_batch),
        _tile_multiples(off),
        _marginal(arm, context_len),
        _drafter_choice(arm, recommendations),
    ]


def ridge_rows(dep: Deployment, weights_dtype: str) -> float:
    """GEMM rows M at which 2MNK / attainable FLOP/s equals NK bytes / attainable bytes/s: the ridge in rows."""
    act = dep.dtypes.act[weights_dtype]
    fit = dep.machine.gemm_fit(weights_dtype, act, dep.dtypes.block_scaled)
    return float(fit.flop_per_s / fit.bytes_per_s * bytes_per_element(weights_dtype) / 2.0)


def _toward_ridge(dep: Deployment, batch: int, context_len: float, draft_len: int | None) -> dict[str, Any]:
    classes = {"dense": dep.dtypes.weights["mlp" if not dep.model.is_moe else "attn"]}
    rows = {name: ridge_rows(dep, dtype) for name, dtype in classes.items()}
    if dep.model.is_moe:
        experts = next(layer.experts for layer, _ in dep.model.groups if layer.experts)
        rows["experts"] = ridge_rows(dep, dep.dtypes.weights["experts"]) * experts.num_experts / experts.top_k
    per_seq = float(dep.bytes_per_seq(context_len, 0))
    target = rows["dense"]
    wanted = max(0, math.floor(target / batch) - 1)
    extra_bytes = max(0.0, target - batch) * per_seq
    text = (
        f"GEMMs turn compute bound at M = {target:.0f} rows; {batch} sequences per rank reach that at D = {wanted}. Reaching it by batch"
        f" instead would take {extra_bytes / 1e9:.0f} GB more KV cache per GPU ({dep.memory.free / 1e9:.0f} GB are free)."
    )
    if "experts" in rows:
        text += f" Expert GEMMs see rows x k/E, so theirs lies at {rows['experts']:.0f} rows."
    return _check(
        1,
        "raise D toward the GEMM ridge",
        None if draft_len is None else draft_len <= wanted + 1,
        text,
        {"ridge_rows": rows, "batch_per_rank": batch, "draft_len_at_ridge": wanted, "kv_bytes_instead": extra_bytes},
    )


def _tile_rule(dep: Deployment, batch: int, context_len: float, draft_len: int | None) -> dict[str, Any]:
    ops = step_ops(dep, float(batch), 1.0, context_len)
    spent = [(op, float(dep.machine.served_s(op))) for op in ops]
    total = sum(t for _, t in spent)
    share = sum(t for op, t in spent if isinstance(op, KvOp | LatentOp)) / total
    gemms = sum(t for op, t in spent if isinstance(op, Gemm)) / total
    shapes = attention_tiles(dep)
    numbers: dict[str, Any] = {"attention_share": share, "gemm_share": gemms}
    if not shapes:
        return _check(2, "D = tile/G - 1 where attention dominates", None, "no dense GQA layer: the rule does not apply", numbers)
    group, _, tile = shapes[0]
    rule = max(0, tile // group - 1)
    numbers |= {"gqa_group_size": group, "tile_rows": tile, "rule_draft_len": rule, "source_rule_draft_len": max(0, SOURCE_TILE // group - 1)}
    dominates = share > 0.5
    text = (
        f"attention takes {share:.0%} of a plain step at batch {batch}, context {context_len:.0f}; the rule gives D = {tile}/{group} - 1 = {rule}"
        f" for this kernel's tile ({SOURCE_TILE // group - 1} for the source's {SOURCE_TILE})."
    )
    text += " It applies." if dominates else " It does not apply: attention does not dominate."
    holds = None if not dominates or draft_len is None else draft_len <= rule
    return _check(2, "D = tile/G - 1 where attention dominates", holds, text, numbers)


def _tile_multiples(dep: Deployment) -> dict[str, Any]:
    shapes = attention_tiles(dep)
    if not shapes:
        return _check(3, "keep G(1+D) on a tile multiple", None, "no dense GQA layer: the rule does not apply", {})
    group, head_dim, _ = shapes[0]
    kernel = dep.machine.attention_kernel("gqa")
    d = np.arange(0, 17, dtype=np.float64)
    padded = np.asarray(padded_rows(d + 1.0, float(group), head_dim, kernel)[0])
    used = group * (d + 1.0)
    waste = padded / used - 1.0
    full = [int(x) for x in d[waste < 1e-9]]
    least = [int(x) for x in d[np.argsort(waste, kind="stable")[:4]]]
    text = (
        f"G = {group} with {kernel.id}: no padding at D in {full}."
        if full
        else f"G = {group} does not divide the tiles of {kernel.id}; least waste at D in {sorted(least)}."
    )
    return _check(
        3,
        "keep G(1+D) on a tile multiple",
        None,
        text,
        {"gqa_group_size": group, "waste_frac": {int(k): float(w) for k, w in zip(d, waste, strict=True)}},
    )


def _marginal(arm: Arm | None, context_len: float) -> dict[str, Any]:
    name = "at low latency raise D only while AL gains more than drafting costs"
    if arm is None or arm.survival is None:
        return _check(4, name, None, "no drafter recommended", {})
    d = np.arange(0, arm.max_draft_len + 1)
    t = np.asarray(round_time(arm.dep, 1.0, context_len, d.astype(np.float64)).round_s)
    t[0] = float(round_time(_plain(arm), 1.0, context_len, 0.0).round_s)
    al = np.asarray(arm.survival.acceptance_len(d), dtype=np.float64)
    gain, cost = al[1:] / al[:-1] - 1.0, t[1:] / t[:-1] - 1.0
    best = int(np.argmax(al / t))
    rho = float((t[min(2, len(t) - 1)] - t[min(1, len(t) - 1)]) / t[0]) if len(t) > 2 else float("nan")
    text = (
        f"at one request the marginal gain exceeds the marginal cost up to D = {best} for {arm.name}"
        f" (one more draft token costs {rho:.2f} plain steps)."
    )
    return _check(4, name, None, text, {"best_draft_len": best, "draft_cost_ratio": rho, "gain": gain.tolist(), "cost": cost.tolist()})


def _plain(arm: Arm) -> Deployment:
    from planner.serving import plain

    return plain(arm.dep)


def _drafter_choice(arm: Arm | None, recommendations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    chosen = sorted({":".join(filter(None, (r["drafter"], r["drafter_model"]))) for r in recommendations if r["drafter"]})
    text = (
        f"chosen here: {', '.join(chosen)}; see the drafter table for acceptance, draft latency and training cost."
        if chosen
        else "no drafter pays here."
    )
    return _check(5, "choose the drafter by AL, draft latency and training cost", None, text, {"chosen": chosen, "main": arm.name if arm else None})


def _check(number: int, guideline: str, holds: bool | None, text: str, numbers: dict[str, Any]) -> dict[str, Any]:
    return {"id": number, "guideline": guideline, "holds": holds, "text": text, "numbers": numbers}
