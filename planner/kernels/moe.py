"""Experts: how many a pass touches, and the time of the grouped multiplications over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.kernels.base import Array, KernelTime, Num, Params, as_array, kernel_time, smooth_max


def independent_tokens(query_len: Num, overlap: Num) -> Array:
    """Independently routed tokens that query_len tokens of one sequence are worth: 1 + (q - 1)(1 - o)."""
    return as_array(1.0 + (as_array(query_len) - 1.0) * (1.0 - as_array(overlap)))


def experts_touched(num_experts: Num, top_k: Num, num_seqs: Num, query_len: Num = 1.0, overlap: Num = 0.0) -> Array:
    """Expected distinct experts: E (1 - (1 - k/E)^(n q_eff)) over n sequences of query_len tokens, worth q_eff independent tokens each.

    Further tokens of a sequence meet experts that any earlier one has read, so their share falls along a long draft as it does over a
    batch: never more than independent routing touches.
    """
    experts = as_array(num_experts)
    share = np.minimum(as_array(top_k) / experts, 1.0)
    with np.errstate(divide="ignore"):
        return as_array(-experts * np.expm1(as_array(num_seqs) * independent_tokens(query_len, overlap) * np.log1p(-share)))


@dataclass(frozen=True, slots=True)
class MoeFit:
    """Numbers of one (GPU, engine, dtype) stack. Rates are attainable ones."""

    bytes_per_s: float
    flop_per_s: float
    fixed_s: float
    row_s_per_element: float = 0.0
    """Permutation, quantisation and the weighted sum: seconds per (token, expert) row and element of its width."""
    per_expert_s: float = 0.0
    """Scheduling of one touched expert."""
    tile_rows: float = 16.0
    """Rows that an expert computes at least."""
    knee: float = 4.0

    @classmethod
    def from_params(cls, p: Params, gpu: GpuProfile, dtype: str) -> MoeFit:
        """Fitted shares on the peaks of `gpu`."""
        return cls(
            bytes_per_s=p["bandwidth"] * gpu.bytes_per_s, flop_per_s=p["flop"] * gpu.peak(dtype), fixed_s=p["fixed_s"],
            row_s_per_element=p["row_bytes"] / gpu.bytes_per_s, per_expert_s=p["per_expert_s"], tile_rows=p["tile_rows"], knee=p["knee"],
        )  # fmt: skip

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, dtype: str) -> MoeFit:
        """Prior without a fit: a router, two grouped GEMMs and a reduction are four launches."""
        return cls(gpu.bytes_per_s * gpu.bandwidth_eff * 0.85, gpu.peak(dtype) * gpu.matmul_eff.get(dtype, 0.7) * 0.7, 4 * gpu.launch_s)


def moe_time(  # noqa: PLR0913
    num_tokens: Num, *, top_k: Num, width: Num, ffn: Num, experts_touched: Num, fit: MoeFit, weight_bytes_per_element: Num,
    matrices: Num = 3.0, num_experts: Num = 1.0, local_experts: Num | None = None,
) -> KernelTime:  # fmt: skip
    """Seconds of one expert layer on one rank.

    `num_tokens` x top_k expert rows are spread over num_experts; the rank holds `local_experts` of them (None = all) with `ffn`
    columns each, of which `experts_touched` get rows. `matrices` = 3 with a gate, 2 without.
    """
    share = 1.0 if local_experts is None else as_array(local_experts) / as_array(num_experts)
    rows = as_array(num_tokens) * top_k * share
    touched = as_array(experts_touched)
    elements = as_array(matrices) * width * ffn
    x = np.maximum(rows / np.maximum(touched, 1e-9), 1e-9) / fit.tile_rows
    padded = touched * fit.tile_rows * x / -np.expm1(-x)
    memory = (touched * elements * weight_bytes_per_element + 2.0 * rows * (as_array(width) + 2.0 * as_array(ffn))) / fit.bytes_per_s
    compute = 2.0 * elements * padded / fit.flop_per_s
    fixed = fit.fixed_s + fit.row_s_per_element * rows * width + fit.per_expert_s * touched
    return kernel_time(fixed + smooth_max(as_array(memory), as_array(compute), fit.knee), memory, compute, fixed)
