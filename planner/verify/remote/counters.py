"""What a server drafted and accepted during a load: per request where its answers tell, else by the difference of two scrapes.

Everything is converted by `planner.acceptance.importers`; this module takes the scrapes, chooses the source and checks that the server did what
it was asked for. Engines fall back silently: the method asked for may not be the one that runs, and D may be clamped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.acceptance.importers import Imported, import_acceptance
from planner.acceptance.importers.engines import having, sglang_draft_len
from planner.acceptance.importers.requests import SGLANG, TRTLLM, VLLM
from planner.acceptance.importers.source import Document
from planner.errors import InputError
from planner.verify.remote.client import Endpoint, ServerIdentity, Timeouts, fetch
from planner.verify.remote.exposition import grown, totals
from planner.verify.remote.load import Load

LOOKUP = ("ngram", "suffix")
_GENERATED = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total", "llamacpp": "llamacpp:tokens_predicted_total"}
_OTHER_TRAFFIC = 1.05
"""Generated tokens over the load's own: above this someone else used the server."""


@dataclass(frozen=True)
class Snapshot:
    """One scrape, as the server wrote it. metrics: Prometheus text, or TensorRT-LLM's iteration statistics (JSON, those since the last scrape);
    info: SGLang's /server_info."""

    endpoint: Endpoint
    metrics: str = ""
    info: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """Acceptance of one load. acceptance: None where the server drafted nothing or does not tell; source: requests, metrics, server_info or none;
    problems: what was looked for and not found."""

    acceptance: Imported | None
    source: str
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        acceptance = None if self.acceptance is None else self.acceptance.to_dict()
        return {"source": self.source, "problems": list(self.problems), "acceptance": acceptance}


def snapshot(endpoint: Endpoint, *, timeouts: Timeouts = Timeouts()) -> Snapshot:
    """Scrape what the engine's acceptance is read from. A missing path is said in `missing`; a dead or slow server is an InputError."""
    found, missing = {}, []
    for path in ["/metrics", *_MORE.get(endpoint.engine, ())]:
        answer = fetch(endpoint, path, timeouts)
        found[path] = answer.text if answer.status == 200 else ""
        if not found[path].strip() and path != _PROMETHEUS:
            missing.append(f"{answer.url} answers {answer.status} with no data{_WHY.get(endpoint.engine, '')}")
    metrics = found.get(_PROMETHEUS, "")
    metrics = metrics if "trtllm_spec_decode" in metrics else found["/metrics"]
    return Snapshot(endpoint, metrics, found.get("/server_info", ""), tuple(missing))


_PROMETHEUS = "/prometheus/metrics"
"""TensorRT-LLM's /metrics are iteration statistics; Prometheus text is mounted there when performance metrics are switched on."""
_MORE = {"sglang": ("/server_info",), "trtllm": (_PROMETHEUS,)}
_WHY = {
    "llamacpp": " (llama-server needs --metrics)",
    "sglang": " (SGLang needs --enable-metrics)",
    "trtllm": " (trtllm-serve needs its iteration statistics switched on)",
}


def observe(before: Snapshot, after: Snapshot, load: Load | None = None, *, kind: str | None = None, draft_len: int | None = None) -> Observed:
    """Acceptance between two snapshots, or of the load's own answers where they tell it. `kind`, `draft_len`: what the server was asked for."""
    engine, problems = after.endpoint.engine, list(after.missing)
    try:
        problems += [] if load is None else _other_traffic(before, after, load)
    except InputError as error:
        problems.append(str(error))
    readers: list[tuple[str, Callable[[], Imported | None]]] = [
        ("requests", lambda: _of_requests(load, kind, draft_len)),
        ("metrics", lambda: _of_metrics(before, after, kind, draft_len)),
    ]
    if engine == "llamacpp":
        readers.reverse()  # its answers hold no round counts and no positions, its metrics do
    if engine == "sglang":
        readers.append(("server_info", lambda: _of_info(after, kind)))
    faults = []
    for source, read in readers:
        try:
            found = read()
        except InputError as error:
            faults.append(f"{source}: {error}")
            continue
        if found is not None:
            return Observed(found, source, tuple(problems))
    return Observed(None, "none", (*problems, *faults))


def _of_requests(load: Load | None, kind: str | None, draft_len: int | None) -> Imported | None:
    """Pooled over the requests' own records; None where the answers hold none."""
    rows = [dict(r.own) for r in load.sent] if load is not None else []
    text = "\n".join(json.dumps(r) for r in rows)
    document = Document(text, "answers", tuple(rows))
    keys = ((VLLM.rounds, VLLM.accepted), (SGLANG.rounds,), (TRTLLM.accepted,), ("draft_n", "draft_n_accepted"))
    if not any(having(document, *k) for k in keys):
        return None
    stated = None if having(document, VLLM.draft_len) or having(document, "per_step_drafted") else draft_len
    return import_acceptance(text, kind=kind, draft_len=stated)


def _of_metrics(before: Snapshot, after: Snapshot, kind: str | None, draft_len: int | None) -> Imported | None:
    if not after.metrics.strip():
        return None
    match after.endpoint.engine:
        case "sglang":
            return _of_verify_calls(before, after, kind)
        case "trtllm" if after.metrics.lstrip().startswith(("[", "{")):
            # Reading them takes them off the server's queue: the second scrape holds what ran since the first.
            return import_acceptance(after.metrics, kind=kind, draft_len=draft_len)
    return import_acceptance(_text(after.metrics), before=_text(before.metrics) if before.metrics.strip() else None, kind=kind)


def _text(metrics: str) -> str:
    """A text is told from a path by its line break."""
    return metrics if "\n" in metrics else metrics + "\n"


def _of_verify_calls(before: Snapshot, after: Snapshot, kind: str | None) -> Imported | None:
    """SGLang's acceptance gauges have no difference, but its counters have: tokens after the first of each request, over verify calls."""
    first, last = (totals(s.metrics, s.endpoint.at("/metrics")) for s in (before, after))
    calls, tokens, done = (grown(first, last, f"sglang:{n}_total") for n in ("spec_verify_calls", "generation_tokens", "num_requests"))
    told = having(Document(after.info, "server_info", tuple(_json(after.info))), "speculative_algorithm")
    if not calls or not tokens or done is None or not told:
        return None
    draft_len, _, said = sglang_draft_len(told[0][1], after.endpoint.at("/server_info"))
    if draft_len is None:
        return None
    row = {"num_drafts": calls, "num_draft_tokens": calls * draft_len, "num_accepted_tokens": max(0.0, tokens - done - calls)}
    return import_acceptance(json.dumps(row), kind=kind or said, draft_len=draft_len)


def _of_info(after: Snapshot, kind: str | None) -> Imported | None:
    """Since the server started: honest only where it was started for this arm."""
    return import_acceptance(after.info, kind=kind) if after.info.lstrip().startswith("{") else None


def _json(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []


def _other_traffic(before: Snapshot, after: Snapshot, load: Load) -> list[str]:
    name = _GENERATED.get(after.endpoint.engine)
    if name is None or not after.metrics.strip() or load.failures or load.error:
        return []
    made = grown(totals(before.metrics, "before"), totals(after.metrics, after.endpoint.at("/metrics")), name)
    mine = sum(r.tokens for r in load.sent)
    if made is None:
        return [f"{name} is missing from the metrics, or fell: whether others used the server cannot be told"]
    if made > mine * _OTHER_TRAFFIC:
        return [f"the server generated {made:g} tokens, this load {mine}: others use it, and the counters hold their traffic too"]
    return []


def check_loaded(identity: ServerIdentity, observed: Observed | None, *, kind: str | None, draft_len: int) -> tuple[str, ...]:
    """Did the server run the method and D that it was asked for? One text per contradiction, empty when there is none. D = 0: no speculation, or,
    with a `kind`, one that is loaded and drafts nothing (a K = 0 tier)."""
    at, out = identity.endpoint.base_url, []
    seen = None if observed is None else observed.acceptance
    if draft_len == 0 or kind is None:
        if kind is not None:
            if identity.speculating is False:
                out.append(f"{at}: a K=0 tier of {kind} was asked for, but the server runs without speculation")
            elif identity.method is not None and not _same(identity, kind):
                out.append(f"{at}: another method is loaded: asked for {kind}, the server says {identity.method}")
            if seen is not None and (seen.drafted or 0) > 0:
                out.append(f"{at}: {seen.drafted:g} tokens were drafted in a K=0 tier: its schedule is not obeyed")
        elif identity.speculating:
            out.append(f"{at}: speculation is on ({identity.method or 'method not named'}), but this arm is plain decoding: start it without")
        elif seen is not None and (seen.drafted or 0) > 0:
            out.append(f"{at}: {seen.drafted:g} tokens were drafted in an arm of plain decoding")
        return tuple(out)
    if identity.speculating is False:
        out.append(f"{at}: {kind} with D={draft_len} was asked for, but the server runs without speculation")
    if identity.method is not None and not _same(identity, kind):
        out.append(f"{at}: another method is loaded: asked for {kind}, the server says {identity.method}")
    stated = identity.draft_len
    if stated is not None and stated != draft_len:
        out.append(f"{at}: D={draft_len} was asked for, the server has D={stated}" + (": clamped" if stated < draft_len else ""))
    if observed is not None:
        out += _check_seen(at, observed, kind, draft_len, known=stated is not None and stated != draft_len)
    return tuple(out)


def _same(identity: ServerIdentity, kind: str) -> bool:
    """Names that stand for several kinds are no contradiction: SGLang calls MTP heads EAGLE or FROZEN_KV_MTP, vLLM runs PARD as a draft model."""
    shared = {"EAGLE": ("eagle3", "mtp"), "FROZEN_KV_MTP": ("mtp",), "draft_model": ("external", "pard"), "STANDALONE": ("external",)}
    return kind == identity.kind or kind in shared.get(identity.method or "", ())


def _check_seen(at: str, observed: Observed, kind: str, draft_len: int, *, known: bool) -> list[str]:
    seen = observed.acceptance
    if seen is None:
        why = "; ".join(observed.problems) or "no source of acceptance"
        return [f"{at}: no drafts of {kind} with D={draft_len} can be seen: {why}"]
    out = []
    if seen.draft_len is not None and seen.draft_len != draft_len and not known:
        what = "clamped" if seen.draft_len < draft_len else "more than asked for"
        out.append(f"{at}: D={draft_len} was asked for, its {observed.source} show D={seen.draft_len}: {what}")
    each = seen.drafted / seen.num_drafts if seen.drafted and seen.num_drafts else None
    if each is not None and each < 0.9 * min(draft_len, seen.draft_len or draft_len) and kind not in (*LOOKUP, "dspark"):
        out.append(f"{at}: {each:.2f} tokens were drafted a round, D={draft_len} was asked for: the engine adapts or limits D")
    if "no_positions" in seen.flags:
        out.append(f"{at}: acceptance by position is missing from its {observed.source}: only AL can be compared")
    return out
