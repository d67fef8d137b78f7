"""Does the model respond to what it is given, in the right direction and by the right size? DESIGN sections 3 and 7."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import BASE, answers, config, speculative
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_profiles.load import load_gpu
from planner.cases import Case, Prediction
from planner.deployment import resolve
from planner.memory import cache_bytes, state_bytes
from planner.models.read import read_model
from planner.models.spec import KvAttention, LatentAttention
from planner.ops import KvOp, LatentOp, Network, gqa_group_size, kv_heads_per_rank
from planner.round import round_time, step_ops

DENSE, MOE, MLA = "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-R1"


def tpot(**changes: object) -> float:
    return answers([BASE | changes])[0].tpot_s


def spec(**changes: object) -> Prediction:
    return answers([speculative(**changes)])[0]  # type: ignore[arg-type]


# ---------------------------------------------------------------- directions
def test_more_context_costs() -> None:
    assert tpot(context_len=32768) > 1.05 * tpot(context_len=4096)


def test_more_bandwidth_helps() -> None:
    assert tpot(gpu="h200-sxm") < 0.85 * tpot()


def test_older_gpu_is_slower() -> None:
    two = {"n_gpus": 2, "tp": 2, "weights_dtype": "bf16", "kv_dtype": "bf16"}
    assert tpot(gpu="a100-sxm", **two) > tpot(**two)


def test_two_gpus_are_faster_but_not_twice() -> None:
    assert 0.5 * tpot() < tpot(n_gpus=2, tp=2) < 0.85 * tpot()


def test_sixteen_bit_weights_are_slower_than_eight() -> None:
    assert tpot(n_gpus=2, tp=2, weights_dtype="bf16") > 1.2 * tpot(n_gpus=2, tp=2)


def test_gain_falls_with_batch() -> None:
    low, high = spec(concurrency=1).speedup, spec(concurrency=128, context_len=1024).speedup
    assert low > high > 0


def test_same_acceptance_from_a_longer_draft_loses() -> None:
    assert spec(draft_len=12, acceptance_len=3.0).speedup < spec().speedup


def test_heavier_drafters_lose() -> None:
    one = spec().speedup
    assert spec(drafter={"kind": "eagle3", "layers": 8}).speedup < 0.95 * one
    assert spec(drafter={"kind": "external", "params": 1.5e9}).speedup < one
    assert spec(drafter={"kind": "ngram"}).speedup > one


def test_one_pass_drafting_beats_sequential_at_twelve() -> None:
    block = spec(drafter={"kind": "dflash", "layers": 5, "block": 16}, draft_len=12)
    assert block.speedup > spec(draft_len=12).speedup


def test_drafter_on_its_own_device_costs_no_target_memory_but_a_link() -> None:
    here = spec(drafter={"kind": "external", "params": 1.5e9})
    away = spec(drafter={"kind": "external", "params": 1.5e9, "gpu": "h100-sxm", "n_gpus": 1})
    assert away.capacity_seqs > here.capacity_seqs
    assert away.draft_s > here.draft_s
    assert away.tokens_per_s_per_gpu == pytest.approx(away.tokens_per_s / 2)


def test_sparse_moe_verify_is_dearer_at_batch_one() -> None:
    short = {"concurrency": 1, "context_len": 1024}
    moe, dense = spec(model=MOE, **short), spec(model=DENSE, **short)
    assert moe.verify_s / moe.target_step_s > 1.15 * dense.verify_s / dense.target_step_s


def test_moe_verification_saturates_once_all_experts_are_read() -> None:
    def growth(concurrency: int) -> float:
        p = spec(model=MOE, concurrency=concurrency, context_len=512, gpu="h200")
        return p.verify_s / p.target_step_s

    assert growth(1) > growth(64)


def test_kv_bound_serving_keeps_its_gain_and_compute_bound_loses_it() -> None:
    four = {"n_gpus": 4, "tp": 4}
    assert spec(concurrency=16, context_len=32768, **four).speedup > 1.2 * spec(concurrency=256, context_len=512, **four).speedup


def test_off_is_the_unit() -> None:
    assert answers([BASE])[0].speedup == pytest.approx(1.0, abs=1e-12)


def test_a_zero_tier_inside_a_schedule_is_taxed() -> None:
    taxed = answers([BASE | {"k0_tier": True}])[0]
    assert 1.066 <= taxed.round_s / answers([BASE])[0].round_s <= 1.216
    assert taxed.speedup < 1.0


def test_sglang_caps_running_requests_when_speculating() -> None:
    p = spec(engine="sglang", concurrency=64)
    assert p.num_seqs == 48 and any("48 of 64" in w for w in p.warnings)
    assert answers([BASE | {"engine": "sglang", "concurrency": 64}])[0].num_seqs == 64
    assert spec(engine="sglang", concurrency=64, context_len=1024, engine_config={"max_num_seqs": 64}).num_seqs == 64


def test_a_pass_beyond_the_largest_graph_runs_eagerly_and_says_so() -> None:
    small = {"model": "Qwen/Qwen3-8B", "gpu": "b200"}  # launch-bound without a graph
    inside = spec(engine_config={"cuda_graph_max_tokens": 40}, **small)
    outside = spec(engine_config={"cuda_graph_max_tokens": 39}, **small)
    assert outside.verify_s > inside.verify_s
    assert any("CUDA graph" in w for w in outside.warnings) and not any("CUDA graph" in w for w in inside.warnings)


def test_pard_verifies_twice_its_drafts() -> None:
    dep = resolve(Case(**speculative(drafter={"kind": "pard", "params": 6e8})))
    from planner.round import verify_rows

    assert float(verify_rows(dep, 4.0)) == 8.0


def test_prefill_shares_the_steps_only_when_aggregated() -> None:
    lengths = {"context_len": None, "input_len": 8192, "output_len": 512, "concurrency": 16}
    agg, split = (answers([{k: v for k, v in (BASE | lengths | {"mode": m}).items() if v is not None}])[0] for m in ("agg", "disagg"))
    assert agg.tpot_s > 1.1 * split.tpot_s
    assert split.ttft_s is None and agg.ttft_s is not None and agg.ttft_s > 0


def test_a_cached_prompt_is_not_prefilled() -> None:
    lengths = {"input_len": 8192, "output_len": 512, "concurrency": 16}
    base = {k: v for k, v in BASE.items() if k != "context_len"} | lengths
    cold, warm = answers([base, base | {"cached_input_len": 8000}])
    assert warm.ttft_s is not None and cold.ttft_s is not None
    assert warm.ttft_s < 0.5 * cold.ttft_s and warm.tpot_s < cold.tpot_s


def test_open_loop_obeys_littles_law() -> None:
    base = {k: v for k, v in BASE.items() if k not in ("context_len", "concurrency")} | {"input_len": 1024, "output_len": 256}
    p = answers([base | {"request_rate_per_s": 2.0}])[0]
    assert p.ttft_s is not None
    lasting = p.ttft_s + 255 * p.tpot_s
    assert p.num_seqs == pytest.approx(2.0 * lasting, abs=1.0)
    assert p.tokens_per_s == pytest.approx(2.0 * 256, rel=0.12)
    flooded = answers([base | {"request_rate_per_s": 500.0}])[0]
    assert any("exceeds what the deployment serves" in w for w in flooded.warnings)


def test_speculation_lets_an_open_loop_run_fewer_requests_at_once() -> None:
    base = {k: v for k, v in speculative().items() if k not in ("context_len", "concurrency")} | {"input_len": 1024, "output_len": 512}
    on, off = answers([base | {"request_rate_per_s": 1.0}, {**base, "request_rate_per_s": 1.0, "draft_len": 0, "drafter": None, "acceptance": None}])
    assert on.num_seqs < off.num_seqs


def test_memory_limits_what_runs_and_the_rest_queues() -> None:
    p = answers([BASE | {"concurrency": 512, "context_len": 16384}])[0]
    assert p.num_seqs == p.capacity_seqs < 512
    assert any("queue" in w for w in p.warnings)


def test_look_ahead_slots_and_draft_cache_lower_the_capacity() -> None:
    plain, drafting = answers([BASE])[0].capacity_seqs, spec().capacity_seqs
    assert drafting < plain


def test_a_baseline_anchors_both_sides_alike() -> None:
    measured = 2.0 * tpot(concurrency=1)
    anchored_off, anchored_on = answers(
        [
            BASE | {"concurrency": 1, "baseline": [{"tpot_s": measured, "concurrency": 1}]},
            speculative(concurrency=1, baseline=[{"tpot_s": measured, "concurrency": 1}]),
        ]
    )
    assert anchored_off.tpot_s == pytest.approx(measured, rel=1e-6)
    assert anchored_on.speedup == pytest.approx(anchored_on.tokens_per_s / anchored_off.tokens_per_s, rel=1e-9)
    free = answers([BASE | {"concurrency": 1}])[0]
    width = [math.log(p.tpot_high_s / p.tpot_low_s) for p in (anchored_off, free)]
    assert width[0] < 0.7 * width[1]


# ---------------------------------------------------------------- consistency
ALL_KINDS = ("external", "eagle3", "mtp", "dflash", "dspark", "pard", "ngram", "suffix")


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_a_round_is_its_parts_and_speedup_is_a_ratio(kind: str, draft_len: int) -> None:
    on, off = answers([speculative(draft_len, 1.0 + draft_len / 2, drafter={"kind": kind}), BASE])
    assert on.round_s == pytest.approx(on.draft_s + on.verify_s + on.overhead_s, rel=1e-12)
    assert on.speedup == pytest.approx(on.tokens_per_s / off.tokens_per_s, rel=1e-9)
    assert on.tpot_low_s <= on.tpot_s <= on.tpot_high_s and on.speedup_low <= on.speedup <= on.speedup_high
    assert on.target_step_s == pytest.approx(off.round_s, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 12), st.integers(64, 60000)), min_size=2, max_size=6))
def test_scalars_equal_the_grid(points: list[tuple[int, int, int]]) -> None:
    dep = resolve(Case(**speculative()))
    n, d, c = (np.asarray(x, dtype=np.float64) for x in zip(*points, strict=True))
    together = round_time(dep, n, c, d).round_s
    for i, value in enumerate(together):
        assert float(round_time(dep, n[i], c[i], d[i]).round_s) == pytest.approx(float(value), rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(128, 40000))
def test_draft_len_zero_is_the_baseline(concurrency: int, context: int) -> None:
    a, b = answers(
        [
            BASE | {"concurrency": concurrency, "context_len": context},
            BASE | {"concurrency": concurrency, "context_len": context, "drafter": {"kind": "eagle3"}, "draft_len": 0},
        ]
    )
    if a.num_seqs == b.num_seqs:
        assert a.verify_s == pytest.approx(b.verify_s, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.floats(1.1, 4.0))
def test_time_falls_with_bandwidth_and_peak_and_units_cancel(factor: float) -> None:
    """Scaling bytes and bytes/s together leaves time unchanged: a unit slip would break it."""
    from dataclasses import replace

    from planner.ops import Gemm, VectorOp
    from planner.roofline import Machine

    gpu = load_gpu("h100-sxm")
    dep = resolve(Case(**BASE))
    fast = Machine(replace(gpu, id="fast", bytes_per_s=gpu.bytes_per_s * factor), dep.engine)
    strong = Machine(replace(gpu, id="strong", peak_flop_per_s={k: v * factor for k, v in gpu.peak_flop_per_s.items()}), dep.engine)
    gemm = Gemm("g", 4096.0, 8192, 8192, 1, "bf16", "bf16")
    thin = Gemm("g", 1.0, 8192, 8192, 1, "bf16", "bf16")
    now = dep.machine
    assert float(fast.op_time(thin).time_s) < float(now.op_time(thin).time_s)
    assert float(strong.op_time(gemm).time_s) < float(now.op_time(gemm).time_s)
    moved = VectorOp("v", 1e9, 1)
    more = VectorOp("v", 1e9 * factor, 1)
    assert float(fast.op_time(more).time_s) == pytest.approx(float(now.op_time(moved).time_s), rel=1e-9)


# ---------------------------------------------------------------- goldens that trip most tools
def test_group_size_is_per_rank_and_kv_heads_replicate_beyond_tp() -> None:
    ultra = read_model(config("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"))
    core = next(c for c, _ in ultra.attention_cores() if isinstance(c, KvAttention))
    assert (core.num_heads, core.num_kv_heads) == (64, 2)
    assert gqa_group_size(64, 2, 8) == 8
    qwen = read_model(config("Qwen--Qwen3.5-397B-A17B"))
    core = next(c for c, _ in qwen.attention_cores() if isinstance(c, KvAttention))
    assert (core.num_heads, core.num_kv_heads) == (32, 2)
    assert gqa_group_size(32, 2, 8) == 4
    net = Network.of(qwen)
    sizes = {tp: float(cache_bytes(net, tp, "bf16", context_len=1000.0)) for tp in (1, 2, 4, 8)}
    assert sizes[1] == 2 * sizes[2] and sizes[2] == sizes[4] == sizes[8]
    assert kv_heads_per_rank(2, 8) == 1


def test_mla_intensity_at_128_heads_is_242_flop_per_byte() -> None:
    """2R(2r + d)/(r + d) per latent element, R = 128, r = 512, d = 64, two bytes an element: 241.8."""
    r1 = read_model(config("deepseek-ai--DeepSeek-R1"))
    core = next(c for c, _ in r1.attention_cores() if isinstance(c, LatentAttention))
    op = LatentOp("MLA", core, 1.0, 1.0, 1e9, core.num_heads, "bf16", "bf16", 1)
    assert float(op.flop) / float(op.bytes) == pytest.approx(241.8, abs=0.1)
    assert float(op.flop) / float(op.bytes) > load_gpu("h200").ridge_flop_per_byte("bf16")


def test_dense_attention_reads_kv_once_and_sparse_gathers_per_query() -> None:
    def kv_bytes(model: str, query: float) -> float:
        dep = resolve(Case(model=config(model), gpu="b200", n_gpus=8, tp=8, concurrency=1, context_len=65536))
        ops = [op for op in step_ops(dep, 1.0, query, 65536.0) if isinstance(op, KvOp | LatentOp)]
        return sum(float(op.bytes) * op.count for op in ops)

    assert kv_bytes("Qwen--Qwen3-32B", 4.0) / kv_bytes("Qwen--Qwen3-32B", 1.0) < 1.01
    v32 = read_model(config("deepseek-ai--DeepSeek-V3.2"))
    core = next(c for c, _ in v32.attention_cores() if isinstance(c, LatentAttention))
    assert core.sparse_topk == 2048
    one, four = (LatentOp("MLA", core, 1.0, q, 65536.0, 16, "bf16", "bf16", 1) for q in (1.0, 4.0))
    gathered = [float(op.bytes) - 65536.0 * core.index_kv_per_token for op in (one, four)]
    assert gathered[1] == pytest.approx(4 * gathered[0], rel=0.01)


def test_gqa_intensity_is_two_r_flop_per_element() -> None:
    """2 G (1 + D) FLOP per KV element (DESIGN section 3): R FLOP/byte at 16 bit, 2R at 8 bit."""
    core = KvAttention(64, 8, 128, 128)
    for query in (1.0, 4.0):
        for dtype, factor in (("bf16", 1.0), ("fp8", 2.0)):
            op = KvOp("a", core, 1.0, query, 1e8, 64, 8, dtype, "bf16", 1)
            assert float(op.flop) / float(op.bytes) == pytest.approx(8 * query * factor, rel=1e-3)


def test_rollback_keeps_one_state_per_drafted_token() -> None:
    """189 MB per state of the 397B hybrid (DESIGN section 3): 45 gated-delta layers of 64 x 128 x 128 float32 elements plus convolution."""
    net = Network.of(read_model(config("Qwen--Qwen3.5-397B-A17B")))
    assert state_bytes(net, 1, None) == pytest.approx(189e6, rel=0.05)
    dep = resolve(Case(model=config("Qwen--Qwen3.5-397B-A17B"), gpu="b200", n_gpus=8, tp=8, concurrency=1, context_len=1000))
    growth = float(dep.bytes_per_seq(1000, 3) - dep.bytes_per_seq(1000, 0))
    assert growth >= 3 * state_bytes(net, 8, None)


def test_windows_cap_the_cache() -> None:
    net = Network.of(read_model(config("google--gemma-4-26B-A4B")))
    long, longer = (float(cache_bytes(net, 1, "bf16", context_len=c)) for c in (65536.0, 131072.0))
    full = next(core for layer, _ in net.groups if isinstance(core := layer.attention, KvAttention) and core.window is None)
    elements = full.num_kv_heads * (full.head_dim if full.k_is_v else full.head_dim + full.v_head_dim)
    assert (longer - long) / 65536 == pytest.approx(5 * elements * 2)


def test_mla_latent_is_whole_on_every_rank() -> None:
    net = Network.of(read_model(config("deepseek-ai--DeepSeek-R1")))
    assert float(cache_bytes(net, 1, "bf16", context_len=1.0)) == float(cache_bytes(net, 8, "bf16", context_len=1.0)) == 61 * 576 * 2


def test_all_to_all_appears_only_with_data_parallel_attention() -> None:
    def names(**layout: int) -> set[str]:
        dep = resolve(Case(model=config("deepseek-ai--DeepSeek-R1"), gpu="h200", n_gpus=8, concurrency=64, context_len=4096, **layout))
        return {op.name for op in step_ops(dep, 8.0, 1.0, 4096.0)}

    assert "dispatch" in names(tp=1, dp=8, ep=8) and "all-reduce" not in names(tp=1, dp=8, ep=8)
    assert "dispatch" not in names(tp=8, ep=8) and "all-reduce" in names(tp=8, ep=8)


def test_weight_only_quantisation_computes_in_sixteen_bit() -> None:
    dep = resolve(Case(**(BASE | {"weights_dtype": "int4"})))
    assert dep.dtypes.act["int4"] == "bf16"
    blackwell = resolve(Case(**(BASE | {"weights_dtype": "nvfp4", "gpu": "b200"})))
    assert blackwell.dtypes.act["nvfp4"] == "nvfp4"
    ampere = resolve(Case(**(BASE | {"gpu": "a100"})))
    assert ampere.dtypes.act["fp8"] == "bf16"


def test_bound_names_what_binds() -> None:
    assert answers([BASE | {"concurrency": 1}])[0].bound == "memory"
    assert math.isfinite(answers([BASE])[0].tpot_s)
