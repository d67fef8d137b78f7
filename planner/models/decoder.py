"""A checked config object -> layers, loose parameters and MTP blocks of a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.models import ffn, mixers
from planner.models.fields import Fields
from planner.models.plan import LayerPlan, block_plan, pattern_blocks, plan_layers
from planner.models.spec import AttentionCore, Experts, Layer, Matrix, Mtp
from planner.models.traits import Traits


@dataclass(frozen=True, slots=True)
class Decoder:
    layers: tuple[Layer, ...]
    vector_params: int
    extra_matrices: tuple[Matrix, ...]
    mtp: Mtp | None


def read_decoder(cfg: Fields, traits: Traits) -> Decoder:
    """Layers by kind; equal plans share one Layer object."""
    hidden = cfg.need("hidden")
    blocks = pattern_blocks(cfg, "hybrid_override_pattern", "layers_block_type")
    variants = cfg.items("block_configs")
    if variants is not None:
        layers = tuple(_nas_layers(cfg, traits, variants))
        plans: list[LayerPlan] = []
    else:
        plans = [block_plan(b) for b in blocks] if blocks is not None else plan_layers(cfg, traits)
        _note_length(cfg, len(plans))
        built: dict[LayerPlan, Layer] = {}
        for plan in plans:
            if plan not in built:
                built[plan] = build_layer(cfg, traits, plan)
        layers = tuple(built[plan] for plan in plans)
    extra, per_layer_vectors = _per_layer_inputs(cfg, len(layers))
    hyper = _hyper_head(cfg, hidden)
    return Decoder(layers, hidden + per_layer_vectors + hyper, extra, read_mtp(cfg, traits, plans))


def _note_length(cfg: Fields, count: int) -> None:
    declared = cfg.maybe("num_layers")
    if declared is not None and declared != count:
        cfg.note(f"num_hidden_layers = {declared} contradicts the layer pattern of {count} blocks; the pattern is used")


def build_layer(cfg: Fields, traits: Traits, plan: LayerPlan) -> Layer:
    hidden = cfg.need("hidden")
    core, matrices, vectors = _mixer(cfg, traits, plan)
    parts = list(matrices)
    experts: Experts | None = None
    wide = cfg.need("dense_ffn") * 2 if plan.shares_kv and cfg.flag("use_double_wide_mlp") else None
    if plan.ffn in ("dense", "both"):
        more, _, count = ffn.dense(cfg, traits, wide)
        parts += more
        vectors += count
    if plan.ffn in ("moe", "both"):
        more, experts, count = ffn.moe(cfg, traits)
        parts += more
        vectors += count
    if plan.ffn == "both":
        # Gemma 4 norms the dense and the routed path apart, scales the router input and each expert.
        vectors += 4 * hidden + (experts.num_experts if experts else 0)
    vectors += traits.norms * hidden + _hyper_layer(cfg, hidden) + _gemma_layer(cfg, parts)
    return Layer(core, tuple(parts), experts, vectors)


def _mixer(cfg: Fields, traits: Traits, plan: LayerPlan) -> tuple[AttentionCore | None, tuple[Matrix, ...], int]:
    if plan.mixer == "none":
        return None, (), 0
    if plan.mixer == "mamba":
        return mixers.mamba2(cfg)
    if plan.mixer == "linear":
        return mixers.kda(cfg) if cfg.raw.get("linear_attn_config") else mixers.gated_delta(cfg)
    if cfg.has("compress_ratios"):
        return mixers.compressed(cfg, plan.ratio)
    if cfg.has("kv_lora_rank"):
        return mixers.mla(cfg, indexer="full" if plan.indexer == "full" else "shared" if plan.indexer == "shared" else "none")
    return mixers.gqa(cfg, traits, plan.mixer, window=plan.window, shares_kv=plan.shares_kv)


def _gemma_layer(cfg: Fields, parts: list[Matrix]) -> int:
    """Gemma 3n/4: gate, projection and norm of per-layer inputs where they exist (the layer scalar is a buffer, not counted)."""
    width = cfg.optional("hidden_size_per_layer_input")
    if not width:
        return 0
    hidden = cfg.need("hidden")
    parts += [Matrix("ple_gate", width, hidden, "mlp", "none"), Matrix("ple_proj", hidden, width, "mlp", "none")]
    return hidden


def _per_layer_inputs(cfg: Fields, count: int) -> tuple[tuple[Matrix, ...], int]:
    width = cfg.optional("hidden_size_per_layer_input")
    if not width:
        return (), 0
    vocab = cfg.maybe("vocab_size_per_layer_input") or cfg.need("vocab")
    hidden = cfg.need("hidden")
    table = Matrix("ple_embed", vocab, count * width, "embed", "none", rows_frac=0.0)
    return (table, Matrix("ple_model_proj", count * width, hidden, "mlp", "none")), width


def _hyper_layer(cfg: Fields, hidden: int) -> int:
    """Hyper-connections (DeepSeek-V4): two mixers of (2 + m) m x (m h) with base and scale, m residual streams."""
    streams = cfg.optional("hc_mult")
    mix = (2 + streams) * streams
    return 2 * (mix * streams * hidden + mix + 3) if streams else 0


def _hyper_head(cfg: Fields, hidden: int) -> int:
    streams = cfg.optional("hc_mult")
    return streams * streams * hidden + streams + 1 if streams else 0


def _nas_layers(cfg: Fields, traits: Traits, variants: list[object]) -> list[Layer]:
    """Nemotron-NAS: each block names its own attention and MLP, or none, or one linear layer in their place."""
    _note_length(cfg, len(variants))
    if len(variants) > 4096:
        raise cfg.error("block_configs", "implausibly many blocks", got=len(variants), expected="at most 4096")
    built: dict[str, Layer] = {}
    layers = []
    for i, variant in enumerate(variants):
        key = repr(variant)
        if key not in built:
            where = f"block_configs[{i}]"
            if not isinstance(variant, Mapping):
                raise cfg.error(where, "not an object", got=key[:60], expected="an object with attention and ffn")
            built[key] = _nas_layer(cfg, traits, Fields(variant, f"{cfg.where}, {where}", cfg.notes))
        layers.append(built[key])
    return layers


def _nas_layer(cfg: Fields, traits: Traits, variant: Fields) -> Layer:
    hidden = cfg.need("hidden")
    attention, mlp_part = variant.table("attention"), variant.table("ffn")
    if attention is None or mlp_part is None:
        raise variant.error("attention", "a block needs attention and ffn", expected="two objects")
    core, parts, vectors = None, [], 0
    if attention.flag("replace_with_linear"):
        parts.append(mixers.matrix("attn_linear", hidden, hidden, "none"))
        vectors += hidden
    elif not attention.flag("no_op"):
        heads = cfg.need("heads")
        group = attention.need("n_heads_in_group")
        merged = {**cfg.raw, "num_key_value_heads": max(1, heads // group)}
        mixer = mixers.gqa(Fields(merged, attention.where, cfg.notes), traits, "full", window=attention.maybe("window_length"))
        core, vectors = mixer[0], mixer[2] + hidden
        parts += mixer[1]
    if mlp_part.flag("replace_with_linear"):
        parts.append(Matrix("mlp_linear", hidden, hidden, "mlp", "none"))
        vectors += hidden
    elif not mlp_part.flag("no_op"):
        width = mlp_part.maybe("intermediate_size") or _nas_width(mlp_part, hidden)
        more, _, count = ffn.dense(cfg, traits, width)
        parts += more
        vectors += count + hidden
    return Layer(core, tuple(parts), None, vectors)


def _nas_width(part: Fields, hidden: int) -> int:
    """2/3 ffn_mult x hidden, rounded up to a multiple of 256."""
    mult = part.raw.get("ffn_mult")
    if isinstance(mult, bool) or not isinstance(mult, (int, float)) or not 0 < mult < 1e3:
        raise part.error("ffn_mult", "not a usable number", got=mult, expected="a positive number")
    return -(-int(2 * mult * hidden / 3) // 256) * 256


def read_mtp(cfg: Fields, traits: Traits, plans: list[LayerPlan]) -> Mtp | None:
    """The declared MTP blocks, or those a family ships without declaring them."""
    found = cfg.find("mtp")
    count = cfg.optional("mtp")
    if found is not None and cfg.raw.get("use_mtp") is False:
        cfg.note(f"{found[0]} = {count} but use_mtp is false: no MTP")
        return None
    if found is None and traits.mtp_default:
        count = traits.mtp_default
        cfg.note(f"MTP: not declared; released checkpoints of this family hold {count} block(s), so that is assumed, not verified")
    elif count:
        cfg.note(f"MTP: {count} block(s) declared by {found[0] if found else ''}, not verified against the checkpoint's tensors")
    if not count or not plans:
        return None
    if traits.mtp_absent:
        cfg.note("MTP: the released checkpoints of this family whose element totals are known hold none of the declared blocks")
    if count > 64:
        raise cfg.error(found[0] if found else "num_nextn_predict_layers", "implausibly many MTP blocks", got=count, expected="at most 64")
    hidden = cfg.need("hidden")
    blocks = pattern_blocks(cfg, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    chosen = [block_plan(b) for b in blocks] if blocks is not None else [_mtp_plan(traits, plans)]
    joins = (Matrix("mtp_join", hidden, 2 * hidden, "mlp", "none"),)
    layers = tuple(build_layer(cfg, traits, plan) for plan in chosen)
    return Mtp(count, layers, joins, 3 * hidden + _hyper_head(cfg, hidden))


def _mtp_plan(traits: Traits, plans: list[LayerPlan]) -> LayerPlan:
    """The kind of the last full-attention layer (or sliding one), with its MLP unless the family's block is dense."""
    wanted = "sliding" if traits.mtp_sliding else "full"
    likely = [p for p in plans if p.mixer == wanted and not p.shares_kv] or [p for p in plans if p.mixer not in ("linear", "mamba", "none")]
    base = (likely or plans)[-1]
    mlp_kind = "dense" if traits.mtp_dense else plans[-1].ffn
    indexer = "full" if base.indexer == "shared" else base.indexer
    return LayerPlan(base.mixer, mlp_kind, base.window, indexer, 0, False)
