"""The catalogue of known models: one small JSON file per model under planner/data/models, and an index of ids and aliases."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "data" / "models"


@lru_cache(maxsize=1)
def _index() -> dict[str, Any]:
    file = FOLDER / "index.json"
    if not file.is_file():
        return {"models": {}, "aliases": {}}
    index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return index


@lru_cache(maxsize=1)
def _names() -> dict[str, tuple[str, str]]:
    """Lower-case name, with and without its organisation -> (the name as published, the catalogue id it stands for)."""
    index = _index()
    known = {**index["aliases"], **{name: name for name in index["models"]}}
    table = {name.split("/")[-1].lower(): (name, target) for name, target in known.items()}
    return {**table, **{name.lower(): (name, target) for name, target in known.items()}}


def catalogue_ids() -> tuple[str, ...]:
    """Ids of every model in the catalogue, sorted."""
    return tuple(sorted(_index()["models"], key=str.lower))


def catalogue_table() -> list[dict[str, Any]]:
    """One row per model for a listing: id, total and active parameters, context, quantisation scheme; no entry file is opened."""
    models = _index()["models"]
    return [{"id": name, **{k: v for k, v in models[name].items() if k != "file"}} for name in catalogue_ids()]


def resolve(name: str) -> str | None:
    """The catalogue id that `name` (any case, with or without the organisation, or an alias) stands for."""
    found = _names().get(name.strip().lower())
    return found[1] if found else None


def canonical(name: str) -> str | None:
    """`name` as its publisher spells it, whether a catalogue id or an alias."""
    found = _names().get(name.strip().lower())
    return found[0] if found else None


def catalogue_entry(name: str) -> dict[str, Any] | None:
    """The entry of a model: id, config (trimmed), quant, source and sizes; None when unknown."""
    known = resolve(name)
    if known is None:
        return None
    file = FOLDER / _index()["models"][known]["file"]
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return entry
