"""Per-request speculation records: vLLM `metrics.speculative_decoding`, aiperf rows, TensorRT-LLM choices, SGLang `meta_info`.

All hold a histogram of drafts accepted per round; pooling the histograms gives the mean over rounds. With per-step lists (vLLM
`detailed`) rounds of different drafted length are told apart: the chance of position i counts only rounds that drafted it.
Keys: vLLM --per-request-spec-decode-metrics; aiperf src/aiperf/spec_decode; SGLang srt meta_info.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.acceptance.importers.numbers import count, counts, number, share, whole
from planner.acceptance.importers.reading import Reading
from planner.errors import InputError


@dataclass(frozen=True, slots=True)
class Keys:
    """What one source calls its fields."""

    accepted: str
    drafted: str
    rounds: str
    histogram: str
    acceptance_len: str = ""
    rate: str = ""
    draft_len: str = "num_spec_tokens"


VLLM = Keys(
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps", "acceptance_histogram", "mean_acceptance_length", "draft_acceptance_rate"
)
TRTLLM = Keys("total_accepted_draft_tokens", "total_draft_tokens", "num_spec_steps", "acceptance_histogram", "", "acceptance_rate")
SGLANG = Keys(
    "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct", "spec_correct_drafts_histogram", "spec_accept_length",
    "spec_accept_rate", "",
)  # fmt: skip


@dataclass(slots=True)
class _Pool:
    """Sums over requests. `histogram[j]`: rounds that accepted exactly j drafts."""

    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    histogram: list[float] | None = None
    steps: list[tuple[int, int]] | None = None
    lens: list[float] = field(default_factory=list)
    draft_lens: set[int] = field(default_factory=set)
    empty: int = 0


def pool(records: Sequence[tuple[str, Mapping[str, Any]]], keys: Keys, base: Reading) -> Reading:
    """One reading of all requests; `base` carries the format's words."""
    p = _Pool(histogram=[], steps=[])
    for where, record in records:
        _add(p, record, keys, where)
    if p.rounds <= 0:
        hint = "Requests that switched speculation off, or had no match, carry no rounds."
        raise InputError("no data: no request drafted anything", where=base.where, expected="at least one round with drafts", hint=hint)
    flags, notes = list(base.flags), list(base.notes)
    notes.append(f"{len(records)} request(s) pooled over their rounds" + (f", {p.empty} without drafts left out" if p.empty else ""))
    many = len(p.draft_lens) > 1
    if many:
        flags.append("mixture")
        notes.append("requests ran with different D: " + ", ".join(map(str, sorted(p.draft_lens))))
    mean = math.fsum(p.lens) / len(p.lens) if len(p.lens) > 1 else None
    reading = replace(
        base, num_drafts=p.rounds, drafted=p.drafted or None, accepted=p.accepted, request_acceptance_len=mean,
        draft_len=max(p.draft_lens, default=base.draft_len), flags=tuple(flags), notes=tuple(notes),
    )  # fmt: skip
    if p.steps:
        return _separate(reading, p.steps)
    if p.histogram:
        top = len(p.histogram) - 1
        while top > 0 and p.histogram[top] == 0 and (reading.draft_len or 0) < top:
            top -= 1
        survival = tuple(math.fsum(p.histogram[i:]) / p.rounds for i in range(1, max(top, reading.draft_len or 1) + 1))
        return replace(reading, survival=survival or None)
    return reading


def _add(p: _Pool, record: Mapping[str, Any], keys: Keys, where: str) -> None:
    rounds = count(record.get(keys.rounds, 0), f"{where}.{keys.rounds}")
    hist = None
    if record.get(keys.histogram) is not None:
        hist = counts(record[keys.histogram], f"{where}.{keys.histogram}")
        total = math.fsum(hist)
        if keys.rounds in record and abs(total - rounds) > max(1.0, 0.01 * rounds):
            raise InputError(
                "the histogram and the number of rounds disagree", where=where, got=f"{total:g} and {rounds:g}", expected="the same count"
            )
        rounds = total
    if rounds == 0:
        p.empty += 1
        return
    if hist is None and record.get(keys.accepted) is None and keys.acceptance_len and record.get(keys.acceptance_len) is not None:
        accepted = (number(record[keys.acceptance_len], f"{where}.{keys.acceptance_len}") - 1.0) * rounds
    elif hist is None:
        accepted = count(record.get(keys.accepted, math.nan), f"{where}.{keys.accepted}")
    else:
        accepted = math.fsum(j * h for j, h in enumerate(hist))
        if record.get(keys.accepted) is not None:
            stated = count(record[keys.accepted], f"{where}.{keys.accepted}")
            if abs(stated - accepted) > max(1.0, 0.01 * accepted):
                raise InputError(
                    "the histogram and the accepted tokens disagree", where=where, got=f"{accepted:g} and {stated:g}", expected="the same count"
                )
    if keys.rate and record.get(keys.rate) is not None and keys is not SGLANG:
        share(record[keys.rate], f"{where}.{keys.rate}", "This source gives a fraction, not percent.")
    p.rounds += rounds
    p.accepted += accepted
    p.drafted += count(record.get(keys.drafted) or 0, f"{where}.{keys.drafted}")
    p.lens.append(1.0 + accepted / rounds)
    if keys.draft_len and record.get(keys.draft_len) is not None:
        p.draft_lens.add(whole(record[keys.draft_len], f"{where}.{keys.draft_len}", low=1))
    if hist is None:
        p.histogram = None
    elif p.histogram is not None:
        grown = p.histogram + [0.0] * (len(hist) - len(p.histogram))
        p.histogram = [v + (hist[n] if n < len(hist) else 0.0) for n, v in enumerate(grown)]
    steps = _steps(record, where)
    p.steps = None if steps is None or p.steps is None else p.steps + steps


def _steps(record: Mapping[str, Any], where: str) -> list[tuple[int, int]] | None:
    if record.get("per_step_accepted") is None or record.get("per_step_drafted") is None:
        return None
    pair = (record["per_step_accepted"], record["per_step_drafted"])
    if not all(isinstance(v, list) for v in pair) or len(pair[0]) != len(pair[1]):
        raise InputError("per_step_accepted and per_step_drafted do not match", where=where, expected="two lists of the same length")
    out = []
    for n, (a, d) in enumerate(zip(*pair, strict=True)):
        step = whole(a, f"{where}.per_step_accepted[{n}]"), whole(d, f"{where}.per_step_drafted[{n}]")
        if step[0] > step[1]:
            raise InputError(
                "a round accepted more than it drafted", where=f"{where}.per_step_accepted[{n}]", got=step[0], expected=f"at most {step[1]}"
            )
        out.append(step)
    return out


def _separate(reading: Reading, steps: Sequence[tuple[int, int]]) -> Reading:
    """Survival from rounds told apart by drafted length: a_i over the rounds that drafted position i and still held before it."""
    drafting = [(a, d) for a, d in steps if d > 0]
    if not drafting:
        raise InputError("no data: no round drafted anything", where=reading.where, expected="at least one round with drafts")
    longest = max(d for _, d in drafting)
    survival, s, thin = [], 1.0, 0
    for i in range(1, longest + 1):
        at_risk = sum(d >= i and a >= i - 1 for a, d in drafting)
        s *= sum(a >= i for a, _ in drafting) / at_risk if at_risk else 0.0
        thin = thin or (i if at_risk < 30 else 0)
        survival.append(s)
    lengths = sorted({d for _, d in drafting})
    mixed = len(lengths) > 1
    notes, flags = list(reading.notes), list(reading.flags)
    empty = len(steps) - len(drafting)
    lookup = reading.kind in ("ngram", "suffix")
    if empty:
        flags.append("empty_rounds_corrected" if lookup else "empty_rounds_left_out")
        notes.append(f"{empty} of {len(steps)} rounds drafted nothing: " + ("counted in" if lookup else "left out") + " of the curve")
    if mixed:
        flags = [f for f in flags if f != "mixture"] + ["separated"]
        pooled = 1.0 + math.fsum(a for a, _ in drafting) / len(drafting)
        notes.append(f"rounds drafted {lengths[0]} to {lengths[-1]} tokens and are told apart; their plain mean AL is {pooled:.4g}")
    if thin:
        notes.append(f"fewer than 30 rounds reach position {thin}: the curve is uncertain from there")
    match = len(drafting) / len(steps) if empty and lookup else None
    return replace(
        reading, survival=tuple(v * (match or 1.0) for v in survival), num_drafts=float(len(drafting)), separated=True, draft_len=longest,
        drafted=float(sum(d for _, d in drafting)), accepted=float(sum(a for a, _ in drafting)), match_prob=match, notes=tuple(notes),
        flags=tuple(flags),
    )  # fmt: skip
