"""Scores as the page docs/accuracy.md: written by `draftline validate`, compared by CI, read by people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

INTRO = """# Accuracy

Written by `draftline validate --refit --out docs/accuracy.md`; do not edit. Rows are other people's measurements (tests/data/truth, sources in its
README). An error is |predicted / measured - 1|. A row without an answer counts as 100 % off. Regret is 1 - metric(chosen D) / best measured arm, off
included. Bands are 80 % intervals; the interval score is their mean log width plus 10 times what falls outside, so width is paid for.
"""
NOTES = {
    "serving": "Served decode steps without speculation (TPOT), H100/H200/B200, three engines.",
    "gemm": "Single GEMM kernels of public tables; medians over stacks (GPU, backend, dtype).",
    "attention": "Decode attention kernels, context from 512; medians over stacks.",
    "sweeps": "Draft-length sweeps, acceptance given at each D, anchored on the measured plain arm.",
    "sweeps_nobase": "The same without the baseline.",
    "sweeps_one_al": "The same with acceptance known at one D only.",
    "steps": "Measured plain steps (t_ar) and rounds (t_round).",
}
PUBLISHED = """What people who compared draft lengths measured, and what the planner says without any baseline of theirs. Sources leave much
unsaid: what was assumed for each stands in tests/data/truth/published_cases.json. `call` compares only the sign of the gain. "no answer" under
DFlash at 185k: the drafter's own cache does not fit beside the target's. Power caps are not answered: an RTX 5090 held to 400 of 600 W took
23 % longer for a round of D = 6 (published), and arithmetic slowed in the same proportion explains 2 of these 23, so no option pretends to."""
BINDING = """Sweeps where the D chosen with a baseline loses more than 3 %. Two draft lengths of one setup cost the same ratio of round times on
every prompt set but for noise, so the scatter of that ratio over a source's other prompt sets is what its figures can resolve (a dash: fewer
than three others); a loss within it names no better D. What is left: rows whose concurrency is assumed, engines whose speculative path is slower than
its kernels (n-gram in TensorRT-LLM, SGLang without overlapped scheduling), and throughput of 256 short requests whose prefill is unstated."""
LISTS = """From a per-position list; its model is left out of laws, power and band (all lists are of one source, and each agrees with its AL to
rounding). Rounds of more drafts accept less position by position, whatever drafts (465 of 476 pairs of lists), so a list is not simply cut at a
smaller D; `plain` is what that would give. (Upwards to D = 8 the plain cut is the better one for block drafters in
the median.) EAGLE-3 and MTP stay within 1.2 % (median) and 3 % (p90)
both ways. Block drafters do not, and more than the rule is to blame:
DFlash for Qwen3-8B and for Qwen3.5-122B-A10B have nearly the same list at D = 3 on GSM8K (0.865 0.739 0.623 and 0.875 0.753 0.634), but
AL 4.84 and 4.19 at D = 7, so no rule that sees only the list can be within 7 % of both; and at D = 11 and 15 the lists include drafters
run beyond the block they were trained for (DSpark, block 7), where acceptance falls in ways that no list at a smaller D shows."""
MORE = "From more than one AL, by the shipped laws (fitted to these curves too), D up to 16:"
#: What may be behind the worst groups: guesses by whoever read them last, not findings.
GUESSES = {
    "serving": "Guesses at causes: gpt-oss on B200 comes out 15-24 % slow at every load (MXFP4 experts, priced from tables of neighbouring formats);"
    " Qwen3.5-397B and GLM-5 on SGLang 18-28 % fast (early builds of their hybrid and token-sparse kernels); Qwen3-32B on H100 with SGLang slow at"
    " high load only (that version hides part of the prefill); five gpt-oss rows on H100 come from one release candidate.",
    "sweeps": "Guesses at causes: SpecForge 339 ran SGLang without overlapped scheduling (a round cost 2.6 plain steps, here 1.8), and so"
    " did SGLang's DFlash until mid-2026, z-lab's rows among them (a round takes 2 to 3 ms more at every batch; today's release overlaps"
    " both); the AMD rows do not state their concurrency.",
}
COUNTS = ("rows", "refused", "stacks", "n_off", "sweeps", "pairs")
WORST_SHOWN = 10


def accuracy_markdown(result: Mapping[str, Any]) -> str:
    parts = [INTRO]
    for name, note in NOTES.items():
        block = result[name]
        parts += [f"## {name}", "", note, "", _figures(block["figures"]), ""]
        if block.get("lacking"):
            parts += ["Not usable: " + ", ".join(f"{n} {why}" for why, n in sorted(block["lacking"].items())) + ".", ""]
        if block.get("groups"):
            parts += ["Worst groups first:", "", _rows(block["groups"][:WORST_SHOWN]), ""]
        if name in GUESSES:
            parts += [GUESSES[name], ""]
    parts += ["## Published comparisons", "", PUBLISHED, "", _rows(result["published"]), ""]
    parts += ["## What binds the choice of D", "", BINDING, "", _rows(result["binding"]), ""]
    parts += ["Intervals: 90 %, (source, model) groups resampled.", "", _rows(result["binding_summary"]), ""]
    parts += ["## Simple rules on the same sweeps", "", _rows(result["rules"]), ""]
    parts += ["## Acceptance carried to another D (sources left out)", "", _rows(result["acceptance"]), ""]
    parts += [LISTS, "", _rows(result["acceptance_lists"]), ""]
    parts += ["Over single pairs of a list and another D, both at most 8:", "", _rows(result["acceptance_list_pairs"]), ""]
    parts += [MORE, "", _rows(result["acceptance_more"]), ""]
    if "left_out" in result:
        parts += ["## Groups left out and re-fitted", "", _rows(result["left_out"]), ""]
    if "choices_left_out" in result:
        parts += ["The choice of D by those fits, of sweeps on engines that are fitted:", "", _rows(result["choices_left_out"]), ""]
    if "refitted" in result:
        numbers = [{"number": k, "re-fitted": f"{v:.3g}"} for k, v in result["refitted"]["overheads"].items()]
        bands = [{"number": f"band {k}", "re-fitted": f"{lo:+.3f} to {hi:+.3f} (log)"} for k, (lo, hi) in result["refitted"]["bands"].items()]
        parts += ["## Numbers as re-fitted from defaults (the shipped ones)", "", _rows(numbers + bands), ""]
    return "\n".join(parts).rstrip() + "\n"


def _figures(figures: Mapping[str, Any]) -> str:
    return _rows([figures])


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = list(rows[0])
    lines = ["| " + " | ".join(k.replace("_", " ") for k in keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(_cell(k, r.get(k)) for k in keys) + " |" for r in rows]
    return "\n".join(lines)


def _cell(key: str, value: object) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.0f}" if key in COUNTS else f"{value:.3f}" if key in ("interval", "interval_constant", "skill") else f"{value:.1%}"
    return str(value).replace("|", "\\|")  # a group's name may hold the column's own mark
