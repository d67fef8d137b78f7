"""Engine-level numbers: what an engine adds to kernel sums, fitted to served steps and to draft-length sweeps.

The model is linear in the added seconds, so one evaluation per term gives every feature, and a fit takes milliseconds:

    TPOT = kernel_scale K + K_launch + per_layer_s L + per_seq_s n

Robust least squares on log time, few parameters over all engines, chosen and judged by leaving out whole (model, GPU) groups: a set
per backend and precision fits better and predicts worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cases import Case, parse_case
from planner.deployment import Deployment, cached_resolve, deployment_key
from planner.errors import DraftlineError
from planner.serving import Traffic, serve
from planner.validate.rows import Data, serving_case, serving_rows

F = NDArray[np.float64]

#: name -> (start, lower bound, upper bound, unit in which it is fitted)
STEP_PARAMETERS = {"kernel_scale": (1.0, 0.5, 2.0, 1.0), "per_layer_s": (10.0, 0.0, 300.0, 1e-6), "per_seq_s": (5.0, 0.0, 200.0, 1e-6)}
"""Three numbers for all engines. With a share of launches, a share of prefill and a fixed time per step beside them, left-out groups are
predicted worse (13.2 instead of 10.5 % in the median on a GPU left out)."""
FITTED_ENGINES = ("vllm", "sglang", "trtllm")
"""Engines with served rows; they share one set of numbers."""
SOFT_L1_SCALE = 0.1
"""Residuals beyond 10 % count linearly: repeats of the same run differ by 18 % in the worst decile."""


@dataclass(frozen=True)
class ServedRows:
    """Measured rows and the features of their prediction. Arrays of equal length, seconds."""

    measured: F
    kernel: F
    launch: F
    layers: F
    seqs: F
    model: NDArray[np.str_]
    gpu: NDArray[np.str_]
    engine: NDArray[np.str_]
    series: NDArray[np.str_]
    """One deployment and traffic shape at several concurrencies, ascending."""
    deployment: NDArray[np.str_]
    moe: NDArray[np.bool_]

    def predict(self, p: Mapping[str, float]) -> F:
        """TPOT in seconds for a set of engine numbers."""
        return p["kernel_scale"] * self.kernel + self.launch + p["per_layer_s"] * self.layers + p["per_seq_s"] * self.seqs

    def take(self, mask: NDArray[np.bool_]) -> ServedRows:
        return ServedRows(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))

    @property
    def group(self) -> NDArray[np.str_]:
        """(model, GPU): what is left out together."""
        return np.char.add(np.char.add(self.model, " on "), self.gpu)


def with_overheads(dep: Deployment, **changes: float) -> Deployment:
    """The deployment under an engine that adds nothing but `changes`."""
    nothing = dict.fromkeys(dep.engine.overheads, 0.0) | {"kernel_scale": 1.0} | changes
    return replace(dep, machine=replace(dep.machine, engine=replace(dep.engine, overheads=nothing, overheads_by_arch={})))


def served_rows(data: Data) -> ServedRows:
    """Features of every clean serving row that fits its hardware."""
    groups: dict[str, list[tuple[dict[str, str], dict[str, Any]]]] = defaultdict(list)
    for row in serving_rows(data):
        case = serving_case(data, row)
        groups[deployment_key(case)].append((row, case))
    parts: list[ServedRows] = []
    for key, members in groups.items():
        members.sort(key=lambda m: int(float(m[0]["concurrency"])))
        try:
            dep = cached_resolve(key)
            _ = dep.memory
        except DraftlineError:
            continue
        label = {"model": members[0][0]["model_family"], "gpu": members[0][0]["system"], "engine": members[0][0]["backend"], "deployment": key}
        series = [f"{key}|{r['isl']}|{r['osl']}|{r['backend_version']}" for r, _ in members]
        measured = [float(r["silicon_tpot_ms"]) / 1e3 for r, _ in members]
        parts.append(features(dep, [parse_case(c) for _, c in members], measured, series=series, **label))
    return ServedRows(*(np.concatenate([getattr(p, name) for p in parts]) for name in ServedRows.__dataclass_fields__))


def features(
    dep: Deployment, cases: Sequence[Case], measured_s: Sequence[float], *, series: Sequence[str] | None = None, **labels: str
) -> ServedRows:
    """What each engine number adds to the TPOT of plain decoding cases of one deployment, beside what was measured."""
    traffic = Traffic.of_lengths(np.asarray([float(c.input_len or 1) for c in cases]), np.asarray([float(c.output_len or 1) for c in cases]))
    if all(c.context_len is not None for c in cases):
        traffic = Traffic.at_context(np.asarray([float(c.context_len or 1) for c in cases]))
    load = np.asarray([float(c.concurrency or 1) for c in cases])

    def tpot(**changes: float) -> F:
        return serve(with_overheads(dep, **changes), concurrency=load, draft_len=0.0, acceptance_len=1.0, traffic=traffic).tpot_s

    launch = tpot(kernel_scale=0.0)
    n = len(cases)
    return ServedRows(
        measured=np.asarray(measured_s, dtype=np.float64),
        kernel=tpot() - launch,
        launch=launch,
        layers=tpot(kernel_scale=0.0, per_layer_s=1.0) - launch,
        seqs=tpot(kernel_scale=0.0, per_seq_s=1.0) - launch,
        model=np.full(n, labels.get("model", dep.model.id)),
        gpu=np.full(n, labels.get("gpu", dep.gpu.id)),
        engine=np.full(n, labels.get("engine", dep.engine.id)),
        series=np.asarray(series or [""] * n),
        deployment=np.full(n, labels.get("deployment", "")),
        moe=np.full(n, dep.model.is_moe),
    )


def fit_steps(rows: ServedRows) -> dict[str, float]:
    """The step-level numbers by soft-L1 least squares on log TPOT."""
    from scipy.optimize import least_squares

    start, low, high, unit = (np.asarray(x) for x in zip(*STEP_PARAMETERS.values(), strict=True))

    def values(x: F) -> dict[str, float]:
        return dict(zip(STEP_PARAMETERS, (x * unit).tolist(), strict=True))

    def residual(x: F) -> F:
        return np.log(np.maximum(rows.predict(values(x)), 1e-7) / rows.measured)

    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=SOFT_L1_SCALE)
    return values(found.x)


def left_out_residuals(rows: ServedRows, groups: NDArray[np.str_]) -> F:
    """log(predicted / measured) of every row by a fit that has not seen its group."""
    out = np.zeros(len(rows.measured))
    for g in np.unique(groups):
        mine = groups == g
        out[mine] = np.log(rows.take(mine).predict(fit_steps(rows.take(~mine))) / rows.measured[mine])
    return out


def summary(residuals: F) -> dict[str, float]:
    error = np.abs(np.expm1(residuals))
    return {"rows": float(len(error)), "median": float(np.median(error)), "p90": float(np.quantile(error, 0.9))}


def left_out(data: Data) -> list[dict[str, Any]]:
    """Errors with groups left out and re-fitted: by (model, GPU), by GPU, by model, by engine."""
    rows = served_rows(data)
    kinds = {"(model, GPU) left out": rows.group, "GPU left out": rows.gpu, "model left out": rows.model, "engine left out": rows.engine}
    table: list[dict[str, Any]] = [{"fit": "TPOT, all rows seen", **summary(np.log(rows.predict(fit_steps(rows)) / rows.measured))}]
    table += [{"fit": f"TPOT, {name}", **summary(left_out_residuals(rows, groups))} for name, groups in kinds.items()]
    from planner.calibrate.adapt import with_own_rows

    return [*table, {"fit": "TPOT, (model, GPU) left out but 8 rows of the deployment", **summary(with_own_rows(rows))}]
