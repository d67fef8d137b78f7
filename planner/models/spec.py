"""What a model is, as far as cost is concerned: a list of layers described by kind.

A layer is matrices (weights that multiply every token), one attention core (what touches the KV cache or a state) and perhaps
experts. Parameters, bytes and FLOP all follow from these, so no formula is written per model family.

Counts are elements, widths are features; nothing here has a byte or a second in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

#: Classes of tensors that a quantisation scheme may treat differently.
TensorClass = Literal["embed", "lm_head", "attn", "linear_attn", "mlp", "shared", "experts", "router", "norm"]
#: How tensor parallelism splits a matrix: output columns, input rows (an all-reduce follows), columns that belong to KV heads
#: (replicated once tp exceeds the KV heads), or not at all.
Shard = Literal["column", "row", "kv", "none"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of `n` x `k` elements applied to every token of the layer: y[.., n] = x[.., k] W^T."""

    name: str
    n: int
    k: int
    tensor_class: TensorClass
    shard: Shard
    fused: str = ""
    """Matrices of one layer with the same non-empty label and k run as one GEMM (q, k, v; gate, up)."""
    rows_frac: float = 1.0
    """Share of the pass's tokens it sees (1 except for side paths)."""

    @property
    def params(self) -> int:
        return self.n * self.k


@dataclass(frozen=True, slots=True)
class KvAttention:
    """Softmax attention over cached keys and values (MHA, GQA, MQA; full, sliding, or token-sparse)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    """Tokens a query may look back on; None = whole context."""
    sparse_topk: int | None = None
    """Token-sparse attention: each query gathers at most this many tokens."""
    index_heads: int = 0
    index_head_dim: int = 0
    """The indexer of token-sparse attention scores the whole context with these heads, per query."""
    index_kv_per_token: int = 0
    """Elements a token adds to the indexer's own cache."""
    compress_ratio: int = 1
    """Cached entries per token are 1/ratio (DeepSeek-V4 compressed attention)."""
    shares_kv: bool = False
    """Reads the cache of an earlier layer and stores none (Gemma num_kv_shared_layers)."""
    k_is_v: bool = False
    """Keys and values are one tensor, stored once."""
    local_window: int = 0
    """Recent tokens kept uncompressed beside the compressed entries (only with compress_ratio > 1)."""
    kind: Literal["gqa"] = "gqa"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one latent of kv_rank + rope_dim elements per token, shared by all heads."""

    num_heads: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    sparse_topk: int | None = None
    index_heads: int = 0
    index_head_dim: int = 0
    index_kv_per_token: int = 0
    kind: Literal["mla"] = "mla"


@dataclass(frozen=True, slots=True)
class StateAttention:
    """Linear attention, KDA, gated delta net or Mamba-2: a fixed state per sequence instead of a cache."""

    num_heads: int
    state_elements: int
    """Recurrent state per sequence and layer (all heads)."""
    conv_elements: int
    """Convolution state per sequence and layer."""
    flop_per_token: int
    """FLOP of the state update and read-out per token (1 multiply-add = 2)."""
    state_dtype: str = "fp32"
    kind: Literal["state"] = "state"


AttentionCore = KvAttention | LatentAttention | StateAttention


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of one MoE layer. Each expert is `matrices` weights of ffn x width elements."""

    num_experts: int
    top_k: int
    width: int
    """Features entering and leaving an expert (hidden size, or the latent size of a latent MoE)."""
    ffn: int
    matrices: int = 3
    """3 = gated (gate, up, down), 2 = ungated (up, down)."""
    expert_bias: int = 0
    """Bias elements per expert."""

    @property
    def params_per_expert(self) -> int:
        return self.matrices * self.width * self.ffn + self.expert_bias


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer (a Nemotron-H block counts as one layer even when it is only an MLP)."""

    attention: AttentionCore | None
    matrices: tuple[Matrix, ...]
    experts: Experts | None = None
    vector_params: int = 0
    """Norm weights, biases, convolution kernels: counted, never a GEMM."""

    @property
    def params(self) -> int:
        dense = sum(m.params for m in self.matrices) + self.vector_params
        return dense + (self.experts.num_experts * self.experts.params_per_expert if self.experts else 0)

    @property
    def active_params(self) -> int:
        dense = sum(m.params for m in self.matrices) + self.vector_params
        return dense + (self.experts.top_k * self.experts.params_per_expert if self.experts else 0)


@dataclass(frozen=True, slots=True)
class Mtp:
    """Multi-token-prediction blocks that the config declares. `layers` and `matrices` are those of ONE block."""

    n_predict: int
    """Blocks present, i.e. tokens predicted without re-running a block."""
    layers: tuple[Layer, ...]
    matrices: tuple[Matrix, ...] = ()
    """Projections joining hidden state and embedding."""
    vector_params: int = 0
    verified: bool = False
    """True only when the checkpoint's tensor index was seen to hold it; a config merely declares."""
    weights_dtype: str | None = None
    """Storage dtype of the block where it is known to be quantised; None = the model's base dtype, whatever the rest is."""

    @property
    def params(self) -> int:
        one = sum(layer.params for layer in self.layers) + sum(m.params for m in self.matrices) + self.vector_params
        return self.n_predict * one


@dataclass(frozen=True)
class Quant:
    """Storage dtype per tensor class, as the checkpoint says. Classes not named are 16-bit."""

    scheme: str = "none"
    """The config's own name for it: none, fp8, nvfp4, mxfp4, modelopt-mixed, compressed-tensors, awq, gptq, ..."""
    weights: tuple[tuple[TensorClass, str], ...] = ()
    kv_dtype: str | None = None
    """None: the checkpoint does not say, so the cache is 16-bit."""
    act_dtype: str | None = None
    """Activation dtype of the quantised GEMMs where the scheme states it; None = the engine decides."""
    block_scaled: bool = False
    """fp8 with 128x128 block scales (another GEMM kernel than per-tensor)."""
    matrices: tuple[tuple[str, str], ...] = ()
    """Matrix names whose storage differs from their class (NVFP4 o_proj beside 16-bit q and kv projections)."""
    act_by_class: tuple[tuple[TensorClass, str], ...] = ()
    """Activation dtype per class where the classes differ (FP8 attention beside weight-only NVFP4 experts)."""

    def weights_dtype(self, tensor_class: TensorClass, base: str = "bf16") -> str:
        return dict(self.weights).get(tensor_class, base)

    def matrix_dtype(self, matrix: Matrix, base: str = "bf16") -> str:
        """Storage of one matrix: its own entry, else that of its class."""
        return dict(self.matrices).get(matrix.name) or self.weights_dtype(matrix.tensor_class, base)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model (the text decoder of a multimodal one)."""

    id: str
    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    tie_embeddings: bool
    base_dtype: str = "bf16"
    max_context_tokens: int | None = None
    vector_params: int = 0
    """Final norm and other loose vectors."""
    extra_matrices: tuple[Matrix, ...] = ()
    """Matrices outside the layers (per-layer input embeddings and the like)."""
    mtp: Mtp | None = None
    quant: Quant = field(default_factory=Quant)
    source: str = ""
    notes: tuple[str, ...] = ()
    """What was derived, defaulted or looked odd while reading; shown under assumptions."""

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with their counts, in order of first appearance."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def embed_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @cached_property
    def total_params(self) -> int:
        """Parameters of the main model: embeddings once if tied, no MTP, no vision tower."""
        head = 0 if self.tie_embeddings else self.embed_params
        extra = sum(m.params for m in self.extra_matrices)
        return self.embed_params + head + extra + self.vector_params + sum(n * layer.params for layer, n in self.groups)

    @cached_property
    def active_params(self) -> int:
        """Parameters a token passes through, both vocabulary tables counted as in total_params."""
        return self.total_params - sum(n * (layer.params - layer.active_params) for layer, n in self.groups)

    @property
    def is_moe(self) -> bool:
        return any(layer.experts for layer in self.layers)

    def attention_cores(self) -> Iterator[tuple[AttentionCore, int]]:
        """Every distinct attention core with the number of layers that have it."""
        for layer, count in self.groups:
            if layer.attention is not None:
                yield layer.attention, count
