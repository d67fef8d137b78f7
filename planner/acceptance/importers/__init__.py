"""Acceptance out of what engines and benchmark tools write: recognised by content, converted to one definition, doubts said.

`import_acceptance` is the whole interface. Formats, in the order they are looked for, are in `FORMATS`; what each counts and how it is
converted stands in `Imported.definition`, what an AL is the mean over in `Imported.weighting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.acceptance.importers import benches, engines, logs, plain, prometheus
from planner.acceptance.importers.reading import Imported, Reading
from planner.acceptance.importers.requests import SGLANG, TRTLLM, VLLM
from planner.acceptance.importers.settle import settle
from planner.acceptance.importers.source import Document, read_source
from planner.errors import InputError

__all__ = ["FORMATS", "Imported", "import_acceptance"]

#: What is recognised, and by what. The last column of an error for unknown input.
FORMATS = {
    "/metrics": "vllm:spec_decode_*, llamacpp:spec_decode_*, sglang:spec_accept_length or trtllm_spec_decode_* lines",
    "vllm bench": "spec_decode_acceptance_length beside spec_decode_num_drafts",
    "vllm per-request": "metrics.speculative_decoding with num_spec_steps (responses, guidellm reports, aiperf rows)",
    "vllm log": "'SpecDecoding metrics:' (V1) or 'Speculative metrics:' (V0) lines",
    "sglang": "internal_states[].avg_spec_accept_length, accept_length, meta_info.spec_verify_ct, or 'accept len:' log lines",
    "trtllm": "specDecodingStats, decoding_stats, or choices[].speculative_decoding with total_accepted_draft_tokens",
    "llamacpp": "timings with draft_n, 'draft acceptance =' or 'statistics ...' log lines, or n_drafted with n_accept",
    "aiperf": "spec_decode_token_weighted_acceptance_length, a server metrics export, or a Model,<categories>,Overall CSV",
    "specdec_bench": "Acceptance_Length_Histogram, Average_AL or Category_AL",
    "golden AL yaml": "model: {thinking_on: {1: 1.8, 2: 2.4}}",
    "plain": "a per-position list or CSV, points of (draft_len, acceptance_len), or totals num_drafts, num_draft_tokens, num_accepted_tokens",
    "GGML_BATCH_COSTS": "a cost table (recognised, and said to be no acceptance)",
}

_Reader = Callable[[Document, str | None], Reading]


def import_acceptance(
    source: str | Path,
    *,
    before: str | Path | None = None,
    draft_len: int | None = None,
    kind: str | None = None,
    select: str | None = None,
) -> Imported:
    """Acceptance from a text, a file, a run folder or an http(s) address.

    `before`: an earlier scrape of the same /metrics, to get the window between the two. `draft_len`: D (tokens), where the source does not
    say it. `kind`: the drafter kind; look-up kinds (ngram, suffix) are corrected to all rounds. `select`: the model, mode or category of a
    source that holds several. Whatever is wrong is one `InputError`.
    """
    document = read_source(source)
    first = None if before is None else read_source(before)
    reading = _read(document, first, kind, select)
    done = settle(reading, draft_len=draft_len, kind=kind)
    if document.notes:
        return replace(done, notes=(*document.notes, *done.notes))
    return done


def _read(document: Document, first: Document | None, kind: str | None, select: str | None) -> Reading:
    if not document.values and prometheus.looks_like_metrics(document.text):
        return prometheus.read_metrics(document, first)
    if first is not None:
        raise InputError("only two /metrics scrapes can be differenced", where=document.where, expected="Prometheus text in both",
                         hint="Averages without counters have no difference; leave --after out.")  # fmt: skip
    reading = _json(document, kind, select) if document.values else _text(document, kind, select)
    if reading is None:
        looked = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
        hint = f"As JSON it fails: {document.json_error}." if document.json_error else "See draftline acceptance import --help."
        raise InputError(
            "no acceptance data is recognised", where=document.where, got=document.text.strip()[:60], expected=f"one of: {looked}", hint=hint
        )
    return reading


def _json(document: Document, kind: str | None, select: str | None) -> Reading | None:
    def there(*keys: str) -> bool:
        return bool(engines.having(document, *keys))

    table: list[tuple[bool, _Reader]] = [
        (there("specDecodingStats"), engines.trtllm_iterations),
        (there("decoding_stats"), engines.trtllm_report),
        (there(TRTLLM.accepted, TRTLLM.rounds), engines.trtllm_choices),
        (there("Acceptance_Length_Histogram") or there("Average_AL") or there("Category_AL"), lambda d, k: benches.specdec_bench(d, k, select)),
        (any(there(k) for k in ("total_spec_decode_steps", "spec_decode_token_weighted_acceptance_length")), benches.aiperf_profile),
        (there("pooled_spec_decode_acceptance_histogram"), benches.aiperf_profile),
        (there("spec_decode_num_drafts", "spec_decode_accepted_tokens") or there("spec_decode_per_position_acceptance_rates"), engines.vllm_bench),
        (there("spec_decode_acceptance_length", "spec_decode_acceptance_rate"), engines.vllm_bench),
        (there("spec_decode_acceptance_length"), benches.aiperf_profile),
        (there(VLLM.rounds, VLLM.histogram) or there(VLLM.rounds, VLLM.accepted), engines.vllm_requests),
        (there(SGLANG.rounds), engines.sglang_generate),
        (there("internal_states") or there("accept_length"), engines.sglang_info),
        (there("draft_n", "draft_n_accepted"), engines.llamacpp_timings),
        (there("n_drafted", "n_accept"), engines.llamacpp_old_json),
        (_server_metrics(document), benches.aiperf_server_metrics),
        (any(plain.is_snapshot(t) for _, t in engines.having(document)), plain.snapshot),
    ]
    for hit, reader in table:
        if hit:
            return reader(document, kind)
    value = document.values[0] if len(document.values) == 1 else list(document.values)
    return plain.plain_json(value, document, kind) if plain.is_plain(value) else None


def _server_metrics(document: Document) -> bool:
    return any(
        isinstance(t["metrics"], Mapping) and any(str(k).startswith("vllm:spec_decode") for k in t["metrics"])
        for _, t in engines.having(document, "metrics")
    )


def _text(document: Document, kind: str | None, select: str | None) -> Reading | None:
    text = document.text
    if plain.COSTS.search(text):
        return plain.batch_costs(document)
    if logs.looks_like_log(text):
        return logs.read_log(document, kind)
    if document.json_error:
        return None
    rows = plain.csv_rows(text)
    which = plain.csv_kind(rows)
    if which == "speed-bench":
        return benches.speed_bench_csv(rows, document, kind, select)
    if which == "speculators":
        return plain.speculators_csv(rows, document, kind)
    if which:
        return plain.plain_csv(rows, document, kind)
    table = _yaml(text)
    return benches.golden_yaml(table, document, kind, select) if table is not None else None


def _yaml(text: str) -> Mapping[Any, Any] | None:
    """The mapping of a small YAML text with number keys, through the safe loader; None when it is none."""
    import yaml

    if len(text) > 1_000_000:
        return None
    try:
        table = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError, AttributeError, KeyError):
        return None
    if not isinstance(table, Mapping):
        return None
    inner = [v for v in table.values() if isinstance(v, Mapping)]
    deeper = [c for v in inner for c in v.values() if isinstance(c, Mapping)]
    curves = [c for c in (*inner, *deeper) if c and all(isinstance(k, int) for k in c)]
    return table if curves else None
