"""Numbers and tables out of other people's files: finite, in range, or one error that says where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.errors import InputError

MAX_DRAFT_LEN = 1024
_MOST_NODES = 2_000_000
_MOST = 1e15
"""No counter of tokens or rounds gets there; sums of more would overflow."""


def number(value: object, where: str, expected: str = "a finite number") -> float:
    """An int or float (no boolean, no text), finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError("not a number", where=where, got=shown(value), expected=expected)
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real) or abs(real) > _MOST:
        raise InputError("not a finite number", where=where, got=shown(value), expected=expected)
    return real


def text_number(text: str, where: str, expected: str = "a finite number") -> float:
    """A number written as text, as in CSV cells, labels and logs."""
    try:
        return number(float(text), where, expected)
    except ValueError:
        raise InputError("not a number", where=where, got=shown(text), expected=expected) from None


def count(value: object, where: str) -> float:
    """A counter: finite and not negative (engines export counters as floats)."""
    real = number(value, where, "a count, 0 or more")
    if real < 0:
        raise InputError("a counter is negative", where=where, got=value, expected="0 or more", hint="Counters only grow: take the scrape again.")
    return real


def whole(value: object, where: str, *, low: int = 0, high: int = MAX_DRAFT_LEN) -> int:
    """A whole number in low..high."""
    real = number(value, where, f"a whole number in {low}..{high}")
    if real != int(real) or not low <= real <= high:
        raise InputError("not a whole number in range", where=where, got=value, expected=f"a whole number in {low}..{high}")
    return int(real)


def share(value: object, where: str, hint: str = "") -> float:
    """A probability in 0..1."""
    real = number(value, where, "a share in 0..1")
    if not 0.0 <= real <= 1.0:
        raise InputError("a share is outside 0..1", where=where, got=value, expected="0..1", hint=hint)
    return real


def counts(raw: object, where: str) -> list[float]:
    """A list of counters with at least one entry."""
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise InputError("not a list of counts", where=where, got=shown(raw), expected="a non-empty list of counts")
    if len(raw) > MAX_DRAFT_LEN + 1:
        raise InputError("the list is too long", where=where, got=len(raw), expected=f"at most {MAX_DRAFT_LEN + 1} entries")
    return [count(v, f"{where}[{n}]") for n, v in enumerate(raw)]


def keyed_counts(raw: object, where: str) -> dict[int, float]:
    """A sparse histogram with whole-number keys written as text: {"0": 40, "2": 30}."""
    if not isinstance(raw, Mapping) or not raw:
        raise InputError("not a histogram", where=where, got=shown(raw), expected='an object such as {"0": 40, "2": 30}')
    out = {}
    for key, value in raw.items():
        text = str(key).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 4):
            raise InputError("a histogram key is not a number of tokens", where=where, got=shown(key), expected="whole numbers")
        out[whole(int(text), f"{where}.{text}")] = count(value, f"{where}.{text}")
    return out


def shown(value: object) -> str:
    """A value short enough for an error text."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def tables(value: object, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every JSON object inside a JSON value with its path, outer ones first; bounded, without recursion."""
    stack: list[tuple[str, object]] = [(path, value)]
    seen = 0
    while stack and seen < _MOST_NODES:
        at, node = stack.pop()
        seen += 1
        if isinstance(node, Mapping):
            yield at, node
            stack.extend((f"{at}.{k}" if at else str(k), v) for k, v in reversed(list(node.items())) if isinstance(v, Mapping | list))
        elif isinstance(node, list):
            stack.extend((f"{at}[{n}]", node[n]) for n in range(len(node) - 1, -1, -1) if isinstance(node[n], Mapping | list))
