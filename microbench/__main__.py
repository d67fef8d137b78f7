"""Measure one device into a folder:

    python -m microbench --device cuda --budget 240 --out DIR          everything; run again to go on after an interruption
    python -m microbench --device cuda --bandwidth-only --out DIR      cupy alone, no torch
    torchrun --nproc-per-node 8 -m microbench --all-reduce --out DIR   collectives between the GPUs of this machine

DIR/raw.jsonl holds the samples, DIR/summary.json what they show. `draftline calibrate --from DIR/raw.jsonl --out gpu.json` fits them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from microbench.plan import Shape, bandwidth_points
from microbench.session import SessionError, Settings, results, run
from microbench.store import Store, read_records, write_atomic
from microbench.summary import attention_error, summary


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m microbench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds to measure")
    parser.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl and summary.json")
    parser.add_argument("--shapes", default="", help="NxK,NxK: a model's own matrices instead of the standard set")
    parser.add_argument("--seed", type=int, default=0, help="order of the points")
    parser.add_argument("--bandwidth-only", action="store_true", help="stream bandwidth through cupy, without torch")
    parser.add_argument("--all-reduce", action="store_true", help="collectives; start it with torchrun")
    return parser.parse_args(argv)


def shapes(text: str) -> list[Shape]:
    """``4096x1024,1024x4096`` -> [(4096, 1024), (1024, 4096)]."""
    return [(int(n), int(k)) for n, _, k in (part.partition("x") for part in text.split(",") if part)]


def show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def progress(what: str, done: int, total: int) -> None:
    show(f"\r{done:4}/{total} {what:10}")


def bandwidth_only(out: Path) -> dict[str, Any]:
    from microbench.bandwidth import cupy_measure, cupy_properties, moved_bytes

    properties = cupy_properties()
    store = Store(out / "bandwidth.jsonl")
    for p in bandwidth_points(int(properties["l2_bytes"])):
        store.append("point", key=p.key, op=p.op, args=dict(p.args), held_out=False, index=0, wall_s=0.0, stopped="cupy", samples_s=cupy_measure(p))
    points = {p.key: p for p in bandwidth_points(int(properties["l2_bytes"]))}
    rates = {r["key"]: moved_bytes(points[r["key"]]) / r["time_s"] for r in results(store.records)}
    return {"properties": properties, "bytes_per_s": rates}


def all_reduce(out: Path) -> dict[str, Any]:
    from microbench.overhead import all_reduce_records

    records = all_reduce_records()
    import os

    if os.environ.get("RANK", "0") == "0":
        store = Store(out / "allreduce.jsonl")
        for r in records:
            store.append("point", **r)
    return {r["key"]: sorted(r["samples_s"])[len(r["samples_s"]) // 2] for r in records}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.bandwidth_only:
            answer = bandwidth_only(args.out)
        elif args.all_reduce:
            answer = all_reduce(args.out)
        else:
            settings = Settings(device=args.device, budget_s=args.budget, shapes=shapes(args.shapes), seed=args.seed, progress=progress)
            error = attention_error(args.device)
            raw = args.out / "raw.jsonl"
            if not Store(raw).finished:
                run(settings, raw)
            show("\n")
            answer = {"triton_attention_max_error": error} | summary(read_records(raw))
    except (SessionError, ModuleNotFoundError) as error:
        show(f"microbench: {error}\n")
        return 2
    except KeyboardInterrupt:
        show("\ninterrupted; the same command goes on from here\n")
        return 130
    text = json.dumps(answer, indent=1) + "\n"
    write_atomic(args.out / ("summary.json" if not (args.bandwidth_only or args.all_reduce) else "extra.json"), text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
