"""Adjustments of measured acceptance to another temperature, context or workload: only when asked for, each with its source and its doubt.

Each scales the gain AL - 1 by a published factor (low, middle, high) and returns the adjusted acceptance object, the range of AL the
factors span, and a sentence. Nothing is adjusted silently: a measurement at the deployment's own settings is always better.
Lengths are tokens, temperatures the sampler's, factors ratios of AL - 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.acceptance.priors import WORKLOADS, priors_data
from planner.acceptance.survival import REL_BAND, both_bands, survival_from
from planner.acceptance.transfer import check_kind
from planner.errors import InputError, suggest

SPEED_BENCH = "SPEED-Bench, arXiv 2604.09557v2 (means over its categories, D=3, T=0 to 1)"
CONTEXT_SOURCE = "SPEED-Bench, arXiv 2604.09557v2, figure 13; MiniMax-M3 and Gemma 4 rows of the same collection (2026-12-01)"

#: (AL - 1 at T = 1) / (AL - 1 at T = 0): every published pair. External 2.44 -> 1.98 and 2.43 -> 2.21; EAGLE-3 2.44 -> 2.37 and
#: 2.25 -> 2.07; MTP 2.81 -> 2.68.
TEMPERATURE_PAIRS = {
    "external": ((2.44, 1.98), (2.43, 2.21)),
    "eagle3": ((2.44, 2.37), (2.25, 2.07)),
    "mtp": ((2.81, 2.68),),
}
#: EAGLE-3 heads trained short: Llama-3.3-70B 2.12-2.93 at 1k -> 1.17-1.19 at 8k. MiniMax-M3's stays: 2.69 at 1k, 2.65 at 32k.
COLLAPSE = (0.17 / 1.12, 0.19 / 1.93)
#: Gemma 4 MTP at D = 7: 3.19 at 4k, 3.71 at 32k on synthetic prompts.
MTP_RISE = 2.71 / 2.19
_FLAT_TO = 32_768
_COLLAPSED_AT = 4.0
"""Multiples of the trained window at which the collapse is complete (8k for heads trained at 2k: the one published case)."""
CODING_TO_PROSE = (0.5, 0.7)
"""Prose and chat: AL - 1 times 0.5 to 0.7 of coding's (published range)."""
_OTHER_SHIFT = 0.25
"""80 % relative half-width of any other ratio between two workloads' AL - 1."""


@dataclass(frozen=True, slots=True)
class Adjusted:
    """An adjusted acceptance object. `low`, `high`: 80 % range of AL at `draft_len` from the adjustment alone."""

    acceptance: dict[str, Any]
    """With `rel_band`: this adjustment's doubt and that which the object came with, so that a plan's band holds both."""
    draft_len: int
    acceptance_len: float
    low: float
    high: float
    factor: tuple[float, float, float]
    """Low, middle, high ratio of AL - 1."""
    note: str
    source: str

    @property
    def rel_band(self) -> tuple[float, float]:
        """80 % relative half-widths (down, up) of AL from the adjustment alone."""
        return 1 - self.low / self.acceptance_len, self.high / self.acceptance_len - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "acceptance": self.acceptance,
            "draft_len": self.draft_len,
            "acceptance_len": self.acceptance_len,
            "acceptance_low_len": self.low,
            "acceptance_high_len": self.high,
            "factor": list(self.factor),
            "note": self.note,
            "source": self.source,
        }


def adjust_temperature(acceptance: Mapping[str, Any], kind: str, *, measured: float, wanted: float) -> Adjusted:
    """AL at another sampling temperature (0..1). The published ends are T = 0 and 1; between them the factor is taken as linear."""
    check_kind(kind)
    for name, t in (("measured", measured), ("wanted", wanted)):
        if isinstance(t, bool) or not isinstance(t, int | float) or not math.isfinite(t) or not 0 <= t <= 1:
            hint = "Only T = 0 to 1 is published; measure acceptance at the temperature you serve."
            raise InputError("temperature out of the published range", where=f"temperature ({name})", got=t, expected="0..1", hint=hint)
    own = [(b - 1) / (a - 1) for a, b in TEMPERATURE_PAIRS.get(kind, ())]
    every = [(b - 1) / (a - 1) for pairs in TEMPERATURE_PAIRS.values() for a, b in pairs]
    low, high = (min(own), max(own)) if len(own) > 1 else (min(every), max(every))
    middle = math.fsum(own or every) / len(own or every)
    ends = [(1 + (f - 1) * wanted) / (1 + (f - 1) * measured) for f in (low, middle, high)]
    lent = "" if own else f"; no published pair for {kind}, those of {', '.join(TEMPERATURE_PAIRS)} are used"
    note = f"temperature {measured:g} -> {wanted:g}: AL - 1 times {ends[1]:.2f} [{min(ends):.2f}-{max(ends):.2f}]{lent}"
    return _scaled(acceptance, kind, (min(ends), ends[1], max(ends)), note, SPEED_BENCH)


def adjust_context(
    acceptance: Mapping[str, Any], kind: str, *, measured_len: int, wanted_len: int, trained_window_len: int | None = None
) -> Adjusted:
    """AL at another context length (tokens).

    External drafts and native MTP are flat to 32k. Heads trained short collapse beyond their window (`trained_window_len`, needed for every
    trained head): AL - 1 falls to about an eighth at four times the window. Look-up drafters have no published rule.
    """
    check_kind(kind)
    for name, n in (("measured_len", measured_len), ("wanted_len", wanted_len), ("trained_window_len", trained_window_len)):
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise InputError("not a context length", where=f"context.{name}", got=n, expected="whole tokens, 1 or more")
    if kind in ("ngram", "suffix"):
        hint = "What repeats depends on the text: import acceptance from traffic at this context."
        raise InputError(f"no published rule for {kind} and context", where="context", got=wanted_len, expected="measured acceptance", hint=hint)
    if kind in ("external", "mtp"):
        return _flat(acceptance, kind, measured_len, wanted_len)
    if trained_window_len is None:
        hint = "draftline drafters shows the window where it is published; heads trained at 2k tokens are common."
        raise InputError("the drafter's trained window is needed", where="context.trained_window_len", expected="tokens it was trained on", hint=hint)
    middle = math.fsum(COLLAPSE) / len(COLLAPSE)
    at = [_collapse(n, trained_window_len, middle) for n in (measured_len, wanted_len)]
    worst = [_collapse(n, trained_window_len, min(COLLAPSE)) for n in (measured_len, wanted_len)]
    factor = at[1] / at[0]
    # A head of another family kept its AL far beyond its window: both outcomes are published.
    ends = sorted((factor, worst[1] / worst[0], 1.0))
    lent = "" if kind == "eagle3" else f"; published for EAGLE-3 only, taken for {kind}"
    note = (
        f"context {measured_len} -> {wanted_len} tokens, window {trained_window_len}: AL - 1 times {factor:.2f} [{ends[0]:.2f}-{ends[-1]:.2f}]{lent}"
    )
    return _scaled(acceptance, kind, (ends[0], factor, ends[-1]), note, CONTEXT_SOURCE)


def _flat(acceptance: Mapping[str, Any], kind: str, measured_len: int, wanted_len: int) -> Adjusted:
    if max(measured_len, wanted_len) > _FLAT_TO:
        hint = "Flat acceptance is published up to 32k; measure beyond."
        raise InputError(
            "beyond the published contexts", where="context", got=max(measured_len, wanted_len), expected=f"at most {_FLAT_TO}", hint=hint
        )
    share = abs(math.log(wanted_len / measured_len)) / math.log(8.0)
    moved = MTP_RISE ** min(1.0, share) if kind == "mtp" else 1.0 + 0.05 * min(1.0, share)
    low, high = (1 / 1.05 if wanted_len > measured_len else 1 / moved), (moved if wanted_len > measured_len else 1.05)
    if wanted_len == measured_len:
        low = high = 1.0
    note = f"context {measured_len} -> {wanted_len} tokens: flat for {kind} up to 32k [AL - 1 times {low:.2f}-{high:.2f}]"
    return _scaled(acceptance, kind, (low, 1.0, high), note, CONTEXT_SOURCE)


def _collapse(context_len: int, window_len: int, floor: float) -> float:
    """Share of AL - 1 left at a context: 1 inside the window, `floor` from four windows on, straight in the logarithm between."""
    folds = math.log(max(1.0, context_len / window_len)) / math.log(_COLLAPSED_AT)
    return float(floor ** min(1.0, folds))


def adjust_workload(acceptance: Mapping[str, Any], kind: str, *, measured: str, wanted: str) -> Adjusted:
    """AL on another workload: the published ratio of AL - 1 between the two, over drafter kinds at equal D (coding to chat 0.5-0.7)."""
    check_kind(kind)
    for name, w in (("measured", measured), ("wanted", wanted)):
        if w not in WORKLOADS:
            hint = suggest(str(w), WORKLOADS)
            raise InputError("unknown workload", where=f"workload ({name})", got=w, expected="one of " + ", ".join(WORKLOADS), hint=hint)
    ratios = priors_data()["gain_ratio"]
    if measured == wanted:
        low = middle = high = 1.0
    else:
        middle = ratios[wanted] / ratios[measured]
        low, high = middle * (1 - _OTHER_SHIFT), middle * (1 + _OTHER_SHIFT)
        prose = ("chat", "writing")
        if measured == "coding" and wanted in prose:
            low, high = min(middle, CODING_TO_PROSE[0]), max(middle, CODING_TO_PROSE[1])
        elif wanted == "coding" and measured in prose:
            low, high = min(middle, 1 / CODING_TO_PROSE[1]), max(middle, 1 / CODING_TO_PROSE[0])
    note = f"workload {measured} -> {wanted}: AL - 1 times {middle:.2f} [{low:.2f}-{high:.2f}], median ratio over the published rows"
    if kind in ("ngram", "suffix"):
        note += "; look-up acceptance follows the text's own repetition, so this says little"
        low, high = min(low, 0.2 * middle), max(high, 3 * middle)
    return _scaled(acceptance, kind, (low, middle, high), note, priors_data()["sources"][0])


def _scaled(acceptance: Mapping[str, Any], kind: str, factor: tuple[float, float, float], note: str, source: str) -> Adjusted:
    """The acceptance object with AL - 1 (or every s_i) times the middle factor; AL stays within 1..1+D."""
    if "workload" in acceptance:
        hint = "Take the prior of the workload you serve: draftline acceptance priors."
        raise InputError(
            "a prior is not adjusted", where="acceptance.workload", got=acceptance["workload"], expected="measured acceptance", hint=hint
        )
    curve = survival_from(acceptance, kind=kind, max_draft_len=16)
    low, middle, high = factor
    out: dict[str, Any]
    if "survival_prob" in acceptance:
        out = {"survival_prob": [min(1.0, s * middle) for s in curve.survival_prob]}
        out |= {"at_draft_len": acceptance["at_draft_len"]} if "at_draft_len" in acceptance else {}
        draft_len = len(curve.survival_prob)
    elif "points" in acceptance:
        out = {"points": [{"draft_len": d, "acceptance_len": _length(al, d, middle)} for d, al in curve.anchors]}
        draft_len = curve.anchors[-1][0]
    else:
        draft_len = int(acceptance.get("at_draft_len", 3))
        out = {"acceptance_len": _length(curve.acceptance_len(draft_len), draft_len, middle), "at_draft_len": draft_len}
    before = curve.acceptance_len(draft_len)
    value = survival_from(out, kind=kind, max_draft_len=16).acceptance_len(draft_len)
    ends = (min(value, _length(before, draft_len, low)), max(value, _length(before, draft_len, high)))
    doubt = both_bands((1 - ends[0] / value, ends[1] / value - 1), curve.rel_band)
    doubt = (min(doubt[0], 1 - 1 / value), doubt[1])  # AL does not fall below 1
    return Adjusted(out | {REL_BAND: [round(x, 4) for x in doubt]}, draft_len, value, ends[0], ends[1], factor, note, source)


def _length(acceptance_len: float, draft_len: int, factor: float) -> float:
    return min(1.0 + draft_len, 1.0 + (acceptance_len - 1.0) * factor)
