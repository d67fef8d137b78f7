"""Arms of a verification run and what was seen of each: values and arithmetic, no engine.

An arm is one configuration; a visit is one timed run of it. Visits of all arms are interleaved, so that drift of the machine meets all alike,
and every "off" arm has a duplicate whose difference from the first shows what such drift is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

F = NDArray[np.float64]

#: Bootstrap draws of an interval, and its coverage.
DRAWS = 400
COVERAGE_PROB = 0.9
#: Visits beyond the first of their arm that tell how far rounds follow the reference work.
FEWEST_REPEATS = 20


@dataclass(frozen=True)
class Arm:
    """A configuration: drafter None and draft_len 0 are plain decoding. `copy` 1 is the duplicate that shows drift."""

    target: str
    workload: str
    num_seqs: int
    drafter: str | None = None
    draft_len: int = 0
    copy: int = 0

    @property
    def cell(self) -> tuple[str, str, int]:
        """Arms of one cell answer the same question."""
        return (self.target, self.workload, self.num_seqs)

    @property
    def name(self) -> str:
        how = "off" if self.drafter is None else f"{self.drafter} D={self.draft_len}"
        return f"{self.target}/{self.workload}/batch {self.num_seqs}/{how}" + (" (again)" if self.copy else "")


@dataclass(frozen=True)
class Visit:
    """One timed run of an arm.

    rounds: passes of the target; row_rounds: (sequence, round) pairs that count for acceptance; accepted: drafts accepted in them;
    drafted_at, accepted_at: how many of them drafted, and had accepted, at least 1, 2, ... tokens. Seconds are totals over the rounds.
    """

    rounds: int
    row_rounds: int
    accepted: int
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    draft_s: float
    verify_s: float
    rest_s: float
    reference_s: float = 1.0
    """Seconds of a fixed piece of work right before and after: how fast the machine was just then."""

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.rest_s

    def at_reference(self, usual_s: float, power: float = 1.0) -> Visit:
        """As it would have been had the machine run at its usual speed: a shared machine changes it by tens of percent for seconds at a time.
        `power`: how far a visit follows the reference work (`reference_power`)."""
        factor = (usual_s / self.reference_s) ** power
        return replace(self, draft_s=self.draft_s * factor, verify_s=self.verify_s * factor, rest_s=self.rest_s * factor, reference_s=usual_s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Visit:
        return cls(**{**raw, "drafted_at": tuple(raw["drafted_at"]), "accepted_at": tuple(raw["accepted_at"])})


@dataclass(frozen=True)
class Measured:
    """What the visits of an arm say, each with a bootstrap interval over visits."""

    acceptance_len: float
    acceptance_low_len: float
    acceptance_high_len: float
    round_s: float
    round_low_s: float
    round_high_s: float
    draft_s: float
    verify_s: float
    rest_s: float
    tpot_s: float
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    visits: int
    row_rounds: int


def reference_power(repeats: Iterable[Sequence[Visit]]) -> float:
    """b of round_s ~ reference_s^b, 0..1: the slope of logs within the visits of one arm, over several arms.

    Below 1 where the reference work feels the machine more than a round does (wide passes live less in the cache) or is itself noisy; scaling
    such visits all the way would add noise. 1 where too few visits tell.
    """
    x: list[float] = []
    y: list[float] = []
    freedom = 0
    for visits in repeats:
        logs = np.log([[v.reference_s, v.total_s / v.rounds] for v in visits])
        x += (logs[:, 0] - logs[:, 0].mean()).tolist()
        y += (logs[:, 1] - logs[:, 1].mean()).tolist()
        freedom += len(visits) - 1
    spread = float(np.dot(x, x))
    return float(np.clip(np.dot(x, y) / spread, 0.0, 1.0)) if freedom >= FEWEST_REPEATS and spread > 0.0 else 1.0


def round_seconds(visits: Sequence[Visit]) -> float:
    """Seconds of a round: the median over visits of their means, so that a visit which a neighbour disturbed does not count."""
    return float(np.median([v.total_s / v.rounds for v in visits]))


def measure(arm: Arm, visits: Sequence[Visit]) -> Measured:
    """Acceptance length over all (sequence, round) pairs; round time as `round_seconds`; tokens per second = batch x AL / round."""
    if not visits:
        raise ValueError(f"{arm.name} was never visited")
    accepted, rows = np.array([v.accepted for v in visits], float), np.array([v.row_rounds for v in visits], float)
    each = np.array([v.total_s / v.rounds for v in visits])
    picks = np.random.default_rng(0).integers(0, len(visits), (DRAWS, len(visits)))
    length, seconds = float(1.0 + accepted.sum() / rows.sum()), round_seconds(visits)
    lengths, medians = 1.0 + accepted[picks].sum(axis=1) / rows[picks].sum(axis=1), np.median(each[picks], axis=1)
    low, high = _interval(lengths)
    fast, slow = _interval(medians)
    rate_low, rate_high = _interval(arm.num_seqs * lengths / medians)
    total = sum(v.total_s for v in visits)
    draft_s, verify_s, rest_s = (seconds * sum(getattr(v, k) for v in visits) / total for k in ("draft_s", "verify_s", "rest_s"))
    return Measured(
        length, low, high, seconds, fast, slow, draft_s, verify_s, rest_s, seconds / length, arm.num_seqs * length / seconds, rate_low, rate_high,
        len(visits), int(rows.sum()),
    )  # fmt: skip


def _interval(draws: F) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - COVERAGE_PROB) / 2, (1 + COVERAGE_PROB) / 2])
    return float(low), float(high)


def survival_prob(visits: Sequence[Visit], draft_len: int, *, of_drafting: bool = False) -> list[float]:
    """P(first i drafts accepted), i = 1..draft_len: over all rounds (one without a draft has none accepted), or over those that drafted."""
    rows = sum(v.drafted_at[0] if of_drafting else v.row_rounds for v in visits)
    return [sum(v.accepted_at[i] for v in visits) / max(1, rows) for i in range(draft_len)]


def match_prob(visits: Sequence[Visit]) -> float:
    """Share of (sequence, round) pairs that drafted anything."""
    return sum(v.drafted_at[0] for v in visits) / max(1, sum(v.row_rounds for v in visits))


def any_match_prob(match: float, num_seqs: int) -> float:
    """Share of rounds in which any of the sequences drafted: a round of the built-in engine is as wide as its longest draft."""
    return float(1.0 - (1.0 - match) ** num_seqs)


def drift_frac(measured: Mapping[Arm, Measured]) -> dict[str, float]:
    """Per cell, by how much the duplicate of an arm differs from it in tokens per second: no difference below that means anything."""
    out = {}
    for arm, seen in measured.items():
        if arm.copy:
            first = measured.get(Arm(arm.target, arm.workload, arm.num_seqs, arm.drafter, arm.draft_len))
            if first is not None:
                out["/".join(map(str, arm.cell))] = abs(seen.tokens_per_s / first.tokens_per_s - 1.0)
    return out
