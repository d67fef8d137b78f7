"""Time of a dense matrix multiplication [M, K] x [K, N] at the sizes that verification and prefill use.

    t = fixed + M K quant / B0 + |  |bytes / B, waves(M, N) 2MNK / F|_p ,  latency(K)  |_q * step(M)

with |a, b|_p the p-norm. `latency` is one thread block walking K (saturating where split-K cuts it), `waves` the share of the last,
partly filled wave of 128 x 128 tiles, `quant` the activation quantisation that a dynamic fp8 or fp4 GEMM runs first, and `step` a
factor by M learnt over all shapes of a stack: CUTLASS fp8 on Hopper jumps at M = 65, 129, 257, 513. Plain ceilings in M hardly help.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.kernels.base import Array, KernelTime, Num, Params, as_array, kernel_time, log_interp, smooth_max

#: Rows and columns of the tile that waves are counted in.
TILE = 128.0
#: Weights and activations far below this many bytes may still sit in L2 when a benchmark repeats a call.
WARM_BYTES = 1e8


@dataclass(frozen=True)
class GemmFit:
    """Numbers of one (GPU, engine, dtype) stack. Rates are attainable ones."""

    bytes_per_s: float
    flop_per_s: float
    fixed_s: float
    """Launch and prologue (TensorRT-LLM fp8: with the launch of its quantisation)."""
    per_k_s: float = 0.0
    """Seconds per element of K while one thread block walks K."""
    k_split: float = 1e9
    """K from which split-K keeps that latency from growing."""
    latency_knee: float = 2.0
    knee: float = 4.0
    wave_cap: float = 1.0
    """Largest excess of a partly filled wave that counts."""
    wave_share: float = 0.0
    """Share of it that shows (split-K and stream-K hide the rest)."""
    warm_share: float = 0.0
    quant_s_per_element: float = 0.0
    """Activation quantisation, seconds per element of M x K."""
    sm_count: float = 132.0
    step_m: tuple[float, ...] = ()
    step_log: tuple[float, ...] = ()
    """log of the factor at each M of `step_m`, interpolated in log M."""
    _nodes: tuple[Array, Array] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_nodes", (np.log(as_array(self.step_m)), as_array(self.step_log)))

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, dtype: str) -> GemmFit:
        """Prior without a fit: peaks times the profile's attainable shares, its launch time, no steps."""
        return cls(
            bytes_per_s=gpu.bytes_per_s * gpu.bandwidth_eff, flop_per_s=gpu.peak(dtype) * gpu.matmul_eff.get(dtype, 0.7),
            fixed_s=gpu.launch_s, per_k_s=5e-10, k_split=4000.0, sm_count=float(gpu.sm_count or 132),
        )  # fmt: skip

    @classmethod
    def from_params(cls, p: Params, gpu: GpuProfile, dtype: str, step_m: tuple[float, ...] = (), step_log: tuple[float, ...] = ()) -> GemmFit:
        """Fitted shares on the peaks of `gpu`; `dtype` is what the stack multiplies in."""
        return cls(
            bytes_per_s=p["bandwidth"] * gpu.bytes_per_s, flop_per_s=p["flop"] * gpu.peak(dtype), fixed_s=p["fixed_s"],
            per_k_s=p["per_k_s"], k_split=p["k_split"], latency_knee=p["latency_knee"], knee=p["knee"], wave_cap=p["wave_cap"],
            wave_share=p["wave_share"], warm_share=p["warm_share"], quant_s_per_element=p["quant_bytes"] / gpu.bytes_per_s,
            sm_count=float(gpu.sm_count or 132), step_m=step_m, step_log=step_log,
        )  # fmt: skip

    def step(self, m: Num) -> Array:
        """The factor on the roofline part at M rows (1 without a table)."""
        return log_interp(as_array(m), *self._nodes) if self.step_m else np.ones_like(as_array(m))


def gemm_time(  # noqa: PLR0913
    m: Num, n: Num, k: Num, fit: GemmFit, *, weight_bytes_per_element: Num, act_bytes_per_element: Num = 2.0,
    out_bytes_per_element: Num = 2.0,
) -> KernelTime:  # fmt: skip
    """Seconds of one GEMM with M rows (tokens), N output and K input features; weights are read once, activations in and out."""
    m, n, k = as_array(m), as_array(n), as_array(k)
    moved = n * k * weight_bytes_per_element + m * (k * act_bytes_per_element + n * out_bytes_per_element)
    memory = moved / fit.bytes_per_s
    if fit.warm_share:
        memory = memory * (1.0 - fit.warm_share / (1.0 + (moved / WARM_BYTES) ** 2))
    compute = m * (n * k * (2.0 / fit.flop_per_s))
    if fit.wave_share:
        filled = np.ceil(m / np.where(m <= TILE / 2.0, TILE / 2.0, TILE)) * np.ceil(n / TILE) / fit.sm_count
        compute = compute * (1.0 + fit.wave_share * np.minimum(np.ceil(filled) / filled - 1.0, fit.wave_cap))
    latency = fit.per_k_s * k / np.sqrt(1.0 + (k / fit.k_split) ** 2)
    step = fit.step(m)
    body = step * smooth_max(smooth_max(as_array(memory), as_array(compute), fit.knee), as_array(latency), fit.latency_knee)
    fixed = fit.fixed_s + m * (k * fit.quant_s_per_element)
    return kernel_time(fixed + body, memory * step, compute * step, fixed)
