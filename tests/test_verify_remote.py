"""Engines over HTTP: the whole path against the built-in engine behind a real socket, and what a user reads when a server misbehaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_server import KEY, bad_server

from planner.acceptance.importers import import_acceptance
from planner.cases import parse_case
from planner.deployment import resolve
from planner.errors import InputError
from planner.verify import family
from planner.verify.drafters import NgramDrafter
from planner.verify.engine import generate
from planner.verify.nets.transformer import Transformer, initialise
from planner.verify.remote import (
    Endpoint,
    LiveReading,
    Load,
    LoadSpec,
    Serve,
    ServerIdentity,
    Snapshot,
    Timeouts,
    check_loaded,
    closed_loop,
    free_port,
    identify,
    launch_and_measure,
    launched,
    measure_arm,
    observe,
    read_live,
    recommend_live,
    same_texts,
    server_command,
    snapshot,
)
from planner.verify.server import Engine, EngineServer, serving

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = Timeouts(connect_s=2.0, silence_s=1.0, answer_s=1.5)
PROMPTS = ("one two three one two three one two", "a b c d a b c d a b", "x y x y x y x y", "red green red green red")
DRAFT_LEN = 3
OUTPUT_LEN = 24


@pytest.fixture(scope="module")
def target() -> Transformer:
    """Random weights fall into loops, which look-up drafts follow."""
    net = Transformer(family.TARGET, family.TAPS)
    initialise(net, 0)
    return net.eval().requires_grad_(False)


def encode(text: str) -> list[int]:
    return [ord(c) % family.TARGET.vocab_size for c in text]


def decode(tokens: Any) -> str:
    return "".join(f"{t} " for t in tokens)


def engine(target: Transformer, draft_len: int = DRAFT_LEN, **changes: Any) -> Engine:
    return Engine(target, encode, decode, NgramDrafter if draft_len else None, draft_len, **changes)


@pytest.fixture(scope="module")
def server(target: Transformer) -> Iterator[EngineServer]:
    with serving(engine(target)) as s:
        yield s


def spec(**changes: Any) -> LoadSpec:
    return LoadSpec(**{"concurrency": 2, "output_len": OUTPUT_LEN, "requests": 4, "limit_s": 20.0} | changes)


def acceptance_len(rows: list[tuple[int, int]]) -> float:
    """AL over the rounds that drafted, which is what vLLM counts."""
    drafting = [a for d, a in rows if d]
    return 1 + sum(drafting) / len(drafting)


# ---- the path that works ---------------------------------------------------------------------------------------------------------


def test_the_server_says_what_it_is(server: EngineServer) -> None:
    found = identify(server.url + "/v1/", timeouts=QUICK)
    assert (found.endpoint.engine, found.endpoint.model, found.draft_len, found.speculating) == ("vllm", "builtin", DRAFT_LEN, True)
    assert found.endpoint.base_url == server.url


def test_acceptance_over_http_is_that_of_the_engines_rounds(server: EngineServer, target: Transformer) -> None:
    end = identify(server.url).endpoint
    before, first = snapshot(end), len(server.history)
    load = closed_loop(end, PROMPTS, spec())
    seen = observe(before, snapshot(end), load)
    assert load.problems == () and len(load.sent) == 4
    rows = [r for request in server.history[first:] for r in request]
    assert seen.source == "metrics" and seen.acceptance is not None and seen.acceptance.draft_len == DRAFT_LEN
    assert seen.acceptance.num_drafts == sum(d > 0 for d, _ in rows)
    assert seen.acceptance.drafted == sum(d for d, _ in rows)
    assert seen.acceptance.acceptance_len == pytest.approx(acceptance_len(rows), rel=1e-12)
    assert acceptance_len(rows) > 1.5
    survival = [sum(a >= i for _, a in rows) / sum(d > 0 for d, _ in rows) for i in range(1, DRAFT_LEN + 1)]
    assert seen.acceptance.survival_prob == pytest.approx(survival, rel=1e-12)
    # And the rounds are those of the engine when it is called directly.
    runs = [generate(target, [encode(p)], OUTPUT_LEN, drafter=NgramDrafter(), draft_len=DRAFT_LEN) for p in PROMPTS]
    direct = [(int(d[0]), int(a[0])) for r in runs for d, a in zip(r.rounds.drafted, r.rounds.accepted, strict=True)]
    assert sorted(direct) == sorted(rows)
    assert [s.text for s in sorted(load.sent, key=lambda s: s.prompt)] == [decode(r.tokens[0]) for r in runs]


def test_a_load_times_what_it_receives(server: EngineServer) -> None:
    load = closed_loop(identify(server.url).endpoint, PROMPTS, spec(requests=6))
    assert load.window is not None and 0 <= load.window[0] < load.window[1] <= load.duration_s
    assert all(s.tokens == OUTPUT_LEN and 0 < s.ttft_s < s.latency_s and len(s.chunk_s) <= OUTPUT_LEN for s in load.sent)
    assert load.tokens_per_s is not None and load.tpot_s is not None and load.itl_s is not None and load.ttft_s is not None
    assert load.tokens_per_s == pytest.approx(6 * OUTPUT_LEN / load.duration_s, rel=0.5)
    assert 0 < load.client_busy_frac < 1
    assert "it, not the server, may set the pace" in replace(load, client_busy_frac=0.93).problems[0]
    assert load.itl_s > load.tpot_s  # a chunk holds a round's tokens
    for at in (s.start_s + 1e-6 for s in load.sent):
        assert sum(s.start_s <= at < s.end_s for s in load.sent) <= 2


def test_requests_may_tell_their_own_acceptance(target: Transformer) -> None:
    with serving(engine(target, per_request=True)) as s:
        end = identify(s.url).endpoint
        before = snapshot(end)
        load = closed_loop(end, PROMPTS, spec())
        seen = observe(before, snapshot(end), load, kind=None, draft_len=DRAFT_LEN)
    assert seen.source == "requests" and seen.acceptance is not None
    assert seen.acceptance.drafted == sum(d for rows in s.history for d, _ in rows)
    assert seen.acceptance.accepted == sum(a for rows in s.history for _, a in rows)


def test_an_arm_of_each_kind_is_clean_and_lossless(server: EngineServer, target: Transformer) -> None:
    speculative = measure_arm(server.url, PROMPTS, spec(), kind="ngram", draft_len=DRAFT_LEN)
    with serving(engine(target, 0)) as off:
        plain = measure_arm(off.url, PROMPTS, spec())
    assert speculative.problems == () and plain.problems == ()
    assert speculative.acceptance_len is not None and speculative.acceptance_len > 1.2
    assert plain.observed is not None and plain.observed.acceptance is None and plain.identity.speculating is False
    same = same_texts(plain.load, speculative.load)
    assert (same.identical, same.compared, same.first_difference) == (4, 4, None)
    other = replace(plain.load, sent=tuple(replace(s, text=s.text[:8] + "?") for s in plain.load.sent))
    assert same_texts(plain.load, other).first_difference == (0, 8)
    assert '"source": "metrics"' in json.dumps(speculative.to_dict())


def test_answers_without_streaming_and_bad_requests(server: EngineServer) -> None:
    import httpx

    with httpx.Client(base_url=server.url, timeout=5.0, trust_env=False) as client:
        whole = client.post("/v1/completions", json={"prompt": "x y x y", "max_tokens": 5, "temperature": 0.7, "seed": 3}).json()
        assert whole["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        assert len(whole["choices"][0]["text"].split()) == 5
        for body in ({"prompt": ""}, {"prompt": [1]}, {"prompt": "x", "max_tokens": 0}, {"prompt": "x", "temperature": "warm"}):
            assert client.post("/v1/completions", json=body).status_code == 400
        assert client.get("/nowhere").status_code == client.post("/nowhere", json={}).status_code == 404
        assert client.get("/health").status_code == 200


def test_an_abandoned_load_leaves_the_server_in_order(server: EngineServer) -> None:
    end = identify(server.url).endpoint
    load = closed_loop(end, PROMPTS, spec(output_len=2000, requests=2, limit_s=0.4))
    assert load.error is not None and load.sent == () and load.tokens_per_s is None and load.tpot_s is None
    assert closed_loop(end, PROMPTS, spec(output_len=4)).problems == ()
    time.sleep(0.2)
    assert 'vllm:num_requests_running{engine="0",model_name="builtin"} 0.0' in snapshot(end).metrics


def test_a_server_that_is_stopped_ends_its_answers(target: Transformer) -> None:
    with serving(engine(target)) as s:
        loads: list[Load] = []
        client = threading.Thread(target=lambda: loads.append(closed_loop(Endpoint(s.url), PROMPTS, spec(output_len=2000), timeouts=QUICK)))
        client.start()
        time.sleep(0.4)
        begin = time.monotonic()
    assert time.monotonic() - begin < 3
    client.join()
    assert "another length than the 2000 tokens" in loads[0].problems[-1] or "no longer takes connections" in loads[0].problems[0]


# ---- a live server ---------------------------------------------------------------------------------------------------------------


def test_a_live_server_is_read_and_advised(server: EngineServer) -> None:
    end = identify(server.url).endpoint
    traffic = threading.Thread(target=closed_loop, args=(end, PROMPTS, spec(requests=2000, limit_s=5.0, output_len=96)))
    traffic.start()
    time.sleep(0.3)
    reading = read_live(server.url, window_s=1.5, kind="ngram")
    traffic.join()
    assert reading.missing == ()
    assert reading.acceptance is not None and reading.draft_len == DRAFT_LEN and reading.survival_prob is not None
    assert reading.num_seqs == pytest.approx(2, abs=0.5) and reading.tokens_per_s is not None and reading.tokens_per_s > 0
    assert reading.itl_s is not None and reading.tpot_s is not None and reading.tpot_s < reading.itl_s
    assert reading.output_len == 96 and reading.to_dict()["kind"] is None
    with pytest.raises(InputError, match=r"does not say which drafter it runs.*Give the drafter's kind"):
        recommend_live(replace(reading, acceptance=replace(reading.acceptance, kind=None)), "Qwen/Qwen3-8B", "h100-sxm")
    advice = recommend_live(reading, "Qwen/Qwen3-8B", "h100-sxm", kind="ngram", max_draft_len=8)
    assert advice.running_draft_len == DRAFT_LEN and 0 <= advice.draft_len <= 8 and advice.text
    assert advice.acceptance_low_len <= advice.acceptance_len <= advice.acceptance_high_len
    assert any("was not measured" in a for a in advice.assumptions)
    if advice.draft_len > DRAFT_LEN:
        assert advice.extrapolated and any("beyond the measured" in a for a in advice.assumptions)
    assert advice.plan.inputs["concurrency"] == (2,) or list(advice.plan.inputs["concurrency"]) == [2]


def reading_of(survival: list[float], tpot_s: float | None = 0.006) -> LiveReading:
    """A window of a vLLM server with an EAGLE-3 head, 8 requests running."""
    acceptance = import_acceptance(json.dumps(survival), kind="eagle3", draft_len=len(survival))
    identity = ServerIdentity(Endpoint(engine="vllm"), kind="eagle3", draft_len=len(survival), speculating=True)
    return LiveReading(identity, 10.0, acceptance, num_seqs=8.2, tpot_s=tpot_s, input_len=900.0, output_len=300.0)


def test_advice_beyond_the_measured_length_is_said_to_be_extrapolated() -> None:
    advice = recommend_live(reading_of([0.95]), "Qwen/Qwen3-8B", "h100-sxm")
    assert advice.draft_len > 1 and advice.extrapolated and advice.acceptance_low_len < advice.acceptance_len < advice.acceptance_high_len
    assert "beyond the measured D" in advice.text and any("beyond the measured D=1" in a and "eagle3 law" in a for a in advice.assumptions)
    assert json.dumps(advice.to_dict())


def test_advice_within_the_noise_is_to_leave_it() -> None:
    for survival in ([0.8, 0.6, 0.45, 0.3], [0.8, 0.6, 0.45]):
        advice = recommend_live(reading_of(survival), "Qwen/Qwen3-8B", "h100-sxm", max_draft_len=8)
        keep = len(survival) in (advice.draft_len, *advice.near_optimal)
        assert advice.text.startswith("keep D=") == keep
        assert advice.plan.inputs["input_len"] == 900 and advice.plan.inputs["baseline"]
    low = recommend_live(reading_of([0.1, 0.01, 0.0], tpot_s=None), "Qwen/Qwen3-8B", "h100-sxm")
    assert low.draft_len == 0 and low.text.startswith("switch speculation off instead of D=3")
    assert any("no TPOT was measured" in a for a in low.assumptions)
    with pytest.raises(InputError, match="unknown option 'gpus'"):
        recommend_live(reading_of([0.5]), "Qwen/Qwen3-8B", "h100-sxm", gpus=2)


def test_the_baseline_of_a_speculating_run_is_plain_decoding() -> None:
    """The anchored plan gives back the measured TPOT at the D that was measured."""
    reading = reading_of([0.8, 0.6, 0.45])
    points = recommend_live(reading, "Qwen/Qwen3-8B", "h100-sxm").plan.points
    (at,) = [p for p in points if p["draft_len"] == 3]
    assert at["tpot_s"] == pytest.approx(reading.tpot_s, rel=0.01)


def test_an_idle_server_and_one_without_metrics_say_so(server: EngineServer) -> None:
    reading = read_live(server.url, window_s=0.2)
    assert any("generated nothing in the window" in m for m in reading.missing)
    with pytest.raises(InputError, match="no acceptance was measured"):
        recommend_live(reading, "Qwen/Qwen3-8B", "h100-sxm", kind="ngram")
    with bad_server("no_metrics") as url, pytest.raises(InputError, match="the server exports no metrics"):
        read_live(url, window_s=0.1, timeouts=QUICK)


# ---- servers that are dead, slow or lying ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ends_soon() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 20, "a wait without an end?"


def arm_problems(behaviour: str, kind: str | None = "eagle3", draft_len: int = 4, **changes: Any) -> str:
    """The report of an arm on a bad server."""
    with bad_server(behaviour) as url:
        arm = measure_arm(url, PROMPTS, spec(output_len=6, **changes), kind=kind, draft_len=draft_len, timeouts=QUICK)
    assert arm.problems
    return "\n".join(arm.problems)


def test_nobody_listens() -> None:
    with pytest.raises(InputError, match=r"the server cannot be reached \(ConnectError\).*Is it running"):
        identify(f"http://127.0.0.1:{free_port()}", timeouts=QUICK)


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("error", "the server answers with an error; got '500 Internal Server Error: out of memory'"),
        ("silent", "the server answers too slowly; got 'nothing for 1 s'"),
        ("drip", "the answer does not end"),
    ],
)
def test_a_server_that_does_not_answer_properly(behaviour: str, text: str) -> None:
    with bad_server(behaviour) as url, pytest.raises(InputError) as caught:
        identify(url, timeouts=QUICK)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("fails", ": in the warm-up: 2 of 2 requests failed, the first: request 0: the server answers with an error; got '500"),
        ("fails_later", "CUDA error: device-side assert triggered"),
        ("stalls", "the server sent nothing for 1 s: it is too slow or hangs"),
        ("breaks", "the connection broke off in the middle of an answer"),
        ("no_usage", "the stream ended without its token count"),
        ("cuda_in_stream", "the server reports an error in the stream; got \"{'message': 'EngineDeadError'}\""),
        ("short", "answers have another length than the 6 tokens asked for, the first 3: ignore_eos"),
    ],
)
def test_a_server_that_fails_under_load(behaviour: str, text: str) -> None:
    assert text in arm_problems(behaviour, requests=8)


def test_a_key_is_sent_and_never_said_back() -> None:
    with bad_server("wants_key") as url:
        with pytest.raises(InputError, match=r"the server wants an API key; got 'status 401'.*--api-key-env NAME"):
            identify(url, timeouts=QUICK)
        with pytest.raises(InputError, match="the server refuses the API key") as caught:
            identify(Endpoint(url, api_key="wrong-0815"), timeouts=QUICK)
        assert "0815" not in str(caught.value) and "0815" not in repr(Endpoint(url, api_key="wrong-0815"))
        arm = measure_arm(Endpoint(url, api_key=KEY), PROMPTS, spec(output_len=4), kind="eagle3", draft_len=4, timeouts=QUICK)
        assert len(arm.load.sent) == 4 and KEY not in json.dumps(arm.to_dict()) + repr(arm)
        load = closed_loop(Endpoint(url, "vllm", "m", api_key="wrong-0815"), PROMPTS, spec(output_len=4), timeouts=QUICK)
        assert load.error is not None and "refuses the API key" in load.error and "0815" not in load.error and load.failures == ()


def test_a_slow_server_is_stopped_at_the_limit_and_what_it_did_is_kept() -> None:
    with bad_server("slow") as url:
        load = closed_loop(identify(url).endpoint, PROMPTS, spec(output_len=10, requests=1000, limit_s=1.0), timeouts=QUICK)
    assert load.error is not None and "the load was stopped at its limit of 1 s" in load.error and "of 1000 requests done" in load.error
    assert len(load.sent) >= 2 and load.tokens_per_s is not None and load.duration_s < 2


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("clamped", "D=4 was asked for, the server has D=2: clamped"),
        ("another_method", "another method is loaded: asked for eagle3, the server says ngram"),
        ("plain", "eagle3 with D=4 was asked for, but the server runs without speculation"),
        ("no_positions", "acceptance by position is missing from its metrics: only AL can be compared"),
        ("no_accepted", "a speculation counter is missing"),
        ("no_metrics", "/metrics answers 200 with no data"),
        ("drafts_nothing", "no drafts of eagle3 with D=4 can be seen"),
        ("cut", "a metric line cannot be read"),
    ],
)
def test_a_server_that_does_not_run_what_was_asked_for(behaviour: str, text: str) -> None:
    if behaviour == "cut":
        with bad_server(behaviour) as url, pytest.raises(InputError, match=text):
            measure_arm(url, PROMPTS, spec(output_len=6), kind="eagle3", draft_len=4, timeouts=QUICK)
        return
    assert text in arm_problems(behaviour)


def test_speculation_in_a_plain_arm_is_reported() -> None:
    assert "speculation is on (method not named), but this arm is plain decoding" in arm_problems("honest", None, 0)


def test_others_on_the_server_are_noticed() -> None:
    assert "others use it, and the counters hold their traffic too" in arm_problems("honest")


def test_engines_are_recognised_by_their_own_words() -> None:
    with bad_server("sglang") as url:
        found = identify(url)
        assert (found.endpoint.engine, found.kind, found.draft_len, found.max_seqs, found.version) == ("sglang", "eagle3", 3, 48, "0.5.23")
        assert "EAGLE3 with D=3" in str(found)
        shot = snapshot(found.endpoint)
        seen = observe(shot, shot, kind="eagle3", draft_len=3)
        assert seen.source == "server_info" and seen.acceptance is not None and seen.acceptance.acceptance_len == 2.5
        assert "D=5 was asked for, the server has D=3: clamped" in check_loaded(found, None, kind="eagle3", draft_len=5)[0]
    with bad_server("llamacpp") as url:
        found = identify(url)
        assert (found.endpoint.engine, found.kind, found.draft_len, found.max_seqs) == ("llamacpp", "eagle3", 5, 2)
        assert found.notes == ("started without --metrics: acceptance comes from the answers' timings, without positions",)
    with bad_server("llamacpp_draft") as url:  # as build 11434 says it: /props denies it, D is not told
        found = identify(url)
        assert (found.method, found.kind, found.draft_len, found.speculating) == ("draft-simple", "external", None, True)
    with bad_server("trtllm") as url:
        assert identify(url).endpoint.engine == "trtllm"


def test_sglang_acceptance_comes_from_verify_calls() -> None:
    """Gauges have no difference; 300 tokens, 3 of them from prefill, in 110 verifies."""
    end = Endpoint(engine="sglang")
    info = json.dumps({"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4, "internal_states": []})

    def shot(calls: int, tokens: int, done: int) -> Snapshot:
        names = ("spec_verify_calls", "generation_tokens", "num_requests")
        text = "".join(f'sglang:{n}_total{{model_name="m"}} {v}\n' for n, v in zip(names, (calls, tokens, done), strict=True))
        return Snapshot(end, text + 'sglang:spec_accept_length{model_name="m"} 3.9\n', info)

    seen = observe(shot(1000, 3000, 20), shot(1110, 3300, 23))
    assert seen.source == "metrics" and seen.acceptance is not None
    assert (seen.acceptance.kind, seen.acceptance.draft_len) == ("eagle3", 3)
    assert seen.acceptance.acceptance_len == pytest.approx(297 / 110)
    nothing = observe(shot(1000, 3000, 20), shot(1000, 3000, 20))
    assert nothing.acceptance is None and nothing.source == "none" and nothing.problems


def test_tensorrt_llm_iterations_are_those_since_the_last_scrape() -> None:
    end = Endpoint(engine="trtllm")
    row = {"specDecodingStats": {"numDraftTokens": 30, "numAcceptedTokens": 15, "numRequestsWithDraftTokens": 10}}
    seen = observe(Snapshot(end, json.dumps([row])), Snapshot(end, json.dumps([row, row])), kind="eagle3", draft_len=3)
    assert seen.acceptance is not None and seen.acceptance.num_drafts == 20 and seen.acceptance.acceptance_len == 2.5


def test_a_live_tensorrt_llm_is_read_from_its_iterations() -> None:
    """2 requests drafted in one iteration of 8 ms, 4 in another of 12 ms: batch 3, round 10 ms, AL 1 + 9/6 = 2.5; without times the batch alone."""
    with bad_server("trtllm_live") as url:
        reading = read_live(url, window_s=0.1, kind="eagle3", timeouts=QUICK)
    assert reading.num_seqs == 3.0 and reading.itl_s == pytest.approx(0.010) and reading.acceptance_len == pytest.approx(2.5)
    assert reading.tpot_s == pytest.approx(0.004) and reading.tokens_per_s == pytest.approx(750.0)
    with bad_server("trtllm_untimed") as url:
        reading = read_live(url, window_s=0.1, kind="eagle3", timeouts=QUICK)
    assert reading.num_seqs == 3.0 and reading.tpot_s is None and any("iterLatencyMS" in m for m in reading.missing)


def test_llamacpp_is_read_from_its_timings_where_metrics_are_off() -> None:
    with bad_server("llamacpp") as url:
        arm = measure_arm(url, PROMPTS, spec(output_len=12, concurrency=3, requests=6), kind="eagle3", draft_len=5, timeouts=QUICK)
    assert arm.observed is not None and arm.observed.source == "requests" and arm.acceptance_len == 2.0
    assert all(s.tokens == 12 and len(s.chunk_s) == 12 for s in arm.load.sent)
    text = "\n".join(arm.problems)
    assert "it decodes at most 2 requests at once, 3 were in flight" in text and "llama-server needs --metrics" in text


# ---- starting and stopping -------------------------------------------------------------------------------------------------------


def command(behaviour: str, port: int) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("bad_server.py")), str(port), behaviour]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_killed_in_the_middle_leaves_what_was_done(tmp_path: Path) -> None:
    """The process kills itself (SIGKILL) within its eleventh answer."""
    port = free_port()
    with launched(command("is_killed", port), f"http://127.0.0.1:{port}", tmp_path / "log", start_limit_s=8) as s:
        arm = measure_arm(s.endpoint.base_url, PROMPTS, spec(output_len=5, requests=1000), kind="eagle3", draft_len=4, warmup=2, timeouts=QUICK)
        assert s.process.wait(5) == -signal.SIGKILL
    text = "\n".join(arm.problems)
    assert "it died or was stopped" in text or "broke off" in text
    assert "the counters after the load cannot be read" in text and arm.observed is None
    assert 6 <= len(arm.load.sent) <= 8 and arm.load.tpot_s is not None and "of 1000 requests done" in text


def test_a_launched_server_is_healthy_inside_and_gone_after(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(RuntimeError, match="of ours"), launched(command("honest", port), url, tmp_path / "log", start_limit_s=8) as s:
        assert identify(url).endpoint.engine == "vllm" and "loading weights" in s.last_lines()
        with pytest.raises(InputError, match="something already listens there"), launched(command("honest", port), url, tmp_path / "other"):
            pass
        raise RuntimeError("a fault of ours")
    assert s.process.poll() is not None and not alive(s.process.pid)


@pytest.mark.parametrize(
    ("behaviour", "limit_s", "text"),
    [
        ("dies_at_start", 8.0, r"ended before it was ready \(exit status 1\)(.|\n)*must be divisible by n_predict=5"),
        ("loading", 3.0, r"not ready in time; got 'after 3 s: /health answers 503'(.|\n)*loading weights"),
    ],
)
def test_a_server_that_does_not_come_up(behaviour: str, limit_s: float, text: str, tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(InputError, match=text), launched(
        command(behaviour, port), f"http://127.0.0.1:{port}", tmp_path / "log", start_limit_s=limit_s, timeouts=QUICK
    ):  # fmt: skip
        pytest.fail("it is not healthy")


def test_an_engine_that_is_not_installed(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(InputError, match="the server cannot be started.*Is the engine installed"),
        launched(["no-such-engine"], url, tmp_path / "log"),
    ):
        pass


def test_an_arm_starts_its_own_server_and_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executable of the engine's name stands in for it: it drafts 2 tokens whatever --speculative-config says, and dies in the second arm."""
    script = tmp_path / "vllm"
    script.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --port ]; do shift; done\nexec {sys.executable} {Path(__file__).with_name("bad_server.py")} $2 $ARM\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    dep = resolve(parse_case({"model": "Qwen/Qwen3-8B", "gpu": "h100-sxm", "tp": 1, "n_gpus": 1, "concurrency": 8, "context_len": 1024}))
    reports = []
    for arm, requests in (("clamped", 4), ("is_killed", 30)):
        monkeypatch.setenv("ARM", arm)
        serve = Serve("vllm", dep, "eagle3", 4, 2, drafter_model="ORG/HEAD")
        made = launch_and_measure(serve, PROMPTS, spec(output_len=5, requests=requests), folder=tmp_path, name=arm, start_limit_s=10, timeouts=QUICK)
        reports.append("\n".join(made.problems))
        assert len(made.load.sent) >= 4 and "loading weights" in (tmp_path / f"{arm}.log").read_text()
    assert "D=4 was asked for, the server has D=2: clamped" in reports[0]
    assert "the server ended with exit status -9; its last lines:\nloading weights" in reports[1]


def test_command_lines(tmp_path: Path) -> None:
    dep = resolve(parse_case({"model": "Qwen/Qwen3-8B", "gpu": "h100-sxm", "tp": 1, "n_gpus": 1, "concurrency": 8, "context_len": 1024}))

    def line(engine: str, kind: str | None, draft_len: int, **more: Any) -> str:
        return " ".join(server_command(Serve(engine, dep, kind, draft_len, 8, **more), port=8123, folder=tmp_path))

    vllm = line("vllm", "eagle3", 3, drafter_model="ORG/HEAD")
    assert vllm.startswith("vllm serve Qwen/Qwen3-8B ") and '"num_speculative_tokens": 3' in vllm and vllm.endswith("--host 127.0.0.1 --port 8123")
    assert "speculative" not in line("vllm", None, 0) and "--max-num-seqs 8" in line("vllm", None, 0)
    sglang = line("sglang", "eagle3", 3, drafter_model="ORG/HEAD")
    assert "--speculative-num-steps 3" in sglang and "--enable-metrics" in sglang
    assert "speculative" not in line("sglang", None, 0) and "--max-running-requests 8" in line("sglang", None, 0)
    llama = line("llamacpp", "eagle3", 3, drafter_model="/m/head", model_path="/m/model.gguf")
    assert "-m /m/model.gguf -md /m/head --spec-type draft-eagle3 --spec-draft-n-max 3 --metrics --parallel 8" in llama
    assert "spec" not in line("llamacpp", None, 0, model_path="/m/model.gguf")
    trtllm = line("trtllm", "eagle3", 3, drafter_model="ORG/HEAD")
    assert trtllm.startswith("trtllm-serve Qwen/Qwen3-8B --config") and "max_draft_len: 3" in (tmp_path / "trtllm.yaml").read_text()
    line("trtllm", None, 0)
    assert "speculative" not in (tmp_path / "trtllm.yaml").read_text()
    with pytest.raises(InputError, match="llama.cpp loads a file"):
        line("llamacpp", None, 0)
    with pytest.raises(InputError, match="llamacpp cannot run suffix drafts"):
        line("llamacpp", "suffix", 3, model_path="/m/model.gguf")


def test_the_remote_modules_do_without_torch() -> None:
    code = "import sys, planner.verify.remote; print([m for m in ('torch', 'pandas', 'scipy', 'plotly') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_cannot_be_asked() -> None:
    with pytest.raises(InputError, match="not a server's address"):
        identify("localhost:8000")
    with pytest.raises(InputError, match="this load cannot be run"):
        closed_loop(Endpoint(), (), spec())
    with pytest.raises(InputError, match="not a window"):
        read_live("http://127.0.0.1:1", window_s=0)
