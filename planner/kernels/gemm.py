"""Time of a dense matrix multiplication [M, K] x [K, N] at the sizes that verification and prefill use.

    t = fixed + K * per_k + ((bytes / B)^p + (2MNK / F)^p)^(1/p) * step(M)

B falls when too few thread blocks are in flight (small N). Textbook tile and wave ceilings hardly help against measured tables
(cuBLAS hides them by split-K); a per-M factor learnt on other shapes does, because CUTLASS fp8 on Hopper jumps at M = 65, 129, 257.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.kernels.base import KernelTime, Num, as_array, log_interp, smooth_max


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Numbers of one (GPU, engine, dtype) stack. Rates are attainable ones."""

    bytes_per_s: float
    flop_per_s: float
    fixed_s: float
    """Launch, prologue and (TensorRT-LLM fp8) activation quantisation."""
    per_k_s: float = 0.0
    """Seconds per element of K: a thread block walks K in sequence."""
    knee: float = 4.0
    """p of the smooth maximum."""
    half_blocks: float = 0.0
    """Thread blocks (128 columns each) at which half of the bandwidth is reached."""
    step_m: tuple[float, ...] = ()
    step_log: tuple[float, ...] = ()
    """log of the factor at each M of `step_m`, interpolated in log M."""

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, dtype: str) -> GemmFit:
        """Prior without a fit: peaks times the profile's attainable shares, its launch time, no steps."""
        return cls(
            bytes_per_s=gpu.bytes_per_s * gpu.bandwidth_eff,
            flop_per_s=gpu.peak(dtype) * gpu.matmul_eff.get(dtype, 0.7),
            fixed_s=gpu.launch_s,
        )


def gemm_time(  # noqa: PLR0913
    m: Num, n: Num, k: Num, fit: GemmFit, *, weight_bytes_per_element: Num, act_bytes_per_element: Num = 2.0,
    out_bytes_per_element: Num = 2.0,
) -> KernelTime:  # fmt: skip
    """Seconds of one GEMM with M rows (tokens), N output and K input features; weights are read once, activations in and out."""
    m, n, k = as_array(m), as_array(n), as_array(k)
    moved = n * k * weight_bytes_per_element + m * k * act_bytes_per_element + m * n * out_bytes_per_element
    blocks = np.ceil(n / 128.0)
    memory = moved / fit.bytes_per_s * (1.0 + fit.half_blocks / blocks)
    compute = 2.0 * m * n * k / fit.flop_per_s
    fixed = fit.fixed_s + k * fit.per_k_s
    body = smooth_max(memory, compute, fit.knee)
    if fit.step_m:
        step = log_interp(m, fit.step_m, fit.step_log)
        body, memory, compute = body * step, memory * step, compute * step
    return KernelTime(as_array(fixed + body), as_array(memory), as_array(compute), as_array(fixed))
