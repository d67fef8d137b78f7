"""Collectives between GPUs, by message size: piecewise, because engines change algorithm (one-shot, two-shot, NCCL) as messages grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.kernels.base import Array, KernelTime, Num, as_array, kernel_time

#: Bytes that cross a link per message byte, for n ranks.
LINK_SHARE = {"allreduce": lambda n: 2.0 * (n - 1.0) / n, "allgather": lambda n: (n - 1.0) / n, "alltoall": lambda n: (n - 1.0) / n}
#: Steps of latency on a switch.
LATENCY_S = {"allreduce": 5e-6, "allgather": 8e-6, "alltoall": 12e-6}


@dataclass(frozen=True, slots=True)
class CommFit:
    """log-log table of one collective on one (GPU, engine): seconds by message bytes for each number of ranks."""

    num_ranks: tuple[int, ...]
    message_bytes: tuple[float, ...]
    log_time: tuple[tuple[float, ...], ...]
    """One row per num_ranks."""

    @classmethod
    def from_table(cls, num_ranks: Sequence[int], message_bytes: Sequence[float], micros: Sequence[Sequence[float]], slower: float = 1.0) -> CommFit:
        """Measured microseconds, a row per rank count; `slower`: how much slower the link is than the measured one."""
        rows = tuple(tuple(float(v) for v in np.log(as_array(row) * 1e-6 * slower)) for row in micros)
        return cls(tuple(num_ranks), tuple(message_bytes[: len(rows[0])]), rows)

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, op: str = "allreduce") -> CommFit:
        """Prior without a table: alpha + bytes over the link; beyond the link's reach a network is 10 times slower."""
        sizes = tuple(float(2**e) for e in range(7, 31, 2))
        ranks = tuple(sorted({2, 4, 8, *([gpu.max_link_gpus] if gpu.max_link_gpus > 8 else [])}))
        rows = []
        for n in ranks:
            link = gpu.link_bytes_per_s * 0.75 * (1.0 if n <= gpu.max_link_gpus else 0.1)
            times = LATENCY_S[op] * (1.0 + 0.15 * np.log2(n)) + LINK_SHARE[op](float(n)) * as_array(sizes) / link
            rows.append(tuple(float(v) for v in np.log(times)))
        return cls(ranks, sizes, tuple(rows))


def _table(message_bytes: Array, fit: CommFit, row: int) -> Array:
    """Seconds at one tabulated rank count; beyond the table's last size at its last slope or linear, whichever is slower."""
    sizes, logs = np.log(fit.message_bytes), fit.log_time[row]
    x = np.log(np.maximum(message_bytes, 1.0))
    return as_array(np.exp(np.interp(x, sizes, logs) + np.maximum(x - sizes[-1], 0.0)))


def collective_time(message_bytes: Num, num_ranks: int, fit: CommFit) -> KernelTime:
    """Seconds of one collective of message_bytes per rank over num_ranks GPUs; nothing for one GPU.

    Between tabulated rank counts: linear in log2(ranks); beyond the largest: its time grown by 15 % per doubling.
    """
    size = as_array(message_bytes)
    if num_ranks <= 1:
        return kernel_time(np.zeros_like(size), 0.0, 0.0, 0.0)
    x = float(np.interp(np.log2(num_ranks), np.log2(fit.num_ranks), range(len(fit.num_ranks))))
    low = int(x)
    time = _table(size, fit, low)
    if x > low:
        time = time ** (1.0 - (x - low)) * _table(size, fit, low + 1) ** (x - low)
    time = time * 1.15 ** max(0.0, float(np.log2(num_ranks / fit.num_ranks[-1])))
    fixed = np.minimum(_table(np.full_like(size, fit.message_bytes[0]), fit, low), time)
    return kernel_time(time, time - fixed, 0.0, fixed)


def allreduce_time(message_bytes: Num, num_ranks: int, fit: CommFit) -> KernelTime:
    """Seconds of an all-reduce of a message_bytes tensor (every rank holds one)."""
    return collective_time(message_bytes, num_ranks, fit)


def allgather_time(message_bytes: Num, num_ranks: int, fit: CommFit) -> KernelTime:
    """Seconds of an all-gather whose result has message_bytes."""
    return collective_time(message_bytes, num_ranks, fit)


def alltoall_time(message_bytes: Num, num_ranks: int, fit: CommFit) -> KernelTime:
    """Seconds of one all-to-all (a dispatch, or a combine) in which a rank sends message_bytes."""
    return collective_time(message_bytes, num_ranks, fit)
