"""`draftline calibrate --from-tables`: every stack of the public kernel tables fitted, saved as it ends, and told beside what is packaged.

One stack is one (op, GPU, engine, dtype). A finished one is a line of kernels.partial.jsonl with a checksum of its rows and of the recipe (code
and profiles), so that a run that was broken off goes on, and one with other code or tables does not. kernels.json holds the numbers
that plans use, kernels_report.json their standard errors, what the rows do not identify, and the errors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu_profiles.load import load_gpu
from planner.calibrate import comm_tables, tables
from planner.calibrate.kernel_fit import Job, attention_job, gemm_job, mla_job, moe_job, run_job, state_job, with_prefill
from planner.calibrate.kernel_models import SPECS, STEP_M
from planner.calibrate.tables import Rows, Skip, Stack
from planner.errors import InputError

SOURCE = "aiconfigurator-core 0.12.0"
PACKAGE = Path(__file__).parents[2]
SHIPPED = PACKAGE / "gpu_profiles" / "fitted"
PARTIAL = "kernels.partial.jsonl"
#: What the fitted numbers depend on besides the rows.
RECIPE = (
    "planner/calibrate/tables.py", "planner/calibrate/kernel_*.py", "planner/kernels/*.py", "gpu_profiles/*.py", "gpu_profiles/kernels.json",
    "gpu_profiles/gpus/*.json", "gpu_profiles/engines/*.json",
)  # fmt: skip
OPS: dict[str, tuple[Callable[[Path, Skip], Iterator[Stack]], Callable[[Stack], Job]]] = {
    "gemm": (tables.gemm_stacks, gemm_job), "attention": (tables.attention_stacks, attention_job), "mla": (tables.mla_stacks, mla_job),
    "moe": (tables.moe_stacks, moe_job), "state": (tables.state_stacks, state_job),
}  # fmt: skip
Record = dict[str, Any]
#: Told of (op, stacks done, stacks of this op).
Progress = Callable[[str, int, int], None]


@dataclass
class Refit:
    """The content of the two files, the tables and stacks that were left out (one line each), and how many fits an earlier run had made."""

    fits: Record = field(default_factory=dict)
    report: Record = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    resumed: int = 0


def recipe() -> int:
    """Checksum of the code and the profiles behind a fit."""
    mark = 0
    for path in sorted(p for pattern in RECIPE for p in PACKAGE.glob(pattern)):
        mark = zlib.crc32(path.read_bytes(), mark)
    return mark


def checksum(*parts: Rows) -> int:
    """Checksum of rows, columns in the order of their names."""
    mark = 0
    for rows in parts:
        for name in sorted(rows):
            mark = zlib.crc32(np.ascontiguousarray(rows[name]).tobytes(), zlib.crc32(name.encode(), mark))
    return mark


def fitted(job: Job, prefill: Stack | None) -> tuple[Record, Record]:
    """(entry of kernels.json, entry of the report) of one stack."""
    done = run_job(job)
    if prefill is not None:
        done = with_prefill(done, prefill)
    names, rows = list(SPECS[job.op]), len(job.stack.rows["time_s"])
    entry: Record = {"p": [done.fit.params[n] for n in names if n in done.fit.params], "band": list(done.band)}
    if job.op == "gemm":
        entry["step"] = [round(1000.0 * v) for v in done.steps]
    if done.single is not None:
        entry["single"] = [done.single.params[n] for n in names if n in done.single.params]
    return entry, {
        "version": job.stack.version, "rows": rows, "sample": min(rows, job.most), "fitted": list(done.fitted), "held_out": list(done.held_out),
        "stderr_log": done.fit.stderr, "unidentified": list(done.fit.unidentified),
    }  # fmt: skip


def refit(root: Path, partial: Path, progress: Progress = lambda op, done, total: None) -> Refit:
    """All stacks of the tables under `root`; what `partial` holds of the same recipe and rows is not fitted again."""
    from microbench.store import Store

    out = Refit()
    gpus: Record = {}
    stacks: Record = {}
    mine = recipe()
    store = Store(partial) if _readable(partial) else None
    if store is None:
        raise InputError("not a record of this command", where=str(partial), hint="Delete it to start anew.")
    known = {(r["key"], r["rows"]): r for r in store.of("stack") if r["recipe"] == mine}
    for op, (read, make) in OPS.items():
        prefill = {s[:3]: s for s in tables.attention_stacks(root, out.skipped.append, prefill=True)} if op == "attention" else {}
        found = list(read(root, out.skipped.append))
        for i, s in enumerate(found):
            progress(op, i, len(found))
            more, key = prefill.get(s[:3]), f"{op} {s.gpu} {s.engine} {s.dtype}"
            rows = checksum(s.rows, more.rows if more else {})
            record = known.get((key, rows))
            if record is None:
                try:
                    entry, report = fitted(make(s), more)
                except (ValueError, IndexError, np.linalg.LinAlgError) as error:
                    out.skipped.append(f"{key}: no fit ({error})")
                    continue
                record = store.append("stack", key=key, rows=rows, recipe=mine, entry=entry, report=report)
            else:
                out.resumed += 1
            gpus.setdefault(s.gpu, {}).setdefault(op, {}).setdefault(s.engine, {})[s.dtype] = record["entry"]
            stacks[key] = record["report"]
        progress(op, len(found), len(found))
    collectives(root, gpus, out.skipped.append)
    if not gpus:
        expected = "the systems/data folder of aiconfigurator-core 0.12, with <gpu>/<op>/<engine>/<version>/<op>_perf.parquet"
        raise InputError("; ".join(["no table could be used", *out.skipped[:3]]), where="--from-tables", got=str(root), expected=expected)
    about = {
        "schema_version": 1, "source": SOURCE, "license": "Apache-2.0, NVIDIA CORPORATION & AFFILIATES (measured tables)",
        "params": {op: list(spec) for op, spec in SPECS.items()}, "step_m": list(STEP_M), "comm_bytes": comm_tables.GRID.tolist(),
    }  # fmt: skip
    out.fits, out.report = {**about, "gpus": gpus}, {"source": SOURCE, "stacks": stacks}
    out.skipped = list(dict.fromkeys(out.skipped))  # a collective's file is read once per op
    return out


def _readable(partial: Path) -> bool:
    from microbench.store import read_records

    try:
        return all({"key", "rows", "recipe", "entry", "report"} <= set(r) for r in read_records(partial))
    except (ValueError, TypeError):
        return False


def collectives(root: Path, gpus: Record, skip: Skip) -> None:
    """Adds times of collectives by message bytes; later sources of an engine replace earlier ones."""
    sources = (
        ("allreduce", comm_tables.nccl_stacks(root, "all_reduce", skip)), ("allreduce", comm_tables.allreduce_stacks(root, skip)),
        ("allgather", comm_tables.nccl_stacks(root, "all_gather", skip)), ("alltoall", comm_tables.nccl_stacks(root, "alltoall", skip)),
        ("alltoall", comm_tables.alltoall_stacks(root, skip)),
    )  # fmt: skip
    for op, stacks in sources:
        for s in stacks:
            gpus.setdefault(s.gpu, {}).setdefault(op, {}).setdefault(s.engine, {})["bf16"] = {
                "ranks": [int(n) for n in s.rows["ranks"]], "us": s.rows["us"].tolist(), "band": [0.75, 1.35],
                "link": load_gpu(s.gpu).link_bytes_per_s,
            }  # fmt: skip


def write(root: Path, folder: Path = SHIPPED, progress: Progress = lambda op, done, total: None) -> Refit:
    """Makes kernels.json and kernels_report.json in `folder`."""
    from microbench.store import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    made = refit(root, folder / PARTIAL, progress)
    write_atomic(folder / "kernels.json", json.dumps(made.fits, separators=(",", ":")) + "\n")
    write_atomic(folder / "kernels_report.json", json.dumps(made.report, indent=1) + "\n")
    (folder / PARTIAL).unlink(missing_ok=True)
    return made


def read_fits(folder: Path = SHIPPED) -> tuple[Record, Record]:
    """(kernels.json, kernels_report.json) of a folder."""
    fits, report = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("kernels.json", "kernels_report.json"))
    return fits, report


def summary(made: Refit, packaged: tuple[Record, Record]) -> dict[str, Record]:
    """By op: stacks, rows, median over stacks of the held-out errors, the same of the packaged fits, and how far the numbers lie apart."""
    fits, report = packaged
    out: dict[str, Record] = {}
    for op in OPS:
        mine = {k: v for k, v in made.report["stacks"].items() if k.split()[0] == op}
        theirs = {k: report["stacks"][k] for k in mine if k in report["stacks"]}
        if not mine:
            continue
        apart = np.asarray([z for k in theirs for z in distances(k, (made.fits, made.report), (fits, report))])
        out[op] = {
            "stacks": len(mine), "rows": sum(v["rows"] for v in mine.values()), "held_out": _middle(mine), "packaged_held_out": _middle(theirs),
            "within_2_stderr": float(f"{np.mean(apart <= 2.0):.3g}") if len(apart) else None, "numbers": len(apart),
        }  # fmt: skip
    return out


def _middle(stacks: dict[str, Record]) -> list[float] | None:
    """[median error, 90th percentile], each the median over stacks."""
    return [float(f"{v:.3g}") for v in np.median([s["held_out"] for s in stacks.values()], axis=0)] if stacks else None


def distances(key: str, one: tuple[Record, Record], two: tuple[Record, Record]) -> list[float]:
    """|log ratio| of each number that both fits of a stack identify, in standard errors of the difference of two independent samples."""
    op, gpu, engine, dtype = key.split()
    (a, b), (c, d) = ((dict(zip(f["params"][op], f["gpus"][gpu][op][engine][dtype]["p"], strict=False)), r["stacks"][key]) for f, r in (one, two))
    names = [n for n in a if n in c and n not in b["unidentified"] and n not in d["unidentified"]]
    # numbers hold four digits, so nothing is known to better than that
    return [abs(float(np.log(a[n] / c[n]))) / max(float(np.hypot(b["stderr_log"][n], d["stderr_log"][n])), 1e-4) for n in names]
