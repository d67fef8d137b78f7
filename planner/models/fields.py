"""Typed look-ups in a config.json: one table of key spellings, one shape of error, notes instead of silence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.errors import ModelConfigError, suggest

#: Canonical name -> spellings seen in published configs, in the order they are believed.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_attention_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "vocab": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "dense_ffn": ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "ffn_hidden_size", "n_inner"),
    "expert_ffn": ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"),
    "top_k": (
        "num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k",
    ),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_ffn": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
    ),
    "latent": ("moe_latent_size", "routed_expert_hidden_size"),
    "first_dense": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    "mtp": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers"),
    "mtp_pattern": ("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    "window": ("sliding_window", "sliding_window_size"),
    "window_period": ("sliding_window_pattern", "_sliding_window_pattern"),
    "state_dtype": ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
    "dtype": ("dtype", "torch_dtype"),
    "conv_kernel": ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "short_conv_kernel_size"),
    "sparse_topk": ("index_topk",),
}  # fmt: skip

#: Above this an integer is a typing error, not a model (the largest published vocabulary or width is below 2e6).
LARGEST_INT = 10**9
LARGEST_LAYER_COUNT = 4096


class Fields:
    """A config object with where it came from and the notes made while reading it."""

    __slots__ = ("notes", "raw", "where")

    def __init__(self, raw: Mapping[str, Any], where: str, notes: list[str]) -> None:
        self.raw, self.where, self.notes = raw, where, notes

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def find(self, name: str) -> tuple[str, Any] | None:
        """The first spelling present (null counts as absent) with its value; a contradiction between spellings is noted."""
        raw = self.raw
        found: tuple[str, Any] | None = None
        for key in ALIASES.get(name, (name,)):
            value = raw.get(key)
            if value is None:
                continue
            if found is None:
                found = key, value
            elif value != found[1] and name not in ("dense_ffn", "state_dtype"):
                self.note(f"{key} = {_short(value)} contradicts {found[0]} = {_short(found[1])}; {found[0]} is used")
        return found

    def has(self, name: str) -> bool:
        return any(self.raw.get(key) is not None for key in ALIASES.get(name, (name,)))

    def error(self, key: str, what: str, *, got: object = None, expected: str = "", hint: str = "") -> ModelConfigError:
        return ModelConfigError(what, where=f"{self.where}, key {key}", got=got, expected=expected, hint=hint)

    def check_int(self, key: str, value: object, minimum: int = 1) -> int:
        """`value` as an integer of at least `minimum`; floats with a whole value pass, strings and booleans do not.

        A list that repeats one number for each layer counts as that number.
        """
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            self.note(f"{key} is a list of {len(value)} equal numbers: read as {_short(value[0])}")
            value = value[0]
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST_INT:
            kind = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise self.error(key, "not a usable number", got=_short(value), expected=kind, hint=_number_hint(value))
        return value

    def optional(self, name: str, default: int = 0, *, minimum: int = 0) -> int:
        found = self.find(name)
        return default if found is None else self.check_int(found[0], found[1], minimum)

    def maybe(self, name: str, *, minimum: int = 1) -> int | None:
        found = self.find(name)
        return None if found is None else self.check_int(found[0], found[1], minimum)

    def need(self, name: str, hint: str = "") -> int:
        found = self.find(name)
        if found is None:
            keys = ALIASES.get(name, (name,))
            if name == "dense_ffn":
                keys = ALIASES["ffn"]
            near = suggest(keys[0], [k for k in self.raw if isinstance(k, str)])
            raise self.error(keys[0], "missing", expected="a positive integer" + _spellings(keys), hint=hint or near)
        return self.check_int(found[0], found[1])

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.error(key, "not a boolean", got=_short(value), expected="true or false")

    def text(self, name: str) -> str | None:
        found = self.find(name)
        if found is None:
            return None
        if not isinstance(found[1], str):
            raise self.error(found[0], "not a string", got=_short(found[1]), expected="a string")
        return found[1]

    def items(self, key: str) -> list[Any] | None:
        """A list value, or None when absent, null or empty."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "not a list", got=_short(value), expected="a list")
        return list(value) or None

    def ints(self, key: str, minimum: int = 0) -> list[int] | None:
        values = self.items(key)
        return None if values is None else [self.check_int(f"{key}[{i}]", v, minimum) for i, v in enumerate(values)]

    def strings(self, key: str) -> list[str] | None:
        values = self.items(key)
        if values is None:
            return None
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{key}[{i}]", "not a string", got=_short(value), expected="a string")
        return values

    def table(self, key: str) -> Fields | None:
        """A nested object, or None when absent, null or empty."""
        value = self.raw.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "not an object", got=_short(value), expected="a JSON object")
        return Fields(value, f"{self.where}, {key}", self.notes)


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 60 else f"{text[:57]}..."


def _spellings(keys: tuple[str, ...]) -> str:
    return f" (also read: {', '.join(keys[1:])})" if len(keys) > 1 else ""


def _number_hint(value: object) -> str:
    if isinstance(value, str):
        return "Write the number without quotes."
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN and Infinity are not JSON numbers."
    return ""
