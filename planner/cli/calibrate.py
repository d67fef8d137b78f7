"""`draftline calibrate`: measure this device, fit a profile, write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import InputError

if TYPE_CHECKING:
    from gpu_profiles.schema import GpuProfile
    from microbench.session import Settings

#: Points that --check draws.
CHECK_POINTS = 24
#: Elements of the largest matrix that is measured: 1 GB in 32 bit.
MOST_ELEMENTS = 2.5e8
DEFAULT_OUT = Path("profile.json")


def calibrate(  # noqa: PLR0913
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    budget: Annotated[float, typer.Option(help="Seconds to measure.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Profile to write, --gpu takes it (default: profile.json).")] = None,
    raw: Annotated[Path | None, typer.Option(help="Raw samples (default: beside OUT). An unfinished file is gone on with.")] = None,
    from_raw: Annotated[Path | None, typer.Option("--from", help="Fit this raw file and measure nothing.")] = None,
    from_bench: Annotated[list[Path] | None, typer.Option(help="Adapt to these serving runs: vLLM bench or aiperf JSON, CSV.")] = None,
    deployment: Annotated[Path | None, typer.Option(help="JSON case of the deployment behind --from-bench.")] = None,
    from_tables: Annotated[Path | None, typer.Option(help="Re-fit kernels to the public tables in this folder.")] = None,
    model: Annotated[str | None, typer.Option(help="Measure the matrices of this model instead of a standard set.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Packaged profile to take datasheet peaks from (default: by the device's name).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Afterwards measure points that were not fitted and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Measure this GPU or CPU for a budget of seconds and write a profile with its error bands.

    Example: draftline calibrate --device cpu --budget 120 --out cpu.json

    With --from-bench the profile of the deployment's GPU is adapted to served runs instead. With --from-tables the packaged kernel fits are
    made anew from public tables into the folder OUT (default: kernel-fits) in about five minutes; a run that was broken off goes on.
    """
    tables_out, out = out, out or DEFAULT_OUT
    if from_bench:
        adapt_profile(from_bench, deployment, out, as_json)
        return
    if from_tables is not None:
        refit_tables(from_tables, tables_out or Path("kernel-fits"), as_json)
        return
    from gpu_profiles.load import load_gpu
    from microbench.store import read_records, write_atomic
    from planner.calibrate.bench import fit_profile, profile_text

    if device not in ("cpu", "cuda"):
        raise InputError("unknown device", where="--device", got=device, expected="cpu or cuda")
    if budget <= 0:
        raise InputError("--budget must be positive", got=budget, expected="seconds, e.g. 120")
    base = load_gpu(gpu) if gpu else None
    if from_raw is not None:
        if not from_raw.exists():
            raise InputError("no such raw file", where="--from", got=str(from_raw))
        records: Sequence[dict[str, Any]] = read_records(from_raw)
    else:
        records = measure(device, budget, raw or out.with_suffix(".raw.jsonl"), model)
    result = fit_profile(records, base=base)
    write_atomic(out, profile_text(result.profile))
    answer: dict[str, Any] = {"profile": str(out), "id": result.profile.id, "held_out_error": dict(result.errors)}
    if check:
        answer["check"] = fresh_check(device, result.profile)
    show(answer, result.profile, as_json)


def adapt_profile(files: Sequence[Path], deployment: Path | None, out: Path, as_json: bool) -> None:
    """The deployment's GPU profile with the engine numbers that its own served runs ask for."""
    import json
    from dataclasses import asdict

    from gpu_profiles.load import load_gpu
    from microbench.store import write_atomic
    from planner.calibrate.from_bench import adapt_to, profile_with, read_runs
    from planner.cli.options import read_object

    if deployment is None:
        expected = '{"model": ..., "gpu": ..., "engine": ..., "tp": ...}'
        raise InputError("--from-bench needs the deployment that was measured", where="--deployment", expected=f"a JSON file such as {expected}")
    case = read_object(deployment, "deployment")
    made = adapt_to([run for file in files for run in read_runs(file)], case)
    gpu, engine = load_gpu(str(case.get("gpu"))), str(case.get("engine", "vllm"))
    write_atomic(out, json.dumps(profile_with(made, gpu, engine), indent=1, allow_nan=False) + "\n")
    if as_json:
        typer.echo(json.dumps({"profile": str(out), **asdict(made)}, indent=2, allow_nan=False))
        return
    lines = [f"{made.rows} runs: TPOT is {made.error_before:.1%} off before and {made.error_after:.1%} after the adaptation (median)"]
    lines += [f"  {k:14} {made.overheads[k]:.3g} (+-{made.stderr[k]:.0%})" for k in made.stderr]
    lines += [f"  ! {w}" for w in made.warnings]
    lines.append(f"wrote {out}; use it with: draftline plan MODEL --gpu {out}")
    typer.echo("\n".join(lines))


def refit_tables(root: Path, out: Path, as_json: bool) -> None:
    """kernels.json and its report, fitted from the tables of aiconfigurator-core (systems/data)."""
    import json
    import os
    from time import monotonic

    # thousands of small decompositions: threads of the linear algebra wait for each other most of the time (six times slower on two cores).
    # Read when numpy and scipy load, so it comes first; who sets it has the last word
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import pyarrow.parquet  # noqa: F401
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise InputError(f"reading tables needs {error.name}", where="--from-tables", hint="pip install 'draftline[tables]'") from None
    from planner.calibrate.refit import PARTIAL, read_fits, summary, write

    if not root.is_dir():
        raise InputError("no such folder", where="--from-tables", got=str(root), expected="the systems/data folder of aiconfigurator-core 0.12")
    packaged, began = read_fits(), monotonic()
    bar, tell = progress_bar()
    with bar:
        try:
            made = write(root, out, tell)
        except KeyboardInterrupt:
            typer.echo(f"interrupted: the stacks fitted so far are in {out / PARTIAL}; the same command goes on from there", err=True)
            raise typer.Exit(130) from None
    for line in made.skipped:
        typer.echo(f"left out: {line}", err=True)
    ops, took = summary(made, packaged), monotonic() - began
    if as_json:
        answer = {"fits": str(out / "kernels.json"), "wall_s": round(took, 1), "resumed": made.resumed, "left_out": made.skipped, "ops": ops}
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
        return
    typer.echo("\n".join(refit_lines(ops)))
    earlier = f", {made.resumed} of them by an earlier run" if made.resumed else ""
    typer.echo(f"{sum(v['stacks'] for v in ops.values())} stacks fitted in {took:.0f} s{earlier}; {len(made.skipped)} left out")
    typer.echo(f"wrote {out / 'kernels.json'} and {out / 'kernels_report.json'}")


def refit_lines(ops: dict[str, dict[str, Any]]) -> list[str]:
    """A table by kernel class: median over stacks of the error on shapes that were not fitted, made now and packaged."""

    def errors(pair: list[float] | None) -> str:
        return f"{100 * pair[0]:5.2f} / {100 * pair[1]:5.2f} %" if pair else "-"

    lines = [f"{'':10}{'stacks':>7}{'rows':>9}  {'held out: median / p90':24}{'packaged':20}same within 2 standard errors"]
    for op, v in ops.items():
        same = f"{v['within_2_stderr']:.1%} of {v['numbers']} numbers" if v["numbers"] else "-"
        lines.append(f"{op:10}{v['stacks']:7}{v['rows']:9}  {errors(v['held_out']):24}{errors(v['packaged_held_out']):20}{same}")
    return lines


def measure(device: str, budget_s: float, raw: Path, model: str | None) -> Sequence[dict[str, Any]]:
    """Run the microbenchmark into `raw`, with a progress line, and return its records."""
    from microbench.session import SessionError, Settings, run
    from microbench.store import Store

    if raw.exists() and Store(raw).finished:
        raw.replace(raw.with_suffix(".previous.jsonl"))
    shapes, working_set = model_shapes(model) if model else ((), None)
    settings = Settings(device=device, budget_s=budget_s, shapes=shapes, working_set_bytes=working_set)
    with progress(settings):
        try:
            return run(settings, raw).records
        except ModuleNotFoundError as error:
            hint = "Install torch: pip install 'draftline[gpu]', or a CPU build of torch."
            raise InputError(f"measuring needs {error.name}", where="calibrate", hint=hint) from None
        except SessionError as error:
            raise InputError(str(error), where="calibrate", hint="Give another --raw file or --device.") from None
        except KeyboardInterrupt:
            typer.echo(f"interrupted: what was measured is in {raw}; the same command goes on from there", err=True)
            raise typer.Exit(130) from None


def progress(settings: Settings) -> Any:
    """A progress bar of a measurement."""
    bar, settings.progress = progress_bar()
    return bar


def progress_bar() -> tuple[Any, Callable[[str, int, int], None]]:
    """(a bar on stderr while that is a terminal, what moves it: what, done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task("starting", total=None)
    return bar, lambda what, done, total: bar.update(task, description=f"{what:10}", completed=done, total=total)


def model_shapes(model: str) -> tuple[list[tuple[int, int]], float]:
    """(N, K) of a model's matrices on one device, and the bytes that a pass of it touches in 16 bit.

    The middle one comes first, as it is measured at every edge; the smallest comes last, as it is held out to judge the fit. A matrix
    beyond MOST_ELEMENTS (a large vocabulary) is left to the fit.
    """
    from planner.cases import Case
    from planner.deployment import resolve

    case = Case.model_validate({"id": "shapes", "model": model, "gpu": "h100-sxm", "engine": "ideal", "context_len": 1024, "concurrency": 1})
    matrices = [(int(shape.n), int(shape.k), count) for _, shape, count in resolve(case).plan.gemms]
    found = sorted({(n, k) for n, k, _ in matrices if n * k <= MOST_ELEMENTS}, key=lambda s: s[0] * s[1])
    middle = found[len(found) // 2 :] + found[: len(found) // 2][::-1]
    return middle, 2.0 * sum(n * k * count for n, k, count in matrices)


def fresh_check(device: str, profile: GpuProfile) -> dict[str, Any]:
    """Predicted against freshly measured at points that no fit has seen: the median error, in all and by kernel class."""
    import numpy as np

    from microbench.check import fresh_points, measure_points
    from planner.calibrate.bench_report import predict

    rows = measure_points(device, fresh_points(device, CHECK_POINTS))
    answers = [(r, predict(r, profile)) for r in rows]
    errors: dict[str, list[float]] = {}
    for r, p in answers:
        errors.setdefault(f"{r['op']}/{r['args']['dtype']}", []).append(abs(p / r["time_s"] - 1.0))
    return {
        "points": [{"key": r["key"], "measured_s": r["time_s"], "predicted_s": float(f"{p:.4g}")} for r, p in answers],
        "median_error": float(f"{np.median([e for v in errors.values() for e in v]):.3g}"),
        "by_class": {k: float(f"{np.median(v):.3g}") for k, v in sorted(errors.items())},
    }


def show(answer: dict[str, Any], profile: GpuProfile, as_json: bool) -> None:
    """The outcome on the terminal."""
    import json

    from planner.units import si

    if as_json:
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
        return
    peaks = ", ".join(f"{d} {si(v * profile.matmul_eff[d], 'FLOP/s')}" for d, v in profile.peak_flop_per_s.items())
    lines = [f"{profile.name}: memory {si(profile.bytes_per_s, 'B/s')}, matmul {peaks}"]
    lines += [f"  held out  {k:24} median error {100 * v:.1f} %" for k, v in answer["held_out_error"].items()]
    if "check" in answer:
        for p in answer["check"]["points"]:
            ratio = p["predicted_s"] / p["measured_s"] - 1.0
            lines.append(f"  measured {si(p['measured_s'], 's'):>9}  predicted {si(p['predicted_s'], 's'):>9}  {100 * ratio:+6.1f} %  {p['key']}")
        lines += [f"  fresh     {k:24} median error {100 * v:.1f} %" for k, v in answer["check"]["by_class"].items()]
        lines.append(f"  fresh     all                      median error {100 * answer['check']['median_error']:.1f} %")
    lines.append(f"wrote {answer['profile']}; use it with: draftline plan MODEL --gpu {answer['profile']}")
    typer.echo("\n".join(lines))
