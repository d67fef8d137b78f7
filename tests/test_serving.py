"""Traffic: what arrives is served, waiting is counted once, bands of TPOT and speedup belong together, plans keep their word."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import BASE, answers, speculative
from typer.testing import CliRunner

from planner import plan, serving
from planner.bands import Band, band, quotient
from planner.cases import Case
from planner.cli.main import app
from planner.deployment import resolve
from planner.errors import InfeasibleError
from planner.serving import Anchor, Served, Traffic, serve

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


# ---- large grids
SPREAD = {"model": "deepseek-ai/DeepSeek-V3", "gpu": "h200", "n_gpus": 8, "tp": 1, "dp": 8, "ep": 8, "kv_dtype": "fp8"}
CONCURRENCY, DRAFT_LEN = np.geomspace(1, 600, 24).round()[:, None, None], np.arange(9.0)[None, :, None]
CONTEXT = np.linspace(300.5, 50000, 30)
"""With the two above 6,480 points. Batches are bound by memory in part, and prompts do not divide into whole chunks."""
GRIDS = pytest.mark.parametrize(
    "asked",
    [
        {"model": "Qwen/Qwen3-30B-A3B", "gpu": "h100", "drafter": {"kind": "eagle3"}},
        {"model": "Qwen/Qwen3-32B", "gpu": "h200", "drafter": {"kind": "external", "model": "Qwen/Qwen3-0.6B"}},
        {"model": "Qwen/Qwen3-8B", "gpu": "h100", "drafter": {"kind": "dspark"}},
        {"model": "Qwen/Qwen3-8B", "gpu": "h100", "drafter": {"kind": "pard"}},
        {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "gpu": "h200", "n_gpus": 4, "drafter": {"kind": "ngram"}},
        SPREAD | {"drafter": {"kind": "mtp"}},
    ],
    ids=lambda asked: asked["drafter"]["kind"],
)
LENGTHS_OR_CONTEXT = pytest.mark.parametrize(
    "traffic", [Traffic.at_context(CONTEXT), Traffic.of_lengths(CONTEXT, np.where(CONTEXT > 20000, 1.0, 300.0))], ids=["context", "lengths"]
)


def arrays(s: Served) -> list[tuple[str, np.ndarray]]:
    named = [(n, x) for n, x in s._asdict().items() if n != "round"]
    named += [(n, x) for n, x in s.round._asdict().items() if n != "parts"]
    return [(n, np.broadcast_to(x, s.tpot_s.shape)) for n, x in (*named, *s.round.parts._asdict().items())]


@GRIDS
@LENGTHS_OR_CONTEXT
def test_slabs_equal_the_whole(asked: dict[str, object], traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    dep = resolve(Case(**(asked | {"concurrency": 1, "context_len": 1, "draft_len": 1})))
    anchor = Anchor(np.linspace(0.9, 1.1, 30))

    def at_once(points: int) -> Served:
        monkeypatch.setattr(serving, "SLAB", points)
        return serve(dep, concurrency=CONCURRENCY, draft_len=DRAFT_LEN, acceptance_len=1.0 + DRAFT_LEN / 2.0, traffic=traffic, anchor=anchor)

    whole = arrays(at_once(10**9))
    for points in (1000, 100):  # cut along concurrency; a step of which is larger than the slab
        for (name, x), (_, y) in zip(whole, arrays(at_once(points)), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-18, err_msg=name)


@GRIDS
@LENGTHS_OR_CONTEXT
def test_points_equal_the_large_grid(asked: dict[str, object], traffic: Traffic) -> None:
    dep = resolve(Case(**(asked | {"concurrency": 1, "context_len": 1, "draft_len": 1})))
    grid = dict(arrays(serve(dep, concurrency=CONCURRENCY, draft_len=DRAFT_LEN, acceptance_len=1.0 + DRAFT_LEN / 2.0, traffic=traffic)))
    for i, j, k in np.random.default_rng(0).integers((24, 9, 30), size=(12, 3)):
        lengths = (float(np.asarray(x)[k]) for x in (traffic.context_len, traffic.input_len, traffic.output_len))
        d = float(j)
        point = serve(dep, concurrency=float(CONCURRENCY[i, 0, 0]), draft_len=d, acceptance_len=1.0 + d / 2.0, traffic=Traffic(*lengths))
        for name, x in arrays(point):
            np.testing.assert_allclose(x, grid[name][i, j, k], rtol=1e-12, atol=1e-18, err_msg=name)
