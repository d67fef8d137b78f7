"""Drafter heads on a target's hidden states: recursive (EAGLE-3, MTP) and block-parallel (DFlash, DSpark).

All are narrower than their target: they work at width w and borrow the target's embedding and LM head at its width h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.verify.nets.transformer import (
    Attention,
    KVCache,
    Layer,
    Shape,
    Transformer,
    cache_mask,
    grouped_attention,
    packed_mask,
    rope,
)


class FeatureHead(nn.Module):
    """One decoder layer over (embedding of token p, state of position p - 1), predicting token p + 1.

    Embedding and state are projected together to the layer's input, as EAGLE and MTP do; EAGLE-3 feeds the pair to the attention instead, from which
    a head this small learns several times more slowly.

    EAGLE-3 (Li et al., arXiv:2503.01840): the state is the fused residual stream of three target layers, then the head's own output; trained
    by unrolling (`training-time test`). MTP (DeepSeek-V3, arXiv:2412.19437 section 2.2): the state is the target's final hidden state; from the
    second draft on the head's own output takes its place through the same projection, for which it was not trained.
    """

    def __init__(self, shape: Shape, target: Shape, feature_size: int, *, recursive_state: bool) -> None:
        super().__init__()
        self.shape, self.recursive_state = shape, recursive_state
        self.fuse = nn.Linear(feature_size, shape.hidden_size, bias=False)
        self.embed_norm = nn.RMSNorm(target.hidden_size, eps=shape.rms_norm_eps)
        self.state_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.merge = nn.Linear(target.hidden_size + shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = Layer(shape)
        self.out_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.widen = nn.Linear(shape.hidden_size, target.hidden_size, bias=False)

    def first_state(self, features: Tensor) -> Tensor:
        """Target features [B, q, feature_size] -> state [B, q, w]."""
        out: Tensor = self.fuse(features)
        return out

    def next_state(self, out: Tensor) -> Tensor:
        """The head's own output [B, q, w] as the state of the next draft."""
        return out if self.recursive_state else self.first_state(self.final(out))

    def final(self, out: Tensor) -> Tensor:
        """[B, q, w] -> what the target's LM head reads, [B, q, h]."""
        wide: Tensor = self.widen(self.out_norm(out))
        return wide

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        """The layer's input [B, q, w] from embeddings [B, q, h] and states [B, q, w]."""
        out: Tensor = self.merge(torch.cat((self.embed_norm(embedded), self.state_norm(state)), dim=-1))
        return out

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """One pass over embeddings [B, q, h] of the tokens at `positions` [B, q] and states [B, q, w] of those before; returns [B, q, w]."""
        cos, sin = rope(positions, self.shape.head_dim, self.shape.rope_theta)
        length = int(positions.max()) + 1
        rows = cache_mask(positions, length, self.shape.gqa_group_size)

        def attend(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(0, positions, k, v)
            return grouped_attention(query, *cache.seen(0, length), rows)

        out: Tensor = self.layer(self.inputs(embedded, state), cos, sin, attend)
        return out


class BlockDrafter(nn.Module):
    """Drafts a whole block in one pass over `[last token, mask, mask, ...]`; its context is the target's own features, injected as keys and values.

    DFlash (arXiv:2602.06036): every draft layer projects the fused target features of the context to keys and values; inside the block
    attention goes both ways. DSpark adds a light Markov head (the previous drafted token shifts the next one's logits, low rank) and a
    confidence head (will this draft be accepted?), read before the token is chosen so that stopping there keeps sampling exact.
    """

    MARKOV_RANK = 16

    def __init__(self, shape: Shape, target: Shape, feature_size: int, block: int) -> None:
        super().__init__()
        self.shape, self.block = shape, block
        self.fuse = nn.Linear(feature_size, shape.hidden_size, bias=False)
        self.context_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.narrow = nn.Linear(target.hidden_size, shape.hidden_size, bias=False)
        self.mask_states = nn.Parameter(torch.zeros(block - 1, shape.hidden_size))
        self.carry = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.out_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.widen = nn.Linear(shape.hidden_size, target.hidden_size, bias=False)

    @property
    def max_draft_len(self) -> int:
        return self.block - 1

    def context(self, features: Tensor) -> Tensor:
        """Target features [B, q, feature_size] -> normalised context states [B, q, w]."""
        out: Tensor = self.context_norm(self.fuse(features))
        return out

    def context_keys_values(self, layer: int, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, q, K, d] of one layer for context states [B, q, w] at positions [B, q]."""
        attention: Attention = self.layers[layer].self_attn  # type: ignore[assignment]
        return attention.keys_values(context, *rope(positions, self.shape.head_dim, self.shape.rope_theta))

    def block_input(self, anchor: Tensor, before: Tensor, masks: int) -> Tensor:
        """Embeddings [B, n, h] of the last tokens of n blocks, context states [B, n, w] of the positions before them -> inputs [B, n, 1 + masks, w].

        Every mask starts from its own learned state, the last token and the last context state. (DFlash's masks are alike and must find all
        three by attention: with so little training they did not.)
        """
        first = self.narrow(anchor).unsqueeze(-2)
        masked = self.mask_states[:masks] + first + self.carry(before).unsqueeze(-2)
        return torch.cat((first, masked), dim=-2)

    def forward(self, x: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
        """x: [B, q, w] at positions [B, q]; context: keys and values [B, K, C, d] of each layer; mask: [B, q, C + q]. Returns [B, q, h]."""
        cos, sin = rope(positions, self.shape.head_dim, self.shape.rope_theta)
        rows = packed_mask(mask, self.shape.gqa_group_size)
        for i, layer in enumerate(self.layers):

            def attend(query: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                keys = torch.cat((context[i][0], k.transpose(1, 2)), dim=2)
                values = torch.cat((context[i][1], v.transpose(1, 2)), dim=2)
                return grouped_attention(query, keys, values, rows)

            x = layer(x, cos, sin, attend)
        out: Tensor = self.widen(self.out_norm(x))
        return out


class MarkovHead(nn.Module):
    """DSpark's two light heads over a block drafter's output: the shift by the previous token, and the confidence."""

    def __init__(self, hidden_size: int, rank: int = BlockDrafter.MARKOV_RANK) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        self.confidence = nn.Linear(2 * hidden_size, 1)

    def forward(self, final: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """final and embedding of the previous token [..., h] -> shifted final [..., h], log-odds of acceptance [...]."""
        shifted: Tensor = final + self.up(F.silu(self.down(previous)))
        return shifted, self.confidence(torch.cat((final, previous), dim=-1)).squeeze(-1)


def embed(target: Transformer, tokens: Tensor) -> Tensor:
    """The target's embedding; its heads do not train it."""
    out: Tensor = target.embed_tokens(tokens)
    return out
