"""What a per-position list measured at one draft length says of another.

A list holds s_1..s_D of rounds that drafted D tokens. It is not the same list at another D: rounds of more drafts accept less at every
position, whatever drafts. A round starts where the last one broke off, so the longer the rounds, the fewer of them lie in easy text and
the more in hard text; block drafters feel the wider block besides. In the published lists the hazard of a position goes with D about as

    -ln s_i(D') = -ln s_i(D) * (D' / D) ** width_power

with one `width_power` for all kinds. Positions that the list does not have follow the kind's law at fixed D, whose exponent is smaller by
`width_power` (the law for one AL is s_D in rounds of D, so its exponent holds both), bent by the list itself. Lengths are tokens.

Fitted by `fit_lists` from tests/data/truth/al_transfer_dev.jsonl (one source, five models, four kinds) and kept in planner/data/transfer.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planner.acceptance.transfer import FITTED_KINDS, KINDS, Floats, Law, bend, check_kind, laws_without, transfer_data

MOST = 16
"""Largest D of the lists that are scored."""
_POWERS = np.round(np.arange(0.0, 0.401, 0.01), 2)
_FITTED_TO_D = 8
_LEVEL = 0.85
"""Quantile of the residuals that makes the 80 % band: the groups are few, so the next one is covered less often than those seen."""
#: Kinds whose residuals make one width. Left out by group, widths per kind cover 56 to 76 % and score worse: two to four groups are too few.
FAMILIES = {"sequential": ("eagle3", "mtp"), "block": ("dspark", "dflash")}
#: Kinds without lists: (whose width, whether the power is lent, why). n-gram rounds were replayed at two D (SpecDecode-Bench): from the first
#: position the power is 0.08 to 0.35, so it is lent; an external draft's conditional rates are flat, and its list is read as it stands.
_LENT = {
    "external": ("sequential", False, "no lists published: read as they stand"),
    "pard": ("block", True, "borrowed: one masked pass like DFlash"),
    "ngram": ("block", True, "borrowed: the published replays of n-gram at two D agree with it"),
    "suffix": ("block", True, "borrowed: same mechanism as n-gram"),
}
_BORROWED_WIDTH = 1.5


@dataclass(frozen=True, slots=True)
class ListLaw:
    """`width_power`: see the module text. `scatter_up`/`scatter_down`: 80 % relative error of AL at one e-fold of D, from a list; it grows
    with the square root of the folds (which scores better than in proportion)."""

    width_power: float = 0.0
    scatter_up: float = 0.08
    scatter_down: float = 0.05


@lru_cache(maxsize=16)
def list_law_for(kind: str) -> ListLaw:
    """How lists of a drafter kind carry."""
    row = transfer_data()["lists"][check_kind(kind)]
    return ListLaw(row["width_power"], row["scatter_up"], row["scatter_down"])


def fixed_width(law: Law, rates: Sequence[float], width_power: float) -> tuple[Law, float]:
    """The law of positions in rounds of one draft length, bent by a list, and its hazard."""
    anchors = tuple((n, 1.0 + total) for n, total in enumerate(np.cumsum(rates).tolist(), 1))
    return bend(replace(law, exponent=law.exponent - width_power), anchors)


def at_width(survival: Floats, measured_at: int, draft_len: int, width_power: float) -> Floats:
    """s_1..s_n of rounds of `draft_len` drafts from those of rounds of `measured_at` drafts; the same numbers where they are equal."""
    return np.asarray(survival ** ((draft_len / measured_at) ** width_power))


def lengths(survival: Floats, measured_at: int, width_power: float, block: int | None = None) -> Floats:
    """AL(0..n) from s_1..s_n of rounds of `measured_at` drafts. More drafts never give less: what a wider round would lose is not drafted."""
    most = len(survival)
    widths = np.minimum(np.arange(most + 1), most if block is None else max(block, measured_at))
    scale = (widths / measured_at) ** width_power if width_power else np.ones(most + 1)
    kept = np.arange(1, most + 1) <= np.arange(most + 1)[:, None]
    # a running sum, so that the last bit does not depend on how many positions are asked for
    table = 1.0 + np.cumsum(np.where(kept, survival ** scale[:, None], 0.0), axis=1)[:, -1]
    at = min(measured_at, most)
    table[: at + 1] = np.minimum(table[: at + 1], table[at])
    return np.asarray(np.maximum.accumulate(table))


def carried(rates: Sequence[float], to_draft_len: int, law: Law, width_power: float) -> float:
    """AL at another D from a list; a list of one rate is one AL."""
    n = len(rates)
    known = np.asarray(rates, dtype=np.float64)
    if to_draft_len > n:
        power = width_power if n > 1 else 0.0
        own, hazard = fixed_width(law, rates, power)
        beyond = own.survival(hazard, np.arange(n, to_draft_len + 1, dtype=np.float64))
        tail = np.minimum(beyond[1:] * (known[-1] / beyond[0] if beyond[0] > 0 else 0.0), known[-1])
        return float(lengths(np.concatenate([known, tail]), n, power)[to_draft_len])
    return float(lengths(known, n, width_power)[to_draft_len])


def list_band(kind: str, from_draft_len: int, to_draft_len: int) -> tuple[float, float]:
    """80 % relative half-widths (down, up) of an AL read off a list of `from_draft_len` rates; (0, 0) where it was measured."""
    if to_draft_len in (0, from_draft_len):
        return 0.0, 0.0
    own, folds = list_law_for(kind), math.log(to_draft_len / from_draft_len)
    width = min((own.scatter_up if folds > 0 else own.scatter_down) * math.sqrt(abs(folds)), 0.6)
    return width, width


# ---------------------------------------------------------------- fitting and its honest test


@dataclass(frozen=True, slots=True)
class _Pair:
    """A list, and the AL measured at another D of the same curve."""

    curve: str
    kind: str
    group: str
    rates: tuple[float, ...]
    draft_len: int
    acceptance_len: float

    @property
    def folds(self) -> float:
        return math.log(self.draft_len / len(self.rates))

    def error(self, law: Law, width_power: float) -> float:
        """Predicted / measured - 1."""
        return carried(self.rates, self.draft_len, law, width_power) / self.acceptance_len - 1.0


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[_Pair]:
    out = []
    for row in rows:
        points = [p for p in row["points"] if p["AL"] and 0 < p["D"] <= MOST]
        for p in points:
            rates = tuple(float(s) for s in p.get("per_position") or ())
            if rates and row["drafter_kind"] in FITTED_KINDS:
                out += [
                    _Pair(row["id"], row["drafter_kind"], row["group"], rates, int(q["D"]), float(q["AL"]))
                    for q in points
                    if q["D"] != len(rates)
                ]  # fmt: skip
    return out


def _power(pairs: Sequence[_Pair]) -> float:
    """The power with the least mean error of reading lists at a smaller D (D <= 8, as the laws), groups weighted alike within a kind and
    kinds alike: reading asks for no law, so nothing else is fitted with it."""
    cells: dict[str, dict[str, list[Floats]]] = {}
    for p in pairs:
        if p.folds < 0 and len(p.rates) <= _FITTED_TO_D:
            cells.setdefault(p.kind, {}).setdefault(p.group, []).append(_reading_loss(p))
    means = [np.mean([np.mean(losses, axis=0) for losses in groups.values()], axis=0) for groups in cells.values()]
    return float(_POWERS[int(np.argmin(np.sum(means, axis=0)))])


@lru_cache(maxsize=1024)
def _reading_loss(pair: _Pair) -> Floats:
    """|relative error| at every power tried."""
    return np.array([abs(pair.error(Law(), float(w))) for w in _POWERS])


def _left_out(rows: Sequence[Mapping[str, Any]], *, plain: bool = False) -> list[tuple[_Pair, float]]:
    """Every pair with its error under the laws and the power chosen without its group (source x model). plain: a power of 0."""
    pairs, out = _pairs(rows), []
    for group, laws in laws_without(rows, "group"):
        own = [p for p in pairs if p.group == group]
        if own:
            power = 0.0 if plain else _power([p for p in pairs if p.group != group])
            out += [(p, p.error(laws[p.kind], power)) for p in own]
    return out


def _scatter(errors: Sequence[tuple[_Pair, float]], kinds: Sequence[str], up: bool) -> float:
    """Quantile of |relative error| at one e-fold of D, curves weighted alike."""
    part = [(p.curve, abs(e) / math.sqrt(abs(p.folds))) for p, e in errors if p.kind in kinds and (p.folds > 0) == up]
    count = Counter(c for c, _ in part)
    ordered = sorted((value, 1.0 / count[c]) for c, value in part)
    total = np.cumsum([w for _, w in ordered])
    return float(ordered[int(np.searchsorted(total, _LEVEL * total[-1]))][0])


def fit_lists(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part `lists` of planner/data/transfer.json from the rows of al_transfer_dev.jsonl. Deterministic (a grid, no optimiser)."""
    errors, power = _left_out(rows), _power(_pairs(rows))
    widths = {name: [_scatter(errors, members, up) for up in (True, False)] for name, members in FAMILIES.items()}
    out = {}
    for name, members in FAMILIES.items():
        for kind in members:
            own = {(p.curve, p.group) for p, _ in errors if p.kind == kind}
            basis = f"{len(own)} curves, {len({g for _, g in own})} groups, one source"
            out[kind] = _row(power, widths[name], basis)
    for kind, (name, lent, why) in _LENT.items():
        out[kind] = _row(power if lent else 0.0, [_BORROWED_WIDTH * w for w in widths[name]], why)
    return {k: out[k] for k in KINDS}


def _row(power: float, widths: Sequence[float], basis: str) -> dict[str, Any]:
    return {"width_power": power, "scatter_up": round(widths[0], 4), "scatter_down": round(widths[1], 4), "basis": basis}


def lists_left_out(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How well a list carries when its group (source x model) is left out of everything: laws, power and band.

    Errors are the mean over a curve's pairs of |AL predicted / measured - 1|, then median and p90 over curves, `plain` the same for lists
    read as they stand; `covered` is the share of pairs inside an 80 % band whose width no row of the group has seen.
    """
    errors, plain = _left_out(rows), _left_out(rows, plain=True)
    width = {
        (kind, group, up): _scatter([x for x in errors if x[0].group != group], members, up)
        for members in FAMILIES.values()
        for kind in members
        for group in sorted({p.group for p, _ in errors})
        for up in (True, False)
    }
    kinds = {"all": FITTED_KINDS, "eagle3 and mtp": FAMILIES["sequential"], "dspark": ("dspark",), "dflash": ("dflash",)}
    out = []
    for name, members in kinds.items():
        for where, up in (("smaller", False), ("larger", True)):
            own = [n for n, (p, _) in enumerate(errors) if p.kind in members and (p.folds > 0) == up]
            short = [n for n in own if max(len(errors[n][0].rates), errors[n][0].draft_len) <= _FITTED_TO_D]
            for most, part in ((_FITTED_TO_D, short), (MOST, own if len(own) > len(short) else [])):
                if not part:
                    continue
                per, before = (_curve_means([table[n] for n in part]) for table in (errors, plain))
                inside = [
                    abs(e) <= width[p.kind, p.group, up] * math.sqrt(abs(p.folds)) * (1 + e) for p, e in (errors[n] for n in part)
                ]  # fmt: skip
                out.append({
                    "kind": name, "a list, to": f"{where} D, up to {most}", "curves": len(per),
                    "median": float(np.median(per)), "p90": float(np.quantile(per, 0.9)),
                    "plain_median": float(np.median(before)), "plain_p90": float(np.quantile(before, 0.9)),
                    "covered": float(np.mean(inside)),
                })  # fmt: skip
    return out


def list_pairs_left_out(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same errors over single (list, other D) pairs, both at most 8, all kinds together: the form in which published laws are compared."""
    errors, plain = _left_out(rows), _left_out(rows, plain=True)
    near = [n for n, (p, _) in enumerate(errors) if max(len(p.rates), p.draft_len) <= _FITTED_TO_D]
    parts = {
        "either way": near,
        "to smaller D": [n for n in near if errors[n][0].folds < 0],
        "to larger D": [n for n in near if errors[n][0].folds > 0],
    }
    out = []
    for name, part in parts.items():
        own, before = (np.abs([table[n][1] for n in part]) for table in (errors, plain))
        out.append({
            "a list": name, "pairs": len(part), "median": float(np.median(own)), "p90": float(np.quantile(own, 0.9)),
            "plain_median": float(np.median(before)), "plain_p90": float(np.quantile(before, 0.9)),
        })  # fmt: skip
    return out


def _curve_means(errors: Sequence[tuple[_Pair, float]]) -> list[float]:
    """Mean |error| of each curve."""
    curves: dict[str, list[float]] = {}
    for p, e in errors:
        curves.setdefault(p.curve, []).append(abs(e))
    return [float(np.mean(v)) for v in curves.values()]
