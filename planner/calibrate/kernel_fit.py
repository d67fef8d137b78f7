"""Fits one stack of the public kernel tables (planner.calibrate.refit goes through all of them).

One fit per (GPU, engine, dtype) with few parameters, never per model or shape. Half of the shapes are fitted and the other half
predicted, which gives the error and the band; the shipped numbers are then fitted on all of them. Of many rows a sample is fitted
(`Job.most`), and all are judged. Files by one name in the package, `*sample.csv`, hold end-to-end runs and are none of this module's
business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_profiles.load import load_gpu
from gpu_profiles.schema import GpuProfile
from planner.calibrate import tables
from planner.calibrate.kernel_models import (
    MOE,
    PREFILL,
    SPECS,
    STATE,
    STREAM,
    Fit,
    Predict,
    Spec,
    engine_kernel,
    fit_gemm,
    fit_rows,
    gemm_bytes,
    halves,
    main_kernel,
    mix,
    predict_attention,
    predict_mla,
    predict_moe,
    predict_state,
    robust_fit,
    run_gemm,
    thin,
)
from planner.calibrate.tables import Array, Rows, Stack, num, select
from planner.units import bytes_per_element

#: Shapes on the common grid of the tables: below, kernels are launch bound and of other kinds.
GEMM_LEAST = 1024
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Job:
    """One stack to fit: its model, what may not be split between the halves, and the rows that the error is told of."""

    op: str
    stack: Stack
    gpu: GpuProfile
    spec: Spec
    predict: Callable[[Rows], Predict]
    key: Callable[[Rows], npt.NDArray[np.generic]]
    judged: Callable[[Rows], Mask]
    weight: Callable[[Rows], Array] = lambda r: np.ones(len(r["time_s"]))
    most: int = 4000
    """Rows that are fitted; where a table has more, a draw of them that is the same every time."""
    starts: int = 3
    apart: Callable[[Rows], Mask] | None = None
    """Rows that may be another program: fitted with the others unless these do not predict them."""

    def fit(self, rows: Rows) -> tuple[Fit, list[float]]:
        """Numbers (and step factors, for a GEMM) of these rows."""
        rows = thin(rows, self.most)
        if self.op == "gemm":
            return fit_gemm(rows, self.gpu, self.stack.dtype)
        return fit_rows(self.spec, self.predict, rows, self.weight, self.starts), []

    def times(self, rows: Rows, fit: Fit, steps: list[float]) -> Array:
        """Predicted seconds of these rows."""
        if self.op == "gemm":
            return run_gemm(rows, self.gpu, self.stack.dtype, fit.params, np.asarray(steps)).time_s
        return self.predict(rows)(fit.params)


class Outcome(NamedTuple):
    """Fit on all rows; errors of a fit on half of the shapes, on that half and on the other one."""

    fit: Fit
    steps: list[float]
    fitted: tuple[float, float]
    """Median and 90th percentile of |predicted / measured - 1|."""
    held_out: tuple[float, float]
    band: tuple[float, float]
    """Measured / predicted at the 10th and 90th percentile of the other half."""
    single: Fit | None = None
    """Fit of the rows kept apart."""


#: Error at the 90th percentile beyond which rows are taken for another program.
ANOTHER = 0.25


def run_job(job: Job) -> Outcome:
    """Fits a half and judges it on the other, then fits all; rows that turn out to be another program are fitted on their own."""
    if job.apart is None:
        return _run(job)
    rest, odd = (replace(job, apart=None, stack=job.stack._replace(rows=r)) for r in _part(job.stack.rows, job.apart(job.stack.rows)))
    if len(odd.stack.rows["time_s"]) < tables.FEWEST_ROWS or len(rest.stack.rows["time_s"]) < tables.FEWEST_ROWS:
        return _run(job)
    whole = rest.fit(rest.stack.rows)
    seen, _ = score(rest.times(odd.stack.rows, *whole), num(odd.stack.rows, "time_s"), odd.judged(odd.stack.rows))
    return _run(rest, whole)._replace(single=odd.fit(odd.stack.rows)[0]) if seen[1] > ANOTHER else _run(replace(job, apart=None))


def _part(rows: Rows, mask: Mask) -> tuple[Rows, Rows]:
    return select(rows, ~mask), select(rows, mask)


def _run(job: Job, whole: tuple[Fit, list[float]] | None = None) -> Outcome:
    """`whole`: the fit of all rows where it is there already."""
    half = halves(job.key(job.stack.rows))
    mine, other = select(job.stack.rows, half), select(job.stack.rows, ~half)
    found = job.fit(mine)
    fitted, _ = score(job.times(mine, *found), num(mine, "time_s"), job.judged(mine))
    held_out, band = score(job.times(other, *found), num(other, "time_s"), job.judged(other))
    return Outcome(*(whole or job.fit(job.stack.rows)), fitted, held_out, band)


def score(predicted: Array, truth: Array, judged: Mask) -> tuple[tuple[float, float], tuple[float, float]]:
    """((median, p90) of the absolute error, (10th, 90th percentile) of measured / predicted)."""
    ratio = (truth / predicted)[judged]
    if not len(ratio):
        raise ValueError("none of the rows that the error is told of")
    median, p90 = np.quantile(np.abs(1.0 / ratio - 1.0), [0.5, 0.9])
    low, high = np.quantile(ratio, [0.1, 0.9])
    return (short(median), short(p90)), (short(low), short(high))


def short(value: float) -> float:
    """Three digits: the file stays small and diffs readable."""
    return float(f"{value:.3g}")


# ---- one job per stack ---------------------------------------------------------------------------------------------------------


def gemm_job(s: Stack) -> Job:
    """Weights that fill the GPU (16 MB) and at most 4096 rows are what the error is told of."""
    size = gemm_bytes(s.dtype)[0]
    kept = select(s.rows, (num(s.rows, "n") >= GEMM_LEAST) & (num(s.rows, "k") >= GEMM_LEAST))
    return Job(
        "gemm", s._replace(rows=kept), load_gpu(s.gpu), SPECS["gemm"], lambda r: lambda p: np.empty(0), most=6000,
        key=lambda r: mix(num(r, "n"), num(r, "k")), judged=lambda r: (num(r, "m") <= 4096) & (num(r, "n") * num(r, "k") * size >= 16e6),
    )  # fmt: skip


def attention_job(s: Stack) -> Job:
    """Contexts from 512 and head dim 128, as fixed costs rule below."""
    gpu = load_gpu(s.gpu)
    kernel, rows = engine_kernel(s, gpu, "gqa"), main_kernel(s.rows)
    s = s._replace(rows=rows)
    if s.gpu == "l40s":  # KV that fits into its large L2 was read from there: no memory speed to see
        kv = num(rows, "num_seqs") * num(rows, "context_len") * num(rows, "num_kv_heads") * num(rows, "head_dim") * 2.0
        s = from_memory(s, gpu, kv * bytes_per_element(s.dtype))
    return Job(
        "attention", s, gpu, STREAM, lambda r: predict_attention(r, gpu, s.dtype, kernel),
        key=lambda r: mix(*(num(r, c) for c in ("num_seqs", "num_heads", "num_kv_heads", "head_dim"))),
        judged=lambda r: (num(r, "context_len") >= 512) & (num(r, "head_dim") == 128), most=5000,
        weight=lambda r: np.where(num(r, "context_len") >= 512, 1.0, 0.25) * np.where(num(r, "head_dim") == 128, 1.0, 0.3),
        apart=lambda r: num(r, "num_heads") == num(r, "num_kv_heads"),
    )  # fmt: skip


def mla_job(s: Stack) -> Job:
    gpu = load_gpu(s.gpu)
    kernel = engine_kernel(s, gpu, "mla")
    return Job(
        "mla", s, gpu, STREAM, lambda r: predict_mla(r, gpu, s.dtype, kernel), key=lambda r: mix(num(r, "num_seqs"), num(r, "num_heads")),
        judged=lambda r: num(r, "context_len") >= 512,
    )  # fmt: skip


def from_memory(s: Stack, gpu: GpuProfile, moved: Array) -> Stack:
    """Without the rows that are faster than memory: what they moved lay in L2, where a served step does not find it."""
    return s._replace(rows=select(s.rows, moved / gpu.bytes_per_s < num(s.rows, "time_s")))


def moe_job(s: Stack) -> Job:
    gpu = load_gpu(s.gpu)
    s = from_memory(s, gpu, num(s.rows, "touched") * num(s.rows, "width") * num(s.rows, "ffn") * 3.0 * gemm_bytes(s.dtype)[0])
    return Job(
        "moe", s, gpu, MOE, lambda r: predict_moe(r, gpu, s.dtype), judged=lambda r: num(r, "num_tokens") <= 4096,
        key=lambda r: mix(*(num(r, c) for c in ("width", "ffn", "num_experts"))),
    )  # fmt: skip


def state_job(s: Stack) -> Job:
    """The error is told of decode and verify rows."""
    gpu = load_gpu(s.gpu)
    s = from_memory(s, gpu, num(s.rows, "num_seqs") * num(s.rows, "heads") * 2.0 * 4.0 * 128.0 * 128.0)
    return Job(
        "state", s, gpu, STATE, lambda r: predict_state(r, gpu), key=lambda r: mix(num(r, "num_seqs"), num(r, "heads")),
        judged=lambda r: num(r, "prefill") == 0,
    )  # fmt: skip


def with_prefill(done: Outcome, more: Stack) -> Outcome:
    """Adds the four prefill numbers of attention to a decode fit."""
    gpu, rows = load_gpu(more.gpu), main_kernel(more.rows)
    rows = thin(select(rows, num(rows, "query_len") > 32), 3000)
    if len(rows["time_s"]) < tables.FEWEST_ROWS:
        return done
    base, predict = done.fit.params, predict_attention(rows, gpu, more.dtype, engine_kernel(more, gpu, "gqa"))
    f = robust_fit(PREFILL, lambda p: predict({**base, **p}), num(rows, "time_s"), np.ones(len(rows["time_s"])))
    params, error = {**base, **f.params}, {**done.fit.stderr, **f.stderr}
    return done._replace(fit=Fit(params, error, (*done.fit.unidentified, *f.unidentified)))
