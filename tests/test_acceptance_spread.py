"""Spread of acceptance over requests and rounds, against closed forms and simulation; sourced adjustments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.acceptance import KINDS, survival_from
from planner.acceptance.adjust import Adjusted, adjust_context, adjust_temperature, adjust_workload
from planner.acceptance.spread import (
    WEIGHTING_BY_FORMAT,
    batch_rounds,
    beta_mixture,
    chain_acceptance_len,
    mixture_survival,
    pooled_mean,
    request_mean,
    rounds_needed,
    tokens_per_round,
    user_tpot,
)
from planner.errors import InputError
from planner.prediction import predict

lengths = st.lists(st.floats(1, 9), min_size=1, max_size=20)


def emitted(rng: np.random.Generator, survival: list[float], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Simulated tokens per round."""
    chance = -np.diff([1.0, *survival, 0.0])
    return rng.choice(np.arange(1, len(survival) + 2), p=chance, size=shape)


# ---------------------------------------------------------------- means
def test_means_by_hand() -> None:
    """Two requests of 120 tokens at AL 2 and 4: 60 + 30 rounds for 240 tokens."""
    assert request_mean([2, 4]) == 3.0
    assert pooled_mean([2, 4], [120, 120]) == pytest.approx(240 / 90)
    assert pooled_mean([2, 4], [60, 120]) == pytest.approx(180 / 60)


@given(lengths, st.data())
def test_the_pooled_mean_is_never_above_the_plain_one(al: list[float], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.floats(1, 1e4), min_size=len(al), max_size=len(al)))
    pooled = pooled_mean(al, tokens)
    assert min(al) - 1e-9 <= pooled <= max(al) + 1e-9
    assert pooled <= request_mean(al, tokens) + 1e-9


def test_pooled_counters_give_the_harmonic_mean() -> None:
    """Simulated: requests of equal length served together; counters pooled over rounds against the two formulas."""
    rng = np.random.default_rng(1)
    curves = [[0.3, 0.1], [0.9, 0.8]]
    rounds, tokens, own = 0, 0, []
    for survival in curves:
        x = emitted(rng, survival, (40_000,)).cumsum()
        need = int(np.searchsorted(x, 50_000)) + 1
        rounds, tokens = rounds + need, tokens + int(x[need - 1])
        own.append(x[need - 1] / need)
    assert tokens / rounds == pytest.approx(pooled_mean([1.4, 2.7]), rel=0.005)
    assert np.mean(own) == pytest.approx(request_mean([1.4, 2.7]), rel=0.005)
    s = mixture_survival(curves, by="tokens")
    assert 1 + s.sum() == pytest.approx(pooled_mean([1.4, 2.7]))
    assert 1 + mixture_survival(curves).sum() == pytest.approx(request_mean([1.4, 2.7]))


def test_a_mixture_of_alphas_beats_its_mean_and_beta_has_a_closed_form() -> None:
    rng = np.random.default_rng(2)
    s = beta_mixture(0.7, 4.0, 7)
    drawn = rng.beta(2.8, 1.2, 200_000)
    assert 1 + s.sum() == pytest.approx(chain_acceptance_len(drawn, 7).mean(), rel=0.005)
    assert 1 + s.sum() > chain_acceptance_len(0.7, 7)
    rates = s / np.concatenate([[1.0], s[:-1]])
    assert np.all(np.diff(rates) > 0)
    assert beta_mixture(0.7, 1e9, 3) == pytest.approx([0.7, 0.49, 0.343], rel=1e-6)
    assert chain_acceptance_len(0.5, 3) == pytest.approx(1.875)


# ---------------------------------------------------------------- rounds and TPOT per user
def test_moments_of_a_round_by_hand() -> None:
    """s = .5, .5: 1 token or 3, evenly: mean 2, variance 1."""
    assert tokens_per_round([0.5, 0.5]) == (2.0, 1.0)
    assert tokens_per_round([1.0, 1.0]) == (3.0, 0.0)


def test_rounds_and_batches_against_simulation() -> None:
    rng = np.random.default_rng(3)
    survival, n = [0.7, 0.5, 0.3], 200
    x = emitted(rng, survival, (8_000, n)).cumsum(axis=1)
    need = (x < n).sum(axis=1) + 1
    mean, spread = rounds_needed(survival, n, autocorrelation=0.0)
    assert mean == pytest.approx(need.mean(), rel=0.005)
    assert spread == pytest.approx(need.std(), rel=0.05)
    one, last = batch_rounds(survival, n, 16, autocorrelation=0.0)
    assert one == mean
    assert last == pytest.approx(need.reshape(-1, 16).max(axis=1).mean(), rel=0.01)
    assert batch_rounds(survival, n, 1) == (mean, mean)


def test_tpot_quantiles_against_simulation() -> None:
    """Two kinds of request, 3:1, in rounds of 20 ms: median among the first, p99 in the tail of the slow ones."""
    rng = np.random.default_rng(4)
    curves, shares, n, round_s = [[0.8, 0.6, 0.4], [0.4, 0.2, 0.1]], [0.75, 0.25], 300, 0.02
    tpot = []
    for survival, share in zip(curves, shares, strict=True):
        x = emitted(rng, survival, (int(8_000 * share), n)).cumsum(axis=1)
        tpot.append(((x < n - 1).sum(axis=1) + 1) * round_s / (n - 1))
    all_tpot = np.concatenate(tpot)
    p50, p99 = user_tpot(curves, round_s=round_s, output_tokens=n, weights=shares, autocorrelation=0.0)
    assert p50 == pytest.approx(np.quantile(all_tpot, 0.5), rel=0.01)
    assert p99 == pytest.approx(np.quantile(all_tpot, 0.99), rel=0.01)
    wider = user_tpot(curves, round_s=round_s, output_tokens=n, weights=shares)
    assert wider[1] > p99


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(2, 2000), st.floats(1e-3, 1))
def test_tpot_lies_between_one_token_and_one_block_a_round(rates: list[float], n: int, round_s: float) -> None:
    s = sorted(rates, reverse=True)
    p50, p99 = user_tpot([s], round_s=round_s, output_tokens=n)
    assert round_s / (n - 1) * (1 - 1e-9) <= p50 <= p99 * (1 + 1e-12)
    assert p50 <= round_s * (1 + 1e-6) + 0.5 * len(s) * round_s / (n - 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: request_mean([]),
        lambda: request_mean([0.5]),
        lambda: pooled_mean([2.0], [0.0]),
        lambda: pooled_mean([2.0, 3.0], [1.0]),
        lambda: pooled_mean([math.nan]),
        lambda: chain_acceptance_len(1.5, 3),
        lambda: beta_mixture(1.0, 3.0, 4),
        lambda: mixture_survival([[0.5, 0.7]]),
        lambda: mixture_survival([[0.5]], by="turns"),
        lambda: user_tpot([[0.5]], round_s=0.0, output_tokens=10),
        lambda: user_tpot([[0.5]], round_s=0.1, output_tokens=1),
        lambda: user_tpot([[0.5]], round_s=0.1, output_tokens=9, quantiles=(1.0,)),
        lambda: batch_rounds([0.5], 10, 0),
    ],
)
def test_nonsense_is_one_error(call: Any) -> None:
    with pytest.raises(InputError):
        call()


def test_every_weighting_is_a_known_word() -> None:
    assert set(WEIGHTING_BY_FORMAT.values()) <= {"rounds", "requests", "interval", "unknown"}


# ---------------------------------------------------------------- adjustments
GIVEN = {"acceptance_len": 2.4, "at_draft_len": 3}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("external", 2.44, 1.98), ("external", 2.43, 2.21), ("eagle3", 2.44, 2.37), ("eagle3", 2.25, 2.07), ("mtp", 2.81, 2.68)],
)
def test_temperature_covers_every_published_pair(kind: str, before: float, after: float) -> None:
    """SPEED-Bench (arXiv 2604.09557v2): mean AL at D=3, T = 0 and T = 1."""
    got = adjust_temperature({"acceptance_len": before, "at_draft_len": 3}, kind, measured=0, wanted=1)
    assert got.low - 0.005 <= after <= got.high + 0.005
    assert got.low < got.acceptance_len < got.high < before


def test_temperature_there_and_back_and_by_hand() -> None:
    """MTP has one pair: factor 1.68/1.81."""
    down = adjust_temperature(GIVEN, "mtp", measured=0.0, wanted=1.0)
    assert down.acceptance_len == pytest.approx(1 + 1.4 * 1.68 / 1.81)
    back = adjust_temperature(down.acceptance, "mtp", measured=1.0, wanted=0.0)
    assert back.acceptance_len == pytest.approx(2.4)
    same = adjust_temperature(GIVEN, "dflash", measured=0.6, wanted=0.6)
    assert same.acceptance_len == pytest.approx(2.4) and same.rel_band == pytest.approx((0, 0)) and "no published pair for dflash" in same.note


def test_context_collapse_of_short_trained_heads() -> None:
    """EAGLE-3 on Llama-3.3-70B: 2.12-2.93 at 1k, 1.17-1.19 at 8k (SPEED-Bench figure 13); MiniMax-M3's head stayed: the band holds both."""
    for before, after in ((2.12, 1.17), (2.93, 1.19)):
        got = adjust_context({"acceptance_len": before, "at_draft_len": 3}, "eagle3", measured_len=1024, wanted_len=8192, trained_window_len=2048)
        assert got.acceptance_len == pytest.approx(after, abs=0.06)
        assert got.low - 0.03 <= after and got.high == pytest.approx(before)
    inside = adjust_context(GIVEN, "eagle3", measured_len=1024, wanted_len=2048, trained_window_len=2048)
    assert inside.acceptance_len == pytest.approx(2.4) and inside.low == pytest.approx(2.4)


def test_context_is_flat_for_external_and_mtp() -> None:
    """Flat to 32k; Gemma 4 MTP rose from 3.19 (4k) to 3.71 (32k) at D=7, which the band holds."""
    got = adjust_context({"acceptance_len": 3.19, "at_draft_len": 7}, "mtp", measured_len=4096, wanted_len=32768)
    assert got.acceptance_len == 3.19 and got.high == pytest.approx(3.71) and got.low < 3.19
    flat = adjust_context(GIVEN, "external", measured_len=1024, wanted_len=32768)
    assert flat.acceptance_len == 2.4 and 2.3 < flat.low < 2.4 < flat.high < 2.5


def test_workload_shift() -> None:
    """Coding to chat or prose: AL - 1 times about 0.5 to 0.7."""
    got = adjust_workload(GIVEN, "eagle3", measured="coding", wanted="chat")
    assert got.low == pytest.approx(1.7) and got.high == pytest.approx(1.98) and got.low <= got.acceptance_len <= got.high
    back = adjust_workload(got.acceptance, "eagle3", measured="chat", wanted="coding")
    assert back.acceptance_len == pytest.approx(2.4)
    other = adjust_workload(GIVEN, "eagle3", measured="chat", wanted="rag")
    assert other.low < 2.4 * 0.763 / 0.651 - 0.1 < other.high


def test_an_adjustment_keeps_the_form_and_widens_the_band() -> None:
    for given_form in (
        {"survival_prob": [0.8, 0.6, 0.4]},
        {"points": [{"draft_len": 1, "acceptance_len": 1.8}, {"draft_len": 3, "acceptance_len": 2.8}]},
    ):
        got = adjust_workload(given_form, "eagle3", measured="coding", wanted="chat")
        assert set(got.acceptance) == {*given_form, "rel_band"}
        plain = survival_from({k: v for k, v in got.acceptance.items() if k != "rel_band"}, kind="eagle3", max_draft_len=8)
        wide = survival_from(got.acceptance, kind="eagle3", max_draft_len=8)
        assert wide.acceptance_len(3) == plain.acceptance_len(3)
        assert wide.band(3) == pytest.approx(tuple(math.hypot(a, b) for a, b in zip(plain.band(3), got.rel_band, strict=True)), abs=2e-4)
        again = adjust_temperature(got.acceptance, "eagle3", measured=0, wanted=1)
        assert all(a > b for a, b in zip(again.acceptance["rel_band"], got.acceptance["rel_band"], strict=True)), "doubts of a chain add up"
        assert got.to_dict()["source"] == got.source
    assert adjust_temperature({"alpha": 0.7}, "mtp", measured=0, wanted=1).draft_len == 3


def test_an_adjustments_doubt_reaches_the_plan() -> None:
    """The file that `acceptance adjust --out` writes makes the speedup band of a prediction as wide as its range of AL says."""
    case = {"model": "Qwen/Qwen3-8B", "gpu": "h100", "concurrency": 4, "context_len": 1000, "drafter": {"kind": "eagle3"}, "draft_len": 3}
    got = adjust_workload(GIVEN, "eagle3", measured="coding", wanted="chat")
    sure, unsure = (predict({**case, "acceptance": a}) for a in (GIVEN, got.acceptance))
    assert unsure.speedup < sure.speedup
    assert unsure.speedup_high / unsure.speedup_low > 1.02 * sure.speedup_high / sure.speedup_low


@pytest.mark.parametrize("wrong", [0.1, [0.1], [1.0, 0.1], [-0.1, 0.1], [0.1, -1], [0.1, math.nan], ["a", 0.1], "ab"])
def test_a_band_that_is_none_is_one_clear_error(wrong: object) -> None:
    with pytest.raises(InputError, match=r"acceptance\.rel_band"):
        survival_from({**GIVEN, "rel_band": wrong}, kind="eagle3", max_draft_len=8)


@given(st.sampled_from(KINDS), st.integers(1, 12), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_adjusted_acceptance_is_sound(kind: str, d: int, frac: float, a: float, b: float) -> None:
    form = {"acceptance_len": 1 + frac * d, "at_draft_len": d}
    made: list[Adjusted] = [adjust_temperature(form, kind, measured=a, wanted=b), adjust_workload(form, kind, measured="writing", wanted="math")]
    for got in made:
        assert 1 <= got.low <= got.acceptance_len <= got.high <= 1 + d + 1e-9
        survival_from(got.acceptance, kind=kind, max_draft_len=16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: adjust_temperature(GIVEN, "mtp", measured=0, wanted=1.5), "0..1"),
        (lambda: adjust_temperature({"workload": "chat"}, "mtp", measured=0, wanted=1), "a prior is not adjusted"),
        (lambda: adjust_context(GIVEN, "eagle3", measured_len=1024, wanted_len=8192), "trained window"),
        (lambda: adjust_context(GIVEN, "ngram", measured_len=1024, wanted_len=8192), "no published rule"),
        (lambda: adjust_context(GIVEN, "mtp", measured_len=1024, wanted_len=131072), "beyond the published contexts"),
        (lambda: adjust_context(GIVEN, "mtp", measured_len=0, wanted_len=1024), "not a context length"),
        (lambda: adjust_workload(GIVEN, "mtp", measured="coding", wanted="chats"), "Did you mean chat"),
        (lambda: adjust_workload(GIVEN, "mpt", measured="coding", wanted="chat"), "Did you mean mtp"),
    ],
)
def test_adjustments_refuse_what_is_not_published(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
