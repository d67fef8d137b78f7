"""The one representation of acceptance: how likely the first i drafts of a round all survive.

s_i = P(first i draft tokens all accepted), non-increasing, and AL(D) = 1 + s_1 + ... + s_D tokens per round, bonus included.
Everything a user can know (per-position rates, one AL, several, alpha, a workload) becomes a `Survival`; it says what it rests on and how
sure it is. What was measured is returned as measured; what lies beyond follows the drafter kind's law (`planner.acceptance.transfer`),
and a per-position list is carried to rounds of another length (`planner.acceptance.listed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from planner.acceptance import priors
from planner.acceptance.listed import at_width, fixed_width, lengths, list_band, list_law_for
from planner.acceptance.transfer import Floats, Law, band, bend, check_kind, law_for
from planner.errors import InputError, suggest

FORMS = {
    "survival_prob": ("survival_prob",),
    "acceptance_len": ("acceptance_len", "at_draft_len"),
    "points": ("points",),
    "alpha": ("alpha",),
    "workload": ("workload",),
}
#: Optional in every form: the doubt of the value itself.
REL_BAND = "rel_band"
_TWO_POINT_SHARE = 0.6
"""Two measured D halve the transfer error (published 0.7 / 3.7 % against 1.4 / 5.5 %); kept wider."""
_BONUS = "AL counts the bonus token of every round (TensorRT-LLM's forced count and 'accepted per draft' do not: add 1)."


@dataclass(frozen=True, slots=True)
class Survival:
    """Survival curve of one drafter on one traffic.

    `measured_at` is the largest measured D (None: nothing was measured), `anchors` the (D, AL) that are returned as given,
    `rel_band` the 80 % relative half-widths (down, up) of the given value itself. `listed`: `survival_prob` is a per-position list of rounds
    of `measured_at` drafts, and positions in rounds of another length follow with `width_power`.
    """

    survival_prob: tuple[float, ...]
    kind: str
    basis: str
    measured_at: int | None = None
    anchors: tuple[tuple[int, float], ...] = ()
    rel_band: tuple[float, float] = (0.0, 0.0)
    block: int | None = None
    law: Law = Law()
    hazard: float = math.inf
    listed: bool = False
    width_power: float = 0.0
    notes: tuple[str, ...] = ()
    has_data: bool = True

    def survival(self, draft_len: int) -> Floats:
        """s_1..s_D of rounds of D drafts; beyond the known positions by the law, zero beyond the trained block. Of a list that was carried to other
        rounds their sum may exceed `acceptance_len` - 1, which never falls with D nor passes what the list itself showed from below."""
        s = self._as_measured(draft_len)
        if not self.listed or draft_len == self.measured_at or not self.measured_at:
            return s
        widest = draft_len if self.block is None else min(draft_len, max(self.block, self.measured_at))
        return at_width(s, self.measured_at, widest, self.width_power)

    def _as_measured(self, draft_len: int) -> Floats:
        """s_1..s_D of rounds as long as the measured ones."""
        known = np.asarray(self.survival_prob[:draft_len], dtype=np.float64)
        if len(known) == draft_len:
            return known
        rest = np.arange(len(known) + 1, draft_len + 1, dtype=np.float64)
        last = float(known[-1]) if len(known) else 1.0
        at_last = float(self.law.survival(self.hazard, np.array([float(len(known))]))[0]) if len(known) else 1.0
        tail = np.minimum(self.law.survival(self.hazard, rest) * (last / at_last if at_last > 0 else 0.0), last)
        if self.block is not None:
            tail = np.where(rest > self.block, 0.0, tail)
        return np.concatenate([known, tail])

    @overload
    def acceptance_len(self, draft_len: int) -> float: ...
    @overload
    def acceptance_len(self, draft_len: NDArray[Any]) -> Floats: ...
    def acceptance_len(self, draft_len: int | NDArray[Any]) -> float | Floats:
        """AL(D), tokens per round in [1, 1 + D]; an array of D gives an array."""
        wanted = np.asarray(draft_len, dtype=np.int64)
        if np.any(wanted < 0):
            raise InputError("a draft length is negative", where="draft_len", got=int(wanted.min()), expected="0 or more")
        table = self._table(int(wanted.max(initial=0)))
        for anchor, value in self.anchors:
            if anchor < len(table):
                table[anchor] = value
        out = np.asarray(table[wanted])
        return out if wanted.ndim else float(out)

    def _table(self, most: int) -> Floats:
        """AL(0..most) by the curve alone."""
        if self.listed and self.measured_at:
            s = self._as_measured(max(most, self.measured_at))
            return lengths(s, self.measured_at, self.width_power, self.block)[: most + 1]
        return np.concatenate([[1.0], 1.0 + np.cumsum(self.survival(most))])

    @property
    def conditional_prob(self) -> tuple[float, ...]:
        """a_i = s_i / s_(i-1); 0 once nothing survives."""
        before = (1.0, *self.survival_prob[:-1])
        return tuple(s / b if b > 0 else 0.0 for s, b in zip(self.survival_prob, before, strict=True))

    def band(self, draft_len: int) -> tuple[float, float]:
        """80 % relative half-widths (down, up) of AL(draft_len): the given value's own and that of carrying it to this D."""
        if draft_len == 0:
            return 0.0, 0.0
        carried = self._carried(draft_len)
        return math.hypot(self.rel_band[0], carried[0]), math.hypot(self.rel_band[1], carried[1])

    def log_band(self, draft_len: int) -> float:
        """80 % half-width of ln AL(draft_len): the mean of both sides, for bands that add in quadrature."""
        low, high = self.acceptance_range(draft_len)
        return math.log(high / low) / 2 if high > low else 0.0

    def _carried(self, draft_len: int) -> tuple[float, float]:
        if not self.anchors:
            return 0.0, 0.0
        nearest = min((d for d, _ in self.anchors), key=lambda d: abs(math.log(draft_len / d)))
        down, up = (list_band if self.listed else band)(self.kind, nearest, draft_len)
        share = _TWO_POINT_SHARE if len(self.anchors) > 1 else 1.0
        past = 0.05 if self.block is not None and draft_len > self.block and nearest != draft_len else 0.0
        return math.hypot(share * down, past), math.hypot(share * up, past)

    def acceptance_range(self, draft_len: int) -> tuple[float, float]:
        """80 % interval of AL(draft_len), kept inside [1, 1 + D]."""
        value, (down, up) = self.acceptance_len(draft_len), self.band(draft_len)
        return max(1.0, value * (1 - down)), min(1.0 + draft_len, value * (1 + up))

    def warnings(self, draft_len: int) -> tuple[str, ...]:
        """What to say when this D is asked for."""
        if self.block is None or draft_len <= self.block:
            return ()
        return (f"D={draft_len} is beyond the {self.block} tokens the drafter was trained for: no gain is expected past {self.block}",)


def survival_from(spec: Mapping[str, Any] | None, *, kind: str, max_draft_len: int, block: int | None = None, where: str = "acceptance") -> Survival:
    """A `Survival` from one of the `acceptance` forms of the contract; None means the chat prior. Any form may carry `rel_band`: [down, up],
    80 % relative half-widths of the value itself (an adjustment's doubt), which join the band that the form has anyway.

    A bare `survival_prob` is the curve itself: AL(D) = 1 + s_1 + ... + s_D. With `at_draft_len` (its length) it is what rounds of that many drafts
    showed, and rounds of another length follow by the law of lists (`planner.acceptance.listed`): they accept a little more if shorter.

    `max_draft_len`: how many positions to store; `block`: most drafts the drafter was trained for (None: no limit known).
    """
    check_kind(kind)
    stored = max(1, int(max_draft_len))
    if spec is None:
        made = _from_workload("chat", kind, stored, f"{where}.workload", block)
        return replace(made, notes=(*made.notes, "no acceptance given: the chat prior is used"))
    if isinstance(spec, Mapping) and REL_BAND in spec and len(spec) > 1:
        given = _half_widths(spec[REL_BAND], f"{where}.{REL_BAND}")
        bare = {k: v for k, v in spec.items() if k != REL_BAND}
        made = survival_from(bare, kind=kind, max_draft_len=max_draft_len, block=block, where=where)
        return replace(made, rel_band=both_bands(made.rel_band, given))
    form = _form(spec, where)
    if form == "survival_prob":
        made = _from_list(spec["survival_prob"], kind, f"{where}.survival_prob", block, of_rounds="at_draft_len" in spec)
        if "at_draft_len" in spec and _count(spec["at_draft_len"], f"{where}.at_draft_len") != made.measured_at:
            expected = f"{made.measured_at}, the length of survival_prob, or leave it out"
            raise InputError("not the draft length of the list", where=f"{where}.at_draft_len", got=spec["at_draft_len"], expected=expected)
        return made
    if form == "acceptance_len":
        draft_len = _count(spec["at_draft_len"], f"{where}.at_draft_len")
        value = _length(spec["acceptance_len"], draft_len, f"{where}.acceptance_len")
        return _from_one(value, draft_len, kind, stored, block)
    if form == "points":
        return _from_points(_read_points(spec["points"], f"{where}.points"), kind, stored, block)
    if form == "alpha":
        alpha = _probability(spec["alpha"], f"{where}.alpha")
        law = Law()
        hazard = -math.log(alpha) if alpha > 0 else math.inf
        s = _cut(law.survival(hazard, _positions(stored)), block)
        basis = f"alpha {alpha:g}: independent acceptance, the last resort (it over-predicts EAGLE by 8-13 % from D=1 to 7)"
        return Survival(tuple(s), kind, basis, rel_band=(0.12, 0.06), block=block, law=law, hazard=hazard)
    return _from_workload(spec["workload"], kind, stored, f"{where}.workload", block)


def both_bands(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """(down, up) of two independent doubts together."""
    return math.hypot(a[0], b[0]), math.hypot(a[1], b[1])


def _half_widths(value: object, where: str) -> tuple[float, float]:
    expected = "two relative half-widths, down (0 to below 1) and up (0 or more), e.g. [0.1, 0.15]"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InputError("not a pair", where=where, got=value, expected=expected)
    down, up = (_number(v, where, expected) for v in value)
    if not 0.0 <= down < 1.0 or up < 0.0:
        raise InputError("not relative half-widths", where=where, got=list(value), expected=expected)
    return down, up


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Nearest non-increasing sequence in least squares (pool adjacent violators); keeps the weighted sum."""
    pools: list[list[float]] = []
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        pools.append([float(value), float(weight), 1])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            v, w, n = pools.pop()
            total = pools[-1][1] + w
            pools[-1] = [(pools[-1][0] * pools[-1][1] + v * w) / total, total, pools[-1][2] + n]
    return [v for v, _, n in pools for _ in range(int(n))]


def _positions(n: int) -> Floats:
    return np.arange(1, n + 1, dtype=np.float64)


def _cut(s: Floats, block: int | None) -> Floats:
    return s if block is None else np.where(_positions(len(s)) > block, 0.0, s)


def _from_one(value: float, draft_len: int, kind: str, stored: int, block: int | None) -> Survival:
    law = law_for(kind)
    notes: tuple[str, ...] = ()
    reach = draft_len
    if block is not None and draft_len > block:
        if value <= 1 + block:
            reach = block
        else:
            block, notes = None, (f"AL {value:g} at D={draft_len} is more than a block of {block} can give: the block limit is dropped",)
    hazard = law.solve(value, reach)
    s = _cut(np.clip(law.survival(hazard, _positions(max(stored, draft_len))), 0.0, 1.0), block)
    basis = f"AL {value:g} measured at D={draft_len}, other D by the {kind} law"
    return Survival(tuple(s), kind, basis, draft_len, ((draft_len, value),), block=block, law=law, hazard=hazard, notes=notes)


def _from_list(raw: object, kind: str, where: str, block: int | None, *, of_rounds: bool) -> Survival:
    rates = [_probability(v, f"{where}[{n}]") for n, v in enumerate(_sequence(raw, where))]
    fixed = isotonic(rates)
    notes = () if fixed == rates else ("per-position rates rose with position: fixed by isotonic regression (the sum is kept)",)
    anchors = tuple((n + 1, 1.0 + total) for n, total in enumerate(np.cumsum(fixed).tolist()))
    several = len(fixed) > 1  # one rate is one AL, and carried as such
    power = list_law_for(kind).width_power if several and of_rounds else 0.0
    law, hazard = fixed_width(law_for(kind), fixed, power)
    basis = f"per-position survival measured at D={len(fixed)}" + (", rounds of another D by the law of lists" if power else "")
    return Survival(
        tuple(fixed), kind, basis, len(fixed), anchors[-1:],
        block=block, law=law, hazard=hazard, listed=several, width_power=power, notes=notes,
    )  # fmt: skip


def _from_points(points: list[tuple[int, float]], kind: str, stored: int, block: int | None) -> Survival:
    if len(points) == 1:
        return _from_one(points[0][1], points[0][0], kind, stored, block)
    ends = [d for d, _ in points]
    steps = np.diff([0, *ends])
    means = (np.diff([1.0, *(v for _, v in points)]) / steps).tolist()
    fixed = [min(1.0, max(0.0, m)) for m in isotonic(means, steps.tolist())]
    off = [abs(a - b) for a, b in zip(means, fixed, strict=True)]
    notes: tuple[str, ...] = ()
    if max(off) > 1e-9:
        notes = ("the points are not a falling-gain curve (noise, or a drafter past its block): fixed by isotonic regression",)
    anchors = tuple(zip(ends, (1.0 + np.cumsum(np.array(fixed) * steps)).tolist(), strict=True))
    law, hazard = bend(law_for(kind), anchors)
    s = _fill(law, hazard, np.array(fixed), steps)
    made = Survival(
        tuple(s), kind, "AL measured at D=" + ", ".join(map(str, ends)), ends[-1], anchors if not notes else _kept(points, anchors),
        block=block if block is None or ends[-1] <= block else None, law=law, hazard=hazard, notes=notes,
    )  # fmt: skip
    return replace(made, survival_prob=tuple(made.survival(max(stored, ends[-1]))))


def _kept(points: list[tuple[int, float]], fixed: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Anchors after a fix: those the fix left alone keep the given value to the last bit."""
    return tuple((d, v if abs(v - f) < 1e-9 else f) for (d, v), (_, f) in zip(points, fixed, strict=True))


def _fill(law: Law, hazard: float, means: Floats, steps: NDArray[np.int64]) -> Floats:
    """s_1..s_n whose sum over each step is mean x length: the law's shape inside a step, flattened only as far as monotony needs."""
    shaped, flat = law.survival(hazard, _positions(int(steps.sum()))), np.repeat(means, steps)
    edges = np.cumsum([0, *steps])
    for lo, hi, mean in zip(edges[:-1], edges[1:], means, strict=True):
        total = shaped[lo:hi].sum()
        shaped[lo:hi] = shaped[lo:hi] * (mean * (hi - lo) / total) if total > 0 else mean
    share = 0.0
    for edge in edges[:-1]:
        rise = shaped[edge] - (shaped[edge - 1] if edge else 1.0)
        room = (flat[edge - 1] if edge else 1.0) - flat[edge]
        if rise > 0:
            share = max(share, rise / (rise + room) if room > 0 else 1.0)
    mixed = (1 - share) * shaped + share * flat
    return np.asarray(np.clip(np.minimum.accumulate(mixed), 0.0, 1.0))


def _from_workload(workload: object, kind: str, stored: int, where: str, block: int | None) -> Survival:
    prior = priors.workload_prior(workload, kind, where=where)
    made = _from_one(prior.median, prior.draft_len, kind, stored, block)
    down, up = 1 - prior.p10 / prior.median, prior.p90 / prior.median - 1
    notes = (*made.notes, *prior.notes)
    return replace(made, basis=prior.basis, measured_at=None, rel_band=(down, up), notes=notes, has_data=prior.has_data)


# ---------------------------------------------------------------- reading


def _form(spec: object, where: str) -> str:
    wanted = " or ".join("{" + ", ".join(keys) + "}" for keys in FORMS.values())
    if not isinstance(spec, Mapping) or not spec:
        raise InputError("acceptance must be one object", where=where, got=spec, expected=wanted)
    known = {REL_BAND, *(key for keys in FORMS.values() for key in keys)}
    for key in spec:
        if key not in known:
            raise InputError(f"unknown key {key!r}", where=where, got=key, expected=wanted, hint=suggest(str(key), known))
    for form, keys in FORMS.items():
        if set(spec) in (set(keys), {*keys, "at_draft_len"} if form == "survival_prob" else set(keys)):
            return form
    if set(spec) == {"acceptance_len"} or set(spec) == {"at_draft_len"}:
        hint = 'Example: {"acceptance_len": 2.4, "at_draft_len": 3}.'
        what = "an acceptance length needs the draft length it was measured at, and the reverse"
        raise InputError(what, where=where, got=dict(spec), expected="acceptance_len with at_draft_len", hint=hint)
    raise InputError("keys of different forms are mixed", where=where, got=sorted(spec), expected=wanted, hint="Give exactly one form.")


def _number(value: object, where: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InputError("not a number", where=where, got=value, expected=expected)
    if not math.isfinite(value):
        raise InputError("not a finite number", where=where, got=value, expected=expected)
    return float(value)


def _probability(value: object, where: str) -> float:
    number = _number(value, where, "a probability in 0..1")
    if not 0.0 <= number <= 1.0:
        hint = "Divide percentages by 100." if 1 < number <= 100 else ""
        raise InputError("probability out of range", where=where, got=value, expected="0..1", hint=hint)
    return number


def _count(value: object, where: str) -> int:
    number = _number(value, where, "a whole number of draft tokens, 1 or more")
    if number != int(number) or not 1 <= number <= 1024:
        raise InputError("not a draft length", where=where, got=value, expected="a whole number in 1..1024")
    return int(number)


def _length(value: object, draft_len: int, where: str) -> float:
    number = _number(value, where, f"tokens per round in 1..{1 + draft_len}")
    if number < 1 or number > 1 + draft_len + 1e-9:
        raise InputError(f"acceptance length out of range for D={draft_len}", where=where, got=value, expected=f"1..{1 + draft_len}", hint=_BONUS)
    return min(number, 1.0 + draft_len)


def _sequence(raw: object, where: str) -> Sequence[Any]:
    if isinstance(raw, np.ndarray):
        raw = raw.tolist()
    if not isinstance(raw, list | tuple) or not raw:
        raise InputError("not a list with at least one entry", where=where, got=raw, expected="a non-empty list")
    return raw


def _read_points(raw: object, where: str) -> list[tuple[int, float]]:
    found: dict[int, list[float]] = {}
    for n, point in enumerate(_sequence(raw, where)):
        at = f"{where}[{n}]"
        if not isinstance(point, Mapping) or set(point) != {"draft_len", "acceptance_len"}:
            raise InputError("not a point", where=at, got=point, expected="an object with exactly draft_len and acceptance_len")
        if point["draft_len"] == 0 and not isinstance(point["draft_len"], bool):
            _length(point["acceptance_len"], 0, f"{at}.acceptance_len")
            continue
        draft_len = _count(point["draft_len"], f"{at}.draft_len")
        found.setdefault(draft_len, []).append(_length(point["acceptance_len"], draft_len, f"{at}.acceptance_len"))
    if not found:
        raise InputError("no point with drafts", where=where, got=raw, expected="at least one draft_len of 1 or more")
    return [(d, float(np.mean(v))) for d, v in sorted(found.items())]
