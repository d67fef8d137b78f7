"""Is there a step in a latency curve? Candidate positions are tested by BIC against no step and against a mere change of slope.

A curve of times over rows (or tokens) is a line plus terms at candidate edges: a hinge (the slope changes) or a step (the level
jumps). Terms enter while they lower BIC = n ln(RSS/n) + k ln n. Positions are the tile edges that a kernel may have, never searched
freely, so that noise cannot invent one. Errors are relative: every residual counts as a share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
#: A difference of 6 and more is called strong evidence (Kass and Raftery 1995).
STRONG = 6.0
#: A candidate counts where points lie within this factor of it (32 and 40 rows, with 8 query heads per KV head).
NEAR = 1.3


class Term(NamedTuple):
    kind: str
    """step | hinge"""
    edge: float


@dataclass(frozen=True, slots=True)
class Step:
    """A jump of the time just above `edge` rows."""

    edge: float
    height_s: float
    height_frac: float
    """Height as a share of the fitted time at the edge."""
    delta_bic: float
    """BIC of the best model without this step minus that with it; above 6 is strong."""


def _column(term: Term, x: Array) -> Array:
    above = x > term.edge
    return np.where(above, 1.0, 0.0) if term.kind == "step" else np.where(above, x - term.edge, 0.0)


def _solve(terms: Sequence[Term], x: Array, time_s: Array) -> tuple[float, Array]:
    """(BIC, coefficients) of the line with these terms under relative errors."""
    design = np.column_stack([np.ones_like(x), x, *(_column(t, x) for t in terms)]) / time_s[:, None]
    coefficients, *_ = np.linalg.lstsq(design, np.ones_like(x), rcond=None)
    residual = design @ coefficients - 1.0
    n = len(x)
    rss = max(float(residual @ residual), 1e-12 * n)  # repeats to a millionth are not evidence
    return n * float(np.log(rss / n)) + (2 + len(terms)) * float(np.log(n)), np.asarray(coefficients, dtype=np.float64)


def _grow(pool: Sequence[Term], x: Array, time_s: Array) -> tuple[float, list[Term]]:
    """Forward selection by BIC."""
    chosen: list[Term] = []
    best = _solve(chosen, x, time_s)[0]
    while len(chosen) + 3 < len(np.unique(x)):
        options = [(_solve([*chosen, t], x, time_s)[0], t) for t in pool if t not in chosen]
        if not options or min(options)[0] >= best:
            break
        best, term = min(options)
        chosen.append(term)
    return best, chosen


def _bracketed(edge: float, x: Array) -> bool:
    """Points close on both sides of the edge: a jump anywhere in a wide gap is not a step at its end."""
    below, above = x[x <= edge], x[x > edge]
    return bool(len(below) and len(above) and below.max() >= edge / NEAR and above.min() <= max(edge + 1.0, edge * NEAR))


def find_steps(x: Sequence[float], time_s: Sequence[float], candidates: Sequence[float]) -> list[Step]:
    """Steps at `candidates` that the curve supports, strongest evidence first.

    x: rows or tokens, repeats allowed; time_s: seconds; a candidate c is a jump between c and the next x above it. A candidate without
    points close on both sides is passed over.
    """
    xs, ts = np.asarray(x, dtype=np.float64), np.asarray(time_s, dtype=np.float64)
    inside = [float(c) for c in candidates if _bracketed(float(c), xs)]
    pool = [Term(kind, c) for c in inside for kind in ("hinge", "step")]
    bic, chosen = _grow(pool, xs, ts)
    found = []
    for term in chosen:
        if term.kind != "step":
            continue
        without = min(_grow([t for t in pool if t != term], xs, ts)[0], _solve([t for t in chosen if t != term], xs, ts)[0])
        coefficients = _solve(chosen, xs, ts)[1]
        height = float(coefficients[2 + chosen.index(term)])
        level = coefficients[0] + coefficients[1] * term.edge
        level += sum(c * float(_column(t, np.asarray([term.edge]))[0]) for t, c in zip(chosen, coefficients[2:], strict=True))
        if height > 0 and without - bic >= STRONG:
            found.append(Step(term.edge, height, height / float(level), without - bic))
    return sorted(found, key=lambda s: -s.delta_bic)
