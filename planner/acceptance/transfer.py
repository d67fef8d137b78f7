"""Carrying an acceptance length from one draft length to another, by drafter kind.

The survival of drafts follows one law with a level and a shape:

    -ln s_i = h * i ** (exponent - level_slope * (ln h + 2))

`h` is the hazard of the first position (s_1 = exp(-h)), solved from the one acceptance length that is known. An exponent of 1 with
slope 0 is independent acceptance; above 1 the conditional rates fall with position (EAGLE, MTP, DFlash, DSpark), below 1 they rise
(n-gram: a match that held so far is a good match). The exponent is one number per drafter KIND, the slope one number for all kinds:
drafters that accept little are a mixture of easy and hard positions, which flattens the decay. `ln h = -2` (s_1 = 0.87) is where the
slope has no effect. Nothing here is per model.

The numbers are fitted by `fit_transfer` from tests/data/truth/al_transfer_dev.jsonl and kept in planner/data/transfer.json.
All lengths are tokens, the bonus token included (AL in 1..1+D).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, suggest

Floats = NDArray[np.float64]

KINDS = ("external", "eagle3", "mtp", "dflash", "dspark", "pard", "ngram", "suffix")
#: Kinds whose exponent comes from rows; the others borrow (see `BORROWED`).
FITTED_KINDS = ("eagle3", "mtp", "dspark", "dflash")
_PIVOT = 2.0
_POINT_NOISE, _EXPONENT_SPREAD = 0.015, 0.15
"""Relative noise of one measured AL, and how far a drafter's exponent strays from its kind's: how far two points may bend the law."""
_MAX_SCORED_D = 8
_EXPONENTS = np.round(np.arange(1.0, 1.601, 0.01), 2)
_RISING_EXPONENTS = np.round(np.arange(0.50, 1.101, 0.01), 2)
"""n-gram."""
_SLOPES = np.round(np.arange(0.0, 0.161, 0.02), 2)
_BORROWED_WIDTH = 1.5
_POOL = 1.0
"""Weight of the other kinds' mean loss, in groups: a kind with few sources leans on the rest."""
#: Kinds without rows of their own: (whose law, why). external: iid was as good as any decay on the one public source
#: (conditional rates flat); suffix matches like n-gram; PARD is a small LM that drafts in one masked pass, between the two.
BORROWED = {
    "external": (None, "independent acceptance: conditional rates were flat on the one public source"),
    "suffix": ("ngram", "same mechanism as n-gram: a copied match"),
    "pard": ("dflash", "one masked pass like DFlash; no rows of its own"),
}


@dataclass(frozen=True, slots=True)
class Law:
    """Shape of a survival curve; see the module text. `scatter_up`/`scatter_down`: 80 % relative error of AL per e-fold of D."""

    exponent: float = 1.0
    level_slope: float = 0.0
    scatter_up: float = 0.08
    scatter_down: float = 0.05

    def survival(self, hazard: float, positions: Floats) -> Floats:
        """s_i at the 1-based `positions` for a first-position hazard (s_1 = exp(-hazard))."""
        if hazard <= 0:
            return np.ones_like(positions)
        if math.isinf(hazard):
            return np.zeros_like(positions)
        power = self.exponent - self.level_slope * (math.log(hazard) + _PIVOT)
        return np.exp(-np.minimum(hazard * positions**power, 700.0))

    def acceptance_len(self, hazard: float, draft_len: int) -> float:
        """AL(D) = 1 + s_1 + ... + s_D (tokens per round, bonus included)."""
        return 1.0 + float(self.survival(hazard, _positions(draft_len)).sum())

    def solve(self, acceptance_len: float, draft_len: int) -> float:
        """The hazard at which AL(draft_len) is `acceptance_len`; 0 for 1 + D, infinity for 1."""
        if acceptance_len >= 1 + draft_len - 1e-12:
            return 0.0
        if acceptance_len <= 1.0 + 1e-12:
            return math.inf
        return _solve(self, float(acceptance_len), int(draft_len))


def _positions(n: int) -> Floats:
    return np.arange(1, n + 1, dtype=np.float64)


@lru_cache(maxsize=8192)
def _solve(law: Law, acceptance_len: float, draft_len: int) -> float:
    low, high = -60.0, 6.5
    for _ in range(70):
        mid = (low + high) / 2
        if law.acceptance_len(math.exp(mid), draft_len) > acceptance_len:
            low = mid
        else:
            high = mid
    return math.exp((low + high) / 2)


@lru_cache(maxsize=1)
def transfer_data() -> dict[str, Any]:
    """The fitted numbers with their sources, as shipped."""
    text = resources.files("planner").joinpath("data/transfer.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def check_kind(kind: object, where: str = "drafter.kind") -> str:
    """The kind itself, or an error that lists the kinds and suggests one."""
    if not isinstance(kind, str) or kind not in KINDS:
        hint = suggest(kind, KINDS) if isinstance(kind, str) else ""
        raise InputError("unknown drafter kind", where=where, got=kind, expected="one of " + ", ".join(KINDS), hint=hint)
    return kind


@lru_cache(maxsize=16)
def law_for(kind: str) -> Law:
    """The law of a drafter kind."""
    data = transfer_data()
    row = data["kinds"][check_kind(kind)]
    return Law(row["exponent"], row["level_slope"], row["scatter_up"], row["scatter_down"])


def carry(acceptance_len: float, from_draft_len: int, to_draft_len: int, kind: str) -> float:
    """AL expected at `to_draft_len` from the AL measured at `from_draft_len`; the measured value itself where they are equal."""
    if from_draft_len == to_draft_len:
        return acceptance_len
    law = law_for(kind)
    return law.acceptance_len(law.solve(acceptance_len, from_draft_len), to_draft_len)


def bend(law: Law, anchors: Sequence[tuple[int, float]]) -> tuple[Law, float]:
    """The law with the exponent that several (D, AL) ask for (a ridge holds it near the kind's), and its hazard."""
    last, value = anchors[-1]
    base = law.solve(value, last)
    if len(anchors) == 1 or base == 0.0 or math.isinf(base):
        return law, base
    best, best_cost = law, math.inf
    for shift in np.arange(-0.4, 0.401, 0.05):
        trial = replace(law, exponent=law.exponent + float(shift))
        hazard = trial.solve(value, last)
        modelled = 1.0 + np.cumsum(trial.survival(hazard, _positions(last)))
        misfit = sum((math.log(modelled[d - 1] / al) / _POINT_NOISE) ** 2 for d, al in anchors[:-1]) / (len(anchors) - 1)
        cost = misfit + (shift / _EXPONENT_SPREAD) ** 2
        if cost < best_cost:
            best, best_cost = trial, cost
    return best, best.solve(value, last)


def band(kind: str, from_draft_len: int, to_draft_len: int) -> tuple[float, float]:
    """80 % relative half-widths (down, up) of an AL carried between draft lengths; (0, 0) where it was measured.

    From residuals of curves whose whole source was left out, as a scale per e-fold of D and direction; symmetric.
    """
    if to_draft_len in (0, from_draft_len):
        return 0.0, 0.0
    law = law_for(kind)
    folds = math.log(to_draft_len / max(1, from_draft_len))
    width = law.scatter_up * folds if folds > 0 else -law.scatter_down * folds
    return min(width, 0.6), min(width, 0.6)


# ---------------------------------------------------------------- fitting and its honest test


@dataclass(frozen=True, slots=True)
class _Curve:
    kind: str
    group: str
    source: str
    pairs: tuple[tuple[int, float, int, float], ...]


def _curves(rows: Iterable[Mapping[str, Any]], kinds: Sequence[str], max_d: int) -> list[_Curve]:
    out = []
    for row in rows:
        points = [(int(p["D"]), float(p["AL"])) for p in row["points"] if p["AL"] and p["D"] <= max_d]
        pairs = tuple((a, x, b, y) for a, x in points for b, y in points if a != b)
        if pairs and row["drafter_kind"] in kinds:
            out.append(_Curve(row["drafter_kind"], row["group"], row["source_root"], pairs))
    return out


def _errors(table: Floats, curves: Sequence[_Curve]) -> list[Floats]:
    """Relative errors of every ordered pair of every curve, from a table AL[level, D-1] that rises with level."""
    a, x, b, y = np.array([pair for c in curves for pair in c.pairs]).T
    level = np.arange(len(table), dtype=np.float64)
    at, predicted = np.empty_like(x), np.empty_like(x)
    for d in np.unique(a):
        at[a == d] = np.interp(x[a == d], table[:, int(d) - 1], level)
    for d in np.unique(b):
        predicted[b == d] = np.interp(at[b == d], level, table[:, int(d) - 1])
    return np.split(predicted / y - 1, np.cumsum([len(c.pairs) for c in curves])[:-1])


def _table(exponent: float, slope: float, max_d: int) -> Floats:
    """AL for a ladder of levels and D = 1..max_d: the law of `Law.survival`, all levels at once."""
    log_h = np.linspace(math.log(12.0), math.log(1e-5), 900)[:, None]
    hazard = np.exp(log_h + (exponent - slope * (log_h + _PIVOT)) * np.log(_positions(max_d)))
    return np.asarray(1.0 + np.cumsum(np.exp(-np.minimum(hazard, 700.0)), axis=1))


@dataclass(frozen=True)
class _Losses:
    """errors[slope][exponent][curve]: every candidate law tried once on every curve."""

    curves: list[_Curve]
    errors: list[list[list[Floats]]]
    mean_abs: Floats

    @staticmethod
    def of(curves: list[_Curve], max_d: int = _MAX_SCORED_D) -> _Losses:
        errors = []
        for slope in _SLOPES:
            tables = (_table(float(e), float(slope), max_d) for e in _EXPONENTS)
            errors.append([_errors(table, curves) for table in tables])
        mean_abs = np.array([[[np.abs(e).mean() for e in by_curve] for by_curve in by_exp] for by_exp in errors])
        return _Losses(curves, errors, mean_abs)

    def group_means(self, kind: str, keep: set[int]) -> list[Floats]:
        groups: dict[str, list[int]] = {}
        for n in sorted(keep):
            if self.curves[n].kind == kind:
                groups.setdefault(self.curves[n].group, []).append(n)
        return [self.mean_abs[:, :, idx].mean(axis=2) for idx in groups.values()]

    def choose(self, keep: set[int]) -> tuple[int, dict[str, int]]:
        """Indices of the shared slope and of each kind's exponent with the least mean error per source group."""
        means = {k: self.group_means(k, keep) for k in FITTED_KINDS}
        goals = {}
        for kind in FITTED_KINDS:
            others = [m for k, ms in means.items() if k != kind for m in ms]
            goals[kind] = np.sum(means[kind], axis=0) + _POOL * np.mean(others, axis=0)
        slope = int(np.argmin(sum(g.min(axis=1) for g in goals.values())))
        return slope, {k: int(np.argmin(g[slope])) for k, g in goals.items()}

    def left_out(self, by: str) -> list[tuple[_Curve, Floats]]:
        """Errors of each curve under the law chosen without its group (by='group') or whole source (by='source')."""
        out: list[tuple[_Curve, Floats]] = []
        for value in sorted({getattr(c, by) for c in self.curves}):
            keep = {n for n, c in enumerate(self.curves) if getattr(c, by) != value}
            slope, exponents = self.choose(keep)
            out += [(c, self.errors[slope][exponents[c.kind]][n]) for n, c in enumerate(self.curves) if n not in keep]
        return out


def laws_without(rows: Sequence[Mapping[str, Any]], by: str) -> Iterator[tuple[str, dict[str, Law]]]:
    """Each group (by='group') or source (by='source') with the laws of the fitted kinds chosen without it."""
    losses = _Losses.of(_curves(rows, FITTED_KINDS, _MAX_SCORED_D))
    for value in sorted({getattr(c, by) for c in losses.curves}):
        slope, exponents = losses.choose({n for n, c in enumerate(losses.curves) if getattr(c, by) != value})
        yield value, {k: Law(float(_EXPONENTS[e]), float(_SLOPES[slope])) for k, e in exponents.items()}


def _scatter(left_out: Iterable[tuple[_Curve, Floats]], up: bool) -> float:
    """80 % quantile of |relative error| per e-fold of D, curves weighted alike."""
    values, weights = [], []
    for curve, errors in left_out:
        rel = [abs(e) / abs(math.log(b / a)) for e, (a, _, b, _) in zip(errors, curve.pairs, strict=True) if (b > a) == up]
        values += rel
        weights += [1 / len(rel)] * len(rel) if rel else []
    order = np.argsort(values)
    cumulative = np.cumsum(np.array(weights)[order])
    return float(np.array(values)[order][np.searchsorted(cumulative, 0.8 * cumulative[-1])])


def _widths(left_out: Sequence[tuple[_Curve, Floats]], kind: str) -> dict[bool, float]:
    """A kind's scatter up and down, drawn to that of all kinds the more the fewer groups it has, and never made narrower by it: the kinds
    with few groups are the ones whose drafters differ most. A kind without curves gets half as much again as all of them."""
    own = [(c, e) for c, e in left_out if c.kind == kind]
    groups = len({c.group for c, _ in own})
    out = {}
    for up in (True, False):
        pooled = _scatter(left_out, up)
        spread = _scatter(own, up) if own else _BORROWED_WIDTH * pooled
        out[up] = max(spread, (groups * spread + 2.0 * pooled) / (groups + 2.0))
    return out


def fit_transfer(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of planner/data/transfer.json from the rows of al_transfer_dev.jsonl. Deterministic (a grid, no optimiser)."""
    losses = _Losses.of(_curves(rows, FITTED_KINDS, _MAX_SCORED_D))
    slope_at, exponents = losses.choose(set(range(len(losses.curves))))
    slope = float(_SLOPES[slope_at])
    left = losses.left_out("source")
    kinds: dict[str, Any] = {}
    for kind in FITTED_KINDS:
        own = [(c, e) for c, e in left if c.kind == kind]
        groups = len({c.group for c, _ in own})
        widths = _widths(left, kind)
        kinds[kind] = _row(float(_EXPONENTS[exponents[kind]]), slope, widths[True], widths[False], f"{len(own)} curves, {groups} groups")
    copies = _curves(rows, ("ngram",), 64)
    tables = (_table(float(e), slope, 24) for e in _RISING_EXPONENTS)
    means = [float(np.mean([np.abs(errors).mean() for errors in _errors(table, copies)])) for table in tables]
    wide = {up: _BORROWED_WIDTH * _scatter(left, up) for up in (True, False)}
    basis = f"{len(copies)} curves, D 7..23, one source"
    kinds["ngram"] = _row(float(_RISING_EXPONENTS[int(np.argmin(means))]), slope, wide[True], wide[False], basis)
    for kind, (like, why) in BORROWED.items():
        lent = kinds[like] if like else _row(1.0, 0.0, 0, 0, "")
        kinds[kind] = {**lent, "scatter_up": round(wide[True], 4), "scatter_down": round(wide[False], 4), "basis": f"borrowed: {why}"}
    return {
        "law": "-ln s_i = h * i^(exponent - level_slope * (ln h + 2))",
        "source": "tests/data/truth/al_transfer_dev.jsonl (public rows, URL per row), D <= 8; n-gram D 7..23",
        "date": "2026-12-01",
        "kinds": {k: kinds[k] for k in KINDS},
    }


def _row(exponent: float, slope: float, up: float, down: float, basis: str) -> dict[str, Any]:
    return {"exponent": exponent, "level_slope": slope, "scatter_up": round(up, 4), "scatter_down": round(down, 4), "basis": basis}


def leave_out_table(rows: Sequence[Mapping[str, Any]], by: str = "group") -> list[dict[str, Any]]:
    """How well AL carries from one D to another when a source is left out of the fit; per kind and over all.

    `by`: 'group' (source x model) or 'source' (all models of a source). Errors are the mean over a curve's ordered pairs of
    |AL predicted / measured - 1|, then median and p90 over curves; `up` counts pairs from D <= 3 to D > 3; `covered` is the share of
    pairs inside the shipped 80 % band, `covered_left_out` inside one whose width was taken without the group or source too.
    """
    left = _Losses.of(_curves(rows, FITTED_KINDS, _MAX_SCORED_D)).left_out(by)
    width = {}
    for kind, value in sorted({(c.kind, getattr(c, by)) for c, _ in left}):
        width[kind, value] = _widths([(c, e) for c, e in left if getattr(c, by) != value], kind)
    out = []
    for kind in ("all", *FITTED_KINDS):
        part = [(c, e) for c, e in left if kind in ("all", c.kind)]
        per = [float(np.abs(e).mean()) for _, e in part]
        climbs = [np.abs([e for e, (a, _, b, _) in zip(es, c.pairs, strict=True) if a <= 3 < b]) for c, es in part]
        up = [float(u.mean()) for u in climbs if len(u)]
        pairs = [(c, e, a, b) for c, es in part for e, (a, _, b, _) in zip(es, c.pairs, strict=True)]
        inside = [abs(e) <= band(c.kind, a, b)[1] for c, e, a, b in pairs]
        unseen = [abs(e) <= width[c.kind, getattr(c, by)][b > a] * abs(math.log(b / a)) for c, e, a, b in pairs]
        out.append({
            "kind": kind, "curves": len(part), "groups": len({c.group for c, _ in part}),
            "median": _quantile(per, 0.5), "p90": _quantile(per, 0.9),
            "up_median": _quantile(up, 0.5), "up_p90": _quantile(up, 0.9), "covered": float(np.mean(inside)),
            "covered_left_out": float(np.mean(unseen)),
        })  # fmt: skip
    return out


def _quantile(values: Sequence[float], p: float) -> float:
    """Median by the usual rule, other quantiles by index (as the public score does)."""
    ordered = sorted(values)
    return float(np.median(ordered)) if p == 0.5 else ordered[min(len(ordered) - 1, int(p * len(ordered)))]
