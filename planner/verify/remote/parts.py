"""What a round of an engine behind HTTP is made of, as far as arms tell: a fixed part and one that grows with D; and what a K = 0 tier costs.

A server does not say how long it drafts or verifies. Its round is TPOT x AL; over several D of one drafter it is a line, whose foot beside the plain
step says what speculation costs before the first draft token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.verify.arms import Arm, Measured
from planner.verify.compare import Predicted, Report, without_nan

#: 90 % of a normal distribution lie within so many standard errors.
Z_90 = 1.645


@dataclass(frozen=True)
class RoundLine:
    """round_s = fixed_s + per_draft_token_s x D of one drafter on one cell, 90 % half widths beside. predicted_*: the same line through the predicted
    rounds of the same D; plain_step_s: one step without speculation, None where it was not measured."""

    workload: str
    num_seqs: int
    drafter: str
    draft_lens: tuple[int, ...]
    fixed_s: float
    fixed_half_s: float
    per_draft_token_s: float
    per_draft_token_half_s: float
    plain_step_s: float | None
    predicted_fixed_s: float | None
    predicted_per_draft_token_s: float | None

    def why(self, draft_len: int) -> str | None:
        """Which part of the cost differs more from the prediction at this D; None where neither differs by more than its interval."""
        if self.predicted_fixed_s is None or self.predicted_per_draft_token_s is None:
            return None
        fixed, token = self.predicted_fixed_s - self.fixed_s, (self.predicted_per_draft_token_s - self.per_draft_token_s) * draft_len
        sure = {"fixed part of a round": (abs(fixed), self.fixed_half_s), "draft tokens": (abs(token), self.per_draft_token_half_s * draft_len)}
        known = {k: d for k, (d, half) in sure.items() if d > half}
        return max(known, key=lambda k: known[k]) if known else None


def line(x: Sequence[float], y: Sequence[float], error: Sequence[float]) -> tuple[float, float, float, float]:
    """Weighted least squares y = a + b x; (a, its standard error, b, its standard error). Errors grow where the points lie further from the line
    than their own errors say. Needs two different x."""
    size = np.maximum(np.asarray(error), 1e-9 * np.abs(y))
    design = np.stack([np.ones(len(x)), np.asarray(x, dtype=np.float64)], axis=1) / size[:, None]
    inverse = np.linalg.inv(design.T @ design)
    a, b = inverse @ (design.T @ (np.asarray(y) / size))
    left = float((((np.asarray(y) - a - b * np.asarray(x)) / size) ** 2).sum()) / max(1, len(x) - 2)
    grown = math.sqrt(max(1.0, left))
    return float(a), grown * math.sqrt(inverse[0, 0]), float(b), grown * math.sqrt(inverse[1, 1])


def round_lines(measured: Mapping[Arm, Measured], predicted: Mapping[Arm, Predicted]) -> list[RoundLine]:
    """One line for every cell and drafter with at least two D."""
    found: dict[tuple[tuple[str, str, int], str], list[Arm]] = defaultdict(list)
    for arm in measured:
        if arm.drafter is not None and arm.draft_len > 0:
            found[arm.cell, arm.drafter].append(arm)
    out = []
    for (cell, kind), arms in found.items():
        lengths = [a.draft_len for a in arms]
        if len(set(lengths)) < 2:
            continue
        rows = [measured[a] for a in arms]
        errors = [(m.round_high_s - m.round_low_s) / (2 * Z_90) for m in rows]
        a, a_error, b, b_error = line(lengths, [m.round_s for m in rows], errors)
        said = None
        if all(arm in predicted for arm in arms):
            rounds = [predicted[arm].round_s for arm in arms]
            said = line(lengths, rounds, errors)  # the staircase is weighed alike on both sides
        off = measured.get(Arm(*cell))
        out.append(RoundLine(
            cell[1], cell[2], kind, tuple(sorted(lengths)), a, Z_90 * a_error, b, Z_90 * b_error, None if off is None else off.round_s,
            None if said is None else said[0], None if said is None else said[2],
        ))  # fmt: skip
    return out


@dataclass(frozen=True)
class K0Tax:
    """TPOT of a K = 0 tier over that of a server without speculation, less 1, with a 90 % interval; predicted: the planner's."""

    workload: str
    num_seqs: int
    drafter: str
    tax_frac: float
    tax_low_frac: float
    tax_high_frac: float
    predicted_tax_frac: float | None


def k0_tax_of(row: Mapping[str, Any], off: Sequence[Mapping[str, Any]], predicted_frac: float | None) -> K0Tax | None:
    """The tax of one arm (a row of the journal) against the plain arms of its cell; None without times on both sides."""
    plain = [r for r in off if r["tpot_s"]]
    if not row["tpot_s"] or not plain:
        return None
    step = sum(r["tpot_s"] for r in plain) / len(plain)
    errors = [row["tpot_stderr_s"] / row["tpot_s"], math.hypot(*(r["tpot_stderr_s"] for r in plain)) / len(plain) / step]
    # two plain servers differ by more than their requests do
    between = [(r["tpot_s"] / step - 1.0) / math.sqrt(len(plain)) for r in plain]
    half = Z_90 * math.hypot(*errors, *between)
    ratio = row["tpot_s"] / step
    tax = (ratio - 1.0, ratio * math.exp(-half) - 1.0, ratio * math.exp(half) - 1.0)
    return K0Tax(row["workload"], row["num_seqs"], row["kind"], *tax, predicted_frac)


@dataclass(frozen=True)
class ServedReport(Report):
    """A report on servers: beside the arms, the parts of their rounds and the price of a K = 0 tier."""

    lines: tuple[RoundLine, ...] = ()
    taxes: tuple[K0Tax, ...] = ()

    def to_json(self) -> dict[str, Any]:
        whole = super().to_json()
        by = {(r.workload, r.num_seqs, r.drafter): r for r in self.lines}
        for cell in whole["cells"]:
            found = by.get((cell["workload"], cell["num_seqs"], cell["drafter"]))
            part = found.why(cell["draft_len"]) if found is not None else None
            if part is not None and cell.get("gap", {}).get("why") == "cost":
                cell["gap"]["why"] = f"cost: {part}"
        return whole | {"round_lines": [without_nan(vars(r)) for r in self.lines], "k0_tiers": [without_nan(vars(t)) for t in self.taxes]}
