"""What each drafter learns. Teacher: the target's own next-token distribution on the same tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.verify.nets.heads import BlockDrafter, FeatureHead, MarkovHead, embed
from planner.verify.nets.transformer import Hidden, Transformer, rope

#: Later drafts count only if the earlier ones stood: the weight of draft i falls as exp(-(i - 1)/2.5); DFlash's recipe decays too.
POSITION_DECAY = 2.5


def positions_of(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)


def next_token_loss(net: Transformer, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of tokens [B, T] in nats."""
    logits = net.logits(net(tokens[:, :-1], positions_of(tokens[:, :-1])).final)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def teach(target: Transformer, tokens: Tensor) -> tuple[Hidden, Tensor]:
    """The target's hidden states on tokens [B, T] and its distribution [B, T, V] of what follows each."""
    with torch.no_grad():
        hidden = target(tokens, positions_of(tokens))
        return hidden, torch.softmax(target.logits(hidden.final), dim=-1)


def soft_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy [...] of logits [..., V] against distributions."""
    return F.cross_entropy(logits.flatten(0, -2), teacher.flatten(0, -2), reduction="none").view(logits.shape[:-1])


def distillation_loss(net: Transformer, target: Transformer, tokens: Tensor) -> Tensor:
    """An external model learns the target's distribution, not the text."""
    _, teacher = teach(target, tokens)
    return soft_loss(net.logits(net(tokens, positions_of(tokens)).final), teacher).mean()


def head_loss(head: FeatureHead, target: Transformer, tokens: Tensor, unroll: int) -> Tensor:
    """EAGLE-3's training-time test (arXiv:2503.01840, section 3.2): `unroll` drafts from every position at once, each on the head's own state.

    Base position t holds the features of token t. Step j feeds token t + 1 + j (the text's) and the state of step j - 1, sees the first
    step's keys up to t and the later steps' keys of its own base only, and learns the target's distribution after token t + 1 + j.
    """
    hidden, teacher = teach(target, tokens)
    bases = tokens.shape[1] - unroll - 1
    state = head.first_state((hidden.taps if head.recursive_state else hidden.final)[:, :bases])
    causal = torch.ones(bases, bases, dtype=torch.bool, device=tokens.device).tril()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = torch.zeros((), device=tokens.device)
    for j in range(unroll):
        fed = tokens[:, 1 + j : 1 + j + bases]
        cos, sin = rope(positions_of(fed) + 1 + j, head.shape.head_dim, head.shape.rope_theta)

        def attend(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return unrolled_attention(query, keys, values, causal)

        out = head.layer(head.inputs(embed(target, fed), state), cos, sin, attend)
        wanted = teacher[:, 1 + j : 1 + j + bases]
        total = total + soft_loss(target.logits(head.final(out)), wanted).mean() * 0.8**j
        state = head.next_state(out)
    return total / sum(0.8**j for j in range(unroll))


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], causal: Tensor) -> Tensor:
    """query [B, T, H, d]; keys and values of every step [B, T, 1, d]: the first causally, the later ones only at the same base -> [B, T, H d]."""
    scale = query.shape[-1] ** -0.5
    scores = torch.einsum("bthd,bsd->bhts", query, keys[0][:, :, 0]).masked_fill(~causal, float("-inf"))
    own = [torch.einsum("bthd,btd->bht", query, k[:, :, 0])[..., None] for k in keys[1:]]
    weights = torch.softmax(torch.cat((scores, *own), dim=-1) * scale, dim=-1)
    length = query.shape[1]
    out = torch.einsum("bhts,bsd->bthd", weights[..., :length], values[0][:, :, 0])
    for j, v in enumerate(values[1:]):
        out = out + weights[..., length + j].transpose(1, 2)[..., None] * v
    return out.flatten(2)


def block_states(net: BlockDrafter, target: Transformer, tokens: Tensor, anchors: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over n random blocks a sequence, anchors [B, n], each of its own length [B, n] (drafts).

    Returns the states of the drafts [B, n, D, h], the target's distributions for them [B, n, D, V] and their weights [B, n, D].
    """
    hidden, teacher = teach(target, tokens)
    batch, count, block = *anchors.shape, net.block
    offsets = torch.arange(block, device=tokens.device)
    positions = (anchors[..., None] + offsets).flatten(1)  # [B, n block]
    features = net.context(hidden.taps)
    context = [
        tuple(t.transpose(1, 2) for t in net.context_keys_values(i, features, positions_of(tokens))) for i in range(net.shape.num_hidden_layers)
    ]
    before_anchor = features.gather(1, (anchors - 1)[..., None].expand(-1, -1, features.shape[-1]))
    x = net.block_input(embed(target, tokens.gather(1, anchors)), before_anchor, block - 1).flatten(1, 2)
    owner = torch.arange(count, device=tokens.device).repeat_interleave(block)
    before = positions_of(tokens)[:, None] < anchors.repeat_interleave(block, dim=1)[..., None]  # [B, n block, T]
    present = (offsets <= lengths[..., None]).flatten(1)  # [B, n block]: queries and keys of masks that this block has
    within = (owner[:, None] == owner) & present[:, None]
    # An absent query sees itself, or its softmax would be empty.
    mask = torch.cat((before, within | torch.eye(count * block, dtype=torch.bool, device=tokens.device)), dim=-1)
    out = net(x, positions, context, mask).view(batch, count, block, -1)[:, :, 1:]
    wanted = teacher.gather(1, (positions.view(batch, count, block)[..., :-1]).flatten(1)[..., None].expand(-1, -1, teacher.shape[-1]))
    weights = torch.exp(-(offsets[1:] - 1) / POSITION_DECAY) * (offsets[1:] <= lengths[..., None])
    return out, wanted.view(batch, count, block - 1, -1), weights


def random_blocks(tokens: Tensor, block: int, count: int = 16) -> tuple[Tensor, Tensor]:
    """Anchors [B, n] that leave room for a block, and draft lengths [B, n]: half of them full."""
    size = (tokens.shape[0], count)
    anchors = torch.randint(8, tokens.shape[1] - block, size, device=tokens.device)
    lengths = torch.randint(1, block, size, device=tokens.device)
    return anchors, torch.where(torch.rand(size, device=tokens.device) < 0.5, block - 1, lengths)


def block_loss(net: BlockDrafter, target: Transformer, tokens: Tensor) -> Tensor:
    out, wanted, weights = block_states(net, target, tokens, *random_blocks(tokens, net.block))
    return (soft_loss(target.logits(out), wanted) * weights).sum() / weights.sum()


def markov_loss(markov: MarkovHead, net: BlockDrafter, target: Transformer, tokens: Tensor) -> Tensor:
    """DSpark's heads over a finished backbone: the shifted distribution, and whether a sampled draft would be accepted, 1 - TV(p, q)."""
    anchors, lengths = random_blocks(tokens, net.block)
    with torch.no_grad():
        out, wanted, weights = block_states(net, target, tokens, anchors, lengths)
    before = (anchors[..., None] + torch.arange(net.block - 1, device=tokens.device)).flatten(1)
    shifted, odds = markov(out, embed(target, tokens.gather(1, before)).view(*out.shape[:3], -1))
    logits = target.logits(shifted)
    with torch.no_grad():
        agreement = torch.minimum(torch.softmax(logits, dim=-1), wanted).sum(dim=-1)
    losses = soft_loss(logits, wanted) + F.binary_cross_entropy_with_logits(odds, agreement, reduction="none")
    return (losses * weights).sum() / weights.sum()
