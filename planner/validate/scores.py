"""Answers -> figures: errors of step times and kernels, regret of the chosen draft length, coverage of bands, simple rules beside them.

A row without an answer counts as the worst sensible one (error 100 %, off instead of the best D); it is never free.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from planner.acceptance.listed import list_pairs_left_out, lists_left_out
from planner.acceptance.survival import survival_from
from planner.acceptance.transfer import leave_out_table
from planner.cases import Prediction
from planner.errors import InputError
from planner.kernel_cases import kernel_time
from planner.prediction import predict_many
from planner.validate.binding import Choice, binding_rows, binding_summary
from planner.validate.published import published_rows
from planner.validate.rows import (
    Data,
    Sweep,
    acceptance_of,
    attention_cases,
    find_data,
    gemm_cases,
    serving_case,
    serving_rows,
    step_records,
    sweep_cases,
    sweeps,
)

Figures = dict[str, float]
ON_OFF_FRAC = 0.03
"""Off counts as right where it is the best arm or within 3 % of it."""


def quantile(values: Iterable[float], q: float) -> float:
    v = np.sort(np.asarray(list(values), dtype=np.float64))
    return float(v[min(len(v) - 1, int(q * len(v)))]) if len(v) else math.nan


def median(values: Iterable[float]) -> float:
    v = list(values)
    return float(np.median(v)) if v else math.nan


def interval(rows: Sequence[tuple[float, float, float]], predicted: Sequence[float] = ()) -> Figures:
    """rows of (low, high, truth): share covered by the 80 % band and mean interval score in log units (a wide band pays for its width).

    predicted: also the score of one constant band around the predictions that covers as many rows, the least a band must beat.
    """
    if not rows:
        return {"coverage": math.nan, "interval": math.nan}
    low, high, truth = np.log(np.asarray(rows, dtype=np.float64)).T
    outside = np.maximum(low - truth, 0.0) + np.maximum(truth - high, 0.0)
    out = {"coverage": float((outside == 0).mean()), "interval": float((high - low + 10.0 * outside).mean())}
    if len(predicted):
        error = np.abs(truth - np.log(np.asarray(predicted, dtype=np.float64)))
        half = float(np.quantile(error, out["coverage"]))
        out["interval_constant"] = float((2.0 * half + 10.0 * np.maximum(error - half, 0.0)).mean())
    return out


def _answers(cases: Sequence[Mapping[str, Any]]) -> dict[str, Prediction]:
    found = zip(cases, predict_many(cases), strict=True)
    return {str(c["id"]): a for c, a in found if isinstance(a, Prediction)}


# ---------------------------------------------------------------- served steps
def score_serving(data: Data) -> dict[str, Any]:
    """TPOT of served decode steps without speculation; worst groups first, the ratio at four times the concurrency."""
    rows = serving_rows(data)
    got = _answers([serving_case(data, r) for r in rows])
    errors, bands, points, first_token, groups = [], [], [], [], defaultdict[tuple[str, ...], list[float]](list)
    series: dict[tuple[str, ...], dict[int, tuple[float, float]]] = defaultdict(dict)
    for r in rows:
        truth, answer = float(r["silicon_tpot_ms"]) / 1e3, got.get(r["id"])
        error = abs(answer.tpot_s / truth - 1.0) if answer else 1.0
        errors.append(error)
        groups[r["model_family"], r["system"], r["backend"]].append(error)
        if answer:
            bands.append((answer.tpot_low_s, answer.tpot_high_s, truth))
            points.append(answer.tpot_s)
            if answer.ttft_s and r["silicon_ttft_ms"]:
                first_token.append(abs(answer.ttft_s * 1e3 / float(r["silicon_ttft_ms"]) - 1.0))
            key = tuple(
                r[k]
                for k in (
                    "model_path",
                    "system",
                    "backend",
                    "backend_version",
                    "precision",
                    "isl",
                    "osl",
                    "gpus_fixed",
                    "attention_dp_fixed",
                    "moe_ep_size",
                )
            )
            series[key][int(float(r["concurrency"]))] = (answer.tpot_s, truth)
    ratios = [abs((s[4 * c][0] / s[c][0]) / (s[4 * c][1] / s[c][1]) - 1.0) for s in series.values() for c in s if 4 * c in s]
    figures = {
        "rows": len(rows),
        "refused": len(rows) - len(got),
        "median": median(errors),
        "p90": quantile(errors, 0.9),
        "by_group": median(median(v) for v in groups.values()),
        "ratio_median": median(ratios),
        "ratio_p90": quantile(ratios, 0.9),
        "ttft_median": median(first_token),
        **interval(bands, points),
    }
    return {"figures": figures, "groups": _worst(groups)}


def _worst(groups: Mapping[tuple[str, ...], list[float]]) -> list[dict[str, Any]]:
    rows = [{"group": " / ".join(k), "rows": len(v), "median": median(v), "p90": quantile(v, 0.9)} for k, v in groups.items()]
    return sorted(rows, key=lambda r: -float(r["median"]))


# ---------------------------------------------------------------- kernels
def score_kernels(rows: Sequence[tuple[tuple[str, ...], dict[str, Any], float]]) -> dict[str, Any]:
    """Median over stacks of each stack's median and p90 error."""
    groups, bands, refused = defaultdict[tuple[str, ...], list[float]](list), [], 0
    for stack, case, truth in rows:
        answer = kernel_time(case)
        groups[stack].append(abs(answer["time_s"] / truth - 1.0))
        bands.append((answer["low_s"], answer["high_s"], truth))
    figures = {
        "rows": len(rows),
        "refused": refused,
        "stacks": len(groups),
        "median": median(median(v) for v in groups.values()),
        "p90": median(quantile(v, 0.9) for v in groups.values()),
        **interval(bands),
    }
    return {"figures": figures, "groups": _worst(groups)}


# ---------------------------------------------------------------- choice of draft length
Rule = Callable[[Sweep], int]


def score_sweeps(data: Data, *, baseline: bool = True, one_al: bool = False) -> dict[str, Any]:
    """Regret of the planner's D, on/off calls, speedup and absolute errors, bands; sweeps that cannot be used counted by reason."""
    rows, lacking = sweeps(data)
    cases = [c for s in rows for c in sweep_cases(data, s, baseline=baseline, one_al=one_al)]
    got = _answers(cases)
    regrets, on, off, off_strict, speedups, absolute, times, bands, points = [], [], [], [], [], [], [], [], []
    groups = defaultdict[tuple[str, ...], list[float]](list)
    choices: list[Choice] = []
    refused = 0
    for s in rows:
        answers = {int(a["D"]): got.get(f"{s.id}|{a['D']}") for a in s.arms}
        if any(a is None for a in answers.values()):
            refused, chosen = refused + 1, 0
        else:
            rate = {d: (1.0 / a.tpot_s if s.latency else a.tokens_per_s) for d, a in answers.items() if a is not None}
            chosen = max(rate, key=lambda d: rate[d])
            for arm in s.arms:
                d, answer = int(arm["D"]), answers[int(arm["D"])]
                if d and answer is not None:
                    truth = s.value(arm) / s.value(s.off)
                    speedups.append(abs(rate[d] / rate[0] / truth - 1.0))
                    bands.append((answer.speedup_low, answer.speedup_high, truth))
                    points.append(rate[d] / rate[0])
                    unit = (arm["unit"] or "").lower()
                    if "tok/s" in unit and "user" not in unit:
                        off_by = rate[d] / s.value(arm)  # truth over prediction, as a factor on TPOT
                        absolute.append(abs(off_by - 1.0))
                        times.append((answer.tpot_low_s / answer.tpot_s, answer.tpot_high_s / answer.tpot_s, off_by))
        choices.append(Choice(s, chosen))
        regret = s.regret(chosen)
        regrets.append(regret)
        groups[s.group,].append(regret)
        if s.value(s.off) >= (1.0 - ON_OFF_FRAC) * max(map(s.value, s.arms)):
            widest = answers[max(int(a["D"]) for a in s.arms)]
            doubtful = widest is not None and widest.speedup_low < 1.0 < widest.speedup_high
            off.append(regret <= ON_OFF_FRAC or doubtful)
            off_strict.append(regret <= ON_OFF_FRAC)
        else:
            on.append(chosen > 0)
    by_group = float(np.mean([np.mean(v) for v in groups.values()]))
    rule = constant_rule_by_group(rows)
    figures = {
        "rows": len(rows),
        "refused": refused,
        "mean": float(np.mean(regrets)),
        "p90": quantile(regrets, 0.9),
        "within_3": float(np.mean([r <= 0.03 for r in regrets])),
        "by_group": by_group,
        "rule_by_group": rule,
        "skill": 1.0 - by_group / rule,
        "speedup_median": median(speedups),
        "speedup_p90": quantile(speedups, 0.9),
        "absolute_median": median(absolute),
        "absolute_coverage": interval(times)["coverage"],
        "on": float(np.mean(on)),
        "off": float(np.mean(off)) if off else math.nan,
        "off_strict": float(np.mean(off_strict)) if off_strict else math.nan,
        "n_off": len(off),
        **interval(bands, points),
    }
    worst = [{"group": k[0], "rows": len(v), "mean": float(np.mean(v))} for k, v in groups.items()]
    return {"figures": figures, "groups": sorted(worst, key=lambda r: -float(r["mean"])), "lacking": dict(lacking), "choices": choices}


def constant_rule_by_group(rows: Sequence[Sweep]) -> float:
    """By-group mean regret of AL/(1 + a + b D) with a and b chosen on the other groups: a planner without any model of cost."""
    a, b = (x.ravel()[:, None] for x in np.meshgrid(np.arange(17) / 20.0, np.arange(21) / 40.0, indexing="ij"))
    groups = defaultdict[str, list[np.ndarray]](list)
    for s in rows:
        d = np.asarray([float(x["D"]) for x in s.arms])
        gain = np.where(d > 0, np.asarray([acceptance_of(x) for x in s.arms]) / (1.0 + a + b * d), 1.0)
        values = np.asarray([s.value(x) for x in s.arms])
        groups[s.group].append(1.0 - values[gain.argmax(axis=1)] / values.max())
    mean = {g: np.mean(v, axis=0) for g, v in groups.items()}
    total = np.sum(list(mean.values()), axis=0)
    return float(np.mean([m[int(np.argmin(total - m))] for m in mean.values()]))


def simple_rules(data: Data) -> list[dict[str, Any]]:
    """What rules without a model of cost reach on the same sweeps, given the measured AL."""
    rows, _ = sweeps(data)

    def nearest(s: Sweep, wanted: float) -> int:
        drafted = [int(a["D"]) for a in s.arms if a["D"]]
        return min(drafted, key=lambda d: abs(d - wanted))

    def rho(s: Sweep) -> int:
        layers = float((s.row["drafter"] or {}).get("layers") or 1.0)
        total = 40.0
        gain = {int(a["D"]): acceptance_of(a) / (1.0 + layers / total * a["D"]) if a["D"] else 1.0 for a in s.arms}
        return max(gain, key=lambda d: gain[d])

    named: dict[str, Rule] = {
        "always off": lambda s: 0,
        "always D = 3": lambda s: nearest(s, 3),
        "always D = 7": lambda s: nearest(s, 7),
        "always the largest D": lambda s: nearest(s, 1e9),
        "AL/(1 + rho D), rho = draft layers / 40": rho,
        "AL/(1.2 + 0.1 D), tuned on these rows": lambda s: max(
            ((acceptance_of(a) / (1.2 + 0.1 * a["D"]) if a["D"] else 1.0), int(a["D"])) for a in s.arms
        )[1],
    }
    out = []
    for name, rule in named.items():
        regrets = [s.regret(rule(s)) for s in rows]
        out.append(
            {"rule": name, "mean": float(np.mean(regrets)), "p90": quantile(regrets, 0.9), "within_3": float(np.mean([r <= 0.03 for r in regrets]))}
        )
    return out


# ---------------------------------------------------------------- steps
def score_steps(data: Data) -> dict[str, Any]:
    """Measured plain steps and rounds where GPU, config, batch and length are known (t_ar and t_round, milliseconds in the source)."""
    from planner.validate.rows import dtype_word, engine_word

    records, lacking = step_records(data)
    cases, truths = [], {}
    for r in records:
        n = int(r["n_gpus"] or 1)
        base = {"model": str(data.configs / r["config"]), "gpu": r["gpu"], "n_gpus": n, "tp": int(r["tp"] or n), "engine": engine_word(r["engine"])}
        if (w := dtype_word(r.get("weights_dtype"))) and w != "mxfp4":
            base["weights_dtype"] = w
        for k, p in enumerate(r["points"]):
            length = p.get("input_len") or p.get("context_len")
            if p["what"] not in ("t_ar", "t_round") or not p.get("batch") or not length or not p.get("ms"):
                lacking["point lacks batch, length or time"] += 1
                continue
            d = int(p.get("D") or 0)
            ident = f"{r['id']}|{k}"
            case = {**base, "id": ident, "concurrency": int(p["batch"]), "context_len": int(length), "draft_len": d}
            if d:
                case |= {"drafter": {"kind": r["drafter_kind"]}, "acceptance": {"acceptance_len": 1.0 + d / 2.0, "at_draft_len": d}}
            cases.append(case)
            truths[ident] = (p["what"], float(p["ms"]) / 1e3)
    got = _answers(cases)
    groups = defaultdict[tuple[str, ...], list[float]](list)
    for ident, (what, truth) in truths.items():
        answer = got.get(ident)
        groups[what,].append(abs(answer.round_s / truth - 1.0) if answer else 1.0)
    return {"figures": {"rows": len(truths), "refused": len(truths) - len(got)}, "groups": _worst(groups), "lacking": dict(lacking)}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def carried_from_more(rows: Sequence[Mapping[str, Any]], most: int = 16) -> list[dict[str, Any]]:
    """Acceptance carried from more than one AL, by the shipped laws: from two ALs to each other D of a curve, and from the per-position list
    of one D to smaller and to larger D. Errors are the mean over a curve of |AL predicted / measured - 1|, then median and p90 over curves."""
    found: dict[str, list[float]] = {"two ALs": [], "a list, to smaller D": [], "a list, to larger D": []}
    for row in rows:
        points = sorted((int(p["D"]), float(p["AL"]), p.get("per_position")) for p in row["points"] if p["D"] and p["D"] <= most)

        def errors(form: Mapping[str, Any], to: Sequence[tuple[int, float, Any]], kind: str = row["drafter_kind"]) -> list[float]:
            curve = survival_from(form, kind=kind, max_draft_len=most)
            return [abs(float(curve.acceptance_len(d)) / al - 1.0) for d, al, _ in to]

        by_source: dict[str, list[float]] = {name: [] for name in found}
        for a, b in combinations(points, 2):
            form = {"points": [{"draft_len": d, "acceptance_len": al} for d, al, _ in (a, b)]}
            with suppress(InputError):  # two measured ALs that contradict each other are refused
                by_source["two ALs"] += errors(form, [p for p in points if p not in (a, b)])
        for d, _, rates in points:
            if rates:
                by_source["a list, to smaller D"] += errors({"survival_prob": list(rates), "at_draft_len": d}, [p for p in points if p[0] < d])
                by_source["a list, to larger D"] += errors({"survival_prob": list(rates), "at_draft_len": d}, [p for p in points if p[0] > d])
        for name, values in by_source.items():
            if values:
                found[name].append(float(np.mean(values)))
    return [{"from": name, "curves": len(v), "median": float(np.median(v)), "p90": float(np.quantile(v, 0.9))} for name, v in found.items() if v]


def validate_all(root: Path | None = None, *, refit: bool = False) -> dict[str, Any]:
    """Every score on the packaged rows. refit: also fit from defaults with groups left out (planner.calibrate)."""
    data = find_data(root)
    result: dict[str, Any] = {
        "serving": score_serving(data),
        "gemm": score_kernels(gemm_cases(data)),
        "attention": score_kernels(attention_cases(data)),
        "sweeps": score_sweeps(data),
        "sweeps_nobase": score_sweeps(data, baseline=False),
        "sweeps_one_al": score_sweeps(data, one_al=True),
        "steps": score_steps(data),
        "published": published_rows(data),
        "rules": simple_rules(data),
        "acceptance": leave_out_table(_json_lines(data.truth / "al_transfer_dev.jsonl")),
        "acceptance_lists": lists_left_out(_json_lines(data.truth / "al_transfer_dev.jsonl")),
        "acceptance_list_pairs": list_pairs_left_out(_json_lines(data.truth / "al_transfer_dev.jsonl")),
        "acceptance_more": carried_from_more(_json_lines(data.truth / "al_transfer_dev.jsonl")),
    }
    choices = [result[name].pop("choices") for name in ("sweeps", "sweeps_nobase", "sweeps_one_al")][0]
    result |= {"binding": binding_rows(choices), "binding_summary": binding_summary(choices)}
    if refit:
        from planner.calibrate.engine import left_out
        from planner.calibrate.rounds import choices_left_out, rounds_left_out
        from planner.calibrate.ship import shipped

        result["left_out"] = left_out(data) + rounds_left_out(data)
        result["choices_left_out"] = choices_left_out(data)
        result["refitted"] = shipped(data)
    return result
