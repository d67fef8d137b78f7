"""What a round of drafting costs, by drafter family (DESIGN section 3).

Sequential drafters (external model, EAGLE-3, MTP): one pass that also extends the drafter over the tokens just verified, then D - 1
passes of one row per sequence. Block drafters (DFlash, DSpark, PARD): one pass over the whole block, for DSpark a light sequential head
on top. n-gram and suffix look-up: host time only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.memory import cache_bytes, weight_bytes
from planner.models.spec import Matrix
from planner.ops import Gemm, Num, Op, Segment, VectorOp, split_columns
from planner.passes import PassPlan, pass_ops
from planner.roofline import Machine

LOOKUP = ("ngram", "suffix")


class DraftCost(NamedTuple):
    """Seconds of drafting in one round, and the passes it took."""

    kernel_s: NDArray[np.float64]
    passes: NDArray[np.float64]


@dataclass(frozen=True)
class DraftPlan:
    """A drafter placed on a machine. `body` is None for look-up drafters."""

    kind: str
    body: PassPlan | None
    machine: Machine
    parallel: bool = False
    """One pass drafts the whole block."""
    extend: tuple[Matrix, ...] = ()
    """Run once per round over the tokens just verified (EAGLE-3's fusion of hidden states)."""
    markov_rank: int = 0
    """DSpark: rank of the sequential head over the vocabulary; 0 = none."""
    link_s: float = 0.0
    """Round trip to a drafter on its own device."""
    embed_params: int = 0
    """Vocabulary table the drafter keeps for itself (0 = shares the target's)."""
    head_params: int = 0

    @property
    def wide(self) -> str:
        """What is never quantised computes in the device's 16-bit dtype (bf16; fp16 or fp32 where there is none), as the router does."""
        return "bf16" if self.body is None else self.body.dtypes.weights.get("router", "bf16")

    @property
    def weight_bytes(self) -> float:
        """Weights on one of the drafter's ranks."""
        if self.body is None:
            return 0.0
        own = weight_bytes(self.body.network, self.body.layout, self.body.dtypes)
        return own + 2.0 * (self.embed_params + self.head_params) / self.body.layout.tp

    def cache_bytes(self, context_len: Num) -> Num:
        """The drafter's own KV cache per sequence on one rank."""
        if self.body is None:
            return np.float64(0.0)
        return cache_bytes(self.body.network, self.body.layout.tp, self.body.dtypes.kv, context_len=context_len)

    def round(self, num_seqs: Num, context_len: Num, draft_len: Num) -> DraftCost:
        """Cost of drafting `draft_len` tokens for each of num_seqs sequences (per rank); nothing where draft_len is 0."""
        d = np.asarray(draft_len, dtype=np.float64)
        used = d > 0
        if self.body is None:
            return DraftCost(np.zeros(np.broadcast(num_seqs, d).shape), np.zeros_like(d))
        if self.parallel:
            bonus = float(self.kind != "dspark")
            block = self._pass_s(num_seqs, np.maximum(d, 1.0) + bonus, context_len, lambda rows: rows - bonus)
            return DraftCost(np.where(used, block + self._markov_s(num_seqs, d) + self.link_s, 0.0), np.where(used, 1.0, 0.0))
        # an external model re-reads at most the last token and the bonus; a head re-reads every row that was verified
        extend_rows = 2.0 if self.kind == "external" else 1.0 + d
        first = self._pass_s(num_seqs, extend_rows, context_len) + self._extend_s(num_seqs, 1.0 + d)
        total = first
        if (d > 1).any():
            total = first + np.maximum(d - 1.0, 0.0) * self._pass_s(num_seqs, 1.0, context_len + d / 2.0)
        return DraftCost(np.where(used, total + self.link_s, 0.0), np.where(used, d, 0.0))

    def _pass_s(
        self, num_seqs: Num, query_len: Num, context_len: Num, sampled_of: Callable[[Num], Num] = lambda _: 1.0
    ) -> NDArray[np.float64]:  # fmt: skip
        """Seconds of one draft pass; `sampled_of` gives the rows that go through the LM head, of the query length."""
        end = pass_end(query_len, context_len)
        return self.machine.grid_time(lambda n, q: self._ops(Segment(n, q, end, sampled_of(q))), num_seqs, query_len).time_s

    def _extend_s(self, num_seqs: Num, rows: Num) -> Num:
        assert self.body is not None
        if not self.extend:
            return 0.0
        tp = self.body.layout.tp
        wide, widths = self.wide, [(m, split_columns(m.n, tp if m.shard == "column" else 1)) for m in self.extend]
        return self.machine.grid_time(lambda n, q: [Gemm(m.name, n * q, width, m.k, 1, wide, wide) for m, width in widths], num_seqs, rows).time_s

    def pass_ops(self, num_seqs: Num, query_len: Num, context_len: Num, sampled_rows: Num) -> list[Op]:
        """Operations of one draft pass."""
        return self._ops(Segment(num_seqs, query_len, pass_end(query_len, context_len), sampled_rows))

    def _ops(self, segment: Segment) -> list[Op]:
        """The arg-max over the (reduced) vocabulary is one read of the logits."""
        assert self.body is not None
        ops = pass_ops(self.body, [segment], sampling=False)
        vocab = self.body.network.head_vocab
        return [*ops, VectorOp("arg-max", 2.0 * np.asarray(segment.num_seqs) * segment.sampled_rows * vocab, 1)] if vocab else ops

    def _markov_s(self, num_seqs: Num, draft_len: NDArray[np.float64]) -> Num:
        """DSpark's sequential head: per drafted token one rank x vocabulary product and its launches."""
        if not self.markov_rank or self.body is None:
            return 0.0
        vocab = self.body.network.head_vocab
        wide, width = self.wide, vocab // self.body.layout.tp
        head = self.machine.grid_time(lambda n, _: [Gemm("Markov head", n, width, self.markov_rank, 1, wide, wide)], num_seqs, 1.0)
        return draft_len * head.time_s

    def prefill_s(self, chunk_len: Num, context_len: Num) -> Num:
        """The drafter reads the prompt too: one chunk that ends at context_len."""
        if self.body is None:
            return 0.0
        return self._pass_s(1.0, chunk_len, np.asarray(context_len) - np.asarray(chunk_len) / 2.0)


def pass_end(query_len: Num, context_len: Num) -> NDArray[np.float64]:
    """Mean tokens that a draft pass's last row attends to."""
    return np.asarray(np.asarray(context_len) + np.asarray(query_len) / 2.0, dtype=np.float64)
