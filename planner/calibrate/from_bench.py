"""A user's serving measurements -> adapted engine numbers in a profile (`draftline calibrate --from-bench FILES`).

Read: vLLM bench JSON (`vllm bench serve --save-result`), aiperf `profile_export_aiperf.json`, and CSV with the columns concurrency and
tpot_ms (and input_len, output_len where they vary). Times in milliseconds become seconds here.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_profiles.load import gpu_to_json
from gpu_profiles.schema import GpuProfile
from planner.calibrate.adapt import Adapted, adapt
from planner.calibrate.engine import features
from planner.cases import parse_case
from planner.deployment import resolve
from planner.errors import InputError


def read_runs(path: Path) -> list[dict[str, Any]]:
    """[{"tpot_s", "concurrency", "input_len", "output_len"}] of one file. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("cannot read the measurements", where=str(path), hint=str(error)) from None
    if text.lstrip().startswith(("{", "[")):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError("not valid JSON", where=str(path), hint=str(error)) from None
        runs = [_json_run(d, str(path)) for d in (data if isinstance(data, list) else [data])]
    else:
        runs = _csv_runs(text, str(path))
    if not runs:
        raise InputError("no measured run in this file", where=str(path), expected="at least one run with concurrency and TPOT")
    return runs


def _json_run(d: object, where: str) -> dict[str, Any]:
    if not isinstance(d, Mapping):
        raise InputError("a run must be a JSON object", where=where, got=type(d).__name__)
    if "median_tpot_ms" in d or "mean_tpot_ms" in d:  # vLLM bench
        done = _positive(d.get("completed", 1), "completed", where)
        given, made = (d.get(k) for k in ("total_input_tokens", "total_output_tokens"))
        lengths = tuple(None if n is None else _positive(n, "tokens", where) / done for n in (given, made))
        return _run(d.get("median_tpot_ms", d.get("mean_tpot_ms")), d.get("max_concurrency"), lengths, where)
    latency = d.get("inter_token_latency")
    if isinstance(latency, Mapping):  # aiperf: its inter-token latency of streamed responses is TPOT without speculation
        lengths = tuple(_average(d.get(k)) for k in ("input_sequence_length", "output_sequence_length"))
        config = d.get("input_config")
        load = config.get("loadgen") if isinstance(config, Mapping) else None
        concurrency = load.get("concurrency") if isinstance(load, Mapping) else d.get("concurrency")
        return _run(latency.get("p50", latency.get("avg")), concurrency, lengths, where)
    expected = "median_tpot_ms with max_concurrency (vLLM bench), or inter_token_latency (aiperf)"
    raise InputError("unknown measurement JSON", where=where, got=sorted(d)[:6], expected=expected)


def _average(metric: object) -> Any:
    return metric.get("avg") if isinstance(metric, Mapping) else None


def _csv_runs(text: str, where: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not {"concurrency", "tpot_ms"} <= set(rows[0]):
        got = list(rows[0]) if rows else []
        raise InputError("the CSV lacks its columns", where=where, got=got, expected="concurrency, tpot_ms[, input_len, output_len]")
    return [
        _run(r["tpot_ms"], r["concurrency"], (r.get("input_len") or None, r.get("output_len") or None), f"{where}, row {i}")
        for i, r in enumerate(rows, start=2)
    ]


def _run(tpot_ms: object, concurrency: object, lengths: tuple[Any, ...], where: str) -> dict[str, Any]:
    out: dict[str, Any] = {"tpot_s": _positive(tpot_ms, "TPOT", where) / 1e3, "concurrency": round(_positive(concurrency, "concurrency", where))}
    for key, value in zip(("input_len", "output_len"), lengths, strict=True):
        if value is not None:
            out[key] = max(1, round(_positive(value, key, where)))
    return out


def _positive(value: object, name: str, where: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"{name} must be a positive number", where=where, got=value)
    return number


def adapt_to(runs: Sequence[Mapping[str, Any]], deployment: Mapping[str, Any]) -> Adapted:
    """Adapt to runs of one deployment: the keys of a case without traffic; runs without lengths take the deployment's."""
    cases = []
    for r in runs:
        case = dict(deployment) | {k: r[k] for k in ("concurrency", "input_len", "output_len") if k in r}
        cases.append(parse_case(case, where="--from-bench"))
    rows = features(resolve(cases[0]), cases, [float(r["tpot_s"]) for r in runs])
    return adapt(rows, {k: resolve(cases[0]).overheads[k] for k in ("kernel_scale", "per_layer_s", "per_seq_s")})


def profile_with(made: Adapted, gpu: GpuProfile, engine: str) -> dict[str, Any]:
    """The GPU's profile as a file that `--gpu` takes, with the adapted numbers for this engine in its calibration."""
    calibration = dict(gpu.calibration or {})
    known = calibration.get("overheads")
    calibration["overheads"] = (dict(known) if isinstance(known, Mapping) else {}) | {
        engine: {k: made.overheads[k] for k in ("kernel_scale", "per_layer_s")}
    }
    return gpu_to_json(replace(gpu, calibration=calibration))
