"""Acceptance to expect before anything is measured: by workload and drafter kind, from public rows.

Rows are p10, median and p90 over published measurements (not over traffic) of one workload at one D; they are kept with their sources in
planner/data/acceptance_priors.json, which `build_priors` re-makes from tests/data/truth/al_ranges.csv. Where a pair has no rows, the
coding (or another known) median of that kind is scaled by how other kinds' AL - 1 compares between the two workloads, with a wide band.
AL in tokens per round, bonus included.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from planner.acceptance.transfer import check_kind
from planner.errors import InputError, suggest

WORKLOADS = ("coding", "math", "chat", "summarization", "translation", "writing", "reasoning", "qa", "rag")
#: Kinds without public rows use another's, widened. The gain (AL - 1) is not scaled.
LIKE = {"pard": "external", "suffix": "ngram"}
#: Their acceptance is the traffic's own repetition: a prior is only for listing, never for a recommendation.
UNPREDICTABLE = ("ngram", "suffix")
_FEW_MODELS = 3
_MIN_SPREAD = 0.15
"""Least half-width of AL - 1 (80 %) a prior may claim; rows of fewer than three models get twice that."""


@dataclass(frozen=True, slots=True)
class Prior:
    """AL at `draft_len`: 80 % of published rows lie between `p10` and `p90`. `has_data` False: fine to list, not to recommend on."""

    workload: str
    kind: str
    draft_len: int
    p10: float
    median: float
    p90: float
    rows: int
    models: int
    has_data: bool
    basis: str
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def priors_data() -> dict[str, Any]:
    """The prior rows with their sources, as shipped."""
    text = resources.files("planner").joinpath("data/acceptance_priors.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def workload_prior(workload: object, kind: str, *, where: str = "acceptance.workload") -> Prior:
    """The prior of a workload and drafter kind; an error names the known workloads."""
    check_kind(kind)
    if not isinstance(workload, str) or workload not in WORKLOADS:
        hint = suggest(workload, WORKLOADS) if isinstance(workload, str) else ""
        raise InputError("unknown workload", where=where, got=workload, expected="one of " + ", ".join(WORKLOADS), hint=hint)
    source_kind, notes = LIKE.get(kind, kind), []
    if kind in LIKE:
        notes.append(f"no public acceptance rows for {kind}: those of {source_kind} are used, widened")
    rows = priors_data()["rows"].get(source_kind, {})
    if workload in rows:
        row, scaled_from = rows[workload], None
    else:
        row, scaled_from = _scaled(rows, workload)
        notes.append(f"no public {workload} rows for {source_kind}: scaled from {scaled_from}, with a wide band")
    basis = f"prior: {workload} with {source_kind}, {row['rows']} published rows of {row['models']} models at D={row['draft_len']}"
    if scaled_from:
        basis = f"prior: {workload} scaled from {scaled_from} rows of {source_kind} at D={row['draft_len']}"
    widen = (1.5 if kind in LIKE else 1.0) * (1.5 if scaled_from else 1.0)
    p10, p90 = _spread(row, widen)
    if kind in UNPREDICTABLE:
        notes.append(f"{kind} acceptance is the traffic's own repetition: measure it before relying on it")
    sure = kind not in UNPREDICTABLE
    return Prior(workload, kind, row["draft_len"], p10, row["median"], p90, row["rows"], row["models"], sure, basis, tuple(notes))


def _spread(row: Mapping[str, Any], widen: float) -> tuple[float, float]:
    gain, top = row["median"] - 1, 1 + row["draft_len"]
    least = _MIN_SPREAD * (2 if row["models"] < _FEW_MODELS else 1)
    down = max((row["median"] - row["p10"]) / gain, least) * widen
    up = max((row["p90"] - row["median"]) / gain, least) * widen
    return max(1.0, 1 + gain * (1 - down)), min(float(top), 1 + gain * (1 + up))


def _scaled(rows: Mapping[str, Any], workload: str) -> tuple[dict[str, Any], str]:
    """The kind's best-known workload with its AL - 1 scaled by the ratio of the two workloads over other kinds."""
    ratios = priors_data()["gain_ratio"]
    base = max((w for w in rows if w in ratios), key=lambda w: (rows[w]["models"], rows[w]["rows"], w))
    row, factor = rows[base], ratios[workload] / ratios[base]
    cap = row["draft_len"]
    scaled = {k: 1 + min(cap * 0.98, (row[k] - 1) * factor) for k in ("p10", "median", "p90")}
    return {**row, **scaled}, base


def build_priors(ranges: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The content of acceptance_priors.json from the rows of al_ranges.csv.

    Of a pair's rows the D with the most models is kept (ties: most rows). `gain_ratio`: median over kind and D of
    (AL - 1 of the workload) / (AL - 1 of coding), both at the same D.
    """
    best: dict[str, dict[str, dict[str, Any]]] = {}
    gains: dict[tuple[str, int], dict[str, float]] = {}
    for r in ranges:
        row: dict[str, Any] = {"draft_len": int(r["D"]), "p10": float(r["p10"]), "median": float(r["median"]), "p90": float(r["p90"])}
        row |= {"rows": int(r["rows"]), "models": int(r["models"])}
        gains.setdefault((r["drafter_kind"], int(r["D"])), {})[r["workload"]] = row["median"] - 1
        mine = best.setdefault(r["drafter_kind"], {})
        kept = mine.get(r["workload"])
        if kept is None or (row["models"], row["rows"]) > (kept["models"], kept["rows"]):
            mine[r["workload"]] = row
    ratio = {w: [g[w] / g["coding"] for g in gains.values() if w in g and "coding" in g] for w in WORKLOADS}
    return {
        "what": "AL (tokens per round, bonus included) over published rows: p10, median, p90 of rows, not of traffic",
        "sources": [
            "tests/data/truth/al_ranges.csv: ranges over public rows by drafter kind, D and workload (collected 2026-12-01)",
            "https://arxiv.org/abs/2604.09557 (SPEED-Bench)",
            "https://github.com/SemiAnalysisAI/InferenceX (golden acceptance lengths)",
            "https://github.com/sgl-project/SpecForge (SpecBundle)",
            "https://github.com/vllm-project/vllm-project.github.io (post of 2026-08-23)",
        ],
        "date": "2026-12-01",
        "gain_ratio": {w: round(statistics.median(v), 3) for w, v in ratio.items() if v},
        "rows": best,
    }
