"""Whole-model totals for people: weights, KV and state bytes, a summary by kind of layer. Per-rank bytes are in `planner.ops`."""

from __future__ import annotations

from typing import Any

from planner.models.spec import AttentionCore, KvAttention, LatentAttention, Layer, ModelSpec, StateAttention
from planner.units import bytes_per_element


def kv_elements_per_token(core: AttentionCore | None) -> float:
    """Elements one token adds to a layer's cache (indexer cache included), whatever the window."""
    if isinstance(core, KvAttention):
        if core.shares_kv:
            return 0.0
        width = core.head_dim if core.k_is_v else core.head_dim + core.v_head_dim
        return core.num_kv_heads * width / core.compress_ratio + core.index_kv_per_token
    if isinstance(core, LatentAttention):
        return core.kv_rank + core.rope_dim + core.index_kv_per_token
    return 0.0


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str = "bf16", *, growing_only: bool = False) -> float:
    """Cache bytes per token over all layers at one copy (tp = 1). `growing_only` leaves out layers whose window caps them."""
    total = 0.0
    for core, count in spec.attention_cores():
        capped = isinstance(core, KvAttention) and core.window is not None
        if not (growing_only and capped):
            total += count * kv_elements_per_token(core)
    return total * bytes_per_element(kv_dtype)


def kv_bytes_per_sequence(spec: ModelSpec, context_len: int, kv_dtype: str = "bf16") -> float:
    """Cache bytes of one sequence of `context_len` tokens: each windowed layer holds at most its window."""
    total = 0.0
    for core, count in spec.attention_cores():
        window = core.window if isinstance(core, KvAttention) else None
        held = min(context_len, window) if window is not None else context_len
        total += count * held * kv_elements_per_token(core)
        if isinstance(core, KvAttention) and core.local_window:
            recent = min(context_len, core.local_window)
            total += count * recent * core.num_kv_heads * core.head_dim
    return total * bytes_per_element(kv_dtype)


def state_bytes_per_sequence(spec: ModelSpec, conv_dtype: str = "bf16") -> float:
    """Recurrent and convolution state of one sequence, one copy."""
    total = 0.0
    for core, count in spec.attention_cores():
        if isinstance(core, StateAttention):
            total += count * core.state_elements * bytes_per_element(core.state_dtype)
            total += count * core.conv_elements * bytes_per_element(conv_dtype)
    return total


def _layer_bytes(spec: ModelSpec, layer: Layer) -> float:
    total = layer.vector_params * bytes_per_element(spec.base_dtype)
    for matrix in layer.matrices:
        total += matrix.params * bytes_per_element(spec.quant.matrix_dtype(matrix, spec.base_dtype))
    if layer.experts:
        count = layer.experts.num_experts * layer.experts.params_per_expert
        total += count * bytes_per_element(spec.quant.weights_dtype("experts", spec.base_dtype))
    return total


def weights_bytes(spec: ModelSpec, *, with_mtp: bool = False) -> float:
    """Stored bytes of the main model under its own quantisation (scales included), MTP blocks on request."""
    base = bytes_per_element(spec.base_dtype)
    total = sum(n * _layer_bytes(spec, layer) for layer, n in spec.groups) + spec.vector_params * base
    total += spec.embed_params * bytes_per_element(spec.quant.weights_dtype("embed", spec.base_dtype))
    if not spec.tie_embeddings:
        total += spec.embed_params * bytes_per_element(spec.quant.weights_dtype("lm_head", spec.base_dtype))
    total += sum(m.params * bytes_per_element(spec.quant.weights_dtype(m.tensor_class, spec.base_dtype)) for m in spec.extra_matrices)
    if with_mtp and spec.mtp:
        total += spec.mtp.params * bytes_per_element(spec.mtp.weights_dtype or spec.base_dtype)
    return total


def core_kind(core: AttentionCore | None) -> str:
    """One word or two for a core: full, sliding 128, sparse top-2048, mla, compressed 1/4, state, none."""
    if core is None:
        return "none"
    if isinstance(core, StateAttention):
        return "state"
    if isinstance(core, LatentAttention):
        return f"mla sparse top-{core.sparse_topk}" if core.sparse_topk else "mla"
    if core.compress_ratio > 1:
        return f"compressed 1/{core.compress_ratio}"
    if core.window is not None:
        return f"sliding {core.window}"
    return f"sparse top-{core.sparse_topk}" if core.sparse_topk else "full"


def _ffn_kind(layer: Layer) -> str:
    has_dense = any(m.tensor_class == "mlp" for m in layer.matrices)
    if layer.experts:
        moe = f"moe {layer.experts.top_k} of {layer.experts.num_experts}"
        return f"dense + {moe}" if has_dense else moe
    return "dense" if has_dense else "none"


def describe_model(spec: ModelSpec) -> dict[str, Any]:
    """Plain values about a model for `draftline models ID --json`; sizes in bytes, whole model, one copy."""
    mtp = spec.mtp
    layers = [
        {"count": n, "attention": core_kind(layer.attention), "ffn": _ffn_kind(layer), "params": layer.params,
         "active_params": layer.active_params, "kv_elements_per_token": kv_elements_per_token(layer.attention)}
        for layer, n in spec.groups
    ]  # fmt: skip
    return {
        "id": spec.id,
        "model_type": spec.model_type,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_layers": spec.num_layers,
        "max_context_tokens": spec.max_context_tokens,
        "total_params": spec.total_params,
        "active_params": spec.active_params,
        "tie_embeddings": spec.tie_embeddings,
        "base_dtype": spec.base_dtype,
        "layers": layers,
        "kv_bytes_per_token_16bit": kv_bytes_per_token(spec),
        "kv_bytes_per_token_16bit_growing": kv_bytes_per_token(spec, growing_only=True),
        "state_bytes_per_sequence": state_bytes_per_sequence(spec),
        "weights_bytes": weights_bytes(spec),
        "quantisation": {
            "scheme": spec.quant.scheme, "weights": dict(spec.quant.weights), "matrices": dict(spec.quant.matrices),
            "kv_dtype": spec.quant.kv_dtype, "act_dtype": spec.quant.act_dtype, "block_scaled": spec.quant.block_scaled,
        },
        "mtp": None if mtp is None else {
            "n_predict": mtp.n_predict, "params": mtp.params, "verified": mtp.verified, "weights_dtype": mtp.weights_dtype,
        },
        "source": spec.source,
        "notes": list(spec.notes),
    }  # fmt: skip
