"""Is speculative output what plain decoding says? Greedy: token by token. Ties in float arithmetic are named as such, not as equal or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from planner.verify.inflate import Int8Linear
from planner.verify.nets.transformer import Transformer

#: Two logits this close are a tie: a pass over 1 + D rows and one over a single row sum in different orders. In float32 1e-6 of logits up to
#: 30 was seen; where activations are rounded to bf16 (8 bits: 0.4 % of such logits, at every layer) it is hundreds of times more.
TIE_LOGIT_GAP = 1e-3
TIE_LOGIT_GAP_BF16 = 0.5


def tie_logit_gap(target: Transformer) -> float:
    """What counts as a tie for this network's arithmetic."""
    exact = target.embed_tokens.weight.dtype == torch.float32 and not any(isinstance(m, Int8Linear) for m in target.modules())
    return TIE_LOGIT_GAP if exact else TIE_LOGIT_GAP_BF16


@dataclass(frozen=True)
class Lossless:
    """identical: sequences equal to plain decoding; ties: those that part at two logits within `tie_logit_gap`; wrong: (sequence, position, gap)."""

    identical: int
    ties: int
    wrong: tuple[tuple[int, int, float], ...]

    @property
    def holds(self) -> bool:
        return not self.wrong


@torch.inference_mode()
def compare_greedy(
    target: Transformer, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], speculative: Sequence[Sequence[int]]
) -> Lossless:
    """Compare outputs of the same prompts; where two part, the target's own logits after the common prefix decide whether it was a tie."""
    identical, ties, wrong = 0, 0, []
    tie = tie_logit_gap(target)
    for row, (prompt, expected, got) in enumerate(zip(prompts, plain, speculative, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
        if at is None:
            identical += 1
            continue
        prefix = torch.tensor([[*prompt, *expected[:at]]], device=target.embed_tokens.weight.device)
        final = target(prefix, torch.arange(prefix.shape[1], device=prefix.device)[None]).final[0, -1]
        logits = target.logits(final)
        gap = abs(float(logits[expected[at]] - logits[got[at]]))
        if gap <= tie:
            ties += 1
        else:
            wrong.append((row, at, gap))
    return Lossless(identical, ties, tuple(wrong))


@torch.inference_mode()
def greedy_gap(target: Transformer, prompt: Sequence[int], said: Sequence[int]) -> float:
    """How far what was said lies from greedy decoding: the largest logit difference between the best token and the one said, from one pass of the
    bare network over prompt and output. Up to `tie_logit_gap` it is greedy."""
    device = target.embed_tokens.weight.device
    whole = torch.tensor([[*prompt, *said[:-1]]], device=device)
    final = target(whole, torch.arange(whole.shape[1], device=device)[None]).final[0, len(prompt) - 1 :]
    logits = target.logits(final).float()
    chosen = logits.gather(1, torch.tensor(said, device=device)[:, None])[:, 0]
    return float((logits.amax(dim=-1) - chosen).max())
