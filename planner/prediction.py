"""`predict`: cases in, predictions out, in order; lines that share a deployment are computed together.

It answers what was asked: D beyond the trained block is warned about and not clipped, sequences beyond memory queue, and what does not
fit at all is an error that never carries a throughput.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.acceptance.survival import survival_from
from planner.bands import band, quotient, speedup_regime, spread, tpot_regime
from planner.cases import Case, Prediction, parse_case
from planner.deployment import Deployment, cached_resolve, deployment_key
from planner.draft import LOOKUP
from planner.edges import edges_of
from planner.errors import DraftlineError, InfeasibleError, InputError, InternalError
from planner.roofline import PARTS
from planner.serving import Anchor, Served, Traffic, plain, serve, solve_open_loop, target_step

F = NDArray[np.float64]


@dataclass(frozen=True)
class _Asked:
    """One parsed line with its acceptance."""

    index: int
    case: Case
    acceptance_len: float
    acceptance_band: float
    """log half-width from carrying AL to another D."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def predict(case: Mapping[str, Any] | Case) -> Prediction:
    """One case. Raises DraftlineError."""
    raw = case.model_dump(exclude_unset=True) if isinstance(case, Case) else case
    answer = predict_many([raw])[0]
    if isinstance(answer, DraftlineError):
        raise answer
    return answer


def predict_many(cases: Sequence[object]) -> list[Prediction | DraftlineError]:
    """Each case's prediction or its error, in order."""
    answers: list[Prediction | DraftlineError | None] = [None] * len(cases)
    groups: dict[tuple[str, bool], list[tuple[int, Case]]] = {}
    for i, raw in enumerate(cases):
        try:
            case = parse_case(raw, where=f"case {i + 1}")
            assert isinstance(raw, Mapping)
            groups.setdefault((deployment_key(raw), case.draft_len == 0), []).append((i, case))
        except Exception as fault:
            answers[i] = fault if isinstance(fault, DraftlineError) else InternalError.of(fault)
    for (key, _), members in groups.items():
        try:
            dep = cached_resolve(key)
            _ = dep.memory
        except Exception as fault:
            for i, _case in members:
                answers[i] = fault if isinstance(fault, DraftlineError) else InternalError.of(fault)
            continue
        asked: list[_Asked] = []
        for i, case in members:
            try:
                asked.append(_acceptance(i, case, dep))
            except Exception as fault:
                answers[i] = fault if isinstance(fault, DraftlineError) else InternalError.of(fault)
        for a, answer in zip(asked, _answers(dep, asked), strict=True):
            answers[a.index] = answer
    return [a if a is not None else InputError("no answer") for a in answers]


def predict_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """JSON lines -> JSON objects: the prediction, or {"id", "error": {"type", "message"}}."""
    raws: list[object] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raws.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raws.append(InputError(f"line {number} is not valid JSON", got=line[:60], hint=f"{error}"))
    parsed = [r if not isinstance(r, InputError) else None for r in raws]
    out: list[dict[str, Any]] = []
    for raw, answer in zip(raws, predict_many(parsed), strict=True):
        problem = raw if isinstance(raw, DraftlineError) else answer
        if isinstance(problem, DraftlineError):
            out.append({"id": raw.get("id") if isinstance(raw, Mapping) else None, "error": error_object(problem)})
        else:
            assert isinstance(problem, Prediction)
            out.append(problem.model_dump())
    return out


def error_object(error: DraftlineError) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


# ---------------------------------------------------------------- one group
def _acceptance(index: int, case: Case, dep: Deployment) -> _Asked:
    if case.draft_len == 0:
        return _Asked(index, case, 1.0, 0.0)
    assert dep.drafter is not None
    warnings: list[str] = []
    width = dep.drafter.verify_width
    if width is not None and not (case.acceptance and "acceptance_len" in case.acceptance):
        raise InputError(
            "a tree (verify_width) needs its measured acceptance",
            where="acceptance",
            got=case.acceptance,
            expected='{"acceptance_len": ..., "at_draft_len": ...}',
            hint="Priors and curves are for chains: give the tree's AL, or drop verify_width.",
        )
    if case.acceptance is None:
        warnings.append("no acceptance given: the chat prior is used; measure one to trust the speedup")
    survival = survival_from(case.acceptance, kind=dep.drafter.kind, max_draft_len=case.draft_len, block=dep.drafter.known_reach)
    warnings += survival.warnings(case.draft_len)
    al = float(survival.acceptance_len(case.draft_len))
    if width is not None and al > width:
        raise InputError("AL exceeds the rows that are verified", where="acceptance", got=f"{al:g} > verify_width {width}")
    if dep.drafter.match_prob is not None and dep.drafter.kind in LOOKUP:
        al = dep.drafter.match_prob * al + (1.0 - dep.drafter.match_prob)  # AL is of rounds that draft
    return _Asked(index, case, al, survival.log_band(case.draft_len), (survival.basis,), (*warnings, *survival.notes))


def _answers(dep: Deployment, asked: list[_Asked]) -> list[Prediction | DraftlineError]:
    """The group's answers; where computing them together fails, each line alone, so that a fault costs one line."""
    if not asked:
        return []
    try:
        return _predict_group(dep, asked)
    except Exception as fault:
        if len(asked) == 1:
            return [fault if isinstance(fault, DraftlineError) else InternalError.of(fault)]
        return [answer for a in asked for answer in _answers(dep, [a])]


def _predict_group(dep: Deployment, asked: list[_Asked]) -> list[Prediction | DraftlineError]:
    traffic = _traffic(asked)
    d = np.asarray([a.case.draft_len for a in asked], dtype=np.float64)
    al = np.asarray([a.acceptance_len for a in asked])
    off = plain(dep)
    anchor = _anchor(dep, asked)
    load, load_off, saturated, saturated_off = _load(dep, off, asked, anchor)
    served = serve(dep if d.any() or dep.k0_tier else off, concurrency=load, draft_len=d, acceptance_len=al, traffic=traffic, anchor=anchor)
    base = serve(off, concurrency=load_off, draft_len=0.0, acceptance_len=1.0, traffic=traffic, anchor=anchor)
    step, _ = np.broadcast_arrays(target_step(off, served.num_seqs, traffic, anchor), served.tpot_s)
    answers: list[Prediction | DraftlineError] = []
    for i, a in enumerate(asked):
        if served.capacity_seqs[i] < 1:
            need = float(dep.bytes_per_seq(np.asarray(traffic.context_len)[i], d[i]))
            answers.append(
                InfeasibleError(
                    f"{dep.model.id}: one sequence of {np.asarray(traffic.context_len)[i]:.0f} tokens needs {need / 1e9:.2f} GB of cache per GPU and"
                    f" {dep.memory.free / 1e9:.2f} GB are free. Use more GPUs, an 8-bit kv_dtype, or a shorter context."
                )
            )
            continue
        plain_rate = float(base.tokens_per_s[i])
        if a.case.request_rate_per_s is not None and not saturated_off[i]:
            plain_rate = a.case.request_rate_per_s * float(a.case.output_len or 1)
        answers.append(_one(dep, a, _Row(i, served, plain_rate, float(step[i]), bool(saturated[i]), float(np.asarray(anchor.scale)[i]))))
    return answers


def _traffic(asked: list[_Asked]) -> Traffic:
    cases = [a.case for a in asked]
    output = np.asarray([np.inf if c.output_len is None else float(c.output_len) for c in cases])
    inputs = np.asarray([1.0 if c.input_len is None else float(c.input_len) for c in cases])
    context = np.asarray([float(c.context_len or 0) or (c.input_len or 1024) + (c.output_len or 0) / 2.0 for c in cases])
    cached = np.asarray([float(c.cached_input_len) for c in cases])
    return Traffic(context, inputs, output, cached, prefill_elsewhere=all(c.mode == "disagg" for c in cases))


def anchor_of(dep: Deployment, case: Case) -> Anchor:
    """How the baselines of one case correct the model: the geometric mean of measured over predicted."""
    return Anchor(float(np.asarray(_anchor(dep, [_Asked(0, case, 1.0, 0.0)]).scale)[0]))


def _anchor(dep: Deployment, asked: list[_Asked]) -> Anchor:
    """Per line the correction by its baselines, 1 without any; all of a group's baselines are priced together."""
    total, count = np.zeros(len(asked)), np.zeros(len(asked))
    pairs = [(i, b) for i, a in enumerate(asked) for b in a.case.baseline]
    for drafting in (False, True):
        mine = [(i, b) for i, b in pairs if (b.draft_len > 0 and dep.drafter is not None) == drafting]
        if not mine:
            continue
        runs = [b for _, b in mine]
        s = serve(
            dep if drafting else plain(dep),
            concurrency=np.asarray([float(b.concurrency) for b in runs]),
            draft_len=np.asarray([float(b.draft_len) for b in runs]),
            acceptance_len=np.asarray([b.acceptance_len for b in runs]),
            traffic=_traffic([asked[i] for i, _ in mine]),
        )
        for k, (i, b) in enumerate(mine):
            total[i] += np.log(b.tpot_s / s.tpot_s[k] if b.tpot_s is not None else s.tokens_per_s[k] / float(b.tokens_per_s or 1.0))
            count[i] += 1.0
    return Anchor(np.exp(total / np.maximum(count, 1.0)))


def _load(dep: Deployment, off: Deployment, asked: list[_Asked], anchor: Anchor) -> tuple[F, F, NDArray[np.bool_], NDArray[np.bool_]]:
    """Requests in flight with and without speculation, given or the open loop's fixed point, and whether arrivals outrun each."""
    load = np.asarray([float(a.case.concurrency or 0) for a in asked])
    load_off, saturated, saturated_off = load.copy(), np.zeros(len(asked), dtype=np.bool_), np.zeros(len(asked), dtype=np.bool_)
    for i, a in enumerate(asked):
        rate = a.case.request_rate_per_s
        if rate is None:
            continue
        own = Anchor(float(np.asarray(anchor.scale)[i]))
        t = _traffic([a])
        load[i], saturated[i] = solve_open_loop(
            dep, rate_per_s=rate, draft_len=a.case.draft_len, acceptance_len=a.acceptance_len, traffic=t, anchor=own
        )
        load_off[i], saturated_off[i] = solve_open_loop(off, rate_per_s=rate, draft_len=0, acceptance_len=1.0, traffic=t, anchor=own)
    return load, load_off, saturated, saturated_off


class _Row(NamedTuple):
    """One line's place in its group's arrays."""

    position: int
    served: Served
    plain_tokens_per_s: float
    step_s: float
    saturated: bool
    scale: float


def _one(dep: Deployment, a: _Asked, row: _Row) -> Prediction:
    i, served = row.position, row.served
    c, r = a.case, served.round

    def at(x: F) -> float:
        return float(np.broadcast_to(x, served.tpot_s.shape)[i])

    tpot, rate = float(served.tpot_s[i]), float(served.tokens_per_s[i])
    if c.request_rate_per_s is not None and not row.saturated:
        rate = c.request_rate_per_s * float(c.output_len or 1)  # what arrives is served
    num_seqs, capacity = math.ceil(served.num_seqs[i] - 1e-9), int(min(served.capacity_seqs[i], 10**9))
    speedup = 1.0 if c.draft_len == 0 and not dep.k0_tier else rate / row.plain_tokens_per_s
    measured = [b.concurrency for b in c.baseline]
    regime = tpot_regime(dep.gpu.id, moe=dep.model.is_moe, concurrency=max(num_seqs, 1), anchored_at=measured, adapted=dep.machine.adapted)
    drafting = c.draft_len > 0 or dep.k0_tier
    times, gain = band("tpot", regime), band("speedup", speedup_regime(c.draft_len))
    low, high = spread(tpot, quotient(times, gain) if drafting else times, a.acceptance_band)
    s_low, s_high = spread(speedup, gain, a.acceptance_band) if drafting else (1.0, 1.0)
    warnings = [*a.warnings, *dep.warnings, *dep.memory_notes]
    if c.concurrency is not None and num_seqs < c.concurrency:
        why = "memory" if capacity < min(c.concurrency, dep.max_num_seqs) else f"{dep.engine.name} running-request limit"
        warnings.append(f"{num_seqs} of {c.concurrency} requests run at once ({why}); the rest queue")
    if not 0.4 < row.scale < 3.0:
        warnings.append(f"the baseline is {row.scale:.2g} times the model's time: wrong unit, another layout, or a broken run?")
    if row.saturated:
        warnings.append(f"the arrival rate {c.request_rate_per_s:g}/s exceeds what the deployment serves: the queue grows without bound")
    eager = bool(np.broadcast_to(r.eager, served.tpot_s.shape)[i])
    if eager and not dep.config.eager:
        warnings.append("the pass is wider than the largest captured CUDA graph and runs eagerly: raise the capture size")
    parts = {name: at(p) for name, p in zip(PARTS, r.parts[1:], strict=True)}
    parts["host"] = at(r.overhead_s)
    ttft = float(served.ttft_s[i] + served.queue_s[i])
    return Prediction(
        id=c.id,
        tpot_s=tpot,
        tpot_low_s=float(low),
        tpot_high_s=float(high),
        ttft_s=None if np.isnan(ttft) or row.saturated else ttft,
        tokens_per_s=rate,
        tokens_per_s_per_user=1.0 / tpot,
        tokens_per_s_per_gpu=rate / (dep.layout.n_gpus + dep.extra_gpus),
        round_s=at(r.round_s),
        draft_s=at(r.draft_s),
        verify_s=at(r.verify_s),
        overhead_s=at(r.overhead_s),
        target_step_s=row.step_s,
        acceptance_len=a.acceptance_len,
        speedup=speedup,
        speedup_low=float(s_low),
        speedup_high=float(s_high),
        bound=max(parts, key=lambda k: parts[k]),
        num_seqs=num_seqs,
        capacity_seqs=capacity,
        edges=edges_of(dep, num_seqs, c.draft_len),
        assumptions=(*a.notes, *dep.assumptions),
        warnings=tuple(dict.fromkeys(warnings)),
    )
