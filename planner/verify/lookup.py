"""Drafting without a model: the last tokens are looked up in what was said before. Pure Python on lists of token ids."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


def prompt_lookup(tokens: Sequence[int], draft_len: int, *, longest: int = 4, shortest: int = 2) -> list[int]:
    """What followed the earliest occurrence of the last n tokens, for the largest n between `shortest` and `longest` that occurred before.

    The rule of vLLM's `ngram` method (its ngram_proposer, 0.32), so that acceptance compares.
    """
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        pattern = list(tokens[-n:])
        for start in range(len(tokens) - n):
            if tokens[start] == pattern[0] and list(tokens[start : start + n]) == pattern:
                return list(tokens[start + n : start + n + draft_len])
    return []


@dataclass
class SuffixIndex:
    """Suffix decoding (arXiv:2411.04975): counts of what followed every context up to `depth` tokens, in this request and in those before it.

    A draft goes on along the most frequent continuation of the longest known suffix, while the product of the frequencies stays above
    `min_prob`; so drafts are long where text repeats and absent where it does not.
    """

    depth: int = 8
    shortest: int = 1
    min_prob: float = 0.1
    followers: dict[tuple[int, ...], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Take in tokens[start:], each with the contexts before it."""
        for at in range(max(1, start), len(tokens)):
            for n in range(self.shortest, min(self.depth, at) + 1):
                self.followers[tuple(tokens[at - n : at])][tokens[at]] += 1

    def draft(self, tokens: Sequence[int], draft_len: int) -> list[int]:
        context, prob = list(tokens[-self.depth :]), 1.0
        out: list[int] = []
        while len(out) < draft_len:
            found = self._longest(context)
            if found is None:
                break
            token, count = found.most_common(1)[0]
            prob *= count / found.total()
            if prob < self.min_prob:
                break
            out.append(token)
            context = [*context, token][-self.depth :]
        return out

    def _longest(self, context: list[int]) -> Counter[int] | None:
        for n in range(len(context), self.shortest - 1, -1):
            found = self.followers.get(tuple(context[-n:]))
            if found:
                return found
        return None
