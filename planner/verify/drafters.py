"""Every drafter kind behind the engine's `Drafter` interface."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.verify.engine import Batch
from planner.verify.graphs import Graphed
from planner.verify.lookup import SuffixIndex, prompt_lookup
from planner.verify.nets.heads import BlockDrafter, FeatureHead, MarkovHead, embed
from planner.verify.nets.transformer import KVCache, Transformer
from planner.verify.sampling import Draft, Sampler


def gather_drafts(tokens: list[Tensor], probs: list[Tensor | None]) -> Draft:
    """Drafts of full width from one [B] tensor a position."""
    stacked = torch.stack(tokens, dim=1)
    lengths = torch.full((stacked.shape[0],), stacked.shape[1], device=stacked.device)
    drawn = [p for p in probs if p is not None]
    return Draft(stacked, lengths, torch.stack(drawn, dim=1) if drawn else None)


class ExternalDrafter:
    """A small model of the same vocabulary: D sequential passes; the first one also reads what it has not read yet."""

    kind = "external"
    max_draft_len = None

    def __init__(self, net: Transformer | Graphed) -> None:
        self.net = net

    def begin(self, batch: Batch, slots: int) -> None:
        self.cache = KVCache(self.net.shape, len(batch.lengths), slots, self.net.embed_tokens.weight)
        prompts, positions = batch.span(batch.start, batch.hidden.final.shape[1])
        self.net(prompts, positions, self.cache, whole=True)

    def propose(self, batch: Batch, draft_len: int, sampler: Sampler) -> Draft:
        # Of the last round it has read all but the last draft and the bonus token: two tokens bring it up to date (one of them perhaps again).
        read, positions = batch.span((batch.lengths - 2).clamp(min=0), 2)
        at = positions[:, -1:]
        final = self.net(read, positions, self.cache).final[:, -1]
        tokens: list[Tensor] = []
        probs: list[Tensor | None] = []
        while True:
            token, q = sampler.choose(self.net.logits(final))
            tokens.append(token)
            probs.append(q)
            if len(tokens) == draft_len:
                return gather_drafts(tokens, probs)
            at = at + 1
            final = self.net(token[:, None], at, self.cache).final[:, -1]


class HeadDrafter:
    """EAGLE-3 or MTP: first a pass over what the target has just confirmed (draft-extend), then D - 1 passes over the head's own drafts."""

    max_draft_len = None

    def __init__(self, kind: str, head: FeatureHead, target: Transformer) -> None:
        self.kind, self.head, self.target = kind, head, target

    def begin(self, batch: Batch, slots: int) -> None:
        self.cache = KVCache(self.head.shape, len(batch.lengths), slots, self.head.fuse.weight)

    def propose(self, batch: Batch, draft_len: int, sampler: Sampler) -> Draft:
        features = batch.hidden.taps if self.kind == "eagle3" else batch.hidden.final[..., : self.target.shape.hidden_size]
        read, positions = batch.span(batch.start + 1, features.shape[1])
        out = self.head(embed(self.target, read), self.head.first_state(features), positions, self.cache)
        newest = batch.lengths - 2 - batch.start  # the row that read the newest token
        out = out[torch.arange(len(newest), device=newest.device), newest][:, None]  # [B, 1, w]
        at = (batch.lengths - 1)[:, None]
        tokens: list[Tensor] = []
        probs: list[Tensor | None] = []
        while True:
            token, q = sampler.choose(self.target.logits(self.head.final(out))[:, 0])
            tokens.append(token)
            probs.append(q)
            if len(tokens) == draft_len:
                return gather_drafts(tokens, probs)
            at = at + 1
            out = self.head(embed(self.target, token[:, None]), self.head.next_state(out), at, self.cache)


class ParallelDrafter:
    """DFlash: one pass drafts the block. With a Markov head (DSpark) each draft also hears the one before it, and a row stops drafting where
    its expected survival falls below `min_survival`."""

    def __init__(self, net: BlockDrafter, target: Transformer, markov: MarkovHead | None = None, min_survival: float = 0.0) -> None:
        self.kind = "dflash" if markov is None else "dspark"
        self.net, self.target, self.markov, self.min_survival = net, target, markov, min_survival

    @property
    def max_draft_len(self) -> int:
        return self.net.max_draft_len

    def begin(self, batch: Batch, slots: int) -> None:
        self.cache = KVCache(self.net.shape, len(batch.lengths), slots, self.net.fuse.weight)

    def propose(self, batch: Batch, draft_len: int, sampler: Sampler) -> Draft:
        final = self._block(batch, draft_len)  # [B, D, h]
        if self.markov is None:
            tokens, probs = sampler.choose(self.target.logits(final))
            return Draft(tokens, torch.full_like(batch.lengths, draft_len), probs)
        previous, _ = batch.span(batch.lengths - 1, 1)
        survival = torch.ones_like(batch.lengths, dtype=final.dtype)
        lengths = torch.zeros_like(batch.lengths)
        chosen: list[Tensor] = []
        drawn: list[Tensor | None] = []
        for i in range(draft_len):
            shifted, odds = self.markov(final[:, i], embed(self.target, previous[:, 0]))
            survival = survival * torch.sigmoid(odds)
            lengths = lengths + (survival >= self.min_survival)  # survival only falls: once below, always below
            token, q = sampler.choose(self.target.logits(shifted))
            chosen.append(token)
            drawn.append(q)
            previous = token[:, None]
        full = gather_drafts(chosen, drawn)
        width = int(lengths.max())
        return Draft(full.tokens[:, :width], lengths, None if full.probs is None else full.probs[:, :width])

    def _block(self, batch: Batch, draft_len: int) -> Tensor:
        """States [B, D, h] of the masked positions; the features of the last pass join the context first."""
        features = self.net.context(batch.hidden.taps)
        positions = batch.start[:, None] + torch.arange(features.shape[1], device=features.device)
        anchor, _ = batch.span(batch.lengths - 1, 1)
        block_positions = (batch.lengths - 1)[:, None] + torch.arange(1 + draft_len, device=features.device)
        length = int(batch.lengths.max()) - 1
        context = []
        for i in range(self.net.shape.num_hidden_layers):
            self.cache.write(i, positions, *self.net.context_keys_values(i, features, positions))
            context.append(self.cache.seen(i, length))
        known = torch.arange(length, device=features.device) < (batch.lengths - 1)[:, None]  # [B, C]
        mask = torch.cat((known, known.new_ones(known.shape[0], 1 + draft_len)), dim=1)[:, None].expand(-1, 1 + draft_len, -1)
        newest = (batch.lengths - 2 - batch.start)[:, None, None].expand(-1, 1, features.shape[-1])
        x = self.net.block_input(embed(self.target, anchor), features.gather(1, newest), draft_len)[:, 0]
        out: Tensor = self.net(x, block_positions, context, mask)
        return out[:, 1:]


def pad_drafts(rows: list[list[int]], like: Tensor) -> Draft:
    """Drafts of different lengths as one padded tensor, as wide as the longest."""
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows], dtype=torch.long, device=like.device).view(len(rows), width)
    return Draft(tokens, torch.tensor([len(r) for r in rows], device=like.device))


class NgramDrafter:
    """Prompt lookup."""

    kind = "ngram"
    max_draft_len = None

    def begin(self, batch: Batch, slots: int) -> None: ...

    def propose(self, batch: Batch, draft_len: int, sampler: Sampler) -> Draft:
        said = [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]
        return pad_drafts([prompt_lookup(tokens, draft_len) for tokens in said], batch.lengths)


@dataclass
class SuffixDrafter:
    """Suffix decoding, an index for each sequence."""

    kind: str = "suffix"
    max_draft_len: int | None = None
    indexes: list[SuffixIndex] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def begin(self, batch: Batch, slots: int) -> None:
        self.indexes = [SuffixIndex() for _ in batch.lengths]
        self.taken = [0] * len(self.indexes)

    def propose(self, batch: Batch, draft_len: int, sampler: Sampler) -> Draft:
        drafts = []
        for row, (tokens, n) in enumerate(zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)):
            said = tokens[:n]
            self.indexes[row].extend(said, self.taken[row])
            self.taken[row] = n
            drafts.append(self.indexes[row].draft(said, draft_len))
        return pad_drafts(drafts, batch.lengths)
