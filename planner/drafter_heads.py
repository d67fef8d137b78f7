"""Shapes of draft heads as layers and matrices: read from a head's own config, or the usual head of its kind.

Every model drafter becomes `planner.models.spec.Layer`s, so cost has one path for target and drafter. Shapes the usual heads follow are
those of published training templates (SpecForge configs, https://github.com/sgl-project/SpecForge) and of facts gathered per kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.errors import InputError, ModelConfigError
from planner.models.spec import KvAttention, Layer, Matrix, ModelSpec

#: FFN width over hidden size where the target's own FFN is no guide (mixture of experts): SpecForge gpt-oss and Qwen3-30B EAGLE-3 6x,
#: Qwen3.5-35B DFlash 3x, GLM-5.2 and Kimi-K3 DSpark 2x.
MOE_FFN = {"eagle3": 6.0, "dflash": 3.0, "dspark": 2.0, "mtp": 3.0}
USUAL_LAYERS = {"eagle3": 1, "dflash": 5, "dspark": 5}
USUAL_BLOCK = {"dflash": 16, "dspark": 7}
USUAL_TAPS = {"eagle3": 3, "dflash": 5, "dspark": 5}
USUAL_DRAFT_VOCAB = 32_000
USUAL_MARKOV_RANK = 256
#: Small dense decoders an external drafter is modelled on: layers, hidden, heads, KV heads, head_dim (Qwen2.5-0.5B, Qwen3-0.6B,
#: Llama-3.2-1B, Qwen3-1.7B, Llama-3.2-3B, Qwen3-8B, Qwen3-14B, Qwen3-32B), by parameters.
LADDER = (
    (0.5e9, 24, 896, 14, 2, 64), (0.6e9, 28, 1024, 16, 8, 128), (1.24e9, 16, 2048, 32, 8, 64), (1.7e9, 28, 2048, 16, 8, 128),
    (3.2e9, 28, 3072, 24, 8, 128), (8.2e9, 36, 4096, 32, 8, 128), (14.8e9, 40, 5120, 40, 8, 128), (32.8e9, 64, 5120, 64, 8, 128),
)  # fmt: skip
_ARCH = (("dspark", "dspark"), ("dflash", "dflash"), ("domino", "dflash"), ("peagle", "eagle3"), ("eagle", "eagle3"), ("mlpspec", "eagle3"))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a head's config says. `taps`: target layers fused; `sample_from_anchor`: a block of B gives B drafts (else B - 1)."""

    kind: str
    num_layers: int
    hidden_size: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab: int
    block: int | None = None
    windows: tuple[int | None, ...] = ()
    markov_rank: int = 0
    taps: int = 0
    target_hidden: int | None = None
    variant: str | None = None
    anchor: bool | None = None
    attention: bool = True
    notes: tuple[str, ...] = ()


def dense_layer(shape: HeadShape, index: int = 0, *, in_width: int | None = None, shares_kv: bool = False) -> Layer:
    """One Llama-style layer of a head; `in_width` widens the attention input (EAGLE-3 concatenates embedding and features: 2h)."""
    h, wide = shape.hidden_size, in_width or shape.hidden_size
    mlp = (
        Matrix("gate", shape.ffn, h, "mlp", "column", "gate_up"),
        Matrix("up", shape.ffn, h, "mlp", "column", "gate_up"),
        Matrix("down", h, shape.ffn, "mlp", "row"),
    )
    if not shape.attention:
        return Layer(None, (Matrix("proj", h, wide, "mlp", "column"),), vector_params=2 * h)
    window = shape.windows[index] if index < len(shape.windows) else None
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    core = KvAttention(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, window=window, shares_kv=shares_kv)
    own = () if shares_kv else (Matrix("k", kv, wide, "attn", "kv", "qkv"), Matrix("v", kv, wide, "attn", "kv", "qkv"))
    attn = (Matrix("q", q, wide, "attn", "column", "qkv"), *own, Matrix("o", h, q, "attn", "row"))
    return Layer(core, (*attn, *mlp), vector_params=2 * h)


def head_layers(shape: HeadShape) -> tuple[Layer, ...]:
    """The layers of an EAGLE-3, DFlash or DSpark head."""
    first = 2 * shape.hidden_size if shape.kind == "eagle3" and shape.attention else None
    return tuple(dense_layer(shape, n, in_width=first if n == 0 else None) for n in range(shape.num_layers))


def target_core(target: ModelSpec) -> KvAttention | None:
    """The target's full attention, else its sliding one, else None (MLA, linear)."""
    cores = [c for c, _ in target.attention_cores() if isinstance(c, KvAttention) and not c.shares_kv]
    return next((c for c in reversed(cores) if c.window is None), cores[-1] if cores else None)


def _target_ffn(target: ModelSpec) -> int | None:
    """FFN width of a dense target."""
    if target.is_moe:
        return None
    widths = [m.k for layer in target.layers for m in layer.matrices if m.tensor_class == "mlp" and m.name == "down"]
    return max(widths) if widths else None


def usual_shape(kind: str, target: ModelSpec, *, num_layers: int | None, hidden_size: int | None, draft_vocab: int | None) -> HeadShape:
    """The usual head of a kind for this target: hidden size, heads and (dense) FFN of the target, a reduced vocabulary for EAGLE-3."""
    hidden = hidden_size or target.hidden_size
    core = target_core(target) if hidden == target.hidden_size else None
    head_dim = core.head_dim if core and core.head_dim <= 128 else 128 if hidden % 128 == 0 else 64
    heads = core.num_heads if core and core.head_dim <= 128 else max(1, hidden // head_dim)
    kv_heads = core.num_kv_heads if core and heads % core.num_kv_heads == 0 else math.gcd(heads, 8)
    ffn = (_target_ffn(target) if hidden == target.hidden_size else None) or int(MOE_FFN[kind] * hidden)
    vocab = draft_vocab or (min(USUAL_DRAFT_VOCAB, target.vocab_size) if kind == "eagle3" else target.vocab_size)
    return HeadShape(
        kind, num_layers or USUAL_LAYERS[kind], hidden, ffn, heads, kv_heads, head_dim, target.vocab_size, vocab,
        markov_rank=USUAL_MARKOV_RANK if kind == "dspark" else 0, taps=USUAL_TAPS[kind],
    )  # fmt: skip


def small_model(target: ModelSpec, *, params: float | None, num_layers: int | None, hidden_size: int | None) -> ModelSpec:
    """A plausible dense decoder of about `params` parameters with the target's vocabulary (tied embeddings below 3e9)."""
    size = params or 0.6e9
    rung = min(LADDER, key=lambda r: abs(math.log(r[0] / size)))
    layers, hidden = num_layers or rung[1], hidden_size or rung[2]
    head_dim = rung[5] if hidden_size is None else (128 if hidden % 128 == 0 else 64)
    heads = rung[3] if hidden_size is None else max(1, hidden // head_dim)
    kv_heads = rung[4] if hidden_size is None else math.gcd(heads, 8)
    tied = size < 3e9
    body = size - target.vocab_size * hidden * (1 if tied else 2)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    ffn = int((body / layers - attention) / (3 * hidden)) if params and body > 0 else 3 * hidden
    ffn = max(hidden, min(ffn, 16 * hidden)) // 64 * 64
    shape = HeadShape("external", layers, hidden, ffn, heads, kv_heads, head_dim, target.vocab_size, target.vocab_size)
    made = tuple(dense_layer(shape) for _ in range(layers))
    return ModelSpec(f"draft-{size / 1e9:.2g}B", "llama", hidden, target.vocab_size, made, tied, target.base_dtype, source="synthesised")


# ---------------------------------------------------------------- a head's own config


def load_config(path: Path, where: str) -> dict[str, Any]:
    """The JSON object in a config.json (or in a folder that has one)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = "cannot read the drafter config"
        raise ModelConfigError(what, where=where, got=str(path), expected="a config.json", hint=str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ModelConfigError("not JSON", where=str(file), got=str(error), expected="a config.json object") from None
    if not isinstance(raw, dict):
        raise ModelConfigError("not a JSON object", where=str(file), got=type(raw).__name__, expected="a config.json object")
    return raw


def head_kind(raw: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """(kind, variant) a config describes, or None when it is a language model of its own."""
    named = str(raw.get("speculators_model_type") or "").lower()
    archs = raw.get("architectures")
    arch = str(archs[0]).lower() if isinstance(archs, list) and archs else ""
    text = f"{named} {arch} {raw.get('model_type', '')}".replace("_", "").lower()
    for word, kind in _ARCH:
        if word in text:
            variant = {"domino": "domino", "peagle": "p-eagle", "mlpspec": "mlp-speculator"}.get(word)
            return kind, "dflash2" if "dflash2" in text else variant
    if "markov_rank" in raw or "dflash_config" in raw or "target_layer_ids" in raw:
        nested = raw.get("dflash_config")
        ranked = "markov_rank" in raw or (isinstance(nested, Mapping) and "markov_rank" in nested)
        return ("dspark" if ranked else "dflash"), None
    if "draft_vocab_size" in raw or "eagle_config" in raw:
        return "eagle3", None
    return None


def read_head(raw: Mapping[str, Any], where: str) -> HeadShape:
    """The shape a head's config gives (SpecForge / z-lab / DeepSpec flat forms, the speculators format, MLPSpeculator)."""
    found = head_kind(raw)
    kind, variant = found or ("eagle3", None)
    if variant == "mlp-speculator":
        return _read_mlp(raw, where)
    nested = raw.get("dflash_config")
    extra = nested if isinstance(nested, Mapping) else {}
    body = raw.get("transformer_layer_config")
    cfg: dict[str, Any] = {**raw, **(body if isinstance(body, Mapping) else {})}
    hidden, heads = _int(cfg, "hidden_size", where), _int(cfg, "num_attention_heads", where)
    head_dim = _int(cfg, "head_dim", where, default=hidden // heads)
    vocab = _int(cfg, "vocab_size", where)
    draft_vocab = _int(raw, "draft_vocab_size", where, default=vocab)
    block = _int(raw, "block_size", where, default=_int(raw, "dspark_block_size", where, default=0)) or None
    layers = _int(cfg, "num_hidden_layers", where)
    markov = _int({**extra, **raw}, "markov_rank", where, default=0, minimum=0) if kind == "dspark" else 0
    kv_heads = _int(cfg, "num_key_value_heads", where, default=heads)
    notes = [] if "draft_vocab_size" in raw else [f"no draft_vocab_size: the whole vocabulary of {vocab} is drafted over"]
    anchor = raw.get("sample_from_anchor")
    shape = HeadShape(
        kind, layers, hidden, _int(cfg, "intermediate_size", where), heads, kv_heads, head_dim, vocab, draft_vocab,
        block, _windows(cfg, layers, where), markov, _taps(raw, extra, kind), raw.get("target_hidden_size"), variant,
        anchor if isinstance(anchor, bool) else None, notes=tuple(notes),
    )  # fmt: skip
    if shape.heads % shape.kv_heads:
        raise ModelConfigError("query heads are not a multiple of KV heads", where=f"{where}.num_key_value_heads", got=shape.kv_heads,
                               expected=f"a divisor of {shape.heads}")  # fmt: skip
    return replace(shape, target_hidden=shape.target_hidden if isinstance(shape.target_hidden, int) else None)


def _read_mlp(raw: Mapping[str, Any], where: str) -> HeadShape:
    """MLPSpeculator: no attention, one projection and LM head per drafted token."""
    inner = _int(raw, "inner_dim", where, default=_int(raw, "emb_dim", where, default=4096))
    vocab, steps = _int(raw, "vocab_size", where), _int(raw, "n_predict", where, default=3)
    return HeadShape("eagle3", 1, inner, inner, 1, 1, 1, vocab, vocab, block=steps, variant="mlp-speculator", attention=False,
                     notes=("MLP speculator: no attention and no KV cache",))  # fmt: skip


def _taps(raw: Mapping[str, Any], extra: Mapping[str, Any], kind: str) -> int:
    eagle = raw.get("eagle_config")
    for source in (raw, extra, eagle if isinstance(eagle, Mapping) else {}):
        for key in ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids"):
            ids = source.get(key)
            if isinstance(ids, list) and ids:
                return len(ids)
    return USUAL_TAPS[kind]


def _windows(cfg: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    window = cfg.get("sliding_window")
    if window is None or cfg.get("use_sliding_window") is False:
        return ()
    width = _int(cfg, "sliding_window", where)
    kinds = cfg.get("layer_types")
    if isinstance(kinds, list) and len(kinds) >= layers:
        return tuple(width if "sliding" in str(k) else None for k in kinds[:layers])
    return (width,) * layers


def _int(cfg: Mapping[str, Any], key: str, where: str, *, default: int | None = None, minimum: int = 1) -> int:
    value = cfg.get(key)
    if value is None:
        if default is None:
            raise ModelConfigError(f"the drafter config lacks {key}", where=where, expected=f"{key} as a whole number")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 10**8:
        raise ModelConfigError(f"{key} is not usable", where=f"{where}.{key}", got=value, expected=f"a whole number of at least {minimum}")
    return value


def check_shape_kind(shape: HeadShape, kind: str, where: str) -> None:
    """A config of another kind than asked for is an error, not a guess."""
    if shape.kind != kind:
        raise InputError(
            f"the config describes a {shape.kind} head", where=where, got=shape.kind, expected=f"a {kind} config",
            hint=f'Set "kind": "{shape.kind}" or give the config of a {kind} drafter.',
        )  # fmt: skip
