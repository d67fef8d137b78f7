"""GPU profiles against the table they come from, their names, and files that users write.

tests/golden/gpus.csv is a collected table (datasheets and vendor tools, read 2026-12-01); nothing in the package writes it.
"""

from __future__ import annotations

import copy
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_profiles import engine_ids, gpu_from_json, gpu_ids, gpu_to_json, load_engine, load_gpu
from gpu_profiles.load import build_gpu_index, normalise, resolve_gpu
from gpu_profiles.schema import OVERHEAD_KEYS
from planner.errors import ProfileError

HERE = Path(__file__).parent
FILES = HERE.parent / "gpu_profiles"
with (HERE / "golden" / "gpus.csv").open(encoding="utf-8", newline="") as handle:
    ROWS = {row["gpu"]: row for row in csv.DictReader(handle)}

MIB, GIB = 2**20, 2**30


@pytest.fixture
def h200() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FILES / "gpus" / "h200-sxm.json").read_text(encoding="utf-8"))
    return data


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
    for name, mib in shown.items():
        assert load_gpu(name).usable_memory_bytes == mib * MIB
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


def _set(data: dict[str, Any], path: str, value: object) -> None:
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
def test_bad_profile_files_say_where(h200: dict[str, Any], field: str, value: object, message: str) -> None:
    data = copy.deepcopy(h200)
    _set(data, field, value)
    with pytest.raises(ProfileError) as error:
        gpu_from_json(data, "mine.json")
    assert str(error.value).startswith(message)


def test_missing_field_file_and_json(h200: dict[str, Any], tmp_path: Path) -> None:
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
