"""A pass of a network on one rank: segments in, operations out. The same code serves prefill, decode, draft passes and verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.models.spec import AttentionCore, Experts, KvAttention, LatentAttention, Layer
from planner.ops import (
    ACT_BYTES,
    AllGather,
    AllReduce,
    AllToAll,
    Dtypes,
    ExpertsOp,
    Gemm,
    KvOp,
    LatentOp,
    Layout,
    Network,
    Num,
    Op,
    Segment,
    StateOp,
    VectorOp,
    kv_heads_per_rank,
    split_columns,
    state_bytes_per_layer,
)


class _GemmShape(NamedTuple):
    n: int
    k: int
    weights_dtype: str
    act_dtype: str


@dataclass(frozen=True)
class PassPlan:
    """Everything of a pass that does not depend on its segments: merged GEMM shapes, cores and experts with their counts."""

    network: Network
    layout: Layout
    dtypes: Dtypes
    sampler_passes: float = 3.0
    """Passes over float32 logits of softmax, top-k/p and rejection (measured 3-4: facts on rejection sampling)."""
    expert_overlap: float = 0.3
    """Tokens of one sequence share experts: 31-38 % of the next token's were seen re-used (Cohere, facts on MoE and speculation)."""

    @cached_property
    def gemms(self) -> tuple[tuple[str, _GemmShape, int], ...]:
        """Dense GEMMs per pass: same-shaped ones of several layers are merged into a count."""
        found: dict[tuple[str, _GemmShape], int] = {}
        for layer, count in (*self.network.groups, (Layer(None, self.network.extra), 1)):
            for name, shape in self._layer_gemms(layer):
                found[name, shape] = found.get((name, shape), 0) + count
        return tuple((name, shape, count) for (name, shape), count in found.items())

    def _layer_gemms(self, layer: Layer) -> list[tuple[str, _GemmShape]]:
        tp = self.layout.tp
        core = layer.attention
        heads = core.num_kv_heads if isinstance(core, KvAttention) else 1
        fused: dict[tuple[str, int, str], tuple[str, int]] = {}
        for m in layer.matrices:
            dtype = self.dtypes.matrices.get(m.name) or self.dtypes.weights.get(m.tensor_class, "bf16")
            n, k = m.n, m.k
            if m.shard == "column":
                n = split_columns(n, tp)
            elif m.shard == "row":
                k = split_columns(k, tp)
            elif m.shard == "kv":
                n = n // max(1, heads) * kv_heads_per_rank(heads, tp)
            key = (m.fused or m.name, k, dtype)
            name, width = fused.get(key, (m.fused or m.name, 0))
            fused[key] = (name, width + n)
        return [(name, _GemmShape(n, k, dtype, self._act(dtype))) for (_, k, dtype), (name, n) in fused.items()]

    def _act(self, weights_dtype: str) -> str:
        return self.dtypes.act.get(weights_dtype, "bf16")

    @cached_property
    def cores(self) -> tuple[tuple[AttentionCore, int], ...]:
        found: dict[AttentionCore, int] = {}
        for layer, count in self.network.groups:
            if layer.attention is not None:
                found[layer.attention] = found.get(layer.attention, 0) + count
        return tuple(found.items())

    @cached_property
    def experts(self) -> tuple[tuple[Experts, int], ...]:
        found: dict[Experts, int] = {}
        for layer, count in self.network.groups:
            if layer.experts is not None:
                found[layer.experts] = found.get(layer.experts, 0) + count
        return tuple(found.items())

    @cached_property
    def reduces(self) -> int:
        """All-reduces a pass: one after each row-split matrix of a layer, experts and shared expert together."""
        total = 0
        for layer, count in self.network.groups:
            mixer = any(m.shard == "row" and m.tensor_class in ("attn", "linear_attn") for m in layer.matrices)
            mlp = layer.experts is not None or any(m.shard == "row" and m.tensor_class in ("mlp", "shared") for m in layer.matrices)
            total += count * (int(mixer) + int(mlp and (layer.experts is None or not self.exchanges)))
        return total

    @property
    def exchanges(self) -> bool:
        """Tokens travel to their experts: only when attention is data parallel; under TP every rank already has them."""
        return self.layout.dp > 1 and bool(self.experts)

    @cached_property
    def elementwise_per_row(self) -> float:
        """Bytes of elementwise work per row: residual and norms 8 hidden, projections twice their width, gated activation 3 ffn."""
        total = 0.0
        for layer, count in self.network.groups:
            inner = sum(s.n for _, s in self._layer_gemms(layer))
            routed = layer.experts.top_k * layer.experts.ffn * 3.0 / (self.layout.moe_tp * self.layout.ep) if layer.experts else 0.0
            total += count * (8.0 * self.network.hidden_size + 2.0 * inner + routed)
        return ACT_BYTES * total


def pass_ops(plan: PassPlan, segments: Sequence[Segment], *, padded_rows: Num | None = None, sampling: bool = True) -> list[Op]:
    """The operations of one pass on one rank.

    padded_rows: rows after padding to a captured CUDA-graph size (GEMMs run on them); None = the exact rows.
    sampling: price softmax and rejection over the vocabulary for the sampled rows.
    """
    rows = sum((s.rows for s in segments), start=np.float64(0.0))
    sampled = sum((s.num_seqs * s.sampled_rows for s in segments), start=np.float64(0.0))
    gemm_rows = rows if padded_rows is None else padded_rows
    ops: list[Op] = [Gemm(name, gemm_rows, s.n, s.k, count, s.weights_dtype, s.act_dtype, plan.dtypes.block_scaled) for name, s, count in plan.gemms]
    for i, segment in enumerate(segments):
        tag = "" if len(segments) == 1 else f"[{i}]"
        ops += [_attention_op(plan, core, count, segment, tag) for core, count in plan.cores]
    ops += _expert_ops(plan, rows, segments)
    ops.append(VectorOp("elementwise", rows * plan.elementwise_per_row, 1))
    if plan.layout.tp > 1:
        ops.append(AllReduce("all-reduce", ACT_BYTES * gemm_rows * plan.network.hidden_size, plan.layout.tp, plan.reduces))
    if plan.network.head_vocab:
        ops += _head_ops(plan, sampled, sampling)
    return ops


def _attention_op(plan: PassPlan, core: AttentionCore, count: int, s: Segment, tag: str) -> Op:
    tp, d = plan.layout.tp, plan.dtypes
    if isinstance(core, KvAttention):
        label = "attention" if core.window is None else f"attention(window {core.window})"
        label = "sparse attention" if core.sparse_topk else label
        return KvOp(
            label + tag,
            core,
            s.num_seqs,
            s.query_len,
            s.context_len,
            -(-core.num_heads // tp),
            kv_heads_per_rank(core.num_kv_heads, tp),
            d.kv,
            d.attn,
            count,
        )
    if isinstance(core, LatentAttention):
        label = "sparse MLA" if core.sparse_topk else "MLA"
        return LatentOp(label + tag, core, s.num_seqs, s.query_len, s.context_len, -(-core.num_heads // tp), d.kv, d.attn, count)
    return StateOp("state update" + tag, core, s.num_seqs, s.query_len, state_bytes_per_layer(core, tp, d.state), core.flop_per_token / tp, count)


def _expert_ops(plan: PassPlan, rows: Num, segments: Sequence[Segment]) -> list[Op]:
    ops: list[Op] = []
    lay = plan.layout
    seqs = sum((s.num_seqs for s in segments), start=np.float64(0.0)) * lay.dp
    query = np.maximum(rows * lay.dp / np.maximum(seqs, 1e-9), 1.0)
    for core, count in plan.experts:
        dtype = plan.dtypes.weights.get("experts", "bf16")
        ops.append(
            ExpertsOp(
                "experts",
                core,
                seqs,
                query,
                lay.ep,
                lay.moe_tp,
                dtype,
                plan._act(dtype),
                count,
                plan.dtypes.block_scaled,
                plan.expert_overlap,
            )
        )
        if plan.exchanges:
            ranks = lay.tp * lay.dp
            if lay.ep == 1:  # every rank holds a slice of every expert: all rows go everywhere and come back summed
                everyone = ACT_BYTES * rows * lay.dp * core.width
                ops.append(AllGather("gather tokens", everyone, ranks, count))
                ops.append(AllGather("scatter sums", everyone, ranks, count))
                continue
            # distinct ranks among a token's top-k experts; dispatch in 8 bit, combine in 16
            copies = lay.ep * (1.0 - (1.0 - 1.0 / lay.ep) ** core.top_k)
            sent = rows * copies * core.width / lay.tp
            ops.append(AllToAll("dispatch", sent * 1.0, ranks, count))
            ops.append(AllToAll("combine", sent * ACT_BYTES, ranks, count))
    return ops


def _head_ops(plan: PassPlan, sampled: Num, sampling: bool) -> list[Op]:
    vocab, hidden, tp = plan.network.head_vocab, plan.network.hidden_size, plan.layout.tp
    dtype = plan.dtypes.weights.get("lm_head", "bf16")
    ops: list[Op] = [Gemm("LM head", sampled, split_columns(vocab, tp), hidden, 1, dtype, plan._act(dtype))]
    if tp > 1:
        ops.append(AllGather("gather logits", ACT_BYTES * sampled * vocab, tp, 1))
    if sampling:
        ops.append(VectorOp("sampler", 4.0 * plan.sampler_passes * sampled * vocab, 1))
    return ops
