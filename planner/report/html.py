"""A plan as one self-contained HTML page."""

from __future__ import annotations

from typing import Any

from planner.export import settings_text
from planner.planning import Plan
from planner.report.figures import fragment, pareto_figure, speedup_figure
from planner.report.terminal import _flip, _ranges
from planner.report.verdict import drafter_name, verdict


def plan_html(plan: Plan) -> str:
    """Verdict, table, interactive Pareto front, speedup over load, guidelines, settings, assumptions, warnings."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(loader=PackageLoader("planner.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return env.get_template("plan.html.j2").render(
        verdict=verdict(plan),
        inputs=plan.inputs,
        rows=_rows(plan),
        pareto=fragment(pareto_figure(plan), with_library=True),
        speedup=fragment(speedup_figure(plan), with_library=False),
        several_contexts=len({r["context_len"] for r in plan.recommendations}) > 1,
        guidelines=plan.guidelines,
        flips=[_flip(b) for b in plan.break_even],
        drafters=plan.drafters,
        exports={e: {"text": settings_text(b), "notes": b["notes"]} for e, b in (plan.exports or {}).items()},
        assumptions=plan.assumptions,
        warnings=plan.warnings,
    )


def _rows(plan: Plan) -> list[dict[str, Any]]:
    by_key = {(p["drafter"], p["drafter_model"], p["draft_len"], p["concurrency"], p["context_len"]): p for p in plan.points}
    rows = []
    for r in plan.recommendations:
        p = by_key.get((r["drafter"], r["drafter_model"], r["draft_len"], r["concurrency"], r["context_len"]))
        rows.append({**r, "name": drafter_name(r["drafter"]), "near": _ranges(r["near_optimal"]), "point": p if p and p["feasible"] else None})
    return rows
