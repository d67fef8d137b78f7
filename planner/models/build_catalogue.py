"""Writes planner/data/models from model configs: ``python -m planner.models.build_catalogue CONFIG_FOLDER``.

An entry holds the fields that the reader uses, the quantisation already normalised, the source and a few sizes; not the config file.
Never imported by the rest of the package.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.models.catalogue import FOLDER
from planner.models.catalogue_facts import ALIASES_OF, ASSUMED, FP8_BLOCKS, FP8_OF, RENAMED, WRITTEN
from planner.models.fields import ALIASES
from planner.models.read import NESTED, load_json, read_config, read_model
from planner.models.spec import ModelSpec, Quant

DATE = "2026-12-01"
PACKAGE = "PyPI aiconfigurator-core 0.12.0 model_configs (copies of the Hugging Face config.json)"
#: Files that came from elsewhere (tests/data/configs/SOURCES.md).
OTHER_SOURCES = {
    "Qwen--Qwen3-Next-80B-A3B-Thinking": "github.com/ai-dynamo/aiconfigurator @1b7cfb10",
    "zai-org--GLM-4.7-FP8": "github.com/ai-dynamo/aiconfigurator @a0ba9ec6 (trimmed)",
    **{f"meta-llama--Llama-2-{s}-hf": "PyPI aiconfigurator 0.7.0" for s in ("7b", "13b", "70b")},
    **{f"Qwen--Qwen2.5-{s}": "PyPI aiconfigurator 0.7.0" for s in ("1.5B", "7B", "32B", "72B")},
}
#: Keys that are read without a spelling table.
PLAIN_KEYS = frozenset({
    "architectures", "model_type", "tie_word_embeddings", "attention_bias", "mlp_bias", "attn_output_gate", "use_qk_norm",
    "hidden_act", "mlp_hidden_act", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window",
    "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval", "full_attention_interval", "attn_type_list",
    "hybrid_layer_pattern", "linear_attn_config", "hybrid_override_pattern", "layers_block_type", "block_configs",
    "compress_ratios", "indexer_types", "sparse_attention_config", "num_kv_shared_layers", "use_double_wide_mlp",
    "enable_moe_block", "mlp_layer_types", "moe_layer_freq", "moe_layers", "moe_layers_enum", "decoder_sparse_step",
    "interleave_moe_layer_step", "mlp_only_layers", "topk_method", "use_routing_bias", "use_moe_router_bias",
    "latent_moe_use_norm", "expert_dtype", "use_mtp", "global_head_dim", "attention_k_eq_v", "num_global_key_value_heads",
    "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "v_head_dim",
    "add_swa_attention_sink_bias", "add_full_attention_sink_bias", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "mla_use_output_gate", "index_n_heads", "index_head_dim", "o_lora_rank", "o_groups", "hc_mult",
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups",
    "use_conv_bias", "mamba_proj_bias", "multi_query",
})  # fmt: skip
KEYS = PLAIN_KEYS | {key for keys in ALIASES.values() for key in keys}
#: Variants of a block that a NAS model lists; the rest is training detail.
BLOCK_KEYS = frozenset({"no_op", "replace_with_linear", "n_heads_in_group", "window_length", "ffn_mult", "intermediate_size"})


def trim(config: dict[str, Any]) -> dict[str, Any]:
    """The text decoder's fields that the reader looks at, nulls dropped; wrapper keys win where the reader lets them."""
    inner: dict[str, Any] = next((config[key] for key in NESTED if isinstance(config.get(key), dict)), {})
    merged = {**config, **inner}
    if config.get("tie_word_embeddings") is not None:
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    kept = {key: merged[key] for key in sorted(KEYS) if merged.get(key) is not None}
    if "block_configs" in kept:
        kept["block_configs"] = [
            {part: {k: v for k, v in block[part].items() if k in BLOCK_KEYS and v not in (None, False)} for part in ("attention", "ffn")}
            for block in kept["block_configs"]
        ]
        for block in kept["block_configs"]:
            block["attention"] = block["attention"] or {"no_op": False}
            block["ffn"] = block["ffn"] or {"no_op": False}
    return kept


def quant_entry(quant: Quant) -> dict[str, Any] | None:
    if quant == Quant():
        return None
    return {
        "scheme": quant.scheme, "weights": dict(quant.weights), "kv_dtype": quant.kv_dtype, "act_dtype": quant.act_dtype,
        "block_scaled": quant.block_scaled, "matrices": dict(quant.matrices), "act_by_class": dict(quant.act_by_class),
    }  # fmt: skip


def entry(spec: ModelSpec, config: dict[str, Any], reference: str) -> dict[str, Any]:
    """One catalogue file; raises if the trimmed fields do not read back to the same model."""
    trimmed = trim(config)
    again = read_config(trimmed, id=spec.id, where=spec.id)
    if (again.layers, again.total_params, again.tie_embeddings) != (spec.layers, spec.total_params, spec.tie_embeddings):
        raise ValueError(f"{spec.id}: the trimmed fields read back differently")
    mtp = spec.mtp
    if mtp is not None and again.mtp is not None and replace(again.mtp, weights_dtype=mtp.weights_dtype) != mtp:
        raise ValueError(f"{spec.id}: the MTP block reads back differently")
    return {
        "id": spec.id, "config": trimmed, "quant": quant_entry(spec.quant), "mtp_weights_dtype": mtp.weights_dtype if mtp else None,
        "source": {"reference": reference, "date": DATE},
    }  # fmt: skip


def build(folder: Path, target: Path = FOLDER) -> int:
    """Every checkpoint config of `folder` plus the written facts; returns the number of models."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.json"):
        old.unlink()
    index: dict[str, Any] = {"models": {}, "aliases": {}}
    entries: list[tuple[ModelSpec, dict[str, Any]]] = []
    for file in sorted(folder.glob("*_config.json")):
        if file.name.endswith("_hf_quant_config.json"):
            continue
        spec, stem = read_model(file), file.name.removesuffix("_config.json")
        spec = replace(spec, id=RENAMED.get(spec.id, spec.id))
        entries.append((spec, entry(spec, load_json(file), OTHER_SOURCES.get(stem, PACKAGE))))
    for name, fact in WRITTEN.items():
        spec = read_config(fact["config"], id=name, where=name)
        entries.append((spec, entry(spec, fact["config"], fact["reference"])))
    by_id = {spec.id: value for spec, value in entries}
    for base, names in FP8_OF.items():
        for name in names:
            config = {**by_id[base]["config"], "quantization_config": FP8_BLOCKS}
            spec = read_config(config, id=name, where=name)
            reference = f"fields of {base}; block-scaled FP8 as published at huggingface.co/{name}"
            entries.append((spec, entry(spec, config, reference)))
    for name, (base, section) in ASSUMED.items():
        config = {**by_id[base]["config"], "quantization_config": section}
        spec = read_config(config, id=name, where=name)
        value = entry(spec, config, f"fields of {base}; quantisation assumed from the name")
        value["note"] = f"the scheme is assumed from the name ({spec.quant.scheme} on every linear layer): the config we read lacks it"
        entries.append((spec, value))
    for spec, value in entries:
        file_name = spec.id.replace("/", "--") + ".json"
        (target / file_name).write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")
        index["models"][spec.id] = {
            "file": file_name, "total_params": spec.total_params, "active_params": spec.active_params,
            "max_context_tokens": spec.max_context_tokens, "quant": spec.quant.scheme,
        }  # fmt: skip
    for name, others in ALIASES_OF.items():
        if name not in index["models"]:
            raise ValueError(f"alias target {name} is not in the catalogue")
        index["aliases"].update({other: name for other in others if other not in index["models"]})
    (target / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return len(entries)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m planner.models.build_catalogue CONFIG_FOLDER")
    build(Path(sys.argv[1]))
