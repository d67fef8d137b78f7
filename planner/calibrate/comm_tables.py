"""Collectives of the public tables as time by message bytes on one grid (see tables.py for the source and its traps)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from planner.calibrate.tables import ENGINES, GPUS, Array, Rows, Stack, num, read_parquet, select, version_key

#: 1 KiB to 1 GiB; a table ends at its last measured size.
GRID = 2.0 ** np.arange(10, 31)


def _on_grid(size: Array, time: Array) -> list[float]:
    """Microseconds on GRID by log-log interpolation of the median per size, up to the last measured size."""
    sizes = np.unique(size)
    times = np.asarray([np.median(time[size == s]) for s in sizes])
    times = np.minimum.accumulate(times[::-1])[::-1]  # fewer bytes never take longer: first rows carry warm-up
    grid = GRID[sizes[-1] * 1.01 >= GRID]
    return [float(f"{v:.4g}") for v in np.exp(np.interp(np.log(grid), np.log(sizes), np.log(times))) * 1e6]


def _stack(gpu: str, engine: str, version: str, ranks: Array, *, size: Array, time: Array) -> Stack:
    which = sorted({int(n) for n in ranks})
    rows = [_on_grid(size[ranks == n], time[ranks == n]) for n in which]
    shortest = min(len(r) for r in rows)
    data: Rows = {"ranks": np.asarray(which), "us": np.asarray([r[:shortest] for r in rows])}
    return Stack(gpu, engine, "bf16", version, data)


def _newest_file(folder: Path, name: str) -> tuple[str, Rows] | None:
    found = sorted(folder.glob(f"*/{name}_perf.parquet"), key=lambda p: version_key(p.parent.name), reverse=True)
    return (found[0].parent.name, read_parquet(found[0])) if found else None


def allreduce_stacks(root: Path) -> Iterator[Stack]:
    """All-reduce inside a CUDA graph; eager rows are 4-6 times slower at small sizes and are left out."""
    for folder, gpu in GPUS.items():
        for engine in ENGINES:
            found = _newest_file(root / folder / "comm" / engine, "custom_allreduce")
            if found is None:
                continue
            version, r = found
            framework, source = r["framework"].astype(str), r["kernel_source"].astype(str)
            own = np.char.lower(framework) == engine  # two SGLang files hold TensorRT-LLM's rows
            keep = own & ~np.char.endswith(source, "eager")
            r = select(r, keep)
            if len(r["latency"]):
                yield _stack(gpu, engine, version, num(r, "num_gpus"), size=2.0 * num(r, "message_size"), time=num(r, "latency") * 1e-3)


def nccl_stacks(root: Path, op_name: str) -> Iterator[Stack]:
    """NCCL's all_gather, alltoall or all_reduce (message = result of a gather, what a rank sends of an all-to-all)."""
    for folder, gpu in GPUS.items():
        found = _newest_file(root / folder / "comm" / "nccl", "nccl")
        if found is None:
            continue
        version, r = found
        r = select(r, (r["op_name"].astype(str) == op_name) & (r["nccl_dtype"].astype(str) == "half"))
        yield _stack(gpu, "nccl", version, num(r, "num_gpus"), size=2.0 * num(r, "message_size"), time=num(r, "latency") * 1e-3)


def alltoall_stacks(root: Path) -> Iterator[Stack]:
    """Dispatch or combine of experts; bytes a rank sends = tokens x min(top_k, ranks) x hidden x element.

    DeepEP's low-latency kernels (SGLang's table) and TensorRT-LLM's NVLink ones. The moe_a2a tables of vLLM and TensorRT-LLM show 50-80 us
    for one token with the same kernels, so the host was timed with them: left out.
    """
    for folder, gpu in GPUS.items():
        found = _newest_file(root / folder / "comm" / "sglang", "wideep_deepep_ll")
        if found is not None:
            version, r = found
            ranks = np.full(len(r["num_token"]), 4.0 if gpu in ("gb200", "gb300") else 8.0)
            sent = num(r, "num_token") * np.minimum(num(r, "num_topk"), ranks) * num(r, "hidden_size")
            size = np.concatenate([sent, 2.0 * sent])
            time = np.concatenate([num(r, "dispatch_avg_t_us"), num(r, "combine_avg_t_us")]) * 1e-6
            yield _binned(gpu, "sglang", version, np.concatenate([ranks, ranks]), size=size, time=time)
        found = _newest_file(root / folder / "comm" / "trtllm", "trtllm_alltoall")
        if found is not None:
            version, r = found
            phase = r["op_name"].astype(str)
            one_sided = (r["kernel_source"].astype(str) == "NVLinkOneSided") & (r["moe_dtype"].astype(str) == "nvfp4")
            r = select(r, one_sided & np.isin(phase, ("alltoall_dispatch", "alltoall_combine")))
            element = np.where(r["op_name"].astype(str) == "alltoall_dispatch", 0.5625, 2.0)
            ranks = num(r, "moe_ep_size")
            size = num(r, "num_tokens") * np.minimum(num(r, "topk"), ranks) * num(r, "hidden_size") * element
            yield _binned(gpu, "trtllm", version, ranks, size=size, time=num(r, "latency") * 1e-3)


def _binned(gpu: str, engine: str, version: str, ranks: Array, *, size: Array, time: Array) -> Stack:
    """Sizes that are not on a common grid: median of the times within each factor of two."""
    bins = 2.0 ** np.round(np.log2(size))
    keys = sorted({(n, b) for n, b in zip(ranks, bins, strict=True)})
    low = np.asarray([np.median(time[(ranks == n) & (bins == b)]) for n, b in keys])
    return _stack(gpu, engine, version, np.asarray([k[0] for k in keys]), size=np.asarray([k[1] for k in keys]), time=low)
