"""GPU profiles against the table they come from, attention descriptors against the source code's rules, engine defaults.

tests/golden/gpus.csv is a collected table (datasheets and vendor tools, read 2026-12-01); nothing in the package writes it.
"""

from __future__ import annotations

import copy
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gpu_profiles import attention_kernel_ids, engine_ids, gpu_from_json, gpu_ids, gpu_to_json, load_attention_kernel, load_engine, load_gpu
from gpu_profiles.load import _packaged_gpu, build_gpu_index, normalise, resolve_gpu
from gpu_profiles.schema import OVERHEAD_KEYS
from gpu_profiles.tiles import max_draft_len_in_tile, num_row_tiles, padded_rows, relative_tile_cost, row_tile
from planner.errors import ProfileError

HERE = Path(__file__).parent
FILES = HERE.parent / "gpu_profiles"
with (HERE / "golden" / "gpus.csv").open(encoding="utf-8", newline="") as handle:
    ROWS = {row["gpu"]: row for row in csv.DictReader(handle)}

MIB, GIB = 2**20, 2**30


@pytest.fixture
def h200() -> dict[str, object]:
    return json.loads((FILES / "gpus" / "h200-sxm.json").read_text(encoding="utf-8"))


# ---- numbers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_of_the_table_is_a_profile_with_its_numbers(name: str) -> None:
    row, gpu = ROWS[name], load_gpu(name)
    tera = {
        "fp16": "bf16_fp16_dense_tflops", "bf16": "bf16_fp16_dense_tflops", "fp8": "fp8_dense_tflops", "int8": "int8_dense_tops",
        "nvfp4": "fp4_dense_tflops", "mxfp4": "fp4_dense_tflops", "tf32": "tf32_dense_tflops", "fp32": "fp32_tflops",
    }  # fmt: skip
    absent = {"bf16"} if row["arch"] == "Volta" else {"nvfp4"} if row["arch"] == "CDNA4" else set()
    expected = {dtype: float(row[column]) * 1e12 for dtype, column in tera.items() if row[column] and dtype not in absent}
    assert dict(gpu.peak_flop_per_s) == pytest.approx(expected, rel=1e-12)
    assert gpu.bytes_per_s == pytest.approx(float(row["mem_bw_gbs"]) * 1e9, rel=1e-12)
    memory = row["mem_gb"].split("/")[0]
    assert gpu.memory_bytes == float(memory) * GIB
    if row["link_gbs_per_dir"]:
        assert gpu.link_bytes_per_s == float(row["link_gbs_per_dir"]) * 1e9
    if row["sm_count"]:
        assert gpu.sm_count == int(row["sm_count"])
    if row["tdp_w"]:
        assert gpu.tdp_w == float(row["tdp_w"])
    if row["l2_mib"]:
        assert gpu.l2_bytes == (256 if "+256 IC" in row["l2_mib"] else float(row["l2_mib"])) * MIB


CHECKED = (
    "H100-SXM5-80GB", "B200-SXM-180GB", "GB200-per-GPU", "A100-SXM4-80GB", "V100-SXM2", "RTX-3090", "RTX-4090", "RTX-5090",
    "RTX-PRO-6000-Blackwell", "MI300X", "MI355X",
)  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
def test_peak_is_multiprocessors_times_clock_times_flop_per_clock(name: str) -> None:
    row, gpu = ROWS[name], load_gpu(name)
    clock = float(row["tensor_mhz_implied"]) * 1e6
    assert gpu.sm_count is not None
    assert gpu.peak("fp16") == pytest.approx(gpu.sm_count * clock * float(row["flop_per_clk_per_sm_bf16_dense"]), rel=0.005)


RIDGES = {
    "h20": 37, "rtx-3090": 76, "rtx-5090": 117, "a100-sxm-80gb": 153, "rtx-4090": 164, "h200-sxm": 206, "b200-sxm": 292,
    "h100-sxm": 295, "l40s": 419,
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "ridge"), RIDGES.items())
def test_ridge_points(gpu: str, ridge: int) -> None:
    assert round(load_gpu(gpu).ridge_flop_per_byte("bf16")) == ridge


def test_sparse_figures_are_nowhere() -> None:
    for gpu in map(load_gpu, gpu_ids()):
        peaks = gpu.peak_flop_per_s
        if "bf16" in peaks and gpu.id.startswith(("h100", "h200")):
            assert peaks["bf16"] < 1000e12 and peaks["fp8"] < 2000e12, gpu.id  # 1979 and 3958 are with sparsity
        if {"bf16", "fp8"} <= set(peaks):
            assert peaks["fp8"] / peaks["bf16"] == pytest.approx(4.375 if gpu.arch == "rubin" else 2.0, rel=0.03), gpu.id
        assert peaks.get("fp16", 0) == peaks.get("bf16", peaks.get("fp16", 0)), gpu.id


def test_traps_of_the_trade() -> None:
    def peak(gpu: str, dtype: str) -> float:
        return load_gpu(gpu).peak(dtype)

    assert load_gpu("l4").bytes_per_s == 300e9  # not 3350e9, H100's
    assert (peak("l4", "bf16"), peak("rtx-5090", "bf16"), peak("rtx-4090", "bf16")) == (121e12, 209.5e12, 165.2e12)
    assert peak("rtx-3090", "bf16") == 71.2e12
    assert (peak("b300", "int8"), peak("gb300", "int8")) == (153.5e12, 165e12)
    assert peak("h100", "tf32") == 494.7e12  # not 156, A100's
    assert load_gpu("b200").bytes_per_s == 7.7e12
    assert load_gpu("b200").l2_bytes == 126 * MIB
    assert load_gpu("h20").ridge_flop_per_byte("bf16") == pytest.approx(37.0)


def test_dtypes_a_gpu_lacks_are_absent() -> None:
    fp4 = {gpu for gpu in gpu_ids() if "mxfp4" in load_gpu(gpu).peak_flop_per_s}
    assert fp4 == {"b200-sxm", "b300-sxm", "gb200", "gb300", "rtx-5090", "rtx-pro-6000", "gb10", "mi355x", "rubin-r200"}
    assert {gpu for gpu in gpu_ids() if "nvfp4" in load_gpu(gpu).peak_flop_per_s} == fp4 - {"mi355x"}
    for gpu in map(load_gpu, gpu_ids()):
        if gpu.arch in {"ampere", "volta"}:
            assert "fp8" not in gpu.peak_flop_per_s, gpu.id
    assert "bf16" not in load_gpu("v100").peak_flop_per_s and "tf32" not in load_gpu("v100").peak_flop_per_s
    with pytest.raises(ProfileError, match=r"GPU a100-sxm-80gb: no dense fp8 matmul peak; expected one of \['bf16', 'fp16'"):
        load_gpu("a100").peak("fp8")


def test_usable_memory_is_what_the_tools_show() -> None:
    shown = {"h200": 143771, "h100": 81559, "a100": 81920, "b300": 275040, "gb300": 284208, "b200": 183359, "l40s": 46068, "l4": 23034}
    for gpu, mib in shown.items():
        assert load_gpu(gpu).usable_memory_bytes == mib * MIB
    assert load_gpu("h200").usable_memory_bytes == pytest.approx(150.75e9, rel=1e-4)  # GiB, not 141e9
    for gpu in map(load_gpu, gpu_ids()):
        assert 0.88 * gpu.memory_bytes <= gpu.usable_memory_bytes <= gpu.memory_bytes, gpu.id


def test_attainable_rates_are_the_measured_ones() -> None:
    measured = {
        "a100": 271,
        "h100": 794.5,
        "h200": 794.5,
        "b200": 1745,
        "b300": 1769,
        "gb200": 1822,
        "mi355x": 1565,
        "mi325x": 785,
        "mi300x": 668,
    }
    for name, tflop in measured.items():
        gpu = load_gpu(name)
        assert gpu.peak("bf16") * gpu.matmul_eff["bf16"] == pytest.approx(tflop * 1e12, rel=1e-3)
        assert gpu.sources["matmul_eff.bf16"].origin == "measured"
    for name, tflop in {"h200": 1453, "h100": 1403, "b200": 3432}.items():
        gpu = load_gpu(name)
        assert gpu.peak("fp8") * gpu.matmul_eff["fp8"] == pytest.approx(tflop * 1e12, rel=1e-3)


def test_every_number_has_origin_reference_and_date() -> None:
    for gpu in map(load_gpu, gpu_ids()):
        numbers = {
            "memory_bytes", "usable_memory_bytes", "bytes_per_s", "bandwidth_eff", "launch_s", "link_bytes_per_s", "max_link_gpus",
            *(f"peak_flop_per_s.{d}" for d in gpu.peak_flop_per_s), *(f"matmul_eff.{d}" for d in gpu.matmul_eff),
            *(f for f in ("sm_count", "l2_bytes", "tdp_w", "usd_per_hour") if getattr(gpu, f) is not None),
        }  # fmt: skip
        assert set(gpu.sources) == numbers, gpu.id
        assert all(s.reference and s.date[:3] == "202" for s in gpu.sources.values()), gpu.id
        assert set(gpu.matmul_eff) == set(gpu.peak_flop_per_s)
        assert 0.5 < gpu.bandwidth_eff < 0.95
    assert {s.origin for s in load_gpu("rubin").sources.values()} <= {"announced", "assumed", "fitted"}
    assert load_gpu("h100-nvl").sources["bytes_per_s"].origin == "assumed"  # not sourced in the table
    for engine in map(load_engine, engine_ids()):
        assert {f"overheads.{k}" for k in OVERHEAD_KEYS} <= set(engine.sources)


def test_lpu_is_announced() -> None:
    lpu = load_gpu("lpu-lp30")
    assert (lpu.memory_bytes, lpu.bytes_per_s, lpu.max_link_gpus) == (500e6, 150e12, 256)
    assert lpu.peak("fp8") == pytest.approx(1.23e15, rel=0.001)
    assert lpu.link_bytes_per_s * 2 == 2.5e12
    assert lpu.sources["bytes_per_s"].origin == "announced"


# ---- names ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h100", "h100-sxm"), ("H100_SXM", "h100-sxm"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("h100 pcie", "h100-pcie"),
        ("h200", "h200-sxm"), ("h200_sxm", "h200-sxm"), ("b200", "b200-sxm"), ("b200_sxm", "b200-sxm"), ("b300_sxm", "b300-sxm"),
        ("gb200", "gb200"), ("gb200_sxm", "gb200"), ("gb300_sxm", "gb300"), ("a100", "a100-sxm-80gb"), ("a100_sxm", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("a100-40gb", "a100-sxm-40gb"), ("4090", "rtx-4090"), ("5090", "rtx-5090"),
        ("RTX 5090", "rtx-5090"), ("GeForce RTX 4090", "rtx-4090"), ("AMD Instinct MI300X", "mi300x"), ("dgx-spark", "gb10"),
        ("rtx_pro_6000_server", "rtx-pro-6000"), ("L40S", "l40s"), ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"), ("lpu", "lpu-lp30"),
    ],
)  # fmt: skip
def test_aliases(name: str, gpu: str) -> None:
    assert resolve_gpu(name) == gpu
    assert load_gpu(name).id == gpu


def test_index_of_names_is_up_to_date_and_unambiguous() -> None:
    index = json.loads((FILES / "gpus" / "index.json").read_text(encoding="utf-8"))
    assert index == build_gpu_index()  # which refuses an alias of two GPUs
    assert len(gpu_ids()) == len(ROWS) + 2  # V100 is 16 or 32 GB; the LPU
    for gpu in gpu_ids():
        assert (FILES / "gpus" / f"{gpu}.json").exists() and load_gpu(gpu).id == gpu
    assert normalise("NVIDIA GeForce RTX-4090") == "rtx4090"


def test_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ProfileError) as error:
        load_gpu("h20000")
    assert str(error.value).startswith("unknown GPU; got 'h20000'. Did you mean ")
    assert "Run `draftline gpus` for the list, or give a profile file." in str(error.value)


def test_loading_one_gpu_takes_under_two_milliseconds() -> None:
    resolve_gpu("h200")
    best = np.inf
    for _ in range(20):
        _packaged_gpu.cache_clear()
        start = time.perf_counter()
        load_gpu("h200")
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3


def test_import_stays_light() -> None:
    code = "import sys, gpu_profiles; print([m for m in ('pydantic', 'pandas', 'scipy', 'torch', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert out.stdout.strip() == "[]"


# ---- profile files -------------------------------------------------------------------------------------------------------------


def test_a_profile_file_round_trips(tmp_path: Path) -> None:
    for gpu_id in gpu_ids():
        gpu = load_gpu(gpu_id)
        path = tmp_path / f"{gpu_id}.json"
        path.write_text(json.dumps(gpu_to_json(gpu)), encoding="utf-8")
        assert load_gpu(str(path)) == gpu


def _set(data: dict, path: str, value: object) -> None:
    *parents, last = path.split("/")
    for key in parents:
        data = data[key]
    data[last] = value


GOOD = {"origin": "measured", "ref": "a run", "date": "2026-12-01"}
BAD = [
    ("bytes_per_s/value", float("nan"), "mine.json: bytes_per_s: not a finite number; got nan"),
    ("bytes_per_s/value", float("inf"), "mine.json: bytes_per_s: not a finite number; got inf"),
    ("bytes_per_s/value", "4.8e12", "mine.json: bytes_per_s: not a finite number; got '4.8e12'"),
    ("bytes_per_s/value", True, "mine.json: bytes_per_s: not a finite number; got True"),
    ("bytes_per_s/value", 0, "mine.json: bytes_per_s: not above zero; got 0"),
    ("peak_flop_per_s/fp8/value", -1.0, "mine.json: peak_flop_per_s.fp8: not above zero; got -1.0"),
    ("bytes_per_s", 4.8e12, "mine.json: bytes_per_s: a number needs its source; got 4800000000000.0; expected {\"value\""),
    ("bytes_per_s/ref", "", "mine.json: bytes_per_s: a number needs its source: no 'ref'; got ''"),
    ("bytes_per_s/origin", "guess", "mine.json: bytes_per_s: unknown origin; got 'guess'; expected one of ['datasheet', "),
    ("bytes_per_s/unit", "GB/s", "mine.json: bytes_per_s: unknown key 'unit'; expected only ['date', "),
    ("bandwidth_eff/value", 1.4, "mine.json: bandwidth_eff: too large; got 1.4; expected at most 1"),
    ("max_link_gpus/value", 2.5, "mine.json: max_link_gpus: not a whole number; got 2.5"),
    ("usable_memory_bytes", {"value": 2e11, **GOOD}, "mine.json: usable_memory_bytes: more than memory_bytes; got 200000000000.0"),
    ("matmul_eff/int4", {"value": 0.5, **GOOD}, "mine.json: matmul_eff: not the dtypes of peak_flop_per_s; got ['bf16', "),
    ("arch", 9, "mine.json: arch: not a text; got 9"),
    ("aliases", "h200", "mine.json: aliases: not a list of texts; got 'h200'"),
    ("peak_flop_per_s", {}, "mine.json: peak_flop_per_s: not an object of numbers; got {}"),
    ("calibration", 3, "mine.json: calibration: not an object; got 3"),
    ("bytes_per_sec", 1, "mine.json: bytes_per_sec: unknown key. Did you mean bytes_per_s"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_bad_profile_files_say_where(h200: dict, field: str, value: object, message: str) -> None:
    data = copy.deepcopy(h200)
    _set(data, field, value)
    with pytest.raises(ProfileError) as error:
        gpu_from_json(data, "mine.json")
    assert str(error.value).startswith(message)


def test_missing_field_file_and_json(h200: dict, tmp_path: Path) -> None:
    del h200["launch_s"]
    with pytest.raises(ProfileError, match=r"^mine.json: launch_s: missing$"):
        gpu_from_json(h200, "mine.json")
    with pytest.raises(ProfileError, match=r"nothing.json: no such GPU profile file. Give the path"):
        load_gpu(str(tmp_path / "nothing.json"))
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"broken.json: GPU profile is not JSON"):
        load_gpu(str(tmp_path / "broken.json"))
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"list.json: not a JSON object; got 'list'"):
        load_gpu(str(tmp_path / "list.json"))
    with pytest.raises(ProfileError, match="cannot be read"):
        load_gpu(str(tmp_path) + "/")


# ---- attention kernels ---------------------------------------------------------------------------------------------------------


def edges(kernel: str, group: int, head_dim: int = 128, longest: int = 64) -> list[int]:
    """Query lengths 1+D after which one more token adds rows or tiles."""
    query = np.arange(1, longest + 2)
    rows = padded_rows(load_attention_kernel(kernel), group, query, head_dim)
    return [int(q) for q in query[:-1][np.diff(rows) != 0]]


def test_fa3_steps_at_128_rows_and_192_for_small_heads() -> None:
    assert edges("fa3", 8) == [16, 32, 48, 64]  # R = 128k
    assert edges("fa3", 8, head_dim=64) == [24, 48]  # R = 192k
    assert edges("fa3", 8, head_dim=96) == [24, 48]
    assert edges("fa3", 8, head_dim=256) == [16, 32, 48, 64]


def test_fa2_loses_packing_at_the_first_draft_token() -> None:
    fa2 = load_attention_kernel("fa2")
    assert not fa2.packs_gqa
    np.testing.assert_array_equal(num_row_tiles(fa2, 8, np.array([1, 2, 16, 64, 65])), [1, 8, 8, 8, 16])
    np.testing.assert_array_equal(padded_rows(fa2, 8, np.array([1, 2, 64, 65])), [64, 512, 512, 1024])
    np.testing.assert_array_equal(num_row_tiles(load_attention_kernel("torch-sdpa"), 4, [1, 2]), [1, 4])


def test_trtllm_gen_takes_whole_tokens_in_tiles_of_8_to_128() -> None:
    kernel = load_attention_kernel("trtllm-gen")
    assert edges("trtllm-gen", 8, longest=32) == [1, 2, 4, 8, 16, 32]
    np.testing.assert_array_equal(row_tile(kernel, 8, [1, 2, 3, 4, 5, 8, 9, 16, 17]), [8, 16, 32, 32, 64, 64, 128, 128, 128])
    for group in (3, 5, 8, 12, 48):  # above one tile, every floor(128/G) tokens
        per_tile = 128 // group
        query = np.arange(1, 6 * per_tile)
        tiles = num_row_tiles(kernel, group, query)
        np.testing.assert_array_equal(tiles, -(-query // per_tile))
    np.testing.assert_allclose(relative_tile_cost(kernel, 8, [1, 2, 4, 8, 16]), [1.0, 1.2, 1.48, 1.68, 2.2])


def test_vllm_triton_holds_floor_16_over_g_tokens_and_never_splits() -> None:
    kernel = load_attention_kernel("vllm-triton")
    assert not kernel.split_kv_multi_query
    for group in (1, 2, 3, 4, 5, 8, 16):
        query = np.arange(1, 40)
        np.testing.assert_array_equal(num_row_tiles(kernel, group, query), -(-query // (16 // group)))
    assert edges("vllm-triton", 8, longest=6) == [2, 4, 6]
    np.testing.assert_array_equal(padded_rows(kernel, 20, [1, 2]), [32, 64])  # BLOCK_M = next power of two, one token each


def test_flashinfer_xqa_flashmla_and_flex() -> None:
    assert edges("flashinfer-fa2", 8, longest=40) == [2, 8, 16, 32]  # R = 16, 64, 128k
    assert edges("flashinfer-fa2", 8, head_dim=256, longest=17) == [2, 8, 16]
    xqa = load_attention_kernel("xqa")
    np.testing.assert_array_equal(padded_rows(xqa, 8, [1, 2, 4, 5]), [16, 32, 32, 64])
    np.testing.assert_array_equal(padded_rows(load_attention_kernel("xqa-sm90-fp8"), 8, [1, 2, 4, 8, 9]), [8, 16, 32, 64, 128])
    flashmla = load_attention_kernel("flashmla")
    np.testing.assert_array_equal(num_row_tiles(flashmla, 128, [1, 2, 3]), [2, 4, 6])
    np.testing.assert_array_equal(num_row_tiles(flashmla, 16, [1, 4, 5]), [1, 1, 2])
    sparse = load_attention_kernel("flashmla-sparse")
    np.testing.assert_array_equal(padded_rows(sparse, 128, [1, 2, 4]), [128, 256, 512])  # linear in 1+D
    np.testing.assert_array_equal(padded_rows(load_attention_kernel("trtllm-gen-mla"), 16, [1, 2, 3]), [64, 128, 192])
    flex = load_attention_kernel("flex-decode")
    assert flex.max_rows == 128
    np.testing.assert_array_equal(padded_rows(flex, 8, [1, 3, 5, 16]), [16, 32, 64, 128])


def test_the_rule_of_the_source() -> None:
    np.testing.assert_array_equal(max_draft_len_in_tile(128, [8, 16, 32, 64, 128, 192]), [15, 7, 3, 1, 0, 0])
    fa3 = load_attention_kernel("fa3")
    for group in (4, 8, 16, 32):
        best = int(max_draft_len_in_tile(128, group))
        assert num_row_tiles(fa3, group, 1 + best) == 1 and num_row_tiles(fa3, group, 2 + best) == 2


@pytest.mark.parametrize("kernel_id", attention_kernel_ids())
def test_rows_hold_for_every_kernel(kernel_id: str) -> None:
    kernel = load_attention_kernel(kernel_id)
    assert kernel.source and kernel.date
    group, query = np.meshgrid(np.array([1, 3, 8, 16, 40, 128]), np.arange(1, 33))
    rows = padded_rows(kernel, group, query)
    assert (rows >= group * query).all()
    assert (np.diff(rows, axis=0) >= 0).all()
    assert (rows == row_tile(kernel, group, query) * num_row_tiles(kernel, group, query)).all()
    assert rows[4, 2] == padded_rows(kernel, 8, 5)  # a scalar equals the grid


def test_unknown_kernel() -> None:
    with pytest.raises(ProfileError, match=r"unknown attention backend; got 'fa33'. Did you mean fa3"):
        load_attention_kernel("fa33")


# ---- engines -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine_id", engine_ids())
def test_engines_name_kernels_and_drafters_that_exist(engine_id: str) -> None:
    engine = load_engine(engine_id)
    for kind in ("gqa", "mla", "sparse"):
        for gpu in map(load_gpu, gpu_ids()):
            assert engine.attention_backend(gpu.arch, kind) in attention_kernel_ids()
            limits = engine.limits(gpu)
            assert 0 < limits.memory_frac <= 1
    assert set(engine.drafters) == {"external", "eagle3", "mtp", "dflash", "dspark", "pard", "ngram", "suffix"}
    assert set(engine.overheads) == set(OVERHEAD_KEYS)
    assert all(v == 0 for v in engine.overheads.values()) == (engine_id == "ideal")
    with pytest.raises(ProfileError, match="no attention kernel for 'mamba' layers; expected one of"):
        engine.attention_backend("hopper", "mamba")


def test_default_attention_backends() -> None:
    vllm, sglang, trtllm = load_engine("vllm"), load_engine("sglang"), load_engine("tensorrt-llm")
    assert [vllm.attention_backend(a) for a in ("hopper", "blackwell", "ampere", "cdna3")] == ["fa3", "trtllm-gen", "fa2", "vllm-triton"]
    assert [sglang.attention_backend(a) for a in ("hopper", "blackwell", "ada")] == ["fa3", "trtllm-gen", "flashinfer-fa2"]
    assert [trtllm.attention_backend(a) for a in ("hopper", "blackwell-ultra")] == ["xqa", "trtllm-gen"]
    assert vllm.attention_backend("blackwell", "mla") == "trtllm-gen-mla"


@pytest.mark.parametrize(
    ("engine", "gpu", "weights", "act", "native"),
    [
        ("vllm", "h200", "bf16", "bf16", True), ("vllm", "h200", "fp8", "fp8", True), ("vllm", "h200", "int4", "bf16", False),
        ("vllm", "h200", "nvfp4", "bf16", False), ("vllm", "h200", "mxfp4", "bf16", False), ("vllm", "a100", "fp8", "bf16", False),
        ("vllm", "a100", "int8", "int8", True), ("vllm", "b200", "nvfp4", "nvfp4", True), ("vllm", "b200", "mxfp4", "fp8", True),
        ("trtllm", "b200", "mxfp4", "fp8", True), ("vllm", "v100", "bf16", "fp16", True), ("vllm", "v100", "int4", "fp16", False),
        ("vllm", "mi355x", "nvfp4", "bf16", False), ("llamacpp", "5090", "fp8", "bf16", False), ("llamacpp", "4090", "int4", "bf16", False),
        ("ideal", "b200", "mxfp4", "mxfp4", True), ("vllm", "h100", "fp16", "fp16", True),
    ],
)  # fmt: skip
def test_storage_is_not_arithmetic(engine: str, gpu: str, weights: str, act: str, native: bool) -> None:
    chosen, factor = load_engine(engine).act_dtype(weights, load_gpu(gpu))
    assert chosen == act
    assert factor == 1.0 if native else factor < 1.0


def test_a_missing_activation_peak_is_an_error() -> None:
    with pytest.raises(ProfileError, match=r"^GPU lpu-lp30, engine vllm: no matmul peak that bf16 weights could compute in; got \['fp8'\]"):
        load_engine("vllm").act_dtype("bf16", load_gpu("lpu"))


def test_limits_follow_the_gpu() -> None:
    vllm, sglang = load_engine("vllm"), load_engine("sglang")
    limits = {gpu: vllm.limits(load_gpu(gpu)) for gpu in ("h100", "a100", "l40s", "mi300x")}
    assert [limits[g].max_num_seqs for g in limits] == [1024, 256, 256, 1024]
    assert [limits[g].max_num_batched_tokens for g in limits] == [8192, 2048, 2048, 8192]
    assert [sglang.limits(load_gpu(g)).cuda_graph_max for g in ("4090", "l40s", "h100", "h200", "b200")] == [48, 32, 256, 256, 512]
    assert sglang.limits(load_gpu("h100")).memory_frac == pytest.approx(0.836, abs=0.005)
    assert sglang.max_running_with_speculation == 48
    assert load_engine("hf").max_running_with_speculation == 1


def test_captured_sizes() -> None:
    vllm, sglang, h100 = load_engine("vllm"), load_engine("sglang"), load_gpu("h100")
    assert vllm.captured_tokens(0, h100)[:6] == (1, 2, 4, 8, 16, 24) and vllm.captured_tokens(0, h100)[-1] == 512
    assert vllm.captured_tokens(0, h100, max_num_seqs=48)[-1] == 96  # min(2 x max_num_seqs, 512)
    captured = vllm.captured_tokens(5, h100)  # rounded up to 1+D = 6 tokens: 30 falls in a hole
    assert captured[:8] == (6, 12, 18, 24, 36, 42, 48, 60)
    assert sglang.captured_tokens(3, h100)[-1] == 48 * 4  # sizes count sequences, capped at the 48 that run
    assert load_engine("trtllm").captured_tokens(1, h100)[-1] == 256
    assert load_engine("ideal").captured_tokens(3, h100) == ()


def test_engine_names() -> None:
    for name, engine in {
        "tensorrt-llm": "trtllm",
        "TRT-LLM": "trtllm",
        "llama.cpp": "llamacpp",
        "hf": "transformers",
        "vLLM": "vllm",
    }.items():
        assert load_engine(name).id == engine
    with pytest.raises(ProfileError, match=r"unknown engine; got 'vlm'. Did you mean vllm\? Known: builtin, ideal, "):
        load_engine("vlm")
