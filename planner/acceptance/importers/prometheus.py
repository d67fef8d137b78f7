"""Prometheus text of /metrics: vLLM, llama.cpp (same algebra), SGLang (gauges), TensorRT-LLM. Parsed by prometheus-client.

Counters run since the server started; two scrapes give the window between them. `_created` series hold timestamps: they are never counted,
only compared, since a changed one means a restarted counter. Series are summed over their engine label; positions are read as numbers.
Names: vllm/v1/spec_decode/metrics.py; llama.cpp tools/server; sglang srt/observability/metrics_collector.py; TensorRT-LLM MetricsCollector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.acceptance.importers.numbers import MAX_DRAFT_LEN, count, number, shown
from planner.acceptance.importers.reading import Reading, Weighting
from planner.acceptance.importers.source import Document
from planner.errors import InputError

PREFIXES = ("vllm:", "llamacpp:", "sglang:", "trtllm_")
_COUNTERS = {
    "vllm": ("vllm:spec_decode_", "vllm:generation_tokens", "vllm:request_success"),
    "llamacpp": ("llamacpp:spec_decode_", "llamacpp:tokens_predicted", ""),
}
_COUNTED = "AL = 1 + accepted/drafts; s_i = accepted_per_pos[i-1]/drafts (already cumulative); a round counts only if it drafted at least one token"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples of one scrape: name without `_total` -> labels -> value; `created`: the same for `_created`."""

    values: Mapping[str, Mapping[Labels, float]]
    created: Mapping[str, Mapping[Labels, float]]
    where: str


def looks_like_metrics(text: str) -> bool:
    """Some line starts with a metric of a known engine, or it is an exposition at all."""
    return any(line.lstrip().startswith(PREFIXES) or line.startswith(("# HELP ", "# TYPE ")) for line in text.splitlines())


def parse(document: Document) -> Scrape:
    """The samples that matter; other engines' and libraries' metrics are not looked at."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = [line.strip() for line in document.text.splitlines() if line.lstrip().startswith(PREFIXES)]
    wanted = [line for line in lines if "spec_" in line or "generation_tokens" in line or "tokens_predicted" in line or "request_success" in line]
    values: dict[str, dict[Labels, float]] = {}
    created: dict[str, dict[Labels, float]] = {}
    for line in wanted:
        try:
            samples = [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            hint = f"Is the scrape cut off? ({type(error).__name__})"
            raise InputError(
                "a metric line cannot be read", where=document.where, got=shown(line), expected="name{labels} value", hint=hint
            ) from None
        for s in samples:
            home = created if s.name.endswith("_created") else values
            name = s.name.removesuffix("_created").removesuffix("_total")
            home.setdefault(name, {})[tuple(sorted(s.labels.items()))] = s.value
    return Scrape(values, created, document.where)


def read_metrics(document: Document, before: Document | None) -> Reading:
    """The reading of one scrape, or of the difference of two."""
    last = parse(document)
    first = None if before is None else parse(before)
    for engine, (prefix, generated, finished) in _COUNTERS.items():
        if prefix + "num_drafts" in last.values or prefix + "num_draft_tokens" in last.values:
            return _counters(last, first, engine, prefix, (generated, finished))
    if any(name.startswith("trtllm_spec_decode_") for name in last.values):
        return _trtllm(last, first)
    if "sglang:spec_accept_length" in last.values:
        return _sglang(last, first)
    hint = "vLLM exports vllm:spec_decode_* only when it was started with --speculative-config; llama.cpp needs --metrics."
    raise InputError("the scrape has no speculation metrics", where=document.where,
                     expected="vllm:spec_decode_*, llamacpp:spec_decode_*, sglang:spec_accept_length or trtllm_spec_decode_*", hint=hint)  # fmt: skip


def _process(labels: Labels) -> Labels:
    """The labels that name one counting process: everything but the position."""
    return tuple(pair for pair in labels if pair[0] in ("engine", "model_name", "model", "instance", "job", "pod"))


def _restarted(last: Scrape, first: Scrape, names: Iterable[str]) -> set[Labels]:
    """Processes whose counters started anew between the scrapes (a counter fell, or was created later)."""
    out = set()
    for name in names:
        for labels, value in last.values.get(name, {}).items():
            old = first.values.get(name, {}).get(labels)
            made, made_before = last.created.get(name, {}).get(labels), first.created.get(name, {}).get(labels)
            fell = old is not None and value < old
            if made is not None and made_before is not None and (made < made_before - 1.0 or (fell and made <= made_before + 1.0)):
                raise InputError("the scrapes are in the wrong order", where=last.where, expected="the earlier scrape first, the later as --after")
            if fell or (old is not None and made is not None and made_before is not None and made > made_before + 1.0):
                out.add(_process(labels))
    return out


def _window(last: Scrape, first: Scrape | None, name: str, restarted: set[Labels]) -> dict[Labels, float]:
    """Counts of one metric in the window, by labels."""
    out = {}
    for labels, raw in last.values.get(name, {}).items():
        value = count(raw, f"{last.where}: {name}")
        if first is not None and _process(labels) not in restarted:
            value -= count(first.values.get(name, {}).get(labels, 0.0), f"{first.where}: {name}")
        out[labels] = value
    return out


def _counters(last: Scrape, first: Scrape | None, engine: str, prefix: str, extra: tuple[str, str]) -> Reading:
    names = [prefix + n for n in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")]
    restarted = set() if first is None else _restarted(last, first, names)
    drafts, drafted, accepted, per_pos = (_window(last, first, n, restarted) for n in names)
    if not drafts or not drafted or not accepted:
        missing = [n for n, found in zip(names, (drafts, drafted, accepted), strict=False) if not found]
        raise InputError("a speculation counter is missing", where=last.where, got=", ".join(missing) + " absent", expected="all three counters")
    positions = _by_position(per_pos, f"{last.where}: {names[3]}", "position")
    rounds = math.fsum(drafts.values())
    flags, notes, warnings = _story(last, first, restarted, drafts)
    generated = _window(last, first, extra[0], restarted)
    requests = _window(last, first, extra[1], restarted) if extra[1] else {}
    tokens = math.fsum(generated.values()) - math.fsum(requests.values()) if generated else None
    survival = tuple(positions[i] / rounds for i in sorted(positions)) if positions and rounds > 0 else None
    # Engines export a series for every position up to num_speculative_tokens.
    contiguous = positions and sorted(positions) == list(range(len(positions)))
    if positions and not contiguous:
        survival, warnings = None, [*warnings, "per-position series are incomplete: only the totals are used"]
    mean = math.fsum(drafted.values()) / rounds if rounds > 0 else 0.0
    return Reading(
        format=f"{engine} /metrics", engine=engine, definition=_COUNTED + _span(first), where=last.where, num_drafts=rounds,
        drafted=math.fsum(drafted.values()), accepted=math.fsum(accepted.values()), survival=survival, generated=tokens, skips_empty=True,
        draft_len=len(positions) if contiguous and len(positions) >= mean * 0.999 else None,
        flags=tuple(flags), notes=tuple(notes), warnings=tuple(warnings),
    )  # fmt: skip


def _span(first: Scrape | None) -> str:
    return "; since the server started" if first is None else "; between the two scrapes"


def _story(last: Scrape, first: Scrape | None, restarted: set[Labels], drafts: Mapping[Labels, float]) -> tuple[list[str], list[str], list[str]]:
    flags, notes, warnings = [], [], []
    if first is None:
        flags.append("cumulative")
        notes.append("one scrape: counters since the server started, warm-up and other traffic included; a second scrape (--after) gives a window")
    if restarted:
        flags.append("counter_reset")
        warnings.append(f"{len(restarted)} engine(s) restarted between the scrapes (or the files are swapped): their counters are taken from zero")
    engines = {dict(labels).get("engine") for labels in drafts} - {None}
    models = {dict(labels).get("model_name") or dict(labels).get("model") for labels in drafts} - {None}
    if len(engines) > 1:
        notes.append(f"summed over {len(engines)} engines")
    if len(models) > 1:
        flags.append("mixture")
        warnings.append(f"counters of {len(models)} models are summed ({', '.join(sorted(m for m in models if m))}): scrape one model at a time")
    return flags, notes, warnings


def _by_position(series: Mapping[Labels, float], where: str, label: str) -> dict[int, float]:
    out: dict[int, float] = {}
    for labels, value in series.items():
        text = dict(labels).get(label, "")
        if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < MAX_DRAFT_LEN):
            raise InputError("a position label is not a whole number", where=where, got=text, expected=f'{label}="0", "1", ...')
        out[int(text)] = out.get(int(text), 0.0) + value
    return out


def _gauge(scrape: Scrape, name: str) -> float | None:
    """Mean of a gauge over its series."""
    found = [number(v, f"{scrape.where}: {name}") for v in scrape.values.get(name, {}).values() if math.isfinite(v)]
    return math.fsum(found) / len(found) if found else None


def _sglang(last: Scrape, first: Scrape | None) -> Reading:
    if first is not None:
        hint = "Take the mean of several scrapes, or use /generate meta_info per request."
        raise InputError("SGLang exports gauges, which have no difference", where=last.where, expected="one scrape", hint=hint)
    al = _gauge(last, "sglang:spec_accept_length")
    if not al:
        raise InputError("no data: sglang:spec_accept_length is 0", where=last.where, expected="traffic with speculation before the scrape")
    steps, tokens = _gauge(last, "sglang:spec_num_steps"), _gauge(last, "sglang:spec_num_draft_tokens")
    stated = steps if steps else tokens - 1 if tokens else None
    flags, warnings = ["interval"], ["a gauge of the last logging interval only: one moment of the traffic, not a mean over the run"]
    if steps and tokens and tokens > steps + 1:
        flags.append("tree")
        warnings.append(f"num_draft_tokens {tokens:g} > num_steps + 1: a tree (topk > 1); chain curves do not describe it")
    weighting: Weighting = "interval"
    return Reading(
        format="sglang /metrics", engine="sglang", where=last.where, weighting=weighting, acceptance_len=al,
        definition="AL = sglang:spec_accept_length (bonus included), a gauge of the last logging interval; D = spec_num_steps",
        rate=_gauge(last, "sglang:spec_accept_rate"), draft_len=round(stated) if stated and stated >= 1 else None,
        flags=tuple(flags), warnings=tuple(warnings),
    )  # fmt: skip


def _trtllm(last: Scrape, first: Scrape | None) -> Reading:
    base = "trtllm_spec_decode_"
    names = [base + n for n in ("num_draft_tokens", "num_accepted_tokens", "drafted_tokens", "accepted_tokens")]
    restarted = set() if first is None else _restarted(last, first, names)
    drafted, accepted, drafted_pos, accepted_pos = (_window(last, first, n, restarted) for n in names)
    flags, notes, warnings = _story(last, first, restarted, drafted or drafted_pos)
    if drafted_pos and accepted_pos:
        at, got = (_by_position(s, last.where, "token_position") for s in (drafted_pos, accepted_pos))
        order = sorted(at)
        if not at or at[order[0]] <= 0:
            raise InputError("no data: nothing was drafted in this window", where=last.where, expected="at least one round with drafts")
        s = tuple(got.get(i, 0.0) / at[i] for i in order if at[i] > 0)
        return Reading(
            format="trtllm /metrics", engine="trtllm", where=last.where, survival=s, draft_len=len(s), num_drafts=at[order[0]],
            drafted=math.fsum(at.values()), accepted=math.fsum(got.values()), separated=True, flags=tuple(flags), warnings=tuple(warnings),
            definition="s_i = accepted_tokens{token_position}/drafted_tokens{token_position}: rounds that drafted the position" + _span(first),
            notes=tuple(notes),
        )  # fmt: skip
    total = math.fsum(drafted.values())
    if total <= 0:
        raise InputError("no data: nothing was drafted in this window", where=last.where, expected="at least one round with drafts")
    al = _gauge(last, base + "acceptance_length")
    return Reading(
        format="trtllm /metrics", engine="trtllm", where=last.where, weighting="interval" if al else "unknown", acceptance_len=al,
        definition="AL = trtllm_spec_decode_acceptance_length (a gauge, bonus included); accepted/drafted from the counters, which count no rounds",
        rate=math.fsum(accepted.values()) / total, flags=tuple(flags), notes=tuple(notes), warnings=tuple(warnings),
    )  # fmt: skip
