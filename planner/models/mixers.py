"""Token mixers: softmax attention (GQA, MLA, DeepSeek-V4's compressed kind) and recurrent states (GDN, KDA, Mamba-2).

Each builder returns the core, its matrices and the count of its vector parameters (norms, biases, convolutions, sinks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.models.fields import Fields
from planner.models.spec import AttentionCore, KvAttention, LatentAttention, Matrix, Shard, StateAttention, TensorClass
from planner.models.traits import Traits

Mixer = tuple[AttentionCore, tuple[Matrix, ...], int]
Indexer = Literal["none", "full", "shared"]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


@dataclass(frozen=True, slots=True)
class Heads:
    """Head geometry of a GQA layer."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


def dtype_name(text: str) -> str | None:
    """``torch.bfloat16`` -> ``bf16``; None when it is no 16 or 32-bit float type."""
    name = text.lower().removeprefix("torch.")
    return name if name in _DTYPES.values() else _DTYPES.get(name)


def matrix(name: str, n: int, k: int, shard: Shard, fused: str = "", *, tensor_class: TensorClass = "attn") -> Matrix:
    return Matrix(name, n, k, tensor_class, shard, fused)


def read_heads(cfg: Fields, prefix: str = "") -> Heads:
    """Heads of the layer kind with this key prefix ("" or "swa_"); prefixed keys fall back to the plain ones."""
    heads = cfg.optional(f"{prefix}num_attention_heads", minimum=1) if prefix else 0
    heads = heads or cfg.need("heads")
    kv_heads = (cfg.maybe(f"{prefix}num_key_value_heads") if prefix else None) or cfg.maybe("kv_heads")
    if kv_heads is None:
        if cfg.raw.get("multi_query") is True:
            kv_heads = 1
            cfg.note("multi_query is true: one KV head")
        else:
            kv_heads = heads
            cfg.note("num_key_value_heads is absent: multi-head attention (as many KV heads as query heads) is assumed")
    head_dim = (cfg.maybe(f"{prefix}head_dim") if prefix else None) or cfg.maybe("head_dim") or derived_head_dim(cfg, heads)
    v_head_dim = (cfg.maybe(f"{prefix}v_head_dim") if prefix else None) or cfg.maybe("v_head_dim") or head_dim
    check_groups(cfg, heads, kv_heads, f"{prefix}num_key_value_heads")
    return Heads(heads, kv_heads, head_dim, v_head_dim)


def derived_head_dim(cfg: Fields, heads: int) -> int:
    hidden = cfg.need("hidden")
    if hidden % heads:
        raise cfg.error(
            "head_dim", "missing, and hidden_size is not a multiple of num_attention_heads", got=f"{hidden} / {heads}",
            expected="an explicit head_dim",
        )  # fmt: skip
    cfg.note(f"head_dim is absent: derived as hidden_size / num_attention_heads = {hidden // heads}")
    return hidden // heads


def check_groups(cfg: Fields, heads: int, kv_heads: int, key: str) -> None:
    if kv_heads > heads or heads % kv_heads:
        raise cfg.error(key, "query heads are not a multiple of the KV heads", got=kv_heads, expected=f"a divisor of {heads} heads")


def gqa(cfg: Fields, traits: Traits, kind: str, *, window: int | None, shares_kv: bool = False) -> Mixer:
    """Softmax attention with a KV cache. `kind` is full, sliding, chunked or sparse."""
    sliding = kind == "sliding"
    hidden = cfg.need("hidden")
    h = read_heads(cfg, "swa_" if sliding and cfg.has("swa_num_key_value_heads") else "")
    k_eq_v = False
    if not sliding and cfg.has("global_head_dim"):
        dim = cfg.need("global_head_dim")
        k_eq_v = cfg.flag("attention_k_eq_v")
        kv = cfg.maybe("num_global_key_value_heads") if k_eq_v else None
        h = Heads(h.heads, kv or h.kv_heads, dim, dim)
        check_groups(cfg, h.heads, h.kv_heads, "num_global_key_value_heads")
    gate = cfg.flag("attn_output_gate", traits.gated_attention) or cfg.flag("attention_output_gate")
    q_width, o_width = h.heads * h.head_dim, h.heads * h.v_head_dim
    k_width, v_width = h.kv_heads * h.head_dim, h.kv_heads * h.v_head_dim
    parts = [matrix("q", 2 * q_width if gate else q_width, hidden, "column", "qkv")]
    if not shares_kv:
        parts.append(matrix("k", k_width, hidden, "kv", "qkv"))
        if not k_eq_v:
            parts.append(matrix("v", v_width, hidden, "kv", "qkv"))
    parts.append(matrix("o", hidden, o_width, "row"))
    vectors = _gqa_vectors(cfg, traits, h, hidden=hidden, shares_kv=shares_kv)
    vectors += h.heads if _has_sinks(cfg, traits, sliding) else 0
    topk, index_heads, index_dim = 0, 0, 0
    if kind == "sparse":
        topk, index_heads, index_dim = _block_sparse(cfg)
        parts += [matrix("index_q", index_heads * index_dim, hidden, "none"), matrix("index_k", index_dim, hidden, "none")]
        vectors += 2 * index_dim
    core = KvAttention(
        h.heads, h.kv_heads, h.head_dim, h.v_head_dim, window=window, sparse_topk=topk or None, index_heads=index_heads,
        index_head_dim=index_dim, index_kv_per_token=index_dim, shares_kv=shares_kv,
    )  # fmt: skip
    return core, tuple(parts), vectors


def _gqa_vectors(cfg: Fields, traits: Traits, h: Heads, *, hidden: int, shares_kv: bool) -> int:
    explicit = cfg.raw.get("attention_bias") is not None
    bias = cfg.flag("attention_bias") if explicit else traits.qkv_bias
    q_width, k_width, v_width = h.heads * h.head_dim, h.kv_heads * h.head_dim, h.kv_heads * h.v_head_dim
    vectors = q_width + (0 if shares_kv else k_width + v_width) if bias else 0
    vectors += hidden if bias and traits.o_bias else 0
    norm = traits.qk_norm if cfg.raw.get("use_qk_norm") is not False else "none"
    if norm == "head":
        vectors += h.head_dim if shares_kv else 2 * h.head_dim
    elif norm == "layer":
        vectors += q_width + (0 if shares_kv else k_width)
    return vectors


def _has_sinks(cfg: Fields, traits: Traits, sliding: bool) -> bool:
    return cfg.flag("add_swa_attention_sink_bias" if sliding else "add_full_attention_sink_bias", traits.sinks)


def _block_sparse(cfg: Fields) -> tuple[int, int, int]:
    """Block-sparse attention (MiniMax-M3): tokens gathered per query, indexer heads and width."""
    table = cfg.table("sparse_attention_config")
    if table is None:
        raise cfg.error("sparse_attention_config", "missing, but a layer is sparse", expected="an object")
    topk = table.need("sparse_topk_blocks") * table.need("sparse_block_size")
    return topk, table.need("sparse_num_index_heads"), table.need("sparse_index_dim")


def mla(cfg: Fields, *, indexer: Indexer = "none") -> Mixer:
    """Multi-head latent attention. `indexer`: the layer holds one, uses an earlier layer's choice, or attends densely."""
    hidden, heads = cfg.need("hidden"), cfg.need("heads")
    kv_rank, rope = cfg.need("kv_lora_rank"), cfg.optional("qk_rope_head_dim")
    nope, v_dim = cfg.need("qk_nope_head_dim"), cfg.need("v_head_dim")
    q_rank = cfg.maybe("q_lora_rank")
    q_width = heads * (nope + rope)
    vectors = kv_rank
    if q_rank is None:
        parts = [matrix("q", q_width, hidden, "column"), matrix("kv_a", kv_rank + rope, hidden, "none")]
    else:
        parts = [
            matrix("q_a", q_rank, hidden, "none", "qkv_a"),
            matrix("kv_a", kv_rank + rope, hidden, "none", "qkv_a"),
            matrix("q_b", q_width, q_rank, "column"),
        ]
        vectors += q_rank
    parts.append(matrix("kv_b", heads * (nope + v_dim), kv_rank, "column"))
    parts.append(matrix("o", hidden, heads * v_dim, "row"))
    if cfg.flag("mla_use_output_gate"):
        parts.append(matrix("o_gate", heads * v_dim, hidden, "column"))
    index_heads = index_dim = 0
    if indexer == "full":
        index_heads, index_dim = cfg.need("index_n_heads"), cfg.need("index_head_dim")
        parts += [
            matrix("index_q", index_heads * index_dim, q_rank or hidden, "none"),
            matrix("index_k", index_dim, hidden, "none", "index"),
            matrix("index_w", index_heads, hidden, "none", "index"),
        ]
        vectors += 2 * index_dim
    topk = None if indexer == "none" else cfg.need("sparse_topk")
    core = LatentAttention(
        heads, kv_rank, rope, nope, v_dim, sparse_topk=topk, index_heads=index_heads, index_head_dim=index_dim,
        index_kv_per_token=index_dim,
    )  # fmt: skip
    return core, tuple(parts), vectors


def compressed(cfg: Fields, ratio: int) -> Mixer:
    """DeepSeek-V4: one shared key-value head, entries compressed by `ratio` (0: only the sliding window)."""
    hidden, heads, dim = cfg.need("hidden"), cfg.need("heads"), cfg.need("head_dim")
    q_rank, o_rank, groups = cfg.need("q_lora_rank"), cfg.need("o_lora_rank"), cfg.need("o_groups")
    if heads * dim % groups:
        raise cfg.error("o_groups", "does not divide the attention output", got=groups, expected=f"a divisor of {heads * dim}")
    parts = [
        matrix("q_a", q_rank, hidden, "none", "qkv_a"),
        matrix("kv", dim, hidden, "none", "qkv_a"),
        matrix("q_b", heads * dim, q_rank, "column"),
        matrix("o_a", groups * o_rank, heads * dim // groups, "column"),
        matrix("o_b", hidden, groups * o_rank, "row"),
    ]
    vectors = q_rank + dim + heads
    window = cfg.need("window")
    if ratio <= 1:
        return KvAttention(heads, 1, dim, dim, window=window, k_is_v=True), tuple(parts), vectors
    # Ratio 4 compresses overlapping windows: two projections of each kind.
    indexed = ratio <= 16
    width = dim * (2 if indexed else 1)
    parts += [matrix("compress_kv", width, hidden, "none", "compress"), matrix("compress_gate", width, hidden, "none", "compress")]
    vectors += ratio * width + dim
    index_heads = index_dim = 0
    if indexed:
        index_heads, index_dim = cfg.need("index_n_heads"), cfg.need("index_head_dim")
        parts += [
            matrix("index_q", index_heads * index_dim, q_rank, "none"),
            matrix("index_w", index_heads, hidden, "none", "index"),
            matrix("index_compress_kv", 2 * index_dim, hidden, "none", "index"),
            matrix("index_compress_gate", 2 * index_dim, hidden, "none", "index"),
        ]
        vectors += ratio * 2 * index_dim + index_dim
    core = KvAttention(
        heads, 1, dim, dim, sparse_topk=cfg.need("sparse_topk") if indexed else None, index_heads=index_heads,
        index_head_dim=index_dim, index_kv_per_token=index_dim // ratio, compress_ratio=ratio, k_is_v=True, local_window=window,
    )  # fmt: skip
    return core, tuple(parts), vectors


def _state(cfg: Fields, heads: int, state: int, conv: tuple[int, int], *, passes: int) -> StateAttention:
    """`passes` multiply-adds per state element and token; `conv` = (channels, kernel), its cache holds kernel - 1 tokens."""
    channels, kernel = conv
    flop = 2 * passes * state + 2 * kernel * channels
    text = cfg.text("state_dtype")
    dtype = "fp32" if text is None else dtype_name(text)
    if dtype is None:
        cfg.note(f"state dtype {text!r} is not known: 32-bit is assumed")
    elif text is None:
        cfg.note("the recurrent state's dtype is not stated: 32-bit is assumed")
    return StateAttention(heads, state, channels * (kernel - 1), flop, dtype or "fp32")


def gated_delta(cfg: Fields) -> Mixer:
    """Gated delta net. Per state element and token: decay, delta (S k), update, read-out (S q) = 4 multiply-adds."""
    hidden = cfg.need("hidden")
    kh, vh = cfg.need("linear_num_key_heads"), cfg.need("linear_num_value_heads")
    kd, vd = cfg.need("linear_key_head_dim"), cfg.need("linear_value_head_dim")
    kernel = cfg.need("conv_kernel")
    if vh % kh:
        raise cfg.error("linear_num_value_heads", "not a multiple of the key heads", got=vh, expected=f"a multiple of {kh}")
    channels = 2 * kh * kd + vh * vd
    parts = (
        matrix("gdn_qkvz", channels + vh * vd, hidden, "column", "in_proj", tensor_class="linear_attn"),
        matrix("gdn_ba", 2 * vh, hidden, "column", "in_proj", tensor_class="linear_attn"),
        matrix("gdn_out", hidden, vh * vd, "row", tensor_class="linear_attn"),
    )
    core = _state(cfg, vh, vh * kd * vd, (channels, kernel), passes=4)
    return core, parts, channels * kernel + 2 * vh + vd


def kda(cfg: Fields) -> Mixer:
    """Kimi delta attention: the delta rule with a decay per channel; the same four multiply-adds per state element."""
    hidden = cfg.need("hidden")
    table = cfg.table("linear_attn_config")
    if table is None:
        raise cfg.error("linear_attn_config", "missing, but a layer is KDA", expected="an object")
    heads, dim, kernel = table.need("heads"), table.need("head_dim"), table.need("conv_kernel")
    width = heads * dim
    names = ["kda_q", "kda_k", "kda_v"] + (["kda_gate"] if table.flag("use_full_rank_gate") else [])
    parts = [matrix(name, width, hidden, "column", "in_proj", tensor_class="linear_attn") for name in names]
    parts.append(matrix("kda_beta", heads, hidden, "column", "in_proj", tensor_class="linear_attn"))
    low_rank = ["kda_decay"] if table.flag("use_full_rank_gate") else ["kda_decay", "kda_gate"]
    for name in low_rank:
        parts.append(matrix(f"{name}_a", dim, hidden, "none", "low_rank", tensor_class="linear_attn"))
        parts.append(matrix(f"{name}_b", width, dim, "column", tensor_class="linear_attn"))
    parts.append(matrix("kda_out", hidden, width, "row", tensor_class="linear_attn"))
    core = _state(cfg, heads, width * dim, (3 * width, kernel), passes=4)
    return core, tuple(parts), 3 * width * kernel + heads + width + dim


def mamba2(cfg: Fields) -> Mixer:
    """Mamba-2. Per state element and token: decay, update, read-out = 3 multiply-adds."""
    hidden, heads = cfg.need("hidden"), cfg.need("mamba_num_heads")
    dim, state, groups = cfg.need("mamba_head_dim"), cfg.need("ssm_state_size"), cfg.need("n_groups")
    kernel = cfg.need("conv_kernel")
    inner = heads * dim
    channels = inner + 2 * groups * state
    parts = (
        matrix("ssm_in", inner + channels + heads, hidden, "column", tensor_class="linear_attn"),
        matrix("ssm_out", hidden, inner, "row", tensor_class="linear_attn"),
    )
    core = _state(cfg, heads, inner * state, (channels, kernel), passes=3)
    vectors = channels * kernel + (channels if cfg.flag("use_conv_bias", True) else 0) + 3 * heads + inner
    vectors += inner + channels + heads + hidden if cfg.flag("mamba_proj_bias") else 0
    return core, parts, vectors
