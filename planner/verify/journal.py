"""What a run has seen, on disk line by line: a killed run goes on where it was."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.verify.arms import Arm, Visit


class Journal:
    """Rows as JSON lines on disk: what is there is not done again. The first line says which run they are of."""

    def __init__(self, path: Path, spec: Any) -> None:
        """`spec`: a dataclass that says what the run covers. Raises InputError where the file holds another run."""
        self.path = path
        lines: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    break  # the last line of a run that was killed while writing
        first = {"spec": json.loads(json.dumps(asdict(spec)))}
        if lines and lines[0] != first:
            raise InputError("holds another run", where=str(path), expected="the same arms, draft lengths and prompts", hint="Choose another --out.")
        self.rows = lines[1:]
        path.write_text("".join(json.dumps(r) + "\n" for r in (first, *self.rows)), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")


class VisitJournal(Journal):
    """Rows with the visits of arms, stage by stage."""

    def visits(self, stage: str) -> dict[Arm, dict[int, Visit]]:
        """Visits of a stage by arm and number, at the machine's usual speed over the whole run."""
        usual_s = {target: float(np.median(seen)) for target, seen in self._reference_s().items()}
        out: dict[Arm, dict[int, Visit]] = defaultdict(dict)
        for r in self.rows:
            if r.get("stage") == stage:
                out[Arm(**r["arm"])][r["index"]] = Visit.from_json(r["visit"]).at_reference(usual_s[r["arm"]["target"]])
        return out

    def _reference_s(self) -> dict[str, list[float]]:
        """Seconds of the reference work beside every visit, by target."""
        seen: dict[str, list[float]] = defaultdict(list)
        for r in self.rows:
            if "visit" in r:
                seen[r["arm"]["target"]].append(r["visit"]["reference_s"])
        return seen

    def reference_spread(self) -> tuple[float, float]:
        """10th and 90th percentile of the machine's speed over its median."""
        moved = np.concatenate([np.asarray(seen) / np.median(seen) for seen in self._reference_s().values()])
        low, high = np.quantile(moved, [0.1, 0.9])
        return float(low), float(high)
