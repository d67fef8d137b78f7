"""Values -> text for people at 80 columns and more. Returns strings; only the command line prints."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_profiles.schema import GpuProfile
from planner.export import settings_text
from planner.planning import Plan
from planner.report.verdict import drafter_name, verdict
from planner.units import si


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """Aligned columns: numbers right, the columns named by `text` left."""
    widths = [max(len(h), *(len(r[i]) for r in rows)) if rows else len(h) for i, h in enumerate(headers)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) if i in text else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))).rstrip()

    return "\n".join([line(headers), "  ".join("-" * w for w in widths), *(line(r) for r in rows)])


def wrap(text: str, width: int = 100, indent: str = "  ") -> str:
    import textwrap

    return textwrap.fill(text, width=width, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)


def plan_text(plan: Plan) -> str:
    """Verdict, table, Pareto plot, what binds and why, guidelines, assumptions, warnings."""
    i = plan.inputs
    width = max(72, min(110, shutil.get_terminal_size((80, 24)).columns))
    layout = (
        f"{i['n_gpus']} x {i['gpu']} (tp {i['tp']}" + (f", dp {i['dp']}" if i["dp"] > 1 else "") + (f", ep {i['ep']}" if i["ep"] > 1 else "") + ")"
    )
    lengths = f"context {', '.join(map(str, i['context_len']))}" if i["context_len"] else f"input {i['input_len']}, output {i['output_len']}"
    parts = [
        wrap(verdict(plan), width, ""),
        "",
        wrap(f"{i['model']} on {layout}, {i['engine']}, weights {_weights(i['weights'])}, KV {i['kv_dtype']}, {lengths}", width, ""),
        "",
        recommendation_table(plan),
        wrap(CAPTION, width, ""),
        "",
        pareto_plot(plan, width),
        "",
        "Why",
        *(wrap(f"{r['concurrency']} concurrent: {'; '.join(r['reasons'])}", width) for r in _spread(plan.recommendations)),
        "",
        "Where it flips",
        *(wrap(_flip(b), width) for b in plan.break_even),
        "",
        "Guidelines",
        *(wrap(f"{g['id']}. {g['text']}", width) for g in plan.guidelines),
        "",
        "Drafters considered",
        *(
            wrap(f"{d['kind']}{' ' + d['model'] if d['model'] else ''}: {d['status']}{' - ' + d['reason'] if d['reason'] else ''}", width)
            for d in plan.drafters
        ),
        "",
        "Assumptions",
        *(wrap(f"- {a}", width) for a in plan.assumptions),
    ]
    if plan.warnings:
        parts += ["", "Warnings", *(wrap(f"! {w}", width) for w in plan.warnings)]
    return "\n".join(parts)


def _weights(weights: Mapping[str, str]) -> str:
    kinds = sorted({v for k, v in weights.items() if k not in ("lm_head", "router")})
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{k} {v}" for k, v in weights.items() if k in ("attn", "mlp", "experts"))


def _spread(recs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """First, middle and last recommendation."""
    return [recs[k] for k in sorted({0, len(recs) // 2, len(recs) - 1})]


def full_name(row: Mapping[str, Any]) -> str:
    """``external:Qwen/Qwen3-0.6B``"""
    return ":".join(filter(None, (row["drafter"], row["drafter_model"])))


def _flip(row: Mapping[str, Any]) -> str:
    name, context = full_name(row), row["context_len"]
    if row["always_loses"]:
        return f"{name} at context {context:.0f}: a loss already at the lowest concurrency asked"
    if row["concurrency"] is None:
        return f"{name} at context {context:.0f}: pays over the whole range asked"
    return f"{name} at context {context:.0f}: stops paying near {row['concurrency']:.0f} concurrent requests"


def recommendation_table(plan: Plan) -> str:
    by_key = {(p["drafter"], p["drafter_model"], p["draft_len"], p["concurrency"], p["context_len"]): p for p in plan.points}
    several = len({r["context_len"] for r in plan.recommendations}) > 1
    rows = []
    for r in plan.recommendations:
        p = by_key.get((r["drafter"], r["drafter_model"], r["draft_len"], r["concurrency"], r["context_len"]), {})
        if r["draft_len"] is None or not p.get("feasible"):
            rows.append([str(r["concurrency"]), *([f"{r['context_len']:.0f}"] if several else []), *["-"] * 10])
            continue
        near = _ranges(r["near_optimal"])
        rows.append(
            [
                str(r["concurrency"]),
                *([f"{r['context_len']:.0f}"] if several else []),
                r["drafter"] or "off",
                str(r["draft_len"]),
                near,
                str(p["num_seqs"]),
                f"{r['speedup']:.2f}x",
                f"{r['speedup_low']:.2f}-{r['speedup_high']:.2f}",
                f"{p['tpot_s'] * 1e3:.2f}",
                f"{p['tokens_per_s_per_user']:.0f}",
                f"{p['tokens_per_s_per_gpu']:.0f}",
                f"{r['prob_best']:.0%}",
            ]
        )
    heads = [
        "conc",
        *(["context"] if several else []),
        "drafter",
        "D",
        "near",
        "runs",
        "speedup",
        "80% band",
        "TPOT ms",
        "/user",
        "/GPU",
        "P",
    ]
    return table(heads, rows)


CAPTION = (
    "near: D within 2 % of the best. runs: requests that fit at once. speedup: tokens/s over plain decoding. /user, /GPU: tokens/s."
    " P: chance that no other arm is better, given the doubt in the model."
)


def _ranges(values: Sequence[int]) -> str:
    """[2, 3, 4, 7] -> 2-4,7"""
    out: list[list[int]] = []
    for v in values:
        if out and v == out[-1][-1] + 1:
            out[-1].append(v)
        else:
            out.append([v])
    return ",".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in out)


def pareto_plot(plan: Plan, width: int) -> str:
    """Terminal scatter: tokens/s/user against tokens/s/GPU; the front by drafter, plain decoding beside it."""
    import plotext as plt

    plt.clear_figure()
    plt.theme("clear")
    plt.plotsize(width, 18)
    plt.title("Pareto front")
    plt.xlabel("tokens/s/user")
    plt.ylabel("tokens/s/GPU")
    front = [p for p in plan.points if p["on_pareto_front"]]
    off = [p for p in plan.points if p["drafter"] is None and p["feasible"]]
    plt.scatter([p["tokens_per_s_per_user"] for p in off], [p["tokens_per_s_per_gpu"] for p in off], marker="o", label="off")
    for k, name in enumerate(dict.fromkeys(p["drafter"] for p in front if p["drafter"])):
        mine = [p for p in front if p["drafter"] == name]
        plt.scatter(
            [p["tokens_per_s_per_user"] for p in mine], [p["tokens_per_s_per_gpu"] for p in mine], marker="x+*#%&@="[k % 8], label=drafter_name(name)
        )
    return str(plt.build())


def exports_text(plan: Plan) -> str:
    if not plan.exports:
        return "Nothing to export: no drafter is recommended here."
    out = []
    for engine, body in plan.exports.items():
        out += [f"# {engine}", settings_text(body), *(f"#   {n}" for n in body["notes"]), ""]
    return "\n".join(out).rstrip()


def explain_text(e: Mapping[str, Any]) -> str:
    """Op table of the verification and of a draft pass, residuals, edges, what it rests on."""
    p, r = e["prediction"], e["rows"]
    head = (
        f"{e['model']} on {e['gpu']}, {e['engine']}: {r['num_seqs_per_rank']:.0f} sequences per rank x {r['query_len']:.0f} rows = {r['rows']:.0f}"
        f" rows (padded to {r['padded_rows']:.0f})\n"
        f"round {p['round_s'] * 1e3:.2f} ms = draft {p['draft_s'] * 1e3:.2f} + verify {p['verify_s'] * 1e3:.2f}"
        f" + overhead {p['overhead_s'] * 1e3:.2f};"
        f" AL {p['acceptance_len']:.2f}; TPOT {p['tpot_s'] * 1e3:.2f} ms [{p['tpot_low_s'] * 1e3:.2f}-{p['tpot_high_s'] * 1e3:.2f}];"
        f" speedup {p['speedup']:.2f}x"
    )
    parts = [head, "", "Verification pass" if r["query_len"] > 1 else "Decode pass", _op_table(e["verify"])]
    if e["draft_pass"]:
        parts += ["", "One draft pass", _op_table(e["draft_pass"])]
    parts += [
        "",
        "Added to kernel sums (engine profile)",
        *(f"  {k}: {si(v, 's') if k.endswith('_s') else f'{v:.3g}'}" for k, v in e["residuals"].items()),
    ]
    parts += ["", "Edges", *(f"  {x}" for x in e["edges"]), "", "Rests on", *(f"  {x}" for x in e["basis"])]
    if p["warnings"]:
        parts += ["", "Warnings", *(f"  ! {w}" for w in p["warnings"])]
    return "\n".join(parts)


def _op_table(rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            r["op"],
            str(r["count"]),
            si(r["flop"], "FLOP"),
            si(r["bytes"], "B"),
            f"{r['time_s'] * 1e6:.0f}",
            f"{r['share']:.0%}",
            "-" if r["speed_of_light_frac"] is None else f"{min(r['speed_of_light_frac'], 9.99):.0%}",
            r["bound"],
            _rows(r),
        ]
        for r in rows
    ]
    return table(["op", "x", "FLOP", "bytes", "us", "share", "of SoL", "bound", "rows"], body, text=(0, 7, 8))


def _rows(r: Mapping[str, Any]) -> str:
    if "experts_touched" in r:
        return f"{r['rows']:.1f}/expert, {r['experts_touched']:.0f} experts"
    if "padded_rows" in r:
        return f"{r['rows']:.0f}->{r['padded_rows']:.0f}"
    return f"{r['rows']:.0f}" if "rows" in r else ""


def gpus_text(profiles: Sequence[GpuProfile]) -> str:
    rows = [
        [
            p.id,
            p.arch,
            f"{p.usable_memory_bytes / 1e9:.0f}",
            f"{p.bytes_per_s / 1e12:.2f}",
            *(_peak(p, d) for d in ("bf16", "fp8", "nvfp4")),
            p.link_kind,
        ]
        for p in profiles
    ]
    return table(["gpu", "arch", "GB usable", "TB/s", "bf16 TFLOP/s", "fp8", "nvfp4", "link"], rows, text=(0, 1, 7))


def _peak(p: GpuProfile, dtype: str) -> str:
    value = p.peak_flop_per_s.get(dtype)
    return "-" if value is None else f"{value / 1e12:.0f}"


def gpu_text(p: GpuProfile) -> str:
    """One GPU, each number with its source."""
    rows = []
    for key, source in p.sources.items():
        name, _, sub = key.partition(".")
        value = getattr(p, name, None)
        if sub and isinstance(value, Mapping):
            value = value.get(sub)
        if isinstance(value, (int, float)):
            rows.append([key, f"{value:.6g}", source.origin, source.date, source.reference[:90]])
    notes = "\n".join(wrap(f"- {n}") for n in p.notes)
    head = f"{p.name} ({p.id}), {p.arch}; aliases: {', '.join(p.aliases)}"
    body = table(["number (SI)", "value", "origin", "date", "source"], rows, text=(0, 2, 3, 4))
    return "\n\n".join(filter(None, (head, body, notes)))


def mapping_text(facts: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", mapping_text(value, indent + "  ")]
        elif isinstance(value, (list, tuple)):
            lines += [f"{indent}{key}:", *(f"{indent}  - {v}" for v in value)]
        else:
            lines.append(f"{indent}{key}: {value}")
    return "\n".join(lines)


def drafters_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The drafter catalogue, one line each; cautions below."""
    if not rows:
        return "No drafter is known for this model; n-gram and suffix look-up need none."
    body = [
        [
            _short(", ".join(r.get("targets") or ()) or r.get("family"), 40),
            r["kind"],
            _short(r.get("model"), 52),
            _short(r.get("layers")),
            _short(r.get("block")),
            _recommended(r.get("recommended_draft_len")),
            _short(r.get("license"), 16),
        ]
        for r in rows
    ]
    notes = dict.fromkeys(f"! {r.get('model') or r['kind']}: {w}" for r in rows for w in r.get("warnings", ()))
    return "\n".join([table(["target", "kind", "drafter", "layers", "block", "D", "licence"], body, text=(0, 1, 2, 6)), *notes])


def _short(value: object, width: int = 24) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _recommended(value: object) -> str:
    """Draft lengths a drafter's authors recommend: one, a range, or a tree."""
    if not isinstance(value, Mapping):
        return _short(value)
    if value.get("tree"):
        return "tree"
    low, high = value.get("low"), value.get("high")
    return f"{low}" if low == high else f"{low}-{high}"
