"""A user's own serving runs adapt the engine numbers; formats, shrinkage and the profile that carries them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import answers

from gpu_profiles.load import load_gpu
from planner.calibrate.from_bench import adapt_to, profile_with, read_runs
from planner.errors import InputError

DEPLOYMENT: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "gpu": "h100-sxm",
    "n_gpus": 1,
    "tp": 1,
    "engine": "vllm",
    "input_len": 1024,
    "output_len": 1024,
}


def served(concurrency: int, factor: float = 1.0, added_s: float = 0.0) -> dict[str, Any]:
    """A run of an engine that is `factor` slower than modelled, plus a fixed time per step."""
    tpot = answers([DEPLOYMENT | {"concurrency": concurrency}])[0].tpot_s
    return {"tpot_s": tpot * factor + added_s, "concurrency": concurrency, "input_len": 1024, "output_len": 1024}


def test_vllm_bench_aiperf_and_csv_read_alike(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(
        json.dumps({"median_tpot_ms": 12.5, "max_concurrency": 8, "completed": 10, "total_input_tokens": 10240, "total_output_tokens": 5120})
    )
    (tmp_path / "a.json").write_text(
        json.dumps({
            "inter_token_latency": {"avg": 13.0, "p50": 12.5, "unit": "ms"}, "input_config": {"loadgen": {"concurrency": 8}},
            "input_sequence_length": {"avg": 1024.0}, "output_sequence_length": {"avg": 512.0},
        })
    )  # fmt: skip
    (tmp_path / "c.csv").write_text("concurrency,tpot_ms,input_len,output_len\n8,12.5,1024,512\n")
    expected = [{"tpot_s": pytest.approx(0.0125), "concurrency": 8, "input_len": 1024, "output_len": 512}]
    for name in ("v.json", "a.json", "c.csv"):
        assert read_runs(tmp_path / name) == expected, name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("concurrency,ttft\n1,2\n", "the CSV lacks its columns"),
        ("concurrency,tpot_ms\n8,nan\n", "row 2: TPOT must be a positive number"),
        ("concurrency,tpot_ms\n-8,3\n", "row 2: concurrency must be a positive number"),
        ("{", "not valid JSON"),
        ('{"foo": 1}', "unknown measurement JSON"),
        ("[]", "no measured run in this file"),
    ],
)
def test_unusable_files_say_why(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "runs"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_runs(path)


def test_a_uniformly_slower_machine_is_learnt() -> None:
    made = adapt_to([served(c, 1.3) for c in (1, 2, 4, 8, 16, 32, 64, 128)], DEPLOYMENT)
    assert made.error_before == pytest.approx(0.23, abs=0.02)
    assert made.error_after < 0.03


def test_few_rows_stay_near_the_global_numbers() -> None:
    start = adapt_to([served(1)], DEPLOYMENT).overheads
    one = adapt_to([served(1, 2.0)], DEPLOYMENT)
    many = adapt_to([served(c, 2.0) for c in (1, 2, 4, 8, 16, 32, 64, 128)], DEPLOYMENT)
    assert start["kernel_scale"] < one.overheads["kernel_scale"] < 2.0 * start["kernel_scale"]
    assert many.error_after < 0.2
    assert any("cannot tell" in w for w in one.warnings)


def test_the_profile_carries_the_numbers(tmp_path: Path) -> None:
    runs = [served(c, 1.3) for c in (1, 4, 16, 64)]
    made = adapt_to(runs, DEPLOYMENT)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile_with(made, load_gpu("h100-sxm"), "vllm")))
    before, after = answers([DEPLOYMENT | {"concurrency": 16}, DEPLOYMENT | {"concurrency": 16, "gpu": str(path)}])
    assert after.tpot_s == pytest.approx(1.3 * before.tpot_s, rel=0.05)
    assert after.tpot_high_s / after.tpot_low_s < before.tpot_high_s / before.tpot_low_s * 1.05
    other = answers([DEPLOYMENT | {"concurrency": 16, "gpu": str(path), "engine": "sglang"}])[0]
    assert other.tpot_s < 1.1 * before.tpot_s
