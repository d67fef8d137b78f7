"""Attention-kernel descriptors against the rules of the kernels' source code; engine defaults and dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpu_profiles import attention_kernel_ids, engine_ids, gpu_ids, load_attention_kernel, load_engine, load_gpu
from gpu_profiles.engine_file import engine_from_json
from gpu_profiles.schema import OVERHEAD_KEYS
from gpu_profiles.tiles import max_draft_len_in_tile, num_row_tiles, padded_rows, relative_tile_cost, row_tile
from planner.errors import ProfileError

FILES = Path(__file__).parent.parent / "gpu_profiles" / "engines"
GOOD = {"origin": "measured", "ref": "a run", "date": "2026-12-01"}

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
    np.testing.assert_array_equal(num_row_tiles(load_attention_kernel("torch-sdpa-packed"), 4, [1, 2, 16, 17]), [1, 1, 1, 2])


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
            assert engine.attention_kernel_id(gpu.arch, kind) in attention_kernel_ids()
            limits = engine.limits(gpu)
            assert 0 < limits.memory_frac <= 1
    assert set(engine.drafters) == {"external", "eagle3", "mtp", "dflash", "dspark", "pard", "ngram", "suffix"}
    assert set(engine.overheads) == set(OVERHEAD_KEYS)
    assert all(v == 0 for k, v in engine.overheads.items() if k.endswith("_s")) == (engine_id == "ideal")
    with pytest.raises(ProfileError, match="no attention kernel for 'mamba' layers; expected one of"):
        engine.attention_kernel_id("hopper", "mamba")


def test_numbers_of_an_architecture_replace_the_engine_s_own() -> None:
    vllm = load_engine("vllm")
    assert vllm.overheads_on("hopper") == vllm.overheads
    for arch in ("cdna3", "cdna4"):
        assert vllm.overheads_on(arch) == dict(vllm.overheads) | dict(vllm.overheads_by_arch["cdna"])
    assert vllm.overheads_on("cdna3")["per_verified_token_s"] > vllm.overheads["per_verified_token_s"]
    assert vllm.sources["overheads_by_arch.cdna.per_verified_token_s"].origin == "fitted"
    assert load_engine("llamacpp").lm_head_dtype == "int8" and vllm.lm_head_dtype is None


def test_default_attention_backends() -> None:
    vllm, sglang, trtllm = load_engine("vllm"), load_engine("sglang"), load_engine("tensorrt-llm")
    assert [vllm.attention_kernel_id(a) for a in ("hopper", "blackwell", "ampere", "cdna3")] == ["fa3", "trtllm-gen", "fa2", "vllm-triton"]
    assert [sglang.attention_kernel_id(a) for a in ("hopper", "blackwell", "ada")] == ["fa3", "trtllm-gen", "flashinfer-fa2"]
    assert [trtllm.attention_kernel_id(a) for a in ("hopper", "blackwell-ultra")] == ["xqa", "trtllm-gen"]
    assert vllm.attention_kernel_id("blackwell", "mla") == "trtllm-gen-mla"


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cuda_graph_unit", "rows", "mine.json: cuda_graph_unit: unknown word; got 'rows'; expected one of ['tokens', 'seqs']"),
        ("overheads", {"per_step_s": {"value": -1, **GOOD}}, "mine.json: overheads.per_step_s: not above zero; got -1"),
        ("overheads", {"per_step_s": {"value": 0, **GOOD}}, "mine.json: overheads.draft_base_s: unknown or missing overhead"),
        ("attention_backends", {"gqa": {"hopper": "fa3"}}, "mine.json: attention_backends.gqa: no `default` kernel"),
        ("driver", "x", "mine.json: driver: unknown key"),
        ("overheads_by_arch", {"cdna": {"per_week_s": {"value": 1, **GOOD}}}, "mine.json: overheads_by_arch.cdna.per_week_s: unknown overhead"),
        ("lm_head", {"dtype": "int8"}, "mine.json: lm_head.ref: missing"),
    ],
)
def test_bad_engine_files_say_where(field: str, value: object, message: str) -> None:
    data = json.loads((FILES / "vllm.json").read_text(encoding="utf-8"))
    data[field] = value
    with pytest.raises(ProfileError) as error:
        engine_from_json(data, "mine.json")
    assert str(error.value).startswith(message)
