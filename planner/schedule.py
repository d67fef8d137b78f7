"""Draft length by running batch: what engines accept as a schedule, and where speculation stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.ops import Num
from planner.search import Arm, Grid, evaluate
from planner.serving import Anchor, Traffic

MERGE_FRAC = 0.01
"""A neighbour's D is kept while it loses less than 1 %: fewer boundaries for a batch to flap across."""

MAX_BATCH = 256


def best_draft_len(off: Grid, on: Grid) -> NDArray[np.int64]:
    """Per concurrency (first context) the D with the most tokens/s, 0 included; beyond the first, a neighbour's D within MERGE_FRAC is kept."""
    rate = np.concatenate([off.served.tokens_per_s[:, :, 0], on.served.tokens_per_s[:, :, 0]], axis=1)
    lengths = np.concatenate([[0], on.draft_len])
    chosen = np.zeros(len(rate), dtype=np.int64)
    kept = -1
    for i, row in enumerate(rate):
        if kept < 0 or row[kept] < (1.0 - MERGE_FRAC) * row.max():
            kept = int(row.argmax())
        chosen[i] = lengths[kept]
    return chosen


def _first(x: Num) -> Num:
    """The first context of a (concurrency, D, context) array."""
    return np.asarray(x)[..., :1] if np.ndim(x) else x


def schedule_of(off: Arm, arm: Arm, traffic: Traffic, anchor: Anchor | None) -> dict[str, Any]:
    """{"drafter", "ranges": [[first, last, D], ...]} over running batches 1..MAX_BATCH, both ends inclusive, no gaps (vLLM's form)."""
    first = replace(traffic, context_len=_first(traffic.context_len), input_len=_first(traffic.input_len), output_len=_first(traffic.output_len))
    batches = np.arange(1, MAX_BATCH + 1)
    chosen = best_draft_len(evaluate(off, batches, first, anchor), evaluate(arm, batches, first, anchor))
    starts = np.flatnonzero(np.diff(chosen, prepend=-1))
    ends = np.append(starts[1:], len(chosen))
    ranges = [[int(batches[a]), int(batches[b - 1]), int(chosen[a])] for a, b in zip(starts, ends, strict=True)]
    return {"drafter": arm.kind, "drafter_model": arm.model, "ranges": ranges}


def break_even(arms: Sequence[Arm], grids: Sequence[Grid], concurrency: NDArray[np.int64], contexts: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Per drafter and context the concurrency at which its best D stops paying (log-interpolated); None = it pays on the whole range.

    `always_loses` marks a drafter that does not pay even at the lowest concurrency.
    """
    rows: list[dict[str, Any]] = []
    base = grids[0].served.tokens_per_s[:, 0, :]
    for arm, grid in zip(arms[1:], grids[1:], strict=True):
        gain = np.log(grid.served.tokens_per_s.max(axis=1) / base)
        for j, context in enumerate(contexts):
            g = gain[:, j]
            lost = np.flatnonzero(g <= 0)
            point: float | None = None
            if len(lost) and lost[0] > 0:
                k = int(lost[0])
                x = np.log(concurrency[k - 1 : k + 1].astype(np.float64))
                point = float(np.exp(x[0] + (x[1] - x[0]) * g[k - 1] / (g[k - 1] - g[k])))
            rows.append(
                {
                    "drafter": arm.kind,
                    "drafter_model": arm.model,
                    "context_len": float(context),
                    "concurrency": point,
                    "always_loses": bool(len(lost) and lost[0] == 0),
                }
            )
    return rows
