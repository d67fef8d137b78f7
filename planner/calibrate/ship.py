"""From the packaged measurements to the shipped numbers: engine profiles and bands. `validate --refit` calls it from defaults.

Everything here is re-made by a test: the files hold what `shipped` returns, no more and no less.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.bands import NEAR_DOUBLINGS, OTHER_GPU, SPEEDUP_REGIMES
from planner.calibrate.engine import FITTED_ENGINES, STEP_PARAMETERS, ServedRows, fit_steps, left_out_residuals, served_rows
from planner.calibrate.rounds import ROUND_PARAMETERS, UNIT, SweepArms, fit_rounds, left_out_speedups, sweep_arms
from planner.validate.rows import Data

F = NDArray[np.float64]

REFERENCE = {
    "steps": "served decode steps without speculation (tests/data/truth/silicon_dev.csv: H100, H200, B200; three engines); calibrate.engine",
    "rounds": "draft-length sweeps of three engines (tests/data/truth/dsweeps_dev.jsonl), group-weighted, weak pull to published values"
    " (for a verified token to half of them: the rest is priced as tiles, padding, experts and samplers);"
    " planner.calibrate.rounds",
}
DATE = "2026-12-01"
SHARE = 0.8
"""Of left-out residuals that a band covers."""
SPEEDUP_TAIL = 0.07
"""Share of speedup residuals beyond each edge of a band. With few sources, what a quantile leaves out of known ones it leaves out more of
unknown ones: at 0.07 bands made without a source cover 79 % of it, at 0.10 73 %."""
POOLED_GROUPS = 2.0
"""A regime seen in so many (source, model) groups stands half on its own residuals, half on all of them."""


def fitted_numbers(data: Data) -> tuple[dict[str, float], dict[str, float], ServedRows, SweepArms]:
    """(step numbers, round numbers, the rows behind them); rounds are fitted with the new step numbers in force."""
    rows = served_rows(data)
    steps = {k: float(f"{v:.3g}") if v > 1e-9 else 0.0 for k, v in fit_steps(rows).items()}
    rounds = {k: start * UNIT for k, (start, _, _) in ROUND_PARAMETERS.items()}
    for _ in range(2):  # what turns a TPOT ratio into one of throughput depends a little on the numbers themselves
        arms = sweep_arms(data, steps | rounds)
        rounds = fit_rounds(arms)
    return steps, rounds, rows, arms


def quantile_band(residual: F) -> list[float]:
    """log(truth / predicted) at the edges of the middle SHARE, with the finite-sample correction of split conformal prediction."""
    n = len(residual)
    tail = (1.0 - SHARE) / 2.0
    low, high = max(0.0, tail - 1.0 / (n + 1.0)), min(1.0, 1.0 - tail + 1.0 / (n + 1.0))
    return [round(float(np.quantile(-residual, low)), 3), round(float(np.quantile(-residual, high)), 3)]


def anchored_residuals(rows: ServedRows, predicted: F) -> tuple[F, F]:
    """(log(predicted / measured) after scaling a series by one of its rows, |log2| of the concurrency ratio), over all ordered pairs."""
    ratio = np.log(predicted / rows.measured)
    out, distance = [], []
    for s in np.unique(rows.series):
        mine = np.flatnonzero(rows.series == s)
        for a in mine:
            others = mine[mine != a]
            out += (ratio[others] - ratio[a]).tolist()
            distance += np.abs(np.log2(rows.seqs[others] / rows.seqs[a])).tolist()
    return np.asarray(out), np.asarray(distance)


def group_quantile(residual: F, groups: NDArray[np.str_], share: float) -> float:
    """Quantile of -residual where a group of n rows weighs sqrt(n): neither does one long sweep decide, nor does a single row count as much."""
    weight = np.asarray([1.0 / np.sqrt(float((groups == g).sum())) for g in groups])
    order = np.argsort(-residual)
    place = np.cumsum(weight[order]) - weight[order] / 2.0
    return float(np.interp(share, place / weight.sum(), -residual[order]))


def speedup_bands(arms: SweepArms, residual: F) -> dict[str, list[float]]:
    """Band of the speedup by draft length: left-out residuals of a regime, shrunk to those of all by the number of groups behind them."""
    top, edges = list(SPEEDUP_REGIMES.values()), (SPEEDUP_TAIL, 1.0 - SPEEDUP_TAIL)
    regime = np.searchsorted(np.asarray(top), arms.draft_len)
    pooled = [group_quantile(residual, arms.group, e) for e in edges]
    out = {"speedup/default": [round(x, 3) for x in pooled]}
    for i, name in enumerate(SPEEDUP_REGIMES):
        mine = regime == i
        own = len(np.unique(arms.group[mine]))
        share = own / (own + POOLED_GROUPS)
        mixed = [share * group_quantile(residual[mine], arms.group[mine], e) + (1.0 - share) * p for e, p in zip(edges, pooled, strict=True)]
        out[f"speedup/{name}"] = [round(x, 3) for x in mixed]
    return out


def bands(rows: ServedRows, arms: SweepArms) -> dict[str, list[float]]:
    """Band of TPOT by regime and of the speedup, from residuals of fits that have not seen the group."""
    seen_gpu = left_out_residuals(rows, rows.group)
    new_gpu = left_out_residuals(rows, rows.gpu)
    out: dict[str, list[float]] = {"tpot/default": quantile_band(new_gpu)}
    for name, mask in (("dense", ~rows.moe), ("moe", rows.moe)):
        out[f"tpot/{name}"] = quantile_band(seen_gpu[mask])
        out[f"tpot/{name}{OTHER_GPU}"] = quantile_band(new_gpu[mask])
    residual, distance = anchored_residuals(rows, rows.predict(fit_steps(rows)))
    out["tpot/anchored"] = quantile_band(residual[distance > NEAR_DOUBLINGS])
    out["tpot/anchored-near"] = quantile_band(residual[distance <= NEAR_DOUBLINGS])
    return out | speedup_bands(arms, np.log(left_out_speedups(arms) / arms.measured))


def shipped(data: Data) -> dict[str, Any]:
    """{"overheads": {...}, "bands": {...}} as the package should hold them."""
    steps, rounds, rows, arms = fitted_numbers(data)
    overheads = {k: float(f"{v:.3g}") for k, v in {**steps, **rounds}.items()}
    return {"overheads": overheads, "bands": bands(rows, arms)}


def write(result: dict[str, Any], package: Path) -> None:
    """Put the numbers into gpu_profiles/engines/*.json and planner/data/bands.json."""
    for engine in FITTED_ENGINES:
        path = package / "gpu_profiles" / "engines" / f"{engine}.json"
        profile = json.loads(path.read_text(encoding="utf-8"))
        for name, value in result["overheads"].items():
            kind = "steps" if name in STEP_PARAMETERS else "rounds"
            key, _, arch = name.partition("@")
            if arch and arch not in profile.get("overheads_by_arch", {}):
                continue  # an engine that does not run there
            table = profile["overheads_by_arch"][arch] if arch else profile["overheads"]
            table[key] = {"value": value, "origin": "fitted", "ref": REFERENCE[kind], "date": DATE}
        path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    note = (
        "log(truth / predicted). TPOT: the edges of the middle 80 % of left-out residuals. Speedup: their 7 and 93 % quantiles, groups weighted by"
        " the square root of their size, each regime pulled to all. planner.calibrate.ship"
    )
    body = {"note": note, "date": DATE, "bands": result["bands"]}
    (package / "planner" / "data" / "bands.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
