"""What `plan` was asked, and everything it takes to answer: deployments of every drafter, evaluated over the whole grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.acceptance.survival import survival_from
from planner.bands import Band, band, tpot_regime
from planner.cases import DRAFTER_KINDS, Case, parse_case
from planner.deployment import Deployment, resolve
from planner.drafters import drafters_for
from planner.errors import DraftlineError, InfeasibleError, InputError
from planner.prediction import anchor_of
from planner.search import Arm, Grid, evaluate
from planner.serving import Anchor, Traffic

DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
NO_DATA = "no acceptance given and no prior for this workload: bring acceptance"


@dataclass(frozen=True)
class Question:
    """What `plan` was asked, defaults filled in."""

    model: str | Mapping[str, Any]
    gpu: str
    n_gpus: int | None = None
    tp: int | None = None
    dp: int | None = None
    ep: int = 1
    engine: str = "vllm"
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    drafters: tuple[Mapping[str, Any], ...] | None = None
    """None = all that exist for the model."""
    workload: str = "chat"
    acceptance: Mapping[str, Any] | None = None
    """One acceptance object for every drafter, or one per kind."""
    concurrency: tuple[int, ...] = DEFAULT_CONCURRENCY
    input_len: int = 1024
    output_len: int = 1024
    context_len: tuple[int, ...] = ()
    """Pure decode at these contexts instead of input/output lengths."""
    slo_tpot_s: float | None = None
    slo_ttft_s: float | None = None
    baseline: tuple[Mapping[str, Any], ...] = ()
    max_draft_len: int = 16
    metric: str = "throughput"


@dataclass
class Run:
    """Everything computed on the way, for one question."""

    question: Question
    arms: list[Arm]
    grids: list[Grid]
    contexts: NDArray[np.float64]
    traffic: Traffic
    anchor: Anchor | None
    listed: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def concurrency(self) -> NDArray[np.int64]:
        return np.asarray(self.question.concurrency, dtype=np.int64)

    @property
    def off(self) -> Grid:
        return self.grids[0]

    @cached_property
    def tpot_bands(self) -> list[Band]:
        """The TPOT band at each concurrency asked."""
        off, measured = self.arms[0].dep, [int(b["concurrency"]) for b in self.question.baseline]
        return [
            band("tpot", tpot_regime(off.gpu.id, moe=off.model.is_moe, concurrency=c, anchored_at=measured, adapted=off.machine.adapted))
            for c in self.question.concurrency
        ]


def check(q: Question) -> None:
    """Options that a Case does not see."""
    if not q.concurrency or any(c < 1 for c in q.concurrency):
        raise InputError("concurrency must be positive whole numbers", where="plan", got=list(q.concurrency), expected="e.g. 1,2,4,8")
    if not 0 <= q.max_draft_len <= 64:
        raise InputError("max_draft_len out of range", where="plan", got=q.max_draft_len, expected="0..64")
    if q.metric not in ("throughput", "tpot"):
        raise InputError("unknown metric", where="plan", got=q.metric, expected="throughput or tpot")
    for name, value in (("slo_tpot_s", q.slo_tpot_s), ("slo_ttft_s", q.slo_ttft_s)):
        if value is not None and not (0 < value < 1e6):
            raise InputError(f"{name} must be positive", where="plan", got=value)


def case_of(q: Question, **changes: Any) -> Case:
    """A question's deployment as a Case."""
    raw: dict[str, Any] = {
        "model": q.model if isinstance(q.model, str) else dict(q.model),
        "gpu": q.gpu,
        "engine": q.engine,
        "ep": q.ep,
        "concurrency": max(q.concurrency),
        **{
            k: v
            for k, v in (("n_gpus", q.n_gpus), ("tp", q.tp), ("dp", q.dp), ("weights_dtype", q.weights_dtype), ("kv_dtype", q.kv_dtype))
            if v is not None
        },
        **({"context_len": q.context_len[0]} if q.context_len else {"input_len": q.input_len, "output_len": q.output_len}),
        **({"baseline": [dict(b) for b in q.baseline]} if q.baseline else {}),
        **changes,
    }
    return parse_case(raw, where="plan")


def off_deployment(q: Question) -> Deployment:
    """Plain decoding on the layout asked for, or on the fewest GPUs (a power of two) that fit."""
    longest = max(q.context_len) if q.context_len else q.input_len + q.output_len
    if q.n_gpus is not None or q.tp is not None or q.dp is not None:
        dep = resolve(case_of(q))
        if dep.capacity_seqs(longest, 0)[()] < 1:
            raise InfeasibleError(
                f"{dep.model.id} on {dep.layout.n_gpus} x {dep.gpu.id}: not even one sequence of {longest} tokens fits beside the weights."
                " Use more GPUs, an 8-bit kv_dtype or weights_dtype, or a shorter context."
            )
        return dep
    last: DraftlineError | None = None
    for n in GPU_COUNTS:
        try:
            dep = resolve(case_of(q, n_gpus=n, tp=n))
            if dep.capacity_seqs(longest, 0)[()] >= 1:
                return dep
            last = InfeasibleError(f"{dep.model.id}: one sequence of {longest} tokens does not fit on {n} x {dep.gpu.id}")
        except InfeasibleError as error:
            last = error
        except InputError as error:
            if "tp must divide" not in str(error):
                raise
            last = last or error
    assert last is not None
    raise InfeasibleError(f"no power-of-two number of GPUs up to {GPU_COUNTS[-1]} fits. {last}")


def build(q: Question, off: Deployment) -> Run:
    """Deployments of every drafter asked for, evaluated over the whole grid."""
    traffic, contexts = _traffic(q)
    anchor = _anchor(q, off) if q.baseline else None
    run = Run(q, [Arm(None, None, off, None, 0)], [], contexts, traffic, anchor)
    if q.drafters is None:
        wanted = [{k: d[k] for k in ("kind", "model") if d.get(k)} for d in _one_per_kind(off, run)]
    else:
        wanted = [dict(d) for d in q.drafters]
    for spec in wanted if q.max_draft_len else []:
        _add_arm(run, off, spec, strict=q.drafters is not None)
    concurrency = run.concurrency
    run.grids = [evaluate(arm, concurrency, traffic, anchor) for arm in run.arms]
    return run


def _anchor(q: Question, off: Deployment) -> Anchor:
    """How the measured runs of this deployment correct the model; a run with drafts is priced with the drafter that it ran with."""
    layout = {"n_gpus": off.layout.n_gpus, "tp": off.layout.tp, "dp": off.layout.dp}
    case = case_of(q, **layout)
    if not any(b.draft_len for b in case.baseline):
        return anchor_of(off, case)
    if q.drafters is None or len(q.drafters) != 1:
        raise InputError(
            "a baseline with drafts needs the one drafter that it ran with", where="plan: baseline",
            got=f"{len(q.drafters or ())} drafters named", expected="one", hint="Name it alone, or give a baseline without speculation.",
        )  # fmt: skip
    drafting = case_of(q, **layout, drafter=dict(q.drafters[0]), draft_len=1)
    return anchor_of(resolve(drafting), drafting)


def _one_per_kind(off: Deployment, run: Run) -> list[dict[str, Any]]:
    """The first ready-made drafter of each kind; other kinds are listed as hypothetical."""
    chosen: dict[str, dict[str, Any]] = {}
    for d in drafters_for(off.model.id, off.model):
        if d["kind"] in DRAFTER_KINDS:
            chosen.setdefault(d["kind"], d)
    for kind in DRAFTER_KINDS:
        if kind not in chosen:
            run.listed.append(
                {"kind": kind, "model": None, "status": "hypothetical", "reason": "no ready-made one is in the catalogue for this model"}
            )
    return [d for d in chosen.values() if d["kind"] != "pard"]


def _add_arm(run: Run, off: Deployment, spec: Mapping[str, Any], *, strict: bool) -> None:
    q, kind = run.question, str(spec.get("kind"))
    entry = {"kind": kind, "model": spec.get("model"), "status": "evaluated", "reason": ""}
    try:
        dep = resolve(case_of(q, n_gpus=off.layout.n_gpus, tp=off.layout.tp, dp=off.layout.dp, drafter=dict(spec), draft_len=1), strict=strict)
        assert dep.drafter is not None
        limit = dep.drafter.max_trained_draft_len
        most = q.max_draft_len if limit is None else min(q.max_draft_len, limit)
        survival = survival_from(acceptance_for(q, kind), kind=kind, max_draft_len=most, block=dep.drafter.known_reach)
        if not survival.has_data:
            run.listed.append({**entry, "status": "listed", "reason": NO_DATA})
            return
        _ = dep.memory
    except DraftlineError as error:
        if strict:
            raise
        run.listed.append({**entry, "status": "listed", "reason": str(error)})
        return
    run.listed.append(entry)
    run.arms.append(Arm(kind, None if spec.get("model") is None else str(spec["model"]), dep, survival, most))


def acceptance_for(q: Question, kind: str) -> Mapping[str, Any]:
    """The acceptance object that applies to a drafter kind."""
    if q.acceptance is None:
        return {"workload": q.workload}
    per_kind = q.acceptance.get(kind)
    if isinstance(per_kind, Mapping):
        return per_kind
    if any(isinstance(v, Mapping) for v in q.acceptance.values()):
        return {"workload": q.workload}
    return q.acceptance


def _traffic(q: Question) -> tuple[Traffic, NDArray[np.float64]]:
    if q.context_len:
        contexts = np.asarray(q.context_len, dtype=np.float64)
        return Traffic.at_context(contexts[None, None, :]), contexts
    t = Traffic.of_lengths(np.full((1, 1, 1), float(q.input_len)), np.full((1, 1, 1), float(q.output_len)))
    return t, np.asarray([q.input_len + q.output_len / 2.0])


def basis(arm: Arm) -> str:
    assert arm.survival is not None
    return f"{arm.name}: {arm.survival.basis}"
