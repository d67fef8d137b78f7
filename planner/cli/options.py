"""Text of command-line options -> values. Prefixes (ms) end here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.cases import DRAFTER_KINDS, WORKLOADS
from planner.errors import InputError, suggest

_DRAFTER = re.compile(r"^(?P<kind>[^:@]+)(?::(?P<model>[^@]+))?(?:@(?P<gpu>[^@]+?)(?:x(?P<n>\d+))?)?$")


def integers(text: str, name: str) -> tuple[int, ...]:
    """``1,2,4`` -> (1, 2, 4)."""
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--{name} must be whole numbers separated by commas", got=text, expected="e.g. 1,2,4,8") from None
    if not values or min(values) < 1:
        raise InputError(f"--{name} must be positive", got=text, expected="e.g. 1,2,4,8")
    return tuple(dict.fromkeys(values))


def drafter(text: str) -> dict[str, Any]:
    """``KIND[:MODEL][@GPUxN]`` -> a drafter object."""
    match = _DRAFTER.match(text.strip())
    if match is None:
        raise InputError("--drafter is malformed", got=text, expected="KIND[:MODEL][@GPUxN], e.g. external:Qwen/Qwen3-0.6B@l40sx1")
    kind = match["kind"].strip().lower().replace("-", "")
    if kind not in DRAFTER_KINDS:
        hint = suggest(kind, DRAFTER_KINDS) or f"Known kinds: {', '.join(DRAFTER_KINDS)}."
        raise InputError("unknown drafter kind", where="--drafter", got=match["kind"], hint=hint)
    out: dict[str, Any] = {"kind": kind}
    if match["model"]:
        out["model"] = match["model"]
    if match["gpu"]:
        out |= {"gpu": match["gpu"], "n_gpus": int(match["n"] or 1)}
    return out


def drafters(texts: Sequence[str]) -> tuple[dict[str, Any], ...] | None:
    """None (or ``all``) = every drafter that exists for the model."""
    if not texts or list(texts) == ["all"]:
        return None
    return tuple(drafter(t) for t in texts)


def workload(text: str) -> str:
    if text not in WORKLOADS:
        hint = suggest(text, WORKLOADS) or f"Known workloads: {', '.join(WORKLOADS)}."
        raise InputError("unknown workload", where="--workload", got=text, hint=hint)
    return text


def acceptance_file(path: Path | None) -> dict[str, Any] | None:
    """An acceptance object, or one per drafter kind, from a JSON file."""
    return None if path is None else read_object(path, "acceptance")


def read_object(path: Path, what: str) -> dict[str, Any]:
    text = read_text(path, what)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} file is not valid JSON", where=str(path), hint=str(error)) from None
    if not isinstance(data, dict):
        raise InputError(f"{what} file must hold one JSON object", where=str(path), got=type(data).__name__)
    return data


def read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the {what} file", where=str(path), hint=str(error)) from None


def seconds(value_ms: float | None, name: str) -> float | None:
    """Milliseconds of an option -> seconds."""
    if value_ms is None:
        return None
    if not (math.isfinite(value_ms) and value_ms > 0):
        raise InputError(f"--{name} must be a positive number of milliseconds", got=value_ms)
    return value_ms / 1e3
