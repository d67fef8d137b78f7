"""Collectives of the public tables as time by message bytes on one grid (see tables.py for the source and its traps)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from planner.calibrate.tables import ENGINES, GPUS, Array, Rows, Skip, Stack, num, read_parquet, refuse, seconds, select, text, version_key
from planner.errors import InputError

#: 1 KiB to 1 GiB; a table ends at its last measured size.
GRID = 2.0 ** np.arange(10, 31)


def _on_grid(size: Array, time: Array) -> list[float]:
    """Microseconds on GRID by log-log interpolation of the median per size, up to the last measured size."""
    sizes = np.unique(size)
    times = np.asarray([np.median(time[size == s]) for s in sizes])
    times = np.minimum.accumulate(times[::-1])[::-1]  # fewer bytes never take longer: first rows carry warm-up
    grid = GRID[sizes[-1] * 1.01 >= GRID]
    return [float(f"{v:.4g}") for v in np.exp(np.interp(np.log(grid), np.log(sizes), np.log(times))) * 1e6]


def _stack(gpu: str, engine: str, version: str, ranks: Array, *, size: Array, time: Array) -> Stack | None:
    if not len(time):
        return None
    which = sorted({int(n) for n in ranks})
    rows = [_on_grid(size[ranks == n], time[ranks == n]) for n in which]
    shortest = min(len(r) for r in rows)
    data: Rows = {"ranks": np.asarray(which), "us": np.asarray([r[:shortest] for r in rows])}
    return Stack(gpu, engine, "bf16", version, data)


def _newest_file(folder: Path, name: str) -> Path | None:
    found = sorted(folder.glob(f"*/{name}_perf.parquet"), key=lambda p: version_key(p.parent.name), reverse=True)
    return found[0] if found else None


def _made(path: Path | None, make: Callable[[str, Rows], Stack | None], skip: Skip) -> Iterator[Stack]:
    """What `make` gets out of the version and the rows of a table, if there is one and it can be read."""
    if path is None:
        return
    try:
        stack = make(path.parent.name, read_parquet(path))
    except InputError as error:
        skip(str(error) if error.where == str(path) else f"{path}: {error}")
        return
    if stack is not None:
        yield stack


def allreduce_stacks(root: Path, skip: Skip = refuse) -> Iterator[Stack]:
    """All-reduce inside a CUDA graph; eager rows are 4-6 times slower at small sizes and are left out."""
    for folder, gpu in GPUS.items():
        for engine in ENGINES:

            def make(version: str, r: Rows, gpu: str = gpu, engine: str = engine) -> Stack | None:
                own = np.char.lower(text(r, "framework")) == engine  # two SGLang files hold TensorRT-LLM's rows
                r = select(r, own & ~np.char.endswith(text(r, "kernel_source"), "eager"))
                return _stack(gpu, engine, version, num(r, "num_gpus"), size=2.0 * num(r, "message_size"), time=seconds(r))

            yield from _made(_newest_file(root / folder / "comm" / engine, "custom_allreduce"), make, skip)


def nccl_stacks(root: Path, op_name: str, skip: Skip = refuse) -> Iterator[Stack]:
    """NCCL's all_gather, alltoall or all_reduce (message = result of a gather, what a rank sends of an all-to-all)."""
    for folder, gpu in GPUS.items():

        def make(version: str, r: Rows, gpu: str = gpu) -> Stack | None:
            r = select(r, (text(r, "op_name") == op_name) & (text(r, "nccl_dtype") == "half"))
            return _stack(gpu, "nccl", version, num(r, "num_gpus"), size=2.0 * num(r, "message_size"), time=seconds(r))

        yield from _made(_newest_file(root / folder / "comm" / "nccl", "nccl"), make, skip)


def alltoall_stacks(root: Path, skip: Skip = refuse) -> Iterator[Stack]:
    """Dispatch or combine of experts; bytes a rank sends = tokens x min(top_k, ranks) x hidden x element.

    DeepEP's low-latency kernels (SGLang's table) and TensorRT-LLM's NVLink ones. The moe_a2a tables of vLLM and TensorRT-LLM show 50-80 us
    for one token with the same kernels, so the host was timed with them: left out.
    """
    for folder, gpu in GPUS.items():

        def deepep(version: str, r: Rows, gpu: str = gpu) -> Stack | None:
            ranks = np.full(len(num(r, "num_token")), 4.0 if gpu in ("gb200", "gb300") else 8.0)
            sent = num(r, "num_token") * np.minimum(num(r, "num_topk"), ranks) * num(r, "hidden_size")
            size = np.concatenate([sent, 2.0 * sent])
            time = np.concatenate([num(r, "dispatch_avg_t_us"), num(r, "combine_avg_t_us")]) * 1e-6
            return _binned(gpu, "sglang", version, np.concatenate([ranks, ranks]), size=size, time=time)

        def nvlink(version: str, r: Rows, gpu: str = gpu) -> Stack | None:
            one_sided = (text(r, "kernel_source") == "NVLinkOneSided") & (text(r, "moe_dtype") == "nvfp4")
            r = select(r, one_sided & np.isin(text(r, "op_name"), ("alltoall_dispatch", "alltoall_combine")))
            element = np.where(text(r, "op_name") == "alltoall_dispatch", 0.5625, 2.0)
            ranks = num(r, "moe_ep_size")
            size = num(r, "num_tokens") * np.minimum(num(r, "topk"), ranks) * num(r, "hidden_size") * element
            return _binned(gpu, "trtllm", version, ranks, size=size, time=seconds(r))

        yield from _made(_newest_file(root / folder / "comm" / "sglang", "wideep_deepep_ll"), deepep, skip)
        yield from _made(_newest_file(root / folder / "comm" / "trtllm", "trtllm_alltoall"), nvlink, skip)


def _binned(gpu: str, engine: str, version: str, ranks: Array, *, size: Array, time: Array) -> Stack | None:
    """Sizes that are not on a common grid: median of the times within each factor of two."""
    bins = 2.0 ** np.round(np.log2(size))
    keys = sorted({(n, b) for n, b in zip(ranks, bins, strict=True)})
    low = np.asarray([np.median(time[(ranks == n) & (bins == b)]) for n, b in keys])
    return _stack(gpu, engine, version, np.asarray([k[0] for k in keys]), size=np.asarray([k[1] for k in keys]), time=low)
