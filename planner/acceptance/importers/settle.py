"""From the figures of a source to one sound curve: checks, corrections, and what was done in words.

Every correction leaves a flag and a note; what cannot be true is an `InputError` that says where, what, got, expected, next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.acceptance.importers.numbers import MAX_DRAFT_LEN, whole
from planner.acceptance.importers.reading import Imported, Reading
from planner.acceptance.survival import isotonic
from planner.acceptance.transfer import check_kind
from planner.errors import InputError

LOOKUP = ("ngram", "suffix")
_SHORT_ROUNDS = 0.03
"""Mean drafted length may fall short of D by this share (a request's last rounds draft less) before rounds count as mixed."""
_AGREE = 0.02
_LOW_COVER, _HIGH_COVER = 0.9, 1.1
_RATE_HINT = "SGLang before October 2025 counted the bonus token in accept_rate (PR 11572): say which version wrote this, or give AL instead."
_BONUS_HINT = "AL counts the bonus token; sources that give accepted drafts per round (TensorRT-LLM's forced count) need 1 added."


@dataclass(slots=True)
class _Work:
    """A reading on its way, with what is said about it."""

    r: Reading
    draft_len: int | None = None
    acceptance_len: float | None = None
    survival: list[float] | None = None
    match_prob: float | None = None
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def flag(self, name: str, note: str = "", warning: str = "") -> None:
        if name not in self.flags:
            self.flags.append(name)
        self.notes += [note] if note else []
        self.warnings += [warning] if warning else []


def settle(reading: Reading, *, draft_len: int | None = None, kind: str | None = None) -> Imported:
    """The imported value of a reading. `draft_len`, `kind`: what the user knows and the source may not say."""
    if draft_len is not None:
        draft_len = whole(draft_len, "--draft-len", low=1)
    if kind is not None:
        check_kind(kind, "--kind")
    w = _Work(reading, draft_len, flags=list(reading.flags), notes=list(reading.notes), warnings=list(reading.warnings))
    if kind and reading.kind and kind != reading.kind:
        w.warnings.append(f"the source names a {reading.kind} drafter, --kind says {kind}: {kind} is used")
    kind = kind or reading.kind
    w.match_prob = reading.match_prob
    points = reading.points
    if reading.step_ratio:
        w.notes.append("this is cost, not acceptance: nothing here says how many drafts are accepted")
    elif points:
        points = _points(w)
    else:
        _counts(w)
        _length(w)
        _check_rate(w)
        if w.survival:
            _curve(w)
        _cover(w, kind)
        _say(w)
    survival = None if w.survival is None else tuple(w.survival)
    num_drafts, drafted, accepted = reading.num_drafts, reading.drafted, reading.accepted
    counted = reading.weighting != "unknown" and not reading.separated and "mixture" not in w.flags
    one_length = counted and survival is not None and len(survival) == w.draft_len
    return Imported(
        format=reading.format, engine=reading.engine, definition=reading.definition, weighting=reading.weighting, kind=kind,
        draft_len=w.draft_len, num_drafts=num_drafts, drafted=drafted, accepted=accepted, acceptance_len=w.acceptance_len,
        survival_prob=survival, one_length=one_length, points=points, match_prob=w.match_prob, request_acceptance_len=reading.request_acceptance_len,
        flags=tuple(w.flags), notes=tuple(dict.fromkeys(w.notes)), warnings=tuple(dict.fromkeys(w.warnings)), parts=dict(reading.parts),
        step_ratio=reading.step_ratio,
    )  # fmt: skip


def _counts(w: _Work) -> None:
    """Counters: present at all, in order, and AL from them."""
    r = w.r
    for name, value in (("rounds", r.num_drafts), ("drafted tokens", r.drafted), ("accepted tokens", r.accepted)):
        if value is not None and value < 0:
            raise InputError(f"{name} is negative", where=r.where, got=value, expected="0 or more", hint="Were the two scrapes swapped?")
    if r.num_drafts == 0 or r.drafted == 0:
        hint = "Send traffic first; check that the engine was started with speculation and that requests do not switch it off."
        raise InputError("no data: nothing was drafted in this window", where=r.where, expected="at least one round with drafts", hint=hint)
    if r.drafted is not None and r.accepted is not None and r.accepted > r.drafted * (1 + 1e-9):
        raise InputError("more tokens accepted than drafted", where=r.where, got=f"{r.accepted:g} of {r.drafted:g}", expected="accepted <= drafted",
                         hint="Does 'accepted' include the bonus token? Take the rounds off it.")  # fmt: skip
    if r.num_drafts is not None and r.drafted is not None and r.drafted < r.num_drafts * (1 - 1e-9) and r.skips_empty:
        raise InputError(
            "fewer drafted tokens than rounds", where=r.where, got=f"{r.drafted:g} in {r.num_drafts:g} rounds", expected="1 or more a round"
        )
    if r.separated and r.survival:
        w.acceptance_len = 1.0 + math.fsum(r.survival)
    elif r.num_drafts and r.accepted is not None:
        w.acceptance_len = 1.0 + r.accepted / r.num_drafts
        if r.acceptance_len is not None and abs(r.acceptance_len / w.acceptance_len - 1) > _AGREE:
            w.warnings.append(f"the source states AL {r.acceptance_len:g}, its counters give {w.acceptance_len:.4g}: the counters are used")
    else:
        w.acceptance_len = r.acceptance_len
    if w.acceptance_len is None and r.survival:
        w.acceptance_len = 1.0 + math.fsum(r.survival)
    w.survival = None if r.survival is None else list(r.survival)


def _length(w: _Work) -> None:
    """D: what the user or the source says, else drafted tokens per round; mixtures are flagged."""
    r = w.r
    mean = r.drafted / r.num_drafts if r.drafted is not None and r.num_drafts else None
    known = len(w.survival) if w.survival else None
    stated = r.draft_len
    if w.draft_len and stated and w.draft_len != stated:
        hint = "Leave --draft-len out: the source says it."
        raise InputError("--draft-len contradicts the source", where=r.where, got=w.draft_len, expected=str(stated), hint=hint)
    guess = None if mean is None else round(mean) if abs(mean - round(mean)) <= _SHORT_ROUNDS * mean else math.ceil(mean)
    if guess is not None and guess > MAX_DRAFT_LEN:
        raise InputError("more tokens drafted per round than can be", where=r.where, got=f"{mean:.6g} a round", expected=f"at most {MAX_DRAFT_LEN}")
    w.draft_len = w.draft_len or stated or max(filter(None, (known, guess)), default=None)
    if not stated and mean is None and known and w.draft_len == known:
        w.notes.append(f"D={known} is the longest round seen: say --draft-len if the engine drafted more")
    if w.draft_len is None:
        w.flag("no_draft_len", warning="the source does not say D: give it with --draft-len, else no curve can be made")
        return
    if known and known > w.draft_len:
        if any(v > 0 for v in (w.survival or [])[w.draft_len :]):
            raise InputError("more positions than D", where=r.where, got=f"{known} positions", expected=f"at most D={w.draft_len}")
        w.survival = (w.survival or [])[: w.draft_len]
    if mean is None:
        return
    if mean > w.draft_len * (1 + _SHORT_ROUNDS) and not r.separated:
        raise InputError("more tokens drafted per round than D", where=r.where, got=f"{mean:.3g} a round", expected=f"at most D={w.draft_len}",
                         hint="Give the D the engine ran with as --draft-len.")  # fmt: skip
    if mean < w.draft_len * (1 - _SHORT_ROUNDS) and not r.separated:
        w.flag("mixture", warning=(
            f"rounds of different drafted length are mixed ({mean:.3g} tokens a round, D={w.draft_len}): deep positions look worse than they are. "
            "Per-request metrics with per_step_drafted separate them"))  # fmt: skip
    elif abs(mean - w.draft_len) > 1e-9 and not r.separated:
        w.notes.append(f"rounds drafted {mean:.3f} tokens on average (D={w.draft_len}): the last rounds of requests are shorter")


def _check_rate(w: _Work) -> None:
    """The stated rate: old SGLang counted the bonus token; anything else above 1 cannot be."""
    r, rate = w.r, w.r.rate
    al, d = w.acceptance_len, w.draft_len
    if rate is not None and rate < 0:
        raise InputError("the acceptance rate is negative", where=r.where, got=rate, expected="0..1")
    if rate is not None and rate > 1 + 1e-9:
        if d is None:
            raise InputError("the acceptance rate is above 1", where=r.where, got=rate, expected="accepted / drafted in 0..1", hint=_RATE_HINT)
        if al is None:
            w.acceptance_len = al = rate * d
        if abs(al / (rate * d) - 1) > _AGREE:
            raise InputError("the acceptance rate is above 1", where=r.where, got=rate, expected="accepted / drafted in 0..1", hint=_RATE_HINT)
        w.flag("rate_with_bonus", note=f"the stated rate {rate:g} counts the bonus token (AL / D, SGLang before October 2025): read as AL {al:.4g}")
    elif rate is not None and al is None and d is not None:
        w.acceptance_len = al = 1.0 + rate * d
    if al is None:
        return
    if al < 1 - 1e-9:
        raise InputError("the acceptance length is below 1", where=r.where, got=round(al, 6), expected="1 or more tokens a round", hint=_BONUS_HINT)
    if d is not None and al > 1 + d + 1e-9:
        hint = "Is D right? vLLM: num_speculative_tokens; SGLang chain: num_steps; TensorRT-LLM: max_draft_len."
        raise InputError("the acceptance length exceeds 1 + D", where=r.where, got=round(al, 6), expected=f"1..{1 + d} for D={d}", hint=hint)
    w.acceptance_len = max(1.0, al)


def _curve(w: _Work) -> None:
    """Per-position rates: shares, complete, agreeing with AL, and falling."""
    r, s = w.r, list(w.survival or ())
    for n, v in enumerate(s):
        if not 0.0 <= v <= 1 + 1e-9:
            hint = "Divide percentages by 100; a position cannot be accepted more often than it was drafted."
            raise InputError("a per-position rate is outside 0..1", where=f"{r.where}, position {n + 1}", got=v, expected="0..1", hint=hint)
    s = [min(v, 1.0) for v in s]
    al, d = w.acceptance_len or 1.0, w.draft_len or len(s)
    missing = (al - 1.0) - math.fsum(s)
    tolerance = max(_AGREE * al, 0.012)
    if len(s) < d and missing > 1e-9:
        s = _tail(w, s, d, missing)
    elif len(s) < d:
        s += [0.0] * (d - len(s))
        w.flag("tail_missing", note=f"positions beyond {len(r.survival or ())} are not listed and the total leaves nothing for them: taken as 0")
    elif abs(missing) > tolerance:
        chain = _chained(s)
        if abs(1.0 + math.fsum(chain) - al) <= tolerance:
            s = chain
            w.flag("conditional", note="the per-position rates are conditional (each given the one before): multiplied up to survival")
        else:
            raise InputError("per-position rates and AL disagree", where=r.where, got=f"1 + sum = {1 + math.fsum(s):.4g}, AL {al:.4g}",
                             expected="AL = 1 + sum of the rates", hint="Are the rates of another run, or conditional?")  # fmt: skip
    fixed = isotonic(s)
    if max(abs(a - b) for a, b in zip(s, fixed, strict=True)) > 1e-12:
        worst = max(b - a for a, b in zip(s, s[1:], strict=False))
        w.flag(
            "isotonic", note=f"per-position rates rise somewhere (by up to {worst:.3g}): made non-increasing by isotonic regression, the sum is kept"
        )
    w.survival = [min(1.0, max(0.0, v)) for v in fixed]
    if w.r.num_drafts is None or r.separated:
        w.acceptance_len = 1.0 + math.fsum(w.survival)


def _tail(w: _Work, s: list[float], d: int, missing: float) -> list[float]:
    """Positions the source does not list, from the total of accepted tokens."""
    gap, last = d - len(s), s[-1] if s else 1.0
    if missing > gap * last * (1 + _AGREE):
        raise InputError(
            "per-position rates and the total disagree", where=w.r.where, got=f"{missing:.3g} accepted a round beyond position {len(s)}",
            expected=f"at most {gap * last:.3g}", hint="The list may belong to another run.",
        )  # fmt: skip
    # Equal conditional rate over the gap: solve last * (q + ... + q^gap) = missing.
    low, high = 0.0, 1.0
    for _ in range(60):
        mid = (low + high) / 2
        low, high = (mid, high) if last * math.fsum(mid ** (i + 1) for i in range(gap)) < missing else (low, mid)
    q = (low + high) / 2
    w.flag(
        "tail_recovered", note=f"only {len(s)} of {d} positions are listed: the rest ({missing:.4g} a round) comes from the total of accepted tokens"
    )
    return [*s, *(last * q ** (i + 1) for i in range(gap))]


def _chained(rates: Sequence[float]) -> list[float]:
    out, product = [], 1.0
    for rate in rates:
        product *= rate
        out.append(product)
    return out


def _cover(w: _Work, kind: str | None) -> None:
    """Do the counters cover the generated tokens? Look-up drafters are corrected to all rounds; others are told."""
    r = w.r
    if r.generated is None or not r.num_drafts or r.accepted is None or w.acceptance_len is None:
        if r.skips_empty and kind in LOOKUP:
            w.flag("empty_rounds_left_out", warning=(
                "rounds without a match are not in these counters and the generated tokens are not given: AL holds for rounds that drafted. "
                "Pass match_prob to the drafter, or import a source with generated tokens"))  # fmt: skip
        return
    if r.generated <= 0:
        return
    cover = (r.num_drafts + r.accepted) / r.generated
    if cover > _HIGH_COVER:
        w.flag(
            "coverage", warning=f"the counters stand for {cover:.2f}x the generated tokens: the two cover different windows, or requests were aborted"
        )
        return
    rounds = r.generated - r.accepted
    whole_len = r.generated / rounds if rounds > 0 else w.acceptance_len
    if not r.skips_empty or cover >= 1 or rounds <= r.num_drafts:
        return
    match = r.num_drafts / rounds
    if kind in LOOKUP:
        w.match_prob = match
        w.flag("empty_rounds_corrected", note=(
            f"{1 - match:.1%} of the rounds found no draft and are not in the counters: AL and rates are over all rounds "
            f"(over rounds that drafted, AL is {w.acceptance_len:.4g})"))  # fmt: skip
        w.acceptance_len = whole_len
        w.survival = None if w.survival is None else [v * match for v in w.survival]
    elif cover < _LOW_COVER:
        who = "" if kind else " If the drafter is n-gram or suffix, say --kind ngram: AL over all rounds is then " + f"{whole_len:.4g}."
        w.flag("coverage", warning=(
            f"the counters cover only {cover:.0%} of the generated tokens: the other rounds had no draft (K = 0 tier, speculation off, no match), "
            f"so AL holds for the rounds that drafted.{who}"))  # fmt: skip


def _say(w: _Work) -> None:
    """Closing remarks: what is missing, and what the mean is over."""
    r = w.r
    if w.survival is None and w.acceptance_len is not None and w.draft_len is not None:
        w.flag("no_positions", note="only totals are given: one AL at one D, the curve follows the drafter kind's law with one free parameter")
    if r.weighting == "requests":
        w.flag(
            "request_weighted",
            warning=(
                "this AL is the plain mean of the requests' own values; throughput follows the mean over rounds, which is lower when requests differ"
            ),
        )
    if r.request_acceptance_len is not None and w.acceptance_len is not None:
        w.notes.append(
            f"AL over rounds {w.acceptance_len:.4g}, plain mean over requests {r.request_acceptance_len:.4g}: throughput follows the first"
        )
    if w.acceptance_len is None:
        raise InputError("no acceptance figure was found", where=r.where, expected="an acceptance length, counters or per-position rates")


def _points(w: _Work) -> tuple[tuple[int, float], ...]:
    """AL at several D, each its own run: in range, and made a curve whose gains do not rise."""
    r = w.r
    pts = sorted(r.points)
    for d, al in pts:
        if not 1 - 1e-9 <= al <= 1 + d + 1e-9:
            raise InputError("acceptance length out of range", where=f"{r.where}, D={d}", got=al, expected=f"1..{1 + d}", hint=_BONUS_HINT)
    if w.draft_len is not None and w.draft_len not in dict(pts):
        known = ", ".join(str(d) for d, _ in pts)
        raise InputError(
            "--draft-len is not among the measured D", where=r.where, got=w.draft_len, expected=known, hint="Leave it out: all are used."
        )
    w.draft_len = w.draft_len or pts[-1][0]
    gains, last_d, last_al, steps = [], 0, 1.0, []
    for d, al in pts:
        gains.append((al - last_al) / (d - last_d))
        steps.append(float(d - last_d))
        last_d, last_al = d, al
    fixed = [min(1.0, max(0.0, g)) for g in isotonic(gains, steps)]
    total, out = 1.0, []
    for (d, al), gain, step in zip(pts, fixed, steps, strict=True):
        total += gain * step
        out.append((d, al if abs(total - al) < 1e-9 else total))
    off = {d: (al, fit) for (d, al), (_, fit) in zip(pts, out, strict=True) if abs(al - fit) > 1e-9}
    if off:
        w.flag("isotonic", note="AL(D) is measured apart at each D and is not a falling-gain curve: fixed by isotonic regression at "
               + ", ".join(f"D={d} ({al:.4g} -> {fit:.4g})" for d, (al, fit) in off.items()))  # fmt: skip
    peak = max(pts, key=lambda p: p[1])
    if peak[0] < pts[-1][0]:
        w.flag(
            "falls_beyond_peak",
            warning=f"measured AL peaks at D={peak[0]} and falls beyond it (past the trained block?): do not plan beyond D={peak[0]}",
        )
    w.acceptance_len = dict(out)[w.draft_len]
    if len(out) == 1:
        w.flag("no_positions", note="one AL at one D: the curve follows the drafter kind's law with one free parameter")
    return tuple(out)


def merged(readings: Sequence[Reading], note: str) -> Reading:
    """Readings of the same shape added up (counters and per-position counts); the first one's words are kept."""
    first = readings[0]
    if len(readings) == 1:
        return first
    drafts = math.fsum(r.num_drafts or 0.0 for r in readings)
    width = max(len(r.survival or ()) for r in readings)
    survival = None
    if width and drafts and all(r.survival for r in readings):
        sums = [math.fsum((r.survival or ())[i] * (r.num_drafts or 0.0) for r in readings if i < len(r.survival or ())) for i in range(width)]
        survival = tuple(v / drafts for v in sums)
    lens = {r.draft_len for r in readings}
    flags = first.flags if len(lens) == 1 else (*first.flags, "mixture")
    generated = [r.generated for r in readings]
    return replace(
        first, num_drafts=drafts, survival=survival, flags=flags, notes=(*first.notes, note),
        drafted=math.fsum(r.drafted or 0.0 for r in readings), accepted=math.fsum(r.accepted or 0.0 for r in readings),
        draft_len=first.draft_len if len(lens) == 1 else max((d for d in lens if d), default=None), acceptance_len=None, rate=None,
        generated=None if any(g is None for g in generated) else math.fsum(g or 0.0 for g in generated),
    )  # fmt: skip
