"""Names of modules in published checkpoints, and the patterns by which quantisation schemes pick them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate

from planner.models.fields import Fields

#: Matrix name -> module names under `layers.N.` in published checkpoints.
_ATTN = ("self_attn", "attn", "mixer", "attention")
_MLP = ("mlp", "ffn", "mixer", "feed_forward", "block_sparse_moe")


def _under(parents: tuple[str, ...], *leaves: str) -> tuple[str, ...]:
    return tuple(f"{p}.{leaf}" for p in parents for leaf in leaves)


MODULES: dict[str, tuple[str, ...]] = {
    "q": _under(_ATTN, "q_proj", "qkv_proj", "wq"), "k": _under(_ATTN, "k_proj", "qkv_proj", "wk"),
    "v": _under(_ATTN, "v_proj", "qkv_proj", "wv"), "o": _under(_ATTN, "o_proj", "wo"),
    "q_a": _under(_ATTN, "q_a_proj", "wq_a"), "q_b": _under(_ATTN, "q_b_proj", "wq_b"),
    "kv_a": _under(_ATTN, "kv_a_proj_with_mqa"), "kv_b": _under(_ATTN, "kv_b_proj"),
    "kv": _under(_ATTN, "wkv"), "o_a": _under(_ATTN, "wo_a"), "o_b": _under(_ATTN, "wo_b"), "o_gate": _under(_ATTN, "g_proj"),
    "index_q": _under(_ATTN, "indexer.wq_b"), "index_k": _under(_ATTN, "indexer.wk"),
    "index_w": _under(_ATTN, "indexer.weights_proj", "indexers_proj"),
    "gdn_qkvz": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv"),
    "gdn_ba": ("linear_attn.in_proj_ba", "linear_attn.in_proj_b"), "gdn_out": ("linear_attn.out_proj",),
    "ssm_in": ("mixer.in_proj", "mamba.in_proj"), "ssm_out": ("mixer.out_proj", "mamba.out_proj"),
    "gate": _under(_MLP, "gate_proj", "gate_up_proj", "w1"), "up": _under(_MLP, "up_proj", "gate_up_proj", "w3"),
    "down": _under(_MLP, "down_proj", "w2"),
    "shared_gate": tuple(f"{m}.{s}.gate_proj" for m in _MLP for s in ("shared_experts", "shared_expert")),
    "shared_up": tuple(f"{m}.{s}.up_proj" for m in _MLP for s in ("shared_experts", "shared_expert")),
    "shared_down": tuple(f"{m}.{s}.down_proj" for m in _MLP for s in ("shared_experts", "shared_expert")),
    "latent_down": _under(_MLP, "fc1_latent_proj"), "latent_up": _under(_MLP, "fc2_latent_proj"),
    "experts": (
        "mlp.experts.0.gate_proj", "mlp.experts.0.gate_up_proj", "ffn.experts.0.w1", "block_sparse_moe.experts.0.w1",
        "mixer.experts.0.up_proj", "experts.0.gate_proj", "feed_forward.experts.0.gate_proj", "mlp.experts.gate_up_proj",
    ),
    # Beside a dense MLP (Gemma 4) the experts are no part of `mlp`.
    "experts_apart": ("experts.0.gate_proj", "experts.gate_up_proj", "moe.experts.0.gate_proj", "moe.gate_up_proj"),
}  # fmt: skip
for _name in ("kda_q", "kda_k", "kda_v", "kda_gate", "kda_beta", "kda_decay_a", "kda_decay_b", "kda_out"):
    MODULES[_name] = _under(_ATTN, f"{_name.removeprefix('kda_')}_proj", "o_proj" if _name == "kda_out" else "kda")

PREFIX = re.compile(r"^(model\.|language_model\.|backbone\.|transformer\.|thinker\.)+")
_ROOTS = ("model.", "", "model.language_model.", "language_model.model.", "backbone.")


def _names(layer: int, module: str) -> list[str]:
    return [f"{root}layers.{layer}.{module}" for root in _ROOTS]


class Patterns:
    """A list of module patterns: `re:` expressions, globs, exact names or dotted parts."""

    def __init__(self, q: Fields, key: str, patterns: list[str]) -> None:
        self.plain: set[str] = set()
        self.parts: list[str] = []
        globs, regexes = [], []
        for text in patterns:
            if text.startswith("re:"):
                try:
                    re.compile(text[3:])
                except re.error as error:
                    raise q.error(key, f"bad regular expression ({error})", got=text) from None
                regexes.append(f"(?:{text[3:]})")
            elif any(c in text for c in "*?["):
                globs.append(translate(PREFIX.sub("", text)))
                globs.append(translate(PREFIX.sub("", text) + ".*"))
            else:
                bare = PREFIX.sub("", text)
                (self.plain.add if bare.startswith("layers.") else self.parts.append)(bare)
        self.globs = re.compile("|".join(globs)) if globs else None
        self.regexes = [re.compile(r) for r in regexes]
        # Expressions without a digit class cannot tell layers apart: one answer per module serves all.
        self.layerless = not any(re.search(r"[0-9]|\\[dwDW]", r) for r in regexes)
        self.answers: dict[tuple[str, ...], bool] = {}

    def _listed(self, name: str) -> bool:
        """Exact names (of the module or of one that holds it) and globs; `name` has no model prefix."""
        pieces = name.split(".")
        if self.plain and any(".".join(pieces[:n]) in self.plain for n in range(2, len(pieces) + 1)):
            return True
        return self.globs is not None and self.globs.match(name) is not None

    def _everywhere(self, name: str, full: Sequence[str]) -> bool:
        """Dotted parts, and regular expressions tried on `full`, the name under each usual prefix."""
        if any(f".{part}." in f".{name}." for part in self.parts):
            return True
        return any(r.match(f) for r in self.regexes for f in full)

    def layer(self, layer: int, modules: tuple[str, ...]) -> bool:
        key = modules if self.layerless else (str(layer), *modules)
        if key not in self.answers:
            self.answers[key] = any(self._everywhere(f"layers.{layer}.{m}", _names(layer, m)) for m in modules)
        if self.answers[key]:
            return True
        return (bool(self.plain) or self.globs is not None) and any(self._listed(f"layers.{layer}.{m}") for m in modules)

    def head(self) -> bool:
        names = ("lm_head", "head", "output")
        return any(self._listed(n) or self._everywhere(n, [n, f"language_model.{n}", f"model.{n}"]) for n in names)
