"""One speculation round: draft + verify + overhead. The one place where cost meets draft length.

Verification is the target's pass with query_len 1 + D; plain decoding is the same pass with D = 0. What kernel sums miss (launch gaps and
small kernels per layer, scheduler and sampler per sequence, per round, per draft pass, per verified token) comes from the engine profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.deployment import Deployment
from planner.draft import LOOKUP
from planner.ops import Num, Op, Segment, distinct
from planner.passes import pass_ops
from planner.roofline import PassTime

F = NDArray[np.float64]


class Round(NamedTuple):
    """Seconds of one round per rank group; round_s = draft_s + verify_s + overhead_s."""

    round_s: F
    draft_s: F
    verify_s: F
    overhead_s: F
    parts: PassTime
    """How the verification pass divides (before the per-layer residual)."""
    eager: NDArray[np.bool_]
    """The pass exceeds the largest captured CUDA graph."""


def verify_rows(dep: Deployment, draft_len: Num) -> F:
    """Rows per sequence of a verification pass: 1 + D, 2D for PARD, or the tree width the user gave."""
    d = np.asarray(draft_len, dtype=np.float64)
    if dep.drafter is None:
        return d + 1.0
    widths = {float(x): float(dep.drafter.tokens_verified(int(x))) for x in distinct(d)}
    if all(w == x + 1.0 for x, w in widths.items()):
        return d + 1.0
    return np.asarray(np.vectorize(widths.__getitem__, otypes=[np.float64])(d), dtype=np.float64)


def step_ops(dep: Deployment, num_seqs: Num, query_len: Num, context_len: Num) -> list[Op]:
    """Operations of a decode or verification pass on one rank, CUDA-graph padding included."""
    segment = Segment(num_seqs, query_len, context_len, query_len)
    return pass_ops(dep.plan, [segment], padded_rows=dep.padded_rows(num_seqs, query_len))


def step_time(dep: Deployment, num_seqs: Num, query_len: Num, context_len: Num) -> tuple[F, PassTime, NDArray[np.bool_]]:
    """(seconds, parts, eager) of a decode or verification pass with the per-layer residual; launch-bound when no graph covers it."""
    o = dep.overheads
    parts = dep.machine.grid_time(lambda n, q: step_ops(dep, n, q, context_len), num_seqs, query_len)
    busy = parts.time_s + o["per_layer_s"] * dep.residual_layers
    eager = dep.runs_eager(num_seqs, query_len)
    host = o["eager_per_layer_s"] * dep.network.num_layers
    return np.where(eager, np.maximum(busy, host), busy), parts, eager


def round_time(dep: Deployment, num_seqs: Num, context_len: Num, draft_len: Num) -> Round:
    """Cost of one round for num_seqs sequences per rank. draft_len 0 is plain decoding with no speculative configuration."""
    o: Mapping[str, float] = dep.overheads
    n = np.asarray(num_seqs, dtype=np.float64)
    d = np.asarray(draft_len, dtype=np.float64)
    width = verify_rows(dep, d)
    verify, parts, eager = step_time(dep, n, width, np.asarray(context_len, dtype=np.float64) + d)
    overhead = o["per_step_s"] + o["per_seq_s"] * n + 0.0 * d
    draft = np.zeros(np.broadcast(n, d, verify).shape)
    if dep.drafter is not None and (d > 0).any():
        # a drafter on its own device serves the sequences of every data-parallel group
        drafted = n * (dep.layout.dp if dep.extra_gpus else 1)
        cost = dep.draft_plan.round(drafted, context_len, d)
        on = d > 0
        draft = cost.kernel_s + o["per_draft_pass_s"] * cost.passes + 0.0 * verify
        if dep.drafter.kind in LOOKUP:
            draft = draft + np.where(on, o["lookup_base_s"] + o["lookup_per_seq_s"] * n, 0.0)
        else:
            draft = draft + np.where(on, o["draft_base_s"] + o["draft_per_seq_s"] * drafted * cost.passes, 0.0)
        matched = 1.0 if dep.drafter.match_prob is None or dep.drafter.kind not in LOOKUP else dep.drafter.match_prob
        overhead = overhead + np.where(on, matched * (o["per_round_s"] + o["per_verified_token_s"] * n * (width - 1.0)), 0.0)
        overhead = overhead + 0.0 * verify
        if matched < 1.0 and on.any():  # rounds without a match are plain steps
            plain, _, _ = step_time(dep, n, 1.0, context_len)
            verify = np.where(on, matched * verify + (1.0 - matched) * plain, verify)
    if dep.k0_tier:
        overhead = overhead + np.where(d == 0, k0_tax(n * dep.layout.dp) * (verify + overhead), 0.0)
    draft, verify, overhead = np.broadcast_arrays(draft, verify, overhead)
    return Round(draft + verify + overhead, draft, verify, overhead, parts, eager)


def k0_tax(num_seqs: Num) -> F:
    """What a K = 0 tier of a schedule costs over no speculative configuration, as a share of TPOT.

    Published with zero draft tokens produced, all on one model: +6.6 % at 2 requests (vLLM 49986), +22.2 % at 11 (48627), +21.6 % at 189
    (49548), +13.5 % at 256, +7.3 % and +16.7 % at 192 (49986, two runners). They scatter without order beyond the smallest, so from 11
    requests on it is their mean, below that log-linear to the smallest.
    """
    return np.asarray(np.interp(np.log(np.maximum(num_seqs, 1.0)), np.log([2.0, 11.0]), [0.066, 0.163]), dtype=np.float64)


def prefill_time(dep: Deployment, num_decoding: Num, context_len: Num, input_len: Num, cached_len: Num = 0.0) -> tuple[F, F, Num]:
    """(marginal, whole, drafter's) seconds of prefilling one prompt of input_len tokens in chunks that ride on decode steps.

    marginal: what the chunks add to the decode steps that carry them; whole: the time until the target has read the prompt.
    """
    new = np.maximum(np.asarray(input_len, dtype=np.float64) - cached_len, 1.0)
    chunks = np.ceil(new / dep.chunk_tokens)
    size = new / chunks
    mean_end = cached_len + new * (chunks + 1.0) / (2.0 * chunks)

    def riders(n: Num) -> Segment:
        return Segment(n, 1.0, np.asarray(context_len, dtype=np.float64), 1.0)

    o = dep.overheads
    mixed = dep.machine.grid_time(lambda n, q: pass_ops(dep.plan, [riders(n), Segment(1.0, q, mean_end, 1.0)]), num_decoding, size).time_s
    alone = dep.machine.grid_time(lambda n, _: pass_ops(dep.plan, [riders(n)]), num_decoding, 1.0).time_s
    draft = 0.0 if dep.drafter is None else dep.draft_plan.prefill_s(size, mean_end) * chunks
    fixed = o["per_layer_s"] * dep.residual_layers + o["per_step_s"]
    return np.maximum(mixed - alone, 0.0) * chunks, (mixed + fixed) * chunks, draft
