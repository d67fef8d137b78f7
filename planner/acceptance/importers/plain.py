"""Plain tables (per-position CSV and JSON, counter snapshots, the contract's own forms) and llama.cpp's batch-cost line."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.acceptance.importers.engines import having
from planner.acceptance.importers.numbers import count, number, share, shown, text_number, whole
from planner.acceptance.importers.reading import Reading
from planner.acceptance.importers.settle import merged
from planner.acceptance.importers.source import Document
from planner.acceptance.survival import isotonic
from planner.errors import InputError

_PERCENT = "Divide percentages by 100."
COSTS = re.compile(r"GGML_BATCH_COSTS\s*[=:]\s*[\"']?([-+\d.,eE\s]+)")
_SURVIVAL = ("survival_prob", "per_position", "per_position_acceptance_rates", "per_position_acceptance", "acceptance_rates")
_CONDITIONAL = ("conditional_prob", "conditional", "conditional_acceptance_rates")
_POSITION = ("position", "pos", "draft_position", "i")
_RATE = ("rate", "acceptance", "acceptance_rate", "survival", "survival_prob", "s", "prob")
_AL = ("acceptance_len", "acceptance_length", "al", "accept_length", "mean_acceptance_length")
_D = ("draft_len", "d", "k", "num_speculative_tokens", "at_draft_len")


# ---------------------------------------------------------------- counter snapshots


def _plain_name(key: str) -> str:
    name = key.lower().split(":")[-1]
    for prefix in ("spec_decode_", "vllm_spec_decode_"):
        name = name.removeprefix(prefix)
    return name.removesuffix("_delta").removesuffix("_total").removeprefix("num_")


def snapshot_keys(row: Mapping[Any, Any]) -> dict[str, Any]:
    """{"drafts", "draft_tokens", "accepted_tokens", "generation_tokens", ...} whatever prefix and suffix they carry."""
    return {_plain_name(str(k)): v for k, v in row.items()}


def is_snapshot(row: Mapping[Any, Any]) -> bool:
    return {"drafts", "draft_tokens", "accepted_tokens"} <= snapshot_keys(row).keys()


def snapshot(document: Document, kind: str | None) -> Reading:
    """Totals (drafts, drafted, accepted), with or without generated tokens; no positions."""
    readings = []
    for where, row in having(document):
        if not is_snapshot(row):
            continue
        keys = snapshot_keys(row)
        generated = keys.get("generation_tokens")
        readings.append(Reading(
            format="counter snapshot", engine="unknown", where=where, kind=kind, skips_empty=True,
            num_drafts=count(keys["drafts"], f"{where}: drafts"), drafted=count(keys["draft_tokens"], f"{where}: draft_tokens"),
            accepted=count(keys["accepted_tokens"], f"{where}: accepted_tokens"),
            generated=None if generated is None else count(generated, f"{where}: generation_tokens"),
            definition="totals of a window: AL = 1 + accepted/drafts; D = drafted/drafts where that is whole",
        ))  # fmt: skip
    return merged(readings, f"{len(readings)} snapshots added up")


# ---------------------------------------------------------------- plain JSON


def _named(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    lower = {str(k).lower(): str(k) for k in row}
    return next((lower[n] for n in names if n in lower), None)


def is_plain(value: object) -> bool:
    """A list of numbers, a list of points or positions, or an object with one of the known keys."""
    if isinstance(value, list):
        return bool(value) and (all(isinstance(v, int | float) for v in value) or all(isinstance(v, Mapping) and _row_like(v) for v in value))
    if not isinstance(value, Mapping):
        return False
    known = (*_SURVIVAL, *_CONDITIONAL, "points", "alpha")
    return _named(value, known) is not None or (_named(value, _AL) is not None and _named(value, _D) is not None)


def _row_like(row: Mapping[str, Any]) -> bool:
    return (_named(row, _POSITION) is not None and _named(row, _RATE) is not None) or (_named(row, _D) is not None and _named(row, _AL) is not None)


def plain_json(value: Any, document: Document, kind: str | None) -> Reading:
    """The contract's forms and close relatives."""
    where = document.where
    if isinstance(value, list) and isinstance(value[0], Mapping):
        return _from_rows([{str(k): v for k, v in row.items()} for row in value], where, kind)
    if isinstance(value, list):
        return _positions([share(v, f"{where}[{n}]", _PERCENT) for n, v in enumerate(value)], where, kind)
    if (name := _named(value, _SURVIVAL)) is not None:
        return _positions(_shares(value[name], f"{where}: {name}"), where, kind)
    if (name := _named(value, _CONDITIONAL)) is not None:
        product, out = 1.0, []
        for rate in _shares(value[name], f"{where}: {name}"):
            product *= rate
            out.append(product)
        reading = _positions(out, where, kind)
        return _with(reading, "conditional rates (each given the one before) multiplied up to survival", "conditional")
    if (name := _named(value, ("points",))) is not None:
        rows = value[name] if isinstance(value[name], list) else []
        if not rows or not all(isinstance(r, Mapping) and _row_like(r) for r in rows):
            raise InputError(
                "not a list of points", where=f"{where}: {name}", got=shown(value[name]), expected='[{"draft_len": 3, "acceptance_len": 2.4}]'
            )
        return _from_rows(rows, where, kind)
    if (name := _named(value, ("alpha",))) is not None:
        alpha = share(value[name], f"{where}: {name}")
        raise InputError("alpha alone is no measurement", where=where, got=alpha, expected="an acceptance length at a draft length",
                         hint='Plan takes {"alpha": a} directly; it is the last resort.')  # fmt: skip
    al, d = _named(value, _AL), _named(value, _D)
    return Reading(
        format="plain JSON", engine="unknown", where=where, kind=kind, weighting="unknown",
        definition="AL tokens per round, bonus included, at one D",
        acceptance_len=number(value[al], f"{where}: {al}"), draft_len=whole(value[d], f"{where}: {d}", low=1),
    )  # fmt: skip


def _with(reading: Reading, note: str, flag: str) -> Reading:
    return replace(reading, notes=(*reading.notes, note), flags=(*reading.flags, flag))


def _shares(raw: object, where: str) -> list[float]:
    if not isinstance(raw, list) or not raw:
        raise InputError("not a list of rates", where=where, got=shown(raw), expected="a non-empty list of shares in 0..1")
    return [share(v, f"{where}[{n}]", _PERCENT) for n, v in enumerate(raw)]


def _positions(rates: list[float], where: str, kind: str | None) -> Reading:
    return Reading(
        format="per-position list", engine="unknown", where=where, kind=kind, weighting="unknown", survival=tuple(rates), draft_len=len(rates),
        definition="read as s_i = P(first i drafts all accepted); D = length of the list; AL = 1 + sum",
    )  # fmt: skip


def _from_rows(rows: list[Mapping[str, Any]] | list[dict[str, Any]], where: str, kind: str | None) -> Reading:
    """Rows of (position, rate) or of (draft_len, acceptance_len)."""
    if all(_named(r, _D) is not None and _named(r, _AL) is not None for r in rows):
        points: dict[int, list[float]] = {}
        for n, r in enumerate(rows):
            d = whole(r[_named(r, _D) or ""], f"{where}, row {n + 1}: draft length", low=0)
            points.setdefault(d, []).append(number(r[_named(r, _AL) or ""], f"{where}, row {n + 1}: acceptance length"))
        found = tuple((d, math.fsum(v) / len(v)) for d, v in sorted(points.items()) if d > 0)
        if not found:
            raise InputError("no row with drafts", where=where, expected="a draft length of 1 or more")
        return Reading(
            format="plain points", engine="unknown", where=where, kind=kind, weighting="unknown", points=found,
            definition="AL at several D, bonus included; repeated D are averaged",
        )  # fmt: skip
    at: dict[int, float] = {}
    for n, r in enumerate(rows):
        p, v = _named(r, _POSITION), _named(r, _RATE)
        if p is None or v is None:
            raise InputError("a row lacks position or rate", where=f"{where}, row {n + 1}", expected="position and rate in every row")
        position = whole(r[p], f"{where}, row {n + 1}: {p}")
        if position in at:
            raise InputError("a position is given twice", where=f"{where}, row {n + 1}", got=position, expected="each position once")
        at[position] = share(r[v], f"{where}, row {n + 1}: {v}", _PERCENT)
    first = min(at)
    if first > 1 or sorted(at) != list(range(first, first + len(at))):
        raise InputError("positions are not consecutive", where=where, got=sorted(at)[:20], expected="0, 1, 2, ... or 1, 2, 3, ...")
    return _positions([at[i] for i in sorted(at)], where, kind)


# ---------------------------------------------------------------- CSV


def csv_rows(text: str) -> list[list[str]]:
    """Rows of a comma, semicolon or tab separated text; empty when it is none."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return []
    delimiter = max(",;\t", key=lines[0].count)
    try:
        return [row for row in csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter) if row]
    except csv.Error:
        return []


def csv_kind(rows: list[list[str]]) -> str:
    """speed-bench, speculators, positions, points, numbers, or nothing."""
    if not rows:
        return ""
    header = [c.strip().lower() for c in rows[0]]
    if len(header) > 1 and header[0] == "model" and len(rows) > 1:
        return "speed-bench"
    if "num_drafts" in header and any(c.startswith("acceptance_at_pos_") for c in header):
        return "speculators"
    if any(c in _D for c in header) and any(c in _AL for c in header):
        return "rows"
    if any(c in _POSITION for c in header) and any(c in _RATE for c in header):
        return "rows"
    numbers = [_is_number(c) for row in rows for c in row if c.strip()]
    return "numbers" if numbers and all(numbers) and (len(rows) == 1 or all(len(r) <= 2 for r in rows)) else ""


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def plain_csv(rows: list[list[str]], document: Document, kind: str | None) -> Reading:
    """Per-position or per-D tables, with a header or bare numbers (one row; one column; position and rate)."""
    where = document.where
    if csv_kind(rows) == "numbers":
        if len(rows) > 1 and all(len(r) == 2 for r in rows):
            pairs = [{"position": text_number(a, where), "rate": text_number(b, where)} for a, b in rows]
            return _from_rows(pairs, where, kind)
        return _positions([share(text_number(c, where), where, _PERCENT) for row in rows for c in row if c.strip()], where, kind)
    header = [c.strip().lower() for c in rows[0]]
    keep = [c for c in header if c in (*_D, *_AL, *_POSITION, *_RATE)]
    body = [{c: text_number(v, f"{where}, column {c}") for c, v in zip(header, r, strict=False) if c in keep and v.strip()} for r in rows[1:]]
    body = [r for r in body if r]
    if not body:
        raise InputError("the table has no rows", where=where, expected="one row per position or per draft length")
    return _from_rows(body, where, kind)


def speculators_csv(rows: list[list[str]], document: Document, kind: str | None) -> Reading:
    """speculators `acceptance.csv`: subset,num_drafts,...,acceptance_at_pos_0..; subsets are added up by their rounds."""
    header = [c.strip() for c in rows[0]]
    readings: list[Reading] = []
    parts: dict[str, float] = {}
    for row in rows[1:]:
        cells = dict(zip(header, row, strict=False))
        where = f"{document.where}: {cells.get('subset', '?')}"
        totals = {k: text_number(cells.get(k, ""), f"{where}, {k}") for k in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
        at = sorted(
            (c for c in header if re.fullmatch(r"acceptance_at_pos_\d{1,4}", c) and cells.get(c, "").strip()), key=lambda c: int(c.rsplit("_", 1)[1])
        )
        rates = tuple(text_number(cells[c], f"{where}, {c}") for c in at)
        readings.append(Reading(
            format="speculators acceptance.csv", engine="vllm", where=where, kind=kind, num_drafts=count(totals["num_drafts"], where),
            drafted=count(totals["num_draft_tokens"], where), accepted=count(totals["num_accepted_tokens"], where), survival=rates or None,
            draft_len=len(rates) or None, skips_empty=True,
            definition="acceptance_at_pos_i (0-based) = s_(i+1), cumulative; AL = 1 + accepted/drafts; subsets pooled by rounds",
        ))  # fmt: skip
        if totals["num_drafts"] > 0:
            parts[str(cells.get("subset", len(parts)))] = 1 + totals["num_accepted_tokens"] / totals["num_drafts"]
    if not readings:
        raise InputError("the table has no rows", where=document.where, expected="one row per subset")
    return _parts(merged(readings, f"{len(readings)} subset(s), pooled over their rounds"), parts)


def _parts(reading: Reading, parts: Mapping[str, Any]) -> Reading:
    return replace(reading, parts=dict(parts))


# ---------------------------------------------------------------- cost, not acceptance


def batch_costs(document: Document) -> Reading:
    """GGML_BATCH_COSTS (llama.cpp PR 17034): relative cost per token at batch n, so t(n)/t(1) = n * c[n]."""
    found = COSTS.search(document.text)
    cells = [c for c in re.split(r"[,\s]+", found[1]) if c] if found else []
    values = [text_number(c, f"{document.where}: GGML_BATCH_COSTS[{n + 1}]") for n, c in enumerate(cells)]
    if not values or not 1e-6 <= min(values) <= max(values) <= 1e6:
        raise InputError("GGML_BATCH_COSTS is not a list of positive costs", where=document.where, got=shown(cells[:5]), expected="1,0.605,0.473,...")
    ratio = [n * c / values[0] for n, c in enumerate(values, 1)]
    # A larger batch never takes less time: the reverse order makes the non-increasing fit a non-decreasing one.
    smooth = isotonic(ratio[::-1])[::-1]
    notes = ["t(n)/t(1) = n * c[n]: the numbers are costs per token, not times"]
    if max(abs(a - b) for a, b in zip(ratio, smooth, strict=True)) > 1e-12:
        notes.append("t(n) fell somewhere with n: smoothed to a non-decreasing curve")
    warning = "GGML_BATCH_COSTS holds the cost of verifying n tokens, no acceptance: import acceptance from timings, /metrics or the log"
    return Reading(
        format="GGML_BATCH_COSTS", engine="llamacpp", where=document.where, weighting="unknown", step_ratio=tuple(smooth), notes=tuple(notes),
        definition="relative cost per token at batch n = 1..N; t(n)/t(1) = n * c[n]", warnings=(warning,), flags=("cost",),
    )  # fmt: skip
