"""Interactive figures of a plan, as HTML fragments that need no network."""

from __future__ import annotations

from typing import Any

from planner.planning import Plan
from planner.report.verdict import drafter_name

COLOURS = ("#2f6f4f", "#b4532a", "#3b5b92", "#8a6d1d", "#7a3b69", "#2b7a86", "#6b6b6b", "#a33a4a")
OFF = "#9aa0a6"
LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 84, "b": 50},
    "height": 500,
    "font": {"family": "Inter, system-ui, sans-serif", "size": 13},
    # above the plot and under the tool bar, with room for two lines
    "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0},
}


def _colours(plan: Plan) -> dict[str | None, str]:
    names = [n for n in dict.fromkeys(p["drafter"] for p in plan.points) if n is not None]
    return {None: OFF} | {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(names)}


def pareto_figure(plan: Plan) -> Any:
    """Tokens/s/user against tokens/s/GPU for every feasible point; the front is drawn through."""
    import plotly.graph_objects as go

    figure, colours = go.Figure(), _colours(plan)
    contexts = list(dict.fromkeys(p["context_len"] for p in plan.points))
    points = [p for p in plan.points if p["feasible"] and p["context_len"] == contexts[0]]
    for name, colour in colours.items():
        mine = [p for p in points if p["drafter"] == name]
        figure.add_scatter(
            x=[p["tokens_per_s_per_user"] for p in mine],
            y=[p["tokens_per_s_per_gpu"] for p in mine],
            mode="markers",
            name=drafter_name(name),
            marker={
                "color": colour,
                "size": [9 if p["on_pareto_front"] else 5 for p in mine],
                "opacity": [0.95 if p["on_pareto_front"] else 0.3 for p in mine],
            },
            customdata=[
                [p["draft_len"], p["concurrency"], p["tpot_s"] * 1e3, p["speedup"], p["tpot_low_s"] * 1e3, p["tpot_high_s"] * 1e3] for p in mine
            ],
            hovertemplate="D=%{customdata[0]} at %{customdata[1]} concurrent"
            "<br>TPOT %{customdata[2]:.2f} ms [%{customdata[4]:.2f}-%{customdata[5]:.2f}]"
            "<br>%{y:.0f} tok/s/GPU, %{x:.0f} tok/s/user<br>speedup %{customdata[3]:.2f}x<extra>%{fullData.name}</extra>",
        )
    front = sorted((p for p in points if p["on_pareto_front"]), key=lambda p: float(p["tokens_per_s_per_user"]))
    figure.add_scatter(
        x=[p["tokens_per_s_per_user"] for p in front],
        y=[p["tokens_per_s_per_gpu"] for p in front],
        mode="lines",
        name="Pareto front",
        line={"color": "#444", "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )
    figure.update_layout(**LAYOUT, xaxis_title="tokens/s/user", yaxis_title="tokens/s/GPU")
    return figure


def speedup_figure(plan: Plan) -> Any:
    """Speedup of each drafter's best D over concurrency with its 80 % band; 1 is plain decoding."""
    import plotly.graph_objects as go

    figure, colours = go.Figure(), _colours(plan)
    contexts = list(dict.fromkeys(p["context_len"] for p in plan.points))
    for name, colour in colours.items():
        if name is None:
            continue
        best: dict[int, dict[str, Any]] = {}
        for p in plan.points:
            if p["drafter"] == name and p["feasible"] and p["context_len"] == contexts[0]:
                now = best.get(p["concurrency"])
                if now is None or p["speedup"] > now["speedup"]:
                    best[p["concurrency"]] = p
        rows = [best[c] for c in sorted(best)]
        x = [p["concurrency"] for p in rows]
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*(p["speedup_high"] for p in rows), *(p["speedup_low"] for p in rows[::-1])],
            fill="toself",
            fillcolor=colour,
            opacity=0.12,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
        figure.add_scatter(
            x=x,
            y=[p["speedup"] for p in rows],
            mode="lines+markers",
            name=drafter_name(name),
            line={"color": colour},
            customdata=[p["draft_len"] for p in rows],
            hovertemplate="best D=%{customdata} at %{x}: %{y:.2f}x<extra>%{fullData.name}</extra>",
        )
    figure.add_hline(y=1.0, line={"color": OFF, "dash": "dot"})
    figure.update_layout(**LAYOUT, xaxis_title="concurrent requests", yaxis_title="speedup over plain decoding", xaxis_type="log")
    return figure


def fragment(figure: Any, *, with_library: bool) -> str:
    """A figure as a div; the first one on a page carries the plotting library."""
    return str(figure.to_html(full_html=False, include_plotlyjs=with_library, config={"displaylogo": False, "responsive": True}))
