"""Microbenchmarks: plans, statistics, steps, raw files that survive a kill, fits from raw files, kernels against references."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from gpu_profiles.fits import kernel_fit
from gpu_profiles.load import gpu_from_json, gpu_to_json, load_gpu
from microbench import plan as plans
from microbench.session import Session, SessionError, Settings, results
from microbench.stats import StoppingRule, median_interval, moved
from microbench.steps import find_steps
from microbench.store import Store, read_records, same_machine, write_atomic
from microbench.summary import summary
from planner.calibrate.bench import curve, fit_profile, profile_text, step_nodes
from planner.calibrate.bench_report import agreement, predict, select
from planner.errors import InputError, ProfileError
from planner.kernels import GemmFit, gemm_time

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "gpu_profiles" / "measurements" / "cpu-amd-epyc"

# ---- plan ----------------------------------------------------------------------------------------------------------------------


def test_rows_lie_on_both_sides_of_every_tile_edge() -> None:
    rows = set(plans.edge_rows(2048))
    assert set(range(1, 18)) <= rows
    for edge in (16, 32, 64, 128, 256):
        assert {edge, edge + 1} <= rows, edge


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_is_ordered_by_what_it_teaches_and_names_each_point_once(device: str) -> None:
    points = plans.standard_plan(device, cache_bytes=1 << 25, backends=("sdpa",))
    assert len({p.key for p in points}) == len(points)
    assert [p.tier for p in points] == sorted(p.tier for p in points)
    assert {p.op for p in points[:4]} >= {"bandwidth", "launch"}
    assert {p.op for p in points if p.held_out} >= {"gemm", "attention"}
    fitted = [p for p in points if p.op == "gemm" and not p.held_out]
    assert {p.num("m") for p in fitted}.isdisjoint(plans.HELD_OUT_ROWS)


def test_attention_rows_cross_the_tiles_for_every_group() -> None:
    points = plans.standard_plan("cuda", cache_bytes=1 << 25, backends=("triton",))
    for group in (4, 8, 16, 32):
        rows = {
            p.num("query_len") * group for p in points if p.op == "attention" and p.num("num_heads") == 8 * group and p.num("context_len") == 8192
        }
        for edge in (64, 128):
            assert any(edge - group < r <= edge for r in rows) and any(edge < r <= edge + group for r in rows), (group, edge)


def test_a_budget_takes_a_prefix_and_a_shuffle_keeps_the_set() -> None:
    points = plans.standard_plan("cpu", cache_bytes=1 << 25)
    assert plans.fit_budget(points, {}, 0.2, 10.0) == points[:50]
    assert plans.fit_budget(points, {}, 5.0, 1.0) == points[:1]
    mixed = plans.shuffled(points, 3, by_tier=False)
    assert mixed != points and set(mixed) == set(points) and mixed == plans.shuffled(points, 3, by_tier=False)
    assert [p.tier for p in plans.shuffled(points, 3, by_tier=True)] == [p.tier for p in points]


# ---- statistics ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "rank", "coverage"), [(6, 1, 0.969), (10, 2, 0.979), (15, 4, 0.965), (20, 6, 0.959), (100, 40, 0.965)])
def test_interval_of_the_median_has_the_tabulated_ranks(n: int, rank: int, coverage: float) -> None:
    """Order statistics of the sign test (Conover, Practical Nonparametric Statistics, table A3)."""
    interval = median_interval([float(i) for i in range(1, n + 1)])
    assert (interval.low, interval.high) == (rank, n + 1 - rank)
    assert interval.coverage_prob == pytest.approx(coverage, abs=6e-4)


def test_interval_covers_the_median_of_a_skewed_distribution() -> None:
    rng = Random(0)
    hits = sum(i.low <= math.log(2.0) <= i.high for i in (median_interval([rng.expovariate(1.0) for _ in range(25)]) for _ in range(2000)))
    assert 0.94 <= hits / 2000 <= 0.98


def test_stopping_rule() -> None:
    rule = StoppingRule(least=6, most=20, half_width_frac=0.01, cap_s=1.0)
    assert rule.reason([1.0] * 5, 0.1) is None
    assert rule.reason([1.0] * 6, 0.1) == "converged"
    noisy = [1.0, 1.2] * 10
    assert rule.reason(noisy[:10], 0.1) is None
    assert rule.reason(noisy, 0.1) == "count"
    assert rule.reason(noisy[:3], 1.5) == "time"
    assert rule.reason(noisy[:2], 1.5) is None
    assert moved(1.0, 1.03) == pytest.approx(0.03) and moved(1.0, 0.97) == pytest.approx(0.03)


# ---- steps ---------------------------------------------------------------------------------------------------------------------

ROWS = [8, 16, 24, 32, 40, 56, 64, 72, 96, 112, 128, 136, 160, 184, 192, 200, 256, 264]
EDGES = (16, 32, 64, 128, 192, 256)


def noisy(time_s: Callable[[float], float], noise: float, seed: int = 0) -> tuple[list[float], list[float]]:
    rng, x, t = Random(seed), [], []
    for _ in range(3):
        for r in ROWS:
            x.append(float(r))
            t.append(time_s(r) * (1.0 + rng.gauss(0.0, noise)))
    return x, t


def test_a_step_is_found_at_its_edge_with_its_height() -> None:
    found = find_steps(*noisy(lambda r: 50e-6 + 1e-8 * r + (25e-6 if r > 128 else 0.0), 0.01), EDGES)
    assert [s.edge for s in found] == [128.0]
    assert found[0].height_s == pytest.approx(25e-6, rel=0.1)
    assert found[0].delta_bic > 50


def test_two_steps_are_both_found() -> None:
    found = find_steps(*noisy(lambda r: 50e-6 + (10e-6 if r > 64 else 0.0) + (30e-6 if r > 128 else 0.0), 0.01), EDGES)
    assert {s.edge for s in found} == {64.0, 128.0}


@pytest.mark.parametrize("shape", ["flat", "line", "hinge"])
def test_no_step_where_there_is_none(shape: str) -> None:
    curves: dict[str, Callable[[float], float]] = {
        "flat": lambda r: 50e-6,
        "line": lambda r: 20e-6 + 3e-7 * r,
        "hinge": lambda r: 50e-6 + 3e-7 * max(r - 128.0, 0.0),
    }
    wrong = sum(bool(find_steps(*noisy(curves[shape], 0.02, seed), EDGES)) for seed in range(20))
    assert wrong <= 1, f"{wrong} of 20"


def test_a_step_needs_points_close_on_both_sides() -> None:
    x, t = [1.0, 2.0, 4.0, 8.0, 16.0, 256.0, 300.0] * 3, [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0] * 3
    assert find_steps(x, t, (32, 64, 128)) == []


# ---- raw files -----------------------------------------------------------------------------------------------------------------


def test_a_half_written_line_is_dropped_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    store = Store(path)
    store.append("environment", fingerprint={"name": "x"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind":"point","key":"half')
    assert [r["kind"] for r in read_records(path)] == ["environment"]
    again = Store(path)
    again.append("point", key="whole")
    assert [r.get("key") for r in read_records(path)] == [None, "whole"]


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_fingerprints_agree_but_for_the_date() -> None:
    assert same_machine({"name": "a", "date": "1"}, {"name": "a", "date": "2"})
    assert not same_machine({"name": "a"}, {"name": "b"})


# ---- runs, on a device that only pretends ----------------------------------------------------------------------------------------

ENVIRONMENT = {"device": "cpu", "name": "Pretend", "cache_bytes": 1 << 25, "memory_bytes": 1 << 33, "date": "2026-12-01"}


class PretendDevice:
    kind, cache_bytes = "cpu", 1 << 25

    def tensor(self, *_: Any) -> Any: ...
    def copies(self, *_: Any) -> int:
        return 1

    def timed(self, *_: Any) -> Any: ...
    def guard(self) -> Any:
        return nullcontext()


def truth_s(p: plans.Point) -> float:
    """A machine with a cliff from one row to three and a step at 64."""
    a = dict(p.args)
    if p.op == "gemm":
        m, elements = float(a["m"]), float(a["n"]) * float(a["k"])
        return 5e-6 + elements * 4 / 1e10 * min(m, 3.0) + 2 * m * elements / 6e10 * (1.3 if m > 64 else 1.0)
    if p.op == "attention":
        return 2e-5 + 1e-9 * float(a["num_heads"]) * float(a["query_len"]) * float(a["context_len"])
    if p.op == "bandwidth":
        return float(a["size_bytes"]) * {"read": 1, "copy": 2, "triad": 3}[str(a["pattern"])] / 1.5e10
    return 1e-5


class PretendSession(Session):
    sentinels: tuple[float, ...] = ()
    pause_s = 0.0

    def sample(self, p: plans.Point, rule: StoppingRule | None = None) -> tuple[list[float], str]:
        if p == self.sentinel and rule is not None:
            value = self.sentinels[0] if self.sentinels else 1.0
            self.sentinels = self.sentinels[1:]
            return [value] * 15, "count"
        time.sleep(self.pause_s)
        rng = Random(f"{p.key} {len(self.store.records)}")
        return [truth_s(p) * (1.0 + rng.gauss(0.0, 0.01)) for _ in range(9)], "count"


def pretend(store: Store, budget_s: float = 1e3, **settings: Any) -> PretendSession:
    return PretendSession(Settings("cpu", budget_s, **settings), store, device=PretendDevice(), environment=ENVIRONMENT)


def test_three_passes_measure_every_point_three_times() -> None:
    store = pretend(Store()).run()
    assert [r["ok"] for r in store.of("pass")] == [True] * 3 and store.finished
    rows = results(store.records)
    assert len(rows) == len(store.of("plan")[0]["points"])
    assert all(len(r["passes_s"]) == 3 and r["low_s"] <= r["time_s"] <= r["high_s"] for r in rows)
    orders = [[r["key"] for r in store.of("point") if r["index"] == i] for i in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_a_pass_whose_sentinel_moved_is_rejected_and_replaced() -> None:
    session = pretend(Store(), points=plans.standard_plan("cpu", cache_bytes=1 << 25)[:20])
    session.sentinels = (1.0, 1.0, 1.0, 1.5)  # the second pass moves by 50 %
    store = session.run()
    assert [r["ok"] for r in store.of("pass")] == [True, False, True, True]
    assert all(len(r["passes_s"]) == 3 for r in results(store.records))


def test_a_budget_that_ends_costs_the_last_points(monkeypatch: pytest.MonkeyPatch) -> None:
    session = pretend(Store(), budget_s=3.0)
    session.pause_s = 0.01
    store = session.run()
    assert store.finished and store.of("done")[0]["spent_s"] < 4.0
    measured = {r["key"] for r in store.of("point")}
    assert {p.key for p in plans.standard_plan("cpu", cache_bytes=1 << 25) if p.tier == 0} <= measured


def test_a_raw_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    pretend(Store(path), points=plans.standard_plan("cpu", cache_bytes=1 << 25)[:3])
    with pytest.raises(SessionError, match="another machine"):
        PretendSession(Settings("cpu", 1.0), Store(path), device=PretendDevice(), environment=ENVIRONMENT | {"name": "Other"})


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
import test_microbench as t
session = t.pretend(t.Store(Path(sys.argv[1])), points=t.plans.standard_plan("cpu", cache_bytes=1 << 25)[:40])
session.pause_s = 0.01
session.run()
"""


def test_killed_in_the_middle_nothing_is_half_written_and_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    code = CHILD.format(tests=str(ROOT / "tests"), root=str(ROOT))
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b'"kind":"point"') < 50):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = [r for r in read_records(path) if r["kind"] == "point"]
    assert 50 <= len(before) < 120
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)
    records = read_records(path)
    points = [r for r in records if r["kind"] == "point"]
    assert points[: len(before)] == before
    assert len(points) == len({(r["key"], r["index"]) for r in points}) == 3 * 40
    assert [r["kind"] for r in records].count("environment") == 1 and records[-1]["kind"] == "done"


# ---- fits ----------------------------------------------------------------------------------------------------------------------


def test_a_cpu_with_a_cliff_is_fitted_to_its_curve() -> None:
    store = pretend(Store()).run()
    fitted = fit_profile(store.records)
    gpu = fitted.profile
    assert gpu.arch == "cpu" and gpu.bytes_per_s == pytest.approx(1.5e10, rel=0.03)
    assert fitted.errors["gemm/fp32"] < 0.05 and fitted.errors["attention/fp32"] < 0.05
    fit = kernel_fit("gemm", gpu, "builtin", "fp32")
    assert fit.distance == "own" and fit.band[0] < 1.0 < fit.band[1]
    for m in (1, 2, 3, 8, 20, 64, 65):
        p = plans.point("gemm", 1, dtype="fp32", m=m, n=2048, k=2048)
        assert predict({"op": "gemm", "args": dict(p.args)}, gpu) == pytest.approx(truth_s(p), rel=0.08), m
    again = gpu_from_json(json.loads(profile_text(gpu)), "profile")
    assert gpu_to_json(again) == gpu_to_json(gpu)


def test_two_runs_of_the_same_machine_agree_within_their_bands() -> None:
    first, second = (fit_profile(pretend(Store(), seed=s).run().records).profile for s in (0, 1))
    rows = [r for r in results(pretend(Store()).run().records) if r["op"] in ("gemm", "attention")]
    found = agreement(first, second, rows)
    assert found["within_frac"] > 0.95 and found["median_ratio"] < 1.02


def test_a_gpu_keeps_its_datasheet_and_gets_measured_shares() -> None:
    """Synthetic H200 rows made by the kernel model itself: the fit must find them again, and name its own profile."""
    base = load_gpu("h200-sxm")
    true = GemmFit.from_gpu(base, "bf16")
    store, rng = Store(), Random(0)
    store.append("environment", fingerprint={"device": "cuda", "name": "NVIDIA H200", "cache_bytes": 50 << 20, "date": "2026-12-01"})
    store.append("plan", tolerance_frac=0.02)
    points = plans.gemm_points(plans.GPU_SHAPES, ("bf16",), 2048, 1e13) + plans.bandwidth_points(50 << 20)
    for p in [*points, plans.point("launch", 0, kind="tiny")]:
        a = {k: v for k, v in p.args if isinstance(v, int)}
        if p.op == "gemm":
            t = float(gemm_time(a["m"], a["n"], a["k"], true, weight_bytes_per_element=2.0, act_bytes_per_element=2.0).time_s)
        else:
            t = truth_s(p) * 1.5e10 / 4.2e12 if p.op == "bandwidth" else 2e-6
        samples = [t * (1.0 + rng.gauss(0.0, 0.003)) for _ in range(9)]
        store.append("point", key=p.key, op=p.op, args=dict(p.args), held_out=p.held_out, index=0, samples_s=samples)
    store.append("sentinel", index=0, time_s=1.0)
    store.append("pass", index=0, ok=True, moved_frac=0.001)
    found = fit_profile(store.records)
    assert found.profile.id == "h200-sxm-measured" and found.profile.bytes_per_s == base.bytes_per_s
    assert found.profile.bandwidth_eff == pytest.approx(4.2e12 / base.bytes_per_s, rel=0.01)
    assert found.profile.sources["bandwidth_eff"].origin == "measured"
    assert found.errors["gemm/bf16"] < 0.03
    entry: Any = (found.profile.calibration or {})["kernels"]
    assert set(entry["gemm"]["*"]["bf16"]["stderr_log"]) == set(entry["gemm"]["*"]["bf16"]["p"])
    with pytest.raises(ProfileError, match="no packaged profile"):
        fit_profile([{"kind": "environment", "fingerprint": {**store.of("environment")[0]["fingerprint"], "name": "GTX 9000"}}, *store.records[1:]])


class PretendGpu(PretendDevice):
    kind, cache_bytes = "cuda", 50 << 20


def gpu_truth_s(p: plans.Point) -> float:
    """An H200-like card: memory at 4.2 TB/s; attention streams its KV again, a third of it visible, for every 128 rows."""
    a = {k: v for k, v in p.args if isinstance(v, int)}
    if p.op == "gemm":
        fit = GemmFit.from_gpu(load_gpu("h200-sxm"), p.text("dtype"))
        size = 1.0 if p.text("dtype") == "fp8" else 2.0
        return float(gemm_time(a["m"], a["n"], a["k"], fit, weight_bytes_per_element=size, act_bytes_per_element=size).time_s)
    if p.op == "attention":
        tiles = -(-a["num_heads"] // a["num_kv_heads"] * a["query_len"] // 128)
        kv_bytes = 4.0 * a["num_seqs"] * a["num_kv_heads"] * a["context_len"] * a["head_dim"]
        return 8e-6 + kv_bytes / 4e12 * (1.0 + 0.33 * (tiles - 1)) + 1e-9 * a["query_len"]
    if p.op == "moe":
        return 1e-5 + a["touched"] * 6.0 * a["width"] * a["ffn"] / 3.5e12
    if p.op == "round":
        return 3e-4 + 1e-6 * a["num_seqs"] * a["query_len"]
    return truth_s(p) * 1.5e10 / 4.2e12 if p.op == "bandwidth" else 2e-6


def test_a_whole_gpu_run_is_analysed_and_the_step_at_128_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a session on a card does, with a card that only pretends: plan, passes, summary, fit."""
    monkeypatch.setattr("microbench.attention.backends", lambda kind: ("triton", "sdpa-flash"))
    monkeypatch.setitem(globals(), "truth_s", lambda p, of=truth_s: of(p) if p.op == "bandwidth" else gpu_truth_s(p))
    environment = {"device": "cuda", "name": "NVIDIA H200", "cache_bytes": 50 << 20, "memory_bytes": 1 << 37, "date": "2026-12-01"}
    store = PretendSession(Settings("cuda", 1e4), Store(), device=PretendGpu(), environment=environment).run()
    shown = summary(store.records)
    curves = {c["group"]: c["steps"] for c in shown["attention"] if c["backend"] == "triton" and c["context_len"] == 8192}
    assert set(curves) == {4, 8, 16, 32}
    for group, steps in curves.items():
        assert 128 in {s["above_rows"] for s in steps}, group
        assert {s["above_rows"] for s in steps} <= {128, 256}, group
    assert shown["points"]["gemm"] > 100 and shown["best_flop_per_s"]["bf16"] > 5e14
    found = fit_profile(store.records)
    entry: Any = (found.profile.calibration or {})["kernels"]
    assert set(entry["gemm"]) == {"*", "builtin", "transformers"}, "fp8 of torch is not the serving engines' fp8"
    assert set(entry["attention"]) == {"transformers"}, "the built-in engine calls its packed kernel, which only its own grid measures"
    assert kernel_fit("attention", found.profile, "vllm", "bf16").distance != "own"
    assert kernel_fit("gemm", found.profile, "vllm", "bf16").distance == "own"


def test_too_little_or_foreign_files_are_refused_with_a_next_step() -> None:
    with pytest.raises(InputError, match="not a raw file"):
        fit_profile([{"kind": "point"}])
    with pytest.raises(InputError, match="larger --budget"):
        fit_profile([{"kind": "environment", "fingerprint": ENVIRONMENT}])


def test_curve_interpolates_between_nodes_and_ignores_an_outlier() -> None:
    x = np.log(np.asarray([1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0, 8.0, 8.0]))
    y = 0.5 * x
    y[3] = 9.0
    values, _ = curve(x, y, np.log(np.asarray([1.0, 4.0, 8.0])))
    assert values == pytest.approx(0.5 * np.log([1.0, 4.0, 8.0]), abs=0.05)
    assert step_nodes(np.asarray([1.0, 1.0, 2.0, 16.0, 17.0, 20.0, 64.0])) == (1.0, 16.0, 17.0, 64.0)


# ---- the committed measurement ---------------------------------------------------------------------------------------------------


def test_committed_raw_file_gives_the_committed_profile() -> None:
    fitted = fit_profile(read_records(MEASURED / "raw.jsonl"))
    committed = load_gpu(str(MEASURED / "profile.json"))
    rows = [r for r in results(read_records(MEASURED / "raw.jsonl")) if r["op"] in ("gemm", "attention", "moe")]
    found = agreement(fitted.profile, committed, rows)
    assert found["max_ratio"] < 1.02, found
    assert fitted.profile.bytes_per_s == committed.bytes_per_s
    assert dict(fitted.profile.peak_flop_per_s) == dict(committed.peak_flop_per_s)


def test_two_committed_runs_agree_within_their_bands() -> None:
    """Measured minutes apart on a busy shared machine."""
    first, second = (fit_profile(read_records(MEASURED / name)).profile for name in ("raw.jsonl", "second.jsonl"))
    rows = [r for r in results(read_records(MEASURED / "second.jsonl")) if r["op"] in ("gemm", "attention", "moe")]
    found = agreement(first, second, rows)
    assert found["within_frac"] >= 0.9 and found["median_ratio"] < 1.1, found


def test_held_out_points_of_the_committed_run_are_predicted_to_15_percent() -> None:
    rows = [r for r in results(read_records(MEASURED / "raw.jsonl")) if r["op"] in ("gemm", "attention", "moe") and r["held_out"]]
    profile = load_gpu(str(MEASURED / "profile.json"))
    assert len(rows) >= 60
    assert float(np.median([abs(predict(r, profile) / r["time_s"] - 1.0) for r in rows])) <= 0.15


def test_committed_profile_holds_the_cliff_and_is_used_by_kernels_and_plan() -> None:
    from planner.kernel_cases import kernel_lines
    from planner.planning import plan

    path = str(MEASURED / "profile.json")
    case = {"gpu": path, "engine": "builtin", "op": "gemm", "n": 2048, "k": 2048}
    answers = kernel_lines(json.dumps(case | {"id": f"{d}{m}", "m": m, "weights_dtype": d}) for d in ("fp32", "bf16") for m in (1, 3, 8, 16))
    time_s = {a["id"]: a["time_s"] for a in answers}
    assert all("measured: calibration" in a["basis"] for a in answers)
    assert time_s["fp323"] / time_s["fp321"] > 1.8, "the cliff from one row to three"
    assert time_s["fp328"] / time_s["fp323"] < 1.4, "the plateau to eight rows"
    assert time_s["bf1616"] / time_s["bf168"] > 1.7, "bf16 is linear in rows"
    made = plan("Qwen/Qwen3-0.6B", path, engine="builtin", concurrency=(1, 4), input_len=64, output_len=64)
    assert made.recommendations


def test_committed_measurement_has_no_host_names() -> None:
    text = (MEASURED / "raw.jsonl").read_text(encoding="utf-8")
    assert os.uname().nodename not in text and "/home" not in text and "/tmp" not in text


def test_summary_names_rates_and_curves() -> None:
    shown = summary(read_records(MEASURED / "raw.jsonl"))
    assert max(shown["bytes_per_s"].values()) > 5e9 and shown["best_flop_per_s"]["fp32"] > 1e10
    assert {c["group"] for c in shown["attention"]} == {1, 4}


def test_a_models_own_matrices_are_measured() -> None:
    from planner.cli.calibrate import model_shapes

    shapes, touched_bytes = model_shapes("Qwen/Qwen3-0.6B")
    assert (3072 * 2, 1024) in shapes and (1024, 3072) in shapes
    assert 2 * 4.4e8 < touched_bytes < 2 * 7.6e8
    points = plans.standard_plan("cpu", cache_bytes=1 << 25, shapes=shapes)
    assert {(p.num("n"), p.num("k")) for p in points if p.op == "gemm"} == set(shapes)


# ---- with torch ------------------------------------------------------------------------------------------------------------------


def test_kernels_compute_what_they_should_on_this_cpu() -> None:
    torch = pytest.importorskip("torch")
    from microbench import attention, gemm, round
    from microbench.timing import CpuDevice

    device = CpuDevice(1 << 20)
    with device.guard():
        p = plans.point("gemm", 1, dtype="fp32", m=3, n=32, k=64)
        work = gemm.gemm_work(p, device)
        x, w = device.tensor((3, 64), "fp32", 7), device.tensor((32, 64), "fp32", 1)
        torch.testing.assert_close(work.launch(1), x @ w.T)
        assert bool((w.abs() > 0).all()), "data is random, never zeros"
        p = plans.point(
            "attention", 1, backend="sdpa", dtype="fp32", num_seqs=2, query_len=3, context_len=40, num_heads=4, num_kv_heads=2, head_dim=16
        )
        assert attention.work(p, device).launch(0).shape == (2, 4, 3, 16)
        shape = {"num_seqs": 2, "query_len": 3, "context_len": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        packed = attention.work(plans.point("attention", 1, backend="sdpa-packed", dtype="fp32", **shape), device).launch(0)
        query, keys, values = (
            device.tensor((2, 4, 3, 16), "fp32", 5),
            device.tensor((2, 40, 2, 16), "fp32", 0).transpose(1, 2),
            device.tensor((2, 40, 2, 16), "fp32", 1).transpose(1, 2),
        )
        seen = torch.ones(3, 40, dtype=torch.bool).tril(37)  # the last new token sees all, the first all but two
        wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(packed.reshape(2, 4, 3, 16), wanted)
        p = plans.point("gemm", 1, dtype="int8/bf16", m=3, n=32, k=64)
        got = gemm.gemm_work(p, device).launch(1)
        w8 = device.tensor((32, 32), "bf16", 1).view(torch.int8).float()
        x, scale = device.tensor((3, 64), "bf16", 7).float(), device.tensor((32,), "bf16", 3).float()
        torch.testing.assert_close(got.float(), (x @ w8.T) * scale, rtol=0.02, atol=2.0)
        sample = device.timed(work)
        assert 0.0 < sample() < 1.0
        p = plans.round_points(
            {**plans.ROUND_CPU, "layers": 1, "hidden": 64, "ffn": 96, "vocab": 50, "heads": 4, "kv_heads": 2, "head_dim": 16}, "fp32", 32, (2,)
        )[1]
        assert round.work(p, device).launch(0).shape == (4, 50)
        assert [count for _, count in round.kernels(p)] == [1] * 6


@pytest.mark.slow
def test_calibrate_end_to_end_twice(tmp_path: Path) -> None:
    """A tiny budget measures a usable profile; a second run agrees; a fresh check is printed."""
    pytest.importorskip("torch")
    import typer

    from planner.cli.calibrate import calibrate

    app = typer.Typer()
    app.command()(calibrate)
    for name in ("a", "b"):
        begun = time.monotonic()
        app(["--device", "cpu", "--budget", "25", "--out", str(tmp_path / f"{name}.json"), "--check", "--json"], standalone_mode=False)
        assert time.monotonic() - begun < 120.0
    first, second = (load_gpu(str(tmp_path / f"{n}.json")) for n in "ab")
    rows = select(results(read_records(tmp_path / "a.raw.jsonl")), "gemm")
    found = agreement(first, second, rows)
    assert found["median_ratio"] < 1.3, found
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


# ---- Triton and CUDA sources -----------------------------------------------------------------------------------------------------

INTERPRET = """
import torch
from microbench.summary import reference
from microbench.triton_attention import verify_attention
torch.manual_seed(0)
worst = 0.0
for b, h, hk, t, s, d, m, n in (
    (1, 4, 1, 1, 70, 32, 16, 1), (2, 8, 2, 4, 200, 32, 16, 3), (1, 8, 1, 5, 130, 16, 64, 2), (1, 6, 2, 3, 97, 64, 32, None),
    (1, 16, 1, 9, 300, 16, 128, 4), (1, 2, 2, 2, 64, 32, None, 8),
):
    q, k, v = torch.randn(b, h, t, d), torch.randn(b, hk, s, d), torch.randn(b, hk, s, d)
    worst = max(worst, float((verify_attention(q, k, v, block_m=m, splits=n) - reference(q, k, v)).abs().max()))
print(worst)
"""


@pytest.mark.triton
def test_triton_kernel_agrees_with_float64_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET], capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert float(done.stdout) < 2e-6


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (89, "mma.sync"), (90, "wgmma"), (100, "tcgen05"), (120, "mma.sync")])
def test_triton_kernel_compiles_for_each_generation(capability: int, instruction: str) -> None:
    pytest.importorskip("triton")
    from microbench.triton_attention import compile_for

    for block_m, expected in ((16, "mma.sync"), (128, instruction)):
        ptx = compile_for(capability, block_m)
        assert expected in ptx["split"] and ".entry" in ptx["combine"], block_m


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_stream_kernels_compile(capability: int, tmp_path: Path) -> None:
    from microbench.bandwidth import KERNELS, SOURCE

    (tmp_path / "stream.cu").write_text(SOURCE, encoding="utf-8")
    ptx = tmp_path / "stream.ptx"
    done = subprocess.run(
        ["nvcc", "-ptx", f"-arch=sm_{capability}", "-o", str(ptx), str(tmp_path / "stream.cu")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = ptx.read_text(encoding="utf-8")
    assert all(f".entry {name}" in text for name in KERNELS)
    assert "ld.global.nc.v4" in text or "ld.global.v4" in text
