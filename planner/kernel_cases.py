"""`kernels`: single-kernel questions in, times out. One JSON object a line, in the style of `predict` (DESIGN section 5)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from planner.errors import DraftlineError, InputError, suggest
from planner.models.spec import Experts, KvAttention, LatentAttention, StateAttention
from planner.ops import AllReduce, AllToAll, ExpertsOp, Gemm, KvOp, LatentOp, Op, StateOp
from planner.roofline import Machine, gemm_key, machine

COMMON = {"id": None, "gpu": str, "engine": str, "op": str, "backend": str}
#: op -> {key: default}; a default of ... means required.
FIELDS: dict[str, dict[str, Any]] = {
    "gemm": {"m": ..., "n": ..., "k": ..., "weights_dtype": "bf16", "act_dtype": None},
    "attention": {
        "num_seqs": ...,
        "query_len": 1,
        "context_len": ...,
        "num_heads": ...,
        "num_kv_heads": ...,
        "head_dim": 128,
        "kv_dtype": "bf16",
        "window": None,
    },
    "mla": {"num_seqs": ..., "query_len": 1, "context_len": ..., "num_heads": ..., "kv_rank": 512, "rope_dim": 64, "kv_dtype": "bf16"},
    "moe": {
        "num_tokens": ...,
        "num_experts": ...,
        "top_k": ...,
        "width": ...,
        "ffn": ...,
        "matrices": 3,
        "ep": 1,
        "weights_dtype": "bf16",
        "act_dtype": None,
    },
    "linear_attention": {"num_seqs": ..., "query_len": 1, "num_heads": ..., "head_dim": 128, "v_head_dim": 128, "state_dtype": "fp32"},
    "allreduce": {"bytes": ..., "num_ranks": ...},
    "alltoall": {"bytes": ..., "num_ranks": ...},
}
DTYPE_KEYS = ("weights_dtype", "act_dtype", "kv_dtype", "state_dtype")
DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4")


def kernel_time(case: Mapping[str, Any]) -> dict[str, Any]:
    """{"id", "time_s", "low_s", "high_s", "bound"} of one kernel case. Raises InputError."""
    where = f"kernel case {case.get('id')}"
    op_name = case.get("op")
    if op_name not in FIELDS:
        hint = suggest(str(op_name), FIELDS) or f"Known ops: {', '.join(FIELDS)}."
        raise InputError("unknown op", where=where, got=op_name, hint=hint)
    values = _values(case, FIELDS[op_name], where)
    for key in ("gpu", "engine"):
        if not isinstance(case.get(key, "vllm" if key == "engine" else None), str):
            raise InputError(f"{key!r} is missing or not a name", where=where, got=case.get(key))
    m = machine(str(case["gpu"]), str(case.get("engine", "vllm")), case.get("backend"), isolated=True)
    op, fit_op, fit_dtype = BUILD[op_name](values, m)
    t = m.op_time(op)
    fitted = m.fit(fit_op, fit_dtype)
    time = float(np.asarray(t.time_s))
    parts = {"memory": float(t.memory_s), "compute": float(t.compute_s), "launch": float(t.fixed_s)}
    if fit_op in ("allreduce", "alltoall"):
        parts = {"network": time}
    low, high = fitted.band
    return {
        "id": case.get("id"),
        "time_s": time,
        "low_s": time * low,
        "high_s": time * high,
        "bound": max(parts, key=lambda k: parts[k]),
        "basis": fitted.provenance,
    }


def _values(case: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    unknown = set(case) - set(fields) - set(COMMON)
    if unknown:
        name = sorted(unknown)[0]
        raise InputError(f"unknown key {name!r}", where=where, hint=suggest(name, fields) or f"Known keys: {', '.join(fields)}.")
    out: dict[str, Any] = {}
    for key, default in fields.items():
        value = case.get(key, default)
        if value is ...:
            raise InputError(f"required key {key!r} is missing", where=where, hint=f"Add {key!r}.")
        if key in DTYPE_KEYS:
            known = (*DTYPES, "fp8_block") if key == "weights_dtype" else DTYPES
            if value is not None and value not in known:
                raise InputError(f"unknown {key}", where=where, got=value, expected=f"one of {', '.join(known)}")
        elif value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0):
            raise InputError(f"{key} must be a positive number", where=where, got=value)
        out[key] = value
    return out


def _dtype(v: Mapping[str, Any], m: Machine) -> tuple[str, str, bool]:
    """(storage, arithmetic, block scaled)."""
    block = v["weights_dtype"] == "fp8_block"
    storage = "fp8" if block else str(v["weights_dtype"])
    return storage, v["act_dtype"] or m.engine.act_dtype(storage, m.gpu)[0], block


def _gemm(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    storage, act, block = _dtype(v, m)
    return Gemm("gemm", float(v["m"]), int(v["n"]), int(v["k"]), 1, storage, act, block), "gemm", gemm_key(storage, act, block)


def _attention(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    if v["num_heads"] % v["num_kv_heads"]:
        raise InputError("num_kv_heads must divide num_heads", got=f"{v['num_heads']} / {v['num_kv_heads']}")
    d = int(v["head_dim"])
    core = KvAttention(int(v["num_heads"]), int(v["num_kv_heads"]), d, d, window=None if v["window"] is None else int(v["window"]))
    op = KvOp(
        "attention",
        core,
        float(v["num_seqs"]),
        float(v["query_len"]),
        float(v["context_len"]),
        core.num_heads,
        core.num_kv_heads,
        v["kv_dtype"],
        "bf16",
        1,
    )
    return op, "attention", v["kv_dtype"]


def _mla(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    core = LatentAttention(int(v["num_heads"]), int(v["kv_rank"]), int(v["rope_dim"]), 128, 128)
    op = LatentOp("mla", core, float(v["num_seqs"]), float(v["query_len"]), float(v["context_len"]), core.num_heads, v["kv_dtype"], "bf16", 1)
    return op, "mla", v["kv_dtype"]


def _moe(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    if v["top_k"] > v["num_experts"] or v["num_experts"] % v["ep"]:
        raise InputError("top_k must not exceed num_experts, and ep must divide it", got=f"{v['top_k']} of {v['num_experts']}, ep {v['ep']}")
    storage, act, block = _dtype(v, m)
    core = Experts(int(v["num_experts"]), int(v["top_k"]), int(v["width"]), int(v["ffn"]), int(v["matrices"]))
    op = ExpertsOp("experts", core, float(v["num_tokens"]), 1.0, int(v["ep"]), 1, storage, act, 1, block)
    return op, "moe", gemm_key(storage, act, block)


def _state(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    heads, k, w = int(v["num_heads"]), int(v["head_dim"]), int(v["v_head_dim"])
    core = StateAttention(heads, heads * k * w, 0, 8 * heads * k * w, v["state_dtype"])
    from planner.ops import state_bytes_per_layer

    op = StateOp("state", core, float(v["num_seqs"]), float(v["query_len"]), state_bytes_per_layer(core, 1, None), float(core.flop_per_token), 1)
    return op, "state", "bf16"


def _allreduce(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    return AllReduce("all-reduce", float(v["bytes"]), int(v["num_ranks"]), 1), "allreduce", "bf16"


def _alltoall(v: Mapping[str, Any], m: Machine) -> tuple[Op, str, str]:
    return AllToAll("all-to-all", float(v["bytes"]), int(v["num_ranks"]), 1), "alltoall", "bf16"


BUILD: dict[str, Callable[[Mapping[str, Any], Machine], tuple[Op, str, str]]] = {
    "gemm": _gemm,
    "attention": _attention,
    "mla": _mla,
    "moe": _moe,
    "linear_attention": _state,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
}


def kernel_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """JSON lines -> JSON objects, in order; a bad line becomes an error object."""
    out: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        ident: Any = None
        try:
            try:
                case = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"line {number} is not valid JSON", got=line[:60], hint=str(error)) from None
            if not isinstance(case, dict):
                raise InputError(f"line {number} must be a JSON object", got=type(case).__name__)
            ident = case.get("id")
            out.append(kernel_time(case))
        except DraftlineError as error:
            out.append({"id": ident, "error": {"type": type(error).__name__, "message": str(error)}})
    return out
