"""The harness: statistics of arms, choices and gaps, the journal, the page; a small run from end to end."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.errors import InputError
from planner.report import verification
from planner.verify import costs, grid, harness
from planner.verify.arms import Arm, Measured, Visit, any_match_prob, drift_frac, match_prob, measure, reference_power, survival_prob
from planner.verify.compare import Predicted, Report, choices, gap
from planner.verify.family import load_family
from planner.verify.journal import VisitJournal
from planner.verify.nets.transformer import Transformer
from planner.verify.prompts import PromptSet, builtin_prompt_set, read_prompts

OFF = Arm("small", "code", 1)
AGAIN = Arm("small", "code", 1, copy=1)
D2, D4 = (Arm("small", "code", 1, "eagle3", d) for d in (2, 4))


def visit(rounds: int = 10, accepted: int = 15, seconds: float = 1.0) -> Visit:
    return Visit(rounds, rounds, accepted, (rounds, rounds), (10, 5), 0.3 * seconds, 0.6 * seconds, 0.1 * seconds)


def seen(rate: float, length: float = 2.0, round_s: float = 0.1) -> Measured:
    return Measured(length, length, length, round_s, round_s, round_s, 0.03, 0.06, 0.01, round_s / length, rate, rate * 0.98, rate * 1.02, 3, 30)


def said(rate: float, length: float = 2.0, round_s: float = 0.1) -> Predicted:
    return Predicted(length, round_s, 0.03, 0.06, 0.01, round_s / length, rate, 1.0, 0.9, 1.1)


def test_an_arms_numbers_pool_acceptance_and_outvote_a_disturbed_visit() -> None:
    arm = dataclasses.replace(D2, num_seqs=4)
    m = measure(arm, [visit(), visit(20, 20, 3.0), visit(10, 10, 9.0)])
    assert m.acceptance_len == pytest.approx(1 + 45 / 40)
    assert m.round_s == pytest.approx(3.0 / 20)  # the median of 0.1, 0.15 and 0.9
    assert m.tpot_s == pytest.approx(m.round_s / m.acceptance_len)
    assert m.tokens_per_s == pytest.approx(4 * m.acceptance_len / m.round_s)
    assert m.draft_s + m.verify_s + m.rest_s == pytest.approx(m.round_s)
    assert m.tokens_per_s_low <= m.tokens_per_s <= m.tokens_per_s_high
    with pytest.raises(ValueError, match="never visited"):
        measure(arm, [])


def test_survival_counts_rounds_without_a_draft_as_not_accepted() -> None:
    visits = [Visit(10, 10, 8, (4, 4), (4, 4), 0, 1, 0), Visit(10, 10, 2, (2, 1), (1, 1), 0, 1, 0)]
    assert survival_prob(visits, 2) == [0.25, 0.25]
    assert survival_prob(visits, 2, of_drafting=True) == [pytest.approx(5 / 6), pytest.approx(5 / 6)]
    assert match_prob(visits) == pytest.approx(0.3)


def test_rounds_are_scaled_by_as_much_of_the_machine_s_speed_as_they_follow() -> None:
    """Round times that go with the square root of the reference work's are scaled so, and lie on one value then."""
    rng = np.random.default_rng(3)
    repeats = []
    for level in (1e-3, 5e-3, 2e-2):
        speeds = np.exp(rng.normal(0.0, 0.2, 12))
        repeats.append([dataclasses.replace(visit(seconds=10 * level * x**0.5), reference_s=2e-3 * x) for x in speeds])
    power = reference_power(repeats)
    assert power == pytest.approx(0.5)
    even = [v.at_reference(2e-3, power).total_s for v in repeats[0]]
    assert even == pytest.approx([even[0]] * 12)
    assert reference_power([r[:4] for r in repeats]) == 1.0, "too few repeats tell nothing"
    assert reference_power([[dataclasses.replace(v, reference_s=1.0) for v in r] for r in repeats]) == 1.0
    against = [[dataclasses.replace(v, reference_s=1.0 / v.reference_s) for v in r] for r in repeats]
    assert reference_power(against) == 0.0


def test_a_journal_scales_by_target_and_batch(tmp_path: Path) -> None:
    journal = VisitJournal(tmp_path / "v.jsonl", TINY)
    for n, power in ((1, 1.0), (8, 0.0)):
        for i in range(24):
            x = 1.0 + 0.1 * (i % 5)
            row = {"stage": "arms", "arm": dataclasses.asdict(Arm("small", "code", n)), "index": i}
            journal.add(row | {"visit": dataclasses.replace(visit(seconds=x**power), reference_s=x).to_json()})
    assert journal.reference_powers() == {("small", 1, None): pytest.approx(1.0), ("small", 8, None): pytest.approx(0.0, abs=1e-9)}
    for seen_visits in journal.visits("arms").values():
        times = [v.total_s for v in seen_visits.values()]
        assert times == pytest.approx([times[0]] * 24)
    kept = VisitJournal(tmp_path / "v.jsonl", TINY)
    assert kept.visits("arms") == journal.visits("arms")
    kept.keep(kept.rows[:5])
    assert VisitJournal(tmp_path / "v.jsonl", TINY).rows == kept.rows and len(kept.rows) == 5


def test_a_visit_survives_its_file() -> None:
    assert Visit.from_json(json.loads(json.dumps(visit().to_json()))) == visit()


def test_regret_is_what_the_recommended_draft_length_loses() -> None:
    measured = {OFF: seen(100), AGAIN: seen(103), D2: seen(120), D4: seen(150)}
    predicted = {OFF: said(100), AGAIN: said(100), D2: said(140), D4: said(130)}
    (choice,) = choices(measured, predicted)
    assert (choice.recommended_draft_len, choice.best_draft_len) == (2, 4)
    assert choice.regret_frac == pytest.approx(0.2) and choice.on_off_right and choice.noise_frac == pytest.approx(0.03)
    assert choice.on_off_clear
    bare = choices({a: m for a, m in measured.items() if a != AGAIN}, predicted)[0]
    assert bare.on_off_clear and math.isnan(bare.noise_frac), "without a duplicate nothing says that they are near"
    other = {Arm("small", "prose", 1): seen(100), Arm("small", "prose", 1, copy=1): seen(130)}
    beside = choices({a: m for a, m in (measured | other).items() if a != AGAIN} | {D2: seen(120), D4: seen(110)}, predicted)[0]
    assert not beside.on_off_clear, "20 % apart, and the run's duplicates differ by 30 %"
    near = choices(measured | {D2: seen(102), D4: seen(101)}, predicted)[0]
    assert near.on_off_right and not near.on_off_clear, "2 % apart where duplicates differ by 3 %"
    off = choices(measured, predicted | {D2: said(90), D4: said(80)})[0]
    assert off.recommended_draft_len == 0 and off.regret_frac == pytest.approx(1 / 3) and not off.on_off_right
    assert drift_frac(measured) == {"small/code/1": pytest.approx(0.03)}


def test_a_gap_is_acceptance_or_cost() -> None:
    assert gap(said(1, length=3.0), seen(1, length=2.0))["why"] == "acceptance"
    slow = gap(dataclasses.replace(said(1), round_s=0.2, verify_s=0.16), seen(1))
    assert slow["why"] == "cost: verify and the rest" and slow["cost_log"] == pytest.approx(-math.log(2))
    draft = gap(dataclasses.replace(said(1), round_s=0.15, draft_s=0.08), seen(1))
    assert draft["why"] == "cost: draft"
    assert draft["tokens_per_s_log"] == pytest.approx(draft["acceptance_log"] + draft["cost_log"])


@pytest.fixture
def report() -> Report:
    measured = {OFF: seen(100, 1.0), AGAIN: seen(103, 1.0), D2: seen(120), D4: seen(150)}
    predicted = {OFF: said(100, 1.0), AGAIN: said(100, 1.0), D2: said(140), D4: said(130)}
    return Report("builtin", measured, predicted, choices(measured, predicted), True, "12 outputs identical", ("a note",))


def test_json_keeps_the_contract(report: Report) -> None:
    out = report.to_json()
    for key in ("cells", "mean_regret_frac", "max_regret_frac", "on_off_right_frac", "al_error_median", "round_error_median", "lossless"):
        assert key in out
    cell = next(c for c in out["cells"] if c["draft_len"] == 4)
    for side in ("measured", "predicted"):
        for key in ("acceptance_len", "round_s", "tpot_s", "tokens_per_s", "speedup"):
            assert key in cell[side], (side, key)
    assert cell["measured"]["speedup"] == pytest.approx(1.5)
    assert cell["measured"]["speedup_low"] < 1.5 < cell["measured"]["speedup_high"]
    assert json.loads(json.dumps(out, allow_nan=False)) == out


def test_text_fits_80_columns_and_the_page_holds_every_arm(report: Report) -> None:
    out = report.to_json()
    text = verification.text(out)
    assert max(map(len, text.splitlines())) <= 80
    assert "20.0 %" in text and "identical" in text
    page = verification.html(out)
    assert page.count("<tr>") == 2 + 1 + 4 and "src=" not in page.split("<main>")[0]
    assert "in no choice do the two differ" in verification.headline({**out, "on_off_clear_count": 0, "on_off_right_clear_frac": None})
    far = {**out, "cells": [{**c, "gap": {**c["gap"], "why": "cost", "tokens_per_s_log": 0.5}} for c in out["cells"]]}
    assert "--recalibrate" in verification.advice(far)[0] and "--from-bench" in verification.advice({**far, "engine": "vllm"})[0]
    assert "OUTPUTS DIFFER" in verification.headline({**out, "lossless": False})
    assert "not checked" in verification.headline({**out, "lossless": None, "lossless_detail": ""})


# ---- prompts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('{"question_id": 1, "category": "coding", "turns": ["a", "b"]}\n{"category": "qa", "turns": ["c"]}\n', [("coding", "a"), ("qa", "c")]),
        ('[{"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}]', [("prompts", "hi")]),
        ('{"prompt": "p", "category": "code"}\n', [("code", "p")]),
        ('{"messages": [{"role": "user", "content": "m"}]}', [("prompts", "m")]),
        ("one line\nanother line\n", [("prompts", "one line"), ("prompts", "another line")]),
    ],
)
def test_prompt_files_are_recognised_by_content(tmp_path: Path, content: str, rows: list[tuple[str, str]]) -> None:
    (tmp_path / "p").write_text(content)
    assert list(read_prompts(tmp_path / "p").rows) == rows


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no prompts"),
        ('{"prompt": "a"}\n{broken', "line 2"),
        ('{"category": "x"}', "no prompt text"),
        ("[1]", "not a prompt"),
        ("[{", "not valid JSON"),
    ],
)
def test_bad_prompt_files_name_the_place(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(InputError, match=words):
        read_prompts(tmp_path / "p")


def test_calibration_text_is_not_verification_text() -> None:
    prompts = builtin_prompt_set()
    used = {t for c in prompts.counts() for t in prompts.take(c, 8)}
    assert not used.intersection(prompts.others(8, 8))
    with pytest.raises(InputError, match="no prompts of this category"):
        PromptSet((("code", "x"),), "file").take("prose", 1)


# ---- the run -------------------------------------------------------------------------------------------------------------------

TINY = harness.Spec((("small", ("structured",), (1, 2), ("eagle3", "ngram")),), draft_lens=(1, 4), output_len=8, prompts=2, kernel_budget_s=8.0)


def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    """Real engine, real clocks: what is asserted is that every part is there and consistent, not how fast this machine is."""
    steps: list[str] = []
    progress = lambda what, done, total: steps.append(what)
    out = tmp_path / "profile.json"
    report = harness.verify_builtin(TINY, tmp_path / "run", builtin_prompt_set(), progress, out)
    result = report.to_json()
    assert len(result["cells"]) == 2 * (2 + 2 * 2) and len(result["choices"]) == 4
    assert report.lossless is True and "wrong" in report.lossless_detail
    assert {"kernels", "calibration", "acceptance", "arms"} <= set(steps)
    for arm, p in report.predicted.items():
        assert p.round_s > 0 and 1.0 <= p.acceptance_len <= 1 + arm.draft_len
        assert p.round_s == pytest.approx(p.draft_s + p.verify_s + p.overhead_s, rel=0.01)
    longest = [a for a in report.measured if a.draft_len == 4 and a.num_seqs == 2]
    assert all(report.predicted[a].acceptance_len == pytest.approx(report.measured[a].acceptance_len, rel=1e-6) for a in longest)
    assert json.loads(out.read_text())["calibration"]["overheads"]["builtin"]

    visits = (tmp_path / "run" / "visits.jsonl").read_text()
    before = len(steps)
    again = harness.verify_builtin(TINY, tmp_path / "run", builtin_prompt_set(), progress)
    assert set(steps[before:]) <= {"kernels"} and again.measured == report.measured and again.lossless is True

    (tmp_path / "run" / "visits.jsonl").write_text("\n".join(visits.splitlines()[:-3]) + '\n{"stage": "arms", "a')
    resumed = harness.verify_builtin(TINY, tmp_path / "run", builtin_prompt_set(), progress)
    assert resumed.measured.keys() == report.measured.keys()

    with pytest.raises(InputError, match="another run"):
        harness.verify_builtin(dataclasses.replace(TINY, output_len=9), tmp_path / "run", builtin_prompt_set(), progress)


def test_a_run_that_is_out_of_time_has_seen_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit passes before the first visit: each arm is visited at least once, the rest is said to be missing and made when asked again."""
    short = dataclasses.replace(TINY, limit_s=0.0)

    def run() -> tuple[Report, int]:
        report = harness.verify_builtin(short, tmp_path, builtin_prompt_set(), lambda *_: None)
        return report, len((tmp_path / "visits.jsonl").read_text().splitlines()) - 1

    report, seen = run()
    assert len(report.measured) == 12 and any(n.startswith("out of time: ") for n in report.notes)
    assert run()[1] == seen, "every arm was seen: no time, no visit"
    monkeypatch.setattr(harness.time, "monotonic", lambda: 0.0)
    whole, every = run()
    assert seen < every / 3 and whole.measured.keys() == report.measured.keys()
    assert not any(n.startswith("out of time: ") for n in whole.notes)


def test_acceptance_is_read_at_the_largest_batch_of_all_targets(tmp_path: Path) -> None:
    blocks = (("small", ("code",), (1, 8), ("external",)), ("inflated", ("code",), (1,), ("external", "eagle3")))
    spec = harness.Spec(blocks, draft_lens=(1, 4))
    run = harness.Harness(spec, tmp_path, builtin_prompt_set(), lambda *_: None)
    assert {(a.target, a.drafter, a.num_seqs) for a in run._acceptance_arms()} == {("small", "external", 8), ("small", "eagle3", 1)}


def test_targets_of_one_run_keep_their_own_kernels(tmp_path: Path) -> None:
    """Targets on one machine differ in their GEMM curves; whichever is fitted first must not lend its curve to the other."""
    records = [r for r in costs.measure_kernels(("small",), 4.0, tmp_path / "raw.jsonl") if r.get("op") != "gemm"]
    for p in costs.kernel_points(("small", "inflated", "inflated-int8")):
        if p.op == "gemm":  # 10 GB/s for weights and 40 GFLOP/s on top; a wide float32 product takes twice that from the second row on
            a = dict(p.args)
            size = {"fp32": 4, "int8/bf16": 1}[a["dtype"]]
            slow = 2.0 if size == 4 and a["m"] > 1 and a["n"] * a["k"] > 1e6 else 1.0
            seconds = slow * a["n"] * a["k"] * (size / 1e10 + 2 * a["m"] / 4e10)
            records.append({"kind": "point", "key": p.key, "op": "gemm", "args": a, "held_out": p.held_out, "index": 0, "samples_s": [seconds] * 5})
    targets = ("small", "inflated", "inflated-int8")
    profiles = {t: costs.profile_of(records, t) for t in targets}

    def pass_s(target: str, draft_len: int) -> float:
        return costs.terms(costs.deployment(profiles[target], tmp_path, target, "external"), Arm(target, "x", 1, "external", draft_len), 150.0).rest_s

    there = {(t, d): pass_s(t, d) for t in targets for d in (1, 7)}
    back = {(t, d): pass_s(t, d) for t in reversed(targets) for d in (7, 1)}
    assert there == back
    assert there["inflated", 1] > 3.0 * there["inflated-int8", 1] > 3.0 * there["small", 1]
    body = 4 * 3 * 12288 * 192  # weights of the wide MLPs
    assert there["inflated", 7] == pytest.approx(2.0 * body * (4 / 1e10 + 16 / 4e10), rel=0.15)
    assert there["inflated-int8", 7] == pytest.approx(body * (1 / 1e10 + 16 / 4e10), rel=0.2)


def test_overheads_are_recovered_from_times_that_follow_the_model(tmp_path: Path) -> None:
    """Synthetic times with known overheads: the fit must return what the planner's own model needs to reproduce them."""
    profile = costs.profile_of(costs.measure_kernels(("small",), 8.0, tmp_path / "raw.jsonl"), "small")
    truth = {"per_step_s": 4e-4, "per_layer_s": 2e-4, "per_seq_s": 5e-5, "per_draft_pass_s": 8e-4, "per_verified_token_s": 3e-5}
    truth |= {"draft_base_s": 3e-4, "draft_per_seq_s": 4e-5}
    arms = [Arm("small", "x", n) for n in (1, 4, 8)] + [Arm("small", "x", n, "eagle3", d) for n in (1, 8) for d in (1, 8)]

    def priced(arm: Arm, numbers: Mapping[str, float]) -> tuple[float, float]:
        t = costs.terms(costs.deployment(profile, tmp_path, "small", arm.drafter), arm, 150)
        draft_s = t.draft_s + sum(d * numbers.get(n, 0.0) for n, d in t.by_draft.items())
        return draft_s, t.rest_s + sum(d * numbers.get(n, 0.0) for n, d in t.by_rest.items())

    seen = [costs.Seen(a, (Visit(1, a.num_seqs, 0, (1,), (0,), *priced(a, truth), 0.0),), 150) for a in arms]
    found = costs.fit_overheads(profile, tmp_path, seen, ("eagle3",))["eagle3"]
    for arm in arms:
        for got, wanted in zip(priced(arm, found), priced(arm, truth), strict=True):
            assert got == pytest.approx(wanted, rel=0.02, abs=1e-9), arm.name


def test_rounds_without_a_match_are_no_overhead(tmp_path: Path) -> None:
    """A look-up that finds something in one round of four: the calibration must price the others as plain steps."""
    profile = costs.profile_of(costs.measure_kernels(("small",), 8.0, tmp_path / "raw.jsonl"), "small")
    truth = {"per_step_s": 4e-4, "lookup_base_s": 1e-4, "per_round_s": 2e-4, "per_verified_token_s": 3e-5}
    seen = [costs.Seen(Arm("small", "x", 1), (Visit(1, 1, 0, (0,), (0,), 0.0, 4e-4, 0.0),), 150)]
    bare = costs.terms(costs.deployment(profile, tmp_path, "small", None), seen[0].arm, 150).rest_s
    seen = [costs.Seen(seen[0].arm, (Visit(1, 1, 0, (0,), (0,), 0.0, bare + 4e-4, 0.0),), 150)]
    for n, d in ((1, 1), (1, 8), (8, 1), (8, 8)):
        arm = Arm("small", "x", n, "ngram", d)
        t = costs.terms(costs.deployment(profile, tmp_path, "small", "ngram", any_match_prob(0.25, n)), arm, 150)
        times = (
            t.draft_s + sum(x * truth.get(k, 0.0) for k, x in t.by_draft.items()),
            t.rest_s + sum(x * truth.get(k, 0.0) for k, x in t.by_rest.items()),
        )
        seen.append(costs.Seen(arm, (Visit(4, 4 * n, 0, (n,), (0,), *(4 * x for x in times), 0.0),), 150))
    found = costs.fit_overheads(profile, tmp_path, seen, ("ngram",))["ngram"]
    assert found["per_round_s"] == pytest.approx(2e-4, rel=0.02) and found["per_verified_token_s"] == pytest.approx(3e-5, rel=0.02)
    assert any_match_prob(0.25, 8) == pytest.approx(1 - 0.75**8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "nonsense"], "unknown engine"),
        (["Qwen/Qwen3-8B"], "its own family"),
        (["--drafter", "eagle9"], "unknown drafter kind"),
        (["--drafter", "pard"], "no such drafter"),
        (["--draft-lens", "1,12"], "blocks of 8 drafts"),
        (["--draft-lens", "x"], "whole numbers"),
        (["--workloads", "poetry"], "no prompts of this category"),
        (["--targets", "small,huge"], "no such target"),
        (["--output-len", "1"], "between 2 and 16384"),
        (["--prompts", "no-such-file"], "cannot read the prompt file"),
    ],
)
def test_bad_options_are_one_clear_error(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["verify", "--out", str(tmp_path / "run"), *arguments])
    assert result.exit_code == 2 or isinstance(result.exception, InputError)
    assert words in (result.output + str(result.exception))
    assert not (tmp_path / "run").exists()


# ---- the grid over batch and context ---------------------------------------------------------------------------------------------


def test_a_grid_prices_and_measures_every_cell_and_goes_on_where_it_was(tmp_path: Path) -> None:
    small = grid.Grid("small", ((1, 24), (2, 40)), ((1, 24), (2, 40)), (1, 7), rounds=2, visits=1, kernel_budget_s=15.0)
    cut = grid.GridRun(small, "cpu", tmp_path, budget_s=1e-3)  # kernels, then no time for a cell
    with pytest.raises(InputError, match="out of time"):
        cut.run()
    report = grid.GridRun(small, "cpu", tmp_path, budget_s=600.0).run()
    assert small.slots((1, 24)) == 64 and small.slots((2, 41)) == 128
    measured = {(r["args"]["num_seqs"], r["args"]["context_len"]) for r in kernel_rows(tmp_path) if r.get("op") == "attention"}
    assert measured == {(1, 64), (2, 64)}, "attention is measured at the slots that passes read, not at the context"
    assert any("calibrated" not in n and "1 x 24 tokens and 2 x 40 tokens" in n for n in report.notes)
    assert len(report.measured) == 2 * 4 and {a.cell for a in report.measured} == {("small", "24 tokens", 1), ("small", "40 tokens", 2)}
    assert report.lossless is True
    for arm, p in report.predicted.items():
        assert p.round_s > 0 and 1.0 <= p.acceptance_len <= 1 + arm.draft_len
    assert {c.drafter for c in report.choices} == {"external"} and json.loads(json.dumps(report.to_json(), allow_nan=False))
    lines = (tmp_path / "visits.jsonl").read_text().splitlines()
    again = grid.GridRun(small, "cpu", tmp_path, budget_s=600.0).run()
    assert (tmp_path / "visits.jsonl").read_text().splitlines() == lines and again.measured == report.measured


def kernel_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "kernels.raw.jsonl").read_text().splitlines()]


def test_a_cell_that_cannot_run_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = grid.Grid("small", ((1, 24), (2, 40)), ((1, 24), (2, 40)), (1, 7), rounds=2, visits=1, kernel_budget_s=15.0)
    whole = grid.State.of

    def of(target: Transformer, external: Transformer, prompts: list[list[int]], slots: int) -> grid.State:
        if len(prompts) == 2:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return whole(target, external, prompts, slots)

    monkeypatch.setattr(grid.State, "of", of)
    report = grid.GridRun(small, "cpu", tmp_path, budget_s=600.0).run()
    assert {a.num_seqs for a in report.measured} == {1}
    assert "2 x 40 tokens could not run: CUDA error: out of memory" in report.notes
    assert any("at 1 x 24 tokens, off" in n for n in report.notes), "only what was visited is said to have calibrated"
    with pytest.raises(InputError, match="a GPU runs bf16"):
        grid.GridRun(small, "cuda", tmp_path / "gpu", budget_s=1.0).run()


def test_every_draft_length_starts_from_the_same_state() -> None:
    """What a run left in the caches must not reach the next one: greedy text is the same whatever ran before."""
    family = load_family()
    state = grid.State.of(family.target, family.external, grid.prompts_of(family.encode, 2, 30), 100)
    plain = state.run(0, 12)[1]
    for draft_len in (5, 1, 8, 0):
        said = state.run(draft_len, 6)[1]
        assert said[:12] == plain[: len(said[:12])]
    assert state.cache.slots == 100 and state.target.cache is state.cache
    assert [len(p) for p in state.prompts] == [29, 29] and state.prompts[0] != state.prompts[1]


def test_the_gpu_grid_covers_what_it_says() -> None:
    sequences, contexts = ({c[i] for c in grid.GPU_GRID.cells} for i in (0, 1))
    assert sequences == {1, 8, 64} and contexts == {1024, 8192, 32768} and grid.GPU_GRID.draft_lens == tuple(range(1, 16))
    config = costs.target_config("3b")
    tokens = max(n * s for n, s in grid.GPU_GRID.cells)
    kv_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * tokens
    assert kv_bytes < 60e9, "keys and values of the largest cell beside the weights"
    assert len(costs.matrix_shapes("3b")) == 8 and {d for d, _, _ in costs.matrix_shapes("3b")} == {"bf16"}
