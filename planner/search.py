"""Every D x drafter x concurrency x context, evaluated; the Pareto front; the choice under the model's own doubt.

The space is small and the cost is a staircase, so nothing is pruned and no optimiser is used. Axes: (concurrency, draft_len, context).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.acceptance.survival import Survival
from planner.deployment import Deployment
from planner.serving import Anchor, Served, Traffic, serve

F = NDArray[np.float64]

NEAR_OPTIMAL_FRAC = 0.02
"""Optima are flat: every D within 2 % of the best is as good an answer."""

SAMPLES = 200
DOUBT = {"draft": 0.25, "marginal": 0.25, "overhead": 0.35}
"""Log standard deviations of what decides D: draft time, the growth of verification with D, per-round overhead. A common factor on all
arms cancels. Sizes: left-out residuals of published sweeps (docs/accuracy.md)."""


@dataclass(frozen=True)
class Arm:
    """One drafter with its acceptance, or off (drafter None)."""

    kind: str | None
    """None = off."""
    model: str | None
    dep: Deployment
    survival: Survival | None
    max_draft_len: int

    @property
    def name(self) -> str:
        """As users write it: eagle3, or external:Qwen/Qwen3-0.6B; empty for off."""
        return ":".join(filter(None, (self.kind, self.model)))


class Grid(NamedTuple):
    """One arm over (concurrency, draft_len, context)."""

    draft_len: NDArray[np.int64]
    served: Served
    feasible: NDArray[np.bool_]
    target_round_s: F
    """Round of plain decoding at the same batch."""


def evaluate(arm: Arm, concurrency: NDArray[np.int64], traffic: Traffic, anchor: Anchor | None) -> Grid:
    """The arm's D range on the whole grid. Feasible: at least one sequence fits memory."""
    off = arm.survival is None
    draft_len = np.zeros(1, dtype=np.int64) if off else np.arange(1, arm.max_draft_len + 1)
    d = draft_len[None, :, None].astype(np.float64)
    al = np.ones_like(d) if arm.survival is None else np.asarray(arm.survival.acceptance_len(draft_len), dtype=np.float64)[None, :, None]
    c = concurrency[:, None, None].astype(np.float64)
    served = serve(arm.dep, concurrency=c, draft_len=d, acceptance_len=al, traffic=traffic, anchor=anchor)
    shape = np.broadcast_shapes(c.shape, d.shape, np.shape(traffic.context_len))
    tpot, ttft, queue, rate, running, capacity, length = (np.broadcast_to(x, shape) for x in (*served[:6], served.acceptance_len))
    served = Served(tpot, ttft, queue, rate, running, capacity, served.round, length)
    return Grid(draft_len, served, np.broadcast_to(served.capacity_seqs >= 1, shape), np.broadcast_to(served.round.round_s, shape))


def pareto_front(per_user: F, per_gpu: F) -> NDArray[np.bool_]:
    """True for points no other point beats on both tokens/s/user and tokens/s/GPU (ties kept once per distinct value). O(n log n)."""
    order = np.lexsort((-per_gpu, -per_user))
    best = np.maximum.accumulate(per_gpu[order])
    before = np.concatenate([[-np.inf], best[:-1]])
    on = np.zeros(len(order), dtype=np.bool_)
    on[order] = per_gpu[order] > before
    return on


class Cell(NamedTuple):
    """All arms at one concurrency and context, D = 0 first: flat arrays of equal length."""

    arm: NDArray[np.int64]
    draft_len: NDArray[np.int64]
    value: F
    """What is maximised: tokens/s of the deployment, or 1/TPOT."""
    draft_s: F
    verify_s: F
    overhead_s: F
    acceptance_len: F
    acceptance_band: F
    plain_verify_s: F
    allowed: NDArray[np.bool_]
    """Feasible and within the SLOs."""


class Choice(NamedTuple):
    """Which arm of the cell, and how sure."""

    chosen: int
    near_optimal: NDArray[np.int64]
    prob_best: float
    expected_regret_frac: float
    speedup_samples: F


def choose(cell: Cell, off_index: int, seed: int = 0) -> Choice | None:
    """The arm with the least expected regret when the doubtful terms vary together; ties go to the smaller D. None = nothing allowed."""
    if not cell.allowed.any():
        return None
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((4, SAMPLES, 1))
    draft = cell.draft_s * np.exp(DOUBT["draft"] * z[0])
    growth = np.maximum(cell.verify_s - cell.plain_verify_s, 0.0) * np.exp(DOUBT["marginal"] * z[1])
    overhead = cell.overhead_s[off_index] + np.maximum(cell.overhead_s - cell.overhead_s[off_index], 0.0) * np.exp(DOUBT["overhead"] * z[2])
    round_s = draft + np.minimum(cell.verify_s, cell.plain_verify_s) + growth + overhead
    al = 1.0 + np.maximum(cell.acceptance_len * np.exp(cell.acceptance_band / 1.2816 * z[3]) - 1.0, 0.0)
    al = np.minimum(al, 1.0 + cell.draft_len)
    nominal = (cell.draft_s + cell.verify_s + cell.overhead_s) / cell.acceptance_len
    sampled = cell.value * nominal / (round_s / al)
    sampled = np.where(cell.allowed, sampled, 0.0)
    best = sampled.max(axis=1, keepdims=True)
    regret = (1.0 - sampled / best).mean(axis=0)
    order = np.lexsort((cell.draft_len, np.round(regret, 4)))
    index = int(next(i for i in order if cell.allowed[i]))
    value = np.where(cell.allowed, cell.value, 0.0)
    near = np.flatnonzero(value >= (1.0 - NEAR_OPTIMAL_FRAC) * value.max())
    prob = float((sampled.argmax(axis=1) == index).mean())
    return Choice(index, near, prob, float(regret[index]), sampled[:, index] / np.maximum(sampled[:, off_index], 1e-12))
