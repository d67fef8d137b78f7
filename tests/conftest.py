"""Shared helpers: a base case, and answers that fail loudly when they are errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.cases import Prediction
from planner.prediction import predict_many

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "configs"

BASE: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B",
    "gpu": "h100-sxm",
    "n_gpus": 1,
    "tp": 1,
    "engine": "vllm",
    "weights_dtype": "fp8",
    "kv_dtype": "fp8",
    "concurrency": 8,
    "context_len": 4096,
}


def config(name: str) -> str:
    """Path of a packaged config."""
    return str(CONFIGS / f"{name}_config.json")


def speculative(draft_len: int = 4, acceptance_len: float = 3.0, **changes: Any) -> dict[str, Any]:
    """The base case with an EAGLE-3 head, or another drafter by `changes`."""
    return (
        BASE
        | {
            "drafter": {"kind": "eagle3", "layers": 1},
            "draft_len": draft_len,
            "acceptance": {"acceptance_len": acceptance_len, "at_draft_len": draft_len},
        }
        | changes
    )


def answers(cases: list[dict[str, Any]]) -> list[Prediction]:
    out = []
    for case, answer in zip(cases, predict_many(cases), strict=True):
        assert isinstance(answer, Prediction), f"{case}: {answer}"
        out.append(answer)
    return out


@pytest.fixture
def ask() -> Callable[..., Prediction]:
    """ask(key=value, ...) -> the base case's prediction with these changes."""

    def one(**changes: Any) -> Prediction:
        return answers([BASE | changes])[0]

    return one


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch on one thread: passes of the built-in family are slower on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
