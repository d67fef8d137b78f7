"""Time models of single kernels: pure functions on numbers, vectorised; no GPU and no model names inside.

Every function returns a `KernelTime` of broadcast arrays and takes a small frozen fit object with attainable rates and fixed times;
`gpu_profiles.fits.kernel_fit` finds the fit for a GPU and engine, `*.from_gpu` makes a prior from a profile alone.
"""

from planner.kernels.attention import AttentionFit, Work, attention_time, decode_work, mla_time, mla_work, padded_rows, stream_time
from planner.kernels.base import BOUNDS, KernelTime
from planner.kernels.comm import CommFit, allgather_time, allreduce_time, alltoall_time
from planner.kernels.gemm import GemmFit, gemm_time
from planner.kernels.moe import MoeFit, experts_touched, independent_tokens, moe_time
from planner.kernels.state import StateFit, state_time

__all__ = [
    "BOUNDS", "AttentionFit", "CommFit", "GemmFit", "KernelTime", "MoeFit", "StateFit", "Work", "allgather_time", "allreduce_time",
    "alltoall_time", "attention_time", "decode_work", "experts_touched", "gemm_time", "independent_tokens", "mla_time", "mla_work", "moe_time",
    "padded_rows", "state_time", "stream_time",
]  # fmt: skip
