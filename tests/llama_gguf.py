"""A Llama-format checkpoint of `planner.verify.hf_export` as a GGUF file for llama.cpp (float32, byte-level BPE). Needs the `gguf` package.

Only what the shipped family has: one safetensors file, tied embeddings, a byte-level tokenizer with GPT-2's splitting rule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a q or k projection in the order of llama.cpp's `llama` architecture, which rotates neighbours (2i, 2i + 1) where Hugging Face
    rotates (i, i + d/2)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tensor(name: str, weight: NDArray[Any], config: dict[str, Any]) -> tuple[str, NDArray[Any]]:
    """A tensor under llama.cpp's name; a name that is not known is a KeyError."""
    if name in _TOP:
        return _TOP[name], weight
    _, _, layer, *middle, kind = name.split(".")
    part = ".".join(middle)
    if part == "self_attn.q_proj":
        weight = interleaved(weight, config["num_attention_heads"])
    elif part == "self_attn.k_proj":
        weight = interleaved(weight, config["num_key_value_heads"])
    return f"blk.{layer}.{_NAMES[part]}.{kind}", weight


def write_gguf(folder: Path, path: Path) -> Path:
    """`path` from the checkpoint in `folder`."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    out = gguf.GGUFWriter(path, "llama")
    out.add_name(folder.name)
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    for add in (out.add_key_length, out.add_value_length, out.add_rope_dimension_count):
        add(config["head_dim"])  # not hidden_size / heads
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    _tokenizer(out, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    for name, weight in load_file(folder / "model.safetensors").items():
        out.add_tensor(*tensor(name, np.ascontiguousarray(weight, dtype=np.float32), config))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _tokenizer(out: Any, raw: dict[str, Any], config: dict[str, Any]) -> None:
    import gguf

    vocab = {i: t for t, i in raw["model"]["vocab"].items()}
    special = {t["id"] for t in raw["added_tokens"] if t["special"]}
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([vocab[i] for i in range(config["vocab_size"])])
    out.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(config["vocab_size"])])
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]])
    out.add_bos_token_id(config["bos_token_id"])
    out.add_eos_token_id(config["eos_token_id"])
    out.add_pad_token_id(config["pad_token_id"])
    out.add_add_bos_token(True)
    out.add_add_space_prefix(False)
