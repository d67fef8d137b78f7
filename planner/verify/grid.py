"""The engine over batch and context, on a GPU: rounds predicted from a measured profile beside rounds measured.

`python -m planner.verify.grid --device cuda --out DIR`: kernels first, then one prefill for each (batch, context), after which every draft
length runs from the same state. Two cells calibrate the engine's own overheads, in rounds of their own; the rest is prediction. `--device cpu
--target inflated` runs the same code on one thread. Killed, or out of `--budget`, it goes on when the same command is given again.

Contexts are far beyond the 256 tokens that the family learned: what it says there is no text. Costs and the planner's acceptance laws do not mind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planner.errors import InputError
from planner.verify import costs
from planner.verify.arms import Arm, Measured, measure, survival_prob
from planner.verify.builtin import CPU_TARGETS, TARGETS, as_visit, single_thread
from planner.verify.compare import Predicted, Report, choices
from planner.verify.drafters import ExternalDrafter
from planner.verify.engine import Batch, Rounds, Run, decode_round, prefill
from planner.verify.family import builtin_prompts, load_family
from planner.verify.graphs import Graphed
from planner.verify.harness import ACCEPTANCE, ARMS, CALIBRATION, priced
from planner.verify.journal import VisitJournal
from planner.verify.lossless import compare_greedy, greedy_gap, tie_logit_gap
from planner.verify.nets.transformer import KVCache, Transformer
from planner.verify.sampling import Sampler

KIND = "external"
#: Cache slots come in blocks: kernels of a masked pass want aligned rows.
SLOTS = 64


@dataclass(frozen=True)
class Grid:
    """What a run covers."""

    target: str
    cells: tuple[tuple[int, int], ...]
    """(sequences, context tokens), in the order in which they are measured."""
    calibrated: tuple[tuple[int, int], ...]
    """Those that the engine's overheads are fitted to."""
    draft_lens: tuple[int, ...]
    rounds: int = 6
    visits: int = 2
    kernel_budget_s: float = 75.0

    @property
    def longest(self) -> int:
        return max(self.draft_lens)

    def slots(self, cell: tuple[int, int]) -> int:
        """Cache slots of a cell, which every pass attends to: the context, what the rounds add, and one round's reach, in blocks of SLOTS."""
        return -(-(cell[1] + (self.rounds + 1) * (1 + self.longest)) // SLOTS) * SLOTS


#: 64 x 32k tokens of keys and values would not fit one GPU.
GPU_GRID = Grid(
    "3b", tuple((n, s) for s in (1024, 8192, 32768) for n in (1, 8, 64) if n * s <= 64 * 8192), ((1, 1024), (64, 8192)), tuple(range(1, 16))
)  # fmt: skip
CPU_GRID = Grid("inflated", ((1, 64), (4, 64), (1, 192), (4, 192)), ((1, 64), (4, 192)), (1, 2, 4, 8), rounds=4, kernel_budget_s=30.0)


def arm_of(grid: Grid, cell: tuple[int, int], draft_len: int, copy: int = 0) -> Arm:
    return Arm(grid.target, f"{cell[1]} tokens", cell[0], KIND if draft_len else None, draft_len, copy)


def stages(grid: Grid, cell: tuple[int, int]) -> Iterator[tuple[str, Arm, int]]:
    """(stage, arm, visit) of a cell in the order in which they run: drift meets all arms alike."""
    if cell in grid.calibrated:
        lens = sorted({0, min(grid.draft_lens), grid.longest})
        yield from ((CALIBRATION, arm_of(grid, cell, d), i) for i in range(grid.visits) for d in lens)
    yield from ((ACCEPTANCE, arm_of(grid, cell, grid.longest), i) for i in range(grid.visits))
    arms = [arm_of(grid, cell, 0), arm_of(grid, cell, 0, 1), *(arm_of(grid, cell, d) for d in grid.draft_lens)]
    for index in range(grid.visits):
        random.Random(f"{cell} {index}").shuffle(arms)
        yield from ((ARMS, arm, index) for arm in arms)


@dataclass(frozen=True)
class State:
    """A batch after its prompts were read, to start from again and again: what later rounds left in the caches lies beyond its ends."""

    target: Graphed
    cache: KVCache
    batch: Batch
    drafter: ExternalDrafter
    prompts: list[list[int]]

    @classmethod
    def of(cls, target: Transformer, external: Transformer, prompts: list[list[int]], slots: int) -> State:
        """Read the prompts into caches of `slots` a sequence."""
        batch, cache = prefill(target, prompts, slots, Sampler())
        drafter = ExternalDrafter(Graphed(external))
        with torch.inference_mode():
            drafter.begin(batch, slots)
        return cls(Graphed(target), cache, batch, drafter, prompts)

    def run(self, draft_len: int, count: int) -> tuple[Run, list[int]]:
        """`count` rounds from the start; also the new tokens of the first sequence."""
        batch = replace(self.batch, tokens=self.batch.tokens.clone())
        rounds = Rounds()
        for _ in range(count):
            decode_round(self.target, self.cache, batch, self.drafter if draft_len else None, draft_len, Sampler(), rounds)
        first = batch.tokens[0, len(self.prompts[0]) : int(batch.lengths[0])].tolist()
        return Run([], rounds, np.ones((count, len(batch.lengths)), dtype=bool), count, 0.0), first


def prompts_of(encode: Any, num_seqs: int, context_len: int) -> list[list[int]]:
    """Held-out texts one after the other, each sequence from another one on, cut to the context."""
    texts = [encode(p.prompt) for p in builtin_prompts()]
    out = []
    for i in range(num_seqs):
        words = itertools.chain.from_iterable(itertools.islice(itertools.cycle(texts), i, None))
        out.append(list(itertools.islice(words, context_len - 1)))  # the first new token makes it whole
    return out


class GridRun:
    """A run in one folder."""

    def __init__(self, grid: Grid, device: str, folder: Path, budget_s: float) -> None:
        if device == "cuda" and TARGETS[grid.target].weights != "bf16":
            wanted = [name for name, size in TARGETS.items() if size.weights == "bf16"]
            raise InputError("a GPU runs bf16", where="--target", got=grid.target, expected=" or ".join(wanted))
        self.grid, self.device, self.folder = grid, device, folder
        self.deadline = time.monotonic() + budget_s
        folder.mkdir(parents=True, exist_ok=True)
        self.journal = VisitJournal(folder / "visits.jsonl", grid)
        self.notes: list[str] = []

    def run(self) -> Report:
        if self.device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # one kernel for all passes and for the microbenchmark of it
        records = costs.measure_kernels((self.grid.target,), self.grid.kernel_budget_s, self.folder / "kernels.raw.jsonl", self._kernels())
        self.profile = costs.profile_of(records, self.grid.target)
        dtype = "bf16" if self.device == "cuda" else "fp32"
        kernels: Any = dict(self.profile.calibration or {})["kernels"]
        fits = kernels.get("attention", {})
        if dtype not in (fits.get("builtin") or fits.get("*") or {}):
            raise InputError(
                "attention was not measured at enough points", where=str(self.folder), hint="Choose another --out, on a quieter machine."
            )
        costs.write_profile(self.profile, self.folder)
        self._measure()
        return self._report()

    def _kernels(self) -> costs.Kernels:
        """Rows and query lengths that the grid meets; on a CPU, whose curve over rows has no edges, the usual ones."""
        met = {n * q for n, _ in self.grid.cells for q in range(1, 2 + self.grid.longest)}
        rows = tuple(m for m in costs.ROWS_EDGES if m in met) if self.device == "cuda" else costs.ROWS
        cells = tuple((n, self.grid.slots((n, s))) for n, s in self.grid.cells)
        return costs.Kernels(self.device, rows, cells, tuple(q for q in (1, 2, 4, 5, 8, 9, 16) if q <= 1 + self.grid.longest))

    def _measure(self) -> None:
        """Every visit that the journal lacks, cell by cell; a cell that cannot run (too large for the memory, not greedy) is left
        out, with a note."""
        done = {(r["stage"], Arm(**r["arm"]), r["index"]) for r in self.journal.rows if "visit" in r}
        family = load_family()
        size = TARGETS[self.grid.target]
        target, external = size.build(family.target.to(self.device)), size.build_external(family.external.to(self.device))
        for cell in self.grid.cells:
            todo = [v for v in stages(self.grid, cell) if v not in done]
            if not todo:
                continue
            if time.monotonic() > self.deadline:
                self.notes.append(f"out of time before {cell[0]} x {cell[1]} tokens")
                continue
            try:
                self._cell(target, external, prompts_of(family.encode, *cell), cell, todo)
            except (RuntimeError, InputError) as error:  # out of memory comes under several names inside a capture
                self.notes.append(f"{cell[0]} x {cell[1]} tokens could not run: {(str(error).splitlines() or [type(error).__name__])[0]}")
            torch.cuda.empty_cache()  # this cell's caches, before the next one's

    def _cell(
        self, target: Transformer, external: Transformer, prompts: list[list[int]], cell: tuple[int, int], todo: Sequence[tuple[str, Arm, int]]
    ) -> None:
        state = State.of(target, external, prompts, self.grid.slots(cell))
        torch.cuda.empty_cache()  # what reading the prompts took, before graphs take their own
        plain = state.run(0, self.grid.rounds)[1]
        gap = greedy_gap(state.target.net, state.prompts[0], plain)  # captured passes against the bare network
        if gap > tie_logit_gap(state.target.net):
            raise InputError("plain decoding is not greedy: a captured pass computes something else", got=f"a logit gap of {gap:.3g}")
        warmed: set[int] = set()
        for stage, arm, index in todo:
            if arm.draft_len not in warmed:
                state.run(arm.draft_len, 2)
                warmed.add(arm.draft_len)
            run, said = state.run(arm.draft_len, self.grid.rounds)
            row: dict[str, Any] = {"stage": stage, "arm": asdict(arm), "index": index, "visit": as_visit(run, arm.draft_len).to_json()}
            if arm.draft_len and not index and stage == ARMS:
                both = min(len(plain), len(said))
                row["lossless"] = asdict(compare_greedy(state.target.net, state.prompts[:1], [plain[:both]], [said[:both]]))
            self.journal.add(row)
            if time.monotonic() > self.deadline:
                self.notes.append(f"out of time within {arm.cell[2]} x {arm.workload}")
                return

    def _context_len(self, arm: Arm) -> float:
        """What a pass costs by: all slots of its cache, under a mask."""
        return float(self.grid.slots((arm.num_seqs, int(arm.workload.split()[0]))))

    def _report(self) -> Report:
        calibrated = {arm.drafter for arm in self.journal.visits(CALIBRATION)}
        if calibrated != {None, KIND} or not self.journal.visits(ARMS):
            raise InputError(
                "nothing to compare yet", got="; ".join(self.notes) or "no visit", hint="Run again with the same --out to go on, with more --budget."
            )
        seen = [costs.Seen(arm, tuple(v.values()), self._context_len(arm)) for arm, v in self.journal.visits(CALIBRATION).items()]
        fitted = costs.fit_overheads(self.profile, self.folder, seen, (KIND,))
        paths = {kind: costs.write_profile(costs.with_engine(self.profile, kind, numbers), self.folder) for kind, numbers in fitted.items()}
        survival = {arm.cell: survival_prob(list(v.values()), self.grid.longest) for arm, v in self.journal.visits(ACCEPTANCE).items()}
        visits = self.journal.visits(ARMS)
        measured: dict[Arm, Measured] = {arm: measure(arm, list(v.values())) for arm, v in visits.items()}
        predicted: dict[Arm, Predicted] = {
            arm: priced(paths[arm.drafter or "off"], arm, self._context_len(arm), survival[arm.cell]) for arm in visits
        }
        order = {arm_of(self.grid, c, d, copy): i for i, (c, d, copy) in enumerate(itertools.product(self.grid.cells, range(17), (0, 1)))}
        measured = dict(sorted(measured.items(), key=lambda item: order[item[0]]))
        checked = [r["lossless"] for r in self.journal.rows if "lossless" in r]
        wrong = sum(len(c["wrong"]) for c in checked)
        same, ties = (sum(c[k] for c in checked) for k in ("identical", "ties"))
        detail = f"of the first sequence {same} outputs identical, {ties} part at a tie of two logits, {wrong} wrong"
        return Report("builtin-grid", measured, predicted, choices(measured, predicted), wrong == 0 if checked else None, detail, self._all_notes())

    def _all_notes(self) -> tuple[str, ...]:
        calibrated = " and ".join(dict.fromkeys(f"{arm.num_seqs} x {arm.workload}" for arm in self.journal.visits(CALIBRATION)))
        return (
            f"{self.grid.target} on {self.profile.name}; on a GPU passes are captured as graphs; kernels were measured in this run; the engine's"
            f" overheads are fitted to rounds of their own at {calibrated}, off, D = {min(self.grid.draft_lens)} and {self.grid.longest}",
            f"acceptance was read in every cell at D = {self.grid.longest}; contexts lie beyond what the family learned, so that it is costs that are"
            " tested",
            *self.notes,
        )


def main() -> None:
    from microbench.store import write_atomic
    from planner.report.verification import html, text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", choices=sorted(TARGETS), help="default: 3b on a GPU, inflated on a CPU")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, kernels included")
    asked = parser.parse_args()
    grid = GPU_GRID if asked.device == "cuda" else CPU_GRID
    if asked.target:
        grid = replace(grid, target=asked.target)
    if asked.device == "cpu" and grid.target not in CPU_TARGETS:
        parser.error(f"--target {grid.target} needs a GPU")
    try:
        with single_thread():
            report = GridRun(grid, asked.device, asked.out, asked.budget).run().to_json()
    except InputError as error:
        parser.error(str(error))
    sys.stdout.write(text(report) + "\n")
    write_atomic(asked.out / "grid.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomic(asked.out / "grid.html", html(report))


if __name__ == "__main__":
    main()
