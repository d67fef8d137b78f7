"""Traffic: what arrives is served, waiting is counted once, bands of TPOT and speedup belong together, plans keep their word."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import BASE, answers, speculative
from typer.testing import CliRunner

from planner import plan
from planner.bands import Band, band, quotient
from planner.cases import Case
from planner.cli.main import app
from planner.errors import InfeasibleError

LENGTHS = {"input_len": 1024, "output_len": 256}
CLOSED = {k: v for k, v in BASE.items() if k != "context_len"} | LENGTHS
OPEN = {k: v for k, v in CLOSED.items() if k != "concurrency"}


def test_open_loop_serves_what_arrives_until_it_cannot() -> None:
    calm, busy = answers([OPEN | {"request_rate_per_s": r} for r in (1.0, 500.0)])
    assert calm.tokens_per_s == pytest.approx(256.0) and calm.ttft_s is not None
    assert busy.tokens_per_s < 500 * 256 and busy.ttft_s is None
    assert any("grows without bound" in w for w in busy.warnings)


def test_drafts_off_are_plain_decoding() -> None:
    off, named = answers([CLOSED, CLOSED | {"drafter": {"kind": "eagle3"}, "draft_len": 0}])
    assert named.tpot_s == off.tpot_s and named.speedup == 1.0


def test_one_output_token_is_all_waiting() -> None:
    one, two = answers([CLOSED | {"output_len": n} for n in (1, 2)])
    assert one.tokens_per_s < 2.0 * two.tokens_per_s
    assert one.tokens_per_s == pytest.approx(BASE["concurrency"] / one.ttft_s, rel=0.01)  # type: ignore[operator]


def test_a_baseline_among_others_anchors_as_alone() -> None:
    def anchored(c: int, tpot: float) -> dict[str, object]:
        return CLOSED | {"concurrency": c, "baseline": [{"tpot_s": tpot, "concurrency": c}]}

    cases = [anchored(4, 0.02), anchored(16, 0.03), CLOSED]
    together, alone = answers(cases), [answers([c])[0] for c in cases]
    assert [a.tpot_s for a in together] == pytest.approx([a.tpot_s for a in alone])
    assert together[0].tpot_s == pytest.approx(0.02)


def test_the_band_of_tpot_with_drafts_holds_the_doubt_of_the_speedup() -> None:
    off, on = answers([BASE, speculative()])
    width = [math.log(a.tpot_high_s / a.tpot_low_s) for a in (off, on)]
    assert width[1] > width[0]
    got = quotient(Band(-0.2, 0.1), Band(-0.1, 0.3))
    assert (got.low + got.high) / 2 == pytest.approx(-0.05 - 0.1)
    assert got.high - got.low == pytest.approx(np.hypot(0.3, 0.4))
    assert band("speedup", "default").high > 0


def test_weights_unpacked_in_the_kernel_multiply_slower() -> None:
    from planner.deployment import resolve

    dep = resolve(Case(**(BASE | {"weights_dtype": "int4"})))
    wide = dep.machine.gemm_fit("bf16", "bf16", False)
    packed = dep.machine.gemm_fit("int4", "bf16", False)
    assert packed.flop_per_s < wide.flop_per_s


def test_a_plan_by_latency_says_both_gains() -> None:
    r = plan("Qwen/Qwen3-32B", "h100", concurrency=(8,), metric="tpot", drafters=({"kind": "eagle3"},)).recommendations[0]
    point = plan("Qwen/Qwen3-32B", "h100", concurrency=(8,), drafters=({"kind": "eagle3"},)).points
    chosen = next(p for p in point if p["drafter"] == "eagle3" and p["draft_len"] == r["draft_len"])
    assert r["speedup"] == pytest.approx(chosen["speedup"])
    off = next(p for p in point if p["drafter"] is None)
    assert r["tpot_speedup"] == pytest.approx(off["tpot_s"] / chosen["tpot_s"])


def test_engine_settings_carry_the_layout() -> None:
    exports = plan("deepseek-ai/DeepSeek-V3", "h200", n_gpus=8, tp=1, dp=8, ep=8, kv_dtype="fp8", concurrency=(64,)).exports
    assert exports is not None
    vllm, sglang, trtllm = exports["vllm"]["command"], exports["sglang"]["command"], exports["trtllm"]["config"]
    assert "--data-parallel-size 8 --enable-expert-parallel --kv-cache-dtype fp8 --max-num-seqs 8" in vllm
    assert "--tp 8 --dp 8 --enable-dp-attention --ep 8 --kv-cache-dtype fp8_e4m3" in sglang
    assert trtllm["enable_attention_dp"] and trtllm["max_batch_size"] == 8 and trtllm["moe_expert_parallel_size"] == 8


def test_a_plan_where_nothing_meets_the_slo_exits_with_three() -> None:
    done = CliRunner().invoke(app, ["plan", "Qwen/Qwen3-32B", "--gpu", "h100", "--slo-tpot-ms", "0.1", "--concurrency", "8"])
    assert isinstance(done.exception, InfeasibleError) and "no arm meets the SLO" in str(done.exception)
    assert "Nothing meets the request" in done.stdout
