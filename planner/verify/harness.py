"""The verification run on the built-in engine: measure kernels, visit every arm interleaved, calibrate on some of them, predict the rest, compare.

Each visit is on disk before the next.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.draft import LOOKUP
from planner.prediction import predict
from planner.verify import costs
from planner.verify.arms import Arm, Measured, any_match_prob, match_prob, measure, survival_prob
from planner.verify.builtin import TARGETS, Builtin
from planner.verify.compare import Predicted, Report, choices
from planner.verify.family import KINDS, Family, load_family
from planner.verify.journal import VisitJournal
from planner.verify.prompts import PromptSet

#: Stages of a run; calibration decodes text of its own, under its own name.
CALIBRATION, ACCEPTANCE, ARMS = "calibration", "acceptance", "arms"
#: Visits of an arm, so that a disturbed one is outvoted; of one that calibrates.
FEWEST_VISITS, CALIBRATION_VISITS = 6, 8
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Spec:
    """What a run covers. A block is (target, workloads, batches, kinds); every block has its off arms, one of them twice."""

    blocks: tuple[tuple[str, tuple[str, ...], tuple[int, ...], tuple[str, ...]], ...]
    draft_lens: tuple[int, ...] = (1, 2, 4, 8)
    output_len: int = 32
    prompts: int = 8
    passes: int = 1
    """Every group of prompts is visited that often, and no arm less than `FEWEST_VISITS` times."""
    kernel_budget_s: float = 50.0
    limit_s: float = 480.0
    """Once every arm was seen, no visit begins later after the start: a slow machine sees every arm less often."""

    def arms(self) -> list[Arm]:
        out = []
        for target, workloads, batches, kinds in self.blocks:
            for workload in workloads:
                for n in batches:
                    out += [Arm(target, workload, n), Arm(target, workload, n, copy=1)]
                    out += [Arm(target, workload, n, kind, d) for kind in kinds for d in self.draft_lens]
        return out

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b[0] for b in self.blocks))

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(k for b in self.blocks for k in b[3]))

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({n for b in self.blocks for n in b[2]}))


#: `draftline verify --engine builtin`, under ten minutes on two cores.
DEFAULT = Spec((("small", ("code", "structured"), (1, 8), KINDS), ("inflated", ("code",), (1,), ("external", "eagle3", "dflash"))))
#: `--full`, under an hour.
FULL = Spec(
    (
        ("small", ("code", "prose", "structured"), (1, 2, 8), KINDS),
        ("inflated", ("code", "structured"), (1,), ("external", "eagle3", "dflash", "ngram")),
        ("inflated-int8", ("code",), (1,), ("external", "eagle3", "ngram")),
    ),
    draft_lens=(1, 2, 3, 4, 6, 8), kernel_budget_s=120.0, limit_s=3300.0,
)  # fmt: skip


def priced(profile: Path, arm: Arm, context_len: float, survival_prob: Sequence[float], match_prob: float | None = None) -> Predicted:
    """The planner's answer for an arm on a profile file, acceptance given as survival in rounds of as many drafts as it is long."""
    case = costs.case_of(profile, arm.target, arm.drafter, match_prob)
    case |= {"concurrency": arm.num_seqs, "context_len": round(context_len), "draft_len": arm.draft_len}
    if arm.drafter is not None:
        case["acceptance"] = {"survival_prob": list(survival_prob), "at_draft_len": len(survival_prob)}
    p = predict(case)
    return Predicted(
        p.acceptance_len, p.round_s, p.draft_s, p.verify_s, p.overhead_s, p.tpot_s, p.tokens_per_s, p.speedup, p.speedup_low, p.speedup_high
    )  # fmt: skip


@dataclass
class Harness:
    """One run in one folder."""

    spec: Spec
    folder: Path
    prompts: PromptSet
    progress: Progress

    def run(self) -> Report:
        """Do what is not done yet, then compare."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.end_s, self.unseen_frac = time.monotonic() + self.spec.limit_s, 0.0
        family = load_family()
        self.engine = self._engine(family)
        self.journal = VisitJournal(self.folder / "visits.jsonl", self.spec)
        self.progress("kernels", 0, 1)
        records = costs.measure_kernels(self.spec.targets, self.spec.kernel_budget_s, self.folder / "kernels.raw.jsonl")
        self.profiles = {target: costs.profile_of(records, target) for target in self.spec.targets}
        self._visit_all()
        return self._report()

    def _engine(self, family: Family) -> Builtin:
        workloads = {w for b in self.spec.blocks for w in b[1]}
        chosen = {w: [family.encode(t) for t in self.prompts.take(w, self.spec.prompts)] for w in workloads}
        chosen[CALIBRATION] = [family.encode(t) for t in self.prompts.others(self.spec.prompts, max(self.spec.batches))]
        self.context_len = {w: round(sum(map(len, rows)) / len(rows) + self.spec.output_len / 2) for w, rows in chosen.items()}
        return Builtin(family, chosen, self.spec.output_len, self.spec.targets)

    def _calibration_arms(self) -> list[Arm]:
        """Off, and the shortest and longest draft, at the smallest and largest batch of each target."""
        out = []
        for target, _, batches, kinds in self.spec.blocks:
            for n in sorted({min(batches), max(batches)}):
                out.append(Arm(target, CALIBRATION, n))
                out += [Arm(target, CALIBRATION, n, k, d) for k in kinds for d in sorted({min(self.spec.draft_lens), max(self.spec.draft_lens)})]
        return out

    def _acceptance_arms(self) -> list[Arm]:
        """Acceptance is read once per workload and kind, at the longest draft; the widths below it are predicted from that."""
        asked: dict[tuple[str, str, str], int] = {}
        for target, workloads, batches, kinds in self.spec.blocks:
            for key in ((self._speaker(target), w, k) for w in workloads for k in kinds):
                asked[key] = max(asked.get(key, 0), *batches)
        return [Arm(target, w, n, k, max(self.spec.draft_lens)) for (target, w, k), n in asked.items()]

    def _speaker(self, target: str) -> str:
        """The first target of the run that says what this one says: size does not change that, rounded weights do."""
        return next(t for t in self.spec.targets if TARGETS[t].weights == TARGETS[target].weights)

    def _schedule(self) -> list[tuple[str, Arm, int]]:
        """(stage, arm, visit) in the order in which they run. The visits of every arm, those that calibrate among them, are spread evenly over the
        run and random within their share of it: a machine that slows down for minutes slows all arms alike. Every arm is seen early once."""
        counts: list[tuple[str, Arm, int]] = [(CALIBRATION, arm, CALIBRATION_VISITS) for arm in self._calibration_arms()]
        counts += [(ACCEPTANCE, arm, self.engine.groups(arm)) for arm in self._acceptance_arms()]
        for arm in self.spec.arms():  # off is half of every choice of its cell; its duplicate shows the noise of an arm that drafts
            fewest = FEWEST_VISITS if arm.drafter is not None or arm.copy else 2 * FEWEST_VISITS
            counts.append((ARMS, arm, max(self.engine.groups(arm), fewest) * self.spec.passes))
        timed = [
            ((index + random.Random(f"{stage} {arm.name} {index}").random()) / max(count, FEWEST_VISITS), stage, arm, index)
            for stage, arm, count in counts
            for index in range(count)
        ]  # fmt: skip
        return [row[1:] for row in sorted(timed, key=lambda row: row[0])]

    def _visit_all(self) -> None:
        """Every visit that the journal does not hold."""
        done = {(r["stage"], Arm(**r["arm"]), r["index"]) for r in self.journal.rows}
        schedule = self._schedule()
        todo = [row for row in schedule if row not in done]
        warmed: set[Arm] = set()
        unseen = {row[:2] for row in schedule} - {row[:2] for row in done}
        for count, (stage, arm, index) in enumerate(todo):
            if time.monotonic() > self.end_s and not unseen:
                self.unseen_frac = (len(todo) - count) / len(schedule)
                return
            if arm not in warmed:
                self.engine.warm(arm)
                warmed.add(arm)
            unseen.discard((stage, arm))
            visit, verdict = self.engine.visit(arm, index)
            row = {"stage": stage, "arm": asdict(arm), "index": index, "visit": visit.to_json()}
            self.journal.add(row if verdict is None else row | {"lossless": asdict(verdict)})
            self.progress(stage, count + 1, len(todo))

    def _profiles(self) -> dict[tuple[str, str], Path]:
        """A profile file for each target and drafter kind ("off": without one), the engine's calibrated numbers inside."""
        by_target: dict[str, list[costs.Seen]] = defaultdict(list)
        for arm, visits in self.journal.visits(CALIBRATION).items():
            by_target[arm.target].append(costs.Seen(arm, tuple(visits.values()), self.context_len[CALIBRATION]))
        out = {}
        for target, seen in by_target.items():
            kinds = dict.fromkeys(s.arm.drafter for s in seen if s.arm.drafter is not None)
            for kind, numbers in costs.fit_overheads(self.profiles[target], self.folder, seen, tuple(kinds)).items():
                profile = costs.with_engine(self.profiles[target], kind, numbers)
                out[target, kind] = costs.write_profile(profile, self.folder)
        return out

    def predict_all(self) -> dict[Arm, Predicted]:
        """The planner's answer for each arm, from the calibration stages alone."""
        paths = self._profiles()
        longest = max(self.spec.draft_lens)
        survival: dict[tuple[str, str, str | None], list[float]] = {}
        matches: dict[tuple[str, str, str | None], float] = {}
        for arm, visits in self.journal.visits(ACCEPTANCE).items():
            lookup = arm.drafter in LOOKUP  # with match_prob given, the planner takes acceptance as that of the rounds that draft
            survival[arm.target, arm.workload, arm.drafter] = survival_prob(list(visits.values()), longest, of_drafting=lookup)
            matches[arm.target, arm.workload, arm.drafter] = match_prob(list(visits.values()))
        out = {}
        for arm in self.spec.arms():
            kind, key = arm.drafter, (self._speaker(arm.target), arm.workload, arm.drafter)
            rates, match = survival.get(key, []), None
            if kind in LOOKUP:
                match = any_match_prob(matches[key], arm.num_seqs)
                rates = [s * matches[key] / match for s in rates] if match else rates
            path = paths[arm.target, kind or "off"]
            out[arm] = priced(path, arm, self.context_len[arm.workload], rates, match)
        return out

    def _report(self) -> Report:
        measured: dict[Arm, Measured] = {a: measure(a, list(v.values())) for a, v in self.journal.visits(ARMS).items()}
        predicted = self.predict_all()
        checked = [r["lossless"] for r in self.journal.rows if "lossless" in r]
        same, ties = (sum(c[k] for c in checked) for k in ("identical", "ties"))
        wrong = sum(len(c["wrong"]) for c in checked)
        detail = f"{same} outputs identical, {ties} part at a tie of two logits, {wrong} wrong" if checked else ""
        order = {a: i for i, a in enumerate(self.spec.arms())}
        measured = dict(sorted(measured.items(), key=lambda item: order[item[0]]))
        return Report("builtin", measured, predicted, choices(measured, predicted), wrong == 0 if checked else None, detail, self._notes())

    def _notes(self) -> tuple[str, ...]:
        longest = max(self.spec.draft_lens)
        low, high = self.journal.reference_spread()
        powers = sorted(self.journal.reference_powers().values())
        follow = f"{powers[0]:.2f}" + (f" to {powers[-1]:.2f}" if len(powers) > 1 else "")
        late = f"out of time: {self.unseen_frac:.0%} of the visits were not made; the same command with this --out makes them"
        return (
            *((late,) if self.unseen_frac else ()),
            f"fixed work beside every visit took {low:.2f} to {high:.2f} of its median time (10th to 90th percentile); times are scaled by as much of"
            f" that as repeats of an arm follow (power {follow} by target, batch and drafter)",
            "times are CPU time of one thread (what neighbours take does not count); every output has a fixed length, end-of-text ignored; greedy",
            f"acceptance was read at D = {longest} on the same prompts, lower D are predicted from it; costs were calibrated on other prompts,"
            f" off and D = {min(self.spec.draft_lens)} and {longest}",
        )

    def recalibrated(self) -> str:
        """The machine's profile with one set of engine numbers from every arm of this run's first target, drafters together."""
        target = self.spec.targets[0]
        seen = [
            costs.Seen(arm, tuple(v.values()), self.context_len[arm.workload]) for arm, v in self.journal.visits(ARMS).items() if arm.target == target
        ]
        overheads = costs.shared_overheads(self.profiles[target], self.folder, seen)
        return costs.profile_text(costs.with_engine(self.profiles[target], "verified", overheads))


def verify_builtin(spec: Spec, folder: Path, prompts: PromptSet, progress: Progress, recalibrate: Path | None = None) -> Report:
    """Run (or go on with) a verification on the built-in engine; `recalibrate` also gets a profile of what it saw."""
    harness = Harness(spec, folder, prompts, progress)
    report = harness.run()
    if recalibrate is not None:
        recalibrate.write_text(harness.recalibrated(), encoding="utf-8")
    return report
