"""The draft-length sweep on a real engine: one server per (drafter, D), off first and again at the end, every batch size and kind of text on each.

An engine takes its method and D at the start only, so arms of one server follow each other; the second "off" server shows what drift is worth.
What an arm measured is on disk before the next begins, and a run that is started again goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cases import parse_case
from planner.deployment import resolve
from planner.errors import DraftlineError, InputError
from planner.prediction import predict
from planner.verify.arms import Arm, Measured
from planner.verify.compare import Predicted, choices
from planner.verify.journal import Journal
from planner.verify.prompts import PromptSet
from planner.verify.remote.arm import measure_arm
from planner.verify.remote.client import Endpoint, KeyRefused, Timeouts
from planner.verify.remote.launch import Serve, free_port, k0_refusal, launched, server_command
from planner.verify.remote.load import LoadSpec, Sent
from planner.verify.remote.parts import Z_90, K0Tax, ServedReport, k0_tax_of, round_lines

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Drafter:
    """A drafter of a sweep; model as the engine loads it."""

    kind: str
    model: str | None = None


@dataclass(frozen=True)
class Sweep:
    """What to run. case: the deployment part of a `predict` case (model, gpu, engine, tp, ...)."""

    case: Mapping[str, Any]
    drafters: tuple[Drafter, ...]
    draft_lens: tuple[int, ...]
    batches: tuple[int, ...]
    workloads: tuple[str, ...]
    output_len: int = 128
    requests_per_seq: int = 4
    """Requests of an arm for each one in flight."""
    limit_s: float = 600.0
    start_limit_s: float = 900.0
    extra: tuple[str, ...] = ()
    """Further arguments of the server's command line."""
    model_path: str | None = None
    k0_tier: bool = False
    """Also a server per drafter that has it loaded and, by its schedule, drafts nothing at any of the batch sizes."""

    @property
    def servers(self) -> list[tuple[Drafter | None, int, int]]:
        """(drafter, D, copy) in the order of the run; a drafter with D = 0 is a K = 0 tier."""
        tiers = [(d, 0, 0) for d in self.drafters if self.k0_tier and self.k0_refusal(d) is None]
        return [(None, 0, 0), *tiers, *((d, n, 0) for d in self.drafters for n in self.draft_lens), (None, 0, 1)]

    def k0_refusal(self, drafter: Drafter) -> str | None:
        """Why the engine has no K = 0 tier for this drafter."""
        return k0_refusal(str(self.case["engine"]), drafter.kind, int(self.case.get("dp") or 1))


def run_sweep(  # noqa: PLR0913
    sweep: Sweep, folder: Path, prompts: PromptSet, progress: Progress, timeouts: Timeouts = Timeouts(), api_key: str | None = None
) -> ServedReport:
    """Start server after server, measure, compare with `predict`. A server that fails costs its own arms, with the reason in the notes; one that
    refuses the key ends the run, as the next would too. The key is no part of `Sweep`, which is written to disk."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "arms.jsonl", sweep)
    journal.keep([r for r in journal.rows if not r.get("error") and measured_of(r) is not None])  # what failed is tried again
    done = {(r["server"], r["workload"], r["num_seqs"]) for r in journal.rows}
    todo = [(w, n) for w in sweep.workloads for n in sweep.batches]
    for i, (drafter, draft_len, copy) in enumerate(sweep.servers):
        name = server_name(drafter, draft_len, copy)
        missing = [(w, n) for w, n in todo if (name, w, n) not in done]
        progress(name, i, len(sweep.servers))
        if not missing:
            continue
        try:
            with started(sweep, drafter, draft_len, folder / f"{name}.log", folder, timeouts, api_key) as address:
                for workload, n in missing:
                    journal.add(_measure(address, sweep, (drafter, draft_len, copy), (workload, n), prompts, timeouts))
        except KeyRefused:
            raise
        except DraftlineError as error:
            journal.add({"server": name, "workload": "", "num_seqs": 0, "error": str(error)})
    return report_of(sweep, journal.rows)


def server_name(drafter: Drafter | None, draft_len: int, copy: int) -> str:
    return f"{drafter.kind}-{draft_len or 'k0'}" if drafter else "off-again" if copy else "off"


@contextmanager
def started(  # noqa: PLR0913
    sweep: Sweep, drafter: Drafter | None, draft_len: int, log: Path, folder: Path, timeouts: Timeouts, api_key: str | None = None
) -> Iterator[Endpoint]:
    """The server of an arm, healthy; its address."""
    k0_tier = drafter is not None and draft_len == 0
    draft_len = max(sweep.draft_lens) if k0_tier else draft_len
    case = dict(sweep.case) | {"concurrency": max(sweep.batches), "context_len": 1024}
    if drafter is not None:
        case |= {"drafter": {"kind": drafter.kind}, "draft_len": draft_len}
    serve = Serve(
        str(sweep.case["engine"]), resolve(parse_case(case)), drafter.kind if drafter else None, draft_len, max(sweep.batches),
        drafter.model if drafter else None, sweep.model_path, sweep.extra, k0_tier,
    )  # fmt: skip
    port = free_port()
    address = Endpoint(f"http://127.0.0.1:{port}", api_key=api_key)
    with launched(server_command(serve, port=port, folder=folder), address, log, start_limit_s=sweep.start_limit_s, timeouts=timeouts):
        yield address


def _measure(  # noqa: PLR0913
    address: Endpoint, sweep: Sweep, server: tuple[Drafter | None, int, int], cell: tuple[str, int], prompts: PromptSet, timeouts: Timeouts
) -> dict[str, Any]:
    """One arm as a row of the journal, texts included for the comparison of outputs."""
    (drafter, draft_len, _), (workload, n) = server, cell
    count = n * sweep.requests_per_seq
    texts = prompts.take(workload, count)
    spec = LoadSpec(n, sweep.output_len, count, sweep.limit_s)
    arm = measure_arm(address, texts, spec, kind=drafter.kind if drafter else None, draft_len=draft_len, timeouts=timeouts)
    each = [r.tpot_s for r in arm.load.sent if r.tpot_s is not None]
    imported = arm.observed.acceptance if arm.observed is not None else None
    return row_of(server, cell, each, {str(r.prompt): r.text for r in arm.load.sent}) | {
        "identity": str(arm.identity), "tokens_per_s": arm.load.tokens_per_s, "ttft_s": arm.load.ttft_s, "itl_s": arm.load.itl_s,
        "requests": len(arm.load.sent), "acceptance_len": 1.0 if draft_len == 0 else arm.acceptance_len,
        "acceptance": imported.acceptance if imported is not None else None, "input_len": _input_len(arm.load.sent),
        "problems": list(arm.problems),
    }  # fmt: skip


def row_of(server: tuple[Drafter | None, int, int], cell: tuple[str, int], tpot_s: Sequence[float], texts: Mapping[str, str]) -> dict[str, Any]:
    """A row of the journal from each request's TPOT and text; what an engine tells beside that is added to it."""
    (drafter, draft_len, copy), (workload, n) = server, cell
    mean = math.fsum(tpot_s) / len(tpot_s) if tpot_s else None
    error = None if mean is None else math.sqrt(math.fsum((t - mean) ** 2 for t in tpot_s) / max(1, len(tpot_s) - 1) / len(tpot_s))
    return {
        "server": server_name(drafter, draft_len, copy), "kind": drafter.kind if drafter else None, "draft_len": draft_len, "copy": copy,
        "workload": workload, "num_seqs": n, "tpot_s": mean, "tpot_stderr_s": error, "requests": len(tpot_s), "problems": [], "texts": dict(texts),
    }  # fmt: skip


def _input_len(sent: Sequence[Sent]) -> int | None:
    """Mean prompt tokens where the server's usage says so (llama.cpp: its timings)."""
    told = [(r.own.get("usage"), "prompt_tokens") for r in sent] + [(r.own.get("timings"), "prompt_n") for r in sent]
    known = [u[key] for u, key in told if isinstance(u, Mapping) and isinstance(u.get(key), int)]
    return round(sum(known) / len(known)) if known else None


def arm_of(row: Mapping[str, Any]) -> Arm:
    return Arm("served", row["workload"], row["num_seqs"], row["kind"], row["draft_len"], row["copy"])


def measured_of(row: Mapping[str, Any]) -> Measured | None:
    """A row's figures; None where the arm has no usable time or acceptance. A round is TPOT x AL; its parts are the engine's secret."""
    tpot, length = row.get("tpot_s"), row.get("acceptance_len")
    if tpot is None or length is None:
        return None
    rate = row["tokens_per_s"] or row["num_seqs"] / tpot
    share = Z_90 * row["tpot_stderr_s"] / tpot
    low, high = 1.0 - share, 1.0 + share
    round_s = tpot * length
    return Measured(
        length, length, length, round_s, round_s * low, round_s * high, math.nan, math.nan, math.nan, tpot, rate, rate / high, rate / max(low, 1e-9),
        row["requests"], row["requests"],
    )  # fmt: skip


def report_of(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> ServedReport:
    """Predicted from each drafter's acceptance at its longest D on the same text, and the plain arm at the smallest batch as baseline."""
    notes = [f"{r['server']}: {r['error']}" for r in rows if r.get("error")]
    notes += [f"no K=0 tier of {d.kind}: {why}" for d in sweep.drafters if sweep.k0_tier and (why := sweep.k0_refusal(d)) is not None]
    whole = [r for r in rows if not r.get("error")]
    notes += [f"{arm_of(r).name}: {p}" for r in whole for p in r["problems"]]
    tiers = [r for r in whole if is_k0_tier(r)]
    arms = [r for r in whole if not is_k0_tier(r)]
    measured = {arm_of(r): m for r in arms if (m := measured_of(r)) is not None}
    notes += [f"{arm_of(r).name}: not measured" for r in arms if arm_of(r) not in measured]
    predicted = {}
    for r in arms:
        if arm_of(r) in measured:
            try:
                predicted[arm_of(r)] = _predicted(sweep, r, arms)
            except DraftlineError as error:
                notes.append(f"{arm_of(r).name}: no prediction: {error}")
    taxes = tuple(t for r in tiers if (t := _k0_tax(sweep, r, arms)) is not None)
    same, compared = same_outputs(whole)
    detail = f"{same} of {compared} outputs identical; over HTTP a tie of two logits cannot be told from a fault" if compared else ""
    lossless = None if not compared else same == compared
    return ServedReport(
        str(sweep.case["engine"]), measured, predicted, choices(measured, predicted), lossless, detail, tuple(dict.fromkeys(notes)),
        tuple(round_lines(measured, predicted)), taxes,
    )  # fmt: skip


def is_k0_tier(row: Mapping[str, Any]) -> bool:
    return row["kind"] is not None and row["draft_len"] == 0


def _k0_tax(sweep: Sweep, row: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> K0Tax | None:
    """Measured against both plain arms of the cell, and as the planner prices it; no prediction where the deployment cannot be priced."""
    off = [r for r in arms if r["kind"] is None and (r["workload"], r["num_seqs"]) == (row["workload"], row["num_seqs"])]
    try:
        case = _plain_case(sweep, row, arms)
        tier = predict(case | {"drafter": {"kind": row["kind"]}, "draft_len": 0, "k0_tier": True})
        said: float | None = tier.tpot_s / predict(case).tpot_s - 1.0
    except DraftlineError:
        said = None
    return k0_tax_of(row, off, said)


def _plain_case(sweep: Sweep, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Plain decoding on a row's cell, anchored on the plain arm of the smallest batch."""
    plain = [r for r in rows if r["kind"] is None and not r["copy"] and r["workload"] == row["workload"] and r["tpot_s"]]
    case: dict[str, Any] = dict(sweep.case) | {"concurrency": row["num_seqs"], "input_len": row["input_len"] or 128, "output_len": sweep.output_len}
    if plain:
        first = min(plain, key=lambda r: r["num_seqs"])
        case["baseline"] = [{"tpot_s": first["tpot_s"], "concurrency": first["num_seqs"]}]
    return case


def _predicted(sweep: Sweep, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Predicted:
    case = _plain_case(sweep, row, rows)
    if row["kind"] is not None:
        same = [r for r in rows if (r["kind"], r["workload"]) == (row["kind"], row["workload"]) and r["acceptance"]]
        if not same:
            raise InputError("no acceptance was measured for this drafter", where=str(row["server"]))
        source = max(same, key=lambda r: (r["draft_len"], -r["num_seqs"]))
        case |= {"drafter": {"kind": row["kind"]}, "draft_len": row["draft_len"], "acceptance": source["acceptance"]}
    p = predict(case)
    return Predicted(
        p.acceptance_len, p.round_s, p.draft_s, p.verify_s, p.overhead_s, p.tpot_s, p.tokens_per_s, p.speedup, p.speedup_low, p.speedup_high
    )  # fmt: skip


def same_outputs(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(identical, compared) texts of drafting arms against the plain arm of the same batch and text."""
    plain = {(r["workload"], r["num_seqs"]): r["texts"] for r in rows if r["kind"] is None and not r["copy"]}
    same = compared = 0
    for r in rows:
        if r["kind"] is None:
            continue
        expected = plain.get((r["workload"], r["num_seqs"]), {})
        both = r["texts"].keys() & expected.keys()
        compared += len(both)
        same += sum(r["texts"][k] == expected[k] for k in both)
    return same, compared
