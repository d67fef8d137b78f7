"""Training of the built-in family: a broken run goes on as if it had not been broken, and every loss falls."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from planner.verify.nets.transformer import Shape, Transformer, initialise
from planner.verify.training.loop import MIX, Batch, Recipe, batches, train
from planner.verify.training.losses import distillation_loss, next_token_loss

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Shape(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=32, vocab_size=40)
RECIPE = Recipe("tiny", steps=240, batch_size=4, learning_rate=3e-3)


@pytest.fixture
def text() -> Batch:
    """Streams that count upwards by a stride of their own, so that there is something to learn."""
    streams = {workload: np.arange(4000) * (i + 1) % 37 for i, workload in enumerate(MIX)}
    return batches(streams, RECIPE, 24)


def trained(folder: Path, batch: Batch) -> Transformer:
    folder.mkdir(exist_ok=True)
    net = Transformer(TINY)
    initialise(net, RECIPE.seed)
    train(net, RECIPE, lambda tokens: next_token_loss(net, tokens), batch, folder, folder / "log.jsonl")
    return net


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, text: Batch) -> None:
    whole = trained(tmp_path / "whole", text)

    def broken(step: int) -> Tensor:
        if step == 150:
            raise KeyboardInterrupt
        return text(step)

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "broken", broken)
    seen: list[int] = []

    def watched(step: int) -> Tensor:
        seen.append(step)
        return text(step)

    again = trained(tmp_path / "broken", watched)
    assert seen[0] == 100, "it goes on from the last saved step"
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    log = [json.loads(line) for line in (tmp_path / "broken" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == [100, 200, 240]
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]


def test_a_drafter_learns_its_target(tmp_path: Path, text: Batch) -> None:
    target = trained(tmp_path / "target", text).requires_grad_(False)
    small = Transformer(dataclasses.replace(TINY, intermediate_size=16))
    initialise(small, 5)
    before = float(distillation_loss(small, target, text(1000)).detach())
    recipe = dataclasses.replace(RECIPE, name="small")
    train(small, recipe, lambda tokens: distillation_loss(small, target, tokens), text, tmp_path, tmp_path / "log.jsonl")
    assert float(distillation_loss(small, target, text(1000)).detach()) < 0.7 * before
