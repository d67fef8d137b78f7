"""Published comparisons of draft lengths: what the planner says, uncalibrated, beside what was measured. Figures in published_cases.json.

Arms at the same concurrency and lengths form a group; the first one (no drafts) is what gains are taken against, where it was measured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from planner.cases import Prediction
from planner.prediction import predict_many
from planner.validate.rows import Data

PLACE = ("concurrency", "context_len", "input_len", "output_len")
CLOSE_FRAC = 0.03
"""Gains this near to 1 are neither on nor off."""


def published_rows(data: Data) -> list[dict[str, Any]]:
    """[{"case", "at", "arm", "measured", "predicted", "error", "measured_gain", "predicted_gain", "band", "call"}], one per arm.

    call: right or wrong about the arm being a gain or a loss, close where the measured gain is within 3 % of none, - without a plain arm.
    """
    cases = json.loads((data.truth / "published_cases.json").read_text(encoding="utf-8"))["cases"]
    return [row for case in cases for row in _rows(data, case)]


def _rows(data: Data, case: Mapping[str, Any]) -> list[dict[str, Any]]:
    arms, latency = case["arms"], case["metric"] == "tpot_ms"
    answers = predict_many([_question(data, case["deployment"], arm) for arm in arms])
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, arm in enumerate(arms):
        groups[tuple(arm.get(k) for k in PLACE)].append(i)
    rows: list[dict[str, Any]] = []
    for members in groups.values():
        off = next((i for i in members if arms[i]["draft_len"] == 0 and not arms[i].get("k0_tier")), None)
        for i in members:
            rows.append(_row(case, arms[i], answers[i], latency) | _gain(arms, answers, i, off, latency))
    return rows


def _question(data: Data, deployment: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {**deployment, "model": str(data.configs / f"{deployment['model']}_config.json")}
    asked |= {k: arm[k] for k in (*PLACE, "draft_len", "k0_tier") if k in arm}
    if arm["draft_len"]:
        asked["acceptance"] = {"acceptance_len": arm["acceptance_len"], "at_draft_len": arm["draft_len"]}
    return asked


def _value(answer: Prediction, latency: bool) -> float:
    return answer.tpot_s * 1e3 if latency else answer.tokens_per_s


def _row(case: Mapping[str, Any], arm: Mapping[str, Any], answer: object, latency: bool) -> dict[str, Any]:
    place = f"context {arm['context_len']}" if "context_len" in arm else f"{arm['input_len']} in, {arm['output_len']} out"
    unit = "ms" if latency else "tok/s"
    said = _value(answer, latency) if isinstance(answer, Prediction) else None
    return {
        "case": f"[{case['id']}]({case['url']})",
        "at": f"{arm['concurrency']} requests, {place}",
        "arm": "K = 0 tier" if arm.get("k0_tier") else f"D = {arm['draft_len']}",
        "measured": f"{arm['measured']:.4g} {unit}",
        "predicted": "no answer" if said is None else f"{said:.4g} {unit}",
        "error": 1.0 if said is None else abs(said / arm["measured"] - 1.0),
    }


def _gain(arms: list[Mapping[str, Any]], answers: list[Any], i: int, off: int | None, latency: bool) -> dict[str, str]:
    nothing = {"measured gain": "-", "predicted gain": "-", "call": "-"}
    if off is None or i == off or not isinstance(answers[i], Prediction) or not isinstance(answers[off], Prediction):
        return nothing
    sign = -1.0 if latency else 1.0
    truth = (arms[i]["measured"] / arms[off]["measured"]) ** sign
    said = (_value(answers[i], latency) / _value(answers[off], latency)) ** sign
    call = "close" if abs(truth - 1.0) <= CLOSE_FRAC else "right" if (truth > 1.0) == (said > 1.0) else "wrong"
    return {
        "measured gain": f"{truth:.2f}x",
        "predicted gain": f"{said:.2f}x [{answers[i].speedup_low:.2f}-{answers[i].speedup_high:.2f}]",
        "call": call,
    }
