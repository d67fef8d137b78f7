"""Which drafts stand, and which token follows them: greedy or by rejection sampling.

Leviathan, Kalman, Matias, arXiv:2211.17192, algorithm 1 (there: p target, q draft, as here).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Temperature 0 is greedy."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def probs(self, logits: Tensor) -> Tensor:
        """[..., V] -> probabilities at this temperature."""
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [...] from logits [..., V], and the distribution that they were drawn from (None where greedy)."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1), None
        probs = self.probs(logits)
        return self.draw(probs), probs

    def draw(self, probs: Tensor) -> Tensor:
        """One sample [...] from each distribution [..., V]."""
        flat = probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(flat, 1, generator=self.generator).view(probs.shape[:-1])


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for B sequences: tokens [B, W]; how many of each row count, lengths [B]; the distributions that tokens were
    drawn from, probs [B, W, V], or None for a drafter that does not sample."""

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None


def accept(logits: Tensor, draft: Draft, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """Verify: target logits [B, 1 + W, V] at the last token and after each draft -> accepted drafts [B], the token that follows them [B]."""
    batch, width = draft.tokens.shape
    counts = torch.arange(width, device=logits.device) < draft.lengths[:, None]  # [B, W]
    if sampler.temperature == 0.0:
        best = logits.argmax(dim=-1)  # [B, 1 + W]
        accepted = ((best[:, :width] == draft.tokens) & counts).long().cumprod(dim=1).sum(dim=1)
        return accepted, best.gather(1, accepted[:, None]).squeeze(1)
    p = sampler.probs(logits)
    p_drafted = p[:, :width].gather(2, draft.tokens[..., None]).squeeze(2)
    q_drafted = torch.ones_like(p_drafted) if draft.probs is None else draft.probs.gather(2, draft.tokens[..., None]).squeeze(2)
    uniform = torch.rand(p_drafted.shape, generator=sampler.generator, device=logits.device)
    stands = (uniform * q_drafted < p_drafted) & counts
    accepted = stands.long().cumprod(dim=1).sum(dim=1)
    follow = p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1])).squeeze(1)  # [B, V]
    return accepted, sampler.draw(residual(follow, draft, accepted) if width else follow)


def residual(follow: Tensor, draft: Draft, accepted: Tensor) -> Tensor:
    """The distribution [B, V] of the token after the accepted drafts: max(0, p - q) where a draft was rejected, p where none was left."""
    width = draft.tokens.shape[1]
    rejected = accepted < draft.lengths  # [B]
    at = accepted.clamp(max=width - 1)[:, None]
    if draft.probs is None:
        q = torch.zeros_like(follow).scatter_(1, draft.tokens.gather(1, at), 1.0)
    else:
        q = draft.probs.gather(1, at[..., None].expand(-1, 1, follow.shape[-1])).squeeze(1)
    left = (follow - q).clamp(min=0)
    total = left.sum(dim=-1, keepdim=True)
    # p == q to rounding leaves nothing to draw from; then a rejection had probability zero and p itself is right.
    return torch.where(rejected[:, None] & (total > 0), left / total.clamp(min=1e-30), follow)
