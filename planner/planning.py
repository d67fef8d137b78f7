"""`plan`: one question about a model on a GPU -> points, a recommendation per concurrency and context, guidelines, break-even, schedule.

`Plan` is plain values; `report`, `cli` and `export` only format it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.bands import band
from planner.deployment import Deployment
from planner.errors import InputError
from planner.export import exports_of
from planner.guidelines import guideline_checks
from planner.question import Question, basis, build, check, off_deployment
from planner.recommend import main_arm, points_of, recommend
from planner.schedule import break_even, schedule_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1


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
    recommendations = [recommend(run, i, j) for i in range(len(run.concurrency)) for j in range(len(run.contexts))]
    main = main_arm(run, recommendations)
    table = schedule_of(run.arms[0], main, run.traffic, run.anchor) if main is not None else None
    return Plan(
        inputs=_inputs(question, off) | {"tpot_band": list(run.tpot_bands[0]), "tpot_band_near_baseline": list(band("tpot", "anchored-near"))},
        points=points_of(run),
        recommendations=recommendations,
        drafters=run.listed,
        guidelines=guideline_checks(off, main, question.concurrency, float(run.contexts[0]), recommendations),
        break_even=break_even(run.arms, run.grids, run.concurrency, run.contexts),
        schedule=table,
        exports=exports_of(off, main, table, recommendations) if main is not None else {},
        assumptions=list(dict.fromkeys([a for arm in run.arms for a in arm.dep.assumptions] + [basis(a) for a in run.arms if a.survival])),
        warnings=list(dict.fromkeys(run.warnings + [w for arm in run.arms for w in (*arm.dep.warnings, *arm.dep.memory_notes)])),
    )


def _inputs(q: Question, off: Deployment) -> dict[str, Any]:
    data = asdict(replace(q, model=off.model.id))
    data.update(
        gpu=off.gpu.id,
        n_gpus=off.layout.n_gpus,
        tp=off.layout.tp,
        dp=off.layout.dp,
        ep=off.layout.ep,
        engine=off.engine.id,
        weights=dict(sorted(off.dtypes.weights.items())),
        kv_dtype=off.dtypes.kv,
        weights_bytes_per_gpu=off.memory.weights,
        free_bytes_per_gpu=off.memory.free,
    )
    return data
