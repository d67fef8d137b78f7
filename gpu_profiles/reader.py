"""A strict reader of profile files: each field taken once, each number checked and its source kept, leftovers are errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast, get_args

from gpu_profiles.schema import Origin, Source
from planner.errors import ProfileError, suggest

_ORIGINS = get_args(Origin)
_NUMBER_KEYS = {"value", "origin", "ref", "date", "provider"}


class Reader:
    """Takes fields from one JSON object; `done()` complains about what nobody took."""

    def __init__(self, data: object, where: str, prefix: str = "") -> None:
        self._where, self._prefix, self._taken = where, prefix, set[str]()
        if not isinstance(data, dict):
            raise ProfileError("not a JSON object", where=where, got=type(data).__name__)
        self._data: dict[str, Any] = data
        self._sources: dict[str, Source] = {}

    @property
    def sources(self) -> Mapping[str, Source]:
        """Source of every number taken, by field (`bytes_per_s`, `peak_flop_per_s.fp8`); grows while fields are taken."""
        return MappingProxyType(self._sources)

    def error(self, field: str, what: str, *, got: object = None, expected: str = "") -> ProfileError:
        return ProfileError(what, where=f"{self._where}: {self._prefix}{field}", got=got, expected=expected)

    def take(self, field: str) -> Any:
        """The raw value of a field that must be there."""
        self._taken.add(field)
        if field not in self._data:
            raise self.error(field, "missing")
        return self._data[field]

    def take_optional(self, field: str) -> Any:
        self._taken.add(field)
        return self._data.get(field)

    def text(self, field: str) -> str:
        value = self.take(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, "not a text", got=value)
        return value

    def optional_text(self, field: str) -> str | None:
        return None if self.take_optional(field) is None else self.text(field)

    def texts(self, field: str) -> tuple[str, ...]:
        value = self.take_optional(field) or []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.error(field, "not a list of texts", got=value)
        return tuple(value)

    def optional_object(self, field: str) -> Mapping[str, object] | None:
        value = self.take_optional(field)
        if value is not None and not isinstance(value, dict):
            raise self.error(field, "not an object", got=value)
        return value

    def number(self, field: str, *, at_most: float = math.inf, whole: bool = False, zero_ok: bool = False) -> float:
        """A number with its source: finite, above zero (unless `zero_ok`)."""
        return self._number(field, self.take(field), at_most=at_most, whole=whole, zero_ok=zero_ok)

    def optional_number(self, field: str, *, whole: bool = False) -> float | None:
        return None if self.take_optional(field) is None else self.number(field, whole=whole)

    def number_table(self, field: str, *, at_most: float = math.inf, zero_ok: bool = False) -> Mapping[str, float]:
        """name -> number, each with its source."""
        table = self.take(field)
        if not isinstance(table, dict) or not table:
            raise self.error(field, "not an object of numbers", got=table)
        return MappingProxyType({k: self._number(f"{field}.{k}", v, at_most=at_most, whole=False, zero_ok=zero_ok) for k, v in table.items()})

    def _number(self, field: str, cell: object, *, at_most: float, whole: bool, zero_ok: bool) -> float:
        if not isinstance(cell, dict):
            raise self.error(field, "a number needs its source", got=cell, expected='{"value": ..., "origin": ..., "ref": ..., "date": ...}')
        unknown = sorted(set(cell) - _NUMBER_KEYS)
        if unknown:
            raise self.error(field, f"unknown key {unknown[0]!r}", expected=f"only {sorted(_NUMBER_KEYS)}")
        value = cell.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(field, "not a finite number", got=value)
        if value < 0 or (value == 0 and not zero_ok):
            raise self.error(field, "not above zero", got=value)
        if value > at_most:
            raise self.error(field, "too large", got=value, expected=f"at most {at_most:g}")
        if whole and value != int(value):
            raise self.error(field, "not a whole number", got=value)
        self._sources[field] = self._source(field, cell)
        return float(value)

    def _source(self, field: str, cell: Mapping[str, Any]) -> Source:
        origin = cell.get("origin")
        if origin not in _ORIGINS:
            raise self.error(field, "unknown origin", got=origin, expected=f"one of {list(_ORIGINS)}")
        for key in ("ref", "date"):
            if not isinstance(cell.get(key), str) or not cell[key]:
                raise self.error(field, f"a number needs its source: no {key!r}", got=cell.get(key))
        provider = cell.get("provider")
        return Source(cast(Origin, origin), f"{cell['ref']} ({provider})" if provider else cell["ref"], cell["date"])

    def done(self) -> None:
        """Every key must have been taken."""
        for key in self._data:
            if key not in self._taken:
                hint = suggest(key, self._taken)
                raise ProfileError("unknown key", where=f"{self._where}: {self._prefix}{key}", hint=hint)
