"""Which kind of mixer and which kind of MLP each layer has, from whichever of the many keys say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.errors import ModelConfigError
from planner.models.fields import LARGEST_LAYER_COUNT, Fields
from planner.models.traits import Traits

#: Words of layer_types / layers_block_type -> our mixer kinds. "none" = a block without a mixer.
MIXER_WORDS = {
    "full_attention": "full", "attention": "full", "full": "full", "global": "full", "global_attention": "full",
    "sliding_attention": "sliding", "sliding": "sliding", "sliding_window": "sliding", "local": "sliding",
    "local_attention": "sliding", "chunked_attention": "chunked",
    "linear_attention": "linear", "gated_delta_net": "linear", "gdn": "linear", "kda": "linear",
    "mamba": "mamba", "mamba2": "mamba",
    "deepseek_sparse_attention": "full", "compressed_sparse_attention": "full", "heavily_compressed_attention": "full",
}  # fmt: skip
PATTERN_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
BLOCK_WORDS = ("mamba", "attention", "mlp", "moe")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Kinds of one layer: mixer full | sliding | chunked | sparse | linear | mamba | none, ffn dense | moe | both | none."""

    mixer: str
    ffn: str
    window: int | None = None
    indexer: str = "none"
    ratio: int = 0
    shares_kv: bool = False


def pattern_blocks(cfg: Fields, pattern_key: str, words_key: str) -> list[str] | None:
    """Blocks of a Nemotron-H stack: the pattern string, else the list of words; their length beats num_hidden_layers."""
    pattern = cfg.raw.get(pattern_key)
    words = cfg.strings(words_key)
    if pattern is None and words is None:
        return None
    if len(pattern if isinstance(pattern, str) else words or ()) > LARGEST_LAYER_COUNT:
        raise cfg.error(pattern_key, "implausibly many layers", expected=f"at most {LARGEST_LAYER_COUNT}")
    if pattern is None:
        for i, word in enumerate(words or ()):
            if word not in BLOCK_WORDS:
                raise cfg.error(f"{words_key}[{i}]", "unknown block", got=word, expected=", ".join(BLOCK_WORDS))
        return words
    if not isinstance(pattern, str) or not pattern:
        raise cfg.error(pattern_key, "not a pattern string", got=pattern, expected="letters M, E, * and -")
    letters = pattern.replace("|", "").replace("/", "")
    for i, letter in enumerate(letters):
        if letter not in PATTERN_LETTERS:
            raise cfg.error(pattern_key, f"unknown letter at position {i}", got=letter, expected="M, E, * or -")
    blocks = [PATTERN_LETTERS[letter] for letter in letters]
    if words is not None and words != blocks:
        cfg.note(f"{words_key} contradicts {pattern_key}; {pattern_key} is used")
    return blocks


def block_plan(block: str) -> LayerPlan:
    """A Nemotron-H block is either a mixer or an MLP."""
    if block == "mamba":
        return LayerPlan("mamba", "none")
    if block == "attention":
        return LayerPlan("full", "none")
    return LayerPlan("none", "moe" if block == "moe" else "dense")


def plan_layers(cfg: Fields, traits: Traits) -> list[LayerPlan]:
    """One LayerPlan per layer of a decoder that is not a Nemotron-H or NAS stack."""
    count = layer_count(cfg)
    mixers = _mixers(cfg, traits, count)
    ffns = _ffns(cfg, count)
    indexers = _indexers(cfg, count)
    ratios = _per_layer(cfg, "compress_ratios", cfg.ints("compress_ratios"), count) or [0] * count
    sparse = _sparse_layers(cfg, count)
    shared_from = count - cfg.optional("num_kv_shared_layers")
    if shared_from < 0:
        raise cfg.error("num_kv_shared_layers", "more than there are layers", got=count - shared_from, expected=f"at most {count}")
    window = cfg.maybe("window")
    chunk = cfg.maybe("attention_chunk_size")
    limits = {"sliding": window, "chunked": chunk}
    for kind, key in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
        if kind in mixers and limits[kind] is None:
            raise cfg.error(key, f"missing, but some layers are {kind} attention", expected="a positive integer")
    if "chunked" in mixers:
        cfg.note(f"chunked attention: a query sees at most {chunk} tokens, on average half a chunk; priced as a window of a whole chunk")
    plans = []
    for i in range(count):
        mixer = "sparse" if sparse[i] and mixers[i] == "full" else mixers[i]
        plans.append(LayerPlan(mixer, ffns[i], limits.get(mixer), indexers[i], ratios[i], i >= shared_from))
    return plans


def layer_count(cfg: Fields) -> int:
    count = cfg.maybe("num_layers")
    if count is None and (types := cfg.items("layer_types")):
        cfg.note("num_hidden_layers is absent: the length of layer_types is used")
        count = len(types)
    count = count or cfg.need("num_layers")
    if count > LARGEST_LAYER_COUNT:
        raise cfg.error("num_hidden_layers", "implausibly many layers", got=count, expected=f"at most {LARGEST_LAYER_COUNT}")
    return count


def _per_layer(cfg: Fields, key: str, values: list[Any] | None, count: int) -> list[Any] | None:
    """A list with one entry per layer. A longer one may list the MTP blocks behind the layers; any other length is an error."""
    if values is None or len(values) == count:
        return values
    extra = len(values) - count
    if 0 < extra <= max(cfg.optional("mtp"), 1):
        cfg.note(f"{key} has {len(values)} entries for {count} layers: the last {extra} are taken as MTP blocks")
        return values[:count]
    raise cfg.error(key, "not one entry per layer", got=f"{len(values)} entries", expected=f"{count} (num_hidden_layers)")


def _mixers(cfg: Fields, traits: Traits, count: int) -> list[str]:
    types = _per_layer(cfg, "layer_types", cfg.strings("layer_types"), count)
    if types is not None:
        unknown = [t for t in types if t not in MIXER_WORDS]
        if unknown:
            raise cfg.error("layer_types", "unknown layer type", got=unknown[0], expected=", ".join(MIXER_WORDS))
        return [MIXER_WORDS[t] for t in types]
    if (attn := cfg.ints("attn_type_list")) and 0 in attn:
        raise cfg.error("attn_type_list", "lightning attention layers (0) are not supported", got=0, expected="1 on every layer")
    hybrid = _per_layer(cfg, "hybrid_layer_pattern", cfg.ints("hybrid_layer_pattern"), count)
    if hybrid is not None:
        return ["sliding" if kind else "full" for kind in hybrid]
    table = cfg.table("linear_attn_config")
    if table is not None:
        return _listed_linear(cfg, table, count)
    interval = cfg.maybe("full_attention_interval")
    if interval is not None:
        return ["full" if (i + 1) % interval == 0 else "linear" for i in range(count)]
    state_keys = [k for k in cfg.raw if isinstance(k, str) and k.startswith(("mamba_", "ssm_", "linear_num_"))]
    if state_keys and cfg.raw.get(state_keys[0]) is not None:
        raise ModelConfigError(
            f"has state layers ({state_keys[0]}) but nothing says which layers they are", where=cfg.where,
            expected="layer_types, full_attention_interval, layers_block_type or hybrid_override_pattern",
        )  # fmt: skip
    if traits.chunked and cfg.maybe("attention_chunk_size"):
        return _chunked(cfg, count)
    return _windowed(cfg, traits, count)


def _listed_linear(cfg: Fields, table: Fields, count: int) -> list[str]:
    """Kimi Linear: two lists of 1-based layer numbers."""
    linear, full = table.ints("kda_layers", 1) or [], table.ints("full_attn_layers", 1) or []
    if sorted(linear + full) != list(range(1, count + 1)):
        raise table.error(
            "kda_layers", "kda_layers and full_attn_layers do not name each layer once", got=f"{len(linear)} + {len(full)} numbers",
            expected=f"1..{count}",
        )  # fmt: skip
    chosen = set(linear)
    return ["linear" if i + 1 in chosen else "full" for i in range(count)]


def _chunked(cfg: Fields, count: int) -> list[str]:
    """Llama 4: layers with rotary positions are chunked; in no_rope_layers 0 means no rotary positions, so full attention."""
    rope = _per_layer(cfg, "no_rope_layers", cfg.ints("no_rope_layers"), count)
    if rope is None:
        step = cfg.maybe("no_rope_layer_interval") or 4
        rope = [int((i + 1) % step != 0) for i in range(count)]
    return ["chunked" if has_rope else "full" for has_rope in rope]


def _windowed(cfg: Fields, traits: Traits, count: int) -> list[str]:
    window = cfg.maybe("window")
    if window is None or cfg.has("compress_ratios"):
        return ["full"] * count
    use = cfg.raw.get("use_sliding_window")
    if use is not None and not cfg.flag("use_sliding_window"):
        return ["full"] * count
    period = cfg.maybe("window_period") or traits.window_period
    if period:
        return ["full" if (i + 1) % period == 0 else "sliding" for i in range(count)]
    # Qwen: the first max_window_layers layers keep full attention.
    first = cfg.optional("max_window_layers") if use else 0
    return ["sliding" if i >= first else "full" for i in range(count)]


def _ffns(cfg: Fields, count: int) -> list[str]:
    if cfg.optional("experts") <= (0 if cfg.has("top_k") else 1) or cfg.raw.get("enable_moe_block") is False:
        return ["dense"] * count
    if cfg.flag("enable_moe_block"):
        return ["both"] * count
    types = _per_layer(cfg, "mlp_layer_types", cfg.strings("mlp_layer_types"), count)
    if types is not None:
        words = {"dense": "dense", "sparse": "moe", "moe": "moe"}
        unknown = [t for t in types if t not in words]
        if unknown:
            raise cfg.error("mlp_layer_types", "unknown layer type", got=unknown[0], expected="dense or sparse")
        return [words[t] for t in types]
    freq = cfg.raw.get("moe_layer_freq")
    if isinstance(freq, list):
        flags = _per_layer(cfg, "moe_layer_freq", cfg.ints("moe_layer_freq"), count) or [1] * count
        return ["moe" if flag else "dense" for flag in flags]
    listed = _listed_moe(cfg, count)
    if listed is not None:
        return ["moe" if i in listed else "dense" for i in range(count)]
    first, every = cfg.optional("first_dense"), cfg.optional("moe_layer_freq", 1, minimum=1)
    step = cfg.optional("decoder_sparse_step", cfg.optional("interleave_moe_layer_step", 1), minimum=0)
    dense_layers = set(cfg.ints("mlp_only_layers") or ())

    def is_moe(i: int) -> bool:
        return i >= first and i % every == 0 and step > 0 and (i + 1) % step == 0 and i not in dense_layers

    kinds = ["moe" if is_moe(i) else "dense" for i in range(count)]
    if "moe" not in kinds:
        cfg.note("the config names experts but no layer is a MoE layer under its own rules")
    return kinds


def _listed_moe(cfg: Fields, count: int) -> set[int] | None:
    """MoE layer numbers given as a list, or as a comma-separated string."""
    for key in ("moe_layers", "moe_layers_enum"):
        value = cfg.raw.get(key)
        if value is None or value in ([], ""):
            continue
        if isinstance(value, str):
            try:
                value = [int(part) for part in value.split(",")]
            except ValueError:
                raise cfg.error(key, "not layer numbers", got=value, expected="numbers separated by commas") from None
            numbers = [cfg.check_int(key, v, 0) for v in value]
        else:
            numbers = cfg.ints(key) or []
        beyond = [n for n in numbers if n >= count]
        if beyond:
            cfg.note(f"{key} names layer {beyond[0]}, beyond the {count} layers: taken as an MTP block")
        return set(numbers)
    return None


def _indexers(cfg: Fields, count: int) -> list[str]:
    """Token-sparse attention: which layers hold an indexer and which reuse the choice of an earlier one."""
    if not cfg.has("sparse_topk") or cfg.has("compress_ratios"):
        return ["none"] * count
    types = _per_layer(cfg, "indexer_types", cfg.strings("indexer_types"), count)
    if types is None:
        return ["full"] * count
    unknown = [t for t in types if t not in ("full", "shared")]
    if unknown:
        raise cfg.error("indexer_types", "unknown indexer type", got=unknown[0], expected="full or shared")
    return types


def _sparse_layers(cfg: Fields, count: int) -> list[int]:
    table = cfg.table("sparse_attention_config")
    if table is None or not table.flag("use_sparse_attention", True):
        return [0] * count
    return _per_layer(table, "sparse_attention_freq", table.ints("sparse_attention_freq"), count) or [1] * count
