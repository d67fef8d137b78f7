"""How far a prediction may be off: 80 % bands as log half-widths by regime, from residuals left out of the fits (`validate`).

A band states what a prediction rests on: a datasheet prior, a fitted profile, or the user's own baseline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FILE = Path(__file__).parent / "data" / "bands.json"


F = NDArray[np.float64]


class Band(NamedTuple):
    """log(truth / prediction) lies in [low, high] in 80 % of left-out cases. Numbers, or arrays that broadcast with what they belong to."""

    low: F | float
    high: F | float


OTHER_GPU = "-other-gpu"
SERVED_GPUS = ("h100-sxm", "h200-sxm", "b200-sxm")
"""GPUs whose served steps the engine numbers were fitted to; elsewhere the band of a GPU left out applies."""


NEAR_DOUBLINGS = 1.5
"""A baseline is near while the concurrency differs by at most this many doublings."""


def tpot_regime(gpu: str, *, moe: bool, concurrency: float = 1.0, anchored_at: Sequence[int] = (), adapted: bool = False) -> str:
    """What a TPOT prediction rests on: baselines measured at the concurrencies `anchored_at`, or the engine numbers alone."""
    if anchored_at:
        doublings = min(abs(math.log2(concurrency / c)) for c in anchored_at)
        return "anchored-near" if doublings <= NEAR_DOUBLINGS else "anchored"
    if adapted:
        return "anchored"
    return ("moe" if moe else "dense") + ("" if gpu in SERVED_GPUS else OTHER_GPU)


SPEEDUP_REGIMES = {"draft-1": 1, "draft-2-3": 3, "draft-4-up": math.inf}
"""Regime of a speedup -> the largest draft length in it. What the first verified token costs (another attention kernel, the engine's
speculative path) is the doubtful part of a round; what further tokens add is known better, so the band narrows with D. Other predictors of
the error (kind of drafter, batch, GPU family, experts, size of the gain) widen the left-out interval score instead of narrowing it."""


def speedup_regime(draft_len: float) -> str:
    """The regime of a speedup by its draft length; D = 0 (the K = 0 tier of a schedule) has the pooled one."""
    return next((name for name, top in SPEEDUP_REGIMES.items() if draft_len <= top), "default") if draft_len > 0 else "default"


def speedup_bands(draft_len: NDArray[np.int64]) -> Band:
    """The speedup's band at each draft length, as arrays of its shape."""
    found = [band("speedup", speedup_regime(float(d))) for d in draft_len.ravel()]
    return Band(np.asarray([b.low for b in found]).reshape(draft_len.shape), np.asarray([b.high for b in found]).reshape(draft_len.shape))


@lru_cache(maxsize=1)
def _table() -> dict[str, list[float]]:
    return json.loads(_FILE.read_text(encoding="utf-8"))["bands"]  # type: ignore[no-any-return]


def band(quantity: str, regime: str) -> Band:
    """The band of `tpot`, `speedup` or `speed` in a regime; the quantity's own default where the regime has none."""
    table = _table()
    low, high = table.get(f"{quantity}/{regime}", table[f"{quantity}/default"])
    return Band(low, high)


def quotient(a: Band, b: Band) -> Band:
    """The band of a / b of independent errors: TPOT with drafts is TPOT without them over the speedup."""
    middle = (a.high + a.low) / 2.0 - (b.high + b.low) / 2.0
    half = np.hypot(a.high - a.low, b.high - b.low) / 2.0
    return Band(middle - half, middle + half)


def spread(value: F | float, b: Band, extra: F | float = 0.0) -> tuple[F, F]:
    """(low, high) around `value`; `extra` is a further independent log half-width (acceptance carried to another D)."""
    middle, half = (b.high + b.low) / 2.0, (b.high - b.low) / 2.0
    half_all = np.sqrt(half**2 + np.asarray(extra) ** 2)
    # the point itself always lies inside, whatever the centre of the residuals
    low, high = np.minimum(middle - half_all, 0.0), np.maximum(middle + half_all, 0.0)
    return value * np.exp(low), value * np.exp(high)
