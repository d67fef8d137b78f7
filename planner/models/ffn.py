"""Feed-forward parts of a layer: dense MLPs, routed experts with router and shared expert, latent MoE."""

from __future__ import annotations

from planner.models.fields import Fields
from planner.models.spec import Experts, Matrix, TensorClass
from planner.models.traits import Traits

Ffn = tuple[tuple[Matrix, ...], Experts | None, int]


def gated(cfg: Fields, traits: Traits) -> bool:
    """Whether an MLP has a gate matrix. Squared ReLU never has one."""
    act = cfg.raw.get("mlp_hidden_act") or cfg.raw.get("hidden_act")
    return traits.gated_mlp and act not in ("relu2", "squared_relu")


def mlp(hidden: int, ffn: int, is_gated: bool, *, tensor_class: TensorClass = "mlp") -> tuple[Matrix, ...]:
    prefix = "shared_" if tensor_class == "shared" else ""
    up = Matrix(f"{prefix}up", ffn, hidden, tensor_class, "column", f"{prefix}gate_up" if is_gated else "")
    down = Matrix(f"{prefix}down", hidden, ffn, tensor_class, "row")
    if not is_gated:
        return up, down
    return Matrix(f"{prefix}gate", ffn, hidden, tensor_class, "column", f"{prefix}gate_up"), up, down


def dense(cfg: Fields, traits: Traits, ffn: int | None = None) -> Ffn:
    hidden = cfg.need("hidden")
    is_gated = gated(cfg, traits)
    if ffn is None and not is_gated and not cfg.has("dense_ffn"):
        cfg.note("the MLP width is absent: 4 x hidden size, the default of ungated models")
        ffn = 4 * hidden
    width = ffn or cfg.need("dense_ffn")
    vectors = (2 if is_gated else 1) * width + hidden if cfg.flag("mlp_bias") else 0
    return mlp(hidden, width, is_gated), None, vectors


def expert_width(cfg: Fields) -> int:
    """FFN width of one routed expert; models without a key of its own use intermediate_size."""
    return cfg.maybe("expert_ffn") or cfg.need("ffn")


def moe(cfg: Fields, traits: Traits) -> Ffn:
    """Router, routed experts and the shared expert of one MoE layer."""
    hidden, count, top_k = cfg.need("hidden"), cfg.need("experts"), cfg.need("top_k")
    if top_k > count:
        found = cfg.find("top_k")
        raise cfg.error(found[0] if found else "top_k", "more experts per token than experts", got=top_k, expected=f"at most {count}")
    ffn = expert_width(cfg)
    is_gated = gated(cfg, traits)
    latent = cfg.maybe("latent")
    parts = [Matrix("router", count, hidden, "router", "none")]
    vectors = count if _router_bias(cfg, traits) else 0
    if latent:
        parts += [Matrix("latent_down", latent, hidden, "shared", "none"), Matrix("latent_up", hidden, latent, "shared", "none")]
        vectors += latent if cfg.flag("latent_moe_use_norm", traits.latent_norm) else 0
    shared = shared_width(cfg, traits, ffn)
    if shared:
        parts += mlp(hidden, shared, is_gated, tensor_class="shared")
        if traits.shared_gate:
            parts.append(Matrix("shared_scale", 1, hidden, "router", "none"))
    width = latent or hidden
    bias = (2 if is_gated else 1) * ffn + width if traits.expert_biases else 0
    return tuple(parts), Experts(count, top_k, width, ffn, 3 if is_gated else 2, bias), vectors


def shared_width(cfg: Fields, traits: Traits, ffn: int) -> int:
    """Total FFN width of the shared experts, 0 when there are none."""
    explicit = cfg.maybe("shared_ffn", minimum=0)
    count = cfg.maybe("shared_experts", minimum=0)
    if count == 0 or explicit == 0:
        return 0
    if explicit is not None:
        return explicit
    return ffn * (count if count is not None else int(traits.shared_always))


def _router_bias(cfg: Fields, traits: Traits) -> bool:
    for key in ("use_routing_bias", "use_moe_router_bias", "moe_router_enable_expert_bias"):
        if cfg.raw.get(key) is not None:
            return cfg.flag(key)
    return traits.router_bias or cfg.raw.get("topk_method") == "noaux_tc"
