"""Kernel models and their fits: physics that must hold, accuracy on packaged rows, fits re-made from raw data."""

from __future__ import annotations

import csv
import dataclasses
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_profiles.fits import kernel_fit
from gpu_profiles.load import load_attention_kernel, load_engine, load_gpu
from gpu_profiles.schema import GpuProfile
from planner.calibrate.kernel_models import MOE, SPECS, STREAM, fit_gemm, halves, hat_basis, predict_attention, robust_fit, run_gemm
from planner.calibrate.tables import num, version_key
from planner.kernels import (
    AttentionFit,
    CommFit,
    GemmFit,
    MoeFit,
    StateFit,
    allreduce_time,
    alltoall_time,
    attention_time,
    experts_touched,
    gemm_time,
    mla_time,
    moe_time,
    padded_rows,
    state_time,
)
from planner.units import bytes_per_element

ROOT = Path(__file__).resolve().parents[1]
TRUTH = Path(__file__).parent / "data" / "truth"
DTYPE = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "fp8_block": "fp8_block"}
H200 = load_gpu("h200-sxm")


def truth(name: str) -> dict[tuple[str, str, str], dict[str, np.ndarray[Any, Any]]]:
    """Columns of a packaged extract by (gpu, engine, dtype); numbers as float64."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    with (TRUTH / name).open(newline="", encoding="utf-8") as f:
        for row in csv.DictReader(f):
            groups[row["gpu"], row["backend"], DTYPE[row.get("dtype") or row["kv_dtype"]]].append(row)
    text = {"gpu", "backend", "version", "dtype", "kv_dtype", "kernel_source"}
    return {
        k: {c: np.asarray([float(r[c]) for r in rows]) for c in rows[0] if c not in text} for k, rows in groups.items()
    }  # fmt: skip


def gemm_rows(r: dict[str, Any]) -> dict[str, Any]:
    return {"m": r["M"], "n": r["N"], "k": r["K"], "time_s": r["latency_ms"] * 1e-3}


def attention_rows(r: dict[str, Any], keep: Any) -> dict[str, Any]:
    names = {
        "batch": "num_seqs", "q_len": "query_len", "seq": "context_len", "heads": "num_heads", "kv_heads": "num_kv_heads", "head_dim": "head_dim",
    }  # fmt: skip
    return {new: r[old][keep] for old, new in names.items()} | {"time_s": r["latency_ms"][keep] * 1e-3}


# ---- physics -------------------------------------------------------------------------------------------------------------------


def faster(gpu: GpuProfile, factor: float) -> GpuProfile:
    return dataclasses.replace(
        gpu, bytes_per_s=gpu.bytes_per_s * factor, peak_flop_per_s={k: v * factor for k, v in gpu.peak_flop_per_s.items()}
    )  # fmt: skip


def test_unit_detector_bytes_and_bytes_per_s_together_leave_time_unchanged() -> None:
    fit = GemmFit(1e12, 1e15, 1e-6, 1e-9, warm_share=0.0)
    double = dataclasses.replace(fit, bytes_per_s=2e12)
    m = np.array([1.0, 16, 128, 4096])
    a = gemm_time(m, 8192, 8192, fit, weight_bytes_per_element=2.0).time_s
    b = gemm_time(m, 8192, 8192, double, weight_bytes_per_element=4.0, act_bytes_per_element=4.0, out_bytes_per_element=4.0).time_s
    np.testing.assert_allclose(a, b, rtol=1e-12)
    slow, fast = MoeFit(1e12, 1e15, 1e-6), MoeFit(1e12, 2e15, 1e-6)
    kw: dict[str, Any] = {"top_k": 8, "width": 4096, "ffn": 1024, "experts_touched": 64, "weight_bytes_per_element": 2.0}
    assert moe_time(4096, fit=fast, **kw).compute_s == pytest.approx(moe_time(4096, fit=slow, **kw).compute_s / 2)


@pytest.mark.parametrize("op", ["gemm", "attention", "mla", "moe", "state"])
def test_time_falls_with_bandwidth_and_peak(op: str) -> None:
    times = []
    for gpu in (H200, faster(H200, 2.0)):
        f = kernel_fit(op, gpu, "vllm", "bf16").value
        match op:
            case "gemm":
                t = gemm_time(np.array([1, 64, 8192]), 8192, 8192, f, weight_bytes_per_element=2)
            case "attention":
                t = attention_time(64, np.array([1, 8, 2048]), 16384, num_heads=32, num_kv_heads=8, head_dim=128, kv_bytes_per_element=2, fit=f)
            case "mla":
                t = mla_time(64, np.array([1, 4]), 16384, num_heads=16, kv_rank=512, rope_dim=64, kv_bytes_per_element=2, fit=f)
            case "moe":
                t = moe_time(np.array([32, 8192]), top_k=8, width=4096, ffn=1536, experts_touched=128, fit=f, weight_bytes_per_element=2)
            case _:
                t = state_time(128, np.array([1, 8, 4096]), 6e6, 1e12, f)
        times.append(t.time_s)
    assert (times[1] < times[0]).all()


def test_broadcast_equals_scalar() -> None:
    fit = kernel_fit("attention", H200, "vllm", "fp8").value
    kernel = load_attention_kernel("fa3")
    b, q, s = np.array([1.0, 16, 128])[:, None, None], np.array([1.0, 4, 9, 600])[None, :, None], np.array([700.0, 9000])[None, None, :]
    kw: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "kv_bytes_per_element": 1, "fit": fit, "kernel": kernel}
    grid = attention_time(b, q, s, **kw)
    for i, j, k in np.ndindex(grid.time_s.shape):
        one = attention_time(float(b[i, 0, 0]), float(q[0, j, 0]), float(s[0, 0, k]), **kw)
        for part_grid, part_one in zip(grid, one, strict=True):
            assert part_grid[i, j, k] == pytest.approx(float(part_one), rel=1e-12)
    g = kernel_fit("gemm", H200, "vllm", "fp8").value
    m = np.arange(1.0, 600.0)
    size: dict[str, Any] = {"weight_bytes_per_element": 1, "act_bytes_per_element": 1}
    assert gemm_time(m, 5120, 8192, g, **size).time_s[128] == pytest.approx(float(gemm_time(129, 5120, 8192, g, **size).time_s), rel=1e-12)


@pytest.mark.parametrize("gpu", ["h200-sxm", "b200-sxm", "a100-sxm-80gb", "rtx-4090"])
def test_attention_grows_with_context_batch_and_query(gpu: str) -> None:
    profile = load_gpu(gpu)
    fit = kernel_fit("attention", profile, "vllm", "bf16").value
    kernel = load_attention_kernel(load_engine("vllm").attention_kernel_id(profile.arch))
    kw: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "kv_bytes_per_element": 2, "fit": fit, "kernel": kernel}
    contexts, batches = 2.0 ** np.arange(9, 18), 2.0 ** np.arange(0, 9)
    assert (np.diff(attention_time(8, 1, contexts, **kw).time_s) > 0).all()
    assert (np.diff(attention_time(batches, 1, 4096, **kw).time_s) > 0).all()
    assert (np.diff(attention_time(8, np.arange(1.0, 17.0), 4096, **kw).time_s) >= -1e-12).all()
    prefill = attention_time(1, np.array([512.0, 2048, 8192]), np.array([512.0, 2048, 8192]), **kw).time_s
    assert (np.diff(prefill) > 0).all()


def test_verifying_streams_the_cache_once() -> None:
    """Four query rows of one tile cost hardly more than one: KV is not paid per draft token."""
    fit = kernel_fit("attention", H200, "vllm", "bf16").value
    kernel = load_attention_kernel("fa3")
    t = attention_time(32, np.array([1.0, 4.0]), 16384, num_heads=64, num_kv_heads=8, head_dim=128, kv_bytes_per_element=2, fit=fit, kernel=kernel)
    assert t.time_s[1] / t.time_s[0] < 1.15


def test_mla_with_128_heads_is_compute_bound_on_hopper() -> None:
    fit = kernel_fit("mla", H200, "trtllm", "bf16").value
    kw: dict[str, Any] = {"kv_rank": 512, "rope_dim": 64, "kv_bytes_per_element": 2, "fit": fit, "kernel": load_attention_kernel("flashmla")}
    many = mla_time(64, 1, 8192, num_heads=np.array([16.0, 128.0]), **kw)
    assert many.time_s[1] > 1.2 * many.time_s[0]
    assert many.bound()[0] == "memory"
    assert mla_time(64, 4, 8192, num_heads=128, **kw).time_s > 2.0 * many.time_s[1]


def test_experts_touched_limits() -> None:
    assert experts_touched(256, 8, 1) == pytest.approx(8)
    assert experts_touched(256, 8, 1e6) == pytest.approx(256)
    assert experts_touched(8, 8, 3) == 8
    # tokens of one sequence that share all their experts touch what one token touches
    assert experts_touched(256, 8, 4, 6, 1.0) == pytest.approx(float(experts_touched(256, 8, 4)))
    assert experts_touched(256, 8, 4, 6, 0.0) > experts_touched(256, 8, 4, 6, 0.5) > experts_touched(256, 8, 4)


def test_tokens_of_a_sequence_touch_no_more_experts_than_independent_ones() -> None:
    """A long draft meets its own experts again, however little neighbours share."""
    rows = np.arange(1.0, 65.0)
    alone = np.asarray([float(experts_touched(128, 8, q)) for q in rows])
    together = experts_touched(128, 8, 1, rows, 0.3)
    assert (together <= alone + 1e-9).all() and (np.diff(together) > 0).all() and (np.diff(np.diff(together)) < 0).all()
    assert experts_touched(128, 8, 1, rows, 0.0) == pytest.approx(alone)
    # four tokens load 2.5 to 3.6 times the experts of one: measured on a served MoE (Cohere), independent routing
    assert 2.5 < float(experts_touched(128, 8, 1, 4, 0.3)) / 8 < 3.64


def test_padded_rows_is_the_tile_layout_of_the_kernel() -> None:
    kernel = load_attention_kernel("fa3")
    rows, passes = padded_rows(np.array([1.0, 16.0, 17.0]), 8, 128, kernel)
    assert rows.tolist() == [128, 128, 256]
    assert passes.tolist() == [1, 1, 2]
    assert [float(x) for x in padded_rows(4, 6, 128, None)] == [24, 1]


def test_linear_attention_verify_is_affine_in_its_width() -> None:
    """Measured on H200 with 96 heads at batch 128: 1 / 2 / 4 / 8 tokens take about 430 / 670 / 1090 / 2010 us (extract kda_verify_dev.csv)."""
    fit = kernel_fit("state", H200, "vllm", "bf16").value
    t = state_time(128, np.array([1.0, 2, 4, 8]), 96 * 128 * 128 * 4.0, 0.0, fit).time_s
    np.testing.assert_allclose(np.diff(t) / np.array([1.0, 2, 4]), np.diff(t)[0], rtol=0.05)
    np.testing.assert_allclose(t, np.array([434e-6, 671e-6, 1091e-6, 2014e-6]), rtol=0.12)


def test_collectives() -> None:
    size = 2.0 ** np.arange(10, 30)
    for name in ("h200-sxm", "b200-sxm", "h20", "mi300x"):
        fit = kernel_fit("allreduce", load_gpu(name), "vllm", "bf16").value
        eight = allreduce_time(size, 8, fit).time_s
        assert (np.diff(eight) >= 0).all()
        assert (allreduce_time(size, 1, fit).time_s == 0).all()
        assert allreduce_time(1e9, 8, fit).time_s > allreduce_time(1e9, 2, fit).time_s
    # bytes, not elements: one GiB over 8 H200 takes 4.0 ms, 460 GB/s on the bus
    assert float(allreduce_time(2.0**30, 8, kernel_fit("allreduce", H200, "vllm", "bf16").value).time_s) == pytest.approx(4.0e-3, rel=0.02)
    far = CommFit.from_table((2, 4), (1e3, 1e6), ((2.0, 9.0), (3.0, 20.0)))
    assert float(alltoall_time(2e6, 4, far).time_s) == pytest.approx(40e-6)
    assert float(alltoall_time(1e6, 8, far).time_s) == pytest.approx(23e-6)


def test_bound_names_the_largest_part() -> None:
    fit = GemmFit(4e12, 8e14, 4e-6)
    t = gemm_time(np.array([1.0, 1, 8192]), np.array([64.0, 8192, 8192]), np.array([64.0, 8192, 8192]), fit, weight_bytes_per_element=2)
    assert t.bound().tolist() == ["launch", "memory", "compute"]


@pytest.mark.parametrize("maker", [AttentionFit, GemmFit, MoeFit, StateFit])
def test_priors_exist_for_every_gpu(maker: Any) -> None:
    from gpu_profiles.load import gpu_ids

    for name in gpu_ids():
        gpu = load_gpu(name)
        if not gpu.peak_flop_per_s:
            continue
        fit = maker.from_gpu(gpu, next(iter(gpu.peak_flop_per_s)))
        assert fit.bytes_per_s > 0


# ---- the loader ----------------------------------------------------------------------------------------------------------------


def test_nearest_stack_and_its_provenance() -> None:
    exact = kernel_fit("gemm", H200, "vllm", "fp8")
    assert exact.distance == "exact"
    assert exact.provenance == "fitted from public tables aiconfigurator-core 0.12.0 h200-sxm/vllm/fp8, not measured by Draftline"
    assert kernel_fit("gemm", H200, "vllm", "fp8_block").distance == "engine"  # vLLM's own rows were timed without CUDA graphs
    assert kernel_fit("gemm", load_gpu("h20"), "vllm", "fp8").distance == "sibling"
    assert kernel_fit("gemm", load_gpu("mi300x"), "vllm", "fp8").distance == "prior"
    assert kernel_fit("gemm", H200, "ideal", "bf16").distance == "prior"
    h20 = kernel_fit("gemm", load_gpu("h20"), "vllm", "bf16").value
    assert h20.flop_per_s < load_gpu("h20").peak("bf16")  # efficiencies carry over, rates do not
    for op in ("gemm", "attention", "state"):
        near, far = kernel_fit(op, H200, "vllm", "bf16").band, kernel_fit(op, load_gpu("h100-nvl"), "vllm", "bf16").band
        assert far[0] < near[0] < 1 < near[1] < far[1]


def test_own_calibration_comes_first() -> None:
    params = {k: v[0] for k, v in SPECS["gemm"].items()}
    own = {"kernels": {"gemm": {"*": {"bf16": {"p": params, "step": [], "band": [0.97, 1.03]}}}}}
    found = kernel_fit("gemm", dataclasses.replace(H200, calibration=own), "vllm", "bf16")
    assert found.distance == "own"
    assert found.value.fixed_s == params["fixed_s"]


def test_small_weights_unpacked_to_16_bit_move_fewer_bytes_less_well() -> None:
    wide, small = (kernel_fit("gemm", H200, "vllm", d).value for d in ("bf16", "int4/bf16"))
    assert small.bytes_per_s == pytest.approx(0.73 * wide.bytes_per_s)
    assert small.flop_per_s == wide.flop_per_s
    measured = kernel_fit("gemm", load_gpu("a100-sxm-80gb"), "trtllm", "int4/bf16")
    assert measured.distance == "exact"


def test_every_op_engine_and_dtype_has_an_answer() -> None:
    for name in ("h100-sxm", "b200-sxm", "a100-sxm-80gb", "l40s", "rtx-5090", "mi355x"):
        gpu = load_gpu(name)
        for engine in ("vllm", "sglang", "trtllm", "llamacpp", "transformers", "builtin", "ideal"):
            for dtype in ("bf16", "fp16", "int4/bf16", "fp8/bf16", "mxfp4/bf16"):
                assert kernel_fit("gemm", gpu, engine, dtype).value.bytes_per_s > 0
                assert kernel_fit("moe", gpu, engine, dtype).value.bytes_per_s > 0
            for op in ("attention", "mla", "state", "allreduce", "allgather", "alltoall"):
                low, high = kernel_fit(op, gpu, engine, "fp8").band
                assert 0 < low < high


def test_loading_imports_nothing_heavy() -> None:
    code = "import sys; import gpu_profiles.fits as f; f._file(); print(sorted({'scipy', 'pandas', 'torch', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "[]"


# ---- accuracy on packaged rows -------------------------------------------------------------------------------------------------


def errors(predicted: Any, measured: Any) -> tuple[float, float]:
    e = np.abs(predicted / measured - 1.0)
    return float(np.median(e)), float(np.quantile(e, 0.9))


def report(title: str, by: dict[tuple[str, str, str], tuple[float, float]]) -> tuple[float, float]:
    lines = [f"{' '.join(k):32} median {m:6.1%} p90 {p:6.1%}" for k, (m, p) in sorted(by.items())]
    median, p90 = statistics.median(m for m, _ in by.values()), statistics.median(p for _, p in by.values())
    sys.stdout.write("\n".join([title, *lines, f"over {len(by)} stacks: median {median:.1%} p90 {p90:.1%}"]) + "\n")
    return median, p90


def test_gemm_accuracy() -> None:
    by = {}
    for (gpu, engine, dtype), r in truth("gemm_dev.csv").items():
        if dtype == "fp8_block":
            continue
        size = bytes_per_element(dtype)
        fit = kernel_fit("gemm", load_gpu(gpu), engine, dtype).value
        t = gemm_time(r["M"], r["N"], r["K"], fit, weight_bytes_per_element=size, act_bytes_per_element=size)
        by[gpu, engine, dtype] = errors(t.time_s, r["latency_ms"] * 1e-3)
    median, p90 = report("GEMM", by)
    assert median <= 0.055
    assert p90 <= 0.135


def test_attention_accuracy() -> None:
    by = {}
    for (gpu, engine, dtype), r in truth("attention_dev.csv").items():
        profile = load_gpu(gpu)
        keep = (r["seq"] >= 512) & ~((engine == "trtllm") & (r["heads"] / r["kv_heads"] > 32))
        rows = attention_rows(r, keep)
        kernel = load_attention_kernel(load_engine(engine).attention_kernel_id(profile.arch))
        t = attention_time(
            rows["num_seqs"], rows["query_len"], rows["context_len"], num_heads=rows["num_heads"], num_kv_heads=rows["num_kv_heads"], head_dim=128,
            kv_bytes_per_element=bytes_per_element(dtype), fit=kernel_fit("attention", profile, engine, dtype).value, kernel=kernel, repeated=True,
        )  # fmt: skip
        by[gpu, engine, dtype] = errors(t.time_s, rows["time_s"])
    median, p90 = report("attention", by)
    assert median <= 0.055
    assert p90 <= 0.18


def test_fp8_cliffs_of_cutlass_on_hopper() -> None:
    """Measured at 8192 x 8192 on H200: 26.7 us at M = 128, 47.1 us at 129, 33.7 us at 256, 72.8 us at 257."""
    fit = kernel_fit("gemm", H200, "vllm", "fp8").value
    t = gemm_time(np.array([128.0, 129, 256, 257]), 8192, 8192, fit, weight_bytes_per_element=1, act_bytes_per_element=1).time_s
    assert t[1] / t[0] > 1.3
    assert t[3] / t[2] > 1.4


# ---- fits re-made from raw data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "engine", "dtype"), [("h100_sxm", "trtllm", "fp8"), ("h200_sxm", "vllm", "bf16")])
def test_gemm_fit_is_remade_from_rows(gpu: str, engine: str, dtype: str) -> None:
    """A fit on five of the eight packaged shapes predicts the other three, and agrees with the shipped numbers."""
    rows, profile = gemm_rows(truth("gemm_dev.csv")[gpu, engine, dtype]), load_gpu(gpu)
    shape = rows["n"] * 1e6 + rows["k"]
    held = np.isin(shape, np.unique(shape)[[1, 4, 6]])
    fit, steps = fit_gemm({k: v[~held] for k, v in rows.items()}, profile, dtype)
    other = {k: v[held] for k, v in rows.items()}
    median, p90 = errors(run_gemm(other, profile, dtype, fit.params, np.asarray(steps)).time_s, other["time_s"])
    assert median < 0.07
    assert p90 < 0.2
    shipped = kernel_fit("gemm", profile, engine, dtype).value
    size = bytes_per_element(dtype)
    at = {"m": np.array([1.0, 32, 256, 2048]), "n": np.full(4, 8192.0), "k": np.full(4, 8192.0)}
    again = run_gemm(at, profile, dtype, fit.params, np.asarray(steps)).time_s
    then = gemm_time(at["m"], at["n"], at["k"], shipped, weight_bytes_per_element=size, act_bytes_per_element=size).time_s
    np.testing.assert_allclose(again, then, rtol=0.15)


def test_attention_fit_is_remade_from_rows() -> None:
    table, profile = truth("attention_dev.csv")["h200_sxm", "vllm", "fp8"], load_gpu("h200_sxm")
    rows = attention_rows(table, table["seq"] > 0)
    kernel = load_attention_kernel("fa3")
    half = halves(rows["num_seqs"] * 1000 + rows["num_heads"])
    mine, other = ({k: v[mask] for k, v in rows.items()} for mask in (half, ~half))
    fit = robust_fit(STREAM, predict_attention(mine, profile, "fp8", kernel), mine["time_s"], np.ones(len(mine["time_s"])))
    long = other["context_len"] >= 512
    median, p90 = errors(predict_attention(other, profile, "fp8", kernel)(fit.params)[long], other["time_s"][long])
    assert median < 0.06
    assert p90 < 0.18
    shipped = kernel_fit("attention", profile, "vllm", "fp8").value
    assert shipped.bytes_per_s == pytest.approx(fit.params["bandwidth"] * profile.bytes_per_s, rel=0.3)


def test_robust_fit_recovers_numbers_and_says_what_it_cannot_see() -> None:
    truth_params = {"fixed_s": 3e-5, "row_bytes": 6.0, "per_expert_s": 1e-7, "bandwidth": 0.7, "flop": 0.5, "tile_rows": 32.0, "knee": 3.0}
    tokens = np.repeat(2.0 ** np.arange(0, 7), 6)
    touched = np.minimum(128.0, tokens * 8)
    width = np.tile([1024.0, 2048, 3072, 4096, 6144, 7168], 7)

    def predict(p: Any) -> Any:
        fit = MoeFit.from_params(p, H200, "bf16")
        return moe_time(tokens, top_k=8, width=width, ffn=1536, experts_touched=touched, fit=fit, weight_bytes_per_element=2).time_s

    rng = np.random.default_rng(3)
    fit = robust_fit(MOE, predict, predict(truth_params) * np.exp(rng.normal(0, 0.01, len(tokens))), np.ones(len(tokens)))
    assert fit.params["bandwidth"] == pytest.approx(0.7, rel=0.05)
    assert fit.params["fixed_s"] == pytest.approx(3e-5, rel=0.1)
    assert "flop" in fit.unidentified  # every row is memory bound: nothing can be said about compute
    assert "bandwidth" not in fit.unidentified


def test_helpers() -> None:
    assert sorted(["1.3.0rc9", "1.3.0rc20", "1.2.0"], key=version_key)[-1] == "1.3.0rc20"
    basis = hat_basis(np.array([0.5, 2.0, 9.0]), np.array([0.0, 1.0, 2.0]))
    np.testing.assert_allclose(basis, [[0.5, 0.5, 0], [0, 0, 1], [0, 0, 1]])
    assert num({"a": np.array([None, "3", 2.0], dtype=object)}, "a").tolist() == [0.0, 3.0, 2.0]
    key = np.array([1, 1, 2, 2, 3, 3])
    half = halves(key)
    assert half[0] == half[1] and half[2] == half[3] and 0 < half.sum() < 6


def test_no_code_reads_the_end_to_end_sample_of_the_package() -> None:
    """The package that the tables come from also holds end-to-end runs; they judge this project and are read nowhere."""
    name = re.compile("silicon" + "_sample")
    for package in ("planner", "gpu_profiles", "microbench", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            assert not name.search(path.read_text(encoding="utf-8")), path
