"""Importers of acceptance: one golden per format with the expected values worked out by hand, each known trap, and robustness."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.acceptance import survival_from
from planner.acceptance.importers import FORMATS, Imported, import_acceptance
from planner.acceptance.spread import WEIGHTING_BY_FORMAT
from planner.cli.acceptance import acceptance_app
from planner.errors import DraftlineError, InputError

DATA = Path(__file__).parent / "data" / "acceptance"
SAMPLES = sorted(p for p in DATA.rglob("*") if p.is_file() and p.name not in ("README.md", "configuration.json"))


def sample(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def changed(name: str, *path: str | int, value: Any) -> str:
    """A JSON sample with one value replaced."""
    data = json.loads(sample(name))
    node = data
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return json.dumps(data)


# ---------------------------------------------------------------- a golden per format
#: file -> (format, D, rounds, AL, survival). Worked out by hand from the sample.
GOLDEN: list[tuple[str, str, int | None, float | None, float, list[float] | None]] = [
    ("vllm_metrics_before.prom", "vllm /metrics", 4, 200, 3.0, [0.8, 0.6, 0.4, 0.2]),
    ("vllm_bench.json", "vllm bench", 3, 1000, 2.5, [0.7, 0.5, 0.3]),
    ("vllm_request_summary.json", "vllm per-request", 3, 10, 2.5, [0.6, 0.6, 0.3]),
    # a_1 = 8 of 10 rounds; a_2 = 3 of the 4 that drafted two and kept one.
    ("vllm_request_detailed.json", "vllm per-request", 2, 10, 2.4, [0.8, 0.6]),
    # 1000 rounds with 1500 accepted and 100 with 50.
    ("vllm_v1.log", "vllm log", 3, 1100, 1 + 1550 / 1100, [730 / 1100, 515 / 1100, 305 / 1100]),
    # V0: 10616 emitted over 13311/3 rounds.
    ("vllm_v0.log", "vllm V0 log", 3, 4437, 10616 / 4437, None),
    ("sglang_server_info.json", "sglang /server_info", 3, None, 2.5, None),
    ("sglang_bench.jsonl", "sglang bench_serving", 3, None, 2.5, None),
    ("sglang_generate.json", "sglang /generate", 3, 100, 2.5, [0.6, 0.6, 0.3]),
    # Three running requests at 2.8, one at 2.0.
    ("sglang.log", "sglang log", 3, None, 2.6, None),
    # Rank 1 repeats rank 0: 6 rounds, 6 accepted.
    ("trtllm_iterations.jsonl", "trtllm iteration stats", 3, 6, 2.0, None),
    ("trtllm_report.json", "trtllm-bench report", 3, None, 2.5, None),
    ("trtllm_choice.json", "trtllm per-request", 3, 10, 2.5, [0.6, 0.6, 0.3]),
    ("llamacpp_timings.json", "llamacpp timings", 3, 100, 2.5, None),
    ("llamacpp_metrics.prom", "llamacpp /metrics", 3, 100, 2.5, [0.8, 0.5, 0.2]),
    ("llamacpp.log", "llamacpp log", 4, 500, 3.0, [0.8, 0.6, 0.4, 0.2]),
    ("llamacpp_old.log", "llamacpp speculative", 8, 82, 129 / 82, None),
    ("aiperf_profile.json", "aiperf profile", 3, 100, 2.5, [0.6, 0.6, 0.3]),
    ("aiperf_rows.jsonl", "aiperf rows", 3, 15, 3.0, [11 / 15, 11 / 15, 8 / 15]),
    ("aiperf_server_metrics.json", "aiperf server metrics", 3, 1000, 2.5, None),
    ("speed_bench_report.csv", "speed-bench report", None, None, 3.0, None),
    # Histogram {1: 3, 2: 1, 4: 3}: of 7 rounds 4 hold 2 or more tokens, 3 hold 3 or more, 3 hold 4.
    ("specdec_bench", "specdec_bench", 3, 7, 17 / 7, [4 / 7, 3 / 7, 3 / 7]),
    ("specdec_bench/speed_bench.json", "specdec_bench", 3, None, 2.8, None),
    ("golden_al.yaml", "golden AL yaml", 8, None, 3.77, None),
    # 300 and 100 rounds.
    ("speculators_acceptance.csv", "speculators acceptance.csv", 3, 400, 1 + 660 / 400, [0.775, 0.5625, 0.3125]),
    ("per_position.csv", "per-position list", 3, None, 2.5, [0.7, 0.5, 0.3]),
    ("per_position.json", "per-position list", 3, None, 2.5, [0.7, 0.5, 0.3]),
    ("depthchart_snapshot.json", "counter snapshot", 3, 16089, 1 + 29023 / 16089, None),
]


@pytest.mark.parametrize(("name", "form", "d", "rounds", "al", "s"), GOLDEN, ids=[g[0] for g in GOLDEN])
def test_golden(name: str, form: str, d: int | None, rounds: float | None, al: float, s: list[float] | None) -> None:  # noqa: PLR0913, PLR0917
    got = import_acceptance(DATA / name)
    assert (got.format, got.draft_len) == (form, d)
    assert got.acceptance_len == pytest.approx(al, rel=1e-9)
    assert got.num_drafts == (None if rounds is None else pytest.approx(rounds))
    assert (got.survival_prob is None) if s is None else got.survival_prob == pytest.approx(s)
    assert len(got.definition) > 20
    json.dumps(got.to_dict(), allow_nan=False)
    if d is not None:
        curve = survival_from(got.acceptance, kind="eagle3", max_draft_len=16)
        assert curve.acceptance_len(d) == pytest.approx(al, rel=1e-9)


def test_every_sample_has_a_golden_and_a_weighting() -> None:
    known = {g[0] for g in GOLDEN} | {"vllm_metrics_after.prom", "ggml_batch_costs.env", "specdec_bench/acceptance_rate.json"}
    assert {str(p.relative_to(DATA)) for p in SAMPLES} <= known
    for name, *_ in GOLDEN:
        got = import_acceptance(DATA / name)
        if got.format in WEIGHTING_BY_FORMAT and got.format != "specdec_bench":
            assert got.weighting in (WEIGHTING_BY_FORMAT[got.format], "unknown"), name


# ---------------------------------------------------------------- vLLM /metrics
def test_two_scrapes_give_the_window() -> None:
    """Engine 0: 1000 rounds, engine 1: 300; position 0 accepted 800 + 240 times. `_created` timestamps are not counted
    (https://github.com/vllm-project/vllm/pull/24049)."""
    got = import_acceptance(DATA / "vllm_metrics_after.prom", before=DATA / "vllm_metrics_before.prom")
    assert (got.num_drafts, got.drafted, got.accepted) == (1300, 5200, 2600)
    assert got.survival_prob == pytest.approx([1040 / 1300, 760 / 1300, 520 / 1300, 280 / 1300])
    assert not got.flags and not got.warnings and "summed over 2 engines" in got.notes


def test_one_scrape_says_it_is_cumulative() -> None:
    assert "cumulative" in import_acceptance(DATA / "vllm_metrics_after.prom").flags


def test_a_restarted_engine_counts_from_zero() -> None:
    """Engine 1 fell from 100 to 40 rounds: its second scrape is the window."""
    text = sample("vllm_metrics_after.prom").replace('created{engine="1",model_name="m"} 1.7802', 'created{engine="1",model_name="m"} 1.7803')
    lines = text.splitlines()
    split = [line.rsplit(" ", 1) if 'engine="1"' in line and "_total" in line and "spec_decode" in line else [line] for line in lines]
    after = "\n".join(f"{part[0]} {float(part[1]) / 10}" if len(part) == 2 else part[0] for part in split)
    got = import_acceptance(after, before=DATA / "vllm_metrics_before.prom")
    assert "counter_reset" in got.flags and got.num_drafts == 1040 and "restarted" in got.warnings[0]


def test_a_later_created_stamp_means_a_restart_even_if_counters_grew() -> None:
    after = sample("vllm_metrics_after.prom").replace(
        '_drafts_created{engine="0",model_name="m"} 1.78027', '_drafts_created{engine="0",model_name="m"} 1.79027'
    )
    got = import_acceptance(after, before=DATA / "vllm_metrics_before.prom")
    assert "counter_reset" in got.flags and got.num_drafts == 1100 + 300


def test_swapped_scrapes_with_created_stamps_are_refused() -> None:
    """A counter that fell although it was not created anew, or that was created before the earlier scrape's."""
    with pytest.raises(InputError, match="wrong order"):
        import_acceptance(DATA / "vllm_metrics_before.prom", before=DATA / "vllm_metrics_after.prom")
    after = sample("vllm_metrics_after.prom").replace("1.7802746209391222e+09", "1.7902746209391222e+09")
    with pytest.raises(InputError, match="wrong order"):
        import_acceptance(DATA / "vllm_metrics_before.prom", before=after)


def test_zero_drafts_is_no_data() -> None:
    """Not 0 % and not NaN (https://github.com/vllm-project/vllm/pull/24322)."""
    with pytest.raises(InputError, match="no data"):
        import_acceptance(DATA / "vllm_metrics_after.prom", before=DATA / "vllm_metrics_after.prom")


def counters(drafts: float, drafted: float, accepted: float, positions: list[float], generated: float | None = None) -> str:
    name = "vllm:spec_decode_num_"
    lines = [f'{name}{k}_total{{engine="0"}} {v}' for k, v in (("drafts", drafts), ("draft_tokens", drafted), ("accepted_tokens", accepted))]
    lines += [f'{name}accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {v}' for i, v in enumerate(positions)]
    lines += [] if generated is None else [f'vllm:generation_tokens_total{{engine="0"}} {generated}']
    return "\n".join(lines) + "\n"


def test_positions_are_sorted_as_numbers() -> None:
    """Twelve positions: "10" sorts before "2" as text (https://github.com/vllm-project/vllm/pull/24049)."""
    rates = [60.0 - 5 * i for i in range(12)]
    lines = counters(100, 1200, sum(rates), rates).splitlines()
    got = import_acceptance("\n".join(sorted(lines)))
    assert got.survival_prob == pytest.approx([r / 100 for r in rates])


def test_a_list_shorter_than_d_gets_its_tail_from_the_total() -> None:
    """43221 drafts, 259326 draft tokens, 63669 accepted, 5 positions printed for K = 6 (https://github.com/vllm-project/vllm/pull/24243)."""
    positions = [25000.0, 15000.0, 10000.0, 7000.0, 4000.0]
    got = import_acceptance(counters(43221, 259326, 63669, positions))
    assert got.draft_len == 6 and got.survival_prob is not None and "tail_recovered" in got.flags
    assert got.survival_prob[5] == pytest.approx((63669 - sum(positions)) / 43221)
    assert got.acceptance_len == pytest.approx(1 + 63669 / 43221)


def test_mixtures_over_d_are_flagged() -> None:
    """No per-position drafted counter exists: with a schedule, accepted_per_pos/drafts mixes rounds of different D."""
    got = import_acceptance(counters(1000, 2000, 900, [500, 250, 150]))
    assert "mixture" in got.flags and "2 tokens a round" in got.warnings[0] and got.draft_len == 3
    assert "at_draft_len" not in (got.acceptance or {}), "the curve of a mixture is of no one drafted length"


def test_the_last_rounds_of_requests_are_no_mixture() -> None:
    """A real server at D = 7: 11325 drafts, 78806 tokens, 29746 accepted."""
    got = import_acceptance(counters(11325, 78806, 29746, [8856, 6387, 4677, 3600, 2800, 2000, 1426]))
    assert got.draft_len == 7 and "mixture" not in got.flags


def test_ngram_counters_are_corrected_to_all_rounds() -> None:
    """100 rounds drafted and kept 200; 700 tokens in all: 400 rounds more had no match, AL = 700/500."""
    text = counters(100, 400, 200, [80, 60, 40, 20], generated=700)
    got = import_acceptance(text, kind="ngram")
    assert got.acceptance_len == pytest.approx(1.4) and got.match_prob == pytest.approx(0.2)
    assert got.survival_prob == pytest.approx([0.16, 0.12, 0.08, 0.04]) and "empty_rounds_corrected" in got.flags
    eagle = import_acceptance(text, kind="eagle3")
    assert eagle.acceptance_len == 3.0 and "coverage" in eagle.flags and "only 43%" in eagle.warnings[0]
    assert "--kind ngram" in import_acceptance(text).warnings[0]
    assert "empty_rounds_left_out" in import_acceptance(counters(100, 400, 200, [80, 60, 40, 20]), kind="suffix").flags


def test_counters_that_cover_few_steps_are_said() -> None:
    """27 attempts beside about 900 generated tokens (https://github.com/raullenchai/Rapid-MLX/issues/2195)."""
    got = import_acceptance(counters(27, 81, 40, [20, 12, 8], generated=900))
    assert "coverage" in got.flags and "7%" in got.warnings[0]


def test_rates_that_rise_are_regressed_and_said() -> None:
    got = import_acceptance(counters(100, 300, 150, [60, 40, 50]))
    assert got.survival_prob == pytest.approx([0.6, 0.45, 0.45]) and "isotonic" in got.flags


def test_two_models_in_one_scrape_are_flagged() -> None:
    text = counters(100, 300, 150, [70, 50, 30]).replace('engine="0"', 'engine="0",model_name="a"')
    other = counters(100, 300, 60, [40, 15, 5]).replace('engine="0"', 'engine="0",model_name="b"')
    got = import_acceptance(text + other)
    assert "mixture" in got.flags and "2 models" in got.warnings[0]


def test_a_fallen_counter_without_stamps_is_taken_from_zero() -> None:
    got = import_acceptance(counters(40, 120, 60, [30, 20, 10]), before=counters(100, 300, 150, [70, 50, 30]))
    assert got.num_drafts == 40 and "counter_reset" in got.flags and "files are swapped" in got.warnings[0]


# ---------------------------------------------------------------- other metrics
def test_sglang_gauges() -> None:
    text = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_accept_rate{tp_rank="0"} 0.5\nsglang:spec_num_steps{tp_rank="0"} 3\n'
    got = import_acceptance(text)
    assert (got.acceptance_len, got.draft_len, got.weighting) == (2.5, 3, "interval")
    with pytest.raises(InputError, match="gauges, which have no difference"):
        import_acceptance(text, before=text)


def test_trtllm_positions_separate_rounds() -> None:
    """50 of 100 at the first position; the second was drafted 40 times and kept 10 times."""
    lines = [f'trtllm_spec_decode_drafted_tokens_total{{token_position="{i}"}} {v}' for i, v in ((0, 100), (1, 40))]
    lines += [f'trtllm_spec_decode_accepted_tokens_total{{token_position="{i}"}} {v}' for i, v in ((0, 50), (1, 10))]
    got = import_acceptance("\n".join(lines) + "\n")
    assert got.survival_prob == pytest.approx([0.5, 0.25]) and got.acceptance_len == pytest.approx(1.75)


def test_trtllm_totals_need_d() -> None:
    text = (
        "trtllm_spec_decode_num_draft_tokens_total 300\ntrtllm_spec_decode_num_accepted_tokens_total 150\ntrtllm_spec_decode_acceptance_length 2.5\n"
    )
    assert import_acceptance(text).acceptance is None
    assert import_acceptance(text, draft_len=3).acceptance == {"acceptance_len": 2.5, "at_draft_len": 3}


# ---------------------------------------------------------------- SGLang
def test_sglang_rate_above_one() -> None:
    """Before October 2025 the rate counted the bonus token (https://github.com/sgl-project/sglang/pull/11572)."""
    old = changed("sglang_generate.json", "meta_info", "spec_accept_rate", value=2.5 / 3)
    assert import_acceptance(old).acceptance_len == 2.5
    high = json.dumps({"meta_info": {"completion_tokens": 351, "spec_verify_ct": 100, "spec_num_correct_drafts": 250, "spec_num_proposed_drafts": 300,
                                     "spec_accept_rate": 3.5 / 3}})  # fmt: skip
    got = import_acceptance(high)
    assert "rate_with_bonus" in got.flags and got.acceptance_len == pytest.approx(3.5)
    with pytest.raises(InputError, match="above 1.*October 2025"):
        import_acceptance(changed("sglang_generate.json", "meta_info", "spec_accept_rate", value=1.9))


def test_sglang_old_log_gives_d_from_the_rate_with_bonus() -> None:
    line = "Decode batch, #running-req: 14, #token: 785280, accept len: 2.47, accept rate: 0.82, cuda graph: True\n"
    got = import_acceptance(line)
    assert got.draft_len == 3 and "October 2025" in " ".join(got.notes)


def test_sglang_bench_is_cumulative_and_tolerates_infinity() -> None:
    """A bare Infinity (https://github.com/sgl-project/sglang/pull/31554); accept_length is not a difference over the run."""
    got = import_acceptance(DATA / "sglang_bench.jsonl")
    assert "cumulative" in got.flags and got.kind == "mtp" and "since the server started" in got.warnings[0]


@pytest.mark.parametrize(
    ("change", "d", "kind", "flag"),
    [
        ({"speculative_algorithm": "DFLASH", "speculative_num_steps": 1, "speculative_num_draft_tokens": 16}, 15, "dflash", None),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12}, 11, "ngram", "tree"),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, 5, "eagle3", "tree"),
        ({"speculative_adaptive": True}, 3, "eagle3", "mixture"),
    ],
)
def test_which_sglang_flag_is_d(change: dict[str, Any], d: int, kind: str, flag: str | None) -> None:
    info = json.loads(sample("sglang_server_info.json")) | change
    got = import_acceptance(json.dumps(info))
    assert (got.draft_len, got.kind) == (d, kind) and (flag is None or flag in got.flags)


def test_sglang_disaggregated_and_empty() -> None:
    inner = json.loads(sample("sglang_server_info.json"))
    got = import_acceptance(json.dumps({"prefill": [], "decode": [inner], "internal_states": [{"avg_spec_accept_length": None}]}))
    assert (got.acceptance_len, got.draft_len) == (2.5, 3)
    with pytest.raises(InputError, match="no data"):
        import_acceptance(changed("sglang_server_info.json", "internal_states", value=[{"avg_spec_accept_length": None}]))


# ---------------------------------------------------------------- logs
def test_v1_windows_are_weighted_by_rounds() -> None:
    """The mean of the two printed lengths would be 2.0 (https://github.com/vllm-project/vllm/issues/19254)."""
    got = import_acceptance(DATA / "vllm_v1.log")
    assert got.acceptance_len == pytest.approx(2.409, abs=1e-3)


def test_early_v1_lines() -> None:
    """The first form of the line: rate first, in percent; 192 drafted in 64 rounds of 3."""
    line = (
        "INFO 06-05 [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 54.7%, Mean acceptance length: 2.64, Accepted: 105 tokens, "
        "Drafted: 192 tokens, Per-position acceptance rate: 0.734, 0.531, 0.375\n"
    )
    got = import_acceptance(line)
    assert got.num_drafts == 64 and got.acceptance_len == pytest.approx(1 + 105 / 64)


def test_a_saved_stream_is_read() -> None:
    """Streaming: the figures ride on the last chunk."""
    record = json.dumps(json.loads(sample("vllm_request_summary.json")))
    got = import_acceptance('data: {"choices": []}\n\ndata: ' + record + "\n\ndata: [DONE]\n\n")
    assert got.survival_prob == pytest.approx([0.6, 0.6, 0.3])


def test_v0_counts_tokens_behind_a_rejection_and_is_cumulative() -> None:
    """Real line (https://github.com/vllm-project/vllm/issues/9539): 8547 accepted would be AL 2.93, efficiency 0.598 says 4 x 0.598."""
    got = import_acceptance(DATA / "vllm_v0.log")
    assert got.acceptance_len == pytest.approx(4 * 0.598, abs=2e-3)
    restarted = sample("vllm_v0.log") + sample("vllm_v0.log").splitlines()[0] + "\n"
    both = import_acceptance(restarted)
    assert both.num_drafts == pytest.approx(4437 + 1000) and both.acceptance_len == pytest.approx((10616 + 2200) / 5437)


def test_llamacpp_log_forms() -> None:
    newer = (
        "draft acceptance = 0.66237 (  257 accepted /   388 generated), mean acceptance length =  3.65, "
        "acceptance rate per position = (0.804, 0.701, 0.629, 0.515)\n"
    )
    got = import_acceptance(newer)
    assert got.draft_len == 4 and got.acceptance_len == pytest.approx(3.65, abs=0.01)
    line = "draft acceptance rate = 0.50000 (    6 accepted /    12 generated)\n"
    older = "       eval time =     161.86 ms /    11 tokens (   20.23 ms per token,    49.43 tokens per second)\n" + line
    assert import_acceptance(older).acceptance_len == pytest.approx(11 / 5)
    with pytest.raises(InputError, match="no round count"):
        import_acceptance(line)


def test_llamacpp_two_methods_are_a_mixture() -> None:
    """31 + 511 of 542 rounds; 527 + 974 accepted."""
    text = (
        "statistics        ngram-mod: #calls(b,g,a) = 4 542  31, #gen drafts =  31, #acc drafts =  28, #gen tokens =  920, #acc tokens = 527\n"
        "statistics     draft-dflash: #calls(b,g,a) = 4 511 511, #gen drafts = 511, #acc drafts = 390, #gen tokens = 2041, #acc tokens = 974\n"
    )
    got = import_acceptance(text)
    assert "mixture" in got.flags and got.acceptance_len == pytest.approx(1 + 1501 / 542) and got.kind is None
    assert got.parts["ngram-mod"]["acceptance_len"] == pytest.approx(18.0)


def test_llamacpp_ngram_statistics_are_corrected() -> None:
    line = "statistics ngram_mod: #calls = 810, #gen drafts = 15, #acc drafts = 15, #gen tokens = 960, #acc tokens = 730\n"
    got = import_acceptance(line, kind="ngram")
    assert got.match_prob == pytest.approx(15 / 810) and got.acceptance_len == pytest.approx(1 + 730 / 810)


def test_old_llamacpp_draft_length_is_a_maximum() -> None:
    """132 drafted / 8 = 16.5 would not be rounds; 'inf tokens per second' appears (https://github.com/ggml-org/llama.cpp/issues/3649)."""
    got = import_acceptance(DATA / "llamacpp_old.log")
    assert got.num_drafts == 82 and got.draft_len == 8 and "mixture" in got.flags
    as_json = import_acceptance('{"n_draft": 8, "n_predict": 129, "n_drafted": 132, "n_accept": 47}')
    assert as_json.acceptance_len == got.acceptance_len


# ---------------------------------------------------------------- benches
def test_bench_rate_in_percent_or_fraction() -> None:
    assert import_acceptance(DATA / "vllm_bench.json").acceptance_len == 2.5
    got = import_acceptance(changed("vllm_bench.json", "spec_decode_acceptance_rate", value=0.5))
    assert "a fraction here" in got.warnings[0] and got.acceptance_len == 2.5
    with pytest.raises(InputError, match="no percentage"):
        import_acceptance(changed("vllm_bench.json", "spec_decode_acceptance_rate", value=150.0))
    with pytest.raises(InputError, match="disagree"):
        import_acceptance(changed("vllm_bench.json", "spec_decode_acceptance_rate", value=80.0))


def test_conditional_rates_are_multiplied_up() -> None:
    """0.7, 5/7 and 0.6 given the one before are 0.7, 0.5, 0.3 of all rounds, which is what AL 2.5 says."""
    got = import_acceptance(changed("vllm_bench.json", "spec_decode_per_position_acceptance_rates", value=[0.7, 5 / 7, 0.6]))
    assert got.survival_prob == pytest.approx([0.7, 0.5, 0.3]) and "conditional" in got.flags
    with pytest.raises(InputError, match="per-position rates and AL disagree"):
        import_acceptance(changed("vllm_bench.json", "spec_decode_per_position_acceptance_rates", value=[0.9, 0.8, 0.7]))


def test_aiperf_pools_and_says_the_plain_mean() -> None:
    """Token-weighted 2.5 against the mean over requests 2.7; rows: 30 tokens in 15 rounds, plain mean 3.25."""
    got = import_acceptance(DATA / "aiperf_profile.json")
    assert got.request_acceptance_len == 2.7 and got.weighting == "rounds"
    rows = import_acceptance(DATA / "aiperf_rows.jsonl")
    assert rows.acceptance_len == 3.0 and rows.request_acceptance_len == pytest.approx(3.25)


def test_aiperf_report_needs_the_right_metric_and_d() -> None:
    assert import_acceptance(DATA / "speed_bench_report.csv", draft_len=3, select="coding").acceptance == {"acceptance_len": 2.9, "at_draft_len": 3}
    with pytest.raises(InputError, match="--metric accept_length"):
        import_acceptance("Model,coding,Overall\nm,52.30,52.30\n")
    with pytest.raises(InputError, match="--select names no single part.*Did you mean coding"):
        import_acceptance(DATA / "speed_bench_report.csv", select="codding")


def test_specdec_bench_is_rebuilt_from_its_histogram() -> None:
    """The Joint table has no "3": s_2 = rounds of 3 or more tokens = 3/7. D from configuration.json beside the file."""
    got = import_acceptance(DATA / "specdec_bench" / "acceptance_rate.json")
    assert got.survival_prob == pytest.approx([4 / 7, 3 / 7, 3 / 7]) and "first chunk" in got.warnings[0]
    assert import_acceptance(sample("specdec_bench/acceptance_rate.json")).draft_len == 3
    category = import_acceptance(DATA / "specdec_bench" / "speed_bench.json", select="coding")
    assert category.acceptance == {"acceptance_len": 3.2, "at_draft_len": 3}


def test_golden_yaml_is_made_monotone_and_says_where_it_peaks() -> None:
    """deepseek-v4-pro-0813 DSpark: D = 6, 7, 8 -> 3.77, 3.73, 3.47 (https://github.com/SemiAnalysisAI/InferenceX/tree/main/golden_al_distribution)."""
    got = import_acceptance(DATA / "golden_al.yaml")
    assert dict(got.points) == {1: 1.84, 2: 2.51, 3: 3.01, 4: 3.36, 5: 3.61, 6: 3.77, 7: pytest.approx(3.77), 8: pytest.approx(3.77)}
    assert {"isotonic", "falls_beyond_peak"} <= set(got.flags) and "do not plan beyond D=6" in got.warnings[-1]
    off = import_acceptance(DATA / "golden_al.yaml", select="thinking_off", draft_len=7)
    assert off.acceptance_len == pytest.approx(5.24)
    one = import_acceptance("qwen3.8-27b:\n  thinking_on:\n    7: 3.67\n")
    assert one.acceptance == {"points": [{"draft_len": 7, "acceptance_len": 3.67}]} and not one.warnings
    with pytest.raises(InputError, match="not among the measured D"):
        import_acceptance("m:\n  thinking_on:\n    7: 3.67\n", draft_len=3)


def test_totals_only_say_that_the_curve_has_one_parameter() -> None:
    """seongyun1104/depthchart: 16089 drafts, 48267 draft tokens, 29023 accepted; generated 45056 is not drafts + accepted = 45112."""
    got = import_acceptance(DATA / "depthchart_snapshot.json")
    assert got.acceptance_len == pytest.approx(2.804, abs=1e-3) and "no_positions" in got.flags and "one free parameter" in got.notes[-1]


def test_batch_costs_are_recognised_as_cost() -> None:
    """t(n)/t(1) = n c[n], smoothed; not acceptance (https://github.com/ggml-org/llama.cpp/pull/17034)."""
    got = import_acceptance(DATA / "ggml_batch_costs.env")
    assert got.acceptance is None and got.step_ratio[:3] == pytest.approx([1, 1.21, 1.419]) and "cost" in got.flags
    assert all(a <= b for a, b in zip(got.step_ratio, got.step_ratio[1:], strict=False))


def test_guidellm_report_holds_vllm_records() -> None:
    record = json.loads(sample("vllm_request_summary.json"))["metrics"]["speculative_decoding"]
    report = {"benchmarks": [{"requests": {"successful": [{"response_metrics": {"speculative_decoding": record}}] * 3}}]}
    got = import_acceptance(json.dumps(report, indent=1))
    assert got.num_drafts == 30 and got.survival_prob == pytest.approx([0.6, 0.6, 0.3])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[0.7, 0.5, 0.3]", {"survival_prob": [0.7, 0.5, 0.3]}),
        ("0.7,0.5,0.3\n", {"survival_prob": [0.7, 0.5, 0.3]}),
        ("1;0.7\n2;0.5\n", {"survival_prob": [0.7, 0.5]}),
        ('{"acceptance_len": 2.4, "at_draft_len": 3}', {"acceptance_len": 2.4, "at_draft_len": 3}),
        ('{"conditional_prob": [0.7, 0.5]}', {"survival_prob": [0.7, 0.35]}),
        ("draft_len,acceptance_len\n1,1.8\n3,2.6\n", {"points": [{"draft_len": 1, "acceptance_len": 1.8}, {"draft_len": 3, "acceptance_len": 2.6}]}),
        ('[{"position": 1, "rate": 0.7}, {"position": 2, "rate": 0.5}]', {"survival_prob": [0.7, 0.5]}),
    ],
)
def test_plain_forms(text: str, want: dict[str, Any]) -> None:
    assert import_acceptance(text).acceptance == want


# ---------------------------------------------------------------- what cannot be
@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("[70, 50, 30]", {}, "Divide percentages by 100"),
        ('{"acceptance_len": 0.8, "at_draft_len": 3}', {}, "below 1.*bonus"),
        ('{"acceptance_len": 4.8, "at_draft_len": 3}', {}, r"exceeds 1 \+ D.*1..4"),
        ('{"acceptance_len": 2.4, "at_draft_len": 3}', {"draft_len": 5}, "contradicts the source"),
        ('{"alpha": 0.7}', {}, "alpha alone"),
        ("", {}, "no such file|empty"),
        ("\n \n", {}, "empty"),
        ("hello\nworld\n", {}, "no acceptance data is recognised.*vllm bench.*golden AL yaml"),
        ('{"a": 1}', {}, "no acceptance data is recognised"),
        ('{"a": \n', {}, "As JSON it fails"),
        (counters(10, 30, -5, [1, 1, 1]), {}, "negative"),
        (counters(10, 30, 40, [10, 10, 10]), {}, "more tokens accepted than drafted"),
        (counters(10, 5, 3, [3]), {}, "fewer drafted tokens than rounds"),
        (counters(10, 30, math.nan, [1, 1, 1]), {}, "not a finite number"),
        (counters(10, 30, 15, [20, 1, 1]), {}, "outside 0..1"),
        ("vllm:num_requests_running 3.0\n", {}, "no speculation metrics"),
        ("vllm:spec_decode_num_drafts_total{engine= 3.0\n", {}, "metric line cannot be read"),
        (sample("vllm_bench.json"), {"draft_len": 0}, "--draft-len"),
        (sample("vllm_bench.json"), {"kind": "eagel"}, "Did you mean eagle3"),
        (sample("vllm_bench.json"), {"before": sample("vllm_bench.json")}, "only two /metrics scrapes"),
        ("m:\n  on: {1: 2.5}\n", {}, "out of range"),
        ("GGML_BATCH_COSTS=1,-1,2\n", {}, "positive costs"),
    ],
)
def test_impossible_values_are_one_clear_error(text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        import_acceptance(text, **options)


def test_disagreeing_histograms_are_refused() -> None:
    with pytest.raises(InputError, match="histogram and the number of rounds disagree"):
        import_acceptance(changed("vllm_request_summary.json", "metrics", "speculative_decoding", "num_spec_steps", value=40))


# ---------------------------------------------------------------- addresses
@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/metrics": sample("vllm_metrics_after.prom"), "/server_info": sample("sglang_server_info.json")}.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_addresses(server: str) -> None:
    assert import_acceptance(server).format == "vllm /metrics"
    assert import_acceptance(f"{server}/server_info").acceptance_len == 2.5
    assert import_acceptance(f"{server}/metrics", before=DATA / "vllm_metrics_before.prom").num_drafts == 1300
    with pytest.raises(InputError, match="status 200"):
        import_acceptance(f"{server}/nothing")


def test_an_address_nobody_answers() -> None:
    with pytest.raises(InputError, match="cannot read the address"):
        import_acceptance("http://127.0.0.1:9/metrics")


# ---------------------------------------------------------------- commands
def run(*args: str) -> Any:
    return CliRunner().invoke(acceptance_app, list(args))


def test_import_command(tmp_path: Path) -> None:
    out = tmp_path / "new" / "acceptance.json"
    done = run(
        "import", str(DATA / "vllm_metrics_before.prom"), "--after", str(DATA / "vllm_metrics_after.prom"), "--kind", "eagle3", "--out", str(out)
    )
    assert done.exit_code == 0 and "s1=0.800" in done.stdout and "definition" in done.stdout
    assert json.loads(out.read_text()) == {"eagle3": {"survival_prob": [1040 / 1300, 760 / 1300, 520 / 1300, 280 / 1300], "at_draft_len": 4}}
    as_json = json.loads(run("import", str(DATA / "vllm_bench.json"), "--json").stdout)
    assert as_json["acceptance"] == {"survival_prob": [0.7, 0.5, 0.3], "at_draft_len": 3} and as_json["weighting"] == "rounds"
    with_costs = run("import", str(DATA / "ggml_batch_costs.env"))
    assert "t(n)/t(1)" in with_costs.stdout
    refused = run("import", str(DATA / "speed_bench_report.csv"), "--out", str(out))
    assert isinstance(refused.exception, DraftlineError) and "--draft-len" in str(refused.exception)


def test_plan_reads_what_import_wrote(tmp_path: Path) -> None:
    from planner.planning import plan

    got = import_acceptance(DATA / "vllm_bench.json", kind="eagle3").for_plan("eagle3")
    answer = plan("Qwen/Qwen3-32B", "h100", acceptance=got, drafters=({"kind": "eagle3"},), concurrency=(8,), context_len=(4096,))
    at_three = next(p for p in answer.points if p["draft_len"] == 3)
    assert at_three["acceptance_len"] == pytest.approx(2.5)


def test_priors_command() -> None:
    table = run("priors", "--workload", "coding")
    assert table.exit_code == 0 and "bring acceptance" in table.stdout and "arxiv.org/abs/2604.09557" in table.stdout
    rows = json.loads(run("priors", "--kind", "eagle3", "--json").stdout)["priors"]
    assert len(rows) == 9 and all(1 <= r["p10"] <= r["median"] <= r["p90"] for r in rows)
    assert isinstance(run("priors", "--workload", "codding").exception, DraftlineError)


def test_transfer_command() -> None:
    rows = json.loads(run("transfer", "--acceptance-len", "2.4", "--at-draft-len", "3", "--kind", "eagle3", "--to", "1..8", "--json").stdout)["rows"]
    assert [r["draft_len"] for r in rows] == list(range(1, 9))
    assert rows[2]["acceptance_len"] == rows[2]["low_len"] == rows[2]["high_len"] == 2.4
    assert all(r["low_len"] <= r["acceptance_len"] <= r["high_len"] for r in rows)
    for bad in ("8..1", "a..b", "0", "1..9999"):
        assert isinstance(
            run("transfer", "--acceptance-len", "2.4", "--at-draft-len", "3", "--kind", "eagle3", "--to", bad).exception, DraftlineError
        )


def test_commands_have_examples() -> None:
    for command in acceptance_app.registered_commands:
        assert command.callback is not None and "Example: draftline acceptance" in (command.callback.__doc__ or "")


# ---------------------------------------------------------------- robustness
def sound(got: Imported) -> None:
    """An import is finite, in range and usable."""
    json.dumps(got.to_dict(), allow_nan=False)
    if got.acceptance_len is not None:
        assert 1 <= got.acceptance_len <= 1 + (got.draft_len or math.inf) + 1e-9
    for s in (got.survival_prob or (),):
        assert all(0 <= v <= 1 for v in s) and all(a >= b - 1e-12 for a, b in zip(s, s[1:], strict=False))
    if got.acceptance is not None:
        survival_from(got.acceptance, kind="eagle3", max_draft_len=16)
    assert got.definition and (got.acceptance is not None or got.warnings)


def attempt(text: str, **options: Any) -> None:
    try:
        sound(import_acceptance(text, **options))
    except InputError as error:
        assert len(str(error)) > 20


TOKENS = [
    "0",
    "-1",
    "1e999",
    "NaN",
    "null",
    "[]",
    "{}",
    '"x"',
    "99999999999999999999",
    "0.5",
    "",
    ",",
    "}",
    "\n",
    "\x00",
    "é",
    '"',
    "1e-320",
    "true",
    ":",
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SAMPLES), st.integers(0, 2**32), st.sampled_from([None, "ngram", "eagle3"]), st.sampled_from([None, 3]))
def test_mutated_inputs_give_an_error_or_a_sound_import(path: Path, seed: int, kind: str | None, draft_len: int | None) -> None:
    rng = random.Random(seed)
    text = path.read_text(encoding="utf-8")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        choice = rng.random()
        if choice < 0.3:
            text = text[:at] + rng.choice(TOKENS) + text[at:]
        elif choice < 0.6:
            text = text[:at] + text[at + rng.randint(1, 12) :]
        elif choice < 0.75:
            text = text[:at]
        else:
            digits = [i for i, c in enumerate(text) if c.isdigit()]
            if digits:
                i = rng.choice(digits)
                text = text[:i] + rng.choice(["9", "0", "-", "1e9", "."]) + text[i + 1 :]
    attempt(text + "\n", kind=kind, draft_len=draft_len)


leaves = st.none() | st.booleans() | st.integers(-5, 2000) | st.floats() | st.text(max_size=6)
KEYS = (
    "spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens", "spec_decode_acceptance_length",
    "spec_decode_acceptance_rate", "spec_decode_per_position_acceptance_rates", "metrics", "speculative_decoding", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens", "acceptance_histogram", "per_step_accepted", "per_step_drafted",
    "internal_states", "avg_spec_accept_length", "accept_length", "speculative_algorithm", "speculative_num_steps", "speculative_num_draft_tokens",
    "speculative_eagle_topk", "meta_info", "spec_verify_ct", "spec_num_correct_drafts", "spec_accept_rate", "spec_correct_drafts_histogram",
    "specDecodingStats", "numDraftTokens", "numAcceptedTokens", "numRequestsWithDraftTokens", "decoding_stats", "acceptance_length_percentiles",
    "average", "total_accepted_draft_tokens", "total_draft_tokens", "timings", "draft_n", "draft_n_accepted", "predicted_n", "n_drafted",
    "n_accept", "n_predict", "n_draft", "spec_decode_token_weighted_acceptance_length", "total_spec_decode_steps",
    "pooled_spec_decode_acceptance_histogram", "avg", "Acceptance_Length_Histogram", "Average_AL", "Category_AL", "0", "1", "3", "survival_prob",
    "points", "draft_len", "acceptance_len", "position", "rate", "per_position", "drafts", "draft_tokens", "accepted_tokens", "generation_tokens",
    "vllm:spec_decode_num_drafts", "series", "stats", "total",
)  # fmt: skip
trees = st.recursive(leaves, lambda c: st.lists(c, max_size=4) | st.dictionaries(st.sampled_from(KEYS), c, max_size=6), max_leaves=25)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), trees, min_size=1, max_size=8) | st.lists(trees, min_size=1, max_size=3))
def test_any_json_with_known_keys_gives_an_error_or_a_sound_import(value: Any) -> None:
    attempt(json.dumps(value))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).map(lambda v: sorted(v, reverse=True)),
    st.integers(50, 400),
    st.sampled_from(["vllm", "llamacpp"]),
)
def test_counters_round_trip(positions: list[int], rounds: int, engine: str) -> None:
    """s_i and AL of the scrape are those of its counters, whatever the engine's prefix."""
    text = counters(rounds, rounds * len(positions), sum(positions), [float(p) for p in positions]).replace("vllm:", f"{engine}:")
    got = import_acceptance(text)
    assert got.survival_prob == pytest.approx([p / rounds for p in positions])
    assert got.acceptance_len == pytest.approx(1 + sum(positions) / rounds)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.2, 0.95), st.integers(1, 8), st.integers(0, 2**31))
def test_detailed_rounds_recover_the_curve_under_mixed_lengths(alpha: float, d: int, seed: int) -> None:
    """Rounds of random drafted length: told apart, the conditional rates are alpha again; pooled they would be too low."""
    rng = random.Random(seed)
    accepted, drafted = [], []
    for _ in range(4000):
        n = rng.randint(1, d)
        a = 0
        while a < n and rng.random() < alpha:
            a += 1
        accepted.append(a)
        drafted.append(n)
    record = {"num_spec_steps": 4000, "num_accepted_draft_tokens": sum(accepted), "num_draft_tokens": sum(drafted), "per_step_accepted": accepted,
              "per_step_drafted": drafted}  # fmt: skip
    got = import_acceptance(json.dumps({"metrics": {"speculative_decoding": record}}))
    assert got.survival_prob is not None
    assert got.survival_prob[0] == pytest.approx(alpha, abs=0.04)
    assert got.acceptance_len == pytest.approx(sum(alpha**i for i in range(len(got.survival_prob) + 1)), rel=0.08)


def test_formats_are_documented() -> None:
    for name, what in FORMATS.items():
        assert name and len(what) > 20


def test_adjust_command_chains_published_ratios_and_writes_for_a_plan(tmp_path: Path) -> None:
    file, out = tmp_path / "a.json", tmp_path / "b.json"
    file.write_text(json.dumps({"eagle3": {"acceptance_len": 3.0, "at_draft_len": 4}}))
    done = CliRunner().invoke(acceptance_app, ["adjust", str(file), "--kind", "eagle3", "--workload", "coding:chat", "--temperature", "0:1", "--json",
                                               "--out", str(out)])  # fmt: skip
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())["eagle3"]
    assert written["at_draft_len"] == 4 and 1.5 < written["acceptance_len"] < 2.6
    for args, says in ((("--kind", "eagle3"), "nothing to adjust"), (("--kind", "eagle3", "--context", "5"), "not a pair")):
        bad = CliRunner().invoke(acceptance_app, ["adjust", str(file), *args])
        assert bad.exception is not None and says in str(bad.exception)
