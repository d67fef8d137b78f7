"""How fast: `python -m pytest tests/benchmarks --benchmark-enable`. Figures are reported, never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from planner.cases import Case
from planner.deployment import resolve
from planner.prediction import predict_lines
from planner.serving import Traffic, serve


def test_plan_command(benchmark: Any) -> None:
    """`plan` on a catalogue model, all drafters, 9 concurrencies, D 0..16, as a process of its own."""
    command = [sys.executable, "-m", "planner.cli.main", "plan", "Qwen/Qwen3-32B", "--gpu", "h100", "--json"]
    done = benchmark.pedantic(lambda: subprocess.run(command, capture_output=True, check=True), rounds=5, warmup_rounds=1)
    assert json.loads(done.stdout)["points"]


def test_predict_5000_lines(benchmark: Any) -> None:
    """5,000 cases over 20 deployments."""
    lines = [
        json.dumps({
            "id": i, "model": ["Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B"][i % 4],
            "gpu": ["h100", "h200", "b200", "b300", "gb200"][i % 5], "n_gpus": 2, "concurrency": 1 + i % 128, "input_len": 512 + i, "output_len": 512,
            "drafter": {"kind": "eagle3"}, "draft_len": 1 + i % 7, "acceptance": {"alpha": 0.7},
        })
        for i in range(5000)
    ]  # fmt: skip
    rows = benchmark.pedantic(lambda: predict_lines(lines), rounds=3, warmup_rounds=1)
    assert len(rows) == 5000 and not any("error" in r for r in rows)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"])
def test_points_per_second(benchmark: Any, model: str) -> None:
    """D x concurrency x context points of one drafter, evaluated as one grid; divide the count in extra_info by the time."""
    dep = resolve(Case(model=model, gpu="h200", concurrency=1, context_len=1, drafter={"kind": "eagle3"}, draft_len=1))
    c = np.arange(1, 129, dtype=np.float64)[:, None, None]
    d = np.arange(1, 17, dtype=np.float64)[None, :, None]
    traffic = Traffic.at_context(np.linspace(512, 32768, 256)[None, None, :])
    served = benchmark(lambda: serve(dep, concurrency=c, draft_len=d, acceptance_len=1.0 + d / 2.0, traffic=traffic))
    benchmark.extra_info["points"] = served.tpot_s.size
    assert served.tpot_s.shape == (128, 16, 256)
