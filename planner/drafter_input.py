"""Checks of the contract's drafter object: keys, types, ranges, each with one clear error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.acceptance.transfer import KINDS, check_kind
from planner.drafter_heads import load_config
from planner.errors import InputError, suggest
from planner.models.spec import Layer

KEYS = (
    "kind", "model", "layers", "hidden_size", "params", "draft_vocab", "block", "n_predict", "window", "weights_dtype", "kv_dtype",
    "tp", "gpu", "n_gpus", "match_prob", "verify_width", "topk",
)  # fmt: skip
DTYPES = ("bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4")
LOOKUP = ("ngram", "suffix")
#: Engines' own words for a kind, for the hint.
WORDS = {"eagle": "eagle3", "eagle-3": "eagle3", "nextn": "mtp", "draft_model": "external", "standalone": "external", "n-gram": "ngram"}


def checked(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(spec, Mapping):
        raise InputError("not an object", where=where, got=spec, expected='an object with at least "kind"')
    for key in spec:
        if key not in KEYS:
            expected, hint = "one of " + ", ".join(KEYS), suggest(str(key), KEYS)
            raise InputError(f"unknown key {key!r}", where=where, got=key, expected=expected, hint=hint)
    kind = spec.get("kind")
    if isinstance(kind, str) and kind not in WORDS:
        kind = kind.lower() if kind.lower() in WORDS else kind
    if isinstance(kind, str) and kind in WORDS:
        expected, hint = "one of " + ", ".join(KINDS), f"Did you mean {WORDS[kind]}?"
        raise InputError("unknown drafter kind", where=f"{where}.kind", got=spec["kind"], expected=expected, hint=hint)
    out: dict[str, Any] = {**spec, "kind": check_kind(kind, f"{where}.kind")}
    least = {"layers": 0 if kind in LOOKUP else 1}
    for key in ("layers", "hidden_size", "draft_vocab", "block", "n_predict", "window", "tp", "n_gpus", "verify_width", "topk"):
        if out.get(key) is not None:
            out[key] = whole(out[key], f"{where}.{key}", least.get(key, 1))
    if out.get("params") is not None:
        out["params"] = real(out["params"], f"{where}.params", 1e4, 1e14)
    if out.get("match_prob") is not None:
        out["match_prob"] = real(out["match_prob"], f"{where}.match_prob", 0.0, 1.0)
    for key in ("weights_dtype", "kv_dtype"):
        if out.get(key) is not None and str(out[key]) not in DTYPES:
            hint = suggest(str(out[key]), DTYPES)
            raise InputError("unknown dtype", where=f"{where}.{key}", got=out[key], expected="one of " + ", ".join(DTYPES), hint=hint)
    if out.get("model") is not None and not isinstance(out["model"], str | Mapping):
        expected = "a catalogue id, a config path or a config object"
        raise InputError("not a model", where=f"{where}.model", got=out["model"], expected=expected)
    if (out.get("topk") or 1) > 1 and not out.get("verify_width"):
        hint = "Give verify_width (tokens verified per round) and a measured acceptance_len, or set topk 1 for a chain."
        raise InputError("draft trees are not modelled", where=f"{where}.topk", got=out["topk"], expected="1", hint=hint)
    return out


def whole(value: object, where: str, least: int) -> int:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    if not usable or not least <= int(value) < 10**8:  # type: ignore[call-overload]
        raise InputError("not a usable count", where=where, got=value, expected=f"a whole number of at least {least}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def real(value: object, where: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        hint = "Write 1.5e9 for 1.5 billion." if where.endswith("params") else ""
        raise InputError("not a usable number", where=where, got=value, expected=f"a number in {low:g}..{high:g}", hint=hint)
    return float(value)


def check_split(layers: tuple[Layer, ...], tp: int | None, n_gpus: int | None, where: str) -> None:
    """A tp that does not divide the heads cannot be served; extra GPUs need a device of their own."""
    for layer in layers:
        if tp and layer.attention is not None and layer.attention.num_heads % tp:
            raise InputError("tp does not divide the drafter's heads", where=f"{where}.tp", got=tp,
                             expected=f"a divisor of {layer.attention.num_heads}")  # fmt: skip
    if tp and n_gpus and n_gpus % tp:
        expected = f"a divisor of n_gpus = {n_gpus}"
        raise InputError("tp does not divide the drafter's GPUs", where=f"{where}.tp", got=tp, expected=expected)


def read_source(source: object, where: str) -> dict[str, Any] | None:
    """The config behind `model` where it is an object or a path; None for ids."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str):
        return None
    path = Path(source).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError):
        there = False
    if there or source.endswith(".json"):
        return load_config(path, f"{where}.model")
    return None
