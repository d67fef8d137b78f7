"""What rounds cost beyond kernels: numbers by architecture, quantised LM heads, bands by draft length, and what binds the choice of D."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner import predict
from planner.bands import SPEEDUP_REGIMES, band, speedup_bands, speedup_regime
from planner.calibrate.rounds import on_arch
from planner.calibrate.ship import group_quantile
from planner.cases import Case
from planner.deployment import resolve
from planner.validate.binding import Choice, binding_rows, binding_summary, round_ratio, scatter
from planner.validate.rows import Sweep

GGUF = {"model": "Qwen/Qwen3.5-27B", "gpu": "rtx-5090", "engine": "llamacpp", "weights_dtype": "int4", "concurrency": 1, "context_len": 1024}
MTP = {"drafter": {"kind": "mtp"}, "draft_len": 3, "acceptance": {"acceptance_len": 3.0, "at_draft_len": 3}}


def test_llama_cpp_stores_the_lm_head_in_eight_bits() -> None:
    dep = resolve(Case(**GGUF, **MTP))
    assert dep.dtypes.weights["lm_head"] == "int8"
    assert dep.draft_plan.body is not None and dep.draft_plan.body.dtypes.weights["lm_head"] == "int8"  # MTP reads the target's own head
    assert resolve(Case(**GGUF | {"weights_dtype": "bf16", "gpu": "h200"})).dtypes.weights["lm_head"] == "bf16"
    by_class = {"mlp": "int4", "attn": "int4"}
    assert resolve(Case(**GGUF | {"weights_dtype": by_class})).dtypes.weights["lm_head"] == "int8"
    assert resolve(Case(**GGUF | {"weights_dtype": {**by_class, "lm_head": "bf16"}})).dtypes.weights["lm_head"] == "bf16"
    assert any("LM head in int8" in a for a in dep.assumptions)
    served = resolve(Case(**GGUF | {"engine": "vllm"}, **MTP))
    assert served.dtypes.weights["lm_head"] == "bf16"
    assert served.draft_plan.body is not None and served.draft_plan.body.dtypes.weights["lm_head"] == "bf16"
    eagle = resolve(Case(**GGUF, **MTP | {"drafter": {"kind": "eagle3"}}))
    assert eagle.draft_plan.body is not None and eagle.draft_plan.body.dtypes.weights["lm_head"] == "bf16"  # its own vocabulary


def test_numbers_apply_by_architecture() -> None:
    numbers = {"per_round_s": 1.0, "per_verified_token_s": 2.0, "per_verified_token_s@cdna": 3.0}
    assert on_arch(numbers, "hopper") == {"per_round_s": 1.0, "per_verified_token_s": 2.0}
    assert on_arch(numbers, "cdna4") == {"per_round_s": 1.0, "per_verified_token_s": 3.0}
    case = {"model": "Qwen/Qwen3-8B", "engine": "vllm", "concurrency": 16, "context_len": 1024, "drafter": {"kind": "eagle3"}, "draft_len": 4}
    for gpu, arch in (("h100", "hopper"), ("mi300x", "cdna3")):
        dep = resolve(Case(**case, gpu=gpu))
        assert dep.overheads["per_verified_token_s"] == dep.engine.overheads_on(arch)["per_verified_token_s"]


def test_the_speedup_band_follows_the_draft_length() -> None:
    assert [speedup_regime(d) for d in (0, 1, 2, 3, 4, 15)] == ["default", "draft-1", "draft-2-3", "draft-2-3", "draft-4-up", "draft-4-up"]
    grid = speedup_bands(np.arange(1, 8)[None, :, None])
    assert np.shape(grid.low) == (1, 7, 1)
    for i, d in enumerate(range(1, 8)):
        assert (np.ravel(grid.low)[i], np.ravel(grid.high)[i]) == tuple(band("speedup", speedup_regime(d)))
    width = {name: b.high - b.low for name in SPEEDUP_REGIMES for b in [band("speedup", name)]}
    assert width["draft-4-up"] < min(width["draft-1"], width["draft-2-3"])
    answer = predict(GGUF | MTP)
    assert np.log(answer.speedup_high / answer.speedup) == pytest.approx(band("speedup", "draft-2-3").high, abs=1e-6)


def test_group_quantile_weighs_groups() -> None:
    x = np.linspace(-1.0, 1.0, 101)
    assert group_quantile(x, np.full(101, "a"), 0.5) == pytest.approx(0.0, abs=1e-9)
    assert group_quantile(x, np.full(101, "a"), 0.9) == pytest.approx(0.8, abs=0.02)
    # a hundred rows of one group against four of another: a tenth and a fifth of the square roots' sum
    rows = np.concatenate([np.zeros(100), np.full(4, -1.0)])
    names = np.asarray(["long"] * 100 + ["short"] * 4)
    assert group_quantile(rows, names, 0.80) == pytest.approx(0.0, abs=1e-9)
    assert group_quantile(rows, names, 0.95) == pytest.approx(1.0, abs=1e-9)


def sweep(name: str, rates: dict[int, float], lengths: dict[int, float], group: str = "g") -> Sweep:
    arms = [{"D": d, "metric_value": v, "higher_is_better": True, "unit": "tok/s", "AL": lengths[d]} for d, v in rates.items()]
    row: dict[str, Any] = {"id": name, "group": group, "gpu": "H100", "n_gpus": 1, "drafter_kind": "eagle3", "concurrency": 8, "input_len": None}
    return Sweep(row | {"output_len": None, "arms": arms}, 8, False)


def test_a_loss_within_a_source_s_scatter_names_no_better_draft_length() -> None:
    lengths = {0: 1.0, 3: 2.0, 7: 3.0}
    sets = [sweep(str(i), {0: 1.0, 3: 1.5, 7: 1.5 * x}, lengths) for i, x in enumerate((0.8, 0.95, 1.02, 1.1))]
    assert round_ratio(sets[2], 7, 3) == pytest.approx(np.log(1.5 / 1.02))  # half more tokens a round at nearly the same rate
    assert scatter(sets[3], sets, 7, 3) == pytest.approx(np.std(np.log([0.8, 0.95, 1.02]), ddof=1)), "the others', not its own"
    assert scatter(sets[0], sets[:3], 7, 3) is None
    outlier = sweep("o", {0: 1.0, 3: 1.5, 7: 2.4}, lengths)
    assert scatter(outlier, [*sets, outlier], 7, 3) == scatter(outlier, sets, 7, 3)
    choices = [Choice(s, 3) for s in sets]
    rows = binding_rows(choices)  # only the last loses more than 3 %: 9 %, with a scatter of 13 % among the others
    assert [(r["sweeps"], r["chosen"], r["best"], r["within scatter"]) for r in rows] == [(1, "D = 3", "D = 7", 1)]
    other = sweep("x", {0: 1.0, 3: 1.5, 7: 3.0}, lengths, group="h")
    summary = binding_summary([*choices, Choice(other, 3)])
    assert [r["value"] for r in summary] == [0.6, 0.8]
    assert all(r["low"] <= r["value"] <= r["high"] for r in summary)
    assert Choice(other, 3).loss == pytest.approx(0.5) and Choice(other, 7).loss == 0.0
