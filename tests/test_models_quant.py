"""Quantisation sections -> storage per tensor class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelConfigError
from planner.models import read_model
from planner.models.spec import Quant

CONFIGS = Path(__file__).parent / "data" / "configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 4096, "vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE: dict[str, Any] = {
    **LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "num_nextn_predict_layers": 1,
}  # fmt: skip


def quant(stem: str) -> Quant:
    return read_model(CONFIGS / f"{stem}_config.json").quant


def of(base: dict[str, Any], **section: Any) -> Quant:
    return read_model({**base, "quantization_config": section}).quant


@pytest.mark.parametrize(
    "stem, weights, kv",
    [
        ("Qwen--Qwen3-32B", {}, None),
        ("Qwen--Qwen3-32B-FP8", {"attn": "fp8", "mlp": "fp8"}, None),
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor", {"attn": "fp8", "mlp": "fp8"}, "fp8"),
        ("openai--gpt-oss-120b", {"experts": "mxfp4"}, None),
        ("nvidia--Qwen3-235B-A22B-NVFP4", {"attn": "nvfp4", "experts": "nvfp4"}, "fp8"),
        ("nvidia--MiniMax-M2.5-NVFP4", {"experts": "nvfp4"}, "fp8"),
        ("nvidia--GLM-5-NVFP4", {"mlp": "nvfp4", "shared": "nvfp4", "experts": "nvfp4"}, "fp8"),
        ("nvidia--GLM-5.2-NVFP4", {"experts": "nvfp4"}, "fp8"),
        ("nvidia--Kimi-K2.6-NVFP4", {"experts": "nvfp4"}, "fp8"),
        ("nvidia--Gemma-4-26B-A4B-NVFP4", {"experts": "nvfp4"}, "fp8"),
        ("nvidia--Gemma-4-31B-IT-NVFP4", {"mlp": "nvfp4"}, "fp8"),
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", {"experts": "nvfp4"}, "fp8"),
        ("moonshotai--Kimi-K2.5", {"experts": "int4"}, None),
        ("moonshotai--Kimi-K3", {"experts": "mxfp4"}, None),
        ("deepseek-ai--DeepSeek-V4-Flash", {"attn": "fp8", "shared": "fp8", "experts": "mxfp4"}, None),
        ("nvidia--DeepSeek-V4-Flash-NVFP4", {"attn": "fp8", "shared": "fp8", "experts": "nvfp4"}, None),
        ("sgl-project--DeepSeek-V4-Flash-FP8", {"attn": "fp8", "shared": "fp8", "experts": "fp8"}, None),
        ("nvidia--Qwen3.6-27B-NVFP4", {"linear_attn": "fp8", "mlp": "nvfp4", "attn": "fp8", "lm_head": "nvfp4"}, "fp8"),
        (
            "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
            {"linear_attn": "nvfp4", "shared": "nvfp4", "experts": "nvfp4", "attn": "nvfp4"},
            "fp8",
        ),
        ("nvidia--Llama-3.1-70B-Instruct-FP8", {"attn": "fp8", "mlp": "fp8"}, "fp8"),
    ],
)
def test_published_schemes(stem: str, weights: dict[str, str], kv: str | None) -> None:
    got = quant(stem)
    assert dict(got.weights) == weights
    assert got.kv_dtype == kv
    assert got.weights_dtype("router") == got.weights_dtype("embed") == "bf16"


def test_block_scales_and_activation() -> None:
    assert quant("Qwen--Qwen3-32B-FP8").block_scaled and not quant("Qwen--Qwen3-32B-FP8-Static-PerTensor").block_scaled
    assert quant("Qwen--Qwen3-32B-FP8").act_dtype == "fp8"
    assert quant("moonshotai--Kimi-K2.5").act_dtype == "bf16", "no input_activations: weight only"
    assert quant("nvidia--MiniMax-M2.5-NVFP4").act_dtype == "nvfp4"
    mixed = quant("nvidia--Qwen3.6-27B-NVFP4")
    assert mixed.act_dtype is None and dict(mixed.act_by_class) == {"linear_attn": "fp8", "mlp": "bf16", "attn": "fp8", "lm_head": "bf16"}


def test_matrices_that_differ_from_their_class() -> None:
    """DeepSeek-V3.1-NVFP4 quantises o_proj and leaves the query and key-value projections alone."""
    spec = read_model(CONFIGS / "nvidia--DeepSeek-V3.1-NVFP4_config.json")
    by_name = {m.name: spec.quant.matrix_dtype(m) for m in spec.layers[5].matrices}
    assert by_name["o"] == "nvfp4" and by_name["q_b"] == by_name["kv_b"] == by_name["q_a"] == "bf16"
    assert by_name["router"] == "bf16" and by_name["shared_up"] == "nvfp4"


def test_layers_that_differ_are_noted() -> None:
    spec = read_model(CONFIGS / "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4_config.json")
    assert dict(spec.quant.weights)["linear_attn"] == "nvfp4" and "attn" not in dict(spec.quant.weights)
    assert any("ssm_in: 74%" in note for note in spec.notes)


# ------------------------------------------------------------------------------------------------- MTP storage


@pytest.mark.parametrize(
    "stem, dtype",
    [
        ("deepseek-ai--DeepSeek-V3", "fp8"),  # its scale tensors are in the published element total
        ("zai-org--GLM-5-FP8", "fp8"),
        ("deepseek-ai--DeepSeek-V4-Flash", None),  # https://github.com/vllm-project/vllm/pull/43893: BF16, no scales
        ("stepfun-ai--Step-3.7-Flash-FP8", None),  # https://github.com/vllm-project/vllm/issues/44087
        ("nvidia--GLM-5.2-NVFP4", None),  # https://github.com/NVIDIA/Model-Optimizer/issues/750: an incomplete list proves nothing
        ("nvidia--Qwen3.5-397B-A17B-NVFP4", None),
    ],
)
def test_mtp_storage_is_not_inferred_from_exclusion_lists(stem: str, dtype: str | None) -> None:
    spec = read_model(CONFIGS / f"{stem}_config.json")
    assert spec.mtp is not None and spec.mtp.weights_dtype == dtype
    assert dtype is not None or any("MTP: its storage is not stated" in note for note in spec.notes)


# ------------------------------------------------------------------------------------------------- written sections


W4 = {"num_bits": 4, "type": "int", "group_size": 128}
W8F = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    "section, attn, mlp",
    [
        ({"quant_method": "awq", "bits": 4}, "int4", "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "int8"),
        ({"quant_method": "awq", "w_bit": 4, "modules_to_not_convert": ["self_attn"]}, "bf16", "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["mlp"]}, "int8", "bf16"),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["o_proj", "q_proj", "k_proj", "v_proj"]}, "bf16", "fp8"),
        ({"quant_method": "fp8", "ignored_layers": ["re:.*mlp.*"]}, "fp8", "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}, "bf16", "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": W4}}, "ignore": ["lm_head"]},
         "int4", "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {
            "a": {"targets": ["re:.*self_attn.*"], "weights": W8F}, "b": {"targets": ["re:^model.layers.\\d+\\.mlp.*"], "weights": W4}}},
         "fp8", "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": W4}},
          "ignore": ["re:.*self_attn.*"]}, "bf16", "int4"),
        ({"quant_method": "some_new_fp8"}, "fp8", "fp8"),
        ({}, "bf16", "bf16"),
    ],
)  # fmt: skip
def test_written_sections(section: dict[str, Any], attn: str, mlp: str) -> None:
    got = of(LLAMA, **section)
    assert (got.weights_dtype("attn"), got.weights_dtype("mlp"), got.weights_dtype("lm_head")) == (attn, mlp, "bf16")


def test_mixed_compressed_tensors_with_mtp() -> None:
    """https://github.com/vllm-project/llm-compressor/issues/2735: W4A16 experts, FP8 attention, MTP ignored by a regular expression."""
    groups = {
        "group_0": {"targets": ["re:.*experts.*"], "weights": W4, "input_activations": None},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": W8F, "input_activations": {**W8F, "dynamic": True}},
    }
    got = of(MOE, quant_method="compressed-tensors", config_groups=groups, ignore=["re:.*mtp\\..*", "lm_head"])
    assert dict(got.weights) == {"attn": "fp8", "shared": "int4", "experts": "int4"}
    assert dict(got.act_by_class) == {"attn": "fp8", "shared": "bf16", "experts": "bf16"}


@pytest.mark.parametrize(
    "section, word",
    [
        ({"quant_method": "magic"}, "quant_method"),
        ({"quant_method": 4}, "quant_method"),
        ({"quant_method": "awq", "bits": 5}, "bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP9"}, "quant_algo"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, "regular expression"),
        ({"quant_method": "fp8", "kv_cache_scheme": 8}, "kv_cache_scheme"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": "four"}}}}, "num_bits"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups"),
    ],
)
def test_bad_sections(section: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelConfigError, match=word):
        of(LLAMA, **section)


def test_quant_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model(tmp_path).quant == Quant()
    section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    got = read_model(tmp_path).quant
    assert dict(got.weights) == {"mlp": "nvfp4"} and got.kv_dtype == "fp8"


def test_both_places_contradict(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}})
    )
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}))
    spec = read_model(tmp_path)
    assert spec.quant.kv_dtype == "fp8"
    assert any("hf_quant_config.json says nvfp4" in note for note in spec.notes)
