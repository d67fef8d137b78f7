"""What stays in the memory of one rank: weights, KV cache, states. Bytes."""

from __future__ import annotations

import numpy as np

from planner.models.spec import KvAttention, LatentAttention, StateAttention
from planner.ops import ACT_BYTES, Dtypes, Layout, Network, Num, kv_heads_per_rank, state_bytes_per_layer
from planner.passes import PassPlan
from planner.units import bytes_per_element


def kv_bytes_per_token(network: Network, tp: int, kv_dtype: str) -> float:
    """Cache bytes one more token of full-context layers costs on one rank (windowed layers: see cache_bytes)."""
    return float(cache_bytes(network, tp, kv_dtype, context_len=2.0e9) - cache_bytes(network, tp, kv_dtype, context_len=1.0e9)) / 1.0e9


def cache_bytes(network: Network, tp: int, kv_dtype: str, *, context_len: Num) -> Num:
    """KV cache of one sequence of `context_len` tokens on one rank: windows cap it, an MLA latent is whole on every rank."""
    total: Num = np.float64(0.0)
    size = bytes_per_element(kv_dtype)
    for layer, count in network.groups:
        core = layer.attention
        if isinstance(core, KvAttention) and not core.shares_kv:
            width = (core.head_dim if core.k_is_v else core.head_dim + core.v_head_dim) * kv_heads_per_rank(core.num_kv_heads, tp)
            entries = context_len / core.compress_ratio
            if core.window is not None:
                entries = np.minimum(entries, float(core.window))
            if core.local_window is not None:
                entries = entries + np.minimum(context_len, float(core.local_window))
            total = total + count * (entries * width * size + context_len * float(core.index_kv_per_token))
        elif isinstance(core, LatentAttention):
            total = total + count * context_len * ((core.kv_rank + core.rope_dim) * size + core.index_kv_per_token)
    return total


def state_bytes(network: Network, tp: int, state_dtype: str | None) -> float:
    """State of one sequence over all layers on one rank, bytes; speculation keeps 1 + D of them."""
    return sum(
        count * state_bytes_per_layer(layer.attention, tp, state_dtype)
        for layer, count in network.groups
        if isinstance(layer.attention, StateAttention)
    )


def weight_bytes(network: Network, layout: Layout, dtypes: Dtypes, *, embed_params: int = 0, tied: bool = True) -> float:
    """Weights resident on one rank: layers / pp, matrices split as they are sharded, experts over ep and moe_tp, vocabulary tables / tp."""
    plan = PassPlan(network, layout, dtypes)
    total = 0.0
    for layer, count in network.groups:
        dense = sum(s.n * s.k * bytes_per_element(s.weights_dtype) for _, s in plan._layer_gemms(layer))
        routed = 0.0
        if layer.experts is not None:
            share = layer.experts.num_experts * layer.experts.params_per_expert / (layout.ep * layout.moe_tp)
            routed = share * bytes_per_element(dtypes.weights.get("experts", "bf16"))
        total += count * (dense + routed + ACT_BYTES * layer.vector_params)
    total /= layout.pp
    tables = embed_params * ACT_BYTES + (0.0 if tied else embed_params * bytes_per_element(dtypes.weights.get("lm_head", "bf16")))
    extra = sum(m.params * bytes_per_element(dtypes.weights.get(m.tensor_class, "bf16")) for m in network.extra)
    return total + tables / layout.tp + extra / layout.tp
