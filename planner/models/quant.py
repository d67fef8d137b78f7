"""Quantisation schemes of checkpoints -> storage dtype per tensor class.

Two places hold them: `quantization_config` in config.json and ModelOpt's hf_quant_config.json. Both name modules to convert or to
leave alone, as exact names, dotted parts, globs or `re:` patterns; each matrix of the model is looked up under its usual names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.models.fields import Fields
from planner.models.modules import MODULES, PREFIX, Patterns
from planner.models.spec import Layer, Quant, TensorClass
from planner.models.traits import Traits

_CLASSES: tuple[TensorClass, ...] = ("attn", "linear_attn", "mlp", "shared", "experts")
_ALGOS = {
    "fp8": "fp8", "fp8_pb_wo": "fp8", "fp8_pb_real": "fp8", "fp8_block": "fp8", "fp8_per_channel_per_token": "fp8", "w4a8_fp8": "int4",
    "nvfp4": "nvfp4", "w4a16_nvfp4": "nvfp4", "nvfp4_awq": "nvfp4", "w4a8_nvfp4_fp8": "nvfp4", "mxfp4": "mxfp4", "w4a8_mxfp4_fp8": "mxfp4",
    "w4a16_mxfp4": "mxfp4", "mxfp8": "fp8", "int8": "int8", "int8_sq": "int8", "w8a8_sq_per_channel": "int8", "w8a16": "int8",
    "w4a16": "int4", "w4a16_awq": "int4", "int4_awq": "int4", "w4a8_awq": "int4", "awq": "int4", "gptq": "int4",
}  # fmt: skip
_ACTS = {"fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "int8": "int8"}
Match = Callable[[int, tuple[str, ...]], bool]


def read_quant(
    cfg: Fields, top: Fields, quant_file: Mapping[str, Any] | None, layers: tuple[Layer, ...], *, family: str = "",
) -> Quant:  # fmt: skip
    """Storage per class from the config's own section, completed by hf_quant_config.json."""
    holder = next((f for f in (top, cfg) if f.raw.get("quantization_config") is not None), None)
    table = holder.table("quantization_config") if holder else None
    extra = None
    if quant_file is not None:
        inner = quant_file.get("quantization", quant_file)
        extra = Fields(inner if isinstance(inner, Mapping) else {}, "hf_quant_config.json", cfg.notes)
    main = table or extra
    if main is None or not main.raw:
        return Quant()
    quant = _scheme(cfg, main, layers, family)
    kv = _kv_dtype(main)
    if extra is not None and table is not None:
        other = _kv_dtype(extra)
        if kv is not None and other is not None and kv != other:
            cfg.note(f"KV dtype: config.json says {kv}, hf_quant_config.json says {other}; config.json is used")
        kv = kv or other
    return replace(quant, kv_dtype=kv)


def _scheme(cfg: Fields, q: Fields, layers: tuple[Layer, ...], family: str) -> Quant:
    method = (q.text("quant_method") or "").lower().replace("_", "-")
    algo = q.text("quant_algo")
    if method == "fp8" and algo and algo.upper() == "MIXED_PRECISION":
        # A native FP8 checkpoint whose experts were requantised: the exclusion list is about the second step only.
        base = _uniform(cfg, layers, "fp8", _never, act="fp8")
        listed = _listed(cfg, q, layers)
        weights = {**dict(base.weights), **dict(listed.weights)}
        acts = {c: _ACTS.get(d, d) for c, d in weights.items()}
        return Quant("fp8+nvfp4", tuple(weights.items()), None, None, _blocked(q), (), tuple(acts.items()))
    if algo and (algo.upper() == "MIXED_PRECISION" or (q.raw.get("quantized_layers") and algo.lower() not in _ALGOS)):
        return _listed(cfg, q, layers)
    if method == "compressed-tensors" or (q.raw.get("config_groups") and method in ("modelopt", "")):
        return _groups(cfg, q, layers, method or "modelopt")
    if algo:
        dtype = _algo_dtype(q, "quant_algo", algo)
        return _uniform(cfg, layers, dtype, _excluded(q), scheme=f"modelopt-{algo.lower()}", act=_algo_act(algo, dtype))
    return _named_method(cfg, q, layers, method, family)


def _named_method(cfg: Fields, q: Fields, layers: tuple[Layer, ...], method: str, family: str) -> Quant:
    skip = _excluded(q)
    if method in ("fp8", "fbgemm-fp8", "ptpc-fp8"):
        quant = replace(_uniform(cfg, layers, "fp8", skip, scheme=method, act="fp8"), block_scaled=_blocked(q))
        if cfg.raw.get("expert_dtype") in ("fp4", "mxfp4"):
            weights = {**dict(quant.weights), "experts": "mxfp4"}
            quant = Quant("fp8+mxfp4-experts", tuple(weights.items()), None, "fp8", quant.block_scaled)
        return quant
    if method == "mxfp4":
        experts = any(layer.experts for layer in layers)
        full = _uniform(cfg, layers, "mxfp4", skip, scheme=method)
        return Quant(method, (("experts", "mxfp4"),) if experts else full.weights)
    if method in ("awq", "gptq", "gptq-marlin", "awq-marlin", "auto-round", "intel/auto-round", "inc", "hqq", "quanto"):
        return _uniform(cfg, layers, _int_dtype(q), skip, scheme=method, act=cfg_act(cfg))
    if method in ("bitsandbytes", "bnb"):
        eight = q.flag("load_in_8bit") or q.flag("_load_in_8bit")
        return _uniform(cfg, layers, "int8" if eight else "int4", skip, scheme="bitsandbytes", act=cfg_act(cfg))
    for word, dtype in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "int4")):
        if word in method:
            cfg.note(f"quant_method {method!r} is read as {dtype} by its name")
            return _uniform(cfg, layers, dtype, skip, scheme=method)
    raise q.error(
        "quant_method", "unknown quantisation method", got=method or None,
        expected="fp8, mxfp4, modelopt, compressed-tensors, awq, gptq or bitsandbytes",
        hint="Remove quantization_config and give weights_dtype instead.",
    )  # fmt: skip


def cfg_act(cfg: Fields) -> str:
    return "fp16" if cfg.raw.get("torch_dtype", cfg.raw.get("dtype")) == "float16" else "bf16"


def _int_dtype(q: Fields) -> str:
    bits = next((q.check_int(k, q.raw[k]) for k in ("bits", "w_bit", "weight_bits", "nbits") if q.raw.get(k) is not None), 4)
    if bits not in (2, 3, 4, 8):
        raise q.error("bits", "unsupported weight width", got=bits, expected="4 or 8")
    if bits < 4:
        q.note(f"{bits}-bit weights are priced as 4-bit")
    return "int8" if bits == 8 else "int4"


def _blocked(q: Fields) -> bool:
    return bool(q.ints("weight_block_size", 1))


def _algo_dtype(q: Fields, key: str, algo: object) -> str:
    name = algo.lower() if isinstance(algo, str) else ""
    if name not in _ALGOS:
        raise q.error(key, "unknown quantisation algorithm", got=algo, expected=", ".join(sorted(_ALGOS)))
    return _ALGOS[name]


def _algo_act(algo: str, dtype: str) -> str | None:
    name = algo.lower()
    if "a16" in name or name.endswith("_wo") or name in ("int4_awq", "awq", "gptq"):
        return "bf16"
    if "fp8" in name or "a8" in name:
        return "fp8"
    return _ACTS.get(dtype)


def _kv_dtype(q: Fields) -> str | None:
    for key in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype"):
        value = q.raw.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            return _bits_dtype(Fields(value, f"{q.where}, {key}", q.notes))
        if isinstance(value, str):
            name = value.lower()
            if name in ("none", "auto", "null", ""):
                continue
            for known in ("nvfp4", "mxfp4", "fp8", "int8", "int4"):
                if name.startswith(known):
                    return known
            if name in ("bf16", "bfloat16", "fp16", "float16"):
                return None
        raise q.error(key, "unknown KV cache dtype", got=value, expected="FP8, NVFP4, INT8 or null")
    return None


def _bits_dtype(w: Fields) -> str:
    """compressed-tensors weights: num_bits and type; a 4-bit float of group 16 is NVFP4, of group 32 MXFP4."""
    bits, kind = w.need("num_bits"), (w.text("type") or "int").lower()
    if kind == "float" and bits == 4:
        return "mxfp4" if w.maybe("group_size") == 32 else "nvfp4"
    name = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4", ("float", 16): "bf16", ("int", 16): "bf16"}.get((kind, bits))
    if name is None:
        raise w.error("num_bits", "unsupported storage", got=f"{kind} {bits}", expected="float 4 or 8, int 4 or 8")
    return name


def _never(layer: int, modules: tuple[str, ...]) -> bool:
    return False


def _lists(q: Fields) -> list[str]:
    out: list[str] = []
    for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"):
        out += q.strings(key) or []
    return out


def _excluded(q: Fields) -> Match:
    listed = _lists(q)
    return Patterns(q, "ignore", listed).layer if listed else _never


def _vote(cfg: Fields, layers: tuple[Layer, ...], lookup: Callable[[int, tuple[str, ...]], str | None]) -> tuple[
    dict[TensorClass, str], dict[str, str]
]:  # fmt: skip
    """Storage by class and by matrix, each the one that most of its parameters have; a mixture is noted."""
    by_class: dict[TensorClass, dict[str, int]] = {}
    by_matrix: dict[tuple[str, TensorClass], dict[str, int]] = {}
    for i, layer in enumerate(layers):
        sizes: list[tuple[str, TensorClass, int]] = [(m.name, m.tensor_class, m.params) for m in layer.matrices]
        if layer.experts:
            label = "experts_apart" if any(kind == "mlp" for _, kind, _ in sizes) else "experts"
            sizes.append((label, "experts", layer.experts.num_experts * layer.experts.params_per_expert))
        for name, kind, size in sizes:
            if kind not in _CLASSES or name.startswith("ple_"):
                continue
            dtype = lookup(i, MODULES.get(name, (f"self_attn.{name}",))) or ""
            for counts in (by_class.setdefault(kind, {}), by_matrix.setdefault((name, kind), {})):
                counts[dtype] = counts.get(dtype, 0) + size
    classes = {kind: max(counts, key=lambda d: counts[d]) for kind, counts in by_class.items()}
    matrices = {}
    for (name, kind), counts in by_matrix.items():
        best = max(counts, key=lambda d: counts[d])
        if best != classes[kind]:
            matrices[name] = best
        if len(counts) > 1:
            share = counts[best] / sum(counts.values())
            cfg.note(f"{name}: {share:.0%} of its parameters are {best or '16-bit'}, the rest differ by layer; read as {best or '16-bit'}")
    return classes, matrices


def _result(scheme: str, classes: Mapping[TensorClass, str], matrices: Mapping[str, str], *, base: str) -> Quant:
    weights = tuple((c, d) for c, d in classes.items() if d)
    return Quant(scheme, weights, matrices=tuple((n, d or base) for n, d in matrices.items()))


def _base(cfg: Fields) -> str:
    return "fp16" if cfg_act(cfg) == "fp16" else "bf16"


def _uniform(
    cfg: Fields, layers: tuple[Layer, ...], dtype: str, skip: Match, *, scheme: str = "", act: str | None = None
) -> Quant:  # fmt: skip
    """One dtype for every linear layer that is not excluded."""
    classes, matrices = _vote(cfg, layers, lambda i, modules: None if skip(i, modules) else dtype)
    quant = _result(scheme or dtype, classes, matrices, base=_base(cfg))
    return replace(quant, act_dtype=act)


def _listed(cfg: Fields, q: Fields, layers: tuple[Layer, ...]) -> Quant:
    """ModelOpt MIXED_PRECISION: each quantised module with its own algorithm."""
    table = q.table("quantized_layers")
    if table is None:
        if q.raw.get("config_groups"):
            return _groups(cfg, q, layers, "modelopt")
        raise q.error("quantized_layers", "missing, but quant_algo is MIXED_PRECISION", expected="an object of module: algorithm")
    algos: dict[str, str] = {}
    for name, value in table.raw.items():
        algo = value.get("quant_algo") if isinstance(value, Mapping) else None
        _algo_dtype(table, str(name), algo)
        algos[PREFIX.sub("", str(name))] = str(algo)

    def algo_of(i: int, modules: tuple[str, ...]) -> str | None:
        for module in modules:
            pieces = f"layers.{i}.{module}".split(".")
            for n in range(len(pieces), 2, -1):
                if (hit := algos.get(".".join(pieces[:n]))) is not None:
                    return hit
        return None

    classes, matrices = _vote(cfg, layers, algo_of)
    dtypes: dict[TensorClass, str] = {c: _ALGOS[a.lower()] if a else "" for c, a in classes.items()}
    if (head := algos.get("lm_head")) is not None:
        dtypes["lm_head"] = _ALGOS[head.lower()]
        classes["lm_head"] = head
    acts = {c: _algo_act(a, dtypes[c]) for c, a in classes.items() if a}
    by_class = tuple((c, a) for c, a in acts.items() if a)
    quant = _result("modelopt-mixed", dtypes, {n: _ALGOS[a.lower()] if a else "" for n, a in matrices.items()}, base=_base(cfg))
    return Quant(quant.scheme, quant.weights, None, None, False, quant.matrices, by_class)


def _groups(cfg: Fields, q: Fields, layers: tuple[Layer, ...], scheme: str) -> Quant:
    """config_groups: each with targets and a weight format; `ignore` beats them all."""
    groups = q.table("config_groups")
    if groups is None:
        raise q.error("config_groups", "missing, but the scheme is stated by groups", expected="an object of groups")
    skip = _excluded(q)
    read: list[tuple[Patterns | None, str, str | None]] = []
    for name in groups.raw:
        group = groups.table(str(name))
        weights = group.table("weights") if group else None
        if group is None or weights is None:
            continue
        dtype = _bits_dtype(weights)
        inputs = group.table("input_activations")
        act = _bits_dtype(inputs) if inputs else _base(cfg)
        targets = group.strings("targets") or ["Linear"]
        everything = any(t in ("Linear", "re:.*", "*") for t in targets)
        read.append((None if everything else Patterns(groups, str(name), targets), dtype, act))
    read.sort(key=lambda r: r[0] is None)
    found: dict[str, str | None] = {}

    def dtype_of(i: int, modules: tuple[str, ...]) -> str | None:
        if skip(i, modules):
            return None
        for patterns, dtype, act in read:
            if patterns is None or patterns.layer(i, modules):
                found[dtype] = act
                return dtype
        return None

    classes, matrices = _vote(cfg, layers, dtype_of)
    ignored = Patterns(q, "ignore", _lists(q))
    for targets_of, stored, computed in read:
        if targets_of is not None and targets_of.head() and not ignored.head():
            classes["lm_head"] = stored
            found[stored] = computed
    quant = _result(scheme, classes, matrices, base=_base(cfg))
    acts = set(found.values())
    by_class = tuple((c, a) for c, d in quant.weights if (a := found.get(d)) is not None) if len(acts) > 1 else ()
    blocked = any(d == "fp8" for _, d, _ in read) and "block" in str(groups.raw)
    return Quant(quant.scheme, quant.weights, None, acts.pop() if len(acts) == 1 else None, blocked, quant.matrices, by_class)


MTP_UNSTATED = "MTP: its storage is not stated by the scheme; 16-bit is assumed"


def mtp_dtype(cfg: Fields, traits: Traits, quant: Quant) -> str | None:
    """Storage of the MTP block, if it is known to be quantised. Silence of an exclusion list proves nothing."""
    dtypes = dict(quant.weights)
    best = dtypes.get("experts") or dtypes.get("mlp")
    if best is None:
        return None
    if traits.mtp_fp8 and quant.scheme == "fp8":
        return "fp8"
    cfg.note(MTP_UNSTATED)
    return None
