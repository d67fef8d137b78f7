"""Statistics of repeated timings: a distribution-free interval of the median, when to stop, how far a sentinel moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, inf
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """Median of a sample with an interval that holds the true median with probability `coverage_prob`, whatever the distribution."""

    median: float
    low: float
    high: float
    coverage_prob: float

    @property
    def half_width_frac(self) -> float:
        """Half the width as a share of the median."""
        return (self.high - self.low) / (2.0 * self.median) if self.median > 0 else inf


@lru_cache(maxsize=1024)
def _rank(n: int, prob: float) -> tuple[int, float]:
    """(j, coverage): the j-th smallest and j-th largest of n values enclose the median with at least `prob` where n allows it.

    P(X_(j) <= median <= X_(n+1-j)) = 1 - 2 P(Binomial(n, 1/2) < j).
    """
    tail, best = 0.0, (1, 1.0 - 2.0 * 0.5**n)
    for j in range(1, n // 2 + 1):
        tail += comb(n, j - 1) * 0.5**n
        if 1.0 - 2.0 * tail < prob:
            break
        best = (j, 1.0 - 2.0 * tail)
    return best


def median_interval(samples: Sequence[float], prob: float = 0.95) -> Interval:
    """Distribution-free interval of the median by order statistics. Fewer than six values cannot reach 95 %: then their range."""
    values = sorted(samples)
    if not values:
        raise ValueError("no samples")
    j, coverage = _rank(len(values), prob)
    return Interval(float(np.median(values)), values[j - 1], values[-j], max(coverage, 0.0))


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When a point has been measured well enough."""

    least: int = 15
    most: int = 150
    half_width_frac: float = 0.005
    cap_s: float = 0.25

    def reason(self, samples: Sequence[float], spent_s: float) -> str | None:
        """converged | count | time, or None to go on."""
        n = len(samples)
        if n >= self.least:
            interval = median_interval(samples)
            if interval.coverage_prob >= 0.95 and interval.half_width_frac <= self.half_width_frac:
                return "converged"
        if n >= self.most:
            return "count"
        return "time" if spent_s >= self.cap_s and n >= min(3, self.least) else None


#: GPU: kernels repeat to a fraction of a percent.
CUDA_RULE = StoppingRule()
#: CPU: neighbours share caches and memory, single repeats scatter by 5-10 %.
CPU_RULE = StoppingRule(least=7, most=40, half_width_frac=0.02, cap_s=0.10)
#: How far the sentinel may move between the start and the end of a pass.
SENTINEL_TOLERANCE = {"cuda": 0.02, "cpu": 0.15}


def moved(before_s: float, after_s: float) -> float:
    """Relative movement of a sentinel: |after / before - 1|."""
    return abs(after_s / before_s - 1.0)
