"""The answer in two or three sentences, from a plan's recommendations. Used by terminal and HTML alike."""

from __future__ import annotations

import math
from typing import Any

from planner.planning import Plan

NAMES = {
    "external": "an external draft model",
    "eagle3": "EAGLE-3",
    "mtp": "MTP",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "pard": "PARD",
    "ngram": "n-gram look-up",
    "suffix": "suffix decoding",
}


def drafter_name(drafter: str | None) -> str:
    """``eagle3:ORG/HEAD`` -> ``EAGLE-3``."""
    if drafter is None:
        return "no speculation"
    return NAMES.get(drafter.split(":", 1)[0], drafter)


def verdict(plan: Plan) -> str:
    """Two sentences: what to use up to which concurrency, and what to expect with which doubt."""
    first = plan.recommendations[0]["context_len"]
    recs = [r for r in plan.recommendations if r["context_len"] == first]
    answered = [r for r in recs if r["draft_len"] is not None]
    if not answered:
        return f"Nothing meets the request: {recs[0]['reasons'][0]}."
    if all(r["draft_len"] == 0 for r in answered):
        return f"Do not speculate: plain decoding is best at every concurrency asked ({_range(answered)}). {_doubt(plan)}{_cap(answered)}"
    what = ", ".join(_stretches(answered))
    best = [r for r in answered if r["draft_len"]]
    picks = [best[0]] if len(best) == 1 else [best[0], best[len(best) // 2] if len(best) > 2 else best[-1]]
    expect = ", ".join(f"{r['speedup']:.2f}x [{r['speedup_low']:.2f}-{r['speedup_high']:.2f}] at {r['concurrency']}" for r in picks)
    prior = "" if plan.inputs.get("acceptance") else f" on the {plan.inputs['workload']} acceptance prior"
    return f"Use {what}. Expect {expect}{prior}; {_doubt(plan)}{_cap(answered)}"


def _range(recs: list[dict[str, Any]]) -> str:
    return f"{recs[0]['concurrency']}-{recs[-1]['concurrency']}" if len(recs) > 1 else str(recs[0]["concurrency"])


def _stretches(recs: list[dict[str, Any]]) -> list[str]:
    """``EAGLE-3 with D=4 up to 24 concurrent requests``, ``D=2 to 96``, ``none above``. Neighbouring D merge where a common one is near-optimal."""
    groups: list[tuple[str | None, set[int], int]] = []
    for r in recs:
        near = set(r["near_optimal"]) or {r["draft_len"]}
        if groups and groups[-1][0] == r["drafter"] and groups[-1][1] & near:
            groups[-1] = (r["drafter"], groups[-1][1] & near, r["concurrency"])
        else:
            groups.append((r["drafter"], near, r["concurrency"]))
    out: list[str] = []
    last: str | None = None
    for i, (drafter, lengths, upto) in enumerate(groups):
        end = len(groups) - 1 == i
        if drafter is None:
            part = "none above" if end and out else f"none to {upto}"
        else:
            name = f"{drafter_name(drafter)} with " if drafter != last else ""
            reach = ("" if not out else " above") if end else (f" up to {upto} concurrent requests" if not out else f" to {upto}")
            part = f"{name}D={min(lengths)}{reach}"
        out.append(part)
        last = drafter
    return out


def _cap(recs: list[dict[str, Any]]) -> str:
    """What runs at once where fewer do than were asked for."""
    most = max((r for r in recs if r["num_seqs"] is not None), key=lambda r: int(r["concurrency"]))
    running, asked = int(most["num_seqs"]), int(most["concurrency"])
    return f" Only {running} of {asked} requests run at once; the rest queue." if running < asked else ""


def _doubt(plan: Plan) -> str:
    """How good the absolute times are, and what one baseline buys."""
    now, near = (max(abs(math.expm1(x)) for x in plan.inputs[k]) for k in ("tpot_band", "tpot_band_near_baseline"))
    if plan.inputs.get("baseline"):
        return f"anchored on your baseline, TPOT is good to {now:.0%} near it."
    return f"TPOT is good to {now:.0%}; one measured baseline (--baseline-tpot-ms) makes that {near:.0%}."
