"""`draftline verify --engine vllm`: servers started arm by arm, measured over HTTP, compared; a stand-in of that name runs the built-in engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.verify import family
from planner.verify.engine import generate
from planner.verify.hf_export import export_llama
from planner.verify.remote.sweep import Drafter, Sweep, same_outputs


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `vllm` on PATH, and the target exported for it."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "vllm"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("vllm_standin.py")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    shipped = family.load_family()
    return export_llama(shipped.target, shipped.tokenizer_file, tmp_path / "model")


def run(model: Path, out: Path, *more: str) -> Any:
    options = ["--engine", "vllm", "--gpu", "h100", "--drafter", "ngram", "--batches", "1,2", "--workloads", "structured", "--output-len", "12"]
    return CliRunner().invoke(app, ["verify", str(model), *options, "--model-path", str(model), "--out", str(out), *more, "--json"])


def test_a_sweep_over_servers(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """off, n-gram at D = 2, a server that cannot start at D = 3, off again: everything but the dead arm is there, and the reason for that one."""
    monkeypatch.setenv("FAIL_AT", '"num_speculative_tokens": 3')
    done = run(vllm, tmp_path / "run", "--draft-lens", "2,3")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    arms = {(c["drafter"], c["draft_len"], c["num_seqs"], c["copy"]): c for c in result["cells"]}
    assert set(arms) == {(None, 0, n, k) for n in (1, 2) for k in (0, 1)} | {("ngram", 2, n, 0) for n in (1, 2)}
    drafting = arms["ngram", 2, 1, 0]
    assert 1.0 < drafting["measured"]["acceptance_len"] < 3.0
    assert drafting["predicted"]["acceptance_len"] == pytest.approx(drafting["measured"]["acceptance_len"], rel=1e-6)
    assert drafting["measured"]["draft_s"] is None and drafting["measured"]["speedup"] > 0
    assert result["lossless"] is True and len(result["choices"]) == 2
    assert any("ngram-3" in n and "out of memory" in n for n in result["notes"])
    assert (tmp_path / "run" / "verify.html").read_text().count("<tr>") > 8
    before = (tmp_path / "run" / "arms.jsonl").read_text()
    monkeypatch.setenv("PATH", "/nowhere")  # nothing can be started now: what was measured must be enough
    again = run(vllm, tmp_path / "run", "--draft-lens", "2,3")
    assert json.loads(again.stdout)["cells"] == result["cells"]
    assert (tmp_path / "run" / "arms.jsonl").read_text().startswith(before)
    other = run(vllm, tmp_path / "run", "--draft-lens", "4")
    assert "another run" in other.output + str(other.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vllm"], "MODEL is missing"),
        (["Qwen/Qwen3-8B", "--engine", "vllm"], "--gpu is missing"),
        (["Qwen/Qwen3-8B", "--engine", "vllm", "--gpu", "h100"], "no drafter to run"),
        (["m", "--engine", "transformers", "--gpu", "h100", "--drafter", "eagle3"], "external:MODEL or ngram"),
        (["m", "--engine", "transformers", "--gpu", "h100", "--drafter", "ngram", "--batches", "2"], "takes one sequence"),
        (["no-such-plan.json"], "cannot read the plan file"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--window-s", "0"], "--window-s"),
    ],
)
def test_bad_options_are_one_clear_error(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["verify", "--out", str(tmp_path / "run"), *arguments])
    assert done.exit_code != 0 and words in done.output + str(done.exception)


def test_a_plan_says_what_to_verify(tmp_path: Path) -> None:
    from planner.cli.verify import plan_inputs
    from planner.planning import plan

    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan("Qwen/Qwen3-8B", "h100", concurrency=(1, 8)).to_dict()))
    found = plan_inputs(str(path))
    assert found is not None and found["model"] == "Qwen/Qwen3-8B" and found["gpu"] == "h100-sxm" and found["engine"] == "vllm"
    assert found["recommended"] and all(set(d) == {"kind", "model"} for d in found["recommended"])
    path.write_text('{"a": 1}')
    with pytest.raises(Exception, match="not a plan"):
        plan_inputs(str(path))


def test_outputs_are_compared_with_the_plain_arm_of_the_same_text_and_batch() -> None:
    rows = [
        {"kind": None, "copy": 0, "workload": "w", "num_seqs": 1, "texts": {"0": "a", "1": "b"}},
        {"kind": "ngram", "copy": 0, "workload": "w", "num_seqs": 1, "texts": {"0": "a", "1": "x"}},
        {"kind": "ngram", "copy": 0, "workload": "w", "num_seqs": 2, "texts": {"0": "z"}},
    ]
    assert same_outputs(rows) == (1, 2)


def test_off_comes_first_and_last() -> None:
    sweep = Sweep({"model": "m", "gpu": "g", "engine": "vllm"}, (Drafter("ngram"),), (2, 4), (1,), ("w",))
    assert sweep.servers == [(None, 0, 0), (Drafter("ngram"), 2, 0), (Drafter("ngram"), 4, 0), (None, 0, 1)]


def test_transformers_in_this_process(tmp_path: Path) -> None:
    """Assisted generation and prompt lookup on the exported family: acceptance as the built-in engine counts it, outputs those of plain decoding."""
    shipped = family.load_family()
    target = export_llama(shipped.target, shipped.tokenizer_file, tmp_path / "target")
    draft = export_llama(shipped.external, shipped.tokenizer_file, tmp_path / "draft")
    options = ["--engine", "transformers", "--gpu", "h100", "--drafter", f"external:{draft}", "--drafter", "ngram", "--draft-lens", "3"]
    options += ["--workloads", "structured", "--output-len", "24", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, ["verify", str(target), *options])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    arms = {(c["drafter"], c["copy"]): c["measured"] for c in result["cells"]}
    assert set(arms) == {(None, 0), (None, 1), ("external", 0), ("ngram", 0)}
    assert result["lossless"] is True
    prompts = [shipped.encode(p.prompt)[1:] for p in family.builtin_prompts() if p.category == "structured"][:4]
    run = generate(shipped.target, prompts, 24, drafter=shipped.drafter("external"), draft_len=3)
    assert arms["external", 0]["acceptance_len"] == pytest.approx(run.acceptance_len, rel=0.15)  # first and last rounds are left out there
