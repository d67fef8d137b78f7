"""What a reader found (`Reading`) and what the rest of Draftline takes (`Imported`).

One convention after import: AL counts the bonus token (1..1+D), per-position values are s_i = P(first i drafts all accepted), and
AL(D) = 1 + s_1 + ... + s_D. `weighting` says what an AL is the mean over:
  rounds    accepted / rounds over everything pooled. A request counts by its rounds; equal to the harmonic mean of the requests' AL weighted
            by their tokens, which is what a deployment's throughput follows.
  requests  plain mean of the requests' own AL: too high for throughput wherever requests differ.
  interval  the engine's last logging interval only.
  unknown   the source does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Weighting = Literal["rounds", "requests", "interval", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The figures of one source as counted there. Counts are over the whole window; `None` = not in the source."""

    format: str
    engine: str
    definition: str
    where: str
    weighting: Weighting = "rounds"
    kind: str | None = None
    draft_len: int | None = None
    """D as the source states it."""
    num_drafts: float | None = None
    """Rounds that drafted (or all rounds, see `skips_empty`)."""
    drafted: float | None = None
    accepted: float | None = None
    survival: tuple[float, ...] | None = None
    """Per position, as shares of `num_drafts`."""
    acceptance_len: float | None = None
    """AL as the source states it."""
    rate: float | None = None
    """accepted / drafted as the source states it, as a share."""
    points: tuple[tuple[int, float], ...] = ()
    generated: float | None = None
    """Tokens from decode rounds (first tokens, which prefill yields, left out where requests are known)."""
    skips_empty: bool = False
    """Rounds without a draft are not in `num_drafts`."""
    match_prob: float | None = None
    request_acceptance_len: float | None = None
    """Plain mean over requests, where the source lists them."""
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Further curves in the same source (categories, models, modes)."""
    separated: bool = False
    """Rounds of different drafted length were told apart: `survival` is no mixture."""
    step_ratio: tuple[float, ...] = ()
    """t(n)/t(1) by batch n, for a source that holds cost instead of acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Acceptance as imported. `acceptance` is the contract's object (None: something is still missing, see `warnings`)."""

    format: str
    engine: str
    definition: str
    weighting: Weighting
    kind: str | None = None
    draft_len: int | None = None
    num_drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    acceptance_len: float | None = None
    survival_prob: tuple[float, ...] | None = None
    one_length: bool = False
    """`survival_prob` was counted in rounds of one drafted length, its own: rounds of another length follow by the law of lists."""
    points: tuple[tuple[int, float], ...] = ()
    match_prob: float | None = None
    """Share of rounds in which a look-up drafter found something (drafter key `match_prob`)."""
    request_acceptance_len: float | None = None
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    step_ratio: tuple[float, ...] = ()

    @property
    def acceptance(self) -> dict[str, Any] | None:
        """The `acceptance` object of DESIGN section 5 that predict and plan take."""
        if self.survival_prob:
            return {"survival_prob": list(self.survival_prob)} | ({"at_draft_len": len(self.survival_prob)} if self.one_length else {})
        if self.points:
            return {"points": [{"draft_len": d, "acceptance_len": al} for d, al in self.points]}
        if self.acceptance_len is not None and self.draft_len is not None:
            return {"acceptance_len": self.acceptance_len, "at_draft_len": self.draft_len}
        return None

    def for_plan(self, kind: str | None = None) -> dict[str, Any] | None:
        """The file `draftline plan --acceptance` reads: for one kind of drafter, or (None) for whatever is planned."""
        return self.acceptance if kind is None or self.acceptance is None else {kind: self.acceptance}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; counts and probabilities as numbers, lengths in tokens."""
        return {
            "format": self.format,
            "engine": self.engine,
            "kind": self.kind,
            "definition": self.definition,
            "weighting": self.weighting,
            "draft_len": self.draft_len,
            "num_drafts": self.num_drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_len": self.acceptance_len,
            "survival_prob": None if self.survival_prob is None else list(self.survival_prob),
            "points": [{"draft_len": d, "acceptance_len": al} for d, al in self.points],
            "match_prob": self.match_prob,
            "request_acceptance_len": self.request_acceptance_len,
            "step_ratio": list(self.step_ratio),
            "flags": list(self.flags),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "parts": dict(self.parts),
            "acceptance": self.acceptance,
        }
