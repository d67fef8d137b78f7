"""`plan`: one question about a model on a GPU -> points, a recommendation per concurrency and context, guidelines, break-even, schedule.

`Plan` is plain values; `report`, `cli` and `export` only format it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planner.acceptance.survival import survival_from
from planner.bands import Band, band, spread
from planner.cases import Case, parse_case
from planner.deployment import Deployment, resolve
from planner.drafters import drafters_for
from planner.edges import edges_of
from planner.errors import DraftlineError, InfeasibleError, InputError
from planner.guidelines import guideline_checks
from planner.models.read import read_model
from planner.predict import anchor_of
from planner.roofline import PARTS
from planner.search import Arm, Cell, Choice, Grid, choose, evaluate, pareto_front
from planner.serving import Anchor, Traffic

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
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


@dataclass(frozen=True)
class Plan:
    """The answer. Fields are those of DESIGN section 5; a field whose part is not built yet is None."""

    inputs: dict[str, Any]
    points: list[dict[str, Any]]
    recommendations: list[dict[str, Any]]
    drafters: list[dict[str, Any]]
    """What was considered: kind, model, status (evaluated | hypothetical | listed), reason."""
    guidelines: list[dict[str, Any]]
    break_even: list[dict[str, Any]]
    schedule: dict[str, Any] | None
    exports: dict[str, Any] | None
    assumptions: list[str]
    warnings: list[str]
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_frame(self) -> pd.DataFrame:
        """The points as a table."""
        import pandas as pd

        return pd.DataFrame(self.points)


@dataclass
class _Run:
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
    def bands(self) -> tuple[Band, Band]:
        regime = "anchored" if self.question.baseline else "default"
        return band("tpot", regime), band("speedup", regime)


def plan(model: str | Mapping[str, Any], gpu: str, **options: Any) -> Plan:
    """Which drafter and how many draft tokens, or none. Options are the fields of `Question`. Raises DraftlineError."""
    unknown = set(options) - set(Question.__dataclass_fields__)
    if unknown:
        raise InputError(f"unknown option {sorted(unknown)[0]!r}", expected=f"one of {sorted(Question.__dataclass_fields__)}")
    return answer(Question(model, gpu, **options))


def answer(question: Question) -> Plan:
    """`plan` for a Question."""
    check(question)
    off = off_deployment(question)
    run = build(question, off)
    recommendations = [_recommend(run, i, j) for i in range(len(run.concurrency)) for j in range(len(run.contexts))]
    from planner.export import exports_of
    from planner.schedule import break_even, schedule_of

    main = main_arm(run, recommendations)
    table = schedule_of(run.arms[0], main, run.traffic, run.anchor) if main is not None else None
    return Plan(
        inputs=_inputs(question, off),
        points=_points(run),
        recommendations=recommendations,
        drafters=run.listed,
        guidelines=guideline_checks(off, main, question.concurrency, float(run.contexts[0]), recommendations),
        break_even=break_even(run.arms, run.grids, run.concurrency, run.contexts),
        schedule=table,
        exports=exports_of(off, main, table, recommendations) if main is not None else {},
        assumptions=list(dict.fromkeys([a for arm in run.arms for a in arm.dep.assumptions] + [_basis(a) for a in run.arms if a.survival])),
        warnings=list(dict.fromkeys(run.warnings + [w for arm in run.arms for w in arm.dep.warnings])),
    )


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
        "model": q.model if isinstance(q.model, str) else dict(q.model), "gpu": q.gpu, "engine": q.engine, "ep": q.ep, "concurrency": max(q.concurrency),
        **{k: v for k, v in (("n_gpus", q.n_gpus), ("tp", q.tp), ("dp", q.dp), ("weights_dtype", q.weights_dtype), ("kv_dtype", q.kv_dtype)) if v is not None},
        **({"context_len": q.context_len[0]} if q.context_len else {"input_len": q.input_len, "output_len": q.output_len}),
        **({"baseline": [dict(b) for b in q.baseline]} if q.baseline else {}), **changes,
    }  # fmt: skip
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


# ---------------------------------------------------------------- arms
def build(q: Question, off: Deployment) -> _Run:
    """Deployments of every drafter asked for, evaluated over the whole grid."""
    traffic, contexts = _traffic(q)
    anchor = anchor_of(off, case_of(q, n_gpus=off.layout.n_gpus, tp=off.layout.tp, dp=off.layout.dp)) if q.baseline else None
    run = _Run(q, [Arm(None, None, off, None, 0)], [], contexts, traffic, anchor)
    if q.drafters is None:
        wanted = [{k: d[k] for k in ("kind", "model") if d.get(k)} for d in _one_per_kind(off, run)]
    else:
        wanted = [dict(d) for d in q.drafters]
    for spec in wanted if q.max_draft_len else []:
        _add_arm(run, off, spec, strict=q.drafters is not None)
    concurrency = run.concurrency
    run.grids = [evaluate(arm, concurrency, traffic, anchor) for arm in run.arms]
    return run


def _one_per_kind(off: Deployment, run: _Run) -> list[dict[str, Any]]:
    """The first ready-made drafter of each kind; other kinds are listed as hypothetical."""
    from planner.cases import DRAFTER_KINDS

    chosen: dict[str, dict[str, Any]] = {}
    for d in drafters_for(off.model.id, off.model):
        if d["kind"] in DRAFTER_KINDS:
            chosen.setdefault(d["kind"], d)
    for kind in DRAFTER_KINDS:
        if kind not in chosen:
            run.listed.append({"kind": kind, "model": None, "status": "hypothetical", "reason": "no ready-made one is in the catalogue for this model"})
    return [d for d in chosen.values() if d["kind"] != "pard"]


def _add_arm(run: _Run, off: Deployment, spec: Mapping[str, Any], *, strict: bool) -> None:
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


def _basis(arm: Arm) -> str:
    assert arm.survival is not None
    return f"{arm.name}: {arm.survival.basis}"


# ---------------------------------------------------------------- a cell
def cell_of(run: _Run, i: int, j: int) -> Cell:
    """All arms at concurrency i and context j, off first."""
    q = run.question
    plain_verify = float(run.off.served.round.verify_s[i, 0, j])
    columns: dict[str, list[Any]] = {k: [] for k in ("arm", "d", "value", "draft", "verify", "over", "al", "band", "ok")}
    for a, (arm, g) in enumerate(zip(run.arms, run.grids, strict=True)):
        s = g.served
        r = s.round
        value = s.tokens_per_s[i, :, j] if q.metric == "throughput" else 1.0 / s.tpot_s[i, :, j]
        ok = g.feasible[i, :, j].copy()
        if q.slo_tpot_s is not None:
            ok &= s.tpot_s[i, :, j] <= q.slo_tpot_s
        if q.slo_ttft_s is not None:
            ok &= ~(s.ttft_s[i, :, j] + s.queue_s[i, :, j] > q.slo_ttft_s)
        widths = np.zeros(len(g.draft_len)) if arm.survival is None else np.asarray([arm.survival.log_band(int(d)) for d in g.draft_len])
        for key, x in zip(
            columns,
            (np.full(len(g.draft_len), a), g.draft_len, value, _at(r.draft_s, s, i, j), _at(r.verify_s, s, i, j), _at(r.overhead_s, s, i, j),
             s.acceptance_len[i, :, j], widths, ok), strict=True,
        ):  # fmt: skip
            columns[key].append(x)
    c = {k: np.concatenate(v) for k, v in columns.items()}
    plain = np.full(len(c["d"]), plain_verify)
    return Cell(c["arm"], c["d"], c["value"], c["draft"], c["verify"], c["over"], c["al"], c["band"], plain, c["ok"])


def _at(x: NDArray[np.float64], s: Any, i: int, j: int) -> NDArray[np.float64]:
    return np.asarray(np.broadcast_to(x, s.tpot_s.shape)[i, :, j], dtype=np.float64)


def _recommend(run: _Run, i: int, j: int) -> dict[str, Any]:
    cell = cell_of(run, i, j)
    concurrency, context = int(run.concurrency[i]), float(run.contexts[j])
    head: dict[str, Any] = {"concurrency": concurrency, "context_len": context}
    choice = choose(cell, 0)
    if choice is None:
        return head | {
            "drafter": None, "drafter_model": None, "draft_len": None, "num_seqs": None, "near_optimal": [], "speedup": None, "speedup_low": None, "speedup_high": None,
            "prob_best": None, "expected_regret_frac": None, "reasons": [_why_nothing(run, i, j)],
        }  # fmt: skip
    k = choice.index
    arm, d = run.arms[int(cell.arm[k])], int(cell.draft_len[k])
    speedup = float(cell.value[k] / cell.value[0])
    _, doubt = run.bands
    low, high = (1.0, 1.0) if d == 0 else _speedup_band(speedup, doubt, float(cell.acceptance_band[k]))
    near = sorted({int(cell.draft_len[n]) for n in choice.near_optimal if cell.arm[n] == cell.arm[k]} | {d})
    return head | {
        "drafter": arm.kind, "drafter_model": arm.model, "draft_len": d, "num_seqs": _running(run, arm, i, j, d), "near_optimal": near, "speedup": speedup, "speedup_low": low, "speedup_high": high,
        "prob_best": choice.prob_best, "expected_regret_frac": choice.expected_regret_frac, "reasons": _reasons(run, cell, choice, i, j),
    }  # fmt: skip


def _speedup_band(speedup: float, doubt: Band, extra: float) -> tuple[float, float]:
    low, high = spread(np.float64(speedup), doubt, extra)  # type: ignore[arg-type]
    return float(low), float(high)


def _why_nothing(run: _Run, i: int, j: int) -> str:
    s = run.off.served
    if not run.off.feasible[i, 0, j]:
        return "no sequence of this context fits the memory left beside the weights"
    return f"no arm meets the SLO; plain decoding has TPOT {s.tpot_s[i, 0, j] * 1e3:.1f} ms"


def _reasons(run: _Run, cell: Cell, choice: Choice, i: int, j: int) -> list[str]:
    """Why this D, and why not one more: the marginal rule s_(D+1)/AL against dT/T, then what the kernels say."""
    k = choice.index
    arm, d = run.arms[int(cell.arm[k])], int(cell.draft_len[k])
    t = cell.draft_s + cell.verify_s + cell.overhead_s
    out: list[str] = []
    if d == 0:
        others = np.flatnonzero(cell.allowed & (cell.draft_len > 0))
        if len(others):
            b = others[int(np.argmax(cell.value[others]))]
            out.append(
                f"best speculative arm {run.arms[int(cell.arm[b])].name} D={cell.draft_len[b]}: a round costs {t[b] / t[0]:.2f} plain steps and"
                f" yields {cell.acceptance_len[b]:.2f} tokens"
            )
        else:
            out.append("no speculative arm is feasible here")
    else:
        out.append(
            f"a round costs {t[k] / t[0]:.2f} plain steps (draft {cell.draft_s[k] / t[k]:.0%}, verify {cell.verify_s[k] / t[k]:.0%}) and yields"
            f" {cell.acceptance_len[k]:.2f} tokens"
        )
        follow = np.flatnonzero((cell.arm == cell.arm[k]) & (cell.draft_len == d + 1))
        if len(follow):
            n = int(follow[0])
            gain = cell.acceptance_len[n] / cell.acceptance_len[k] - 1.0
            cost = t[n] / t[k] - 1.0
            out.append(f"D={d + 1} would add {gain:.1%} tokens for {cost:.1%} time")
        elif d == arm.max_draft_len and arm.dep.drafter is not None and arm.dep.drafter.max_trained_draft_len == d:
            out.append(f"D={d} is the most this drafter was trained for")
    out += edges_of(arm.dep, _running(run, arm, i, j, d), d)[:2]
    return out


def _running(run: _Run, arm: Arm, i: int, j: int, draft_len: int) -> int:
    """Sequences that run at once in a cell."""
    grid = run.grids[run.arms.index(arm)]
    return int(grid.served.num_seqs[i, int(np.flatnonzero(grid.draft_len == draft_len)[0]), j])


# ---------------------------------------------------------------- output rows
def _points(run: _Run) -> list[dict[str, Any]]:
    """Every arm x D x concurrency x context with the predict keys; infeasible ones carry no throughput."""
    flat = [_grid_columns(run, a) for a in range(len(run.arms))]
    columns = {k: np.concatenate([f[k] for f in flat]) for k in flat[0]}
    ok = columns["feasible"]
    front = np.zeros(len(ok), dtype=np.bool_)
    for j in range(len(run.contexts)):
        here = np.flatnonzero(ok & (columns["context_len"] == run.contexts[j]))
        front[here] = pareto_front(columns["tokens_per_s_per_user"][here], columns["tokens_per_s_per_gpu"][here])
    values = {k: v.tolist() for k, v in columns.items()}
    bounds = (*PARTS, "host")
    measured = [k for k in values if k not in ("arm", "draft_len", "concurrency", "context_len", "feasible")]
    rows: list[dict[str, Any]] = []
    for n, feasible in enumerate(values["feasible"]):
        row: dict[str, Any] = {
            "drafter": run.arms[values["arm"][n]].kind, "drafter_model": run.arms[values["arm"][n]].model, "draft_len": values["draft_len"][n], "concurrency": values["concurrency"][n],
            "context_len": values["context_len"][n], "feasible": feasible,
            "infeasible_reason": None if feasible else "one sequence does not fit the memory left beside the weights",
            "on_pareto_front": bool(front[n]),
        }  # fmt: skip
        for k in measured:
            v = values[k][n]
            row[k] = v if feasible and v == v else None
        row["bound"] = bounds[int(row["bound"])] if feasible else None
        queued = feasible and row["num_seqs"] < row["concurrency"]
        row["warnings"] = [f"{row['num_seqs']} of {row['concurrency']} requests run at once; the rest queue"] if queued else []
        rows.append(row)
    return rows


def _grid_columns(run: _Run, a: int) -> dict[str, NDArray[Any]]:
    arm, g = run.arms[a], run.grids[a]
    s, r = g.served, g.served.round
    shape = s.tpot_s.shape
    tpot_band, speed_band = run.bands
    al_band = np.zeros(len(g.draft_len)) if arm.survival is None else np.asarray([arm.survival.log_band(int(d)) for d in g.draft_len])
    speedup = s.tokens_per_s / np.broadcast_to(run.off.served.tokens_per_s, shape)
    low, high = spread(s.tpot_s, tpot_band, al_band[None, :, None])
    s_low, s_high = (speedup, speedup) if arm.survival is None else spread(speedup, speed_band, al_band[None, :, None])
    gpus = arm.dep.layout.n_gpus + arm.dep.extra_gpus
    target = run.off.served.round.round_s
    columns: dict[str, Any] = {
        "arm": np.int64(a), "draft_len": g.draft_len[None, :, None], "concurrency": run.concurrency[:, None, None],
        "context_len": run.contexts[None, None, :], "feasible": g.feasible, "tpot_s": s.tpot_s, "tpot_low_s": low, "tpot_high_s": high,
        "ttft_s": s.ttft_s + s.queue_s, "tokens_per_s": s.tokens_per_s, "tokens_per_s_per_user": 1.0 / s.tpot_s,
        "tokens_per_s_per_gpu": s.tokens_per_s / gpus, "round_s": r.round_s, "draft_s": r.draft_s, "verify_s": r.verify_s,
        "overhead_s": r.overhead_s, "target_step_s": target, "acceptance_len": s.acceptance_len, "speedup": speedup,
        "speedup_low": s_low, "speedup_high": s_high, "bound": _bound(g), "num_seqs": s.num_seqs.astype(np.int64), "capacity_seqs": np.minimum(s.capacity_seqs, 1e9).astype(np.int64),
    }  # fmt: skip
    return {k: np.broadcast_to(v, shape).ravel() for k, v in columns.items()}


def _bound(g: Grid) -> NDArray[np.int64]:
    """Index into (*PARTS, "host") of what takes most of the verification and its overhead."""
    r, shape = g.served.round, g.served.tpot_s.shape
    parts = [np.broadcast_to(x, shape) for x in (*r.parts[1:], r.overhead_s)]
    return np.asarray(np.argmax(np.stack(parts), axis=0), dtype=np.int64)


def main_arm(run: _Run, recommendations: Sequence[Mapping[str, Any]]) -> Arm | None:
    """The drafter recommended in most cells (ties: the one recommended at the lowest concurrency)."""
    chosen = [(r["drafter"], r["drafter_model"]) for r in recommendations if r["drafter"]]
    if not chosen:
        return None
    best = max(dict.fromkeys(chosen), key=chosen.count)
    return next(a for a in run.arms if (a.kind, a.model) == best)


def _inputs(q: Question, off: Deployment) -> dict[str, Any]:
    data = asdict(replace(q, model=off.model.id))
    data.update(
        gpu=off.gpu.id, n_gpus=off.layout.n_gpus, tp=off.layout.tp, dp=off.layout.dp, ep=off.layout.ep, engine=off.engine.id,
        weights=dict(sorted(off.dtypes.weights.items())), kv_dtype=off.dtypes.kv, weights_bytes_per_gpu=off.memory.weights,
        free_bytes_per_gpu=off.memory.free,
    )  # fmt: skip
    return data
