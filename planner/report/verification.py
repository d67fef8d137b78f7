"""A verification (the JSON of `draftline verify`) as text for a terminal and as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.report.terminal import table, wrap
from planner.report.verdict import drafter_name

Result = Mapping[str, Any]


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def headline(result: Result) -> str:
    """Two or three sentences: how right the draft length was, how right the numbers, and whether outputs stayed the same."""
    parts = []
    if result["mean_regret_frac"] is not None:
        count, right = result["on_off_clear_count"], result["on_off_right_clear_frac"]
        which = "where the two differ by more than duplicates do"
        clear = f" ({percent(right, 0)} of the {count} {which})" if count else " (in no choice do the two differ by more than duplicates do)"
        clear = "" if count == len(result["choices"]) else clear
        parts.append(
            f"The recommended draft length lost {percent(result['mean_regret_frac'])} of the best measured throughput on average and"
            f" {percent(result['max_regret_frac'])} at worst over {len(result['choices'])} choices;"
            f" on or off was right in {percent(result['on_off_right_frac'], 0)}{clear}."
        )
    if result["round_error_median"] is not None:
        parts.append(
            f"Round times were off by {percent(result['round_error_median'])} in the median,"
            f" acceptance lengths by {percent(result['al_error_median'])},"
            f" speedups by {percent(result['speedup_error_median'])};"
            f" duplicate arms differed by {percent(result['drift_median'])} (at most {percent(result['drift_max'])})."
        )
    words = {True: "Outputs are those of plain decoding", False: "OUTPUTS DIFFER from plain decoding", None: "Losslessness was not checked"}
    detail = f": {result['lossless_detail']}" if result["lossless_detail"] else ""
    return " ".join([*parts, f"{words[result['lossless']]}{detail}."])


def choice_rows(result: Result) -> list[dict[str, Any]]:
    """One row per (target, workload, batch, drafter): recommended against best, with the speedups of the two."""
    cells = {(c["target"], c["workload"], c["num_seqs"], c["drafter"], c["draft_len"]): c for c in result["cells"] if not c["copy"]}
    rows = []
    for choice in result["choices"]:
        cell = tuple(choice["cell"])
        kind, said, best = choice["drafter"], choice["recommended_draft_len"], choice["best_draft_len"]
        chosen = cells[(*cell, kind if said else None, said)]
        fastest = cells[(*cell, kind if best else None, best)]
        rows.append({
            "target": cell[0], "workload": cell[1], "num_seqs": cell[2], "drafter": kind, "said": said, "best": best,
            "regret_frac": choice["regret_frac"], "noise_frac": choice["noise_frac"], "right": choice["on_off_right"],
            "predicted_speedup": chosen["predicted"]["speedup"] if said else 1.0,
            "measured_speedup": chosen["measured"].get("speedup", 1.0) if said else 1.0,
            "best_speedup": fastest["measured"].get("speedup", 1.0) if best else 1.0,
        })  # fmt: skip
    return rows


def arm_rows(result: Result) -> list[dict[str, Any]]:
    """One row an arm, as the table of the page shows it."""
    return [
        {
            **{k: c[k] for k in ("target", "workload", "num_seqs", "draft_len", "copy")}, "drafter": c["drafter"] or "off",
            "seen": c["measured"], "said": c["predicted"], "why": (c.get("gap") or {}).get("why", ""),
        }
        for c in result["cells"]
    ]  # fmt: skip


def causes(result: Result) -> list[str]:
    """What most often explains a gap of more than 10 % in tokens per second."""
    large = [c["gap"]["why"] for c in result["cells"] if c.get("gap") and not c["copy"] and abs(c["gap"]["tokens_per_s_log"]) > 0.1]
    total = sum(1 for c in result["cells"] if c.get("gap") and not c["copy"])
    counts = sorted(((large.count(w), w) for w in set(large)), reverse=True)
    return [f"{len(large)} of {total} arms are more than 10 % off in tokens/s", *(f"{n} by {w}" for n, w in counts)]


#: What mends costs, by engine; servers are calibrated from their own runs.
COST_ADVICE = {
    "builtin": "draftline verify ... --recalibrate OUT.json writes a profile from this run",
    "builtin-grid": "more calibrated cells, or kernels measured for longer",
}


def advice(result: Result) -> list[str]:
    """What to calibrate next, from the largest cause; nothing is fed back by itself."""
    large = [c["gap"] for c in result["cells"] if c.get("gap") and not c["copy"] and abs(c["gap"]["tokens_per_s_log"]) > 0.1]
    if not large:
        return ["nothing: no arm is more than 10 % off in tokens/s"]
    by_acceptance = sum(g["why"] == "acceptance" for g in large)
    out = []
    if by_acceptance * 2 >= len(large):
        out.append("acceptance: bring counters of this workload (draftline acceptance import) at the draft length that you will run")
    if by_acceptance * 2 < len(large):
        how = COST_ADVICE.get(result["engine"], "bring the TPOT of your own serving runs (draftline calibrate --from-bench)")
        out.append(f"cost: the profile or the engine's overheads; {how}")
    return out


def k0_lines(result: Result) -> list[str]:
    """What having speculation loaded costs while a schedule's tier drafts nothing, measured and predicted."""
    out = []
    for t in result.get("k0_tiers", ()):
        said = "" if t["predicted_tax_frac"] is None else f", predicted {100 * t['predicted_tax_frac']:+.1f} %"
        span = f"{100 * t['tax_low_frac']:+.1f} to {100 * t['tax_high_frac']:+.1f} %"
        where = f"{drafter_name(t['drafter'])}, {t['workload']}, batch {t['num_seqs']}"
        out.append(f"K=0 tier, {where}: TPOT {100 * t['tax_frac']:+.1f} % over off ({span}){said}")
    return out


def round_lines(result: Result) -> list[str]:
    """An HTTP engine's round as a fixed part and one by draft token, with 90 % half widths."""
    out = []
    for r in result.get("round_lines", ()):
        fixed = f"{r['fixed_s'] * 1e3:.3g} +- {r['fixed_half_s'] * 1e3:.2g} ms"
        token = f"{r['per_draft_token_s'] * 1e3:.3g} +- {r['per_draft_token_half_s'] * 1e3:.2g} ms a draft token"
        plain = "" if r["plain_step_s"] is None else f"; a plain step {r['plain_step_s'] * 1e3:.3g} ms"
        said = ""
        if r["predicted_fixed_s"] is not None:
            said = f"; predicted {r['predicted_fixed_s'] * 1e3:.3g} ms + {r['predicted_per_draft_token_s'] * 1e3:.3g} ms"
        out.append(f"{drafter_name(r['drafter'])}, {r['workload']}, batch {r['num_seqs']}: {fixed} + {token}{plain}{said}")
    return out


def text(result: Result, width: int = 80) -> str:
    """For a terminal of 80 columns and more."""
    rows = [
        [f"{r['target']}, {r['workload']}, {r['num_seqs']}", r["drafter"], str(r["said"] or "off"), str(r["best"] or "off"),
         percent(r["regret_frac"]),  f"{r['predicted_speedup']:.2f}", f"{r['measured_speedup']:.2f}", f"{r['best_speedup']:.2f}"]
        for r in choice_rows(result)
    ]  # fmt: skip
    parts = [wrap(headline(result), width, ""), ""]
    if rows:
        parts += [table(["target, text, batch", "drafter", "said", "best", "regret", "pred", "meas", "of best"], rows, (0, 1)), ""]
        parts += [
            wrap(
                "said, best: draft length recommended and measured best; pred, meas: speedup of the recommended one; of best: of the best one.",
                width,
                "",
            )
        ]
    parts += [
        "",
        "What explains the gaps",
        *(wrap(f"- {c}", width) for c in causes(result)),
        "",
        "What to calibrate",
        *(wrap(f"- {a}", width) for a in advice(result)),
    ]
    for title, lines in (("What a round costs", round_lines(result)), ("What a K=0 tier costs", k0_lines(result))):
        if lines:
            parts += ["", title, *(wrap(f"- {line}", width) for line in lines)]
    if result["notes"]:
        parts += ["", "Notes", *(wrap(f"- {n}", width) for n in result["notes"])]
    return "\n".join(parts)


def html(result: Result) -> str:
    """One page: the sentences, predicted against measured, a table of choices, all arms."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from planner.report.figures import fragment

    env = Environment(loader=PackageLoader("planner.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["percent"] = percent
    return env.get_template("verification.html.j2").render(
        headline=headline(result), engine=result["engine"], choices=choice_rows(result), arms=arm_rows(result), causes=causes(result),
        advice=advice(result), notes=result["notes"], rounds=round_lines(result), tiers=k0_lines(result),
        figure=fragment(agreement_figure(result["cells"]), with_library=True),
        curves=fragment(curve_figure(result["cells"]), with_library=False), drafter_name=drafter_name,
    )  # fmt: skip


def agreement_figure(cells: Sequence[Mapping[str, Any]]) -> Any:
    """Predicted against measured speedup of every arm, coloured by drafter; the diagonal is agreement."""
    import plotly.graph_objects as go

    from planner.report.figures import COLOURS, LAYOUT

    figure = go.Figure()
    drafting = [c for c in cells if c["drafter"] and c["predicted"] and "speedup" in c["measured"]]
    for i, kind in enumerate(dict.fromkeys(c["drafter"] for c in drafting)):
        mine = [c for c in drafting if c["drafter"] == kind]
        figure.add_scatter(
            x=[c["measured"]["speedup"] for c in mine], y=[c["predicted"]["speedup"] for c in mine], mode="markers", name=drafter_name(kind),
            marker={"color": COLOURS[i % len(COLOURS)], "size": 8, "opacity": 0.8},
            error_x={
                "type": "data", "symmetric": False, "thickness": 0.7, "width": 0,
                "array": [c["measured"]["speedup_high"] - c["measured"]["speedup"] for c in mine],
                "arrayminus": [c["measured"]["speedup"] - c["measured"]["speedup_low"] for c in mine],
            },
            customdata=[[c["target"], c["workload"], c["num_seqs"], c["draft_len"]] for c in mine],
            hovertemplate="%{customdata[0]}, %{customdata[1]}, batch %{customdata[2]}, D=%{customdata[3]}"
            "<br>measured %{x:.2f}x, predicted %{y:.2f}x<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    ends = [c[side]["speedup"] for c in drafting for side in ("measured", "predicted")] or [1.0]
    line = [min(ends) * 0.95, max(ends) * 1.05]
    figure.add_scatter(x=line, y=line, mode="lines", line={"color": "#444", "dash": "dot", "width": 1}, name="agreement", hoverinfo="skip")
    figure.update_layout(**LAYOUT, xaxis_title="measured speedup", yaxis_title="predicted speedup")
    return figure


def curve_figure(cells: Sequence[Mapping[str, Any]]) -> Any:
    """Speedup over draft length, measured (points) and predicted (lines), for the cell with the most drafters."""
    import plotly.graph_objects as go

    from planner.report.figures import COLOURS, LAYOUT

    figure = go.Figure()
    drafting = [c for c in cells if c["drafter"] and c["predicted"] and "speedup" in c["measured"]]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for c in drafting:
        groups.setdefault((c["target"], c["workload"], c["num_seqs"]), []).append(c)
    if groups:
        key, chosen = max(groups.items(), key=lambda item: len(item[1]))
        for i, kind in enumerate(dict.fromkeys(c["drafter"] for c in chosen)):
            mine = sorted((c for c in chosen if c["drafter"] == kind), key=lambda c: int(c["draft_len"]))
            colour, x = COLOURS[i % len(COLOURS)], [c["draft_len"] for c in mine]
            figure.add_scatter(
                x=x, y=[c["predicted"]["speedup"] for c in mine], mode="lines", line={"color": colour}, showlegend=False, hoverinfo="skip"
            )
            figure.add_scatter(
                x=x, y=[c["measured"]["speedup"] for c in mine], mode="markers", marker={"color": colour, "size": 9}, name=drafter_name(kind)
            )
        figure.update_layout(title={"text": f"{key[0]} target, {key[1]}, batch {key[2]}", "font": {"size": 13}, "x": 0.01, "y": 0.02})
    figure.update_layout(**LAYOUT, xaxis_title="draft length D", yaxis_title="speedup over off")
    return figure
