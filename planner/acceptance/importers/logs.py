"""Server logs: vLLM (V1 windows, V0 totals), llama.cpp (per task and cumulative statistics), SGLang decode lines.

V1 lines are windows and are weighted by their rounds; V0 lines are totals since the start, whose "accepted" counts tokens behind a
rejection too, so AL comes from the emitted tokens. A mean of the printed rates would be wrong for both (vLLM issue 19254).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.acceptance.importers.engines import llamacpp_old
from planner.acceptance.importers.numbers import count, text_number
from planner.acceptance.importers.reading import Reading
from planner.acceptance.importers.settle import merged
from planner.acceptance.importers.source import Document
from planner.errors import InputError

_NUM = r"([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
V1 = re.compile(r"SpecDecoding metrics:(.*)")
V0 = re.compile(
    r"Speculative metrics: Draft acceptance rate: " + _NUM + r", System efficiency: " + _NUM + r", Number of speculative tokens: (\d+), "
    r"Number of accepted tokens: (\d+), Number of draft tokens: (\d+), Number of emitted tokens: (\d+)"
)
LLAMA_TASK = re.compile(r"draft acceptance(?: rate)? = " + _NUM + r" \(\s*(\d+) accepted /\s*(\d+) generated\)(.*)")
LLAMA_STATS = re.compile(r"statistics\s+([\w-]+): (.*#gen drafts.*#acc tokens.*)")
LLAMA_OLD = re.compile(r"(?:^|[\s:])n_(draft|predict|drafted|accept)\s*=\s*(\d+)", re.MULTILINE)
SGLANG = re.compile(r"accept len: " + _NUM + r"(?:, accept rate: " + _NUM + r")?")
_KINDS = {"mtp": "mtp", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark", "simple": "external", "ngram": "ngram"}


def looks_like_log(text: str) -> str:
    """Which engine's lines are there: vllm, vllm-v0, llamacpp, llamacpp-old, sglang, or nothing."""
    if V1.search(text):
        return "vllm"
    if "Speculative metrics: Draft acceptance rate" in text:
        return "vllm-v0"
    if LLAMA_STATS.search(text) or LLAMA_TASK.search(text):
        return "llamacpp"
    if {m[1] for m in LLAMA_OLD.finditer(text)} >= {"predict", "drafted", "accept"}:
        return "llamacpp-old"
    return "sglang" if SGLANG.search(text) else ""


def read_log(document: Document, kind: str | None) -> Reading:
    """The reading of a log's speculation lines."""
    which = looks_like_log(document.text)
    if which == "vllm":
        return _vllm(document)
    if which == "vllm-v0":
        return _vllm_v0(document)
    if which == "llamacpp":
        return _llamacpp(document)
    if which == "llamacpp-old":
        return _llamacpp_old(document)
    return _sglang(document)


# ---------------------------------------------------------------- vLLM


def _field(line: str, name: str, where: str) -> float | None:
    found = re.search(re.escape(name) + r": ([^\s,%]+)", line)
    if found is None or found[1] == "nan":
        return None
    return text_number(found[1].rstrip(",."), f"{where}: {name}")


def _vllm(document: Document) -> Reading:
    readings = []
    for n, found in enumerate(V1.finditer(document.text), 1):
        line, where = found[1], f"{document.where}, metrics line {n}"
        accepted, drafted, al = (_field(line, name, where) for name in ("Accepted", "Drafted", "Mean acceptance length"))
        if accepted is None or drafted is None:
            raise InputError("a SpecDecoding line is incomplete", where=where, expected="Accepted: N tokens, Drafted: N tokens")
        listed = re.search(r"Per-position acceptance rate: ([\d., ]+)", line)
        rates = [text_number(t, f"{where}: Per-position acceptance rate") for t in listed[1].replace(",", " ").split()] if listed else []
        if count(drafted, f"{where}: Drafted") == 0:
            continue
        rounds = drafted / len(rates) if rates else drafted
        if al is not None and al > 1 and count(accepted, f"{where}: Accepted") > 0:
            counted = accepted / (al - 1.0)
            # AL is printed with two decimals: trust it over D only where they differ by more than that rounding.
            if not rates or abs(counted / rounds - 1) > 0.03 + 0.006 / (al - 1.0):
                rounds = counted
        readings.append(Reading(
            format="vllm log", engine="vllm", where=where, num_drafts=rounds, drafted=drafted, accepted=accepted, survival=tuple(rates) or None,
            draft_len=len(rates) or None, skips_empty=True,
            definition="each line is a window: AL = 1 + accepted/rounds and s_i over all windows, weighted by their rounds",
        ))  # fmt: skip
    if not readings:
        raise InputError("no data: every window drafted nothing", where=document.where, expected="a window with drafts")
    whole = merged(readings, f"{len(readings)} log window(s), weighted by their rounds")
    return whole if whole.draft_len or len(readings) > 1 else readings[0]


def _vllm_v0(document: Document) -> Reading:
    rows = [tuple(int(text_number(g, f"{document.where}: Speculative metrics")) for g in m.groups()[2:]) for m in V0.finditer(document.text)]
    if not rows:
        hint = "The line must hold rate, system efficiency, speculative, accepted, draft and emitted tokens."
        raise InputError("a Speculative metrics line is incomplete", where=document.where, expected="the line as vLLM V0 wrote it", hint=hint)
    readings = []
    for n, row in enumerate(rows):
        last = n + 1 == len(rows) or rows[n + 1][2] < row[2]
        if last:
            readings.append(_v0_reading(document.where, row))
    return merged(readings, f"{len(rows)} lines, each the total since the server started: the last of each start is used")


def _v0_reading(where: str, row: Sequence[int]) -> Reading:
    draft_len, accepted, drafted, emitted = row
    if draft_len < 1:
        raise InputError("no data: no speculative tokens", where=where, got=draft_len, expected="1 or more")
    rounds = drafted / draft_len
    if drafted and emitted < rounds * (1 - 1e-9):
        raise InputError("fewer tokens emitted than rounds", where=where, got=f"{emitted} in {rounds:g} rounds", expected="1 or more a round")
    return Reading(
        format="vllm V0 log", engine="vllm", where=where, num_drafts=rounds, drafted=drafted, accepted=min(emitted - rounds, drafted),
        draft_len=draft_len, flags=("cumulative",),
        definition="V0: AL = emitted * D/draft tokens (= system efficiency * (1 + D)); its 'accepted' also counts tokens behind a rejection",
        notes=(f"the printed acceptance rate ({accepted}/{drafted}) is not accepted/drafted of a chain and is not used",),
    )  # fmt: skip


# ---------------------------------------------------------------- llama.cpp


def _llamacpp(document: Document) -> Reading:
    stats: dict[str, list[Mapping[str, Any]]] = {}
    for found in LLAMA_STATS.finditer(document.text):
        row = _stats(found[2], f"{document.where}: statistics {found[1]}")
        history = stats.setdefault(found[1], [])
        if history and row["drafts"] >= history[-1]["drafts"]:
            history[-1] = row
        else:
            history.append(row)
    return _llamacpp_stats(document, stats) if stats else _llamacpp_tasks(document)


def _stats(line: str, where: str) -> dict[str, Any]:
    def grab(name: str) -> float:
        found = re.search(re.escape(name) + r"\s*=\s*(\d+)", line)
        if found is None:
            raise InputError("a statistics line is incomplete", where=where, expected=name)
        return text_number(found[1], f"{where}: {name}")

    calls = re.search(r"#calls(?:\(b,g,a\))?\s*=\s*([\d ]+)", line)
    numbers = [text_number(v, f"{where}: #calls") for v in calls[1].split()] if calls else []
    rates = re.search(r"#acc rate/pos = \(([\d., ]*)\)", line)
    listed = [text_number(t, f"{where}: #acc rate/pos") for t in rates[1].replace(",", " ").split()] if rates else []
    return {
        "drafts": grab("#gen drafts"), "drafted": grab("#gen tokens"), "accepted": grab("#acc tokens"),
        "calls": numbers[1] if len(numbers) == 3 else numbers[0] if numbers else None, "rates": listed,
    }  # fmt: skip


def _llamacpp_stats(document: Document, stats: Mapping[str, list[Mapping[str, Any]]]) -> Reading:
    """Cumulative lines per drafting method; with several methods a round belongs to the first that drafted."""
    total = {name: {k: math.fsum(r[k] or 0.0 for r in rows) for k in ("drafts", "drafted", "accepted", "calls")} for name, rows in stats.items()}
    used = {name: t for name, t in total.items() if t["drafts"] > 0}
    if not used:
        raise InputError("no data: no method drafted anything", where=document.where, expected="#gen drafts of 1 or more")
    rounds, drafted, accepted = (math.fsum(t[k] for t in used.values()) for k in ("drafts", "drafted", "accepted"))
    calls = max(t["calls"] for t in total.values())
    flags, warnings, notes = ["cumulative"], [], ["cumulative statistics since the server started; bonus added to each round"]
    kinds = {k for name in used for k in (next((v for key, v in _KINDS.items() if key in name), None),)}
    rates: tuple[float, ...] | None = None
    if len(used) > 1:
        flags.append("mixture")
        warnings.append(f"several methods drafted ({', '.join(used)}): their rounds are added up, the curve is a mixture")
    else:
        only = stats[next(iter(used))]
        rates = tuple(only[-1]["rates"]) or None if len(only) == 1 else None
    # Every call is a round; those without a draft emit one token.
    generated = calls + accepted if calls > rounds else None
    notes += [f"{calls - rounds:g} of {calls:g} rounds drafted nothing"] if calls > rounds else []
    return Reading(
        format="llamacpp log", engine="llamacpp", where=document.where, num_drafts=rounds, drafted=drafted, accepted=accepted, survival=rates,
        kind=next(iter(kinds)) if len(kinds) == 1 else None, skips_empty=True, generated=generated, flags=tuple(flags), notes=tuple(notes),
        definition="AL = 1 + #acc tokens/#gen drafts; #acc rate/pos = s_i; #calls - #gen drafts = rounds without a draft", warnings=tuple(warnings),
        parts={name: {"acceptance_len": 1 + t["accepted"] / t["drafts"], "num_drafts": t["drafts"]} for name, t in used.items()},
    )  # fmt: skip


def _llamacpp_tasks(document: Document) -> Reading:
    """One line per request: `draft acceptance = r (a accepted / g generated), mean len = L`."""
    readings, tokens = [], 0.0
    for found in LLAMA_TASK.finditer(document.text):
        accepted, drafted = (text_number(found[n], f"{document.where}: draft acceptance") for n in (2, 3))
        rest = found[4]
        mean = re.search(r"mean (?:len|acceptance length) =\s*" + _NUM, rest)
        al = text_number(mean[1], f"{document.where}: mean len") if mean else None
        evals = re.findall(r"(?<!prompt )\beval time =.*?/\s*(\d+) tokens", document.text[max(0, found.start() - 1200) : found.start()])
        rounds = (
            accepted / (al - 1.0)
            if al is not None and al > 1
            else text_number(evals[-1], f"{document.where}: eval time") - accepted
            if evals
            else None
        )
        rate = re.search(r"acceptance rate per position = \(([\d., ]*)\)", rest) or re.search(
            r"\s*[^\n]*acc per pos = \(([\d., ]*)\)",
            document.text[found.end() : found.end() + 200].split("\n", 2)[1] if "\n" in document.text[found.end() :] else "",
        )
        listed = tuple(text_number(t, f"{document.where}: rate per position") for t in rate[1].replace(",", " ").split()) if rate else ()
        if drafted == 0 or rounds is None:
            tokens += drafted
            continue
        readings.append(Reading(
            format="llamacpp log", engine="llamacpp", where=document.where, num_drafts=rounds, drafted=drafted, accepted=accepted,
            survival=listed or None, skips_empty=al is not None,
            definition="per request: AL = 1 + accepted/rounds, rounds = accepted/(mean len - 1) or predicted tokens - accepted; pooled over rounds",
        ))  # fmt: skip
    if not readings:
        what = "the lines hold no round count" if tokens else "no data: nothing was drafted"
        hint = "Raise the log level so that `mean len` or the `eval time` line is there, or import the responses' timings."
        raise InputError(what, where=document.where, expected="mean len or eval time beside draft acceptance", hint=hint)
    return merged(readings, f"{len(readings)} request(s), pooled over their rounds")


def _llamacpp_old(document: Document) -> Reading:
    fields: dict[str, str] = {}
    for found in LLAMA_OLD.finditer(document.text):
        fields[f"n_{found[1]}"] = found[2]
    return llamacpp_old({k: text_number(v, f"{document.where}: {k}") for k, v in fields.items()}, document.where)


# ---------------------------------------------------------------- SGLang


def _sglang(document: Document) -> Reading:
    """Decode lines: each covers the same number of steps, so a line weighs by its running requests."""
    weights, lens, rates = [], [], []
    for line in document.text.splitlines():
        found = SGLANG.search(line)
        if found is None:
            continue
        running = re.search(r"#running-req: (\d+)", line)
        al = text_number(found[1], f"{document.where}: accept len")
        if al == 0 or (running and int(running[1][:9]) == 0):
            continue
        weights.append(float(running[1][:9]) if running else 1.0)
        lens.append(al)
        rates.append(text_number(found[2], f"{document.where}: accept rate") if found[2] else None)
    if not lens:
        raise InputError("no data: no decode line with an accept length", where=document.where, expected="accept len: X on a decode line")
    pairs = [(al, rate) for al, rate in zip(lens, rates, strict=True) if rate is not None]
    draft_len, bonus = _length_from_rates(pairs)
    notes = [f"{len(lens)} decode line(s), weighted by running requests"]
    if draft_len:
        said = " (its rate counts the bonus token: SGLang before October 2025)" if bonus else ""
        notes.append(f"D={draft_len} is inferred from accept len and accept rate{said}")
    return Reading(
        format="sglang log", engine="sglang", where=document.where, weighting="rounds",
        acceptance_len=math.fsum(a * w for a, w in zip(lens, weights, strict=True)) / math.fsum(weights), draft_len=draft_len,
        definition="accept len = tokens per verify, bonus included, over the logging interval; lines weighted by running requests",
        notes=tuple(notes),
    )  # fmt: skip


def _length_from_rates(pairs: Sequence[tuple[float, float]]) -> tuple[int | None, bool]:
    """The one D that explains all printed (AL, rate): rate = (AL - 1)/D, or AL/D before October 2025. Two decimals each."""
    fits = []
    for bonus in (False, True):
        for d in range(1, 65):
            off = (abs(rate - (al if bonus else al - 1.0) / d) for al, rate in pairs)
            if pairs and all(v <= 0.0051 + 0.0051 / d for v in off):
                fits.append((d, bonus))
    return fits[0] if len(fits) == 1 else (None, False)
