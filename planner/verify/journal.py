"""What a run has seen, on disk line by line: a killed run goes on where it was."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.verify.arms import Arm, Visit, reference_power


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
        self._first = first
        self.keep(lines[1:])

    def keep(self, rows: Iterable[dict[str, Any]]) -> None:
        """Only these rows from now on, on disk too; a run killed meanwhile has the old file or the new one."""
        from microbench.store import write_atomic

        self.rows = list(rows)
        write_atomic(self.path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in (self._first, *self.rows)))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")


class VisitJournal(Journal):
    """Rows with the visits of arms, stage by stage."""

    def visits(self, stage: str) -> dict[Arm, dict[int, Visit]]:
        """Visits of a stage by arm and number, at the machine's usual speed over the whole run."""
        usual_s = {target: float(np.median(seen)) for target, seen in self._reference_s().items()}
        power = self.reference_powers()
        out: dict[Arm, dict[int, Visit]] = defaultdict(dict)
        for (of, arm), seen in self._raw().items():
            if of == stage:
                out[arm] = {i: v.at_reference(usual_s[arm.target], power[arm.target, arm.num_seqs, arm.drafter]) for i, v in seen.items()}
        return out

    def reference_powers(self) -> dict[tuple[str, int, str | None], float]:
        """By target, batch and drafter, the power of the reference work's time that rounds follow, from repeats of one
        arm, over all stages: it takes differences within arms, never their level."""
        found: dict[tuple[str, int, str | None], list[list[Visit]]] = defaultdict(list)
        for (_, arm), seen in self._raw().items():
            found[arm.target, arm.num_seqs, arm.drafter].append(list(seen.values()))
        return {key: reference_power(repeats) for key, repeats in found.items()}

    def _raw(self) -> dict[tuple[str, Arm], dict[int, Visit]]:
        """Visits as timed, by stage, arm and number."""
        out: dict[tuple[str, Arm], dict[int, Visit]] = defaultdict(dict)
        for r in self.rows:
            if "visit" in r:
                out[r["stage"], Arm(**r["arm"])][r["index"]] = Visit.from_json(r["visit"])
        return out

    def _reference_s(self) -> dict[str, list[float]]:
        """Seconds of the reference work beside every visit, by target."""
        seen: dict[str, list[float]] = defaultdict(list)
        for (_, arm), visits in self._raw().items():
            seen[arm.target] += [v.reference_s for v in visits.values()]
        return seen

    def reference_spread(self) -> tuple[float, float]:
        """10th and 90th percentile of the machine's speed over its median."""
        moved = np.concatenate([np.asarray(seen) / np.median(seen) for seen in self._reference_s().values()])
        low, high = np.quantile(moved, [0.1, 0.9])
        return float(low), float(high)
