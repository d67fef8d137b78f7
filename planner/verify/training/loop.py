"""One training run: seeded, resumable, logged. What differs between the networks is their loss."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

#: Share of rows by workload in every batch.
MIX = {"code": 0.55, "prose": 0.15, "structured": 0.30}

Batch = Callable[[int], Tensor]  # step -> tokens [B, T]


@dataclass(frozen=True)
class Recipe:
    """What a run is told."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float
    seed: int = 1


def batches(streams: dict[str, np.ndarray], recipe: Recipe, length: int, written: dict[str, np.ndarray] | None = None) -> Batch:
    """Random windows of the token streams, every other one from what the target has written itself [N, length] where that is given.

    The step alone decides which, so that a resumed run sees what an unbroken one would.
    """

    def batch(step: int) -> Tensor:
        rng = np.random.default_rng((recipe.seed, step))
        rows = []
        for workload in rng.choice(list(MIX), size=recipe.batch_size, p=list(MIX.values())):
            if written is not None and rng.random() < 0.5:
                own = written[str(workload)]
                row = own[rng.integers(len(own)), :length]
            else:
                stream = streams[str(workload)]
                at = int(rng.integers(0, len(stream) - length))
                row = stream[at : at + length]
            rows.append(torch.from_numpy(row.astype(np.int64)))
        return torch.stack(rows)

    return batch


def rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up over 50 steps, then half a cosine down to 2 %."""
    warm = min(1.0, (step + 1) / 50)
    return recipe.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))


def train(net: nn.Module, recipe: Recipe, loss_of: Callable[[Tensor], Tensor], batch: Batch, folder: Path, log: Path) -> None:
    """Train in place. Every 100 steps the state goes to `folder`/NAME.pt; a run that finds one goes on from there."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    state = folder / f"{recipe.name}.pt"
    start, spent_s = 0, 0.0
    if state.exists():
        saved = torch.load(state, weights_only=True, map_location=parameters[0].device)
        net.load_state_dict(saved["net"])
        optimiser.load_state_dict(saved["optimiser"])
        start, spent_s = saved["step"], saved["spent_s"]
    began, recent = time.perf_counter() - spent_s, []
    for step in range(start, recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, recipe)
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # for what a loss draws itself
        loss = loss_of(batch(step).to(parameters[0].device))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        recent.append(float(loss.detach()))
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            spent_s = time.perf_counter() - began
            row = {"run": recipe.name, "step": step + 1, "loss": round(sum(recent) / len(recent), 4), "seconds": round(spent_s, 1)}
            with log.open("a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
            recent = []
            partial = state.with_suffix(".part")
            torch.save({"net": net.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1, "spent_s": spent_s}, partial)
            partial.replace(state)
