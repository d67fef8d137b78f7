"""Finding and loading GPU profiles, attention-kernel descriptors and engine profiles.

A profile file is JSON; every number in it is an object `{"value": 4.8e12, "origin": "datasheet", "ref": "...", "date":
"2026-12-01"}` in SI base units. Reading checks everything once, so that the rest of the program need not.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from gpu_profiles.reader import Reader
from gpu_profiles.schema import AttentionKernel, EngineProfile, GpuProfile
from planner.errors import ProfileError, suggest

_HERE = Path(__file__).parent
_GPUS, _ENGINES, _KERNELS = _HERE / "gpus", _HERE / "engines", _HERE / "kernels.json"
_VENDOR_WORDS = frozenset({"nvidia", "geforce", "amd", "instinct", "tesla", "radeon"})


def normalise(name: str) -> str:
    """The form in which names are compared: lower case, no vendor words, no separators."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(w for w in words if w not in _VENDOR_WORDS)


# ---- GPUs ----------------------------------------------------------------------------------------------------------------------


def gpu_ids() -> tuple[str, ...]:
    """Ids of the profiles that come with the package, sorted."""
    return tuple(_gpu_index()["ids"])


def resolve_gpu(name: str) -> str:
    """The profile id behind a name or alias (case, `-`, `_`, spaces and vendor words do not matter)."""
    found = _gpu_index()["aliases"].get(normalise(name))
    if found is None:
        known = {*gpu_ids(), *_gpu_index()["names"]}
        hint = " ".join(filter(None, [suggest(name, known), "Run `draftline gpus` for the list, or give a profile file."]))
        raise ProfileError("unknown GPU", got=name, hint=hint)
    return str(found)


def is_file_name(text: str) -> bool:
    """Whether a GPU is named by a file: anything with a `/`, or ending in `.json`."""
    return "/" in text or "\\" in text or text.lower().endswith(".json")


def file_stamp(text: str) -> tuple[int, int, int] | None:
    """What changes when a file named so is written anew (inode, time, size); None for a name that is no file. Whoever caches what was read
    from a file puts this into the key, so that an edited profile counts at once."""
    if not is_file_name(text):
        return None
    try:
        found = Path(text).expanduser().stat()
    except (OSError, ValueError):
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def load_gpu(name_or_path: str) -> GpuProfile:
    """The profile of a GPU by name or alias, or from a profile file (anything with a `/`, or ending in `.json`)."""
    if is_file_name(name_or_path):
        return gpu_from_json(_read(Path(name_or_path), "GPU profile"), name_or_path)
    return _packaged_gpu(resolve_gpu(name_or_path))


@lru_cache(maxsize=64)
def _packaged_gpu(gpu_id: str) -> GpuProfile:
    path = _GPUS / f"{gpu_id}.json"
    return gpu_from_json(_read(path, "GPU profile"), path.name)


@cache
def _gpu_index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((_GPUS / "index.json").read_text(encoding="utf-8"))
    return index


def build_gpu_index() -> dict[str, Any]:
    """What gpus/index.json must hold: ids, names and normalised aliases of all files (a test compares)."""
    ids: list[str] = []
    names: list[str] = []
    aliases: dict[str, str] = {}
    for path in sorted(_GPUS.glob("*.json")):
        if path.name == "index.json":
            continue
        gpu = gpu_from_json(_read(path, "GPU profile"), path.name)
        ids.append(gpu.id)
        for alias in (gpu.id, gpu.name, *gpu.aliases):
            if aliases.setdefault(normalise(alias), gpu.id) != gpu.id:
                raise ProfileError("alias names two GPUs", where=path.name, got=alias)
        names += [gpu.name, *gpu.aliases]
    return {"ids": ids, "names": sorted(names), "aliases": dict(sorted(aliases.items()))}


def gpu_from_json(data: object, where: str) -> GpuProfile:
    """Check and build a profile; errors name the file and the field."""
    r = Reader(data, where)
    memory, usable = r.number("memory_bytes"), r.number("usable_memory_bytes")
    if usable > memory:
        raise r.error("usable_memory_bytes", "more than memory_bytes", got=usable, expected=f"at most {memory}")
    peaks = r.number_table("peak_flop_per_s")
    efficiencies = r.number_table("matmul_eff", at_most=1.0)
    if set(peaks) != set(efficiencies):
        raise r.error("matmul_eff", "not the dtypes of peak_flop_per_s", got=sorted(efficiencies), expected=str(sorted(peaks)))
    sm_count = r.optional_number("sm_count", whole=True)
    profile = GpuProfile(
        id=r.text("id"), name=r.text("name"), arch=r.text("arch"), aliases=r.texts("aliases"),
        compute_capability=r.optional_text("compute_capability"),
        memory_bytes=memory, usable_memory_bytes=usable,
        bytes_per_s=r.number("bytes_per_s"), bandwidth_eff=r.number("bandwidth_eff", at_most=1.0),
        peak_flop_per_s=peaks, matmul_eff=efficiencies, launch_s=r.number("launch_s"),
        link_bytes_per_s=r.number("link_bytes_per_s"), link_kind=r.text("link_kind"),
        max_link_gpus=int(r.number("max_link_gpus", whole=True)),
        sm_count=None if sm_count is None else int(sm_count), l2_bytes=r.optional_number("l2_bytes"),
        tdp_w=r.optional_number("tdp_w"), usd_per_hour=r.optional_number("usd_per_hour"),
        notes=r.texts("notes"), calibration=r.optional_object("calibration"), sources=r.sources,
    )  # fmt: skip
    r.done()
    return profile


def gpu_to_json(profile: GpuProfile) -> dict[str, Any]:
    """The file form of a profile (what a calibration writes); `gpu_from_json` of it gives the profile back."""

    def number(value: float, field: str) -> dict[str, Any]:
        source = profile.sources[field]
        return {"value": value, "origin": source.origin, "ref": source.reference, "date": source.date}

    out: dict[str, Any] = {"id": profile.id, "name": profile.name, "arch": profile.arch, "link_kind": profile.link_kind}
    if profile.compute_capability is not None:
        out["compute_capability"] = profile.compute_capability
    for key in ("memory_bytes", "usable_memory_bytes", "bytes_per_s", "bandwidth_eff", "launch_s", "link_bytes_per_s", "max_link_gpus"):
        out[key] = number(getattr(profile, key), key)
    for key in ("peak_flop_per_s", "matmul_eff"):
        out[key] = {dtype: number(value, f"{key}.{dtype}") for dtype, value in getattr(profile, key).items()}
    for key in ("sm_count", "l2_bytes", "tdp_w", "usd_per_hour"):
        if getattr(profile, key) is not None:
            out[key] = number(getattr(profile, key), key)
    out["aliases"], out["notes"] = list(profile.aliases), list(profile.notes)
    if profile.calibration is not None:
        out["calibration"] = dict(profile.calibration)
    return out


# ---- attention kernels ---------------------------------------------------------------------------------------------------------


def attention_kernel_ids() -> tuple[str, ...]:
    """Ids of the attention-kernel descriptors, sorted."""
    return tuple(sorted(_kernels()))


def load_attention_kernel(kernel_id: str) -> AttentionKernel:
    """The descriptor of one attention backend."""
    kernels = _kernels()
    found = kernels.get(kernel_id) or next((k for i, k in kernels.items() if normalise(i) == normalise(kernel_id)), None)
    if found is None:
        hint = " ".join(filter(None, [suggest(kernel_id, kernels), f"Known: {', '.join(sorted(kernels))}."]))
        raise ProfileError("unknown attention backend", got=kernel_id, hint=hint)
    return found


@cache
def _kernels() -> dict[str, AttentionKernel]:
    kernels = {}
    for data in json.loads(_KERNELS.read_text(encoding="utf-8"))["kernels"]:
        kernel = AttentionKernel(**{key: _tuples(value) for key, value in data.items()})
        kernels[kernel.id] = kernel
    return kernels


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


# ---- engines -------------------------------------------------------------------------------------------------------------------


def engine_ids() -> tuple[str, ...]:
    """Ids of the engine profiles, sorted."""
    return tuple(sorted(p.stem for p in _ENGINES.glob("*.json")))


_ENGINE_ALIASES = {
    "tensorrtllm": "trtllm", "tensorrt": "trtllm", "trt": "trtllm", "hf": "transformers", "huggingface": "transformers",
    "hftransformers": "transformers", "llamaserver": "llamacpp", "ggml": "llamacpp", "sgl": "sglang", "roofline": "ideal",
}  # fmt: skip


def load_engine(name: str) -> EngineProfile:
    """The profile of an engine by name or alias (`tensorrt-llm`, `llama.cpp`, `hf`, ...)."""
    key = normalise(name)
    key = _ENGINE_ALIASES.get(key, key)
    if key not in engine_ids():
        known = {*engine_ids(), "tensorrt-llm", "llama.cpp", "hf"}
        hint = " ".join(filter(None, [suggest(name, known), f"Known: {', '.join(engine_ids())}."]))
        raise ProfileError("unknown engine", got=name, hint=hint)
    return _packaged_engine(key)


@lru_cache(maxsize=16)
def _packaged_engine(engine_id: str) -> EngineProfile:
    from gpu_profiles.engine_file import engine_from_json

    path = _ENGINES / f"{engine_id}.json"
    return engine_from_json(_read(path, "engine profile"), path.name)


def _read(path: Path, what: str) -> object:
    try:
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"no such {what} file", where=str(path), hint="Give the path of a JSON file, or a name from `draftline gpus`.") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{what} is not JSON ({error})", where=str(path)) from None
    except OSError as error:
        raise ProfileError(f"{what} cannot be read ({error.strerror})", where=str(path)) from None
    return data
