"""Bad input gets one clear error that says where, what, got, expected, next step - and loses nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from conftest import BASE, config, speculative

from planner.errors import DraftlineError, InfeasibleError
from planner.planning import plan
from planner.prediction import predict_lines, predict_many

NO_CONTEXT = {k: v for k, v in BASE.items() if k != "context_len"}
MANY = {"n_gpus": 8, "tp": 8}

CASES: list[tuple[str, Any, str]] = [
    ("nan concurrency", BASE | {"concurrency": math.nan}, "concurrency: must be a finite number"),
    (
        "infinite rate",
        {k: v for k, v in BASE.items() if k != "concurrency"} | {"request_rate_per_s": math.inf},
        "request_rate_per_s: must be a finite number",
    ),
    ("zero concurrency", BASE | {"concurrency": 0}, "concurrency: input should be greater than or equal to 1; got 0"),
    ("fractional concurrency", BASE | {"concurrency": 2.5}, "concurrency: input should be a valid integer"),
    ("text for a number", BASE | {"concurrency": "8"}, "concurrency: must be a number; got '8'"),
    ("boolean for a number", BASE | {"concurrency": True}, "concurrency: must be a number; got True"),
    ("negative draft length", speculative() | {"draft_len": -1}, "draft_len: input should be greater than or equal to 0; got -1"),
    ("draft length without a drafter", BASE | {"draft_len": 3}, "draft_len is 3 but drafter is null"),
    ("no model", {k: v for k, v in BASE.items() if k != "model"}, "required key 'model' is missing"),
    ("unknown model", BASE | {"model": "Qwen/Qwen3-33B"}, "Did you mean Qwen/Qwen3-32B"),
    ("unknown GPU", BASE | {"gpu": "h1000"}, "unknown GPU; got 'h1000'. Did you mean H100"),
    ("unknown engine", BASE | {"engine": "vlm"}, "Did you mean vllm"),
    ("unknown key", BASE | {"concurency": 4}, "unknown key 'concurency'. Did you mean concurrency"),
    ("unknown key of engine_config", BASE | {"engine_config": {"max_seqs": 4}}, "unknown key 'engine_config.max_seqs'"),
    ("unknown dtype", BASE | {"weights_dtype": "fp7"}, "weights_dtype"),
    ("tp does not divide heads", BASE | {"n_gpus": 3, "tp": 3}, "tp must divide the attention heads; got 'tp 3'; expected a divisor of 64 heads"),
    ("layout contradicts itself", BASE | {"n_gpus": 4, "tp": 2, "dp": 1}, "n_gpus must equal tp x dp x pp; got '4 != 2 x 1 x 1'"),
    ("ep on a dense model", BASE | {**MANY, "ep": 8}, "ep needs experts"),
    ("ep does not divide tp x dp", BASE | {"model": "Qwen/Qwen3-30B-A3B", "n_gpus": 4, "tp": 4, "ep": 3}, "ep must divide tp x dp"),
    ("more stages than layers", BASE | {"n_gpus": 128, "tp": 1, "pp": 128}, "pp exceeds the layers"),
    ("a model that does not fit", BASE | {"model": "deepseek-ai/DeepSeek-R1"}, "weights need"),
    ("a context that does not fit", BASE | {"context_len": 5_000_000}, "one sequence of 5000000 tokens needs"),
    ("both loops", BASE | {"request_rate_per_s": 1.0}, "give exactly one of concurrency (closed loop) and request_rate_per_s (open loop)"),
    ("no load at all", {k: v for k, v in BASE.items() if k != "concurrency"}, "give exactly one of concurrency"),
    ("context and lengths", BASE | {"input_len": 10, "output_len": 10}, "give either context_len (pure decode) or input_len and output_len"),
    ("input without output", NO_CONTEXT | {"input_len": 10}, "input_len and output_len belong together"),
    (
        "rate without lengths",
        {k: v for k, v in BASE.items() if k != "concurrency"} | {"request_rate_per_s": 1.0},
        "an arrival rate needs input_len and output_len",
    ),
    ("more cached than prompt", NO_CONTEXT | {"input_len": 10, "output_len": 10, "cached_input_len": 20}, "cached_input_len 20 exceeds input_len 10"),
    ("unknown drafter kind", speculative(drafter={"kind": "eagel3"}), "Did you mean eagle3"),
    ("drafter with negative layers", speculative(drafter={"kind": "eagle3", "layers": -1}), "layers"),
    ("drafter with NaN parameters", speculative(drafter={"kind": "external", "params": math.nan}), "params"),
    ("AL above 1 + D", speculative(acceptance={"acceptance_len": 9.0, "at_draft_len": 4}), "acceptance_len"),
    ("AL below 1", speculative(acceptance={"acceptance_len": 0.5, "at_draft_len": 4}), "acceptance_len"),
    ("survival above 1", speculative(acceptance={"survival_prob": [1.2, 0.5]}), "survival_prob"),
    ("empty survival", speculative(acceptance={"survival_prob": []}), "survival_prob"),
    ("alpha as a percentage", speculative(acceptance={"alpha": 70}), "alpha"),
    ("unknown workload", speculative(acceptance={"workload": "codding"}), "Did you mean coding"),
    ("two acceptance forms", speculative(acceptance={"alpha": 0.7, "workload": "chat"}), "acceptance"),
    (
        "baseline with both metrics",
        BASE | {"baseline": [{"tpot_s": 0.01, "tokens_per_s": 10, "concurrency": 1}]},
        "give exactly one of tpot_s and tokens_per_s",
    ),
    ("baseline of zero", BASE | {"baseline": [{"tpot_s": 0, "concurrency": 1}]}, "tpot_s"),
    ("a memory fraction above 1", BASE | {"engine_config": {"memory_frac": 90}}, "memory_frac"),
    ("missing config file", BASE | {"model": "no/such/config.json"}, "no/such/config.json"),
    ("a config that is no model", BASE | {"model": {"architectures": ["X"]}}, "hidden_size"),
    ("unknown attention backend", BASE | {"attention_backend": "fa9"}, "fa9"),
    ("a list instead of a case", [1, 2], "each line must be a JSON object"),
    ("no fp8 on Ampere asked for outright", BASE | {"gpu": "a100", "act_dtype": "fp8"}, "no dense fp8 matmul peak"),
]


@pytest.mark.parametrize(("raw", "says"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_nonsense_gets_one_clear_error(raw: Any, says: str) -> None:
    answer = predict_many([raw])[0]
    assert isinstance(answer, DraftlineError), answer
    assert says in str(answer), str(answer)
    assert "Traceback" not in str(answer) and "\n" not in str(answer)


def test_what_does_not_fit_is_infeasible_and_carries_no_throughput() -> None:
    row = predict_lines([json.dumps(BASE | {"model": "deepseek-ai/DeepSeek-R1", "id": "x"})])[0]
    assert row["id"] == "x" and row["error"]["type"] == InfeasibleError.__name__
    assert "tokens_per_s" not in row


def test_a_bad_line_loses_nothing_else() -> None:
    lines = [json.dumps(BASE | {"id": 1}), "{broken", "", json.dumps(BASE | {"id": 2, "gpu": "nope"}), json.dumps(BASE | {"id": 3}), "[]"]
    rows = predict_lines(lines)
    assert [r["id"] for r in rows] == [1, None, 2, 3, None]
    assert "tpot_s" in rows[0] and rows[0]["tpot_s"] == rows[3]["tpot_s"]
    assert "not valid JSON" in rows[1]["error"]["message"] and "unknown GPU" in rows[2]["error"]["message"]


def test_mtp_where_the_checkpoint_has_none() -> None:
    with pytest.raises(DraftlineError, match="declares no MTP"):
        plan("Qwen/Qwen3-32B", "h100", drafters=({"kind": "mtp"},))
    answer = predict_many([speculative(drafter={"kind": "mtp"})])[0]
    assert not isinstance(answer, DraftlineError)
    assert any("declares no MTP" in w for w in answer.warnings)


def test_a_tree_without_acceptance_is_refused() -> None:
    tree = speculative(drafter={"kind": "eagle3", "verify_width": 16}, acceptance=None)
    answer = predict_many([tree])[0]
    assert isinstance(answer, DraftlineError) and "verify_width" in str(answer)
    given = predict_many([speculative(drafter={"kind": "eagle3", "verify_width": 16})])[0]
    assert not isinstance(given, DraftlineError)


def test_plan_that_fits_nowhere_says_so() -> None:
    with pytest.raises(InfeasibleError, match="Use more GPUs"):
        plan("deepseek-ai/DeepSeek-R1", "h100", n_gpus=1)
    with pytest.raises(InfeasibleError, match="no power-of-two number of GPUs"):
        plan(config("deepseek-ai--DeepSeek-V4-Pro"), "l4", weights_dtype="bf16", context_len=(1000,))


def test_plan_rejects_unknown_options() -> None:
    with pytest.raises(DraftlineError, match="unknown option 'max_d'"):
        plan("Qwen/Qwen3-32B", "h100", max_d=3)


@pytest.mark.parametrize("kind", [["eagle3"], {"a": 1}, 7, None])
def test_a_drafter_kind_that_is_no_text_is_refused(kind: object) -> None:
    answer = predict_many([speculative(drafter={"kind": kind})])[0]
    assert isinstance(answer, DraftlineError) and "unknown drafter kind" in str(answer)


def test_a_fault_of_ours_costs_its_own_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import prediction

    whole = prediction._predict_group

    def breaks(dep: Any, asked: Any) -> Any:
        if any(a.case.id == "bad" for a in asked):
            raise ZeroDivisionError("boom")
        return whole(dep, asked)

    monkeypatch.setattr(prediction, "_predict_group", breaks)
    rows = predict_lines([json.dumps(BASE | {"id": i}) for i in (1, "bad", 2)])
    assert "tpot_s" in rows[0] and "tpot_s" in rows[2]
    assert rows[1]["error"]["type"] == "InternalError" and "ZeroDivisionError: boom" in rows[1]["error"]["message"]


def test_json_nested_too_deep_is_one_error() -> None:
    rows = predict_lines(["[" * 100_000, json.dumps(BASE)])
    assert "not valid JSON" in rows[0]["error"]["message"] and "tpot_s" in rows[1]
