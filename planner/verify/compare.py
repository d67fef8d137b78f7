"""Predicted against measured: errors, regret of the recommended draft length, on/off calls, and what explains each gap."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner.verify.arms import Arm, Measured, drift_frac


@dataclass(frozen=True)
class Predicted:
    """What the planner said of an arm, from calibration alone."""

    acceptance_len: float
    round_s: float
    draft_s: float
    verify_s: float
    overhead_s: float
    tpot_s: float
    tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float


@dataclass(frozen=True)
class Choice:
    """One question (target, workload, batch, drafter): which draft length, off included?"""

    cell: tuple[str, str, int]
    drafter: str
    recommended_draft_len: int
    best_draft_len: int
    regret_frac: float
    """1 - tokens/s of the recommended draft length over the best measured one."""
    noise_frac: float
    """What the duplicate arm of the cell differs by: regret below it is not told from zero."""
    on_off_clear: bool
    """Whether the measurement itself tells on from off: the best draft length and off differ by more than duplicates do, in this cell and
    in the median of the run."""

    @property
    def on_off_right(self) -> bool:
        return (self.recommended_draft_len > 0) == (self.best_draft_len > 0)


@dataclass(frozen=True)
class Report:
    """Everything a verification run says; `to_json` is the contract of `draftline verify --json`."""

    engine: str
    measured: Mapping[Arm, Measured]
    predicted: Mapping[Arm, Predicted]
    choices: Sequence[Choice]
    lossless: bool | None
    """True only if outputs were compared with plain decoding and none differed."""
    lossless_detail: str
    notes: Sequence[str] = ()

    @property
    def drift(self) -> dict[str, float]:
        return drift_frac(self.measured)

    def errors(self) -> dict[str, Any]:
        """Medians over arms and means over choices."""
        both = [(self.predicted[a], m) for a, m in self.measured.items() if a in self.predicted and not a.copy]
        drafting = [(self.predicted[a], m) for a, m in self.measured.items() if a in self.predicted and a.drafter is not None]
        regrets, clear = [c.regret_frac for c in self.choices], [c for c in self.choices if c.on_off_clear]

        def median(values: Sequence[float]) -> float | None:
            return float(np.median(values)) if values else None

        return {
            "mean_regret_frac": float(np.mean(regrets)) if regrets else None,
            "max_regret_frac": max(regrets, default=None),
            "on_off_right_frac": float(np.mean([c.on_off_right for c in self.choices])) if self.choices else None,
            "on_off_clear_count": len(clear),
            "on_off_right_clear_frac": float(np.mean([c.on_off_right for c in clear])) if clear else None,
            "al_error_median": median([abs(p.acceptance_len / m.acceptance_len - 1.0) for p, m in drafting]),
            "round_error_median": median([abs(p.round_s / m.round_s - 1.0) for p, m in both]),
            "tokens_per_s_error_median": median([abs(p.tokens_per_s / m.tokens_per_s - 1.0) for p, m in both]),
            "speedup_error_median": median([abs(p.speedup / s - 1.0) for p, s in self._speedups()]),
            "drift_median": median(list(self.drift.values())),
            "drift_max": max(self.drift.values(), default=None),
        }

    def _speedups(self) -> list[tuple[Predicted, float]]:
        out = []
        for arm, seen in self.measured.items():
            off = self.measured.get(Arm(*arm.cell))
            if arm.drafter is not None and arm in self.predicted and off is not None:
                out.append((self.predicted[arm], seen.tokens_per_s / off.tokens_per_s))
        return out

    def to_json(self) -> dict[str, Any]:
        """The stable keys of the contract; one object per engine arm under `cells`."""
        cells = []
        for arm, seen in self.measured.items():
            off = self.measured.get(Arm(*arm.cell))
            predicted = self.predicted.get(arm)
            row: dict[str, Any] = asdict(arm) | {"measured": asdict(seen), "predicted": None if predicted is None else asdict(predicted)}
            if off is not None:
                row["measured"] |= speedup_of(seen, off)
            if predicted is not None:
                row["gap"] = gap(predicted, seen)
            cells.append(row)
        choices = [asdict(c) | {"cell": list(c.cell), "on_off_right": c.on_off_right} for c in self.choices]
        whole = {
            "schema_version": 1, "engine": self.engine, "cells": cells, "choices": choices, **self.errors(), "lossless": self.lossless,
            "lossless_detail": self.lossless_detail, "drift_frac": self.drift, "notes": list(self.notes),
        }  # fmt: skip
        return {k: without_nan(v) for k, v in whole.items()}


def without_nan(value: Any) -> Any:
    """What was not measured is null in JSON."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def speedup_of(seen: Measured, off: Measured) -> dict[str, float]:
    """Measured speedup over off, with the interval of the two rates combined."""
    value = seen.tokens_per_s / off.tokens_per_s
    spread = [math.log(x.tokens_per_s_high / max(x.tokens_per_s_low, 1e-12)) / 2.0 for x in (seen, off)]
    half = math.hypot(*spread)
    return {"speedup": value, "speedup_low": value * math.exp(-half), "speedup_high": value * math.exp(half)}


def gap(predicted: Predicted, seen: Measured) -> dict[str, Any]:
    """Where predicted and measured tokens/s part: acceptance, or cost and which part of it, as shares of the measured round.

    log(tokens/s predicted / measured) = log(AL predicted / measured) - log(round predicted / measured).
    """
    acceptance = math.log(predicted.acceptance_len / seen.acceptance_len)
    cost = -math.log(predicted.round_s / seen.round_s)
    parts = {
        "draft": (predicted.draft_s - seen.draft_s) / seen.round_s,
        "verify and the rest": (predicted.verify_s + predicted.overhead_s - seen.verify_s - seen.rest_s) / seen.round_s,
    }
    part = "" if math.isnan(sum(parts.values())) else ": " + max(parts, key=lambda k: abs(parts[k]))  # an engine behind HTTP does not tell
    why = "acceptance" if abs(acceptance) >= abs(cost) else "cost" + part
    return {"tokens_per_s_log": acceptance + cost, "acceptance_log": acceptance, "cost_log": cost, "round_parts_frac": parts, "why": why}


def choices(measured: Mapping[Arm, Measured], predicted: Mapping[Arm, Predicted]) -> list[Choice]:
    """For every cell and drafter: the draft length with the most predicted tokens/s against the one with the most measured."""
    drift = drift_frac(measured)
    usual = float(np.median(list(drift.values()))) if drift else math.nan
    found: dict[tuple[tuple[str, str, int], str], list[Arm]] = defaultdict(list)
    for arm in measured:
        if arm.drafter is not None and arm in predicted:
            found[arm.cell, arm.drafter].append(arm)
    out = []
    for (cell, kind), drafting in found.items():
        off = Arm(*cell)
        if off not in measured or off not in predicted:
            continue
        options = [off, *sorted(drafting, key=lambda a: a.draft_len)]
        said = max(options, key=lambda a: predicted[a].tokens_per_s)
        best = max(options, key=lambda a: measured[a].tokens_per_s)
        regret = 1.0 - measured[said].tokens_per_s / measured[best].tokens_per_s
        noise = drift.get("/".join(map(str, cell)), math.nan)
        margin = abs(max(measured[a].tokens_per_s for a in drafting) / measured[off].tokens_per_s - 1.0)
        floor = max((x for x in (noise, usual) if not math.isnan(x)), default=0.0)  # nothing to compare with hides nothing
        clear = margin > floor
        out.append(Choice(cell, kind, said.draft_len, best.draft_len, regret, noise, clear))
    return out
