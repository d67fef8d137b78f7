"""`draftline verify`: run real speculative decoding and compare it with what was predicted."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import InputError

if TYPE_CHECKING:
    from planner.verify.harness import Progress, Spec
    from planner.verify.prompts import PromptSet

ENGINES = ("builtin", "vllm", "sglang", "trtllm", "llamacpp", "transformers")


def verify(  # noqa: PLR0913
    subject: Annotated[str | None, typer.Argument(help="A plan's JSON or a model. The built-in engine runs its own family instead.")] = None,
    engine: Annotated[str | None, typer.Option(help=f"One of {', '.join(ENGINES)} (default: the plan's, else builtin).")] = None,
    url: Annotated[str | None, typer.Option(help="Read a live server that speculates already, and say which D it should set.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for raw results and reports; a killed run goes on there.")] = Path("draftline-verify"),
    drafter: Annotated[list[str] | None, typer.Option(help="KIND or KIND:MODEL, may be repeated (default: all, or the plan's).")] = None,
    draft_lens: Annotated[str | None, typer.Option(help="Draft lengths, e.g. 1,2,4,8.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes, e.g. 1,8.")] = None,
    targets: Annotated[str | None, typer.Option(help="Built-in engine: small, inflated, inflated-int8 (default: the first two).")] = None,
    workloads: Annotated[str | None, typer.Option(help="Categories of the prompt set, e.g. code,structured.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file: SPEED-Bench or plain JSON lines, ShareGPT, or text lines.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Tokens decoded for each prompt.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Built-in engine: all drafters, three workloads, all targets; under an hour.")] = False,
    k0_tier: Annotated[
        bool, typer.Option("--k0-tier", help="Also a server whose schedule drafts nothing (a plan with such a tier: always).")
    ] = False,
    recalibrate: Annotated[Path | None, typer.Option(help="Built-in engine: also write a profile with the numbers of this run.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU profile of the server's machine.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallelism of the server.")] = 1,
    server_arg: Annotated[list[str] | None, typer.Option(help="A further argument of the server's command line, may be repeated.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the API key that the server wants.")] = None,
    model_path: Annotated[str | None, typer.Option(help="What the engine loads instead of the model id (llama.cpp: a .gguf file).")] = None,
    window_s: Annotated[float, typer.Option(help="Seconds to watch a live server.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run the draft-length sweep for real, off included, and say how right the prediction was.

    Example: draftline verify --engine builtin --out run1

    Example: draftline verify plan.json --engine vllm --drafter ngram --draft-lens 2,4

    Example: draftline verify Qwen/Qwen3-8B --gpu h100 --url http://localhost:8000
    """
    plan = plan_inputs(subject)
    engine = engine or (plan or {}).get("engine") or "builtin"
    if engine not in ENGINES:
        raise InputError("unknown engine", where="--engine", got=engine, expected=", ".join(ENGINES))
    asked = Asked(drafter or [], draft_lens, batches, workloads, prompts, output_len, targets, k0_tier)
    if recalibrate is not None and (engine != "builtin" or url is not None):
        hint = "Adapt a profile to served runs with draftline calibrate --from-bench."
        raise InputError("only the built-in engine times its rounds", where="--recalibrate", got=url or engine, expected="builtin", hint=hint)
    if url is not None:
        deployment = plan or ({"model": subject, "gpu": gpu, "tp": tp} if subject else None)
        live((url, api_key(api_key_env)), deployment, asked, window_s, as_json)
        return
    with missing_library():
        with progress_bar() as progress:
            if engine == "builtin":
                report = builtin(asked, subject, full, out, progress, recalibrate)
            else:
                case = {"model": subject, "gpu": gpu, "tp": tp, **(plan or {}), "engine": engine}
                report = served(asked, case, out, progress, tuple(server_arg or ()), model_path, api_key(api_key_env))
        finish(report.to_json(), out, as_json)


def api_key(variable: str | None) -> str | None:
    """The key in an environment variable: never on the command line, where others can read it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "with other text" if key else "unset or empty"
        raise InputError("no API key there", where="--api-key-env", got=f"{variable} {state}", expected="an environment variable that holds the key")
    return key


@dataclass(frozen=True)
class Asked:
    """Options that say what to run, as text."""

    drafters: Sequence[str]
    draft_lens: str | None
    batches: str | None
    workloads: str | None
    prompts: Path | None
    output_len: int | None
    targets: str | None = None
    k0_tier: bool = False

    def prompt_set(self) -> PromptSet:
        from planner.verify.prompts import builtin_prompt_set, read_prompts

        return read_prompts(self.prompts) if self.prompts else builtin_prompt_set()

    def lengths(self) -> tuple[int, ...] | None:
        from planner.cli.options import integers

        return None if self.draft_lens is None else integers(self.draft_lens, "draft-lens")

    def sizes(self) -> tuple[int, ...] | None:
        from planner.cli.options import integers

        return None if self.batches is None else integers(self.batches, "batches")

    def kinds(self) -> list[dict[str, Any]]:
        from planner.cli.options import drafter

        return [drafter(text) for text in self.drafters]

    def categories(self, known: Sequence[str]) -> tuple[str, ...] | None:
        return None if self.workloads is None else listed(self.workloads, known, "--workloads", "no prompts of this category")

    def sized_targets(self, known: Sequence[str]) -> tuple[str, ...] | None:
        return None if self.targets is None else listed(self.targets, known, "--targets", "the built-in engine has no such target")

    def tokens(self, usual: int) -> int:
        if self.output_len is not None and not 2 <= self.output_len <= 16384:
            raise InputError("--output-len must be between 2 and 16384", got=self.output_len)
        return self.output_len or usual


def listed(text: str, known: Sequence[str], option: str, fault: str) -> tuple[str, ...]:
    """The names of a comma-separated option, each one of `known`."""
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    wrong = [n for n in names if n not in known]
    if wrong or not names:
        raise InputError(fault, where=option, got=", ".join(wrong) or text, expected=", ".join(known))
    return names


def plan_inputs(subject: str | None) -> dict[str, Any] | None:
    """The deployment of a plan's JSON, and the drafters that it recommends; None where `subject` is not such a file."""
    if subject is None or not subject.endswith(".json"):
        return None
    from planner.cli.options import read_object

    raw = read_object(Path(subject), "plan")
    if "recommendations" not in raw:
        if "model_type" in raw or "architectures" in raw:
            return None  # a model's config.json
        raise InputError("not a plan", where=subject, expected="the output of draftline plan MODEL --gpu GPU --json")
    inputs = raw["inputs"]
    found = [{"kind": r["drafter"], "model": r.get("drafter_model")} for r in raw["recommendations"] if r.get("drafter")]
    out = {k: inputs[k] for k in ("model", "gpu", "n_gpus", "tp", "dp", "ep", "engine", "weights_dtype", "kv_dtype") if inputs.get(k) is not None}
    schedule = raw.get("schedule") or {}
    out["k0_tier"] = any(d == 0 for _, _, d in schedule.get("ranges", ())) and len(schedule["ranges"]) > 1
    return out | {"recommended": [dict(t) for t in {tuple(d.items()): None for d in found}]}


def builtin(  # noqa: PLR0913
    asked: Asked, subject: str | None, full: bool, out: Path, progress: Progress, recalibrate: Path | None
) -> Any:
    """The shipped family on this machine."""
    from planner.verify.harness import verify_builtin

    if subject is not None:
        raise InputError(
            "the built-in engine runs its own family of models", where="verify", got=subject, hint="Leave it out, or name another --engine."
        )
    prompts = asked.prompt_set()
    return verify_builtin(builtin_spec(asked, full, prompts), out, prompts, progress, recalibrate)


def builtin_spec(asked: Asked, full: bool, prompts: PromptSet) -> Spec:
    """The arms that the options ask for."""
    from planner.verify.builtin import CPU_TARGETS
    from planner.verify.family import BLOCK_SIZE, KINDS
    from planner.verify.harness import DEFAULT, FULL

    spec = FULL if full else DEFAULT
    lengths = asked.lengths() or spec.draft_lens
    if max(lengths) >= BLOCK_SIZE:
        raise InputError("the family was trained for blocks of 8 drafts", where="--draft-lens", got=asked.draft_lens, expected="1 to 8")
    kinds = [d["kind"] for d in asked.kinds()]
    wrong = [k for k in kinds if k not in KINDS]
    if wrong:
        raise InputError("the built-in family has no such drafter", where="--drafter", got=", ".join(wrong), expected=", ".join(KINDS))
    known = sorted(prompts.counts())
    texts, sizes = asked.categories(known) or (tuple(known) if asked.prompts else None), asked.sizes()
    usual_blocks = {b[0]: b[1:] for b in spec.blocks}
    names = asked.sized_targets(CPU_TARGETS) or tuple(usual_blocks)
    blocks = [
        (name, texts or usual, sizes or seqs, tuple(k for k in drafters if not kinds or k in kinds))
        for name, (usual, seqs, drafters) in ((n, usual_blocks.get(n, usual_blocks["inflated"])) for n in names)
    ]
    blocks = [b for b in blocks if b[3]]
    if not blocks:
        got = f"{', '.join(kinds)} on {', '.join(names)}"
        raise InputError("these targets have no such drafter", where="--drafter", got=got, expected=", ".join(usual_blocks["inflated"][2]))
    return replace(spec, output_len=asked.tokens(spec.output_len), draft_lens=lengths, blocks=tuple(blocks))


def served(  # noqa: PLR0913
    asked: Asked, case: dict[str, Any], out: Path, progress: Progress, extra: tuple[str, ...], model_path: str | None, secret: str | None = None
) -> Any:
    """A sweep over servers of an engine, each started for its arms, or over transformers in this process."""
    from planner.verify.remote.sweep import Drafter, Sweep, run_sweep

    recommended, k0_tier = case.pop("recommended", []), case.pop("k0_tier", False) or asked.k0_tier
    for key, option in (("model", "MODEL"), ("gpu", "--gpu")):
        if not case.get(key):
            raise InputError(f"{option} is missing", where="verify", expected="a model and a --gpu, or a plan's JSON")
    drafters = tuple(Drafter(d["kind"], d.get("model")) for d in asked.kinds() or recommended)
    if not drafters:
        raise InputError("no drafter to run", where="--drafter", expected="KIND or KIND:MODEL, e.g. ngram or eagle3:ORG/HEAD")
    prompts = asked.prompt_set()
    known = sorted(prompts.counts())
    here = case["engine"] == "transformers"
    sizes = asked.sizes() or ((1,) if here else (1, 8))
    sweep = Sweep(
        case, drafters, asked.lengths() or (1, 2, 4), sizes, asked.categories(known) or tuple(known), asked.tokens(128),
        extra=extra, model_path=model_path, k0_tier=k0_tier,
    )  # fmt: skip
    if here:
        from planner.verify.hf_engine import verify_transformers

        return verify_transformers(sweep, out, prompts, progress)
    return run_sweep(sweep, out, prompts, progress, api_key=secret)


def live(server: tuple[str, str | None], deployment: Mapping[str, Any] | None, asked: Asked, window_s: float, as_json: bool) -> None:
    """What a running server's own counters say, and which D the planner would set there. server: its address, and its key if it wants one."""
    from planner.verify.remote import Endpoint, read_live, recommend_live

    if not 0 < window_s <= 3600:
        raise InputError("--window-s must be between 0 and 3600 seconds", got=window_s)
    kinds = [d["kind"] for d in asked.kinds()]
    reading = read_live(Endpoint(server[0], api_key=server[1]), window_s=window_s, kind=kinds[0] if kinds else None)
    advice = None
    if deployment is not None:
        if not deployment.get("gpu"):
            raise InputError("--gpu is missing", where="verify", expected="the GPU profile of the server's machine")
        options = {k: deployment[k] for k in ("n_gpus", "tp", "dp", "ep", "weights_dtype", "kv_dtype") if deployment.get(k) is not None}
        advice = recommend_live(reading, deployment["model"], str(deployment["gpu"]), kind=kinds[0] if kinds else None, **options)
    if as_json:
        typer.echo(json.dumps({"reading": reading.to_dict(), "advice": None if advice is None else advice.to_dict()}, indent=1, allow_nan=False))
        return
    typer.echo(reading.text)
    if advice is not None:
        typer.echo(f"\n{advice.text[0].upper()}{advice.text[1:]}.")
        typer.echo("\n".join(f"  - {a}" for a in advice.assumptions))
    else:
        typer.echo("\nName the model and --gpu to hear which D the planner would set.")


def finish(result: dict[str, Any], folder: Path, as_json: bool) -> None:
    """The report on disk and on the terminal."""
    from microbench.store import write_atomic
    from planner.report.verification import html, text

    write_atomic(folder / "verify.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_atomic(folder / "verify.html", html(result))
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
        return
    typer.echo(text(result))
    typer.echo(f"\nwrote {folder / 'verify.json'} and {folder / 'verify.html'}")


@contextlib.contextmanager
def missing_library() -> Iterator[None]:
    """A library of an extra that is not there is named with its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("planner", "microbench", "gpu_profiles"):
            raise
        raise InputError(f"running the engine needs {error.name}", where="verify", hint="pip install 'draftline[verify]'") from None


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr while it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=f"{what:12}", completed=done, total=total)
