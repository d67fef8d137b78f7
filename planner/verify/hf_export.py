"""Write a decoder of the family as a Hugging Face Llama checkpoint, so that transformers, vLLM, SGLang and llama.cpp's converter can run it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from planner.verify.nets.transformer import Shape, Transformer


def llama_config(shape: Shape, max_position_embeddings: int = 4096) -> dict[str, object]:
    """config.json of a `Shape`; the tokenizer's special tokens have the first ids."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_key_value_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size, "rope_theta": shape.rope_theta, "rms_norm_eps": shape.rms_norm_eps, "tie_word_embeddings": True,
        "max_position_embeddings": max_position_embeddings, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip


def export_llama(net: Transformer, tokenizer_file: Path, folder: Path) -> Path:
    """`folder` with config.json, model.safetensors (float32), tokenizer.json and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": p.detach().to(torch.float32).contiguous() for name, p in net.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llama_config(net.shape), indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}) + "\n", encoding="utf-8")
    return folder
