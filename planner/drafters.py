"""Drafters: what proposes the tokens, as far as cost is concerned, and which ones exist.

`drafter_from` turns the drafter object of the contract into a `DrafterSpec`: layers and matrices (the same types as the target's), the
vocabulary it drafts over, how many passes a round takes, and how far it was trained to draft. What the object leaves out is the kind's
usual head, said in `assumptions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.drafter_catalogue import drafters_for, find_drafter, list_drafters, suggest_drafters
from planner.drafter_heads import (
    MOE_FFN,
    USUAL_BLOCK,
    HeadShape,
    check_shape_kind,
    dense_layer,
    head_kind,
    head_layers,
    read_head,
    small_model,
    usual_shape,
)
from planner.drafter_input import LOOKUP, check_split, checked, read_source
from planner.errors import DraftlineError, ModelConfigError
from planner.models.spec import KvAttention, LatentAttention, Layer, Matrix, ModelSpec

__all__ = ["DrafterSpec", "drafter_from", "drafters_for", "find_drafter", "list_drafters"]

_PARALLEL = ("dflash", "dspark", "pard")


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter of one target. Counts are elements, lengths tokens; nothing here has a byte or a second in it."""

    kind: str
    model: str | None = None
    layers: tuple[Layer, ...] = ()
    """Layers of one draft pass; empty for look-up drafters."""
    hidden_size: int = 0
    matrices: tuple[Matrix, ...] = ()
    """Run once per draft pass (MTP join; for block drafters the fusion of target features)."""
    extend_matrices: tuple[Matrix, ...] = ()
    """Run once per round, over the tokens just verified (EAGLE-3's fc over the fused hidden states)."""
    head_vocab: int = 0
    """Rows of the LM head a draft pass computes; 0 = none."""
    params: int = 0
    """Parameters the drafter adds (shared tables of the target not counted)."""
    embed_params: int = 0
    """Vocabulary table the drafter keeps for itself; 0 = shares the target's."""
    head_params: int = 0
    """LM head, Markov head and further resident blocks the drafter keeps for itself."""
    draft_vocab: int | None = None
    block: int | None = None
    n_predict: int | None = None
    window: int | None = None
    markov_rank: int = 0
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    tp: int | None = None
    gpu: str | None = None
    n_gpus: int | None = None
    match_prob: float | None = None
    verify_width: int | None = None
    max_trained_draft_len: int | None = None
    """Most tokens it was trained to draft in one go; None = no limit known."""
    block_assumed: bool = False
    """The limit is the kind's usual one, not this drafter's own."""
    variant: str | None = None
    spec: ModelSpec | None = None
    """An external drafter's own model."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def parallel(self) -> bool:
        """One pass drafts the whole block."""
        return self.kind in _PARALLEL or self.variant == "p-eagle"

    @property
    def known_reach(self) -> int | None:
        """Most tokens this drafter is known to draft well: where the limit is only its kind's usual one, nothing is known."""
        return None if self.block_assumed else self.max_trained_draft_len

    @property
    def sequential_head(self) -> bool:
        """A light head walks the block token by token after the pass (DSpark's Markov head)."""
        return self.kind == "dspark" and self.markov_rank > 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def passes(self, draft_len: int) -> int:
        """Draft passes of the body for one round."""
        if draft_len <= 0 or not self.layers:
            return 0
        return 1 if self.parallel else draft_len

    def tokens_verified(self, draft_len: int) -> int:
        """Rows per sequence of the verification pass: 1 + D, 2D for PARD, or the width of a tree."""
        if draft_len <= 0:
            return 1
        return self.verify_width or (2 * draft_len if self.kind == "pard" else 1 + draft_len)


def drafter_from(spec: Mapping[str, Any], target: ModelSpec, *, strict: bool = False, where: str = "drafter") -> DrafterSpec:
    """The drafter of the contract's `drafter` object for a target.

    strict (plan): a drafter the checkpoint does not have is an error. Otherwise (predict) the usual head stands in, with a warning.
    """
    given = checked(spec, where)
    kind = given["kind"]
    if kind in LOOKUP:
        made = _lookup(given)
    elif kind in ("external", "pard"):
        made = _external(given, target, where)
    elif kind == "mtp":
        made = _mtp(given, target, strict, where)
    else:
        made = _head(given, target, where)
    placed = ("weights_dtype", "kv_dtype", "tp", "gpu", "n_gpus", "match_prob", "verify_width")
    made = replace(made, **{k: given[k] for k in placed if given.get(k) is not None})
    check_split(made.layers, made.tp, made.n_gpus, where)
    return made


# ---------------------------------------------------------------- kinds


def _lookup(given: Mapping[str, Any]) -> DrafterSpec:
    notes = [f"{given['kind']}: no model; drafts are copied from the context"]
    if given.get("match_prob") is None:
        notes.append("match_prob is not given: every round is priced as one that drafts")
    return DrafterSpec(given["kind"], given.get("model") and str(given["model"]), assumptions=tuple(notes))


def _external(given: Mapping[str, Any], target: ModelSpec, where: str) -> DrafterSpec:
    from planner.models.read import read_model

    source, row, notes, warnings = given.get("model"), None, [], []
    model: ModelSpec | None = None
    if source is not None:
        row = find_drafter(source, given["kind"], target.id) if isinstance(source, str) else None
        raw = read_source(source, where)
        if raw is not None and head_kind(raw):
            check_shape_kind(read_head(raw, f"{where}.model"), given["kind"], f"{where}.model")
        try:
            model = read_model(source)
        except DraftlineError:
            if raw is not None or (row is None and given.get("params") is None and given.get("layers") is None):
                raise
    if model is None:
        params = given.get("params") or (row or {}).get("params")
        layers, hidden = (given.get(k) or (row or {}).get(k) for k in ("layers", "hidden_size"))
        model = small_model(target, params=params, num_layers=layers, hidden_size=hidden)
        size = f"{params / 1e9:.3g}B parameters" if params else "0.6B parameters (the usual size)"
        notes.append(f"drafter shape not given: dense, {size}, {model.num_layers} layers x {model.hidden_size}, the target's vocabulary")
        model = replace(model, id=str(source)) if source is not None else model
    elif model.vocab_size != target.vocab_size:
        sizes = f"{model.vocab_size} against {target.vocab_size}"
        warnings.append(f"the drafter's vocabulary is not the target's ({sizes}): engines may refuse the pair")
    if given["kind"] == "pard":
        notes.append("PARD: one masked pass drafts the block; the target verifies 2D rows")
    if given.get("window"):
        model = replace(model, layers=tuple(_windowed(layer, given["window"]) for layer in model.layers))
    table = model.embed_params
    return DrafterSpec(
        given["kind"], model.id, model.layers, model.hidden_size, model.extra_matrices,
        head_vocab=given.get("draft_vocab") or model.vocab_size, params=model.total_params, embed_params=table,
        head_params=0 if model.tie_embeddings else table, draft_vocab=given.get("draft_vocab"), block=given.get("block"),
        max_trained_draft_len=given.get("block"), window=given.get("window"), spec=model,
        assumptions=(*notes, *model.notes), warnings=(*warnings, *_cautions(row, target)),
    )  # fmt: skip


def _mtp(given: Mapping[str, Any], target: ModelSpec, strict: bool, where: str) -> DrafterSpec:
    notes: list[str] = []
    warnings: list[str] = []
    row = find_drafter(given["model"], "mtp", target.id) if isinstance(given.get("model"), str) else None
    own = target.mtp
    hidden, wanted = given.get("hidden_size") or target.hidden_size, given.get("layers")
    join: tuple[Matrix, ...] = (Matrix("mtp_join", hidden, 2 * hidden, "mlp", "none"),)
    resident = table = 0
    if _is_assistant(given, row, target):
        facts = {**(row or {}), **{k: v for k, v in given.items() if v is not None}}
        layers, join, hidden = _assistant(target, facts.get("layers"), facts.get("hidden_size"))
        table = target.vocab_size * hidden
        notes.append(f"MTP assistant: {len(layers)} layers x {hidden} that read the target's KV cache, drafting over the whole vocabulary")
    elif own is not None and given.get("hidden_size") is None:
        layers, join = own.layers, own.matrices
        if wanted and wanted not in (len(layers), own.n_predict):
            layers = tuple(own.layers[n % len(own.layers)] for n in range(wanted))
            notes.append(f"MTP: {wanted} layers per pass as given, each like the declared block")
        resident = (own.n_predict - 1) * (own.params // own.n_predict)
        notes.append(f"native MTP: {own.n_predict} block(s) declared by the config, embedding and head shared with the target")
    else:
        if own is None:
            text = f"the config of {target.id} declares no MTP block"
            hint = "Use another drafter kind, or the checkpoint that ships MTP weights."
            if strict and row is None and not any(r["kind"] == "mtp" for r in drafters_for(target.id)):
                raise ModelConfigError(text, where=f"{where}.kind", got="mtp", expected="a target with MTP", hint=hint)
            warnings.append(f"{text}: the usual head (one target layer) is priced")
        layers = (_typical_layer(target, hidden),) * (wanted or 1)
        notes.append("MTP head not declared: one layer like the target's, with a 2h -> h join, embedding and head shared with the target")
    n_predict = given.get("n_predict") or (own.n_predict if own else None)
    stored = None
    if own is not None and {target.quant.weights_dtype("experts"), target.quant.weights_dtype("mlp")} == {"fp8"}:
        stored = "fp8"
        notes.append("MTP weights in fp8 like the target's")
    params = sum(layer.params for layer in layers) + sum(m.params for m in join) + resident + table
    return DrafterSpec(
        "mtp", (row or {}).get("model") or given.get("model"), tuple(_windowed(x, given.get("window")) for x in layers), hidden, join,
        head_vocab=given.get("draft_vocab") or target.vocab_size, params=params, embed_params=table, head_params=resident,
        draft_vocab=given.get("draft_vocab"), block=given.get("block"), n_predict=n_predict, max_trained_draft_len=given.get("block"),
        window=given.get("window"), weights_dtype=stored, variant=(row or {}).get("variant"),
        assumptions=tuple(notes), warnings=(*warnings, *_cautions(row, target)),
    )  # fmt: skip


def _head(given: Mapping[str, Any], target: ModelSpec, where: str) -> DrafterSpec:
    kind, source = given["kind"], given.get("model")
    notes: list[str] = []
    warnings: list[str] = []
    raw = read_source(source, where)
    row = find_drafter(source, kind, target.id) if isinstance(source, str) and raw is None else None
    if raw is not None:
        shape = read_head(raw, f"{where}.model")
        check_shape_kind(shape, kind, f"{where}.model")
        notes += shape.notes
        shape = _override(shape, given, notes)
        if shape.target_hidden not in (None, target.hidden_size):
            warnings.append(f"the head was made for a target of hidden size {shape.target_hidden}, not {target.hidden_size}")
        if shape.vocab_size not in (target.vocab_size, shape.draft_vocab):
            sizes = f"{shape.vocab_size} against {target.vocab_size}"
            warnings.append(f"the head's vocabulary is not the target's ({sizes}): made for another target?")
    else:
        if isinstance(source, str) and row is None:
            near = suggest_drafters(source, kind)
            warnings.append(f"{source} is not in the drafter catalogue: the usual {kind} head is priced. {near}".strip())
        shape, said = _usual(kind, {k: v for k, v in {**(row or {}), **given}.items() if v is not None}, target)
        notes.append(said)
    made = _built(shape, given, row or {}, target)
    warnings += _cautions(row, target)
    return replace(made, assumptions=(*notes, *made.assumptions), warnings=tuple(warnings))


def _usual(kind: str, facts: Mapping[str, Any], target: ModelSpec) -> tuple[HeadShape, str]:
    """The usual head, with its depth from a parameter count where only that is known."""
    vocab = facts.get("draft_vocab")
    shape = usual_shape(kind, target, num_layers=facts.get("layers"), hidden_size=facts.get("hidden_size"), draft_vocab=vocab)
    fitted = ""
    if kind != "eagle3" and not facts.get("layers") and facts.get("params"):
        one = dense_layer(shape).params
        depth = round((facts["params"] - shape.taps * target.hidden_size * shape.hidden_size) / one)
        if 1 <= depth <= 12:
            shape, fitted = replace(shape, num_layers=depth), " (from its parameter count)"
    shape = replace(shape, variant=facts.get("variant"))
    width = "target's" if not target.is_moe else f"{MOE_FFN[kind]:g} x hidden"
    body = f"{shape.num_layers} layer(s){fitted} x {shape.hidden_size}, FFN {shape.ffn} ({width})"
    return shape, f"{kind} head not read: {body}, draft vocabulary {shape.draft_vocab}"


def _override(shape: HeadShape, given: Mapping[str, Any], notes: list[str]) -> HeadShape:
    changes: dict[str, Any] = {}
    pairs = (("layers", "num_layers"), ("hidden_size", "hidden_size"), ("draft_vocab", "draft_vocab"), ("block", "block"))
    for key, name in pairs:
        if given.get(key) is not None and given[key] != getattr(shape, name):
            changes[name] = given[key]
            notes.append(f"{key} {given[key]} as given (the config says {getattr(shape, name)})")
    return replace(shape, **changes) if changes else shape


def _built(shape: HeadShape, given: Mapping[str, Any], row: Mapping[str, Any], target: ModelSpec) -> DrafterSpec:
    kind = shape.kind
    notes: tuple[str, ...] = ()
    if given.get("window"):
        shape = replace(shape, windows=(given["window"],) * shape.num_layers)
    layers = head_layers(shape)
    fusion = (Matrix("fc", shape.hidden_size, shape.taps * target.hidden_size, "mlp", "column"),) if shape.taps and shape.attention else ()
    block = given.get("block") or shape.block or row.get("block")
    limit = row.get("max_draft_len") if not given.get("block") else None
    assumed = block is None and kind in USUAL_BLOCK
    if assumed:
        block = USUAL_BLOCK[kind]
        notes = (f"block {block} is the usual one of {kind}, not this head's own",)
    head = shape.draft_vocab * shape.hidden_size if shape.draft_vocab != shape.vocab_size or kind == "eagle3" else 0
    markov = 2 * shape.draft_vocab * shape.markov_rank
    each_round = kind == "eagle3"
    return DrafterSpec(
        kind, given["model"] if isinstance(given.get("model"), str) else None, layers, shape.hidden_size,
        matrices=() if each_round else fusion, extend_matrices=fusion if each_round else (), head_vocab=shape.draft_vocab,
        params=sum(x.params for x in layers) + sum(m.params for m in fusion) + head + markov, head_params=head + markov,
        draft_vocab=shape.draft_vocab, block=block, n_predict=given.get("n_predict"), window=given.get("window"),
        markov_rank=shape.markov_rank, max_trained_draft_len=limit or _reach(kind, block, shape), block_assumed=assumed,
        variant=shape.variant, assumptions=notes,
    )  # fmt: skip


def _reach(kind: str, block: int | None, shape: HeadShape) -> int | None:
    """Most drafts of a block: B - 1 for DFlash (the anchor is one of the B), B for DSpark, unless the config says otherwise."""
    if block is None:
        return None
    anchored = shape.anchor if shape.anchor is not None else kind != "dflash"
    return max(1, block if anchored else block - 1)


def _is_assistant(given: Mapping[str, Any], row: Mapping[str, Any] | None, target: ModelSpec) -> bool:
    if row is not None:
        return row.get("variant") == "assistant"
    named = isinstance(given.get("model"), str) and "assistant" in given["model"].lower()
    return named or (target.mtp is None and target.model_type.lower().startswith("gemma4"))


def _assistant(target: ModelSpec, num_layers: int | None, hidden_size: int | None) -> tuple[tuple[Layer, ...], tuple[Matrix, ...], int]:
    """Gemma-4's paired MTP assistant: 4 small layers (hidden 1024 on the 12B, 0.84 GB with its own table) reading the target's cache."""
    hidden = hidden_size or 1024
    shape = HeadShape("mtp", num_layers or 4, hidden, 8 * hidden, max(1, hidden // 128), 1, 128, target.vocab_size, target.vocab_size)
    core = next((c for c, _ in target.attention_cores() if isinstance(c, KvAttention)), None)
    if core is not None:
        shape = replace(shape, heads=core.num_kv_heads, kv_heads=core.num_kv_heads, head_dim=core.head_dim)
    layers = tuple(dense_layer(shape, shares_kv=True) for _ in range(shape.num_layers))
    return layers, (Matrix("mtp_join", hidden, target.hidden_size + hidden, "mlp", "none"),), hidden


def _typical_layer(target: ModelSpec, hidden: int) -> Layer:
    """The target's last layer with a KV or latent cache, or a dense layer where the size differs."""
    if hidden != target.hidden_size:
        heads = max(1, hidden // 128)
        return dense_layer(HeadShape("mtp", 1, hidden, int(MOE_FFN["mtp"] * hidden), heads, math.gcd(heads, 8), 128, 0, 0))
    cached = [x for x in target.layers if isinstance(x.attention, KvAttention | LatentAttention)]
    return (cached or list(target.layers))[-1]


def _windowed(layer: Layer, window: int | None) -> Layer:
    if window is None or not isinstance(layer.attention, KvAttention):
        return layer
    return replace(layer, attention=replace(layer.attention, window=window))


def _cautions(row: Mapping[str, Any] | None, target: ModelSpec) -> tuple[str, ...]:
    if row is None:
        return ()
    listed = next((r for r in drafters_for(target.id, target) if r["model"] == row["model"] and r["kind"] == row["kind"]), None)
    if listed is None:
        made_for = ", ".join(row["targets"]) or f"the {row.get('family')} family"
        return (f"{row['model']} was made for {made_for}, not for {target.id}: its acceptance will not carry over",)
    return tuple(listed["warnings"])
