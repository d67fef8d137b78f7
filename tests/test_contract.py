"""The contracts that other tools call: file in, file out, exit codes, keys."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BASE, speculative

from gpu_profiles import gpu_to_json, load_gpu
from planner.cases import Prediction
from planner.prediction import predict


def draftline(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "planner.cli.main", *args], capture_output=True, text=True, input=stdin, check=False)


def test_predict_reads_and_writes_lines_in_order(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(c) + "\n" for c in (BASE | {"id": "a"}, {"id": "b"}, speculative(id="c"))), encoding="utf-8")
    done = draftline("predict", str(source), "--out", str(target))
    assert done.returncode == 0 and "1 of 3 lines" in done.stderr
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [r["id"] for r in rows] == ["a", "b", "c"]
    assert set(rows[1]["error"]) == {"type", "message"}
    assert set(Prediction.model_fields) <= set(rows[0])


KERNELS: list[dict[str, Any]] = [
    {"op": "gemm", "m": 32, "n": 8192, "k": 8192, "weights_dtype": "fp8"},
    {"op": "attention", "num_seqs": 16, "query_len": 4, "context_len": 8192, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "kv_dtype": "bf16"},
    {"op": "mla", "num_seqs": 16, "query_len": 2, "context_len": 8192, "num_heads": 16},
    {"op": "moe", "num_tokens": 64, "num_experts": 128, "top_k": 8, "width": 2048, "ffn": 768},
    {"op": "linear_attention", "num_seqs": 16, "query_len": 4, "num_heads": 32},
    {"op": "allreduce", "bytes": 65536, "num_ranks": 8},
    {"op": "alltoall", "bytes": 65536, "num_ranks": 8},
]


def test_kernels_answers_every_op(tmp_path: Path) -> None:
    source = tmp_path / "k.jsonl"
    source.write_text("".join(json.dumps({"id": i, "gpu": "h100", "engine": "vllm", **k}) + "\n" for i, k in enumerate(KERNELS)), encoding="utf-8")
    done = draftline("kernels", str(source))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) == len(KERNELS)
    for row in rows:
        assert 0 < row["low_s"] <= row["time_s"] <= row["high_s"], row
        assert row["bound"] in ("memory", "compute", "launch", "network")


BAD_KERNELS = [
    ({"op": "gem"}, "Did you mean gemm"),
    ({"op": "gemm", "m": 1, "n": 1}, "required key 'k' is missing"),
    ({"op": "gemm", "m": 1, "n": 1, "k": 1, "q": 2}, "unknown key 'q'"),
    ({"op": "gemm", "m": -1, "n": 1, "k": 1}, "m must be a positive number"),
    ({"op": "attention", "num_seqs": 1, "context_len": 10, "num_heads": 7, "num_kv_heads": 2}, "num_kv_heads must divide num_heads"),
    ({"op": "gemm", "m": 1, "n": 1, "k": 1, "weights_dtype": "fp9"}, "unknown weights_dtype"),
]


@pytest.mark.parametrize(("case", "says"), BAD_KERNELS)
def test_kernels_refuses_clearly(case: dict[str, Any], says: str) -> None:
    from planner.kernel_cases import kernel_lines

    row = kernel_lines([json.dumps({"id": 1, "gpu": "h100", "engine": "vllm", **case})])[0]
    assert says in row["error"]["message"]


def test_exit_codes() -> None:
    assert draftline("plan", "Qwen/Qwen3-8B", "--gpu", "h100", "--concurrency", "1").returncode == 0
    bad = draftline("plan", "Qwen/Qwen3-8B", "--gpu", "nope")
    assert bad.returncode == 2 and "unknown GPU" in bad.stderr and "Traceback" not in bad.stderr
    none = draftline("plan", "deepseek-ai/DeepSeek-R1", "--gpu", "h100", "--n-gpus", "1")
    assert none.returncode == 3 and "Use more GPUs" in none.stderr
    assert draftline("plan", "--nonsense").returncode == 2
    assert draftline("predict", "missing.jsonl").returncode == 2


@pytest.mark.parametrize("args", [("--help",), ("plan", "--help"), ("predict", "--help"), ("explain", "--help"), ("report", "--help")])
def test_help_works(args: tuple[str, ...]) -> None:
    done = draftline(*args)
    assert done.returncode == 0 and "Usage:" in done.stdout


@pytest.mark.parametrize(
    "args", [("gpus",), ("gpus", "h200"), ("models",), ("models", "Qwen/Qwen3-32B"), ("drafters",), ("drafters", "Qwen/Qwen3-8B")]
)
def test_catalogues_print_text_and_json(args: tuple[str, ...]) -> None:
    assert draftline(*args).stdout.strip()
    data = json.loads(draftline(*args, "--json").stdout)
    assert data
    if args[0] == "drafters":
        assert all("kind" in row for row in data)


def test_explain_shows_operations() -> None:
    done = draftline("explain", stdin=json.dumps(speculative()))
    assert done.returncode == 0
    for word in ("Verification pass", "One draft pass", "attention", "gate_up", "LM head", "of SoL", "Rests on"):
        assert word in done.stdout
    data = json.loads(draftline("explain", "--json", stdin=json.dumps(speculative())).stdout)
    assert abs(sum(r["share"] for r in data["verify"]) - 1.0) < 1e-9


def test_plan_text_has_its_sections() -> None:
    done = draftline("plan", "Qwen/Qwen3-8B", "--gpu", "h100", "--workload", "coding", "--drafter", "eagle3")
    text = done.stdout
    first = text.split("\n\n")[0]
    assert first.startswith("Use EAGLE-3 with D=") and "Expect" in first
    for word in ("Pareto front", "Why", "Where it flips", "Guidelines", "Assumptions"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_plan_json_holds_the_contract() -> None:
    done = draftline("plan", "Qwen/Qwen3-8B", "--gpu", "h100", "--concurrency", "1,16", "--drafter", "eagle3", "--json")
    data = json.loads(done.stdout)
    r, p = data["recommendations"][0], data["points"][0]
    assert {"drafter", "draft_len", "near_optimal", "speedup", "speedup_low", "speedup_high", "prob_best", "expected_regret_frac", "reasons"} <= set(
        r
    )
    assert {"drafter", "draft_len", "feasible", "infeasible_reason", "on_pareto_front", "bound", "num_seqs"} <= set(p)
    assert {b["drafter"] for b in data["break_even"]} == {"eagle3"}
    assert set(data["exports"]) == {"vllm", "sglang", "trtllm", "llamacpp"}
    assert "speculative-config" in data["exports"]["vllm"]["command"]


def test_report_is_one_self_contained_page(tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    done = draftline("report", "Qwen/Qwen3-8B", "--gpu", "h100", "--concurrency", "1,32", "--drafter", "eagle3", "--out", str(target))
    assert done.returncode == 0
    page = target.read_text(encoding="utf-8")
    assert "Use EAGLE-3" in page and "Pareto front" in page and "Assumptions" in page
    tags = re.findall(r"<(?:script|link|img|iframe)[^>]*>", page)
    assert tags and not [t for t in tags if "http" in t], "nothing may be fetched"


def test_a_profile_or_config_that_is_written_anew_counts_at_once(tmp_path: Path) -> None:
    """What was read from a file is kept only as long as the file stays as it was."""
    profile, config = tmp_path / "gpu.json", tmp_path / "config.json"
    model: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    gpu = gpu_to_json(load_gpu("h100-sxm"))

    def tpot_s() -> float:
        case = {**BASE, "model": str(config), "gpu": str(profile)}
        return float(predict(case).tpot_s)

    profile.write_text(json.dumps(gpu))
    config.write_text(json.dumps(model))
    first = tpot_s()
    slower = json.loads(json.dumps(gpu))
    slower["bytes_per_s"]["value"] /= 2
    profile.write_text(json.dumps(slower))
    second = tpot_s()
    assert second > 1.5 * first
    config.write_text(json.dumps({**model, "num_hidden_layers": model["num_hidden_layers"] // 2}))
    assert tpot_s() < 0.75 * second
    profile.write_text(json.dumps(gpu))
    config.write_text(json.dumps(model))
    assert tpot_s() == first


def test_a_plain_case_anchored_on_a_run_with_drafts_prices_that_run_with_its_drafter() -> None:
    """A measured speculative run says how the machine differs from the model; its drafter's cost must not be booked as that difference."""
    base: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "gpu": "h100-sxm", "concurrency": 8, "input_len": 900, "output_len": 300}
    drafts = {"drafter": {"kind": "eagle3"}, "acceptance": {"acceptance_len": 2.85, "at_draft_len": 3}}
    spec = predict({**base, **drafts, "draft_len": 3})
    plain = predict(base)
    measured = [{"tpot_s": 1.4 * spec.tpot_s, "concurrency": 8, "draft_len": 3, "acceptance_len": 2.85}]
    anchored = predict({**base, **drafts, "draft_len": 0, "baseline": measured})
    assert anchored.tpot_s == pytest.approx(1.4 * plain.tpot_s, rel=0.01)
    again = predict({**base, **drafts, "draft_len": 3, "baseline": measured})
    assert again.tpot_s == pytest.approx(1.4 * spec.tpot_s, rel=1e-6)
    assert anchored.capacity_seqs == plain.capacity_seqs
