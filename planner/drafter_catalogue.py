"""Published drafters: which exist for a target, of what shape, trained for what, and what to be careful about.

Rows live in planner/data/drafters.json, each with its source URL (looked up 2026-12-01). `engines` says how the support is known:
"stated" by the source, or "kind" = the engine knows the method, this head was not checked. n-gram and suffix need no model and exist for
every target; native MTP exists where the target declares it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import Any

from planner.errors import suggest
from planner.models.spec import ModelSpec

_QUANT = r"(fp8|nvfp4|fp4|mxfp4|mxfp8|int4|int8|awq|gptq|w4a16|w8a8|bf16|gguf|qat[\w-]*|dynamic|static|pertensor|block|modelopt)"
_TUNE = r"(instruct|chat|base|it|hf|thinking|preview|\d{4})"
_SIZE = re.compile(r"-e?(\d+(?:\.\d+)?)([bmt])(?=-|$)")
_SMALL_BILLION = 2.0
"""Largest model offered as an external drafter of its family."""
_LOOKUP: tuple[dict[str, Any], ...] = (
    {"kind": "ngram", "model": None, "status": "no model", "engines": {"vllm": "stated", "sglang": "stated", "trtllm": "stated"}},
    {"kind": "suffix", "model": None, "status": "no model", "engines": {"vllm": "stated"}},
)


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[str, Any], ...]:
    text = resources.files("planner").joinpath("data/drafters.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["drafters"])


def list_drafters() -> list[dict[str, Any]]:
    """Every row of the catalogue, n-gram and suffix included. Each has at least `kind`, `model` and `targets`."""
    return [dict(row) for row in _rows()] + [{**row, "targets": []} for row in _LOOKUP]


def find_drafter(model: str, kind: str | None = None, target_id: str | None = None) -> dict[str, Any] | None:
    """The row of a published drafter by id, whatever the case; the one for `target_id` where several targets share it."""
    found = [r for r in _rows() if (r["model"] or "").lower() == model.strip().lower() and kind in (None, r["kind"])]
    mine = [r for r in found if target_id and _match(r, target_id)]
    return dict((mine or found)[0]) if found else None


def suggest_drafters(model: str, kind: str | None = None) -> str:
    """``Did you mean ...?`` over the published ids of a kind."""
    return suggest(model, sorted({r["model"] for r in _rows() if r["model"] and kind in (None, r["kind"])}))


def base_name(model_id: str) -> str:
    """The id without organisation, quantisation and tuning suffixes, lower case: what variants of one base share."""
    name = _plain(model_id)
    while (cut := re.sub(rf"-({_QUANT}|{_TUNE})$", "", name)) != name:
        name = cut
    return name


def family_name(model_id: str) -> str:
    """The part that names the tokenizer family: qwen3-coder-30b -> qwen3, llama-3.1-8b -> llama-3."""
    name = base_name(model_id)
    size = _SIZE.search(name)
    name = name[: size.start()] if size else name
    name = re.sub(r"-(coder|vl|next)$", "", name)
    return re.sub(r"^llama-3\.\d$", "llama-3", name)


def _plain(model_id: str) -> str:
    name = model_id.strip().lower().replace("--", "/").split("/")[-1]
    name = name.removesuffix(".json").removesuffix("_config").replace("_", "-")
    return name.removeprefix("meta-").removeprefix("nvidia-")


def _untuned(model_id: str) -> str:
    name = _plain(model_id)
    while (cut := re.sub(rf"-{_QUANT}$", "", name)) != name:
        name = cut
    return name


def _match(row: dict[str, Any], target_id: str) -> str:
    """exact | quantisation | variant | family | "" (not for this target)."""
    best = ""
    for t in row["targets"]:
        if _plain(t) == _plain(target_id):
            return "exact"
        if _untuned(t) == _untuned(target_id):
            best = "quantisation"
        elif base_name(t) == base_name(target_id):
            best = best or "variant"
    if not best and row.get("family") and row["family"] in (family_name(target_id), base_name(target_id)):
        best = "family"
    return best


def _warnings(row: dict[str, Any], match: str, target_id: str) -> list[str]:
    made_for = ", ".join(row["targets"]) or f"the {row.get('family')} family"
    who = row["model"] or row["kind"]
    out = []
    if row["status"] == "in checkpoint":
        if match == "quantisation":
            out.append(f"MTP ships with {made_for}: check that the quantised copy {target_id} still holds its weights")
    elif match == "quantisation":
        out.append(f"{who} was made for {made_for}: another quantisation than {target_id}, so measure its acceptance")
    elif match == "variant":
        out.append(f"{who} was made for {made_for}, not for {target_id}: acceptance may collapse on another fine-tune")
    trained = row.get("trained_for", {})
    if "quantisation" in trained:
        out.append(f"{who} was trained on a {trained['quantisation']} target")
    if trained.get("fine_tune"):
        out.append(f"{who} was trained for a fine-tune of its target")
    if "thinking" in trained and not row.get("caution"):
        out.append(f"{who} was trained {'on thinking output' if trained['thinking'] else 'without thinking'}")
    if row.get("caution"):
        out.append(f"{who}: {row['caution']}")
    if row.get("id_inferred"):
        out.append(f"{who}: the id was inferred from a name, check it")
    return out


def drafters_for(target_id: str, target: ModelSpec | None = None) -> list[dict[str, Any]]:
    """Drafters that exist for a target, best match first; each row gets `match` and `warnings`.

    Exact ids come before other quantisations, those before other fine-tunes of the same base, those before whole-family drafters.
    Variants an engine may not serve (P-EAGLE, DFlash2, ...) follow the plain head of their kind. Native MTP is listed where `target`
    declares it or the catalogue knows it ships, unless the weights are known to be absent.
    """
    order = {"exact": 0, "quantisation": 1, "variant": 2, "family": 3}
    found = []
    absent = any(r["status"] == "absent" and _match(r, target_id) for r in _rows())
    for row in _rows():
        match = _match(row, target_id)
        usable = row["model"] or row["status"] == "in checkpoint"
        if match and usable and not (row["status"] == "in checkpoint" and match in ("variant", "family")):
            found.append({**row, "match": match, "warnings": _warnings(row, match, target_id)})
    found.sort(key=lambda r: (order[r["match"]], r.get("variant") is not None, bool(r.get("caution")), not r.get("recommended_draft_len")))
    if target is not None and target.mtp is not None and not absent and not any(r["kind"] == "mtp" for r in found):
        declared = {"targets": [target_id], "kind": "mtp", "model": None, "status": "declared by the config", "match": "exact"}
        found.append({**declared, "n_predict": target.mtp.n_predict, "warnings": ["MTP weights are declared by the config, not verified"]})
    if not any(r["kind"] == "external" for r in found):
        found += list(_small_siblings(target_id))
    return found + [{**row, "targets": [], "match": "any", "warnings": []} for row in _LOOKUP]


def _small_siblings(target_id: str) -> Iterator[dict[str, Any]]:
    """The smallest catalogue model of the target's tokenizer family, as an external drafter."""
    from planner.models.catalogue import catalogue_ids

    small = []
    for known in catalogue_ids():
        size = _SIZE.search(_plain(known))
        if size and family_name(known) == family_name(target_id) and _plain(known) != _plain(target_id):
            billions = float(size[1]) * {"m": 1e-3, "b": 1.0, "t": 1e3}[size[2]]
            small.append((billions, known))
    mine = _SIZE.search(_plain(target_id))
    limit = min(_SMALL_BILLION, float(mine[1]) / 4 if mine and mine[2] == "b" else _SMALL_BILLION)
    for billions, known in sorted(small)[:1]:
        if billions <= limit:
            warning = f"{known} shares the tokenizer family of {target_id}: check the vocabulary"
            row: dict[str, Any] = {"targets": [target_id], "kind": "external", "model": known, "status": "same family, small"}
            yield {**row, "match": "family", "params": int(billions * 1e9), "warnings": [warning]}
