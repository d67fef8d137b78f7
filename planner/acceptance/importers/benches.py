"""Files of benchmark tools: aiperf, Model-Optimizer specdec_bench (SPEED-Bench), InferenceX golden AL."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from planner.acceptance.importers.engines import having
from planner.acceptance.importers.numbers import count, keyed_counts, number, text_number, whole
from planner.acceptance.importers.reading import Reading
from planner.acceptance.importers.source import Document
from planner.errors import InputError, suggest

_POOLED = "pooled_spec_decode_acceptance_histogram"
_TOKEN_WEIGHTED = "spec_decode_token_weighted_acceptance_length"


def choose(parts: Mapping[str, Any], select: str | None, where: str, default: str) -> str:
    """The part of a source with several: the one asked for, else the default."""
    if select is None:
        return default
    hits = [name for name in parts if name == select] or [name for name in parts if select.lower() in re.split(r"[/ ]", name.lower())]
    if len(hits) != 1:
        raise InputError("--select names no single part", where=where, got=select, expected=" or ".join(parts), hint=suggest(select, parts))
    return hits[0]


# ---------------------------------------------------------------- aiperf


def _metric(row: Mapping[str, Any], name: str, where: str) -> float | None:
    """A metric of profile_export_aiperf.json: {unit, avg, ...} or a plain number."""
    value = row.get(name)
    if isinstance(value, Mapping):
        value = value.get("avg")
    return None if value is None else number(value, f"{where}.{name}")


def aiperf_profile(document: Document, kind: str | None) -> Reading:
    """profile_export_aiperf.json: the pooled histogram if there, else the totals, else the token-weighted AL."""
    where, row = next(
        (where, t)
        for where, t in having(document)
        if _POOLED in t or _TOKEN_WEIGHTED in t or "spec_decode_acceptance_length" in t or "total_spec_decode_steps" in t
    )
    mean = _metric(row, "spec_decode_acceptance_length", where)
    pooled = _metric(row, _TOKEN_WEIGHTED, where)
    rounds, accepted, drafted = (_metric(row, f"total_{n}", where) for n in ("spec_decode_steps", "accepted_draft_tokens", "draft_tokens"))
    raw = row.get(_POOLED)
    histogram = raw.get("avg", raw) if isinstance(raw, Mapping) and not any(str(k).isdigit() for k in raw) else raw
    survival = None
    if histogram is not None:
        sparse = keyed_counts(histogram, f"{where}.{_POOLED}")
        total = math.fsum(sparse.values())
        if total > 0:
            rounds = total
            accepted = math.fsum(k * v for k, v in sparse.items())
            survival = tuple(math.fsum(v for k, v in sparse.items() if k >= i) / total for i in range(1, max(sparse) + 1)) or None
    al = pooled if pooled is not None else mean
    if rounds is None and al is None:
        raise InputError("no data: no acceptance metric", where=where, expected=_TOKEN_WEIGHTED)
    only_mean = rounds is None and pooled is None
    return Reading(
        format="aiperf profile", engine="vllm", where=where, kind=kind, num_drafts=rounds, accepted=accepted, drafted=drafted, survival=survival,
        acceptance_len=al, request_acceptance_len=None if only_mean else mean, weighting="requests" if only_mean else "rounds", skips_empty=True,
        definition="pooled histogram (keys = drafts accepted) or totals; AL = spec_decode_token_weighted_acceptance_length = 1 + accepted/rounds; "
        "spec_decode_acceptance_length is the mean over requests; rates are percent",
    )  # fmt: skip


def aiperf_server_metrics(document: Document, kind: str | None) -> Reading:
    """server_metrics_export.json: all series are summed (aiperf 0.13 reads only the first and undercounts several engines)."""
    where, row = next((w, t) for w, t in having(document, "metrics") if isinstance(t["metrics"], Mapping))
    metrics = row["metrics"]

    def total(name: str) -> float | None:
        series = metrics[name].get("series") if isinstance(metrics.get(name), Mapping) else None
        if not isinstance(series, list):
            return None
        stats = [s["stats"] for s in series if isinstance(s, Mapping) and isinstance(s.get("stats"), Mapping)]
        return math.fsum(count(s["total"], f"{where}.metrics.{name}.total") for s in stats if "total" in s)

    base = "vllm:spec_decode_num_"
    rounds, drafted, accepted = total(base + "drafts"), total(base + "draft_tokens"), total(base + "accepted_tokens")
    if rounds is None or accepted is None:
        raise InputError(
            "the export has no vLLM speculation counters", where=where, expected=f"{base}drafts and {base}accepted_tokens with stats.total"
        )
    return Reading(
        format="aiperf server metrics", engine="vllm", where=where, kind=kind, num_drafts=rounds, drafted=drafted, accepted=accepted,
        definition="AL = 1 + accepted/drafts from the counters' totals over the run, all series (engines) summed", skips_empty=True,
        generated=total("vllm:generation_tokens"),
    )  # fmt: skip


# ---------------------------------------------------------------- Model-Optimizer


def specdec_bench(document: Document, kind: str | None, select: str | None) -> Reading:
    """acceptance_rate.json: a list, one entry per run; rebuilt from the last run's histogram of chunk lengths (bonus included)."""
    rows = having(document, "Acceptance_Length_Histogram") or having(document, "Average_AL") or having(document, "Category_AL")
    where, row = rows[-1]
    notes = [f"{len(rows)} runs in the file: the last is used"] if len(rows) > 1 else []
    draft_len, said = _configured(document)
    mean = None if row.get("Average_AL") is None else number(row["Average_AL"], f"{where}.Average_AL")
    raw = row.get("Category_AL")
    categories = {str(k): number(v, f"{where}.Category_AL.{k}") for k, v in raw.items()} if isinstance(raw, Mapping) else {}
    notes += said
    if select is not None:
        name = choose(categories, select, where, "")
        return Reading(
            format="specdec_bench category", engine="unknown", where=where, kind=kind, weighting="requests", acceptance_len=categories[name],
            draft_len=draft_len, definition="Category_AL: mean of the requests' own AL, bonus included", notes=tuple(notes), parts=categories,
        )  # fmt: skip
    if row.get("Acceptance_Length_Histogram") is None:
        return Reading(
            format="specdec_bench", engine="unknown", where=where, kind=kind, weighting="requests", draft_len=draft_len, notes=tuple(notes),
            acceptance_len=mean if mean is not None else math.fsum(categories.values()) / max(1, len(categories)), parts=categories,
            definition="Average_AL: mean of the requests' own AL, bonus included",
        )  # fmt: skip
    hist = keyed_counts(row["Acceptance_Length_Histogram"], f"{where}.Acceptance_Length_Histogram")
    total = math.fsum(hist.values())
    zero = hist.get(0, 0.0)
    if total - zero <= 0:
        raise InputError("no data: the histogram is empty", where=where, expected="at least one round")
    rounds = total - zero
    survival = tuple(math.fsum(v for k, v in hist.items() if k >= i + 1) / rounds for i in range(1, max(hist)))
    warnings = ("the histogram counts streamed chunks: the first chunk of a request (length 1) is in it, and merged chunks look like longer rounds",)
    return Reading(
        format="specdec_bench", engine="unknown", where=where, kind=kind, num_drafts=rounds, survival=survival or None, draft_len=draft_len,
        accepted=math.fsum((k - 1) * v for k, v in hist.items() if k >= 1), request_acceptance_len=mean, notes=tuple(notes), warnings=warnings,
        definition="rebuilt from Acceptance_Length_Histogram (keys = tokens per round, bonus included; lengths that never occurred are missing): "
        "s_i = rounds of i + 1 or more tokens / rounds", parts=categories,
    )  # fmt: skip


def _configured(document: Document) -> tuple[int | None, list[str]]:
    """D from configuration.json beside the file."""
    path = None if document.folder is None else document.folder / "configuration.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None, ["configuration.json beside the file cannot be read: D is not taken from it"]
    if not isinstance(config, Mapping):
        return None, []
    for key in ("draft_length", "block_size"):
        if isinstance(config.get(key), int):
            note = f"D={config[key]} from {key} of configuration.json"
            return whole(config[key], f"{path}: {key}", low=1), [
                note + (" (the bench passes the block size itself to vLLM)" if key == "block_size" else "")
            ]
    return None, []


# ---------------------------------------------------------------- YAML and CSV tables


def golden_yaml(table: Mapping[Any, Any], document: Document, kind: str | None, select: str | None) -> Reading:
    """InferenceX golden AL: model -> thinking_on | thinking_off -> {D: AL}."""
    curves: dict[str, tuple[tuple[int, float], ...]] = {}
    for model, modes in table.items():
        if str(model).startswith("_") or not isinstance(modes, Mapping):
            continue
        nested = {str(mode): c for mode, c in modes.items() if isinstance(c, Mapping)} or {"": modes}
        for mode, curve in nested.items():
            where = f"{document.where}: {model}" + (f"/{mode}" if mode else "")
            points = [(whole(d, f"{where}, key", low=0), number(al, f"{where}, D={d}")) for d, al in curve.items()]
            curves[f"{model}/{mode}" if mode else str(model)] = tuple(sorted({d: al for d, al in points if d > 0}.items()))
    curves = {k: v for k, v in curves.items() if v}
    if not curves:
        raise InputError("the YAML holds no AL curve", where=document.where, expected="model: {thinking_on: {1: 1.8, 2: 2.4}}")
    name = choose(curves, select, document.where, next(iter(curves)))
    meta = table.get("_metadata")
    notes = [f"drafter: {meta.get('draft-model')}"] if isinstance(meta, Mapping) and meta.get("draft-model") else []
    warnings = (
        [f"the file holds {len(curves)} curves ({', '.join(curves)}): {name} is used; --select picks another"]
        if len(curves) > 1 and not select
        else []
    )
    return Reading(
        format="golden AL yaml", engine="unknown", where=f"{document.where}: {name}", kind=kind, points=curves[name], notes=tuple(notes),
        definition="key = num_speculative_tokens, value = AL with bonus; each D is its own run (SPEED-Bench coding, output 4096)",
        warnings=tuple(warnings), parts={k: [list(p) for p in v] for k, v in curves.items()},
    )  # fmt: skip


def speed_bench_csv(rows: list[list[str]], document: Document, kind: str | None, select: str | None) -> Reading:
    """`aiperf speed-bench-report`: Model,<categories...>,Overall. Blank = missing; Overall = plain mean of the categories; no D."""
    header, body = [c.strip() for c in rows[0]], [r for r in rows[1:] if r and r[0].strip()]
    if not body:
        raise InputError("the report has no rows", where=document.where, expected="one row per model")
    values: dict[str, dict[str, float]] = {}
    for row in body:
        cells = dict(zip(header[1:], row[1:], strict=False))
        values[row[0].strip()] = {k: text_number(v, f"{document.where}: {row[0]}, {k}") for k, v in cells.items() if v.strip()}
    model = next(iter(values))
    pick = select
    if select is not None and any(select.lower() == m.lower() for m in values):
        model, pick = next(m for m in values if m.lower() == select.lower()), None
    row_values = values[model]
    if not row_values:
        raise InputError("the row has no values", where=f"{document.where}: {model}", expected="at least one category")
    name = choose(row_values, pick, document.where, "Overall" if "Overall" in row_values else next(iter(row_values)))
    al = row_values[name]
    if not 1 <= al <= 33:
        raise InputError("not an acceptance length", where=f"{document.where}: {model}, {name}", got=al, expected="1 or more tokens a round",
                         hint="The report was made with --metric accept_rate or throughput; make it with --metric accept_length.")  # fmt: skip
    warnings = [f"the report has {len(values)} models: {model} is used; --select picks another"] if len(values) > 1 and (pick or not select) else []
    plain = name == "Overall"
    return Reading(
        format="speed-bench report", engine="unknown", where=f"{document.where}: {model}, {name}", kind=kind, acceptance_len=al, flags=("rounded",),
        weighting="unknown" if plain else "rounds",
        definition="AL per category, bonus included, two decimals; Overall = plain mean of the categories",
        warnings=tuple(warnings), notes=("Overall weighs every category alike: pick your traffic's with --select",) if plain else (),
        parts={k: dict(v) for k, v in values.items()},
    )  # fmt: skip
