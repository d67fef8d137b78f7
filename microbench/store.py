"""Raw results as JSON lines: one whole line per write, so that a run killed at any moment leaves whole records and can go on.

Records by `kind`: environment, plan, point (samples of one point in one pass), pass (its sentinel and verdict), done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Whole records of a raw file; a last line without its end, left by a kill, is dropped."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.strip()]


def _drop_half_line(path: Path) -> None:
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


class Store:
    """Append-only file of records; without a path they stay in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.records: list[Record] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.records = read_records(path)
            _drop_half_line(path)

    @property
    def name(self) -> str:
        return self.path.name if self.path else "memory"

    def append(self, kind: str, **fields: Any) -> Record:
        """Write one record in one call to the system, and to the disk before the next measurement."""
        record: Record = {"kind": kind, **fields}
        self.records.append(record)
        if self.path is None:
            return record
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, line.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        return record

    def of(self, kind: str) -> list[Record]:
        return [r for r in self.records if r["kind"] == kind]

    @property
    def finished(self) -> bool:
        return bool(self.of("done"))


def write_atomic(path: Path, text: str) -> None:
    """The whole file or nothing: written beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def same_machine(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Two environment fingerprints that may share one raw file: all but the date agrees."""
    return {k: v for k, v in a.items() if k != "date"} == {k: v for k, v in b.items() if k != "date"}
