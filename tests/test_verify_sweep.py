"""`draftline verify --engine vllm`: servers started arm by arm, measured over HTTP, compared; a stand-in of that name runs the built-in engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cases import parse_case
from planner.cli.main import app
from planner.deployment import resolve
from planner.errors import InputError
from planner.report.verification import text
from planner.verify import family
from planner.verify.arms import Arm, Measured
from planner.verify.compare import Predicted
from planner.verify.engine import generate
from planner.verify.hf_export import export_llama
from planner.verify.remote.launch import Serve, k0_refusal, server_command
from planner.verify.remote.parts import ServedReport, round_lines
from planner.verify.remote.sweep import Drafter, Sweep, report_of, same_outputs


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
    kept = [line for line in (tmp_path / "run" / "arms.jsonl").read_text().splitlines() if '"error"' not in line]
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "/nowhere")  # nothing can be started now: what was measured must be enough
    again = json.loads(run(vllm, tmp_path / "run", "--draft-lens", "2,3").stdout)
    assert again["cells"] == result["cells"] and not any("out of memory" in n for n in again["notes"]), "the reason is today's"
    assert (tmp_path / "run" / "arms.jsonl").read_text().splitlines()[: len(kept)] == kept
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("FAIL_AT")
    whole = json.loads(run(vllm, tmp_path / "run", "--draft-lens", "2,3").stdout)  # what failed is tried again, the rest stands
    assert {(c["drafter"], c["draft_len"]) for c in whole["cells"]} == {(None, 0), ("ngram", 2), ("ngram", 3)}
    assert not any("ngram-3" in n for n in whole["notes"])
    then, now = ([c["measured"] for c in r["cells"] if c["draft_len"] < 3] for r in (result, whole))
    assert now == then, "measured once; predictions may follow the longest D now"
    other = run(vllm, tmp_path / "run", "--draft-lens", "4")
    assert "another run" in other.output + str(other.exception)


def test_a_k0_tier_beside_off(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose schedule drafts nothing at these batches: its price over off is reported, the choices stay as they were; and the rounds of
    two D are a line. A server that drafts all the same is reported."""
    options = ["--draft-lens", "2,4", "--batches", "1,2", "--k0-tier"]
    done = run(vllm, tmp_path / "run", *options)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    rows = [json.loads(line) for line in (tmp_path / "run" / "arms.jsonl").read_text().splitlines()][1:]
    tiers = [r for r in rows if r["server"] == "ngram-k0"]
    assert [(r["num_seqs"], r["problems"], r["acceptance"], r["draft_len"]) for r in tiers] == [(1, [], None, 0), (2, [], None, 0)]
    assert "D=4" in tiers[0]["identity"]  # it is loaded
    assert [(t["drafter"], t["num_seqs"]) for t in result["k0_tiers"]] == [("ngram", 1), ("ngram", 2)]
    for t in result["k0_tiers"]:
        assert t["tax_low_frac"] < t["tax_frac"] < t["tax_high_frac"] and t["predicted_tax_frac"] == pytest.approx(0.066, abs=5e-3)
    assert not [c for c in result["cells"] if c["drafter"] and not c["draft_len"]] and result["lossless"] is True
    assert [(r["drafter"], r["num_seqs"], r["draft_lens"]) for r in result["round_lines"]] == [("ngram", 1, [2, 4]), ("ngram", 2, [2, 4])]
    said = text(result)
    assert "What a K=0 tier costs" in said and "predicted +6." in said and "What a round costs" in said
    page = (tmp_path / "run" / "verify.html").read_text()
    assert "What a K=0 tier costs" in page and "a draft token" in page
    monkeypatch.setenv("DEAF", "1")
    deaf = json.loads(run(vllm, tmp_path / "deaf", "--draft-lens", "2", "--batches", "1", "--k0-tier").stdout)
    assert any("were drafted in a K=0 tier: its schedule is not obeyed" in n for n in deaf["notes"])


def test_engines_without_a_tier_say_so(tmp_path: Path) -> None:
    case = {"model": "Qwen/Qwen3-8B", "gpu": "h100", "n_gpus": 1, "tp": 1, "concurrency": 8, "context_len": 1024}
    kinds = [(e, k) for e in ("vllm", "sglang", "trtllm", "llamacpp") for k in ("eagle3", "mtp", "ngram", "suffix")]
    assert [(e, k) for e, k in kinds if k0_refusal(e, k) is None] == [
        ("vllm", "eagle3"), ("vllm", "mtp"), ("vllm", "ngram"), ("sglang", "eagle3"), ("sglang", "mtp"),
    ]  # fmt: skip
    assert k0_refusal("vllm", "eagle3", 2) is not None
    sweep = Sweep({"engine": "llamacpp"}, (Drafter("ngram"),), (2,), (1,), ("w",), k0_tier=True)
    assert (Drafter("ngram"), 0, 0) not in sweep.servers
    assert report_of(sweep, []).notes == ("no K=0 tier of ngram: llamacpp has no schedule by batch",)
    dep = resolve(parse_case(case))
    line = server_command(Serve("vllm", dep, "eagle3", 3, 8, drafter_model="ORG/HEAD", k0_tier=True), port=1, folder=tmp_path)
    assert any('"num_speculative_tokens_per_batch_size": [[1, 8, 0], [9, 16, 3]]' in a for a in line)
    line = server_command(Serve("sglang", dep, "eagle3", 3, 8, drafter_model="ORG/HEAD", k0_tier=True), port=1, folder=tmp_path)
    assert "--speculative-adaptive" in line
    assert json.loads((tmp_path / "sglang-tiers.json").read_text()) == {"1": {"candidate_steps": [0]}, "16": {"candidate_steps": [3]}}
    with pytest.raises(InputError, match="no K=0 tier of ngram"):
        server_command(Serve("trtllm", dep, "ngram", 3, 8, k0_tier=True), port=1, folder=tmp_path)


def served(drafter: str | None, draft_len: int, round_s: float, half_s: float = 1e-5) -> tuple[Arm, Measured]:
    nan = float("nan")
    m = Measured(2.0, 2.0, 2.0, round_s, round_s - half_s, round_s + half_s, nan, nan, nan, round_s / 2, 2 / round_s, 2 / round_s, 2 / round_s, 8, 8)
    return Arm("served", "w", 1, drafter, draft_len, 0), m


def test_a_round_is_split_into_a_fixed_part_and_draft_tokens() -> None:
    """7 ms + 0.5 ms x D measured; predicted 5 ms + 0.5 ms x D: the fixed part is what is wrong. A single D gives no line."""
    measured = dict([served(None, 0, 5e-3), *(served("eagle3", d, 7e-3 + 5e-4 * d) for d in (1, 2, 4)), served("ngram", 2, 8e-3)])
    predicted = {
        arm: Predicted(2.0, 5e-3 + 5e-4 * arm.draft_len, 0.0, 0.0, 0.0, 1e-3, 400.0, 1.0, 1.0, 1.0) for arm in measured
    }  # fmt: skip
    (found,) = round_lines(measured, predicted)
    assert found.fixed_s == pytest.approx(7e-3) and found.per_draft_token_s == pytest.approx(5e-4) and found.plain_step_s == 5e-3
    assert 0 < found.fixed_half_s < 5e-5 and found.predicted_fixed_s == pytest.approx(5e-3)
    assert found.why(4) == "fixed part of a round"
    report = ServedReport("vllm", measured, predicted, [], None, "", (), (found,))
    whys = {(c["drafter"], c["draft_len"]): c["gap"]["why"] for c in report.to_json()["cells"]}
    assert whys["eagle3", 4] == "cost: fixed part of a round" and whys["ngram", 2] == "cost"
    bent = dict([served("eagle3", 1, 7e-3), served("eagle3", 2, 9e-3), served("eagle3", 4, 8e-3)])
    (wide,) = round_lines(bent, bent_said := dict.fromkeys(bent, predicted[next(iter(predicted))]))
    assert bent_said and wide.predicted_per_draft_token_s == pytest.approx(0.0, abs=1e-12)
    exact = {a: Predicted(2.0, m.round_s, 0.0, 0.0, 0.0, 1e-3, 400.0, 1.0, 1.0, 1.0) for a, m in bent.items()}
    uneven = bent | dict([served("eagle3", 4, 8e-3, 1e-3)])
    (same,) = round_lines(uneven, exact)
    assert same.predicted_fixed_s == pytest.approx(same.fixed_s), "equal rounds give equal lines, whatever their errors"
    assert wide.fixed_half_s > 1e-3 and wide.why(4) is None  # no line goes through these points: the interval says so


def test_a_key_opens_the_servers_and_is_written_nowhere(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in wants the key of VLLM_API_KEY and prints it to its log; with another key the run ends at its first server."""
    monkeypatch.setenv("VLLM_API_KEY", "sesame-4711")
    monkeypatch.setenv("OTHER_KEY", "wrong-0815")
    options = ["--draft-lens", "2", "--batches", "1", "--output-len", "6", "--api-key-env"]
    done = run(vllm, tmp_path / "run", *options, "VLLM_API_KEY")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert len(result["cells"]) == 3 and not [n for n in result["notes"] if "key" in n]
    wrong = run(vllm, tmp_path / "wrong", *options, "OTHER_KEY")
    said = wrong.output + str(wrong.exception)
    assert wrong.exit_code != 0 and "refuses the API key" in said and "--api-key-env NAME" in said
    without = run(vllm, tmp_path / "without", *options[:-1])  # the server has the key from the environment all the same
    assert "wants an API key" in str(without.exception)
    assert "sesame-4711" not in (tmp_path / "without" / "off.log").read_text() + str(without.exception)
    assert "no API key there" in str(run(vllm, tmp_path / "none", *options, "NO_SUCH_VARIABLE").exception)
    for folder in ("run", "wrong"):
        kept = {p: p.read_text() for p in (tmp_path / folder).rglob("*") if p.is_file()}
        assert kept and not [p for p, text in kept.items() if "sesame-4711" in text and folder == "run" or "wrong-0815" in text]
    assert "api_key=***" in (tmp_path / "run" / "off.log").read_text()
    assert "sesame-4711" not in done.output and "wrong-0815" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vllm"], "MODEL is missing"),
        (["Qwen/Qwen3-8B", "--engine", "vllm"], "--gpu is missing"),
        (["Qwen/Qwen3-8B", "--engine", "vllm", "--gpu", "h100", "--recalibrate", "x.json"], "only the built-in engine times its rounds"),
        (["--url", "http://127.0.0.1:9", "--recalibrate", "x.json"], "only the built-in engine times its rounds"),
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
