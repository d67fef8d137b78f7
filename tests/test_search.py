"""Enumeration, the Pareto front and the choice under doubt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.planning import Plan, plan
from planner.prediction import predict
from planner.search import Cell, choose, pareto_front


def oracle(per_user: np.ndarray, per_gpu: np.ndarray) -> list[bool]:
    """O(n^2): nobody is at least as good on both and better on one; of equal points the first stays."""
    out = []
    for i in range(len(per_user)):
        beaten = any(
            per_user[j] >= per_user[i] and per_gpu[j] >= per_gpu[i] and ((per_user[j], per_gpu[j]) != (per_user[i], per_gpu[i]) or j < i)
            for j in range(len(per_user))
            if j != i
        )
        out.append(not beaten)
    return out


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40))
def test_pareto_front_equals_the_oracle(points: list[tuple[int, int]]) -> None:
    x, y = (np.asarray(v, dtype=np.float64) for v in zip(*points, strict=True))
    assert pareto_front(x, y).tolist() == oracle(x, y)


def cell(value: list[float], *, doubt: float = 0.0) -> Cell:
    n = len(value)
    zero = np.zeros(n)
    return Cell(
        np.asarray([0] + [1] * (n - 1)),
        np.arange(n),
        np.asarray(value),
        zero + 0.1,
        zero + 1.0,
        zero + 0.1,
        np.ones(n) + 0.5 * np.arange(n),
        zero + doubt,
        zero + 1.0,
        np.ones(n, dtype=np.bool_),
    )


def test_choice_is_the_best_where_nothing_is_doubtful() -> None:
    made = choose(cell([1.0, 1.4, 1.2]), 0)
    assert made is not None and made.chosen == 1 and made.prob_best > 0.8 and made.expected_regret_frac < 0.02


def test_near_optimal_is_within_two_percent() -> None:
    chosen = choose(cell([1.0, 1.40, 1.39, 1.30]), 0)
    assert chosen is not None and chosen.near_optimal.tolist() == [1, 2]


def test_nothing_allowed_gives_no_choice() -> None:
    c = cell([1.0, 2.0])._replace(allowed=np.zeros(2, dtype=np.bool_))
    assert choose(c, 0) is None


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(
        "Qwen/Qwen3-8B", "h100", workload="coding", concurrency=(1, 32, 256), max_draft_len=8, drafters=({"kind": "eagle3"}, {"kind": "dflash"})
    )


def test_every_combination_is_a_point(small: Plan) -> None:
    assert len(small.points) == 3 * (1 + 8 + 8)
    keys = {(p["drafter"], p["draft_len"], p["concurrency"]) for p in small.points}
    assert len(keys) == len(small.points)


def test_off_is_always_a_candidate(small: Plan) -> None:
    assert {p["concurrency"] for p in small.points if p["drafter"] is None} == {1, 32, 256}


def test_recommendation_is_near_the_best_point(small: Plan) -> None:
    for r in small.recommendations:
        here = [p for p in small.points if p["concurrency"] == r["concurrency"] and p["feasible"]]
        best = max(p["tokens_per_s"] for p in here)
        mine = next(p for p in here if (p["drafter"], p["draft_len"]) == (r["drafter"], r["draft_len"]))
        assert mine["tokens_per_s"] >= 0.97 * best
        assert r["draft_len"] in r["near_optimal"]
        assert r["speedup_low"] <= r["speedup"] <= r["speedup_high"]


def test_plan_points_equal_predict(small: Plan) -> None:
    p = next(x for x in small.points if x["drafter"] == "eagle3" and x["draft_len"] == 3 and x["concurrency"] == 32)
    single = predict(
        {
            "model": "Qwen/Qwen3-8B",
            "gpu": "h100",
            "n_gpus": 1,
            "tp": 1,
            "concurrency": 32,
            "input_len": 1024,
            "output_len": 1024,
            "drafter": {"kind": "eagle3"},
            "draft_len": 3,
            "acceptance": {"acceptance_len": p["acceptance_len"], "at_draft_len": 3},
        }
    )
    for key in ("tpot_s", "round_s", "tokens_per_s", "speedup", "target_step_s"):
        assert getattr(single, key) == pytest.approx(p[key], rel=1e-9)


def test_front_points_are_feasible_and_exist(small: Plan) -> None:
    front = [p for p in small.points if p["on_pareto_front"]]
    assert front and all(p["feasible"] for p in front)


def test_to_frame_and_to_dict_hold_the_points(small: Plan) -> None:
    assert len(small.to_frame()) == len(small.points)
    data = small.to_dict()
    assert data["schema_version"] == 1
    wanted = {"schema_version", "inputs", "points", "recommendations", "guidelines", "break_even", "schedule", "exports", "assumptions", "warnings"}
    assert wanted <= set(data)


def test_slo_filters_what_may_be_recommended() -> None:
    strict = plan("Qwen/Qwen3-8B", "h100", concurrency=(64,), slo_tpot_s=1e-4, drafters=({"kind": "eagle3"},))
    assert strict.recommendations[0]["draft_len"] is None and "SLO" in strict.recommendations[0]["reasons"][0]
    loose: Any = plan("Qwen/Qwen3-8B", "h100", concurrency=(64,), slo_tpot_s=1.0, drafters=({"kind": "eagle3"},))
    assert loose.recommendations[0]["draft_len"] is not None


def test_what_does_not_fit_has_no_throughput() -> None:
    wide = plan("Qwen/Qwen3-8B", "h100", context_len=(1024, 300_000), concurrency=(1,), drafters=({"kind": "external", "params": 4e9},))
    out = [x for x in wide.points if not x["feasible"]]
    assert out and all(x["tokens_per_s"] is None and x["tpot_s"] is None and x["infeasible_reason"] for x in out)


def test_break_even_lies_where_the_gain_changes_sign() -> None:
    p = plan(
        "Qwen/Qwen3-8B",
        "h200",
        concurrency=(1, 16, 64, 256, 1024),
        drafters=({"kind": "external", "params": 2e9},),
        workload="chat",
        input_len=128,
        output_len=256,
    )
    row = p.break_even[0]
    best = {c: max(x["speedup"] for x in p.points if x["concurrency"] == c and x["drafter"]) for c in (1, 16, 64, 256, 1024)}
    crossing = [c for c, s in best.items() if s <= 1.0]
    if row["always_loses"]:
        assert crossing[0] == 1
    elif row["concurrency"] is None:
        assert not crossing
    else:
        before = max(c for c in best if c < crossing[0])
        assert before <= row["concurrency"] <= crossing[0]


def test_schedule_is_contiguous_and_falls_with_batch(small: Plan) -> None:
    assert small.schedule is not None
    ranges = small.schedule["ranges"]
    assert ranges[0][0] == 1
    assert all(b[0] == a[1] + 1 for a, b in zip(ranges, ranges[1:], strict=False))
    assert ranges[0][2] >= ranges[-1][2]


def test_five_guidelines_with_numbers(small: Plan) -> None:
    assert [g["id"] for g in small.guidelines] == [1, 2, 3, 4, 5]
    assert all(g["text"] for g in small.guidelines)
    assert small.guidelines[1]["numbers"]["source_rule_draft_len"] == 128 // 4 - 1


def test_the_source_rule_for_nemotron_ultra_gives_three() -> None:
    """64 query and 2 KV heads (G = 32): 128/32 - 1 = 3 (published.md, cross-check of guideline 2)."""
    from conftest import config

    p = plan(config("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4"), "b200", n_gpus=8, dp=8, tp=1, ep=8, concurrency=(8,), context_len=(131072,))
    rule = p.guidelines[1]["numbers"]
    assert rule["gqa_group_size"] == 32 and rule["source_rule_draft_len"] == 3


def test_all_lists_what_is_hypothetical_or_needs_acceptance() -> None:
    p = plan("Qwen/Qwen3-32B", "h100", concurrency=(1,))
    status = {d["kind"]: d["status"] for d in p.drafters}
    assert status["eagle3"] == "evaluated" and status["ngram"] == "listed" and status["mtp"] == "hypothetical"
    given = plan("Qwen/Qwen3-32B", "h100", concurrency=(1,), acceptance={"ngram": {"acceptance_len": 2.0, "at_draft_len": 4}})
    assert {d["kind"]: d["status"] for d in given.drafters}["ngram"] == "evaluated"


def test_a_baseline_narrows_the_band() -> None:
    free = plan("Qwen/Qwen3-8B", "h100", concurrency=(1,), drafters=({"kind": "eagle3"},))
    tied = plan("Qwen/Qwen3-8B", "h100", concurrency=(1,), drafters=({"kind": "eagle3"},), baseline=({"tpot_s": 0.009, "concurrency": 1},))
    off, loose = (next(x for x in p.points if x["drafter"] is None) for p in (tied, free))
    assert off["tpot_high_s"] / off["tpot_low_s"] < loose["tpot_high_s"] / loose["tpot_low_s"]
    assert off["tpot_s"] == pytest.approx(0.009, rel=1e-6)


def test_the_recommendation_names_a_gemm_step_that_decides() -> None:
    """CUTLASS fp8 on Hopper jumps above 64, 128 and 256 rows; B(1 + D) on such an edge is worth a sentence."""
    from conftest import BASE

    from planner.cases import Case
    from planner.deployment import resolve
    from planner.edges import edges_of, gemm_steps

    dep = resolve(Case(**(BASE | {"gpu": "h200"})))
    steps = dict(gemm_steps(dep))
    assert steps[128] > 1.2, steps
    assert "D=3 keeps 32 x 4 = 128 GEMM rows under the step at 128" in edges_of(dep, 32, 3)[0]
    assert "D=4 has 160 GEMM rows, past the step at 128" in edges_of(dep, 32, 4)[0]


def test_a_plan_anchored_on_a_run_with_drafts_prices_that_run_with_its_drafter() -> None:
    base: dict[str, Any] = {"concurrency": (8,), "input_len": 900, "output_len": 300, "acceptance": {"acceptance_len": 2.85, "at_draft_len": 3}}
    drafters = ({"kind": "eagle3"},)
    free = plan("Qwen/Qwen3-8B", "h100", drafters=drafters, **base)
    point = next(p for p in free.points if p["drafter"] == "eagle3" and p["draft_len"] == 3)
    measured = ({"tpot_s": 1.3 * point["tpot_s"], "concurrency": 8, "draft_len": 3, "acceptance_len": point["acceptance_len"]},)
    anchored = plan("Qwen/Qwen3-8B", "h100", drafters=drafters, baseline=measured, **base)
    for p, q in zip(free.points, anchored.points, strict=True):
        assert q["tpot_s"] == pytest.approx(1.3 * p["tpot_s"], rel=1e-6)
    with pytest.raises(InputError, match="the one drafter that it ran with"):
        plan("Qwen/Qwen3-8B", "h100", baseline=measured, **base)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "dspark"])
def test_drafter_heads_run_on_gpus_without_bf16(kind: str) -> None:
    """What a head never quantises computes in the device's own 16-bit dtype: fp16 on Volta."""
    answer = plan("Qwen/Qwen3-8B", "v100", n_gpus=2, drafters=({"kind": kind},), concurrency=(1,))
    assert any(p["drafter"] == kind and p["feasible"] for p in answer.points)
