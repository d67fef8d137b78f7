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
def _lower() -> dict[str, str]:
    index = _index()
    names = {name.lower(): name for name in index["models"]}
    short = {name.split("/")[-1].lower(): name for name in index["models"]}
    aliases = {alias.lower(): target for alias, target in index["aliases"].items()}
    return {**short, **aliases, **names}


def catalogue_ids() -> tuple[str, ...]:
    """Ids of every model in the catalogue, sorted."""
    return tuple(sorted(_index()["models"], key=str.lower))


def resolve(name: str) -> str | None:
    """The catalogue id that `name` (any case, with or without the organisation, or an alias) stands for."""
    return _lower().get(name.strip().lower())


def catalogue_entry(name: str) -> dict[str, Any] | None:
    """The entry of a model: id, config (trimmed), quant, source and sizes; None when unknown."""
    known = resolve(name)
    if known is None:
        return None
    file = FOLDER / _index()["models"][known]["file"]
    entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return entry
