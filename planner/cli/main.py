"""The command line. Commands parse, call, format and print; nothing else prints. Exit codes: 0 fine, 2 bad input, 3 nothing feasible."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli.acceptance import acceptance_app
from planner.cli.calibrate import calibrate
from planner.cli.verify import verify
from planner.errors import DraftlineError, InfeasibleError

app = typer.Typer(
    name="draftline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Which drafter and how many draft tokens, on this model, these GPUs, this traffic - or is speculation a loss here?",
)

app.add_typer(acceptance_app, name="acceptance")
app.command()(calibrate)
app.command()(verify)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the terminal.")]


def emit(text: str, out: Path | None = None) -> None:
    """To the terminal, or to a file."""
    if out is None:
        typer.echo(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def emit_json(value: object, out: Path | None = None) -> None:
    emit(json.dumps(value, indent=2, allow_nan=False, default=str), out)


PlanModel = Annotated[str, typer.Argument(help="Catalogue id, or a path to a config.json or its folder.")]
Gpu = Annotated[str, typer.Option("--gpu", help="GPU profile id or alias (draftline gpus), or a profile file.")]


def plan_options(  # noqa: PLR0913
    model: str,
    gpu: str,
    n_gpus: int | None,
    tp: int | None,
    dp: int | None,
    ep: int,
    engine: str,
    weights_dtype: str | None,
    kv_dtype: str | None,
    drafter: list[str],
    workload: str,
    acceptance: Path | None,
    concurrency: str,
    input_len: int,
    output_len: int,
    context_len: str | None,
    slo_tpot_ms: float | None,
    slo_ttft_ms: float | None,
    baseline_tpot_ms: float | None,
    baseline_concurrency: int,
    max_draft_len: int,
    metric: str,
) -> Any:
    """The question behind the options of plan, report and export."""
    from planner.cli import options as o
    from planner.question import Question

    baseline = o.seconds(baseline_tpot_ms, "baseline-tpot-ms")
    return Question(
        model=model,
        gpu=gpu,
        n_gpus=n_gpus,
        tp=tp,
        dp=dp,
        ep=ep,
        engine=engine,
        weights_dtype=weights_dtype,
        kv_dtype=kv_dtype,
        drafters=o.drafters(drafter),
        workload=o.workload(workload),
        acceptance=o.acceptance_file(acceptance),
        concurrency=o.integers(concurrency, "concurrency"),
        input_len=input_len,
        output_len=output_len,
        context_len=o.integers(context_len, "context-len") if context_len else (),
        slo_tpot_s=o.seconds(slo_tpot_ms, "slo-tpot-ms"),
        slo_ttft_s=o.seconds(slo_ttft_ms, "slo-ttft-ms"),
        baseline=() if baseline is None else ({"tpot_s": baseline, "concurrency": baseline_concurrency},),
        max_draft_len=max_draft_len,
        metric=metric,
    )


def _plan_command(finish: Callable[..., None], name: str, text: str) -> None:
    """Register a command that takes plan's options; `finish(plan, json, out)` does the rest. One place for twenty options."""

    def command(  # noqa: PLR0913
        model: PlanModel,
        gpu: Gpu,
        n_gpus: Annotated[int | None, typer.Option(help="GPUs (default: the fewest, a power of two, that fit).")] = None,
        tp: Annotated[int | None, typer.Option(help="Tensor-parallel width.")] = None,
        dp: Annotated[int | None, typer.Option(help="Attention data-parallel groups.")] = None,
        ep: Annotated[int, typer.Option(help="Expert-parallel width.")] = 1,
        engine: Annotated[str, typer.Option(help="vllm, sglang, trtllm, llamacpp, transformers, builtin, ideal.")] = "vllm",
        weights_dtype: Annotated[str | None, typer.Option(help="Storage dtype of the weights (default: the checkpoint's).")] = None,
        kv_dtype: Annotated[str | None, typer.Option(help="KV-cache dtype (default: the checkpoint's, else 16-bit).")] = None,
        drafter: Annotated[list[str], typer.Option(help="KIND[:MODEL][@GPUxN], repeatable; or all.")] = ["all"],  # noqa: B006
        workload: Annotated[str, typer.Option(help="Prior for acceptance: coding, math, chat, ...")] = "chat",
        acceptance: Annotated[Path | None, typer.Option(help="JSON with measured acceptance, for all kinds or per kind.")] = None,
        concurrency: Annotated[str, typer.Option(help="Requests in flight, comma separated.")] = "1,2,4,8,16,32,64,128,256",
        input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 1024,
        output_len: Annotated[int, typer.Option(help="Generated tokens.")] = 1024,
        context_len: Annotated[str | None, typer.Option(help="Pure decode at these contexts instead of input/output lengths.")] = None,
        slo_tpot_ms: Annotated[float | None, typer.Option(help="Only points with at most this TPOT.")] = None,
        slo_ttft_ms: Annotated[float | None, typer.Option(help="Only points with at most this TTFT.")] = None,
        baseline_tpot_ms: Annotated[float | None, typer.Option(help="A measured TPOT without speculation, to anchor on.")] = None,
        baseline_concurrency: Annotated[int, typer.Option(help="Concurrency of that measurement.")] = 1,
        max_draft_len: Annotated[int, typer.Option(help="Largest D considered.")] = 16,
        metric: Annotated[str, typer.Option(help="throughput or tpot.")] = "throughput",
        as_json: Json = False,
        out: Out = None,
    ) -> None:
        from planner.planning import answer

        question = plan_options(
            model,
            gpu,
            n_gpus,
            tp,
            dp,
            ep,
            engine,
            weights_dtype,
            kv_dtype,
            drafter,
            workload,
            acceptance,
            concurrency,
            input_len,
            output_len,
            context_len,
            slo_tpot_ms,
            slo_ttft_ms,
            baseline_tpot_ms,
            baseline_concurrency,
            max_draft_len,
            metric,
        )
        result = answer(question)
        finish(result, as_json, out)
        if all(r["draft_len"] is None for r in result.recommendations):
            raise InfeasibleError(f"nothing asked for is feasible: {result.recommendations[0]['reasons'][0]}")

    command.__doc__ = text
    app.command(name)(command)


def _finish_plan(result: Any, as_json: bool, out: Path | None) -> None:
    if as_json:
        emit_json(result.to_dict(), out)
    else:
        from planner.report.terminal import plan_text

        emit(plan_text(result), out)


def _finish_report(result: Any, as_json: bool, out: Path | None) -> None:
    from planner.report.html import plan_html

    if as_json:
        emit_json(result.to_dict(), out)
        return
    target = out or Path("draftline-report.html")
    emit(plan_html(result), target)
    typer.echo(f"wrote {target}")


def _finish_export(result: Any, as_json: bool, out: Path | None) -> None:
    from planner.report.terminal import exports_text

    if as_json:
        emit_json(result.exports, out)
    else:
        emit(exports_text(result), out)


_plan_command(
    _finish_plan,
    "plan",
    """Recommend a drafter and a draft length, with reasons and doubt.

Example: draftline plan Qwen/Qwen3-32B --gpu h100 --workload coding""",
)
_plan_command(
    _finish_report,
    "report",
    """Write one self-contained HTML page: verdict, table, interactive Pareto front, assumptions.

Example: draftline report Qwen/Qwen3-32B --gpu h100 --out report.html""",
)
_plan_command(
    _finish_export,
    "export",
    """Print engine settings for the recommendation: vLLM, SGLang, TensorRT-LLM, llama.cpp.

Example: draftline export Qwen/Qwen3-32B --gpu h100 --drafter eagle3""",
)


@app.command()
def predict(cases: Annotated[Path, typer.Argument(help="JSON lines, one case each.")], out: Out = None) -> None:
    """Predict each case of a JSON-lines file: one object in, one out, same order; bad lines become error objects.

    Example: draftline predict cases.jsonl --out answers.jsonl
    """
    from planner.cli.options import read_text
    from planner.prediction import predict_lines

    _emit_lines(predict_lines(read_text(cases, "cases").splitlines()), out)


@app.command()
def kernels(cases: Annotated[Path, typer.Argument(help="JSON lines, one kernel each.")], out: Out = None) -> None:
    """Predict single kernels: gemm, attention, mla, moe, linear_attention, allreduce, alltoall.

    Example: draftline kernels kernels.jsonl --out times.jsonl
    """
    from planner.cli.options import read_text
    from planner.kernel_cases import kernel_lines

    _emit_lines(kernel_lines(read_text(cases, "cases").splitlines()), out)


def _emit_lines(rows: Iterable[dict[str, Any]], out: Path | None) -> None:
    rows = list(rows)
    emit("\n".join(json.dumps(r, allow_nan=False) for r in rows), out)
    if failed := sum("error" in r for r in rows):
        typer.echo(f"{failed} of {len(rows)} lines could not be answered; see their error objects", err=True)


@app.command()
def explain(
    case: Annotated[Path | None, typer.Argument(help="A JSON file with one case (default: read standard input).")] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Show one point op by op: FLOP, bytes, time, share, percent of speed of light, bound, rows and padding.

    Example: echo '{"model":"Qwen/Qwen3-32B","gpu":"h100","concurrency":8,"context_len":4096}' | draftline explain
    """
    from planner.cli.options import read_text
    from planner.errors import InputError
    from planner.explain import explain_case
    from planner.report.terminal import explain_text

    text = sys.stdin.read() if case is None else read_text(case, "case")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("the case is not valid JSON", where=str(case or "standard input"), hint=str(error)) from None
    result = explain_case(raw)
    emit_json(result, out) if as_json else emit(explain_text(result), out)


@app.command()
def gpus(name: Annotated[str | None, typer.Argument(help="One GPU, with the source of each number.")] = None, as_json: Json = False) -> None:
    """List GPU profiles, or show one with its sources.

    Example: draftline gpus h200
    """
    from gpu_profiles.load import gpu_ids, load_gpu
    from planner.report.terminal import gpu_text, gpus_text

    if name is None:
        profiles = [load_gpu(i) for i in gpu_ids()]
        emit_json([p.summary() for p in profiles]) if as_json else emit(gpus_text(profiles))
    else:
        profile = load_gpu(name)
        emit_json(profile.detail()) if as_json else emit(gpu_text(profile))


@app.command()
def models(name: Annotated[str | None, typer.Argument(help="One model: catalogue id or config path.")] = None, as_json: Json = False) -> None:
    """List the model catalogue, or describe one model.

    Example: draftline models Qwen/Qwen3-32B
    """
    from planner.models import catalogue_ids, describe_model, read_model
    from planner.report.terminal import mapping_text

    if name is None:
        ids = list(catalogue_ids())
        emit_json(ids) if as_json else emit("\n".join(ids))
    else:
        facts = describe_model(read_model(name))
        emit_json(facts) if as_json else emit(mapping_text(facts))


@app.command()
def drafters(model: Annotated[str | None, typer.Argument(help="Only drafters made for this model.")] = None, as_json: Json = False) -> None:
    """List ready-made drafters, all or for one model.

    Example: draftline drafters Qwen/Qwen3-8B
    """
    from planner.drafters import drafters_for, list_drafters
    from planner.models.read import read_model
    from planner.report.terminal import drafters_text

    rows = list_drafters() if model is None else drafters_for(model, _model_or_none(model, read_model))
    emit_json(rows) if as_json else emit(drafters_text(rows))


def _model_or_none(name: str, read: Callable[[str], Any]) -> Any:
    """Drafters exist for models that the model catalogue does not hold."""
    try:
        return read(name)
    except DraftlineError:
        return None


@app.command()
def validate(
    data: Annotated[Path | None, typer.Option(help="Folder with measured rows (default: tests/data/truth of a checkout).")] = None,
    refit: Annotated[bool, typer.Option(help="Re-fit from defaults with groups left out.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Score predictions against other people's measurements and write docs/accuracy.md.

    Example: draftline validate --out docs/accuracy.md
    """
    from planner.validate import accuracy_markdown, validate_all

    result = validate_all(data, refit=refit)
    emit_json(result, out) if as_json else emit(accuracy_markdown(result), out)


def main() -> None:
    """Entry point: user errors become one line on stderr and their exit code."""
    try:
        code = app(standalone_mode=False)  # what a command asked for by typer.Exit
        sys.exit(code if isinstance(code, int) else 0)
    except DraftlineError as error:
        typer.echo(f"draftline: {error}", err=True)
        sys.exit(error.exit_code)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:  # click's usage errors know how to show themselves
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            sys.exit(2)
        raise


if __name__ == "__main__":
    main()
