"""What a family does that its config.json does not say: norms, biases, defaults. Data, looked up by model_type.

Each row was checked against the element totals of tests/golden/model_sizes.csv where one exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Traits:
    """Defaults of a model_type; a key in the config always wins over them."""

    qk_norm: Literal["none", "head", "layer"] = "none"
    """Norm weights on queries and keys: one head_dim each, or one per projected feature."""
    qkv_bias: bool = False
    """Bias on q, k, v when `attention_bias` is absent."""
    o_bias: bool = True
    """Whether `attention_bias: true` also puts a bias on the output projection."""
    sinks: bool = False
    """One learned sink logit per head and layer."""
    gated_attention: bool = False
    """q_proj also yields an output gate: twice the query width."""
    norms: int = 2
    """Norm vectors of hidden size per layer."""
    gated_mlp: bool = True
    """Gate, up, down; False: up and down only."""
    router_bias: bool = False
    """One correction (or plain) bias per expert."""
    shared_always: bool = False
    """One shared expert of the expert width although no key says so."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid of one h -> 1 projection."""
    expert_biases: bool = False
    tie: bool = False
    """Tied embeddings when `tie_word_embeddings` is absent."""
    window_period: int = 0
    """Every n-th layer is full attention when neither layer_types nor a pattern key says so; 0: window on all layers."""
    chunked: bool = False
    """`attention_chunk_size` is in force on the layers that use rotary positions."""
    mtp_default: int = 0
    """MTP blocks in the released checkpoint although the config does not declare them."""
    mtp_dense: bool = False
    """The MTP block has a dense MLP although the last layers are MoE."""
    mtp_sliding: bool = False
    mtp_fp8: bool = False
    """The released FP8 checkpoint stores the MTP block in FP8 too (its scale tensors are in the element total)."""
    mtp_absent: bool = False
    """Released checkpoints hold none of the blocks that their config declares (element totals match without them)."""
    latent_norm: bool = False


_GLM_MOE = Traits(qkv_bias=True, o_bias=False, qk_norm="head", router_bias=True, mtp_default=1)
_MLA = Traits(router_bias=True, mtp_fp8=True)
_QWEN3 = Traits(qk_norm="head")
_GDN = Traits(qk_norm="head", gated_attention=True, shared_gate=True)
_NEMOTRON_H = Traits(norms=1, gated_mlp=False, router_bias=True)
_UNGATED = Traits(gated_mlp=False)

TRAITS: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "mixtral": Traits(),
    "qwen2": Traits(qkv_bias=True, o_bias=False),
    "qwen2_5_vl": Traits(qkv_bias=True, o_bias=False),
    "qwen2_5_omni": Traits(qkv_bias=True, o_bias=False),
    "qwen2_moe": Traits(qkv_bias=True, o_bias=False, shared_gate=True),
    "mimo": Traits(qkv_bias=True, o_bias=False),
    "mimo_v2_flash": Traits(router_bias=True, mtp_default=3, mtp_dense=True, mtp_sliding=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_omni_moe": _QWEN3,
    "qwen3_next": Traits(qk_norm="head", gated_attention=True, shared_gate=True, mtp_default=1),
    "qwen3_5": _GDN,
    "qwen3_5_moe": _GDN,
    "minimax_m2": Traits(qk_norm="layer", router_bias=True, mtp_absent=True),
    "minimax_m3": Traits(qk_norm="head", router_bias=True),
    "deepseek_v2": Traits(),
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "deepseek_v4": Traits(router_bias=True, sinks=True),
    "kimi_k2": _MLA,
    "kimi_linear": Traits(router_bias=True, latent_norm=True),
    "glm_moe_dsa": _MLA,
    "glm4": Traits(qkv_bias=True, o_bias=False, norms=4),
    "glm4_moe": _GLM_MOE,
    "gpt_oss": Traits(qkv_bias=True, sinks=True, router_bias=True, expert_biases=True, window_period=2),
    "gemma2": Traits(norms=4, tie=True, window_period=2),
    "gemma3": Traits(norms=4, qk_norm="head", tie=True, window_period=6),
    "gemma4": Traits(norms=4, qk_norm="head", tie=True, window_period=6),
    "cohere2": Traits(norms=1, tie=True, window_period=4),
    "llama4": Traits(shared_always=True, chunked=True),
    "nemotron_h": _NEMOTRON_H,
    "nemotron-nas": Traits(),
    "step3p5": Traits(qk_norm="head", router_bias=True, mtp_dense=True),
    "step3p7": Traits(qk_norm="head", router_bias=True, mtp_dense=True),
    "nemotron": _UNGATED,
    "starcoder2": _UNGATED,
    "falcon": _UNGATED,
    "gpt_neox": _UNGATED,
    "gpt2": Traits(gated_mlp=False, tie=True, qkv_bias=True),
    "opt": Traits(gated_mlp=False, tie=True, qkv_bias=True),
}

#: Checkpoints that write only what differs from their transformers class (5.24.0): the class's own values for the rest.
CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
}  # fmt: skip

#: Other spellings of a model_type, and the architectures that settle a placeholder one.
SAME_AS = {"deepseek_ref": "deepseek_v4", "kimi_k25": "kimi_k2", "kimi_k3": "kimi_linear", "mimo_v2": "mimo_v2_flash"}
ARCHITECTURES = {"DeepseekV4ForCausalLM": "deepseek_v4", "DeepseekV32ForCausalLM": "deepseek_v32", "DeciLMForCausalLM": "nemotron-nas"}


def family(model_type: str, architectures: object = None) -> tuple[str, Traits, bool]:
    """Canonical family, its traits, and whether the family is known."""
    name = model_type.removesuffix("_text").removesuffix("_thinker")
    if isinstance(architectures, list):
        named = [ARCHITECTURES[a] for a in architectures if isinstance(a, str) and a in ARCHITECTURES]
        name = named[0] if named else name
    name = SAME_AS.get(name, name)
    known = TRAITS.get(name)
    return name, known or Traits(), known is not None
