"""Arms on the built-in engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from planner.verify.arms import Arm, Visit
from planner.verify.engine import Run, generate
from planner.verify.family import EXTERNAL, TARGET, Family
from planner.verify.inflate import inflate, quantise_int8
from planner.verify.lossless import Lossless, compare_greedy
from planner.verify.nets.transformer import Shape, Transformer

#: Text of the work that tells how fast the machine is at the moment.
REFERENCE_TOKENS = list(range(100, 124))


@dataclass(frozen=True)
class Size:
    """A target that costs what `shape` costs, and the external model that drafts for it.

    weights: fp32, bf16 (everything), or int8 (the layers' matrices; float32 around them). Rounded weights make nearly the same model.
    """

    shape: Shape
    weights: str = "fp32"
    external: Shape = EXTERNAL

    @property
    def reference_steps(self) -> int:
        """Plain steps that tell how fast the machine is; those of a wide target are long."""
        return 10 if self.shape == TARGET else 4

    def build(self, target: Transformer) -> Transformer:
        """The shipped target at this size, on its device."""
        net = resized(target.bfloat16() if self.weights == "bf16" else target, self.shape)
        return quantise_int8(net) if self.weights == "int8" else net

    def build_external(self, external: Transformer) -> Transformer:
        """The shipped external drafter at this size, on its device."""
        return resized(external.bfloat16() if self.weights == "bf16" else external, self.external)


def resized(net: Transformer, shape: Shape) -> Transformer:
    return net if shape == net.shape else inflate(net, shape)


WIDE = replace(TARGET, intermediate_size=12288)
#: 2.8 billion parameters and a drafter of 62 million: what a GPU of today takes seriously.
BILLIONS = replace(TARGET, hidden_size=3072, num_hidden_layers=28, num_attention_heads=96, num_key_value_heads=24, intermediate_size=8192)
MILLIONS = replace(EXTERNAL, hidden_size=1024, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=8, intermediate_size=2560)
#: The targets of a run by name.
TARGETS: Mapping[str, Size] = {
    "small": Size(TARGET), "inflated": Size(WIDE), "inflated-int8": Size(WIDE, "int8"), "3b": Size(BILLIONS, "bf16", MILLIONS),
}  # fmt: skip
#: Those that one CPU thread runs.
CPU_TARGETS = ("small", "inflated", "inflated-int8")


class Builtin:
    """The shipped family on this machine's CPU, one thread: a visit decodes one group of prompts greedily."""

    def __init__(self, family: Family, prompts: Mapping[str, Sequence[Sequence[int]]], output_len: int, targets: Sequence[str] = ("small",)) -> None:
        self.family, self.prompts, self.output_len = family, prompts, output_len
        self.targets = {name: TARGETS[name].build(family.target) for name in targets}
        self._plain: dict[tuple[str, str, int], list[int]] = {}

    def groups(self, arm: Arm) -> int:
        """Visits that use every prompt once."""
        return max(1, len(self.prompts[arm.workload]) // arm.num_seqs)

    def warm(self, arm: Arm) -> None:
        """Every shape of the arm once, untimed."""
        prompts = self.prompts[arm.workload][: arm.num_seqs]
        self._generate(arm, prompts, 3)

    def visit(self, arm: Arm, index: int) -> tuple[Visit, Lossless | None]:
        """Decode group `index` of the prompts. Greedy output of a drafting arm is compared with plain decoding by the same target."""
        first = index % self.groups(arm) * arm.num_seqs
        chosen = range(first, first + arm.num_seqs)
        prompts = [self.prompts[arm.workload][i] for i in chosen]
        before_s = self._reference_work(arm.target)
        run = self._generate(arm, prompts, self.output_len)
        visit = replace(as_visit(run, arm.draft_len), reference_s=(before_s + self._reference_work(arm.target)) / 2.0)
        if arm.drafter is None:
            self._plain |= {(arm.target, arm.workload, i): tokens for i, tokens in zip(chosen, run.tokens, strict=True)}
            return visit, None
        plain = [self._reference(arm, i) for i in chosen]
        return visit, compare_greedy(self.targets[arm.target], prompts, plain, run.tokens)

    def _reference_work(self, target: str) -> float:
        """Median seconds of a plain step of this target, the same text each time: what a neighbour does to memory slows a target whose weights
        exceed the cache, and hardly one that lives in it."""
        with single_thread():
            run = generate(self.targets[target], [REFERENCE_TOKENS], TARGETS[target].reference_steps)
        return float(np.median(run.rounds.round_s))

    def _reference(self, arm: Arm, index: int) -> list[int]:
        key = (arm.target, arm.workload, index)
        if key not in self._plain:
            self._plain[key] = generate(self.targets[arm.target], [self.prompts[arm.workload][index]], self.output_len).tokens[0]
        return self._plain[key]

    def _generate(self, arm: Arm, prompts: Sequence[Sequence[int]], output_len: int) -> Run:
        drafter = None if arm.drafter is None else self.family.drafter(arm.drafter)
        with single_thread():
            return generate(self.targets[arm.target], prompts, output_len, drafter=drafter, draft_len=arm.draft_len)


class single_thread:  # noqa: N801 - reads as a verb where it is used
    """One torch thread inside: passes this small are slower on several, and one thread's CPU time does not count what neighbours take."""

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def as_visit(run: Run, draft_len: int) -> Visit:
    """Counters and seconds of a run."""
    rounds = run.rounds
    accepted = np.array(rounds.accepted)[run.counted]
    drafted_at, accepted_at = run.survival_counts(draft_len)
    return Visit(
        len(rounds), int(run.counted.sum()), int(accepted.sum()), tuple(map(int, drafted_at)), tuple(map(int, accepted_at)),
        float(sum(rounds.draft_s)), float(sum(rounds.verify_s)), float(sum(rounds.rest_s)),
    )  # fmt: skip
