"""``read_model``: a catalogue id, a config.json (or its folder) or a dict -> ModelSpec.

Finding and parsing files is here; what the keys mean is in `decoder`, `plan`, `mixers`, `ffn` and `quant`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.errors import ModelConfigError, suggest
from planner.models import catalogue
from planner.models.decoder import read_decoder
from planner.models.fields import Fields
from planner.models.mixers import dtype_name
from planner.models.quant import MTP_UNSTATED, mtp_dtype, read_quant
from planner.models.spec import ModelSpec, Mtp, Quant
from planner.models.traits import CLASS_DEFAULTS, Traits, family

#: Where multimodal and drafter wrappers keep the language model, in the order tried.
NESTED = ("text_config", "thinker_config.text_config", "thinker_config", "llm_config", "language_config", "language_model_config",
          "transformer_layer_config")  # fmt: skip
Source = str | Path | Mapping[str, Any]


def read_model(source: Source, *, id: str | None = None) -> ModelSpec:
    """The model behind `source`. `id` names it in reports (default: the catalogue id, file stem or `_name_or_path`)."""
    if isinstance(source, Mapping):
        return read_config(dict(source), id=id or _name(source), where="config object")
    if not isinstance(source, (str, Path)) or not str(source).strip():
        raise ModelConfigError("no model given", got=source, expected="a catalogue id, a path to a config.json, or a config object")
    text = str(source)
    path = Path(text).expanduser()
    spec = _read_path(path) if _is_path(path) else _read_id(text)
    return replace(spec, id=id) if id else spec


def _is_path(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read_path(path: Path) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelConfigError("no config.json in this folder", where=str(path), hint="Give the path of the model's config.json.")
    return _read_file(str(file.resolve()), _stamps(file))


def model_stamps(source: str) -> tuple[tuple[int, int], ...] | None:
    """What changes when the files of a model on disk are written anew; None where `source` is no path. Part of the key of whoever caches."""
    path = Path(source).expanduser()
    return _stamps(path / "config.json" if path.is_dir() else path) if _is_path(path) else None


def _stamps(file: Path) -> tuple[tuple[int, int], ...]:
    """Of a config and the files beside it that are read with it."""
    return tuple(_stamp(p) for p in (file, _quant_file(file), file.parent / "model.safetensors.index.json"))


def _quant_file(file: Path) -> Path:
    """``X_config.json`` -> ``X_hf_quant_config.json``; a plain config.json -> ``hf_quant_config.json`` beside it."""
    if file.name.endswith("_config.json"):
        return file.with_name(file.name.removesuffix("_config.json") + "_hf_quant_config.json")
    return file.with_name("hf_quant_config.json")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=256)
def _read_file(name: str, stamps: tuple[tuple[int, int], ...]) -> ModelSpec:
    file = Path(name)
    notes: list[str] = []
    config = load_json(file, notes)
    quant_file = _quant_file(file)
    quant = load_json(quant_file) if stamps[1] != (0, 0) else None
    stem = file.name.removesuffix(".json").removesuffix("_config")
    given = config.get("_name_or_path")
    name_or_path = given if isinstance(given, str) and given else file.parent.name
    label = name_or_path if stem in ("config", "") else stem.replace("--", "/", 1)
    index = None
    if stamps[2] != (0, 0) and file.name == "config.json":
        weight_map = load_json(file.parent / "model.safetensors.index.json").get("weight_map")
        index = [str(k) for k in weight_map] if isinstance(weight_map, Mapping) else None
    spec = read_config(config, id=label, where=str(file), quant_file=quant, tensors=index)
    return replace(spec, notes=(*notes, *spec.notes)) if notes else spec


@lru_cache(maxsize=256)
def _read_id(name: str) -> ModelSpec:
    entry = catalogue.catalogue_entry(name)
    if entry is not None:
        return _from_entry(entry, name)
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise ModelConfigError("no such file", where=name, expected="a config.json, or a folder with one")
    return _read_hub(name)


def _from_entry(entry: Mapping[str, Any], asked: str) -> ModelSpec:
    """A catalogue entry; under another name for the same architecture it keeps that name, and the notes say so."""
    known = entry["id"]
    name = catalogue.canonical(asked) or known
    spec = read_config(entry["config"], id="", where=f"catalogue entry {known}")
    quant = quant_from_entry(entry["quant"]) or spec.quant
    notes = spec.notes
    if name != known:
        notes += (f"{name} is read as {known}: same architecture",)
    if entry.get("note"):
        notes += (entry["note"],)
    mtp = replace(spec.mtp, weights_dtype=entry["mtp_weights_dtype"]) if spec.mtp else None
    if mtp is not None and quant.weights and mtp.weights_dtype is None and MTP_UNSTATED not in notes:
        notes += (MTP_UNSTATED,)
    source = f"{entry['source']['reference']}, {entry['source']['date']}"
    return replace(spec, id=name, quant=quant, mtp=mtp, source=source, notes=notes)


def quant_from_entry(value: Mapping[str, Any] | None) -> Quant | None:
    """The catalogue stores the scheme already normalised (exclusion lists of a thousand names are not shipped)."""
    if value is None:
        return None
    pairs: dict[str, tuple[tuple[Any, str], ...]] = {key: tuple(value.get(key, {}).items()) for key in ("weights", "matrices", "act_by_class")}
    return Quant(
        value["scheme"], pairs["weights"], value.get("kv_dtype"), value.get("act_dtype"), value.get("block_scaled", False),
        pairs["matrices"], pairs["act_by_class"],
    )  # fmt: skip


def _read_hub(name: str) -> ModelSpec:
    near = suggest(name, catalogue.catalogue_ids())
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelConfigError("unknown model", got=name, expected="a catalogue id, hub id, or path to a config.json", hint=near)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        hint = f"{near} Install draftline[hub] to fetch it, or give the path of its config.json.".strip()
        raise ModelConfigError("not in the catalogue", got=name, hint=hint) from None
    try:
        _look_up_host()  # the hub's client retries for 20 seconds where there is no network
        file = Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        hint = f"{near} Give the path of its config.json.".strip()
        raise ModelConfigError(f"not in the catalogue, and the hub gave no config.json ({error})", got=name, hint=hint) from None
    try:
        quant: dict[str, Any] | None = load_json(Path(hf_hub_download(name, "hf_quant_config.json")))
    except ModelConfigError:
        raise
    except Exception as error:
        # only a file that the repository does not have means "not quantised this way"; a lost connection must not change the weights' dtype
        if type(error).__name__ not in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            hint = "Try again, or give the path of a folder with config.json and hf_quant_config.json."
            raise ModelConfigError(f"the hub did not say whether there is a hf_quant_config.json ({error})", got=name, hint=hint) from None
        quant = None
    return read_config(load_json(file), id=name, where=f"{name} config.json", quant_file=quant)


def _look_up_host() -> None:
    """Raises OSError where the hub's host has no address and no proxy would resolve it."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not getproxies():
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)


def load_json(file: Path, notes: list[str] | None = None) -> dict[str, Any]:
    """A JSON object from a file; anything else is one clear error. Keys given twice with different values go to `notes`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, item in items:
            if notes is not None and key in table and table[key] != item:
                notes.append(f"{key} is given twice ({table[key]!r:.40}, then {item!r:.40}); the last one is used")
            table[key] = item
        return table

    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=pairs)
    except OSError as error:
        raise ModelConfigError(f"cannot be read ({error.strerror})", where=str(file)) from None
    except UnicodeDecodeError:
        raise ModelConfigError("is not UTF-8 text", where=str(file)) from None
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"is not valid JSON ({error})", where=str(file), expected="one JSON object") from None
    if not isinstance(value, dict):
        raise ModelConfigError("is not a model config", where=str(file), got=type(value).__name__, expected="a JSON object")
    return value


def _name(raw: Mapping[str, Any]) -> str:
    name = raw.get("_name_or_path") or raw.get("model_type")
    return name if isinstance(name, str) else "model"


def read_config(
    raw: Mapping[str, Any], *, id: str, where: str, quant_file: Mapping[str, Any] | None = None, tensors: list[str] | None = None,
) -> ModelSpec:  # fmt: skip
    """A parsed config -> ModelSpec. `tensors`: names in the checkpoint's index, if it was seen."""
    notes: list[str] = []
    top = Fields(raw, where, notes)
    cfg = _language_model(top)
    model_type = cfg.text("model_type") or top.text("model_type") or ""
    name, traits, known = family(model_type, cfg.raw.get("architectures") or raw.get("architectures"))
    if raw.get("is_encoder_decoder") is True:
        raise top.error("is_encoder_decoder", "not a decoder-only model", got=True, expected="false")
    if not known:
        cfg.note(f"model_type {model_type!r} is not a family with known norms and biases: read by its keys, vectors may be off")
    cfg = _with_class_defaults(cfg, name)
    base = _base_dtype(cfg, top)
    decoder = read_decoder(cfg, traits)
    quant = read_quant(cfg, top, quant_file, decoder.layers, family=name)
    if quant == Quant() and (word := _QUANTISED_NAME.search(id)):
        cfg.note(f"the name says {word.group(0)} but the config has no quantisation section: read as {base}; give weights_dtype if it has")
    mtp = _with_dtype(decoder.mtp, cfg, traits, quant)
    if tensors is not None:
        mtp = _verified(mtp, tensors, len(decoder.layers), notes, quant)
    spec = ModelSpec(
        id=id, model_type=name or "unknown", hidden_size=cfg.need("hidden"), vocab_size=cfg.need("vocab"), layers=decoder.layers,
        tie_embeddings=_tied(cfg, top, traits), base_dtype=base, max_context_tokens=cfg.maybe("context"),
        vector_params=decoder.vector_params, extra_matrices=decoder.extra_matrices, mtp=mtp, quant=quant, source=where,
        notes=tuple(notes),
    )  # fmt: skip
    if spec.total_params > 1e15:
        raise ModelConfigError("adds up to more parameters than any model has", where=where, got=f"{spec.total_params:.3g}")
    return spec


def _language_model(top: Fields) -> Fields:
    """The nested text decoder's fields, over the top level's where it has none of its own."""
    for dotted in NESTED:
        node: Fields | None = top
        for key in dotted.split("."):
            node = node.table(key) if node is not None and isinstance(node.raw.get(key), Mapping) else None
        if node is not None and (node.has("hidden") or node.has("num_layers")):
            top.note(f"the language model is read from {dotted}")
            if top.has("hidden") and top.find("hidden") != node.find("hidden"):
                top.note(f"hidden_size differs between the top level and {dotted}; {dotted} is used")
            return node
    for dotted in NESTED[:1]:
        if top.raw.get(dotted) is not None and not top.has("hidden"):
            top.table(dotted)
    return top


def _with_class_defaults(cfg: Fields, name: str) -> Fields:
    """Values of the transformers class for keys that its checkpoints leave out; only for families known to do so."""
    absent = {k: v for k, v in CLASS_DEFAULTS.get(name, {}).items() if cfg.raw.get(k) is None}
    if not absent:
        return cfg
    stated = ", ".join(f"{k} = {v}" for k, v in absent.items())
    cfg.note(f"absent from the config, taken from the class defaults of {name}: {stated}")
    return Fields({**cfg.raw, **absent}, cfg.where, cfg.notes)


def _base_dtype(cfg: Fields, top: Fields) -> str:
    text = cfg.text("dtype") or top.text("dtype")
    if text is None or text == "auto":
        return "bf16"
    name = dtype_name(text)
    if name is None:
        cfg.note(f"dtype {text!r} is not a 16 or 32-bit float: bf16 is taken as the base")
    return name or "bf16"


def _tied(cfg: Fields, top: Fields, traits: Traits) -> bool:
    inner, outer = cfg.raw.get("tie_word_embeddings"), top.raw.get("tie_word_embeddings")
    if inner is not None and outer is not None and inner != outer:
        cfg.note(f"tie_word_embeddings is {outer} at the top and {inner} in the text config: the top level is used")
    return top.flag("tie_word_embeddings", cfg.flag("tie_word_embeddings", traits.tie))


def _with_dtype(mtp: Mtp | None, cfg: Fields, traits: Traits, quant: Quant) -> Mtp | None:
    return None if mtp is None else replace(mtp, weights_dtype=mtp_dtype(cfg, traits, quant))


_LAYER = re.compile(r"^(?:model\.|language_model\.|backbone\.)*layers\.(\d{1,6})\.")
_QUANTISED_NAME = re.compile(r"(NV|MX)?FP[48]|INT[48]|AWQ|GPTQ|W[48]A(4|8|16)", re.IGNORECASE)
_MTP_NAME = re.compile(r"(^|\.)(mtp|nextn|mtp_block|mtp_layers|nextn_predict_layers)(\.|_|$)")


def _verified(mtp: Mtp | None, tensors: list[str], num_layers: int, notes: list[str], quant: Quant) -> Mtp | None:
    """What the checkpoint's tensor index says about the MTP blocks that the config declares."""
    found = [t for t in tensors if _MTP_NAME.search(t) or ((at := _LAYER.search(t)) and num_layers <= int(at.group(1)) < num_layers + 64)]
    stale = [n for n in notes if n.startswith("MTP:")]
    for note in stale:
        notes.remove(note)
    if mtp is None:
        if found:
            notes.append(f"MTP: the index holds MTP tensors ({found[0]}) but the config does not declare them; left out")
        return None
    if not found:
        notes.append("MTP: the config declares it but the checkpoint's index holds no MTP tensor; left out")
        return None
    scaled = any("scale" in t for t in found)
    dtype = mtp.weights_dtype or (next((d for c, d in quant.weights if c in ("experts", "mlp")), None) if scaled else None)
    notes.append(f"MTP: present in the checkpoint's index ({'with' if scaled else 'without'} scale tensors)")
    return replace(mtp, verified=True, weights_dtype=dtype if scaled else None)
