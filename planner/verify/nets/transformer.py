"""A Llama-shaped decoder over a static KV cache; every tensor comment gives the shape.

B sequences, q query tokens each, S cache slots, h hidden, H query heads, K KV heads, G = H/K, d head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; the names are those of a Hugging Face Llama config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def gqa_group_size(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads


class KVCache:
    """Keys and values [B, S, K, d] per layer, allocated once; a write at a position replaces what a rejected draft left there."""

    def __init__(self, shape: Shape, num_seqs: int, slots: int, like: Tensor) -> None:
        size = (shape.num_hidden_layers, num_seqs, slots, shape.num_key_value_heads, shape.head_dim)
        self.k = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.v = torch.zeros_like(self.k)
        self.rows = torch.arange(num_seqs, device=like.device)[:, None]  # [B, 1]

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    def write(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B, q, K, d] at positions [B, q]."""
        if positions.shape[0] == 1 and not positions.is_cuda:  # consecutive positions: on a CPU a slice is several times cheaper than a scatter
            start = int(positions[0, 0])
            self.k[layer, :, start : start + k.shape[1]] = k
            self.v[layer, :, start : start + k.shape[1]] = v
        else:
            self.k[layer, self.rows, positions] = k
            self.v[layer, self.rows, positions] = v

    def seen(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` slots as [B, K, S, d]."""
        return self.k[layer, :, :length].transpose(1, 2), self.v[layer, :, :length].transpose(1, 2)


def rope(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, d] of rotary embeddings in Hugging Face's half-split layout, in float32."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions[..., None].float() * inverse
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(-2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, d]."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def packed_mask(mask: Tensor, group: int) -> Tensor:
    """[B, q, S], True where a key may be seen -> [B, 1, G q, S], as `grouped_attention` takes it; made once a pass."""
    return mask.repeat(1, group, 1)[:, None]


def cache_mask(positions: Tensor, length: int, group: int, *, always: bool = False) -> Tensor | None:
    """Which of `length` slots each query at positions [B, q] may see, packed; None where one query sees them all, unless `always`."""
    if positions.numel() == 1 and not always:
        return None
    return packed_mask(torch.arange(length, device=positions.device) <= positions[..., None], group)


def grouped_attention(query: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
    """Attention of query [B, q, H, d] over k, v [B, K, S, d]; the G query heads of a KV head are packed: G q rows against one read of the KV.

    rows: a packed mask [B, 1, G q, S] or None. Returns [B, q, H d].
    """
    batch, width, heads, dim = query.shape
    kv = k.shape[1]
    packed = query.view(batch, width, kv, heads // kv, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv, -1, dim)  # [B, K, G q, d]
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=rows)
    return out.view(batch, kv, heads // kv, width, dim).permute(0, 3, 1, 2, 4).reshape(batch, width, heads * dim)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # rotated q, k and v as [B, q, heads, d] -> [B, q, H d]


class Attention(nn.Module):
    """Projections; which keys are seen is the caller's business (`attend`)."""

    def __init__(self, shape: Shape, in_size: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        width, kv = in_size or shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, q, K, d] of x [B, q, in]."""
        size = (*x.shape[:-1], self.shape.num_key_value_heads, self.shape.head_dim)
        return rotate(self.k_proj(x).view(size), cos, sin), self.v_proj(x).view(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads, kv, dim = self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim
        both = torch.cat((self.q_proj(x), self.k_proj(x)), dim=-1).view(*x.shape[:-1], heads + kv, dim)
        query, k = torch.split(rotate(both, cos, sin), [heads, kv], dim=-2)  # one rotation for both: at few rows calls cost more than numbers
        out: Tensor = self.o_proj(attend(query, k, self.v_proj(x).view(*x.shape[:-1], kv, dim)))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@dataclass(frozen=True)
class Hidden:
    """What a pass leaves for drafters: the final normalised state [B, q, h] and the residual stream after the tapped layers [B, q, taps h]."""

    final: Tensor
    taps: Tensor


class Transformer(nn.Module):
    """Decoder with tied embeddings. Parameter names are those of Hugging Face's LlamaForCausalLM below `model.`."""

    def __init__(self, shape: Shape, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape, self.taps = shape, taps
        #: Width of what drafter heads read of a layer's output; an inflated target is wider than its heads.
        self.feature_size = shape.hidden_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def logits(self, final: Tensor) -> Tensor:
        """[..., h] -> [..., V]: the embedding is the LM head."""
        return F.linear(final, self.embed_tokens.weight)

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None, *, whole: bool = False, length: int | None = None) -> Hidden:
        """One pass over tokens [B, q] at positions [B, q].

        With a cache its keys and values are written at `positions` and all slots up to each position are seen. `whole`: the tokens are whole
        sequences from position 0 (a prompt), so that nothing before them need be read; so it is without a cache (training).
        `length`: how many slots to look at, where that must not depend on the positions (a captured graph).
        """
        cos, sin = rope(positions, self.shape.head_dim, self.shape.rope_theta)
        whole = whole or cache is None
        if not whole:
            slots = int(positions.max()) + 1 if length is None else length
            rows = cache_mask(positions, slots, self.shape.gqa_group_size, always=length is not None)
        x = self.embed_tokens(tokens)
        tapped = []
        for i, layer in enumerate(self.layers):

            def attend(query: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                if cache is not None:
                    cache.write(i, positions, k, v)
                if cache is None or whole:
                    return causal_attention(query, k, v)
                return grouped_attention(query, *cache.seen(i, slots), rows)

            x = layer(x, cos, sin, attend)
            if i + 1 in self.taps:
                tapped.append(x[..., : self.feature_size])
        return Hidden(self.norm(x), torch.cat(tapped, dim=-1) if tapped else x[..., :0])


def causal_attention(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whole sequences: query [B, T, H, d], k and v [B, T, K, d] -> [B, T, H d]."""
    group = query.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    out = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def initialise(net: nn.Module, seed: int) -> None:
    """Normal(0, 0.02) matrices, output projections scaled by depth as in GPT-2."""
    generator = torch.Generator().manual_seed(seed)
    depth = max(1, sum(isinstance(m, Layer) for m in net.modules()))
    for name, p in net.named_parameters():
        if p.ndim > 1:
            scale = 0.02 / (2 * depth) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            with torch.no_grad():
                p.normal_(0.0, scale, generator=generator)
