"""`draftline calibrate` as typed, for the parts that measure nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOYMENT = {"model": "Qwen/Qwen3-8B", "gpu": "h100", "engine": "vllm", "input_len": 1024, "output_len": 512}


def calibrate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "planner.cli.main", "calibrate", *args], capture_output=True, text=True, check=False)


def test_served_runs_become_a_profile_that_predicts_them(tmp_path: Path) -> None:
    (tmp_path / "deployment.json").write_text(json.dumps(DEPLOYMENT))
    (tmp_path / "runs.csv").write_text("concurrency,tpot_ms\n1,8.4\n8,9.6\n64,17\n")
    out = tmp_path / "mine.json"
    args = ("--from-bench", str(tmp_path / "runs.csv"), "--deployment", str(tmp_path / "deployment.json"), "--out", str(out))
    done = calibrate(*args, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["rows"] == 3 and answer["error_after"] < 0.05 < answer["error_before"]
    from planner import predict

    own = predict(DEPLOYMENT | {"gpu": str(out), "concurrency": 8})
    assert own.tpot_s == pytest.approx(9.6e-3, rel=0.1)
    text = calibrate(*args).stdout
    assert "3 runs" in text and f"--gpu {out}" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--from-bench", "runs.csv"), "--from-bench needs the deployment"),
        (("--from-bench", "runs.csv", "--deployment", "nowhere.json"), "cannot read the deployment"),
        (("--from-tables", "nowhere"), "no such folder"),
        (("--device", "tpu"), "unknown device"),
        (("--budget", "-1"), "--budget must be positive"),
    ],
)
def test_bad_options_say_what_to_do(args: tuple[str, ...], says: str) -> None:
    done = calibrate(*args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
