"""Rounds under traffic: how many sequences run, what prefill takes from them, what a user and the deployment see.

Closed loop: `concurrency` requests are always in flight; memory and the engine's limits cap those that run, the rest queue. Open loop:
requests arrive at a rate and the running number follows from Little's law. Prompts are prefilled in chunks that ride on decode steps
(mode agg) or elsewhere (disagg). Everything broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.deployment import Deployment
from planner.ops import Num, distinct
from planner.roofline import PassTime
from planner.round import Round, prefill_time, round_time

F = NDArray[np.float64]

SLAB = 65536
"""Points that are evaluated at once: their temporaries stay in the processor's cache, and calls into numpy do not yet count."""

BURST_SHARE = 0.2
"""Of the other requests' prefills in a cycle, the part that a user sees in TTFT: requests that start or end together come in waves. In
steady state all of it falls between tokens (left-out TPOT of served rows is best so); TTFT of the same rows is right on average at 0.2,
while a single row is 47 % off: TTFT carries no band and is a rough figure."""


@dataclass(frozen=True)
class Traffic:
    """Lengths in tokens. Pure decode at a context: output_len = inf, input_len = 1."""

    context_len: Num
    """Mean context while decoding: input + output / 2."""
    input_len: Num
    output_len: Num
    cached_len: Num = 0.0
    prefill_elsewhere: bool = False

    @classmethod
    def of_lengths(cls, input_len: Num, output_len: Num, cached_len: Num = 0.0, *, prefill_elsewhere: bool = False) -> Traffic:
        i, o = np.asarray(input_len, dtype=np.float64), np.asarray(output_len, dtype=np.float64)
        return cls(i + o / 2.0, i, o, cached_len, prefill_elsewhere)

    @classmethod
    def at_context(cls, context_len: Num) -> Traffic:
        c = np.asarray(context_len, dtype=np.float64)
        return cls(c, np.ones_like(c), np.full_like(c, np.inf))


@dataclass(frozen=True)
class Anchor:
    """What measured runs of this deployment say about the model's error: every cost is multiplied by `scale`.

    Booking part of the excess as fixed time per round instead chose worse D on published sweeps (docs/accuracy.md): an additive
    error makes drafts look cheap.
    """

    scale: Num = 1.0


class Served(NamedTuple):
    """What users and the deployment see; parts of the round included. Arrays broadcast together."""

    tpot_s: F
    ttft_s: F
    """Service and prefill contention, without queueing for a running slot; nan where no prefill is modelled here."""
    queue_s: F
    """Waiting for a slot when more requests are in flight than run."""
    tokens_per_s: F
    num_seqs: F
    capacity_seqs: F
    round: Round
    acceptance_len: F


def serve(dep: Deployment, *, concurrency: Num, draft_len: Num, acceptance_len: Num, traffic: Traffic, anchor: Anchor | None = None) -> Served:
    """Steady state of a closed loop; a large grid slab by slab."""
    asked = (concurrency, draft_len, acceptance_len, traffic.context_len, traffic.input_len, traffic.output_len, traffic.cached_len)
    args = [np.asarray(x, dtype=np.float64) for x in (*asked, 1.0 if anchor is None else anchor.scale)]
    if np.broadcast(*args).size <= SLAB:
        return steady(dep, concurrency=concurrency, draft_len=draft_len, acceptance_len=acceptance_len, traffic=traffic, anchor=anchor)

    def part(c: F, d: F, al: F, context: F, new: F, out: F, cached: F, scale: F) -> Served:  # noqa: PLR0913
        mix = Traffic(context, new, out, cached, traffic.prefill_elsewhere)
        return steady(dep, concurrency=c, draft_len=d, acceptance_len=al, traffic=mix, anchor=None if anchor is None else Anchor(scale))

    return by_slabs(part, args, np.broadcast_shapes(args[0].shape, args[1].shape))


def by_slabs(part: Callable[..., Served], args: Sequence[F], costly: tuple[int, ...]) -> Served:
    """part(*args) evaluated in slabs of about SLAB points along one axis, every array of the result at full shape.

    Passes are priced per (sequences, D) and slab, so the axis is one that `costly`, the shape of these two, varies along where it can.
    """
    shape = np.broadcast_shapes(*(x.shape for x in args))
    size, first = math.prod(shape), len(shape) - len(costly)
    axis = max(range(len(shape)), key=lambda i: (i >= first and costly[i - first] > 1 and size // shape[i] <= SLAB, shape[i]))
    step = max(1, SLAB * shape[axis] // size)
    result: list[NDArray[Any]] = []
    for start in range(0, shape[axis], step):
        cut = (*(slice(None),) * axis, slice(start, start + step))
        done = flat(part(*(along(x, cut, len(shape)) for x in args)))
        result = result or [np.empty(shape, x.dtype) for x in done]
        for whole, slab in zip(result, done, strict=True):
            whole[cut] = slab
    tpot, ttft, queue, rate, num_seqs, capacity, round_s, draft, verify, overhead, *parts, eager, al = result
    return Served(tpot, ttft, queue, rate, num_seqs, capacity, Round(round_s, draft, verify, overhead, PassTime(*parts), eager), al)


def along(x: F, cut: tuple[slice, ...], ndim: int) -> F:
    """The part of an argument that meets a cut of the grid it broadcasts to."""
    own = cut[ndim - x.ndim :]
    return x[tuple(slice(None) if n == 1 else c for n, c in zip(x.shape, own, strict=False))]


def flat(s: Served) -> list[NDArray[Any]]:
    """Every array of a result, in the order of its fields."""
    return [*s[:6], *s.round[:4], *s.round.parts, s.round.eager, s.acceptance_len]


def steady(dep: Deployment, *, concurrency: Num, draft_len: Num, acceptance_len: Num, traffic: Traffic, anchor: Anchor | None) -> Served:
    """`serve` all at once."""
    d, al = np.asarray(draft_len, dtype=np.float64), np.asarray(acceptance_len, dtype=np.float64)
    capacity = dep.capacity_seqs(traffic.context_len, d)
    wanted = np.asarray(concurrency, dtype=np.float64)
    num_seqs, room = np.minimum(wanted, float(dep.max_num_seqs)), np.maximum(capacity, 1.0)
    if not num_seqs.max(initial=0.0) <= room.min(initial=np.inf):  # else batches do not depend on the context, nor does most of a pass
        num_seqs = np.minimum(num_seqs, room)
    per_rank = np.ceil(num_seqs / dep.layout.dp)
    in_pass = np.ceil(per_rank / dep.layout.pp)
    cost = anchored(round_time(dep, in_pass, traffic.context_len, d), anchor)
    tpot = cost.round_s / al
    scale = 1.0 if anchor is None else anchor.scale
    marginal, whole = prefill_cost(dep, in_pass, traffic, d, scale)
    # in one cycle of a request every other one is prefilled once, between its tokens (before its only token where it makes one)
    others = np.maximum(per_rank - 1.0, 0.0) / dep.layout.pp * marginal
    decodes = np.asarray(traffic.output_len) > 1.0
    waiting = np.where(decodes, 0.0, others)
    tpot = tpot + (others - waiting) / np.maximum(traffic.output_len - 1.0, 1.0)
    service = whole + waiting + cost.round_s / 2.0
    pure = ~np.isfinite(np.asarray(traffic.output_len))
    known = np.where(pure | traffic.prefill_elsewhere, 0.0, service)
    with np.errstate(invalid="ignore"):
        lasting = known + (traffic.output_len - 1.0) * tpot
        rate = np.where(pure, num_seqs / tpot, num_seqs * traffic.output_len / lasting)
    queue = np.where(pure, 0.0, np.maximum(wanted - num_seqs, 0.0) / num_seqs * np.where(pure, 0.0, lasting))
    first = whole + np.where(decodes, BURST_SHARE, 1.0) * others + cost.round_s / 2.0
    ttft = np.where(pure | traffic.prefill_elsewhere, np.nan, first)
    tpot, ttft, queue, rate, num_seqs, capacity, al = np.broadcast_arrays(tpot, ttft, queue, rate, num_seqs, capacity, al)
    return Served(tpot, ttft, queue, rate, num_seqs, capacity, cost, al)


def prefill_cost(dep: Deployment, in_pass: Num, traffic: Traffic, draft_len: Num, scale: Num) -> tuple[Num, Num]:
    """(marginal, whole) seconds of a prompt's prefill; the drafter's own only where it drafts."""
    if traffic.prefill_elsewhere or not np.isfinite(np.asarray(traffic.output_len)).any():
        return 0.0, 0.0
    marginal, whole, draft = prefill_time(dep, in_pass, traffic.context_len, traffic.input_len, traffic.cached_len)
    drafting = np.where(np.asarray(draft_len) > 0, draft, 0.0)
    return (marginal + drafting) * scale, (whole + drafting) * scale


def anchored(cost: Round, anchor: Anchor | None) -> Round:
    """A round corrected by an anchor."""
    if anchor is None:
        return cost
    s = np.asarray(anchor.scale, dtype=np.float64)
    return Round(cost.round_s * s, cost.draft_s * s, cost.verify_s * s, cost.overhead_s * s, PassTime(*(p * s for p in cost.parts)), cost.eager)


def target_step(off: Deployment, num_seqs: Num, traffic: Traffic, anchor: Anchor | None) -> F:
    """Seconds of one plain step of the target at a batch, the unit that costs of rounds are compared in."""
    in_pass = np.ceil(np.ceil(np.asarray(num_seqs, dtype=np.float64) / off.layout.dp) / off.layout.pp)
    return anchored(round_time(off, in_pass, traffic.context_len, 0.0), anchor).round_s


def plain(dep: Deployment) -> Deployment:
    """The same deployment without any speculative configuration."""
    return dep if dep.drafter is None and not dep.k0_tier else replace(dep, drafter=None, draft=None, k0_tier=False)


def solve_open_loop(
    dep: Deployment, *, rate_per_s: float, draft_len: int, acceptance_len: float, traffic: Traffic, anchor: Anchor | None = None
) -> tuple[float, bool]:
    """(running requests, saturated) at an arrival rate: the smallest N with N >= rate x latency(N) (Little's law, fixed point in N).

    latency grows with N, so the first crossing on an ascending grid is the stable one; between grid points it is interpolated.
    """
    top = float(min(dep.max_num_seqs, max(1.0, float(dep.capacity_seqs(traffic.context_len, draft_len).max()))))
    grid = np.asarray(distinct(np.round(np.geomspace(1.0, top, 48))))
    s = serve(dep, concurrency=grid, draft_len=draft_len, acceptance_len=acceptance_len, traffic=traffic, anchor=anchor)
    lasting = np.nan_to_num(s.ttft_s) + (np.asarray(traffic.output_len) - 1.0) * s.tpot_s
    excess = grid - rate_per_s * lasting
    stable = np.flatnonzero(excess >= 0)
    if not len(stable):
        return top, True
    i = int(stable[0])
    if i == 0:
        return 1.0, False
    low, high = excess[i - 1], excess[i]
    return float(grid[i - 1] + (grid[i] - grid[i - 1]) * (-low) / (high - low)), False
