"""What keeps the choice of D from being right more often: the sweeps that lose, and what their sources' own scatter says of them.

Two draft lengths of one setup cost the same ratio of round times on every prompt set, but for noise. So the scatter of that ratio over a
source's sweeps of one setup measures what its figures can resolve; a loss inside it names no better D.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.validate.rows import Sweep, acceptance_of

CLOSE_FRAC = 0.03
"""A choice is right when it loses at most this much to the best measured arm."""
RESAMPLES = 2000
FEWEST_SIBLINGS = 3
"""Other sweeps of one setup that a scatter needs."""


class Choice(NamedTuple):
    """The planner's D in one sweep."""

    sweep: Sweep
    draft_len: int

    @property
    def best(self) -> int:
        return int(max(self.sweep.arms, key=self.sweep.value)["D"])

    @property
    def loss(self) -> float:
        """Share of the best measured arm that this choice loses."""
        return self.sweep.regret(self.draft_len)


def setup_of(sweep: Sweep) -> tuple[Any, ...]:
    """Sweeps that differ in their prompts alone."""
    row = sweep.row
    return (row["group"], row["gpu"], row["n_gpus"], row["drafter_kind"], sweep.concurrency, row["input_len"], row["output_len"])


def round_ratio(sweep: Sweep, one: int, other: int) -> float | None:
    """log of the measured round time at D = one over that at D = other; a round makes AL tokens."""
    arms = {int(a["D"]): a for a in sweep.arms}
    if one not in arms or other not in arms:
        return None
    return math.log(acceptance_of(arms[one]) / sweep.value(arms[one]) / (acceptance_of(arms[other]) / sweep.value(arms[other])))


def scatter(sweep: Sweep, sweeps: Sequence[Sweep], one: int, other: int) -> float | None:
    """Standard deviation of the ratio over the other sweeps of the same setup; None with too few of them."""
    mine = [r for s in sweeps if s is not sweep and setup_of(s) == setup_of(sweep) and (r := round_ratio(s, one, other)) is not None]
    return float(np.std(mine, ddof=1)) if len(mine) >= FEWEST_SIBLINGS else None


def within(choice: Choice, noise: float | None) -> bool:
    """Whether what a choice loses, as log rates, is no more than the scatter of its source."""
    return noise is not None and -math.log1p(-choice.loss) <= noise


def _named(setup: tuple[Any, ...], *, assumed: bool) -> str:
    return f"{setup[0].replace('|', ' / ')}, {setup[1]}, {setup[3]}, {setup[4]} requests" + (" (assumed)" if assumed else "")


def binding_rows(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """The sweeps that lose more than CLOSE_FRAC by setup: D chosen and best, losses, the source's (largest)
    scatter, and how many lie within it."""
    every = [c.sweep for c in choices]
    groups: dict[tuple[Any, ...], list[Choice]] = defaultdict(list)
    for c in choices:
        if c.loss > CLOSE_FRAC:
            groups[(*setup_of(c.sweep), c.draft_len, c.best)].append(c)
    rows = []
    for key, mine in groups.items():
        found = [scatter(c.sweep, every, c.best, c.draft_len) for c in mine]
        known = [x for x in found if x is not None]
        rows.append(
            {
                "setup": _named(key, assumed=mine[0].sweep.row["concurrency"] is None),
                "sweeps": len(mine),
                "chosen": f"D = {mine[0].draft_len}",
                "best": f"D = {mine[0].best}",
                "largest loss": max(c.loss for c in mine),
                "scatter of the source": f"{max(known):.1%}" if known else "-",
                "within scatter": sum(within(c, x) for c, x in zip(mine, found, strict=True)),
            }
        )
    return sorted(rows, key=lambda r: -float(r["largest loss"]))


def binding_summary(choices: Sequence[Choice], seed: int = 0) -> list[dict[str, Any]]:
    """Shares of sweeps within CLOSE_FRAC, of the choices as they are and with losses inside the source's scatter counted as right, each with a
    90 % interval from resampling whole (source, model) groups."""
    every = [c.sweep for c in choices]
    right = np.asarray([c.loss <= CLOSE_FRAC for c in choices])
    open_ = np.asarray([not ok and within(c, scatter(c.sweep, every, c.best, c.draft_len)) for c, ok in zip(choices, right, strict=True)])
    names = np.asarray([c.sweep.group for c in choices])
    kinds = np.unique(names)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(kinds), size=(RESAMPLES, len(kinds)))
    rows = []
    for name, hit in (("within 3 % of the best arm", right), ("within 3 % or within the source's scatter", right | open_)):
        count, hits = (np.asarray([float(x[names == k].sum()) for k in kinds]) for x in (np.ones(len(names)), hit))
        share = hits[drawn].sum(axis=1) / count[drawn].sum(axis=1)
        low, high = np.quantile(share, [0.05, 0.95])
        rows.append({"share": name, "sweeps": len(hit), "value": float(hit.mean()), "low": float(low), "high": float(high)})
    return rows
