"""Configs as they are found: odd but real ones must read (with a note), broken ones must fail with one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelConfigError
from planner.models import read_model
from planner.models.count import core_kind, kv_bytes_per_token
from planner.models.spec import KvAttention, ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 4096, "vocab_size": 32000, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE: dict[str, Any] = {
    **LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "num_nextn_predict_layers": 1,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "intermediate_size": 2048, "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
}  # fmt: skip


def noted(spec: ModelSpec, text: str) -> bool:
    return any(text in note for note in spec.notes)


def without(base: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in base.items() if k not in keys}


# ------------------------------------------------------------------------------------------------- heads


def test_explicit_head_dim_wins() -> None:
    """https://github.com/vllm-project/speculators/pull/134: Qwen3-32B has 64 heads of 128 at hidden size 5120, not of 80."""
    core = read_model({**LLAMA, "head_dim": 256}).layers[0].attention
    assert isinstance(core, KvAttention) and core.head_dim == 256


def test_absent_head_dim_is_derived_and_noted() -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/15666."""
    spec = read_model(LLAMA)
    assert noted(spec, "head_dim is absent: derived")
    with pytest.raises(ModelConfigError, match="head_dim"):
        read_model({**LLAMA, "hidden_size": 1025})


def test_absent_kv_heads_mean_mha() -> None:
    """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/781."""
    spec = read_model(without(LLAMA, "num_key_value_heads"))
    core = spec.layers[0].attention
    assert isinstance(core, KvAttention) and core.num_kv_heads == core.num_heads == 8
    assert noted(spec, "multi-head attention")


# ------------------------------------------------------------------------------------------------- where the decoder is


@pytest.mark.parametrize("path", ["text_config", "thinker_config.text_config", "llm_config", "language_config"])
def test_nested_decoder(path: str) -> None:
    """https://github.com/huggingface/transformers/issues/37515: Qwen2.5-Omni keeps its decoder two levels down."""
    config: dict[str, Any] = dict(LLAMA)
    for key in reversed(path.split(".")):
        config = {key: config}
    spec = read_model({"model_type": "wrapper", **config})
    assert noted(spec, f"read from {path}") and spec.total_params == read_model(LLAMA).total_params


def test_class_defaults_of_gemma3() -> None:
    """google/gemma-3-4b-it writes only what differs from its class; 4300079472 elements with the SigLIP tower, projector and norm."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    spec = read_model({"model_type": "gemma3", "text_config": text})
    assert spec.total_params == 4_300_079_472 - 416_866_032 - 1152 * 2560 - 1152
    assert noted(spec, "num_attention_heads = 8") and not noted(spec, "hidden_size = 2304")


def test_tie_at_the_top_wins_over_the_nested_one() -> None:
    spec = read_model({"tie_word_embeddings": True, "text_config": {**LLAMA, "tie_word_embeddings": False}})
    assert spec.tie_embeddings and noted(spec, "tie_word_embeddings")


# ------------------------------------------------------------------------------------------------- MTP


def index_folder(folder: Path, names: list[str], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**MOE, **config}))
    weights = {"weight_map": dict.fromkeys(["model.embed_tokens.weight", *names], "model-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    return folder


def test_mtp_is_apart_from_the_layers() -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/2312: the MTP block is stored as layer num_hidden_layers."""
    spec = read_model(MOE)
    assert spec.num_layers == 4 and spec.mtp is not None and not spec.mtp.verified
    assert noted(spec, "not verified")


@pytest.mark.parametrize("name", ["model.layers.4.eh_proj.weight", "mtp.layers.0.self_attn.q_proj.weight", "model.nextn.0.weight"])
def test_mtp_verified_by_the_index(tmp_path: Path, name: str) -> None:
    spec = read_model(index_folder(tmp_path, [name]))
    assert spec.mtp is not None and spec.mtp.verified and noted(spec, "present in the checkpoint's index")


def test_mtp_declared_but_absent(tmp_path: Path) -> None:
    """https://github.com/jundot/omlx/issues/1779, https://github.com/NVIDIA/Model-Optimizer/issues/733."""
    spec = read_model(index_folder(tmp_path, ["model.layers.3.mlp.gate.weight"]))
    assert spec.mtp is None and noted(spec, "holds no MTP tensor")


def test_mtp_present_but_undeclared(tmp_path: Path) -> None:
    spec = read_model(index_folder(tmp_path, ["mtp.fc.weight"], num_nextn_predict_layers=0))
    assert spec.mtp is None and noted(spec, "does not declare")


def test_mtp_scales_show_its_storage(tmp_path: Path) -> None:
    quant = {"quant_method": "fp8"}
    folder = index_folder(tmp_path, ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight_scale_inv"], quantization_config=quant)
    spec = read_model(folder)
    assert spec.mtp is not None and spec.mtp.weights_dtype == "fp8"


def test_mtp_declared_but_never_released() -> None:
    """MiniMax-M2.5: the published element total is the main model's alone."""
    spec = read_model("MiniMaxAI/MiniMax-M2.5")
    assert spec.mtp is not None and spec.mtp.n_predict == 3 and noted(spec, "hold none of the declared blocks")


def test_mtp_switched_off() -> None:
    spec = read_model({**MOE, "use_mtp": False})
    assert spec.mtp is None and noted(spec, "use_mtp is false")


# ------------------------------------------------------------------------------------------------- hybrids


def test_pattern_string() -> None:
    """https://github.com/inference-sim/inference-sim/issues/1557: the Nano-4B pattern; 4 of its 42 blocks have a cache."""
    pattern = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
    spec = read_model({**NEMOTRON, "hybrid_override_pattern": pattern})
    assert [core_kind(layer.attention) for layer in spec.layers].count("full") == pattern.count("*") == 4
    assert kv_bytes_per_token(spec) == 4 * 2 * 2 * 64 * 2
    assert sum(1 for layer in spec.layers if layer.attention is None) == pattern.count("-")


def test_pattern_length_beats_the_layer_count() -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/18042."""
    spec = read_model({**NEMOTRON, "hybrid_override_pattern": "M*-", "num_hidden_layers": 52})
    assert spec.num_layers == 3 and noted(spec, "the pattern is used")
    words = read_model({**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp"]})
    assert words.layers == spec.layers
    both = read_model({**NEMOTRON, "hybrid_override_pattern": "M*-", "layers_block_type": ["mamba", "mlp", "mlp"]})
    assert both.layers == spec.layers and noted(both, "contradicts")


def test_state_layers_without_a_plan_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="nothing says which layers"):
        read_model({**LLAMA, "model_type": "falcon_h1", "mamba_d_ssm": 1024})


# ------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize(
    "extra, sliding",
    [
        ({"sliding_window": 128, "use_sliding_window": False}, 0),
        ({"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"sliding_window": 128}, 4),
        ({"sliding_window": None, "use_sliding_window": True}, 0),
        ({"sliding_window": 128, "sliding_window_pattern": 2}, 2),
        ({"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"] * 2}, 2),
    ],
)
def test_windows(extra: dict[str, Any], sliding: int) -> None:
    spec = read_model({**LLAMA, **extra})
    assert sum(core_kind(layer.attention) == "sliding 128" for layer in spec.layers) == sliding


def test_no_rope_layers_of_llama4() -> None:
    """A listed 0 means no rotary positions on that layer: full attention."""
    spec = read_model({**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 0]})
    assert [core_kind(layer.attention) for layer in spec.layers] == ["sliding 64", "full"] * 2


# ------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("key", ["num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "experts_per_token", "moe_top_k"])
def test_top_k_spellings(key: str) -> None:
    """gemma-4 says top_k_experts, Kimi-K3 num_experts_per_token (https://github.com/vllm-project/vllm/issues/47808)."""
    experts = read_model({**without(MOE, "num_experts_per_tok"), key: 2}).layers[-1].experts
    assert experts is not None and experts.top_k == 2


def test_spellings_that_contradict() -> None:
    spec = read_model({**MOE, "experts_per_token": 4})
    experts = spec.layers[-1].experts
    assert experts is not None and experts.top_k == 2 and noted(spec, "experts_per_token = 4 contradicts num_experts_per_tok = 2")


def test_lists_of_equal_numbers_count_as_one() -> None:
    spec = read_model({**MOE, "num_experts_per_tok": [2, 2, 2, 2]})
    assert noted(spec, "4 equal numbers") and spec.layers == read_model(MOE).layers


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "4096", True, [], {}, [1, 2], 10**12, 1.5])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_bad_numbers_name_the_key(key: str, value: object) -> None:
    with pytest.raises(ModelConfigError, match=key) as caught:
        read_model({**LLAMA, key: value})
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_missing_and_null_are_the_same(key: str) -> None:
    for config in (without(LLAMA, key), {**LLAMA, key: None}):
        with pytest.raises(ModelConfigError, match=f"{key}: missing"):
            read_model(config)


@pytest.mark.parametrize(
    "extra, word",
    [
        ({"layer_types": ["full_attention"] * 3}, "3 entries"),
        ({"layer_types": ["full_attention"] * 9}, "9 entries"),
        ({"layer_types": ["full_attention"] * 3 + ["spiral_attention"]}, "spiral_attention"),
        ({"layer_types": "full_attention"}, "not a list"),
        ({"layer_types": [1, 2, 3, 4]}, "not a string"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 16}, "num_key_value_heads"),
        ({"num_hidden_layers": 10**6}, "implausibly many layers"),
        ({"num_nextn_predict_layers": 10**6}, "implausibly many"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"is_encoder_decoder": True}, "decoder-only"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "more experts per token"),
        ({"num_experts": 8}, "num_experts_per_tok"),
        ({"model_type": 3}, "model_type"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"attn_type_list": [0, 1, 1, 1]}, "attn_type_list"),
        ({"hybrid_override_pattern": "MX"}, "unknown letter"),
        ({"hybrid_override_pattern": 3}, "hybrid_override_pattern"),
        ({"layers_block_type": ["conv"]}, "conv"),
        ({"block_configs": [1]}, "block_configs"),
        ({"block_configs": [{"attention": {"no_op": True}, "ffn": {"ffn_mult": -1}}]}, "ffn_mult"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ({"moe_layers_enum": "3,x", "num_experts": 8, "num_experts_per_tok": 2}, "moe_layers_enum"),
        ({"mlp_layer_types": ["dense", "odd"] * 2, "num_experts": 8, "num_experts_per_tok": 2}, "mlp_layer_types"),
    ],
)
def test_contradictions_and_unknown_words(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelConfigError, match=word):
        read_model({**LLAMA, **extra})


@pytest.mark.parametrize(
    "text, word",
    [
        ("[]", "expected a JSON object"),
        ('"llama"', "expected a JSON object"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"a": 1} trailing', "not valid JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (json.dumps(LLAMA).replace("1024", "NaN", 1), "hidden_size"),
        (json.dumps(LLAMA).replace("1024", "Infinity", 1), "hidden_size"),
        ("{}", "hidden_size"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelConfigError, match=word) as caught:
        read_model(file)
    assert "config.json" in str(caught.value)


def test_odd_but_good_files(tmp_path: Path) -> None:
    """A byte-order mark, Infinity in a key that costs nothing, and a key given twice."""
    file = tmp_path / "config.json"
    text = json.dumps({**LLAMA, "time_step_limit": [0.0, float("inf")]}).replace("{", '{"vocab_size": 77, ', 1)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    spec = read_model(file)
    assert spec.vocab_size == 32000 and noted(spec, "vocab_size is given twice")


def test_not_utf8_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ModelConfigError, match="UTF-8"):
        read_model(tmp_path / "bad.json")
    with pytest.raises(ModelConfigError, match="no config.json in this folder"):
        (tmp_path / "empty").mkdir()
        read_model(tmp_path / "empty")
    with pytest.raises(ModelConfigError, match="no such file"):
        read_model(tmp_path / "missing.json")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_model(file).num_layers == 4
    file.write_text(json.dumps({**LLAMA, "num_hidden_layers": 12}))
    assert read_model(file).num_layers == 12
    assert read_model(file) is read_model(str(file))


def test_unknown_family_is_noted() -> None:
    assert noted(read_model({**LLAMA, "model_type": "brand_new"}), "not a family with known norms")


def test_a_name_that_promises_quantisation(tmp_path: Path) -> None:
    (tmp_path / "some-org--Model-NVFP4_config.json").write_text(json.dumps(LLAMA))
    assert noted(read_model(tmp_path / "some-org--Model-NVFP4_config.json"), "the name says NVFP4")
