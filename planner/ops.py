"""What one rank computes and moves in one pass. Knows models and layouts, and no GPU speed.

A pass is a short list of segments (num_seqs, query_len, context_len), so the same code serves prefill, plain decode (query_len 1),
draft passes, verification (query_len 1 + D) and a step that mixes decode rows with a prefill chunk. Every number of a segment may be
a scalar or an array; they broadcast together. Operations carry FLOP and bytes; `roofline` turns them into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.kernels import experts_touched
from planner.models.spec import Experts, KvAttention, LatentAttention, Layer, Matrix, ModelSpec, StateAttention
from planner.units import bytes_per_element

Num = NDArray[np.float64] | float
"""A scalar or an array that broadcasts with the others."""

ACT_BYTES = 2.0
"""Activations travel between kernels in 16 bit."""


class Segment(NamedTuple):
    """Sequences of one shape within a pass, per rank."""

    num_seqs: Num
    query_len: Num
    context_len: Num
    """Tokens attended to by the last query row, itself included."""
    sampled_rows: Num
    """Rows per sequence that go through the LM head (1 + D when verifying, 1 at the end of a prefill)."""

    @property
    def rows(self) -> Num:
        return self.num_seqs * self.query_len


@dataclass(frozen=True, slots=True)
class Layout:
    """How the target is spread. n_gpus = tp x dp x pp; moe_tp = n_gpus / (pp x ep)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def n_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def moe_tp(self) -> int:
        return max(1, self.tp * self.dp // self.ep)


@dataclass(frozen=True)
class Dtypes:
    """Storage per tensor class and the arithmetic each storage dtype runs in."""

    weights: Mapping[str, str]
    """Tensor class -> storage dtype."""
    matrices: Mapping[str, str] = field(default_factory=dict)
    """Matrix name -> storage dtype where a checkpoint treats one unlike its class."""
    act: Mapping[str, str] = field(default_factory=dict)
    """Storage dtype -> activation dtype its GEMM runs in on this GPU and engine."""
    kv: str = "bf16"
    attn: str = "bf16"
    """Dtype of the attention matmuls."""
    state: str | None = None
    block_scaled: bool = False


@dataclass(frozen=True)
class Network:
    """Layers that run as one pass: the target, or a drafter's body."""

    groups: tuple[tuple[Layer, int], ...]
    hidden_size: int
    head_vocab: int
    """Rows of the LM head; 0 = no head."""
    extra: tuple[Matrix, ...] = ()
    """Matrices run once per pass (projections joining a drafter to its target)."""

    @classmethod
    def of(cls, model: ModelSpec) -> Network:
        return cls(groups=model.groups, hidden_size=model.hidden_size, head_vocab=model.vocab_size, extra=model.extra_matrices)

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.groups)


# ---------------------------------------------------------------- operations
@dataclass(frozen=True, slots=True)
class Gemm:
    """rows x k times k x n, `count` times a pass."""

    name: str
    rows: Num
    n: int
    k: int
    count: int
    weights_dtype: str
    act_dtype: str
    block_scaled: bool = False

    @property
    def flop(self) -> Num:
        return 2.0 * self.rows * self.n * self.k

    @property
    def bytes(self) -> Num:
        return self.n * self.k * bytes_per_element(self.weights_dtype) + ACT_BYTES * self.rows * (self.n + self.k)


@dataclass(frozen=True, slots=True)
class KvOp:
    """Dense (or windowed, or token-sparse) attention of one layer over one segment, per rank."""

    name: str
    core: KvAttention
    num_seqs: Num
    query_len: Num
    context_len: Num
    num_heads: int
    num_kv_heads: int
    kv_dtype: str
    attn_dtype: str
    count: int

    @property
    def attended_len(self) -> Num:
        """Cached tokens read per sequence: the context, or what the window or the sparse selection leaves of it."""
        entries = self.context_len / self.core.compress_ratio
        if self.core.window is not None:
            entries = np.minimum(entries, self.core.window + self.query_len - 1.0)
        return entries

    @property
    def local_len(self) -> Num:
        """Recent tokens that stay uncompressed beside the compressed entries (DeepSeek-V4)."""
        return 0.0 if self.core.local_window is None else np.minimum(self.context_len, self.core.local_window + self.query_len - 1.0)

    @property
    def gathers_per_query(self) -> bool:
        return self.core.sparse_topk is not None

    @property
    def bytes(self) -> Num:
        width = (self.core.head_dim if self.core.k_is_v else self.core.head_dim + self.core.v_head_dim) * self.num_kv_heads
        read = self.attended_len
        if self.core.sparse_topk is not None:  # every query row gathers its own selection
            read = np.minimum(read * 1.0, self.core.sparse_topk) * self.query_len
        read = read + self.local_len
        io = ACT_BYTES * self.query_len * self.num_heads * (self.core.head_dim + self.core.v_head_dim)
        return self.num_seqs * (read * width * bytes_per_element(self.kv_dtype) + io) + self.index_bytes

    @property
    def index_bytes(self) -> Num:
        """The indexer reads its whole cache once per query row block (8-bit keys)."""
        return self.num_seqs * self.context_len * float(self.core.index_kv_per_token)

    @property
    def flop(self) -> Num:
        seen = self.attended_len if self.core.sparse_topk is None else np.minimum(self.attended_len * 1.0, self.core.sparse_topk)
        seen = causal_mean(seen, self.query_len, self.core.window if self.core.sparse_topk is None else self.core.sparse_topk)
        if self.core.local_window is not None:
            seen = seen + causal_mean(self.local_len, self.query_len, self.core.local_window)
        main = 2.0 * self.num_seqs * self.query_len * seen * self.num_heads * (self.core.head_dim + self.core.v_head_dim)
        return main + self.index_flop

    @property
    def index_flop(self) -> Num:
        return 2.0 * self.num_seqs * self.query_len * self.context_len * self.core.index_heads * self.core.index_head_dim


@dataclass(frozen=True, slots=True)
class LatentOp:
    """Absorbed MLA of one layer over one segment: every rank holds the whole latent."""

    name: str
    core: LatentAttention
    num_seqs: Num
    query_len: Num
    context_len: Num
    num_heads: int
    kv_dtype: str
    attn_dtype: str
    count: int

    @property
    def selected_len(self) -> Num:
        """Latents a query row attends to."""
        if self.core.sparse_topk is None:
            return self.context_len
        return np.minimum(self.context_len * 1.0, self.core.sparse_topk)

    @property
    def bytes(self) -> Num:
        read = self.selected_len if self.core.sparse_topk is None else self.selected_len * self.query_len
        latent = read * (self.core.kv_rank + self.core.rope_dim) * bytes_per_element(self.kv_dtype)
        io = ACT_BYTES * self.query_len * self.num_heads * (2 * self.core.kv_rank + self.core.rope_dim)
        return self.num_seqs * (latent + io + self.context_len * float(self.core.index_kv_per_token))

    @property
    def flop(self) -> Num:
        seen = causal_mean(self.selected_len, self.query_len, self.core.sparse_topk)
        main = 2.0 * self.num_seqs * self.query_len * seen * self.num_heads * (2 * self.core.kv_rank + self.core.rope_dim)
        return main + self.index_flop

    @property
    def index_flop(self) -> Num:
        return 2.0 * self.num_seqs * self.query_len * self.context_len * self.core.index_heads * self.core.index_head_dim


@dataclass(frozen=True, slots=True)
class StateOp:
    """Linear attention, KDA, GDN or Mamba-2 of one layer: reads and writes a state instead of a cache."""

    name: str
    core: StateAttention
    num_seqs: Num
    query_len: Num
    state_bytes: float
    """State per sequence and layer on this rank, convolution included."""
    flop_per_token: float
    count: int

    @property
    def bytes(self) -> Num:
        """One read and one write; each further row writes its own copy so that a rejection can roll back."""
        return self.num_seqs * self.state_bytes * (1.0 + np.minimum(self.query_len, 64.0))

    @property
    def flop(self) -> Num:
        return self.num_seqs * self.query_len * self.flop_per_token


@dataclass(frozen=True, slots=True)
class ExpertsOp:
    """Routed experts of one MoE layer on the worst-loaded rank."""

    name: str
    core: Experts
    num_seqs: Num
    """Sequences whose tokens reach the expert group (all data-parallel ranks together)."""
    query_len: Num
    """Rows per sequence: neighbours share experts."""
    ep: int
    moe_tp: int
    weights_dtype: str
    act_dtype: str
    count: int
    block_scaled: bool = False
    overlap: float = 0.0
    """Share of its experts that a further token of the same sequence finds already read."""

    @property
    def rows(self) -> Num:
        return self.num_seqs * self.query_len

    @property
    def touched(self) -> Num:
        """Distinct experts read on the worst of the expert-parallel ranks.

        Each of a rank's E/ep experts is touched with probability p, so their number scatters by sqrt(E/ep p (1 - p)); every rank waits
        for the largest of ep such numbers, about sqrt(2 ln ep) deviations above the mean.
        """
        mean = experts_touched(self.core.num_experts, self.core.top_k, self.num_seqs, self.query_len, self.overlap) / self.ep
        held = self.core.num_experts / self.ep
        scatter = np.sqrt(mean * (1.0 - mean / held))
        return np.minimum(mean + scatter * math.sqrt(2.0 * math.log(self.ep)), held)

    @property
    def expert_rows(self) -> Num:
        """(token, expert) pairs computed on the worst rank (the same scatter, of a Poisson count)."""
        mean = self.rows * self.core.top_k / self.ep
        return mean + np.sqrt(mean) * math.sqrt(2.0 * math.log(self.ep))

    @property
    def ffn(self) -> float:
        return self.core.ffn / self.moe_tp

    @property
    def flop(self) -> Num:
        return 2.0 * self.expert_rows * self.core.matrices * self.core.width * self.ffn

    @property
    def bytes(self) -> Num:
        weights = self.touched * self.core.matrices * self.core.width * self.ffn * bytes_per_element(self.weights_dtype)
        return weights + ACT_BYTES * self.expert_rows * (2 * self.core.width + self.core.matrices * self.ffn)


@dataclass(frozen=True, slots=True)
class VectorOp:
    """Elementwise work: norms, rotary, activations, quantisation, residual; or the sampler over the vocabulary."""

    name: str
    bytes: Num
    count: int
    flop: float = 0.0


@dataclass(frozen=True, slots=True)
class AllReduce:
    name: str
    bytes: Num
    ranks: int
    count: int
    flop: float = 0.0


@dataclass(frozen=True, slots=True)
class AllGather:
    name: str
    bytes: Num
    ranks: int
    count: int
    flop: float = 0.0


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Dispatch or combine of expert parallelism: bytes one rank sends."""

    name: str
    bytes: Num
    ranks: int
    count: int
    flop: float = 0.0


Op = Gemm | KvOp | LatentOp | StateOp | ExpertsOp | VectorOp | AllReduce | AllGather | AllToAll


def distinct(values: Num) -> list[float]:
    """Sorted distinct values (numpy's own `unique` loads its masked arrays first, 30 ms of a one-second command)."""
    return sorted(set(np.asarray(values, dtype=np.float64).ravel().tolist()))


def distinct_pairs(whole: Num, values: Num) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Distinct pairs of whole numbers and any values that broadcast together, and the index of each element's own pair.

    Costs that depend on few distinct pairs are computed once each and spread over the grid.
    """
    second = np.asarray(distinct(values))
    key = np.asarray(whole).astype(np.int64) * len(second) + np.searchsorted(second, values)
    present = np.zeros(int(key.max()) + 1, dtype=np.bool_)
    present[key] = True
    pairs = np.flatnonzero(present)
    return (pairs // len(second)).astype(np.float64), second[pairs % len(second)], (np.cumsum(present) - 1)[key]


def causal_mean(context_len: Num, query_len: Num, cap: int | None) -> Num:
    """Mean tokens a query row sees when `query_len` rows end a context: the last sees all, the first query_len - 1 fewer.

    With a window or selection `cap` that the context exceeds by the whole chunk, every row sees the cap.
    """
    if cap is None:
        return context_len - (query_len - 1.0) / 2.0
    return np.minimum(context_len - np.minimum((query_len - 1.0) / 2.0, context_len / 2.0), float(cap))


def split_columns(n: int, tp: int) -> int:
    return -(-n // tp)


def kv_heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """Beyond tp = KV heads every rank keeps a whole (replicated) head."""
    return max(1, -(-num_kv_heads // tp))


def gqa_group_size(num_heads: int, num_kv_heads: int, tp: int) -> int:
    """G: query heads per KV head on one rank (DESIGN section 2)."""
    return max(1, -(-num_heads // tp) // kv_heads_per_rank(num_kv_heads, tp))


def state_bytes_per_layer(core: StateAttention, tp: int, state_dtype: str | None) -> float:
    """Recurrent plus convolution state of one sequence in one layer on one rank, bytes."""
    recurrent = core.state_elements * bytes_per_element(state_dtype or core.state_dtype)
    return (recurrent + core.conv_elements * ACT_BYTES) / min(tp, max(1, core.num_heads))
