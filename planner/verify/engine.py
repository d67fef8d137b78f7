"""Plain and speculative decoding of a batch, over one static KV cache, with rounds of fixed width and ragged advance.

A round: the drafter proposes, the target reads the last token and all drafts in one pass, `accept` decides, every sequence moves on by its own
number of tokens. What a rejected draft left in a cache lies beyond the sequence's end and is overwritten before it can be seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planner.verify.nets.transformer import Hidden, KVCache, Transformer
from planner.verify.sampling import Draft, Sampler, accept


@dataclass
class Batch:
    """B sequences in flight.

    tokens [B, S] and lengths [B]: what is known of each, the newest token included, which the target has not read yet. hidden: what the
    last pass left, for the positions start[b] + 0, 1, ...; only those up to lengths[b] - 2 count, later ones belong to rejected drafts.
    """

    tokens: Tensor
    lengths: Tensor
    hidden: Hidden
    start: Tensor

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.lengths), device=self.lengths.device)[:, None]

    def span(self, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Tokens and positions [B, width] from positions `first` [B] on."""
        positions = first[:, None] + torch.arange(width, device=first.device)
        return self.tokens.gather(1, positions), positions

    def append(self, emitted: Tensor, counts: Tensor) -> None:
        """Write emitted [B, w] behind each sequence; the first counts[b] of a row are real, the rest will be overwritten."""
        positions = self.lengths[:, None] + torch.arange(emitted.shape[1], device=emitted.device)
        self.tokens[self.rows, positions] = emitted
        self.lengths = self.lengths + counts


class Target(Protocol):
    """What a round asks of a target: a `Transformer`, or one whose passes are captured."""

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Hidden: ...

    def logits(self, final: Tensor) -> Tensor: ...


class Drafter(Protocol):
    """One way to draft. `max_draft_len` is the trained block less the anchor, None where there is none."""

    @property
    def kind(self) -> str: ...

    @property
    def max_draft_len(self) -> int | None: ...

    def begin(self, batch: Batch, slots: int) -> None:
        """Called after the target has read the prompts; `slots` positions will be enough."""

    def propose(self, batch: Batch, draft_len: int, sampler: Sampler) -> Draft:
        """Up to `draft_len` tokens a sequence; called once a round, after the hidden states of the last pass are in `batch`."""
        ...


@dataclass
class Rounds:
    """Counters of a run: drafted and accepted [R, B], seconds [R] of each part."""

    drafted: list[np.ndarray] = field(default_factory=list)
    accepted: list[np.ndarray] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.verify_s)

    @property
    def round_s(self) -> np.ndarray:
        """Seconds of each round [R]."""
        return np.asarray(np.array(self.draft_s) + np.array(self.verify_s) + np.array(self.rest_s), dtype=np.float64)


@dataclass(frozen=True)
class Run:
    """A finished run. tokens: new tokens of each sequence, at least output_len of them; counted [R, B]: rounds in which a sequence still had
    something to say; steady_rounds: how many rounds all sequences were in flight."""

    tokens: list[list[int]]
    rounds: Rounds
    counted: np.ndarray
    steady_rounds: int
    prefill_s: float

    @property
    def acceptance_len(self) -> float:
        """Tokens emitted a round and sequence, bonus included, over the rounds that count."""
        return 1.0 + float(np.array(self.rounds.accepted)[self.counted].mean()) if len(self.rounds) else float("nan")

    def survival_counts(self, draft_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Rounds that drafted at least i tokens and rounds that had them accepted, for i = 1..draft_len."""
        drafted, accepted = np.array(self.rounds.drafted)[self.counted], np.array(self.rounds.accepted)[self.counted]
        each = np.arange(1, draft_len + 1)[:, None]
        return (drafted >= each).sum(axis=1), (accepted >= each).sum(axis=1)


class Clock:
    """Seconds between laps. On a CPU with one torch thread: CPU time of this thread, so that what neighbours take does not count; with more
    threads wall time; on a GPU wall time once the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.read = time.thread_time if not self.cuda and torch.get_num_threads() == 1 else time.perf_counter
        self.last = self._now()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return self.read()

    def lap(self) -> float:
        now = self._now()
        spent, self.last = now - self.last, now
        return spent


@torch.inference_mode()
def prefill(target: Transformer, prompts: Sequence[Sequence[int]], slots: int, sampler: Sampler) -> tuple[Batch, KVCache]:
    """Read the prompts (right-padded to the longest) in one pass and choose the first new token of each."""
    device = target.embed_tokens.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    if int(lengths.min()) < 1:
        raise ValueError("every prompt needs at least one token")
    longest = int(lengths.max())
    tokens = torch.zeros(len(prompts), slots, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    cache = KVCache(target.shape, len(prompts), slots, target.embed_tokens.weight)
    batch = Batch(tokens, lengths, Hidden(tokens, tokens), torch.zeros_like(lengths))
    prompt_tokens, positions = batch.span(batch.start, longest)
    batch.hidden = target(prompt_tokens, positions, cache, whole=True)
    last = batch.hidden.final[torch.arange(len(prompts), device=device), lengths - 1]
    first, _ = sampler.choose(target.logits(last))
    batch.append(first[:, None], torch.ones_like(lengths))
    return batch, cache


@torch.inference_mode()
def decode_round(  # noqa: PLR0913
    target: Target, cache: KVCache, batch: Batch, drafter: Drafter | None, draft_len: int, sampler: Sampler, rounds: Rounds
) -> None:
    """One round: draft, verify, accept; `batch` and `rounds` move on. Without a drafter it is one plain step."""
    clock = Clock(batch.tokens.device)
    if drafter is None or draft_len == 0:
        draft = Draft(batch.tokens[:, :0], torch.zeros_like(batch.lengths))
    else:
        draft = drafter.propose(batch, draft_len, sampler)
    rounds.draft_s.append(clock.lap())
    last, _ = batch.span(batch.lengths - 1, 1)
    read = torch.cat((last, draft.tokens), dim=1)  # [B, 1 + W]
    positions = (batch.lengths - 1)[:, None] + torch.arange(read.shape[1], device=read.device)
    hidden = target(read, positions, cache)
    logits = target.logits(hidden.final)
    rounds.verify_s.append(clock.lap())
    accepted, follow = accept(logits, draft, sampler)
    emitted = torch.cat((draft.tokens, follow[:, None]), dim=1).scatter(1, accepted[:, None], follow[:, None])
    batch.hidden, batch.start = hidden, batch.lengths - 1
    batch.append(emitted, accepted + 1)
    rounds.drafted.append(draft.lengths.cpu().numpy())
    rounds.accepted.append(accepted.cpu().numpy())
    rounds.rest_s.append(clock.lap())


def generate(  # noqa: PLR0913
    target: Transformer, prompts: Sequence[Sequence[int]], output_len: int, *, drafter: Drafter | None = None, draft_len: int = 0,
    sampler: Sampler | None = None, until: str = "all",
) -> Run:  # fmt: skip
    """Decode `output_len` tokens a prompt (end-of-text is a token like any other). Until "all" have them, or only as long as none has ("first":
    every round has the full batch, for timing)."""
    if output_len < 1 or draft_len < 0:
        raise ValueError(f"output_len {output_len} must be at least 1 and draft_len {draft_len} at least 0")
    if drafter is not None and drafter.max_draft_len is not None and draft_len > drafter.max_draft_len:
        raise ValueError(f"{drafter.kind} was trained for blocks of {drafter.max_draft_len} drafts, not {draft_len}")
    sampler = sampler or Sampler()
    rounds = Rounds()
    # A sequence that is done goes on until the slowest is: at worst 1 + D tokens a round against one.
    room = output_len * (1 + draft_len) if until == "all" else output_len
    slots = max(len(p) for p in prompts) + room + 2 * (draft_len + 2)
    clock = Clock(target.embed_tokens.weight.device)
    batch, cache = prefill(target, prompts, slots, sampler)
    if drafter is not None and draft_len:
        with torch.inference_mode():
            drafter.begin(batch, slots)
    prefill_s = clock.lap()
    starts = np.array([len(p) for p in prompts])
    counted: list[np.ndarray] = []
    while True:
        said = batch.lengths.cpu().numpy() - starts
        busy = said < output_len
        if not busy.any() or (until == "first" and not busy.all()):
            break
        counted.append(busy)
        decode_round(target, cache, batch, drafter, draft_len, sampler, rounds)
    ends = batch.lengths.tolist()
    tokens = [row[start:end] for row, start, end in zip(batch.tokens.tolist(), starts, ends, strict=True)]
    mask = np.array(counted, dtype=bool).reshape(len(rounds), len(prompts))
    return Run([t[:output_len] for t in tokens], rounds, mask, int(mask.all(axis=1).sum()), prefill_s)
