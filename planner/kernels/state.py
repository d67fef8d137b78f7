"""Linear attention, Mamba and delta-rule layers: a state per sequence is read, updated per token, and written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.kernels.base import KernelTime, Num, Params, as_array, kernel_time, smooth_max

#: Query length from which engines run the chunked kernel instead of the recurrent one.
CHUNK_FROM = 17.0


@dataclass(frozen=True, slots=True)
class StateFit:
    """Numbers of one (GPU, engine) stack. Rates are attainable ones."""

    bytes_per_s: float
    fixed_s: float
    """Convolution and recurrence of a few sequences."""
    token_s: float = 1.5e-6
    """One further verified token of few sequences: tokens are walked in sequence."""
    token_share: float = 0.55
    """Cost of one further verified token, in reads-and-writes of the state (kernels keep 1 + D states for the rollback)."""
    knee: float = 3.0
    chunk_flop_per_s: float = 5e13
    """Chunked prefill kernels."""
    chunk_fixed_s: float = 2.5e-5

    @classmethod
    def from_params(cls, p: Params, gpu: GpuProfile, dtype: str) -> StateFit:
        """Fitted shares on the peaks of `gpu`."""
        return cls(
            bytes_per_s=p["bandwidth"] * gpu.bytes_per_s, fixed_s=p["fixed_s"], token_s=p["token_s"], token_share=p["token_share"],
            knee=p["knee"], chunk_flop_per_s=p["chunk_flop"] * gpu.peak(dtype), chunk_fixed_s=p["chunk_fixed_s"],
        )  # fmt: skip

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, dtype: str = "bf16") -> StateFit:
        """Prior without a fit; the shares are typical of the fitted stacks."""
        return cls(
            gpu.bytes_per_s * gpu.bandwidth_eff * 0.9, 2 * gpu.launch_s, chunk_flop_per_s=0.08 * gpu.peak(dtype),
            chunk_fixed_s=8 * gpu.launch_s,
        )  # fmt: skip


def state_time(num_seqs: Num, query_len: Num, state_bytes: Num, flop: Num, fit: StateFit) -> KernelTime:
    """Seconds of one layer for num_seqs sequences of query_len tokens: affine in query_len while it verifies, compute bound in prefill.

    `state_bytes` of one sequence and layer, read and written once; `flop` of the whole call (8 per state element and token).
    """
    b, q = as_array(num_seqs), as_array(query_len)
    chunked = q >= CHUNK_FROM
    memory = 2.0 * b * as_array(state_bytes) / fit.bytes_per_s * np.where(chunked, 1.0, 1.0 + fit.token_share * (q - 1.0))
    compute = np.where(chunked, as_array(flop) / fit.chunk_flop_per_s, 0.0)
    fixed = np.where(chunked, fit.chunk_fixed_s, fit.fixed_s + fit.token_s * (q - 1.0))
    time = np.where(chunked, fixed + memory + compute, smooth_max(as_array(fixed + 0 * memory), as_array(memory), fit.knee))
    return kernel_time(time, memory, compute, fixed)
