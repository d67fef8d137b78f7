"""Linear attention, Mamba and delta-rule layers: a state per sequence is read, updated per token, and written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.kernels.base import KernelTime, Num, Params, as_array, kernel_time


@dataclass(frozen=True, slots=True)
class StateFit:
    """Numbers of one (GPU, engine) stack. Rates are attainable ones."""

    bytes_per_s: float
    flop_per_s: float
    """Chunked prefill kernels."""
    fixed_s: float
    token_share: float = 0.7
    """Cost of one further verified token, in reads-and-writes of the state (kernels keep 1 + D states for the rollback)."""
    chunk_from: float = 32.0
    """Query length from which the chunked kernel is used instead of the recurrent one."""

    @classmethod
    def from_params(cls, p: Params, gpu: GpuProfile, dtype: str) -> StateFit:
        """Fitted shares on the peaks of `gpu`."""
        return cls(p["bandwidth"] * gpu.bytes_per_s, p["flop"] * gpu.peak(dtype), p["fixed_s"], p["token_share"])

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, dtype: str = "bf16") -> StateFit:
        """Prior without a fit."""
        return cls(gpu.bytes_per_s * gpu.bandwidth_eff * 0.75, gpu.peak(dtype) * 0.15, 2 * gpu.launch_s)


def state_time(num_seqs: Num, query_len: Num, state_bytes: Num, flop: Num, fit: StateFit) -> KernelTime:
    """Seconds of one layer for num_seqs sequences of query_len tokens: affine in query_len while it verifies, compute bound in prefill.

    `state_bytes` of one sequence and layer; `flop` of the whole call.
    """
    b, q = as_array(num_seqs), as_array(query_len)
    once = 2.0 * b * as_array(state_bytes) / fit.bytes_per_s
    chunked = q >= fit.chunk_from
    memory = once * np.where(chunked, 1.0, 1.0 + fit.token_share * (q - 1.0))
    compute = np.where(chunked, as_array(flop) / fit.flop_per_s, 0.0)
    return kernel_time(fit.fixed_s + memory + compute, memory, compute, fit.fixed_s)
