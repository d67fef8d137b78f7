"""A microbenchmark's raw records -> a profile that `--gpu FILE` takes.

On a CPU the measured curve t(M) is the model: bandwidth from one row, rate from the most rows, and a factor by M between them, which
holds the cliff from one row to three. On a GPU the shares of the peaks are fitted first and the factor holds what they miss. Points
held out of the fit give each fit its band, widened by how far the sentinel moved. `microbench` is loaded when called, scipy too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_profiles.fits import compute_dtype
from gpu_profiles.load import load_attention_kernel, load_gpu
from gpu_profiles.schema import GpuProfile, Source
from planner.calibrate import bench_report
from planner.calibrate.bench_report import DESCRIPTORS, GEMM_EDGES, Array, Row, column, select, short, times
from planner.calibrate.kernel_models import GEMM, MOE, PREFILL, STREAM, Spec, gemm_bytes, hat_basis, robust_fit
from planner.errors import InputError, ProfileError
from planner.kernels import AttentionFit, GemmFit, MoeFit, attention_time, gemm_time, moe_time
from planner.kernels.attention import VERIFY_MAX_QUERY
from planner.units import bytes_per_element

Params = dict[str, float]

#: Held fixed where a CPU is fitted: it has no waves, no split contexts and no quantisation kernel.
CPU_GEMM: Params = {
    "per_k_s": 1e-12, "k_split": 1e6, "latency_knee": 2.0, "knee": 4.0, "wave_cap": 0.01, "wave_share": 0.0, "warm_share": 0.0, "quant_bytes": 0.0,
}  # fmt: skip
#: On a CPU memory, arithmetic and the walk over query rows add up (knees of 1), and nothing is split.
CPU_ATTENTION: Params = {
    "l2_share": 0.02, "l2_sharp": 4.0, "split_s": 1e-9, "split_tokens": 256.0, "max_splits": 1.0, "ramp_s": 1e-9, "ramp_bytes": 2e7,
    "prefill_fill": 0.05, "stream_knee": 1.0, "knee": 1.0, "cta_bandwidth": 1e6, "prefill_keys": 1.0,
}  # fmt: skip
#: Shares may exceed 1: attention multiplies in fp32 where the profile's 16-bit peak is an emulation.
CPU_MOE: Spec = {**MOE, "fixed_s": (2e-5, 1e-6, 1e-2), "per_expert_s": (1e-5, 1e-8, 1e-2), "bandwidth": (0.7, 0.05, 20.0), "flop": (0.5, 0.01, 20.0)}

#: Which measured backend stands for which engine's kernel on a GPU. vLLM, SGLang and TensorRT-LLM run FlashAttention 3 or FlashInfer:
#: without these their public tables are the better evidence, and nothing is stored under "*".
ENGINE_BACKENDS = {"builtin": ("sdpa-packed",), "transformers": ("sdpa-flash",), "*": ("fa3", "flashinfer")}
FEWEST = 6
#: Query tokens from which attention is a prompt chunk for sure.
FIRST_CHUNK = 64


@dataclass(frozen=True)
class Calibrated:
    """A fitted profile and what is worth telling about the fit."""

    profile: GpuProfile
    errors: Mapping[str, float]
    """Median |predicted / measured - 1| at the points held out, by kernel class and dtype."""


# ---- the whole -----------------------------------------------------------------------------------------------------------------


def fit_profile(records: Sequence[Row], *, base: GpuProfile | None = None, profile_id: str | None = None) -> Calibrated:
    """The profile of the device that wrote `records`. `base`: datasheet numbers of a GPU (default: found by its name)."""
    from microbench.session import results

    environments = [r["fingerprint"] for r in records if r["kind"] == "environment"]
    if not environments:
        raise InputError("not a raw file of microbench: no environment record")
    env, rows = environments[0], results(records)
    cpu = env["device"] == "cpu"
    if not select(rows, "gemm") or not select(rows, "bandwidth"):
        raise InputError("too little was measured for a profile", hint="Give a larger --budget, or run again to go on with the same raw file.")
    gpu = cpu_profile(env, rows, profile_id) if cpu else gpu_profile(env, rows, base, profile_id)
    drift = sentinel_drift(records)
    kernels: dict[str, Any] = {}
    errors: dict[str, float] = {}
    fits: dict[str, Callable[..., dict[str, Any] | None]] = {"gemm": fit_gemm, "attention": fit_attention, "moe": fit_moe}
    for op, fit in fits.items():
        for dtype in sorted({str(r["args"]["dtype"]) for r in select(rows, op)}):
            for engine, chosen in _by_engine(op, dtype, rows, cpu).items():
                entry = fit(chosen, gpu, dtype, cpu=cpu, drift=drift)
                if entry is not None:
                    kernels.setdefault(op, {}).setdefault(engine, {})[dtype] = entry
                    errors[f"{op}/{dtype}" + ("" if engine == "*" else f"/{engine}")] = entry["held_out_error"]
    calibration: dict[str, Any] = {
        "kernels": kernels, "steps": bench_report.tested_steps(rows), "environment": env, "sentinel_drift": short(drift, 3),
        "passes": [{"ok": r["ok"], "moved_frac": r["moved_frac"]} for r in records if r["kind"] == "pass"],
    }  # fmt: skip
    profile = replace(gpu, calibration=calibration)
    calibration["round"] = bench_report.round_residual(rows, profile)
    return Calibrated(profile, errors)


def _by_engine(op: str, dtype: str, rows: Sequence[Row], cpu: bool) -> dict[str, list[Row]]:
    """Engine -> the rows that stand for its kernel."""
    mine = select(rows, op, dtype=dtype)
    if cpu or op != "attention":
        # torch's fp8 GEMM is not the one that serving engines run
        return dict.fromkeys(("builtin", "transformers") if dtype == "fp8" else ("*",), mine)
    out = {}
    for engine, names in ENGINE_BACKENDS.items():
        found = next((b for b in names if select(mine, op, backend=b)), None)
        if found is not None:
            out[engine] = select(mine, op, backend=found)
    return out


def sentinel_drift(records: Sequence[Row]) -> float:
    """Log half-width that a run adds to its bands: what no repeat inside a pass can show.

    The half-range of the sentinel over the run, and no less than half of the movement that the run would have let pass.
    """
    ends = [r["time_s"] for r in records if r["kind"] == "sentinel"]
    between = float(np.ptp(np.log(ends))) / 2.0 if len(ends) > 1 else 0.0
    tolerance = max((r["tolerance_frac"] for r in records if r["kind"] == "plan"), default=0.0)
    return float(max([between, tolerance / 2.0, *(r["moved_frac"] / 2.0 for r in records if r["kind"] == "pass" and r["ok"])]))


def _band(measured: Sequence[Row], predicted: Array, drift: float) -> tuple[list[float], float]:
    """(measured / predicted at the 10th and 90th percentile of single passes, widened by drift; median absolute error)."""
    logs = np.concatenate([np.log(np.asarray(r["passes_s"]) / p) for r, p in zip(measured, predicted, strict=True)])
    low, high = np.quantile(logs, [0.1, 0.9])
    error = float(np.median(np.abs(predicted / times(measured) - 1.0)))
    return [short(float(np.exp(min(low, 0.0) - drift)), 3), short(float(np.exp(max(high, 0.0) + drift)), 3)], short(error, 3)


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(fitted, held out); with too few held out, the fitted ones judge themselves."""
    fitted, held = [r for r in rows if not r["held_out"]], [r for r in rows if r["held_out"]]
    return fitted, held if len(held) >= 3 else fitted


def _entry(params: Params, stderr: Params, held: Sequence[Row], predicted: Array, drift: float) -> dict[str, Any]:
    band, error = _band(held, predicted, drift)
    return {"p": {k: short(v) for k, v in params.items()}, "stderr_log": stderr, "band": band, "held_out_error": error, "held_out_points": len(held)}


# ---- GEMM ----------------------------------------------------------------------------------------------------------------------


def _gemm_time(rows: Sequence[Row], gpu: GpuProfile, dtype: str, p: Mapping[str, float], nodes: tuple[float, ...], step: Array) -> Any:
    fit = GemmFit.from_params(p, gpu, compute_dtype("gemm", dtype, gpu), nodes, tuple(map(float, step)))
    weight, act = gemm_bytes(dtype)
    return gemm_time(column(rows, "m"), column(rows, "n"), column(rows, "k"), fit, weight_bytes_per_element=weight, act_bytes_per_element=act)


def fit_gemm(rows: Sequence[Row], gpu: GpuProfile, dtype: str, *, cpu: bool, drift: float) -> dict[str, Any] | None:
    """Parameters, the factor by M (thousandths of log units, as the packaged fits), band and held-out error; None with too few rows."""
    fitted, held = _split(rows)
    if len(fitted) < FEWEST:
        return None
    m, t = column(fitted, "m"), times(fitted)
    nodes = step_nodes(m)
    none = np.zeros(len(nodes))
    if cpu:
        params, stderr = _cpu_gemm(fitted, gpu, dtype), {}
    else:
        found = robust_fit(GEMM, lambda p: np.asarray(_gemm_time(fitted, gpu, dtype, p, nodes, none).time_s), t, np.ones(len(t)), starts=4)
        params, stderr = dict(found.params), dict(found.stderr)
    bare = _gemm_time(fitted, gpu, dtype, params, nodes, none)
    body = bare.time_s - bare.fixed_s
    step, error = curve(np.log(m), np.log(np.maximum(t - bare.fixed_s, 0.2 * t) / body), np.log(np.asarray(nodes)))
    entry = _entry(params, stderr, held, _gemm_time(held, gpu, dtype, params, nodes, step).time_s, drift)
    return entry | {
        "step_m": list(nodes), "step": [round(1000 * float(v)) for v in step], "step_stderr": [round(1000 * float(v)) for v in error],
    }  # fmt: skip


def step_nodes(m: Array) -> tuple[float, ...]:
    """M at which the factor is free: measured on two shapes or more, or either side of a tile edge. The rest interpolates."""
    values, counts = np.unique(m, return_counts=True)
    edges = {e + side for e in GEMM_EDGES if e >= 16 for side in (0, 1) if e in values and e + 1 in values}
    nodes = tuple(float(v) for v, n in zip(values, counts, strict=True) if n >= 2 or int(v) in edges or v in (values[0], values[-1]))
    return nodes if len(nodes) >= 3 else tuple(map(float, values))


def curve(x: Array, y: Array, nodes: Array) -> tuple[Array, Array]:
    """(values at the nodes, standard errors) of the piecewise-linear curve with the least absolute residuals (by re-weighting)."""
    basis = hat_basis(x, nodes)
    weight: Array = np.ones(len(y))
    values: Array = np.zeros(len(nodes))
    ridge = 1e-6 * np.eye(len(nodes))
    for _ in range(30):
        values = np.asarray(np.linalg.solve(basis.T @ (basis * weight[:, None]) + ridge, basis.T @ (weight * y)), dtype=np.float64)
        weight = 1.0 / np.sqrt((y - basis @ values) ** 2 + 0.01**2)
    spread = 1.4826 * float(np.median(np.abs(y - basis @ values)))
    return values, spread / np.sqrt(np.maximum(basis.sum(axis=0), 1.0))


def _cpu_gemm(rows: Sequence[Row], gpu: GpuProfile, dtype: str) -> Params:
    """Bandwidth as one row reads it, the rate of the most rows; the rest is fixed."""
    m, size = column(rows, "m"), gemm_bytes(dtype)[0]
    few, many = m == m.min(), m == m.max()
    elements, t = column(rows, "n") * column(rows, "k"), times(rows)
    rate = float(np.median(2.0 * m[many] * elements[many] / t[many]))
    return {
        **CPU_GEMM, "fixed_s": gpu.launch_s, "bandwidth": float(np.median(elements[few] * size / t[few])) / gpu.bytes_per_s,
        "flop": rate / gpu.peak(compute_dtype("gemm", dtype, gpu)),
    }  # fmt: skip


# ---- attention and experts -----------------------------------------------------------------------------------------------------


def _attention_time(rows: Sequence[Row], gpu: GpuProfile, dtype: str, p: Mapping[str, float]) -> Array:
    fit, out = AttentionFit.from_params(p, gpu, compute_dtype("attention", dtype, gpu)), np.empty(len(rows))
    keys = [(int(r["args"]["head_dim"]), str(r["args"]["backend"])) for r in rows]
    for dim, backend in sorted(set(keys)):
        at = np.asarray([k == (dim, backend) for k in keys])
        part = [r for r, yes in zip(rows, at, strict=True) if yes]
        out[at] = attention_time(
            column(part, "num_seqs"), column(part, "query_len"), column(part, "context_len"), num_heads=column(part, "num_heads"),
            num_kv_heads=column(part, "num_kv_heads"), head_dim=dim, kv_bytes_per_element=bytes_per_element(dtype), fit=fit,
            kernel=load_attention_kernel(DESCRIPTORS[backend]),
        ).time_s  # fmt: skip
    return out


def fit_attention(rows: Sequence[Row], gpu: GpuProfile, dtype: str, *, cpu: bool, drift: float) -> dict[str, Any] | None:
    """Shares and times of one attention backend; None with too few rows.

    Lengths between verification and a prompt chunk belong to neither model: they are there for the steps.
    """
    fitted, held = _split([r for r in rows if not VERIFY_MAX_QUERY < r["args"]["query_len"] < FIRST_CHUNK])
    if len(fitted) < FEWEST:
        return None
    if cpu:
        params = _cpu_attention(fitted, gpu, dtype)
        return _entry(params, {}, held, _attention_time(held, gpu, dtype, params), drift)
    found = robust_fit({**STREAM, **PREFILL}, lambda p: _attention_time(fitted, gpu, dtype, p), times(fitted), np.ones(len(fitted)), starts=4)
    entry = _entry(found.params, found.stderr, held, _attention_time(held, gpu, dtype, found.params), drift)
    return entry | {"unidentified": list(found.unidentified)}


def _cpu_attention(rows: Sequence[Row], gpu: GpuProfile, dtype: str) -> Params:
    """t = a + b rows + c bytes + d FLOP, none of them negative, by robust least squares of relative errors; prefill by its FLOP rate."""
    from scipy.optimize import nnls

    peak = gpu.peak(compute_dtype("attention", dtype, gpu))
    b, h, hk, q, s, d = (column(rows, c) for c in ("num_seqs", "num_heads", "num_kv_heads", "query_len", "context_len", "head_dim"))
    t, short_query = times(rows), q <= VERIFY_MAX_QUERY
    size = bytes_per_element(dtype)
    flop = 4.0 * d * b * h * q * (s - (q - 1.0) / 2.0)
    design = np.column_stack([np.ones_like(t), b * h * q, b * (s * hk * 2.0 * d * size + q * h * 4.0 * d), flop])[short_query]
    target = t[short_query]
    weight, x = 1.0 / target, np.zeros(4)
    for _ in range(20):
        x = nnls(design * weight[:, None], target * weight)[0]
        weight = 1.0 / target / np.sqrt(1.0 + ((design @ x / target - 1.0) / 0.05) ** 2)
    fixed, per_row, per_byte, per_flop = (max(float(v), least) for v, least in zip(x, (1e-7, 1e-10, 1e-14, 1e-16), strict=True))
    long_rate = float(np.median(flop[~short_query] / t[~short_query])) if (~short_query).any() else 1.0 / per_flop
    return {
        **CPU_ATTENTION, "fixed_s": fixed, "wave_s": per_row, "bandwidth": 1.0 / (per_byte * gpu.bytes_per_s), "flop": 1.0 / (per_flop * peak),
        "prefill_flop": long_rate / peak, "prefill_fixed_s": fixed,
    }  # fmt: skip


def _moe_time(rows: Sequence[Row], gpu: GpuProfile, dtype: str, p: Mapping[str, float]) -> Array:
    fit = MoeFit.from_params(p, gpu, compute_dtype("moe", dtype, gpu))
    return moe_time(
        column(rows, "touched") * column(rows, "rows_per_expert"), top_k=1.0, width=column(rows, "width"), ffn=column(rows, "ffn"),
        experts_touched=column(rows, "touched"), fit=fit, weight_bytes_per_element=bytes_per_element(dtype),
    ).time_s  # fmt: skip


def fit_moe(rows: Sequence[Row], gpu: GpuProfile, dtype: str, *, cpu: bool, drift: float) -> dict[str, Any] | None:
    """Experts against touched experts; None with too few rows."""
    fitted, held = _split(rows)
    if len(fitted) < FEWEST:
        return None
    found = robust_fit(CPU_MOE if cpu else MOE, lambda p: _moe_time(fitted, gpu, dtype, p), times(fitted), np.ones(len(fitted)))
    entry = _entry(found.params, found.stderr, held, _moe_time(held, gpu, dtype, found.params), drift)
    return entry | {"unidentified": list(found.unidentified)}


# ---- the profile around the fits -----------------------------------------------------------------------------------------------


def stream_rates(rows: Sequence[Row], cache_bytes: float) -> dict[str, float]:
    """Bytes/s by pattern from arrays beyond the cache: the best size of each."""
    from microbench.bandwidth import ARRAYS_MOVED

    out: dict[str, float] = {}
    for r in select(rows, "bandwidth"):
        size = float(r["args"]["size_bytes"])
        if size > cache_bytes:
            pattern = str(r["args"]["pattern"])
            out[pattern] = max(out.get(pattern, 0.0), ARRAYS_MOVED[pattern] * size / r["time_s"])
    return out


def _rates(rows: Sequence[Row]) -> dict[str, float]:
    """Best FLOP/s seen by dtype; products of narrower weights count for no dtype's peak."""
    out: dict[str, float] = {}
    for r in select(rows, "gemm"):
        a = r["args"]
        if "/" in a["dtype"]:
            continue
        out[a["dtype"]] = max(out.get(a["dtype"], 0.0), 2.0 * a["m"] * a["n"] * a["k"] / r["time_s"])
    return out


def _launch(rows: Sequence[Row]) -> float:
    found = select(rows, "launch", kind="tiny")
    return short(found[0]["time_s"]) if found else 5e-6


def cpu_profile(env: Row, rows: Sequence[Row], profile_id: str | None) -> GpuProfile:
    """One thread of this processor, every number measured or stated."""
    date = str(env["date"])
    measured = Source("measured", f"draftline calibrate, one thread of {env['name']}", date)
    stated, assumed = Source("measured", "what the operating system reports", date), Source("assumed", "not measured", date)
    streams, rates = stream_rates(rows, float(env["cache_bytes"])), _rates(rows)
    best = max(streams.values())
    peaks = {d: short(r) for d, r in sorted(rates.items())}
    slug = "-".join(str(env["name"]).lower().replace("(r)", "").replace("(tm)", "").split()[:3])
    sources = {
        "memory_bytes": stated, "usable_memory_bytes": assumed, "bytes_per_s": measured, "bandwidth_eff": measured, "launch_s": measured,
        "link_bytes_per_s": assumed, "max_link_gpus": assumed, "sm_count": Source("assumed", "one thread is measured and planned for", date),
        "l2_bytes": stated, **{f"{k}.{d}": measured for k in ("peak_flop_per_s", "matmul_eff") for d in peaks},
    }  # fmt: skip
    return GpuProfile(
        id=profile_id or f"cpu-{slug}", name=f"{env['name']} (one thread)", arch="cpu", memory_bytes=float(env["memory_bytes"]),
        usable_memory_bytes=0.9 * float(env["memory_bytes"]), bytes_per_s=short(best), peak_flop_per_s=MappingProxyType(peaks),
        bandwidth_eff=short(min(streams.get("copy", best) / best, 1.0), 3), matmul_eff=MappingProxyType(dict.fromkeys(peaks, 1.0)),
        launch_s=_launch(rows), link_bytes_per_s=short(best), link_kind="memory", max_link_gpus=1, sm_count=1, l2_bytes=float(env["cache_bytes"]),
        sources=MappingProxyType(sources), notes=("Process CPU time of one thread; peaks are the best rates measured, not a datasheet's.",),
    )  # fmt: skip


def gpu_profile(env: Row, rows: Sequence[Row], base: GpuProfile | None, profile_id: str | None) -> GpuProfile:
    """The packaged profile of the GPU with measured attainable shares. An unknown GPU needs `base`: peaks are never guessed."""
    if base is None:
        try:
            base = load_gpu(str(env["name"]))
        except ProfileError as error:
            raise ProfileError(
                "the measured GPU has no packaged profile to take peaks from", got=env["name"], hint="Name the nearest one with --gpu."
            ) from error
    measured = Source("measured", f"draftline calibrate on {env['name']}", str(env["date"]))
    streams, rates = stream_rates(rows, float(env["cache_bytes"])), _rates(rows)
    shares = {d: short(min(rates[d] / p, 1.0), 3) if d in rates else base.matmul_eff[d] for d, p in base.peak_flop_per_s.items()}
    sources = dict(base.sources) | {"bandwidth_eff": measured, "launch_s": measured} | {f"matmul_eff.{d}": measured for d in rates if d in shares}
    return replace(
        base, id=profile_id or f"{base.id}-measured", bandwidth_eff=short(min(max(streams.values()) / base.bytes_per_s, 1.0), 3),
        matmul_eff=MappingProxyType(shares), launch_s=_launch(rows), aliases=(), sources=MappingProxyType(sources),
    )  # fmt: skip


def profile_text(profile: GpuProfile) -> str:
    """The file form of a profile."""
    from gpu_profiles.load import gpu_to_json

    return json.dumps(gpu_to_json(profile), indent=1, allow_nan=False) + "\n"
