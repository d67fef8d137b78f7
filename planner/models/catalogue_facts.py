"""Hand-kept inputs of the catalogue: other names of the same architecture, and models written from published fields.

Used by build_catalogue only.
"""

from __future__ import annotations

from typing import Any

#: Catalogue id -> other repositories of the same shape and storage (fine-tunes, instruct versions, later revisions).
ALIASES_OF: dict[str, tuple[str, ...]] = {
    "meta-llama/Meta-Llama-3.1-8B": (
        "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ),
    "meta-llama/Meta-Llama-3.1-70B": (
        "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B", "meta-llama/Meta-Llama-3-70B",
        "meta-llama/Meta-Llama-3-70B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    ),
    "meta-llama/Meta-Llama-3.1-405B": (
        "meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct", "meta-llama/Meta-Llama-3.1-405B-Instruct",
    ),
    "nvidia/Llama-3.1-70B-Instruct-FP8": ("nvidia/Llama-3.3-70B-Instruct-FP8",),
    "meta-llama/Llama-2-7b-hf": ("meta-llama/Llama-2-7b-chat-hf", "lmsys/vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.5"),
    "meta-llama/Llama-2-13b-hf": ("meta-llama/Llama-2-13b-chat-hf", "lmsys/vicuna-13b-v1.3", "lmsys/vicuna-13b-v1.5"),
    "meta-llama/Llama-2-70b-hf": ("meta-llama/Llama-2-70b-chat-hf",),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("meta-llama/Llama-4-Scout-17B-16E",),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": ("meta-llama/Llama-4-Maverick-17B-128E",),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": ("nvidia/Llama-3.3-Nemotron-Super-49B-v1", "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5"),
    "Qwen/Qwen2.5-1.5B": ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "Qwen/Qwen2.5-7B": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    "Qwen/Qwen2.5-32B": (
        "Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/QwQ-32B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    ),
    "Qwen/Qwen2.5-72B": ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2-72B-Instruct"),
    "Qwen/Qwen3-0.6B": ("Qwen/Qwen3-0.6B-Base",),
    "Qwen/Qwen3-1.7B": ("Qwen/Qwen3-1.7B-Base",),
    "Qwen/Qwen3-8B": ("Qwen/Qwen3-8B-Base",),
    "Qwen/Qwen3-30B-A3B": (
        "Qwen/Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    ),
    "Qwen/Qwen3-30B-A3B-FP8": (
        "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B-Thinking-2507-FP8", "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8",
    ),
    "Qwen/Qwen3-235B-A22B": ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen/Qwen3-235B-A22B-Thinking-2507"),
    "Qwen/Qwen3-235B-A22B-FP8": ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8"),
    "nvidia/Qwen3-235B-A22B-NVFP4": ("nvidia/Qwen3-235B-A22B-FP4",),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("Qwen/Qwen3-VL-30B-A3B-Thinking",),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": ("Qwen/Qwen3-VL-235B-A22B-Thinking",),
    "Qwen/Qwen3-VL-2B-Instruct": ("Qwen/Qwen3-VL-2B-Thinking",),
    "Qwen/Qwen3-VL-4B-Instruct": ("Qwen/Qwen3-VL-4B-Thinking",),
    "Qwen/Qwen3-VL-8B-Instruct": ("Qwen/Qwen3-VL-8B-Thinking",),
    "Qwen/Qwen3.5-27B": ("Qwen/Qwen3.6-27B",),
    "Qwen/Qwen3.5-35B-A3B": ("Qwen/Qwen3.6-35B-A3B",),
    "mistralai/Mixtral-8x7B-v0.1": ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
    "mistralai/Mixtral-8x22B-v0.1": ("mistralai/Mixtral-8x22B-Instruct-v0.1",),
    "deepseek-ai/DeepSeek-V3": ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3.1"),
    "deepseek-ai/DeepSeek-R1": ("deepseek-ai/DeepSeek-R1-0528",),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek-ai/DeepSeek-V3.2-Exp",),
    "moonshotai/Kimi-K2-Instruct": ("moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Instruct-0905"),
    "moonshotai/Kimi-K2.5": ("moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2.7-Code"),
    "google/gemma-4-26B-A4B": ("google/gemma-4-26B-A4B-it",),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B",),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B": ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",),
    "zai-org/GLM-4.7": ("zai-org/GLM-4.6", "zai-org/GLM-4.5"),
    "zai-org/GLM-4.7-FP8": ("zai-org/GLM-4.6-FP8", "zai-org/GLM-4.5-FP8"),
    "MiniMaxAI/MiniMax-M2.5": ("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.1"),
    "XiaomiMiMo/MiMo-7B-Base": ("XiaomiMiMo/MiMo-7B-RL", "XiaomiMiMo/MiMo-7B-SFT"),
}  # fmt: skip


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, tie: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": ffn, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": tie,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def _llama32(hidden: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": head_dim, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _written(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"config": config, "reference": f"published fields of huggingface.co/{name}, written by hand"}


_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, True),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17408, False),
    "meta-llama/Llama-3.2-1B": _llama32(2048, 16, 32, 64),
    "meta-llama/Llama-3.2-3B": _llama32(3072, 28, 24, 128),
    "google/gemma-3-27b-it": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024,
        "sliding_window_pattern": 6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    # The Gemma-4-31B-IT-NVFP4 config without its quantisation.
    "google/gemma-4-31B-it": {
        "model_type": "gemma4_text", "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "intermediate_size": 21504,
        "vocab_size": 262144, "max_position_embeddings": 262144, "sliding_window": 1024, "sliding_window_pattern": 6,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
WRITTEN: dict[str, dict[str, Any]] = {name: _written(name, config) for name, config in _CONFIGS.items()}

ALIASES_OF |= {
    "Qwen/Qwen3-4B": ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Thinking-2507"),
    "Qwen/Qwen3-14B": ("Qwen/Qwen3-14B-Base",),
    "meta-llama/Llama-3.2-1B": ("meta-llama/Llama-3.2-1B-Instruct",),
    "meta-llama/Llama-3.2-3B": ("meta-llama/Llama-3.2-3B-Instruct",),
    "google/gemma-3-27b-it": ("google/gemma-3-27b-pt",),
    "google/gemma-4-31B-it": ("google/gemma-4-31B",),
}

#: Official FP8 repositories of models above: 128x128 blocks, router, LM head and the small GDN projection in 16 bit.
FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "linear_attn.in_proj_ba", "linear_attn.in_proj_b"],
}  # fmt: skip
#: Copies of configs whose quantisation section was cut away: they describe the 16-bit model of this name.
RENAMED = {
    "zai-org/GLM-4.7-FP8": "zai-org/GLM-4.7",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B",
}
#: Quantised repositories whose scheme we could not read: name -> (16-bit model, assumed section).
ASSUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "zai-org/GLM-4.7-FP8": ("zai-org/GLM-4.7", {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B", {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    ),
}  # fmt: skip
FP8_OF: dict[str, tuple[str, ...]] = {
    "Qwen/Qwen3-0.6B": ("Qwen/Qwen3-0.6B-FP8",),
    "Qwen/Qwen3-1.7B": ("Qwen/Qwen3-1.7B-FP8",),
    "Qwen/Qwen3-4B": ("Qwen/Qwen3-4B-FP8", "Qwen/Qwen3-4B-Instruct-2507-FP8"),
    "Qwen/Qwen3-8B": ("Qwen/Qwen3-8B-FP8",),
    "Qwen/Qwen3-14B": ("Qwen/Qwen3-14B-FP8",),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "Qwen/Qwen3-Next-80B-A3B-Thinking-FP8", "Qwen/Qwen3-Coder-Next-FP8",
    ),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": ("Qwen/Qwen3-VL-235B-A22B-Instruct-FP8", "Qwen/Qwen3-VL-235B-A22B-Thinking-FP8"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("Qwen/Qwen3-VL-30B-A3B-Instruct-FP8", "Qwen/Qwen3-VL-30B-A3B-Thinking-FP8"),
    "Qwen/Qwen3-VL-32B-Instruct": ("Qwen/Qwen3-VL-32B-Instruct-FP8", "Qwen/Qwen3-VL-32B-Thinking-FP8"),
    "Qwen/Qwen3.5-27B": ("Qwen/Qwen3.5-27B-FP8", "Qwen/Qwen3.6-27B-FP8"),
    "Qwen/Qwen3.5-35B-A3B": ("Qwen/Qwen3.5-35B-A3B-FP8", "Qwen/Qwen3.6-35B-A3B-FP8"),
    "Qwen/Qwen3.5-122B-A10B": ("Qwen/Qwen3.5-122B-A10B-FP8",),
    "Qwen/Qwen3.5-397B-A17B": ("Qwen/Qwen3.5-397B-A17B-FP8",),
}  # fmt: skip
