"""The kernel models as functions of fitted numbers on rows of measured kernels, and the robust fit that finds those numbers.

A fit is robust least squares (soft_l1) on log time. The model is planner.kernels itself, so that a formula is written once. Every
number has bounds, a standard error, and is named where the rows do not identify it. scipy is loaded when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_profiles.fits import compute_dtype
from gpu_profiles.load import load_attention_kernel, load_engine
from gpu_profiles.schema import AttentionKernel, GpuProfile
from planner.calibrate.tables import Array, Rows, Stack, num, select
from planner.kernels import (
    AttentionFit,
    GemmFit,
    KernelTime,
    MoeFit,
    StateFit,
    Work,
    attention_time,
    decode_work,
    gemm_time,
    mla_work,
    moe_time,
    state_time,
    stream_time,
)
from planner.kernels.attention import VERIFY_MAX_QUERY
from planner.units import bytes_per_element

#: Rows that tell the valley of the best fit from others; more rows only sharpen where its floor is.
FEW = 1200
#: A search ends when a step lowers the cost by less than this share. FINE leaves a hundredth of the rise that one standard error makes.
ROUGH, FINE = 1e-4, 1e-6
#: Residuals beyond this many log units weigh like their size, not like its square.
ROBUST_SCALE = 0.04
#: Pull of every number to where it starts, as a log error of all rows per log unit: it decides only what the rows leave open.
PULL = 0.003
#: A log standard error above this means that the rows do not identify the number.
UNIDENTIFIED = 0.7
#: M at which the step factor of a GEMM is fitted: both sides of every tile edge, sparse between.
STEP_M = (
    1, 2, 4, 8, 15, 16, 17, 24, 32, 33, 48, 64, 65, 96, 97, 128, 129, 160, 192, 193, 224, 256, 257, 384, 385, 512, 513, 640, 768, 769,
    1024, 1025, 1280, 1281, 1536, 1537, 2048, 2049, 2560, 3072, 4096, 4097, 8192, 32768,
)  # fmt: skip

#: name: (start, lower, upper). Shares of peaks, seconds, tokens, bytes.
Spec = Mapping[str, tuple[float, float, float]]
GEMM: Spec = {
    "fixed_s": (3e-6, 5e-7, 3e-5), "per_k_s": (1e-9, 1e-11, 1e-8), "k_split": (3000.0, 200.0, 1e6), "latency_knee": (2.0, 1.0, 10.0),
    "bandwidth": (0.85, 0.3, 1.0), "flop": (0.6, 0.05, 1.0), "knee": (4.0, 1.0, 16.0), "wave_cap": (1.0, 1e-2, 20.0),
    "wave_share": (0.2, 1e-3, 1.5), "warm_share": (0.2, 1e-4, 0.6), "quant_bytes": (1.0, 1e-2, 60.0),
}  # fmt: skip
GEMM_START = {name: start for name, (start, _, _) in GEMM.items()}
STREAM: Spec = {
    "fixed_s": (7e-6, 5e-7, 8e-5), "wave_s": (2e-6, 1e-8, 5e-5), "cta_bandwidth": (2.0, 0.2, 10.0), "bandwidth": (0.9, 0.2, 1.0),
    "l2_share": (0.7, 0.02, 3.0), "l2_sharp": (5.0, 1.0, 12.0), "stream_knee": (2.0, 1.0, 8.0), "flop": (0.5, 0.02, 1.0),
    "knee": (2.5, 1.0, 8.0), "split_s": (1e-6, 1e-9, 1e-4), "split_tokens": (256.0, 32.0, 4096.0), "max_splits": (20.0, 1.0, 512.0),
    "ramp_s": (5e-6, 1e-8, 6e-5), "ramp_bytes": (2e7, 2e6, 3e8),
}  # fmt: skip
PREFILL: Spec = {
    "prefill_flop": (0.55, 0.02, 1.0), "prefill_fixed_s": (8e-6, 5e-7, 1e-4), "prefill_keys": (128.0, 1.0, 4096.0),
    "prefill_fill": (0.7, 0.05, 1.5),
}  # fmt: skip
MOE: Spec = {
    "fixed_s": (2e-5, 1e-6, 3e-4), "row_bytes": (4.0, 1e-2, 200.0), "per_expert_s": (5e-8, 1e-10, 5e-6), "bandwidth": (0.8, 0.1, 1.0),
    "flop": (0.5, 0.02, 1.0), "tile_rows": (32.0, 1.0, 256.0), "knee": (3.0, 1.0, 16.0),
}  # fmt: skip
STATE: Spec = {
    "fixed_s": (8e-6, 5e-7, 3e-4), "bandwidth": (0.75, 0.05, 1.0), "token_s": (1.5e-6, 1e-8, 1e-5), "token_share": (0.55, 0.02, 3.0),
    "knee": (3.0, 1.0, 10.0), "chunk_fixed_s": (3e-5, 1e-6, 1e-3), "chunk_flop": (0.08, 1e-3, 1.0),
}  # fmt: skip
SPECS: dict[str, Spec] = {"gemm": GEMM, "attention": {**STREAM, **PREFILL}, "mla": STREAM, "moe": MOE, "state": STATE}

Predict = Callable[[Mapping[str, float]], Array]


class Fit(NamedTuple):
    """Best parameters, their standard errors as log units, and the names that the rows do not identify."""

    params: dict[str, float]
    stderr: dict[str, float]
    unidentified: tuple[str, ...]


def robust_fit(  # noqa: PLR0913
    spec: Spec, predict: Predict, time_s: Array, weight: Array, starts: int = 2, *, first: Mapping[str, float] | None = None, ftol: float = 1e-8
) -> Fit:
    """Parameters that bring log predict(params) nearest to log time_s, with what the rows say of each."""
    found = search(spec, predict, time_s, weight, starts=starts, first=first, ftol=ftol)
    params = {n: float(f"{v:.4g}") for n, v in found.items()}
    return Fit(params, *uncertainty(spec, predict, time_s, weight, params))


def fit_rows(spec: Spec, model: Callable[[Rows], Predict], rows: Rows, weight: Callable[[Rows], Array], starts: int) -> Fit:
    """robust_fit that looks for the valley on FEW rows from all starts and for its floor on all rows from there."""
    few = thin(rows, FEW)
    first = search(spec, model(few), num(few, "time_s"), weight(few), starts=starts, ftol=ROUGH)
    return robust_fit(spec, model(rows), num(rows, "time_s"), weight(rows), starts=1, first=first, ftol=FINE)


def search(  # noqa: PLR0913
    spec: Spec, predict: Predict, time_s: Array, weight: Array, *, starts: int, first: Mapping[str, float] | None = None, ftol: float
) -> dict[str, float]:
    """The best of `starts` least squares: from `first` (else the middle of the spec), then from random places around."""
    from scipy.optimize import least_squares

    names = list(spec)
    start, low, high = (np.log([spec[n][i] for n in names]) for i in range(3))
    begin = start if first is None else np.log([first[n] for n in names])
    target, root, pull = np.log(time_s), np.sqrt(weight), PULL * np.sqrt(len(time_s))

    def residual(x: Array) -> Array:
        off = root * (np.log(predict(dict(zip(names, np.exp(x), strict=True)))) - target)
        return np.concatenate([off, pull * (x - start)])

    rng, best = np.random.default_rng(0), None
    for i in range(starts):
        x0 = np.clip(begin + (rng.normal(0.0, 0.6, len(names)) if i else 0.0), low + 1e-6, high - 1e-6)
        how: dict[str, Any] = {"loss": "soft_l1", "f_scale": ROBUST_SCALE, "bounds": (low, high), "max_nfev": 80, "x_scale": 0.3}
        found = least_squares(residual, x0, ftol=ftol, **how)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return dict(zip(names, np.exp(best.x).tolist(), strict=True))


def uncertainty(spec: Spec, predict: Predict, time_s: Array, weight: Array, params: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """(standard error of each number in log units, names that the rows do not identify) at fitted `params`."""
    names, root = list(spec), np.sqrt(weight)
    x = np.log([params[n] for n in names])
    low, high = (np.log([spec[n][i] for n in names]) for i in (1, 2))

    def at(point: Array) -> Array:
        return np.asarray(root * (np.log(predict(dict(zip(names, np.exp(point), strict=True)))) - np.log(time_s)), dtype=np.float64)

    here, step = at(x), 1e-3
    slope = np.stack([(at(x + step * unit) - here) / step for unit in np.eye(len(names))], axis=1)
    scale = max(1.4826 * float(np.median(np.abs(here))), 1e-3)
    # 3 log units stand for knowing nothing, so that one free number does not blow up the others
    cov = np.linalg.inv(slope.T @ slope + (scale / 3.0) ** 2 * np.eye(len(names))) * scale**2
    error = np.sqrt(np.maximum(np.diag(cov), 0.0))
    edge = (x - low < 1e-2) | (high - x < 1e-2)
    weak = tuple(n for n, e, b in zip(names, error, edge, strict=True) if b or e > UNIDENTIFIED)
    return {n: float(f"{e:.2g}") for n, e in zip(names, error, strict=True)}, weak


def halves(key: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """True for a random half of the distinct keys: a shape is fitted or predicted, never both."""
    values, index = np.unique(key, return_inverse=True)
    chosen = np.random.default_rng(1).permutation(len(values)) < len(values) / 2.0
    return np.asarray(chosen[index], dtype=bool)


def thin(rows: Rows, most: int) -> Rows:
    """At most `most` rows, drawn once and for all (a fixed seed, the order of the table).

    A draw stratified over the grid of the table was tried and predicts no better: 4.7 / 13.3 % instead of 4.7 / 13.3 % on GEMM, 3.4 / 11.8 %
    instead of 3.3 / 11.5 % on attention.
    """
    n = len(rows["time_s"])
    if n <= most:
        return rows
    return select(rows, np.random.default_rng(0).permutation(n) < most)


def mix(*columns: Array) -> npt.NDArray[np.generic]:
    """One key per combination of values."""
    key = np.zeros(len(columns[0]))
    for c in columns:
        key = key * 1009.0 + np.unique(c, return_inverse=True)[1]
    return key


# ---- GEMM ----------------------------------------------------------------------------------------------------------------------


def gemm_bytes(dtype: str) -> tuple[float, float]:
    """(weight, activation) bytes per element of a stack name such as fp8_block or int4/bf16."""
    weights, _, act = dtype.replace("_block", "").partition("/")
    return bytes_per_element(weights), bytes_per_element(act or weights)


def predict_gemm(rows: Rows, gpu: GpuProfile, dtype: str, steps: Array) -> Callable[[Mapping[str, float]], KernelTime]:
    """Times of the rows under given numbers, with the log step factors `steps` at STEP_M."""
    weight_bytes, act_bytes = gemm_bytes(dtype)
    peak, nodes, logs = compute_dtype("gemm", dtype, gpu), tuple(map(float, STEP_M)), tuple(map(float, steps))
    m, n, k = (num(rows, c) for c in "mnk")

    def predict(p: Mapping[str, float]) -> KernelTime:
        fit = GemmFit.from_params(p, gpu, peak, nodes, logs)
        return gemm_time(m, n, k, fit, weight_bytes_per_element=weight_bytes, act_bytes_per_element=act_bytes)

    return predict


def run_gemm(rows: Rows, gpu: GpuProfile, dtype: str, params: Mapping[str, float], steps: Array) -> KernelTime:
    """Times of the rows with the log step factors `steps` at STEP_M."""
    return predict_gemm(rows, gpu, dtype, steps)(params)


def gemm_weight(rows: Rows, dtype: str) -> Array:
    """Weights that fill the GPU count most; beyond M = 1100 prefill, where a rougher answer serves."""
    size = num(rows, "n") * num(rows, "k") * gemm_bytes(dtype)[0]
    return np.where(num(rows, "m") <= 1100, 1.0, 0.4) * np.where(size >= 16e6, 1.0, 0.5)


def fit_gemm(rows: Rows, gpu: GpuProfile, dtype: str) -> tuple[Fit, list[float]]:
    """Parameters and the log of the step factor at STEP_M, by turns: two on FEW rows, two on all."""
    few = thin(rows, FEW)
    first, steps = GEMM_START, np.zeros(len(STEP_M))
    for turn in range(2):
        first = search(_around(first), _times(few, gpu, dtype, steps), num(few, "time_s"), gemm_weight(few, dtype), starts=2 - turn, ftol=ROUGH)
        steps = _steps(few, gpu, dtype, first)
    for _ in range(2):
        predict = _times(rows, gpu, dtype, steps)
        found = robust_fit(_around(first), predict, num(rows, "time_s"), gemm_weight(rows, dtype), starts=1, ftol=FINE)
        first = found.params
        steps = _steps(rows, gpu, dtype, first)
    return found, [float(f"{v:.3f}") for v in steps]


def _around(params: Mapping[str, float]) -> Spec:
    """The spec of a GEMM with its start moved to `params`: later turns are pulled to the turn before."""
    return {name: (params[name], low, high) for name, (_, low, high) in GEMM.items()}


def _times(rows: Rows, gpu: GpuProfile, dtype: str, steps: Array) -> Predict:
    model = predict_gemm(rows, gpu, dtype, steps)
    return lambda p: model(p).time_s


def _steps(rows: Rows, gpu: GpuProfile, dtype: str, params: Mapping[str, float]) -> Array:
    """Log step factors at STEP_M that bring the body of the model to the rows."""
    result = run_gemm(rows, gpu, dtype, params, np.zeros(len(STEP_M)))
    body = result.time_s - result.fixed_s
    wanted = np.log(np.maximum(num(rows, "time_s") - result.fixed_s, 0.2 * body) / body)
    basis = hat_basis(np.log(num(rows, "m")), np.log(np.asarray(STEP_M, dtype=np.float64)))
    return hat_fit(basis, wanted, gemm_weight(rows, dtype) * (body / result.time_s) ** 2)


def hat_basis(x: Array, nodes: Array) -> Array:
    """Weights of linear interpolation: row i holds how much each node counts at x[i]."""
    x = np.clip(x, nodes[0], nodes[-1])
    j = np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2)
    share = (x - nodes[j]) / (nodes[j + 1] - nodes[j])
    basis = np.zeros((len(x), len(nodes)))
    basis[np.arange(len(x)), j] = 1.0 - share
    basis[np.arange(len(x)), j + 1] += share
    return basis


def hat_fit(basis: Array, wanted: Array, weight: Array) -> Array:
    """Node values nearest to `wanted` in a robust sense; nodes without rows stay between their neighbours' pull and 0."""
    values: Array = np.zeros(basis.shape[1])
    ridge = 0.3 * np.eye(len(values))
    for _ in range(10):
        error = (wanted - basis @ values) * np.sqrt(weight)
        w = weight / np.sqrt(1.0 + (error / ROBUST_SCALE) ** 2)
        values = np.asarray(np.linalg.solve(basis.T @ (basis * w[:, None]) + ridge, basis.T @ (w * wanted)), dtype=np.float64)
    return values


# ---- attention -----------------------------------------------------------------------------------------------------------------


def engine_kernel(stack: Stack, gpu: GpuProfile, kind: str) -> AttentionKernel:
    """The tile descriptor that plans use for this engine and architecture: fit and use must agree."""
    return load_attention_kernel(load_engine(stack.engine).attention_kernel_id(gpu.arch, kind))


def predict_attention(rows: Rows, gpu: GpuProfile, dtype: str, kernel: AttentionKernel) -> Predict:
    """Seconds of the rows as a benchmark measures them. Rows of one head dim at a time, as tiles depend on it.

    What does not depend on the fitted numbers is laid out once: a fit asks some hundred times.
    """
    dims, peak = num(rows, "head_dim"), compute_dtype("attention", dtype, gpu)
    names = ("num_seqs", "query_len", "context_len", "num_heads", "num_kv_heads")
    parts = [(int(d), dims == d) for d in np.unique(dims)]
    columns = [{name: num(rows, name)[mask] for name in names} for _, mask in parts]
    kw: dict[str, Any] = {"kv_bytes_per_element": bytes_per_element(dtype), "kernel": kernel}
    if (num(rows, "query_len") <= VERIFY_MAX_QUERY).all():
        work = _joined([(mask, decode_work(**c, head_dim=d, **kw)) for (d, mask), c in zip(parts, columns, strict=True)], len(dims))
        return lambda p: stream_time(work, AttentionFit.from_params(p, gpu, peak), True).time_s

    def predict(p: Mapping[str, float]) -> Array:
        fit, out = AttentionFit.from_params(p, gpu, peak), np.empty(len(dims))
        for (dim, mask), c in zip(parts, columns, strict=True):
            out[mask] = attention_time(**c, head_dim=dim, fit=fit, repeated=True, **kw).time_s
        return out

    return predict


def _joined(parts: list[tuple[npt.NDArray[np.bool_], Work]], n: int) -> Work:
    """Work of n rows out of that of the rows under each mask."""
    out = Work(*(np.empty(n) for _ in Work._fields))
    for mask, work in parts:
        for whole, part in zip(out, work, strict=True):
            whole[mask] = part
    return out


def predict_mla(rows: Rows, gpu: GpuProfile, dtype: str, kernel: AttentionKernel) -> Predict:
    """Seconds of latent attention as a benchmark measures it."""
    work = mla_work(
        num(rows, "num_seqs"), 1.0, num(rows, "context_len"), num_heads=num(rows, "num_heads"), kv_rank=512, rope_dim=64,
        kv_bytes_per_element=bytes_per_element(dtype), kernel=kernel,
    )  # fmt: skip
    peak = compute_dtype("mla", dtype, gpu)
    return lambda p: stream_time(work, AttentionFit.from_params(p, gpu, peak), True).time_s


def main_kernel(rows: Rows) -> Rows:
    """Rows of the kernel that serves head dim 128 (others, for odd head dims, are other programs); 128 mostly."""
    usual = num(rows, "head_dim") == 128
    names, counts = np.unique(rows["kernel"][usual].astype(str), return_counts=True)
    return select(rows, (rows["kernel"].astype(str) == names[np.argmax(counts)]) & (num(rows, "head_dim") <= 256))


# ---- experts and state ---------------------------------------------------------------------------------------------------------


def predict_moe(rows: Rows, gpu: GpuProfile, dtype: str) -> Predict:
    """Seconds of the experts of one layer."""
    weight_bytes, peak = gemm_bytes(dtype)[0], compute_dtype("moe", dtype, gpu)
    tokens, top_k, width, ffn, touched = (num(rows, c) for c in ("num_tokens", "top_k", "width", "ffn", "touched"))

    def predict(p: Mapping[str, float]) -> Array:
        fit = MoeFit.from_params(p, gpu, peak)
        return moe_time(
            tokens, top_k=top_k, width=width, ffn=ffn, experts_touched=touched, fit=fit, weight_bytes_per_element=weight_bytes
        ).time_s  # fmt: skip

    return predict


def predict_state(rows: Rows, gpu: GpuProfile) -> Predict:
    """Seconds of one linear-attention layer."""
    b, q, h = num(rows, "num_seqs"), num(rows, "query_len"), num(rows, "heads")

    def predict(p: Mapping[str, float]) -> Array:
        fit = StateFit.from_params(p, gpu, compute_dtype("state", "bf16", gpu))
        return state_time(b, q, h * 128.0 * 128.0 * 4.0, 8.0 * b * q * h * 128.0 * 128.0, fit).time_s

    return predict
