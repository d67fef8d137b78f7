"""Fitted kernel numbers for a GPU, an engine and a dtype: the nearest stack that was measured, and how near that is.

`fitted/kernels.json` holds shares of peaks and seconds per (GPU, engine, dtype), made by `draftline calibrate --from-tables` from public
tables. Looked up in this order: the profile's own calibration, the same GPU and engine, the same GPU under another engine, a GPU of the
same architecture, and last a prior from the profile alone. The further away, the wider the band.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from gpu_profiles.schema import GpuProfile
from planner.errors import ProfileError
from planner.kernels import AttentionFit, CommFit, GemmFit, MoeFit, StateFit

_FILE = Path(__file__).parent / "fitted" / "kernels.json"
T = TypeVar("T")

#: Residual bands widen with distance: factor on the log half-widths, and the least log half-width.
WIDEN = {"own": (1.0, 0.0), "exact": (1.0, 0.0), "engine": (1.5, 0.10), "sibling": (1.6, 0.18), "prior": (1.0, 0.0)}
PRIOR_BAND = {
    "gemm": (0.75, 1.6), "attention": (0.6, 1.6), "mla": (0.6, 1.8), "moe": (0.6, 2.0), "state": (0.5, 2.0), "allreduce": (0.5, 2.0),
    "allgather": (0.5, 2.0), "alltoall": (0.4, 2.5),
}  # fmt: skip
#: GPUs to take efficiencies from, nearest first, by architecture.
SIBLINGS = {
    "hopper": ("h200-sxm", "h100-sxm"), "ampere": ("a100-sxm-80gb",), "ada": ("l40s",), "blackwell": ("b200-sxm", "gb200", "b300-sxm"),
    "blackwell-ultra": ("b300-sxm", "gb300", "b200-sxm"), "blackwell-consumer": ("rtx-pro-6000",), "rubin": ("b300-sxm", "b200-sxm"),
}  # fmt: skip
#: Engines whose kernels resemble those of another one, nearest first; `ideal` has no kernels and gets the prior.
ENGINES = {
    "vllm": ("vllm", "sglang", "trtllm"), "sglang": ("sglang", "vllm", "trtllm"), "trtllm": ("trtllm", "sglang", "vllm"), "ideal": (),
}  # fmt: skip
#: Bandwidth of a GEMM that unpacks small weights to 16 bit, over that of its 16-bit stack: 0.73 for int4 on A100 (8192 x 8192, M <= 16)
#: and 0.71 for Marlin experts on H200, in the same tables.
WEIGHT_ONLY_SHARE = 0.73
#: Collectives on GPUs without their own table come from any GPU that has the same link.
COLLECTIVES = ("allreduce", "allgather", "alltoall")


@dataclass(frozen=True)
class Fitted(Generic[T]):
    """A fit object, where it comes from, and measured / predicted at the 10th and 90th percentile of held-out rows."""

    value: T
    provenance: str
    band: tuple[float, float]
    distance: str = "prior"
    """own | exact | engine | sibling | prior"""


class _Stack(NamedTuple):
    distance: str
    gpu: str
    engine: str
    dtype: str
    data: Mapping[str, Any]


@cache
def _file() -> dict[str, Any]:
    if not _FILE.exists():  # a checkout before the first fit
        return {"source": "", "params": {}, "step_m": [], "gpus": {}}
    return json.loads(_FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def storage_keys(op: str, dtype: str) -> tuple[str, ...]:
    """Names a dtype may be tabulated under, nearest first. `a/b` is storage a multiplied in b."""
    weights, _, act = dtype.partition("/")
    if op in ("attention", "mla"):
        return {"fp8": ("fp8",), "int8": ("fp8",), "fp32": ("fp32", "bf16")}.get(dtype, ("bf16",) if dtype in ("bf16", "fp16") else ("fp8", "bf16"))
    if op in COLLECTIVES or op == "state":
        return ("bf16",)
    if act in ("bf16", "fp16"):
        if weights in ("fp8", "int8"):
            return ("int8/bf16", "bf16")
        return ("mxfp4/bf16", "int4/bf16", "bf16") if weights in ("mxfp4", "nvfp4") else ("int4/bf16", "mxfp4/bf16", "bf16")
    if act == "fp32":  # a CPU whose weight-only kernel takes 16-bit activations from a float32 stream
        return (f"{weights}/bf16", "fp32")
    if act == "fp8":
        return (f"{weights}/fp8", "fp8", "fp8_block")
    return {
        "fp16": ("bf16",), "fp8_block": ("fp8_block", "fp8"), "fp8": ("fp8", "fp8_block"), "mxfp4": ("mxfp4/fp8", "nvfp4"),
        "nvfp4": ("nvfp4",), "int8": ("int8",), "int4": ("int4/bf16", "bf16"),
    }.get(dtype, (dtype,))  # fmt: skip


def compute_dtype(op: str, dtype: str, gpu: GpuProfile) -> str:
    """The dtype whose peak a stack multiplies at: attention in 16 bit, GEMMs in what stands after the slash."""
    wide = next((d for d in ("bf16", "fp16", "fp32") if d in gpu.peak_flop_per_s), "bf16")
    if op not in ("gemm", "moe"):
        return wide
    act = dtype.rpartition("/")[2]
    act = {"fp8_block": "fp8", "int4": "bf16"}.get(act, act)
    return wide if act in ("bf16", "fp16") else act


def _stacks(op: str, gpu: GpuProfile, engine: str, keys: tuple[str, ...]) -> Iterator[_Stack]:
    own = (gpu.calibration or {}).get("kernels")
    if isinstance(own, Mapping):
        for key in keys:
            for name in (engine, "*"):
                if key in own.get(op, {}).get(name, {}):
                    yield _Stack("own", gpu.id, name, key, own[op][name][key])
    tables, engines = _file()["gpus"], ENGINES.get(engine, ENGINES["vllm"])
    if op in COLLECTIVES and engines:
        engines = (*engines, "nccl")
    for place, names in (("exact", (gpu.id,)), ("sibling", SIBLINGS.get(gpu.arch, ()))):
        for key in keys:
            for name in names:
                for e in engines:
                    data = tables.get(name, {}).get(op, {}).get(e, {}).get(key)
                    if data is not None:
                        same = "exact" if e == engine and key == keys[0] else "engine"
                        yield _Stack(same if place == "exact" else "sibling", name, e, key, data)


def kernel_fit(op: str, gpu: GpuProfile, engine: str, dtype: str) -> Fitted[Any]:
    """The fit object of a kernel class: op = gemm | attention | mla | moe | state | allreduce | allgather | alltoall.

    dtype: weights for gemm and moe (`fp8`, `fp8_block`, `nvfp4`, `int4/bf16` = stored / multiplied), the KV cache for attention and mla.
    """
    if op not in PRIOR_BAND:
        raise ProfileError("unknown kernel class", got=op, expected=f"one of {sorted(PRIOR_BAND)}")
    peak = compute_dtype(op, dtype, gpu)
    for stack in _stacks(op, gpu, engine, storage_keys(op, dtype)):
        # a share of an fp8 peak says nothing about another dtype's: the stack must multiply in what was asked for
        if op in ("gemm", "moe") and compute_dtype(op, stack.dtype, gpu) != peak:
            continue
        value = _build(op, stack, gpu, peak)
        if "/" in dtype and "/" not in stack.dtype and peak == compute_dtype(op, "bf16", gpu):
            value = replace(value, bytes_per_s=WEIGHT_ONLY_SHARE * value.bytes_per_s)
        return Fitted(value, _provenance(stack, gpu), _band(stack, op), stack.distance)
    low, high = PRIOR_BAND[op]
    return Fitted(_prior(op, gpu, peak), f"prior from the {gpu.id} profile: no table for {op} in {dtype}", (low, high), "prior")


def _build(op: str, stack: _Stack, gpu: GpuProfile, peak: str) -> Any:
    data, file = stack.data, _file()
    if op in COLLECTIVES:
        link = data["link"] / gpu.link_bytes_per_s if stack.distance == "sibling" else 1.0  # a slower link, a longer time
        return CommFit.from_table(data["ranks"], file["comm_bytes"], data["us"], max(link, 1.0))
    # attention stacks without prefill tables leave their last names out
    p = dict(zip(file["params"][op], data["p"], strict=False)) if isinstance(data["p"], list) else dict(data["p"])
    match op:
        case "gemm":
            nodes = tuple(data.get("step_m", file["step_m"]))
            steps = tuple(v / 1000.0 for v in data["step"])  # stored in thousandths of log units
            return GemmFit.from_params(p, gpu, peak, nodes if steps else (), steps)
        case "moe":
            return MoeFit.from_params(p, gpu, peak)
        case "state":
            return StateFit.from_params(p, gpu, peak)
        case _:
            single = None
            if "single" in data:
                single = AttentionFit.from_params(dict(zip(file["params"][op], data["single"], strict=False)), gpu, peak)
            return AttentionFit.from_params(p, gpu, peak, single)


def _prior(op: str, gpu: GpuProfile, peak: str) -> Any:
    match op:
        case "gemm":
            return GemmFit.from_gpu(gpu, peak)
        case "moe":
            return MoeFit.from_gpu(gpu, peak)
        case "state":
            return StateFit.from_gpu(gpu, peak)
        case "attention" | "mla":
            return AttentionFit.from_gpu(gpu, peak)
        case _:
            return CommFit.from_gpu(gpu, op)


def _provenance(stack: _Stack, gpu: GpuProfile) -> str:
    if stack.distance == "own":
        return f"measured: calibration of the profile {gpu.id} ({stack.engine}/{stack.dtype})"
    text = f"fitted from public tables {_file()['source']} {stack.gpu}/{stack.engine}/{stack.dtype}, not measured by Draftline"
    return text if stack.distance == "exact" else f"{text}; nearest to {gpu.id}"


def _band(stack: _Stack, op: str) -> tuple[float, float]:
    from math import exp, log

    factor, least = WIDEN[stack.distance]
    low, high = stack.data.get("band", PRIOR_BAND[op])
    return exp(min(factor * log(low), -least)), exp(max(factor * log(high), least))
