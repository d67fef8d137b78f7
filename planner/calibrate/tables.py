"""Reads the kernel tables of the Apache-2.0 package aiconfigurator-core (0.12.0) into plain arrays, one set of rows per stack.

`root` is the unpacked `aiconfigurator_core/systems/data` folder. Files lie at <gpu>/<op>/<backend>/<version>/<name>_perf.parquet.
pyarrow is needed only here (extra `tables`). Traps of the data that are handled here, so that no fit sees them:

* vLLM fp8_block GEMMs were timed without CUDA graphs (80-150 us of launch): dropped, the other engines stand in.
* TensorRT-LLM decode attention with more than 32 query heads per KV head falls to a slow kernel: dropped.
* L40S decode attention faster than its memory (L2-warm): dropped.
* `message_size` of collectives counts elements, not bytes (int8 takes half of the time of fp16); two SGLang files repeat TensorRT-LLM's.
* Experts: only whole-rank rows (expert parallel 1) say how many experts were touched; DeepSeek's group-limited routing touches half of
  them under the balanced load, and models without a gate run other programs in some engines: both dropped.

A table that cannot be read, or lacks a column, costs only itself: `skip` is told in one line and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.errors import InputError

Array = npt.NDArray[np.float64]
Rows = dict[str, npt.NDArray[np.generic]]

#: Folder name of a GPU in the tables -> our profile.
GPUS = {
    "a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm", "b300_sxm": "b300-sxm",
    "gb200": "gb200", "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
ENGINES = ("vllm", "sglang", "trtllm")
GEMM_DTYPES = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "sq": "int8", "int8_wo": "int8/bf16",
    "int4_wo": "int4/bf16",
}  # fmt: skip
MOE_DTYPES = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4/bf16", "w4a16_mxfp4": "mxfp4/bf16",
    "w4a8_mxfp4_mxfp8": "mxfp4/fp8",
}  # fmt: skip
KV_DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}
#: Models without a gate (two matrices) by (hidden, inter, top_k), in the expert tables.
NO_GATE = {(2688, 1856, 6), (2048, 5120, 22), (8192, 5120, 22), (1024, 2688, 22)}


#: A stack with fewer rows is not fitted.
FEWEST_ROWS = 100

#: No kernel takes longer; also what infinity turns into.
LONGEST_S = 3600.0
#: Told, in one line, of a table that is left out.
Skip = Callable[[str], None]


def refuse(fault: str) -> None:
    """The strict way to be told: a table that cannot be used ends the reading."""
    raise InputError(fault)


class Stack(NamedTuple):
    """Rows of one (GPU, engine, dtype)."""

    gpu: str
    engine: str
    dtype: str
    version: str
    rows: Rows


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Sorts 1.3.0rc9 before 1.3.0rc20."""
    parts: list[tuple[int, str]] = []
    for piece in version.replace("rc", ".").replace("post", ".").split("."):
        parts.append((int(piece), "") if piece.isdigit() else (0, piece))
    return tuple(parts)


def read_parquet(path: Path) -> Rows:
    """All columns of one table: numbers as they are, text as fixed-width strings (missing: empty)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
        rows = {name: _column(table.column(name)) for name in table.column_names}
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"cannot read this table ({reason})", where=str(path)) from None
    return rows


def _column(values: Any) -> npt.NDArray[np.generic]:
    """An Arrow column as numpy. Text goes over its few distinct values, a hundred times faster than over Python strings."""
    import pyarrow as pa

    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        coded = values.fill_null("").combine_chunks().dictionary_encode()
        names = np.asarray(coded.dictionary.to_pylist() or [""], dtype=np.str_)
        return np.asarray(names[coded.indices.to_numpy()])
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _files(root: Path, op: str, name: str, skip: Skip) -> Iterator[tuple[str, str, Path, Rows]]:
    """(gpu, engine, path, rows) of every GPU we have a profile of, newest version first; the version is the folder's name."""
    for folder, gpu in GPUS.items():
        for engine in ENGINES:
            found = list((root / folder / op / engine).glob(f"*/{name}_perf.parquet"))
            for path in sorted(found, key=lambda p: version_key(p.parent.name), reverse=True):
                try:
                    rows = read_parquet(path)
                except InputError as error:
                    skip(str(error))
                    continue
                yield gpu, engine, path, rows


def _newest(  # noqa: PLR0913
    root: Path, table: tuple[str, str], column: str, *, dtypes: dict[str, str], convert: Callable[[str, str, Rows], Rows], skip: Skip
) -> Iterator[Stack]:
    """One stack per dtype: the newest version that leaves enough rows of it after `convert`."""
    seen: set[tuple[str, str, str]] = set()
    for gpu, engine, path, rows in _files(root, *table, skip):
        try:
            kinds = text(rows, column)
            wanted = [raw for raw in np.unique(kinds) if raw in dtypes and (gpu, engine, raw) not in seen]
            ready = {raw: convert(engine, dtypes[raw], select(rows, kinds == raw)) for raw in wanted}
        except InputError as error:
            skip(f"{path}: {error}")
            continue
        for raw, stack in ready.items():
            if len(stack["time_s"]) >= FEWEST_ROWS:
                seen.add((gpu, engine, raw))
                yield Stack(gpu, engine, dtypes[raw], path.parent.name, stack)


def select(rows: Rows, mask: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Rows:
    """The rows where `mask` holds, or at the indices given."""
    return {name: values[mask] for name, values in rows.items()}


def num(rows: Rows, *names: str) -> Array:
    """A numeric column as float64, under the first of `names` that exists; missing values are 0."""
    values = _of(rows, *names)
    if values.dtype.kind in "OU":
        values = np.asarray([float(v) if v not in (None, "") else 0.0 for v in values])
    return np.nan_to_num(values.astype(np.float64))


def text(rows: Rows, name: str) -> npt.NDArray[np.str_]:
    """A text column."""
    return _of(rows, name).astype(np.str_)


def _of(rows: Rows, *names: str) -> npt.NDArray[np.generic]:
    name = next((n for n in names if n in rows), None)
    if name is None:
        raise InputError(f"no column {' or '.join(names)}", expected="a table of aiconfigurator-core 0.12")
    return rows[name]


def seconds(rows: Rows) -> Array:
    """The column `latency`, which is in milliseconds; a time that is none is the fault of the table."""
    time = num(rows, "latency") * 1e-3
    if not ((time > 0) & (time < LONGEST_S)).all():
        raise InputError("times that are missing, not positive or beyond an hour", where="latency")
    return time


def gemm_stacks(root: Path, skip: Skip = refuse) -> Iterator[Stack]:
    """Columns m, n, k, time_s."""

    def convert(engine: str, dtype: str, r: Rows) -> Rows:
        if engine == "vllm" and dtype == "fp8_block":
            return {"time_s": np.empty(0)}
        return {"m": num(r, "m"), "n": num(r, "n"), "k": num(r, "k"), "time_s": seconds(r)}

    yield from _newest(root, ("gemm", "gemm"), "gemm_dtype", dtypes=GEMM_DTYPES, convert=convert, skip=skip)


def attention_stacks(root: Path, skip: Skip = refuse, *, prefill: bool = False) -> Iterator[Stack]:
    """Columns num_seqs, query_len, context_len, num_heads, num_kv_heads, head_dim, kernel, time_s; full attention only."""

    def convert(engine: str, dtype: str, r: Rows) -> Rows:
        heads, kv_heads = num(r, "num_heads"), num(r, "num_key_value_heads")
        new = num(r, "isl") if prefill else np.ones_like(heads)
        rows: Rows = {
            "num_seqs": num(r, "batch_size"), "query_len": new, "context_len": num(r, "step") + new, "num_heads": heads,
            "num_kv_heads": kv_heads, "head_dim": num(r, "head_dim"), "kernel": text(r, "kernel_source"),
            "time_s": seconds(r),
        }  # fmt: skip
        keep = (num(r, "window_size") == 0) if "window_size" in r else np.ones(len(heads), dtype=bool)
        keep &= kv_heads <= heads
        if engine == "trtllm" and not prefill:
            keep &= heads / kv_heads <= 32
        return select(rows, keep)

    name = "context_attention" if prefill else "generation_attention"
    yield from _newest(root, ("attention", name), "kv_cache_dtype", dtypes=KV_DTYPES, convert=convert, skip=skip)


def mla_stacks(root: Path, skip: Skip = refuse) -> Iterator[Stack]:
    """Decode attention over a latent of 512 + 64: columns num_seqs, context_len, num_heads, time_s."""

    def convert(engine: str, dtype: str, r: Rows) -> Rows:
        return {
            "num_seqs": num(r, "batch_size"), "context_len": num(r, "step") + 1.0, "num_heads": num(r, "num_heads"),
            "time_s": seconds(r),
        }  # fmt: skip

    yield from _newest(root, ("mla", "generation_mla"), "kv_cache_dtype", dtypes=KV_DTYPES, convert=convert, skip=skip)


def moe_stacks(root: Path, skip: Skip = refuse, distribution: str = "balanced") -> Iterator[Stack]:
    """Columns num_tokens, width, ffn (of the rank), top_k, num_experts, touched, time_s; evenly spread tokens, gated experts."""

    def convert(engine: str, dtype: str, r: Rows) -> Rows:
        r = select(r, text(r, "distribution") == distribution)
        experts, tokens, top_k = num(r, "num_experts"), num(r, "num_tokens"), num(r, "topk")
        width, whole, tp = num(r, "hidden_size"), num(r, "inter_size"), num(r, "moe_tp_size")
        gated = ~np.any([(width == h) & (whole == i) & (top_k == k) for h, i, k in sorted(NO_GATE)], axis=0)
        grouped = (width == 7168) & (whole == 2048) & (experts == 256)
        rows: Rows = {
            "num_tokens": tokens, "width": width, "ffn": whole / tp, "top_k": top_k, "num_experts": experts,
            "touched": np.minimum(experts, tokens * top_k), "time_s": seconds(r),
        }  # fmt: skip
        return _fastest(select(rows, gated & ~grouped & (num(r, "moe_ep_size") == 1) & (whole / tp >= 64)))

    yield from _newest(root, ("moe", "moe"), "moe_dtype", dtypes=MOE_DTYPES, convert=convert, skip=skip)


def _fastest(rows: Rows) -> Rows:
    """Where a case was timed with several kernels: the one an autotuner would keep."""
    names = [n for n in rows if n != "time_s"]
    order = np.lexsort([num(rows, "time_s"), *(num(rows, n) for n in names)])
    sorted_rows = select(rows, order) if len(order) else rows
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for n in names:
        same &= np.diff(num(sorted_rows, n)) == 0
    return select(sorted_rows, np.concatenate([np.ones(min(len(order), 1), dtype=bool), ~same]))


def state_stacks(root: Path, skip: Skip = refuse) -> Iterator[Stack]:
    """Linear attention by step: columns num_seqs, query_len, heads, time_s (convolution and recurrence added up), prefill.

    KDA has true query widths (verify); the state of a head is 128 x 128 in 32 bit.
    """
    merged: dict[tuple[str, str], list[tuple[Array, Array, Array, Array, Array]]] = {}
    versions: dict[tuple[str, str], str] = {}
    for op, name in (("kda", "kda"), ("linear_attention", "gdn")):
        done: set[tuple[str, str]] = set()
        for gpu, engine, path, r in _files(root, op, name, skip):
            if (gpu, engine) in done:
                continue
            try:
                # KDA prefill rows hold 0.8 ms of host time whatever the size; short chunks are not what engines run as prefill
                keep = (text(r, "phase") != "context") | ((num(r, "seq_len") >= 17) & (op != "kda"))
                part = _sum_state_kernels(select(r, keep))
            except InputError as error:
                skip(f"{path}: {error}")
                continue
            done.add((gpu, engine))
            versions[gpu, engine] = f"{versions.get((gpu, engine), '')} {name} {path.parent.name}".strip()
            merged.setdefault((gpu, engine), []).append(part)
    for (gpu, engine), parts in merged.items():
        cols = [np.concatenate(c) for c in zip(*parts, strict=True)]
        rows: Rows = dict(zip(("num_seqs", "query_len", "heads", "prefill", "time_s"), cols, strict=True))
        if len(rows["time_s"]) >= FEWEST_ROWS:
            yield Stack(gpu, engine, "bf16", versions[gpu, engine], rows)


def _sum_state_kernels(r: Rows) -> tuple[Array, Array, Array, Array, Array]:
    """One row per step: the convolution plus the fastest recurrence measured for it."""
    phase, source = text(r, "phase"), text(r, "kernel_source")
    seqs, length, heads, time = num(r, "batch_size"), num(r, "seq_len"), num(r, "num_v_heads"), seconds(r)
    steps: dict[tuple[str, float, float, float], dict[str, float]] = {}
    for i in range(len(time)):
        query = length[i] if phase[i] != "generation" else 1.0
        slot = steps.setdefault((phase[i], seqs[i], query, heads[i]), {})
        conv = "conv" in source[i]
        fused = "kda_decode" in source[i] or "fused_decode" in source[i]
        name = "conv" if conv else "fused" if fused else "core"
        slot[name] = min(slot.get(name, np.inf), time[i])
    out = []
    for (kind, b, q, h), slot in steps.items():
        apart = slot["conv"] + slot["core"] if "conv" in slot and "core" in slot else np.inf
        best = min(apart, slot.get("fused", np.inf))
        if np.isfinite(best):
            out.append((b, q, h, float(kind == "context"), best))
    a = np.asarray(out, dtype=np.float64).reshape(-1, 5)
    return a[:, 0], a[:, 1], a[:, 2], a[:, 3], a[:, 4]
