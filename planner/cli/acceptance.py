"""`draftline acceptance`: import what was measured, look up priors, carry an acceptance length to other draft lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

acceptance_app = typer.Typer(
    name="acceptance",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Acceptance: import measurements, published priors, transfer between draft lengths.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
T = TypeVar("T", int, float, str)
Kind = Annotated[str | None, typer.Option("--kind", help="Drafter kind: external, eagle3, mtp, dflash, dspark, pard, ngram, suffix.")]


def _emit_json(value: object, out: Path | None = None) -> None:
    import json

    _emit(json.dumps(value, indent=2, allow_nan=False), out)


def _emit(text: str, out: Path | None = None) -> None:
    if out is None:
        typer.echo(text)
        return
    from planner.errors import InputError

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError("cannot write the file", where=str(out), hint=str(error)) from None


@acceptance_app.command("import")
def import_(  # noqa: PLR0913
    source: Annotated[str, typer.Argument(metavar="FILE|URL", help="File, run folder or http address; recognised by its content.")],
    after: Annotated[str | None, typer.Option("--after", help="A later scrape of the same /metrics: the window between the two.")] = None,
    draft_len: Annotated[int | None, typer.Option("--draft-len", help="D, where the source does not say it.")] = None,
    kind: Kind = None,
    select: Annotated[str | None, typer.Option("--select", help="Model, mode or category, where the source holds several.")] = None,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the acceptance object for plan --acceptance to this file.")] = None,
) -> None:
    """Acceptance out of what engines and benchmarks write: vLLM, SGLang, TensorRT-LLM, llama.cpp, aiperf, specdec_bench, plain tables.

    With --kind the file of --out holds for that kind of drafter only; without it, for whatever is planned.

    Example: draftline acceptance import http://localhost:8000/metrics --kind eagle3 --out acceptance.json
    """
    from planner.acceptance.importers import import_acceptance
    from planner.errors import InputError

    first, last = (None, source) if after is None else (source, after)
    done = import_acceptance(last, before=first, draft_len=draft_len, kind=kind, select=select)
    _emit_json(done.to_dict()) if as_json else _emit(_imported_text(done))
    if out is not None:
        value = done.for_plan(kind)
        if value is None:
            raise InputError("there is no acceptance to write", where=str(out), hint=" ".join(done.warnings))
        _emit_json(value, out)
        typer.echo(f"wrote {out}", err=True)


def _imported_text(done: Any) -> str:
    lines = [f"source      {done.format}" + (f", engine {done.engine}" if done.engine != "unknown" else "") + (f", {done.kind}" if done.kind else "")]
    lines.append(f"definition  {done.definition}")
    if done.acceptance_len is not None:
        at = "D unknown" if done.draft_len is None else f"D={done.draft_len}"
        over = {"rounds": "mean over rounds", "requests": "mean over requests", "interval": "last interval"}.get(
            done.weighting, "weighting not stated"
        )
        lines.append(f"AL          {done.acceptance_len:.4g} tokens per round (bonus included) at {at}, {over}")
    if done.num_drafts is not None:
        counts = [f"{done.num_drafts:.6g} rounds"]
        counts += [f"{v:.6g} {name}" for v, name in ((done.drafted, "drafted"), (done.accepted, "accepted")) if v is not None]
        lines.append("counted     " + ", ".join(counts))
    if done.survival_prob:
        lines.append("survival    " + "  ".join(f"s{n}={v:.3f}" for n, v in enumerate(done.survival_prob, 1)))
    if done.points:
        lines.append("AL by D     " + "  ".join(f"{d}:{al:.3g}" for d, al in done.points))
    if done.match_prob is not None:
        lines.append(f"match_prob  {done.match_prob:.3f} of the rounds drafted")
    if done.step_ratio:
        lines.append("t(n)/t(1)   " + "  ".join(f"{n}:{v:.3g}" for n, v in enumerate(done.step_ratio, 1)))
    lines += [f"note        {n}" for n in done.notes] + [f"! {w}" for w in done.warnings]
    return "\n".join(lines)


@acceptance_app.command()
def priors(
    workload: Annotated[str | None, typer.Option("--workload", help="Only this workload: coding, math, chat, ...")] = None,
    kind: Kind = None,
    as_json: Json = False,
) -> None:
    """What to expect before measuring: AL by workload and drafter kind, p10, median and p90 over published rows, with their sources.

    Example: draftline acceptance priors --workload coding --kind eagle3
    """
    from planner.acceptance.priors import WORKLOADS, priors_data, workload_prior
    from planner.acceptance.transfer import KINDS, check_kind
    from planner.report.terminal import table

    kinds = KINDS if kind is None else (check_kind(kind, "--kind"),)
    rows = [workload_prior(w, k, where="--workload") for k in kinds for w in (WORKLOADS if workload is None else (workload,))]
    data = priors_data()
    if as_json:
        _emit_json({"what": data["what"], "date": data["date"], "sources": data["sources"], "priors": [_prior(r) for r in rows]})
        return
    body = [
        [r.kind, r.workload, str(r.draft_len), f"{r.p10:.2f}", f"{r.median:.2f}", f"{r.p90:.2f}", str(r.rows), str(r.models), _use(r)] for r in rows
    ]
    head = ["kind", "workload", "D", "p10", "median", "p90", "rows", "models", "basis"]
    notes = dict.fromkeys(f"! {r.kind}: {n}" for r in rows for n in r.notes if not n.startswith("no public " + r.workload))
    _emit("\n".join([data["what"], table(head, body, text=(0, 1, 8)), *notes, *(f"source: {s}" for s in data["sources"])]))


def _prior(row: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(row) | {"notes": list(row.notes)}


def _use(row: Any) -> str:
    if not row.has_data:
        return "bring acceptance"
    return "scaled" if "scaled from" in row.basis else "rows"


@acceptance_app.command()
def transfer(
    acceptance_len: Annotated[float, typer.Option("--acceptance-len", help="Measured AL, bonus token included.")],
    at_draft_len: Annotated[int, typer.Option("--at-draft-len", help="D it was measured at.")],
    kind: Annotated[str, typer.Option("--kind", help="Drafter kind.")],
    to: Annotated[str, typer.Option("--to", help="Draft lengths: 1..16 or 1,3,7.")] = "1..16",
    as_json: Json = False,
) -> None:
    """AL at other draft lengths from one that was measured, with an 80 % band.

    Example: draftline acceptance transfer --acceptance-len 2.4 --at-draft-len 3 --kind eagle3 --to 1..8
    """
    from planner.acceptance.survival import survival_from
    from planner.report.terminal import table

    lengths = _lengths(to)
    given = {"acceptance_len": acceptance_len, "at_draft_len": at_draft_len}
    curve = survival_from(given, kind=kind, max_draft_len=max(lengths), where="--acceptance-len")
    rows = []
    for d in lengths:
        low, high = curve.acceptance_range(d)
        rows.append({"draft_len": d, "acceptance_len": curve.acceptance_len(d), "low_len": low, "high_len": high, "measured": d == at_draft_len})
    if as_json:
        _emit_json({"kind": kind, "given": given, "basis": curve.basis, "notes": list(curve.notes), "rows": rows})
        return
    body = [
        [str(r["draft_len"]), f"{r['acceptance_len']:.3f}", f"{r['low_len']:.3f}", f"{r['high_len']:.3f}", "measured" if r["measured"] else ""]
        for r in rows
    ]
    _emit("\n".join([curve.basis, table(["D", "AL", "low", "high", ""], body, text=(4,)), "80 % band of the transfer alone", *curve.notes]))


def _lengths(text: str) -> list[int]:
    """``1..8`` or ``1,3,7`` -> draft lengths."""
    from planner.cli.options import integers
    from planner.errors import InputError

    first, dots, last = text.partition("..")
    if not dots:
        found = list(integers(text, "to"))
    elif first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and 1 <= int(first[:6]) <= int(last[:6]):
        found = list(range(int(first[:6]), min(int(last[:6]), 2000) + 1))
    else:
        raise InputError("--to is malformed", got=text, expected="1..16 or 1,3,7")
    if max(found) > 1024:
        raise InputError("--to is too long", got=max(found), expected="at most 1024")
    return found


@acceptance_app.command()
def adjust(  # noqa: PLR0913
    file: Annotated[Path, typer.Argument(help="Acceptance object, as import --out or --acceptance has it.")],
    kind: Annotated[str, typer.Option("--kind", help="Drafter kind.")],
    temperature: Annotated[str | None, typer.Option(help="MEASURED:WANTED sampling temperature, 0 to 1.")] = None,
    context: Annotated[str | None, typer.Option(help="MEASURED:WANTED context in tokens.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens the head was trained on, for --context.")] = None,
    workload: Annotated[str | None, typer.Option(help="MEASURED:WANTED workload, e.g. coding:chat.")] = None,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the adjusted object for plan --acceptance to this file.")] = None,
) -> None:
    """Measured acceptance carried to another temperature, context or workload by published ratios, each with its range and source.

    Example: draftline acceptance adjust acceptance.json --kind eagle3 --workload coding:chat --temperature 0:1
    """
    from planner.acceptance.adjust import Adjusted, adjust_context, adjust_temperature, adjust_workload
    from planner.cli.options import acceptance_file
    from planner.errors import InputError

    given = acceptance_file(file) or {}
    now: dict[str, Any] = dict(given.get(kind, given))
    steps: list[Adjusted] = []

    def step(made: Adjusted) -> dict[str, Any]:
        steps.append(made)
        return made.acceptance

    if temperature is not None:
        a, b = _pair(temperature, "--temperature", float)
        now = step(adjust_temperature(now, kind, measured=a, wanted=b))
    if context is not None:
        n, m = _pair(context, "--context", int)
        now = step(adjust_context(now, kind, measured_len=n, wanted_len=m, trained_window_len=window))
    if workload is not None:
        was, wanted = _pair(workload, "--workload", str)
        now = step(adjust_workload(now, kind, measured=was, wanted=wanted))
    if not steps:
        raise InputError("nothing to adjust", expected="--temperature, --context or --workload", hint="Each as MEASURED:WANTED.")
    notes = [{"note": s.note, "source": s.source, "low_len": s.low, "high_len": s.high, "draft_len": s.draft_len} for s in steps]
    if as_json:
        _emit_json({"kind": kind, "acceptance": now, "acceptance_len": steps[-1].acceptance_len, "steps": notes})
    else:
        head = f"AL {steps[-1].acceptance_len:.3g} at D={steps[-1].draft_len} after {len(steps)} adjustment(s)"
        _emit("\n".join([head, *(f"  {n['note']}; AL {n['low_len']:.3g}-{n['high_len']:.3g}\n    source: {n['source']}" for n in notes)]))
    if out is not None:
        _emit_json({kind: now}, out)
        typer.echo(f"wrote {out}; a plan that reads it has this doubt in its band", err=True)


def _pair(text: str, where: str, convert: type[T]) -> tuple[T, T]:
    """``MEASURED:WANTED``"""
    from planner.errors import InputError

    first, colon, second = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return convert(first), convert(second)
    except ValueError:
        raise InputError("not a pair", where=where, got=text, expected="MEASURED:WANTED") from None
