"""A server that already speculates: what its counters say over a short window, and which D the planner would set there.

Nothing is sent to it but scrapes: the traffic is its own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from planner.acceptance.importers import Imported
from planner.acceptance.survival import survival_from
from planner.cases import DRAFTER_KINDS
from planner.errors import InputError
from planner.verify.remote.client import Endpoint, ServerIdentity, Timeouts, identify
from planner.verify.remote.counters import Snapshot, observe, snapshot
from planner.verify.remote.exposition import grown, mean_of, totals

if TYPE_CHECKING:
    from planner.planning import Plan
    from planner.question import Question

SCRAPES = 5
"""Scrapes in a window: counters need the first and the last, the running batch is a gauge and needs them all."""
SERVER_MODELS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llamacpp": "llamacpp"}


@dataclass(frozen=True)
class _Names:
    """What an engine calls its gauges, counters and histograms. itl_is_round: its ITL is a gap between steps, not seconds per token."""

    running: str
    waiting: str
    generated: str
    itl: tuple[str, ...]
    itl_is_round: bool
    tpot: str = ""
    ttft: str = ""
    input_len: str = ""
    output_len: str = ""


_NAMES = {
    "vllm": _Names(
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total",
        # The second is the name before 0.11; both were exported for a while, with the same values.
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"), True, "vllm:request_time_per_output_token_seconds",
        "vllm:time_to_first_token_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    ),
    # SGLang divides each gap by the tokens it brought: its ITL is TPOT.
    "sglang": _Names(
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total", ("sglang:inter_token_latency_seconds",), False,
        ttft="sglang:time_to_first_token_seconds",
    ),
    "llamacpp": _Names("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:tokens_predicted_total", (), False),
}  # fmt: skip


@dataclass(frozen=True)
class LiveReading:
    """A window of a live server; None = its metrics do not say, and `missing` says what.

    num_seqs: mean requests running; waiting_seqs: queued; itl_s: seconds between steps (vLLM) ; tpot_s: seconds per token of a request; input_len,
    output_len: mean tokens of the requests that finished in the window.
    """

    identity: ServerIdentity
    window_s: float
    acceptance: Imported | None
    num_seqs: float | None = None
    waiting_seqs: float | None = None
    tokens_per_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None
    input_len: float | None = None
    output_len: float | None = None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def survival_prob(self) -> tuple[float, ...] | None:
        return None if self.acceptance is None else self.acceptance.survival_prob

    @property
    def acceptance_len(self) -> float | None:
        return None if self.acceptance is None else self.acceptance.acceptance_len

    @property
    def draft_len(self) -> int | None:
        """D that it runs with (tokens)."""
        return self.identity.draft_len or (None if self.acceptance is None else self.acceptance.draft_len)

    @property
    def text(self) -> str:
        """A few lines; what the server does not say is said."""

        def shown(value: float | None, scale: float, unit: str) -> str:
            return "not said" if value is None else f"{value * scale:.3g} {unit}".rstrip()

        rates = ", ".join(f"{s:.3f}" for s in self.survival_prob) if self.survival_prob else "not said"
        lines = [
            f"{self.identity}",
            f"  drafts: D={self.draft_len if self.draft_len else 'not said'}, AL {shown(self.acceptance_len, 1, '')}, accepted by position {rates}",
            f"  running {shown(self.num_seqs, 1, '')}, queued {shown(self.waiting_seqs, 1, '')}, {shown(self.tokens_per_s, 1, 'tokens/s')}",
            f"  ITL {shown(self.itl_s, 1e3, 'ms')}, TPOT {shown(self.tpot_s, 1e3, 'ms')}, TTFT {shown(self.ttft_s, 1e3, 'ms')}",
        ]
        return "\n".join([*lines, *(f"  ! {m}" for m in self.missing), *(f"  - {n}" for n in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        plain = ("window_s", "num_seqs", "waiting_seqs", "tokens_per_s", "itl_s", "tpot_s", "ttft_s", "input_len", "output_len")
        return {
            "server": str(self.identity), "engine": self.identity.endpoint.engine, "model": self.identity.endpoint.model,
            "kind": self.identity.kind, "draft_len": self.draft_len, "acceptance_len": self.acceptance_len,
            "survival_prob": None if self.survival_prob is None else list(self.survival_prob), **{k: getattr(self, k) for k in plain},
            "missing": list(self.missing), "notes": list(self.notes),
        }  # fmt: skip


def read_live(server: str | Endpoint, *, window_s: float = 10.0, kind: str | None = None, timeouts: Timeouts = Timeouts()) -> LiveReading:
    """Watch a server for `window_s` seconds. `kind`: its drafter, where the server does not say (vLLM).

    A server that is down, slow or exports no metrics is an InputError; single missing fields are named in `missing`.
    """
    if not 0 < window_s <= 3600:
        raise InputError("not a window", where="window_s", got=window_s, expected="seconds in 0..3600")
    identity = identify(server, timeouts=timeouts)
    end, taken = identity.endpoint, []
    shots: list[Snapshot] = []
    begin = time.monotonic()
    # Reading TensorRT-LLM's statistics takes them away: scrapes in between would lose them.
    scrapes = 2 if end.engine == "trtllm" else SCRAPES
    for n in range(scrapes):
        time.sleep(max(0.0, begin + window_s * n / (scrapes - 1) - time.monotonic()))
        shots.append(snapshot(end, timeouts=timeouts))
        taken.append(time.monotonic())
    if not shots[-1].metrics.strip():
        raise InputError("the server exports no metrics", where=end.at("/metrics"), got="; ".join(shots[-1].missing), expected="a Prometheus text")
    names = _NAMES.get(end.engine)
    seen = observe(shots[0], shots[-1], kind=kind or identity.kind)
    if end.engine == "trtllm" and (iterations := _iterations(shots[-1].metrics)):
        return _of_iterations(identity, taken[-1] - taken[0], iterations, (seen.acceptance, seen.problems))
    if names is None:
        missing = (*seen.problems, f"running requests and latencies: {end.engine} has no metrics of them that are known here")
        return LiveReading(identity, taken[-1] - taken[0], seen.acceptance, missing=missing)
    where = end.at("/metrics")
    rows = [totals(s.metrics, where) for s in shots]
    return _reading(identity, taken[-1] - taken[0], rows, names, (seen.acceptance, seen.problems))


def _reading(
    identity: ServerIdentity, window_s: float, rows: list[dict[str, float]], names: _Names, seen: tuple[Imported | None, tuple[str, ...]]
) -> LiveReading:
    acceptance, problems = seen
    first, last = rows[0], rows[-1]
    missing, notes = list(problems), list(identity.notes)
    num_seqs = _gauge(rows, names.running)
    made = grown(first, last, names.generated)
    rate = None if made is None else made / window_s
    itl = next((m for m in (mean_of(first, last, n) for n in names.itl) if m is not None), None)
    tpot = mean_of(first, last, names.tpot) if names.tpot else None
    if tpot is None and itl is not None and not names.itl_is_round:
        tpot = itl
    if tpot is None and identity.endpoint.engine == "llamacpp":
        spent = grown(first, last, "llamacpp:tokens_predicted_seconds_total")
        tpot = spent / made if spent and made else None
    if tpot is None and itl is not None and acceptance is not None and acceptance.acceptance_len:
        tpot = itl / acceptance.acceptance_len
        notes.append("TPOT is ITL / AL: no request finished in the window, or the server has no histogram of it")
    elif tpot is None and num_seqs and rate:
        tpot = num_seqs / rate
        notes.append("TPOT is running requests / throughput (Little's law): the server exports no latency histogram; prefill is in it")
    for value, name in ((num_seqs, names.running), (made, names.generated), (itl, " or ".join(names.itl)), (tpot, "time per output token")):
        if value is None and name:
            missing.append(f"{name}: absent, or nothing was counted in the window")
    if made == 0:
        missing.append("the server generated nothing in the window: measure while it has traffic")
    return LiveReading(
        identity, window_s, acceptance, num_seqs, _gauge(rows, names.waiting), rate, itl, tpot, mean_of(first, last, names.ttft),
        mean_of(first, last, names.input_len), mean_of(first, last, names.output_len), tuple(missing), tuple(notes),
    )  # fmt: skip


def _iterations(metrics: str) -> list[Mapping[str, Any]]:
    """specDecodingStats of TensorRT-LLM's iterations that drafted; empty where the text is something else."""
    try:
        rows = json.loads(metrics)
    except (ValueError, RecursionError):
        return []
    rows = rows if isinstance(rows, list) else [rows]
    stats = [r["specDecodingStats"] for r in rows if isinstance(r, Mapping) and isinstance(r.get("specDecodingStats"), Mapping)]
    return [s for s in stats if _number(s.get("numRequestsWithDraftTokens"))]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0 else None


def _of_iterations(
    identity: ServerIdentity, window_s: float, iterations: list[Mapping[str, Any]], seen: tuple[Imported | None, tuple[str, ...]]
) -> LiveReading:
    """Batch and round from TensorRT-LLM's iteration statistics: they count the requests that drafted and time each iteration (iterLatencyMS)."""
    acceptance, problems = seen
    took = [t / 1e3 for s in iterations if (t := _number(s.get("iterLatencyMS"))) is not None]
    num_seqs, itl = fmean(float(s["numRequestsWithDraftTokens"]) for s in iterations), fmean(took) if took else None
    length = None if acceptance is None else acceptance.acceptance_len
    tpot = itl / length if itl and length else None
    missing = list(problems) + ([] if took else ["iterLatencyMS: absent from the iteration statistics, so that no time is known"])
    notes = (
        *identity.notes,
        "running requests are those that drafted, TPOT is the iteration's time / AL; iterations without drafts are not in either",
    )
    rate = num_seqs / tpot if tpot else None
    return LiveReading(identity, window_s, acceptance, num_seqs, None, rate, itl, tpot, missing=tuple(missing), notes=notes)


def _gauge(rows: list[dict[str, float]], name: str) -> float | None:
    found = [r[name] for r in rows if name in r]
    return fmean(found) if found else None


@dataclass(frozen=True)
class LiveAdvice:
    """What the planner would set on the live server. draft_len: tokens, 0 = off; low, high: 80 % interval of AL at that D; extrapolated: D lies
    beyond what was measured."""

    draft_len: int
    running_draft_len: int | None
    acceptance_len: float
    acceptance_low_len: float
    acceptance_high_len: float
    extrapolated: bool
    near_optimal: tuple[int, ...]
    """Every D within 2 % of it."""
    assumptions: tuple[str, ...]
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the plan itself is left out."""
        keys = ("draft_len", "running_draft_len", "acceptance_len", "acceptance_low_len", "acceptance_high_len", "extrapolated", "text")
        return {k: getattr(self, k) for k in keys} | {"near_optimal": list(self.near_optimal), "assumptions": list(self.assumptions)}

    @property
    def text(self) -> str:
        """One sentence."""
        now = "an unknown D" if self.running_draft_len is None else f"D={self.running_draft_len}"
        if self.draft_len == self.running_draft_len:
            return f"keep {now}: it is what the plan would set"
        if self.running_draft_len in self.near_optimal:
            return f"keep {now}: it is within 2 % of the best, D={self.draft_len}"
        what = "switch speculation off" if self.draft_len == 0 else f"set D={self.draft_len}"
        sure = f" (AL {self.acceptance_len:.2f}, {self.acceptance_low_len:.2f} to {self.acceptance_high_len:.2f}, beyond the measured D)"
        return f"{what} instead of {now}{sure if self.extrapolated else ''}"


def recommend_live(reading: LiveReading, model: str | Mapping[str, Any], gpu: str, *, kind: str | None = None, **options: Any) -> LiveAdvice:
    """Which D for what was read. `options`: further fields of `planner.Question` (n_gpus, tp, weights_dtype, max_draft_len, ...).

    The acceptance is the one measured; other D follow its drafter kind's law, with a band. The measured TPOT anchors the model's times: the ratio
    measured/predicted of the speculating server is taken to hold for plain decoding too.
    """
    from planner.planning import answer
    from planner.question import Question, check

    kind = kind or reading.identity.kind or (reading.acceptance.kind if reading.acceptance else None)
    where = reading.identity.endpoint.base_url
    if kind is None or kind not in DRAFTER_KINDS:
        raise InputError(
            "the server does not say which drafter it runs", where=where, got=reading.identity.method or kind,
            expected=f"one of {', '.join(DRAFTER_KINDS)}", hint="Give the drafter's kind.",
        )  # fmt: skip
    form = None if reading.acceptance is None else reading.acceptance.acceptance
    if form is None or reading.acceptance_len is None:
        raise InputError("no acceptance was measured", where=where, got="; ".join(reading.missing), expected="a server that drafted in the window")
    if not reading.num_seqs or reading.num_seqs < 0.5:
        raise InputError("no request was running", where=where, got=reading.num_seqs, expected="traffic in the window")
    num_seqs = max(1, round(reading.num_seqs))
    assumptions = [f"traffic as in the window: {num_seqs} requests running, AL {reading.acceptance_len:.3g} with D={reading.draft_len}"]
    lengths = {k: round(v) for k, v in (("input_len", reading.input_len), ("output_len", reading.output_len)) if v and v >= 1}
    if len(lengths) == 2 and not {"input_len", "output_len", "context_len"} & options.keys():
        options |= lengths
    elif not {"input_len", "output_len", "context_len"} & options.keys():
        assumptions.append("prompts and answers of 1024 tokens: the window does not say how long they are")
    asked: dict[str, Any] = {
        "engine": SERVER_MODELS.get(reading.identity.endpoint.engine, "vllm"), "acceptance": form, "drafters": ({"kind": kind},),
        "concurrency": (num_seqs,),
    } | options  # fmt: skip
    if unknown := sorted(set(asked) - set(Question.__dataclass_fields__)):
        raise InputError(f"unknown option {unknown[0]!r}", expected=f"one of {sorted(Question.__dataclass_fields__)}")
    question = Question(model, gpu, **asked)
    check(question)
    if not question.baseline and (baseline := _baseline(reading, question)):
        question = replace(question, baseline=baseline)
        assumptions.append(
            f"the measured TPOT {(reading.tpot_s or 0) * 1e3:.3g} ms corrects all times alike: plain decoding would take "
            f"{baseline[0]['tpot_s'] * 1e3:.3g} ms, which was not measured; switch speculation off once to know"
        )
    elif not question.baseline:
        assumptions.append("times are the model's own: no TPOT was measured to correct them")
    made = answer(question)
    return _advice(reading, made, kind, assumptions)


def _advice(reading: LiveReading, made: Plan, kind: str, assumptions: list[str]) -> LiveAdvice:
    assert reading.acceptance is not None
    best = made.recommendations[0]
    if best["draft_len"] is None:
        raise InputError("no draft length is feasible", where=reading.identity.endpoint.base_url, got="; ".join(best["reasons"]))
    draft_len, near = int(best["draft_len"]), tuple(map(int, best["near_optimal"]))
    survival = survival_from(reading.acceptance.acceptance, kind=kind, max_draft_len=max(1, draft_len))
    low, high = survival.acceptance_range(draft_len)
    beyond = draft_len > (survival.measured_at or 0)
    if beyond and draft_len:
        assumptions.append(f"D={draft_len} is beyond the measured D={survival.measured_at}: AL there follows the {kind} law, {low:.2f} to {high:.2f}")
    value = float(survival.acceptance_len(draft_len))
    return LiveAdvice(draft_len, reading.draft_len, value, low, high, beyond and draft_len > 0, near, tuple(assumptions), made)


def _baseline(reading: LiveReading, question: Question) -> tuple[dict[str, Any], ...]:
    """The plain TPOT that the measured speculating one stands for: measured x predicted plain / predicted speculating, same deployment and batch."""
    from planner.prediction import predict
    from planner.question import case_of, off_deployment

    if reading.tpot_s is None or not reading.draft_len or reading.acceptance_len is None or not question.drafters:
        return ()
    layout, num_seqs = off_deployment(question).layout, question.concurrency[0]
    where = {"n_gpus": layout.n_gpus, "tp": layout.tp, "dp": layout.dp, "concurrency": num_seqs}
    measured = {"acceptance_len": reading.acceptance_len, "at_draft_len": reading.draft_len}
    plain = predict(case_of(question, **where))
    drafting = predict(case_of(question, **where, drafter=dict(question.drafters[0]), draft_len=reading.draft_len, acceptance=measured))
    return ({"tpot_s": reading.tpot_s * plain.tpot_s / drafting.tpot_s, "concurrency": num_seqs},)
