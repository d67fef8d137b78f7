"""One run of a plan: three shuffled passes with a sentinel around each, within a budget, interruptible and resumable.

Every measured point is one record on disk before the next begins. A run that is started again on the same raw file goes on where it
stopped; a pass that was cut gets a new sentinel, and starts over when that moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from microbench import plan as plans
from microbench.plan import Point
from microbench.stats import CPU_RULE, CUDA_RULE, SENTINEL_TOLERANCE, StoppingRule, median_interval, moved
from microbench.store import SCHEMA_VERSION, Record, Store, same_machine
from microbench.telemetry import Telemetry, throttled
from microbench.timing import CpuDevice, CudaDevice, Device, Work

PASSES = 3
#: Further passes in place of rejected ones, if the budget allows.
SPARE_PASSES = 2
#: Seconds of a point beside its repeats, before any was timed.
SETUP_S = {"cuda": 0.15, "cpu": 0.06}

Progress = Callable[[str, int, int], None]
"""Called with (what is measured, points done, points planned)."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class SessionError(Exception):
    """No such device, or a raw file that cannot be gone on with here."""


@dataclass
class Settings:
    """What a run is asked to do."""

    device: str
    budget_s: float
    shapes: Sequence[plans.Shape] = ()
    dtypes: Sequence[str] = ()
    passes: int = PASSES
    seed: int = 0
    rule: StoppingRule | None = None
    points: Sequence[Point] | None = None
    """Instead of the standard plan."""
    working_set_bytes: float | None = None
    progress: Progress = field(default=silent, repr=False)


def make_work(p: Point, device: Device) -> Work | None:
    """The kernel of a point, or None where this device or its libraries lack it."""
    from microbench import attention, bandwidth, gemm, moe, overhead, round

    match p.op:
        case "bandwidth":
            return bandwidth.work(p, device)
        case "gemm":
            return gemm.gemm_work(p, device) if gemm.supported(p, device) else None
        case "attention":
            return attention.work(p, device) if attention.supported(p) else None
        case "moe":
            return moe.work(p, device)
        case "launch":
            return overhead.launch_work(p, device)
        case "sampler":
            return overhead.sampler_work(p, device)
        case "round":
            return round.work(p, device)
        case _:
            raise ValueError(f"nothing measures {p.op}")


class Session:
    """A run on one device and one raw file."""

    def __init__(self, settings: Settings, store: Store, *, device: Device, environment: dict[str, Any]) -> None:
        self.settings, self.store, self.device = settings, store, device
        self.rule = settings.rule or (CUDA_RULE if device.kind == "cuda" else CPU_RULE)
        self.telemetry = Telemetry(device.kind == "cuda")
        self.sentinel = plans.sentinel(device.kind)
        self.started = time.monotonic()
        self.cost_s: dict[str, float] = {}
        self._open(environment)

    def _open(self, environment: dict[str, Any]) -> None:
        known = self.store.of("environment")
        if known and not same_machine(known[0]["fingerprint"], environment):
            raise SessionError(f"{self.store.name} was begun on another machine or with other library versions")
        for record in self.store.of("point"):
            self.cost_s[record["key"]] = record["wall_s"]
        if known:
            stored = [_point(r) for r in self.store.of("plan")[0]["points"]]
            self.points, self.spent_before_s = stored, sum(r["wall_s"] for r in self.store.of("point"))
            return
        s = self.settings
        from microbench.attention import backends

        self.points = list(s.points) if s.points is not None else plans.standard_plan(
            s.device, cache_bytes=self.device.cache_bytes, shapes=s.shapes, dtypes=s.dtypes, backends=backends(s.device)
        )  # fmt: skip
        self.spent_before_s = 0.0
        self.store.append("environment", schema_version=SCHEMA_VERSION, fingerprint=environment)
        self.store.append(
            "plan", budget_s=s.budget_s, passes=s.passes, seed=s.seed, rule=asdict(self.rule), tolerance_frac=SENTINEL_TOLERANCE[self.device.kind],
            points=[{"op": p.op, "args": dict(p.args), "tier": p.tier, "held_out": p.held_out} for p in self.points],
        )  # fmt: skip

    def left_s(self) -> float:
        """Budget that remains, what earlier runs on this file spent taken off."""
        return float(self.settings.budget_s - self.spent_before_s - (time.monotonic() - self.started))

    def run(self) -> Store:
        """All passes. Returns the store, finished unless it was interrupted."""
        verdicts = {r["index"]: r["ok"] for r in self.store.of("pass")}
        accepted, index = sum(verdicts.values()), 0
        with self.device.guard():
            while accepted < self.settings.passes and index < self.settings.passes + SPARE_PASSES:
                if index in verdicts:
                    index += 1
                    continue
                if index and self.left_s() <= 0.0:
                    break
                accepted += self._pass(index, max(self.settings.passes - accepted, 1))
                index += 1
        self.store.append("done", passes_accepted=accepted, spent_s=round(self.settings.budget_s - self.left_s(), 2))
        return self.store

    def _pass(self, index: int, passes_left: int) -> bool:
        deadline = time.monotonic() + max(self.left_s() / passes_left, 0.0)
        usual = median(self.cost_s.values()) if self.cost_s else SETUP_S[self.device.kind] + self.rule.cap_s
        chosen = plans.fit_budget(self.points, self.cost_s, usual, deadline - time.monotonic())
        order = plans.shuffled(chosen, self.settings.seed * 1000 + index, by_tier=not self.cost_s)
        tolerance = SENTINEL_TOLERANCE[self.device.kind]
        before = self._sentinel()
        cut = [r for r in self.store.of("sentinel") if r["index"] == index]
        measured = {r["key"] for r in self.store.of("point") if r["index"] == index}
        if cut and moved(cut[0]["time_s"], before) > tolerance:
            self.store.append("pass", index=index, ok=False, moved_frac=moved(cut[0]["time_s"], before), why="machine changed during the pause")
            return False
        if not cut:
            self.store.append("sentinel", index=index, time_s=before)
        for done, p in enumerate(order):
            if p.key in measured:
                continue
            if time.monotonic() > deadline and done:
                break
            self.settings.progress(p.op, done, len(order))
            self._measure(p, index)
        change = moved(cut[0]["time_s"] if cut else before, self._sentinel())
        ok = change <= tolerance
        self.store.append("pass", index=index, ok=ok, moved_frac=round(change, 4))
        return ok

    def _sentinel(self) -> float:
        """Median of a generous measurement of the sentinel."""
        return median_interval(self.sample(self.sentinel, StoppingRule(15, 60, 0.005, 3 * self.rule.cap_s))[0]).median

    def sample(self, p: Point, rule: StoppingRule | None = None) -> tuple[list[float], str]:
        """Samples of one point in seconds per launch, and why the measurement stopped."""
        rule = rule or self.rule
        if p.op == "bandwidth" and self.device.kind == "cuda" and find_spec("cupy") is not None:
            from microbench.bandwidth import cupy_measure

            return cupy_measure(p), "cupy"
        work = make_work(p, self.device)
        if work is None:
            return [], "unsupported"
        timed = self.device.timed(work)
        samples: list[float] = []
        start = time.monotonic()
        while (reason := rule.reason(samples, time.monotonic() - start)) is None:
            samples.append(timed())
        return samples, reason

    def _measure(self, p: Point, index: int) -> None:
        start, telemetry = time.monotonic(), self.telemetry.read()
        fields: dict[str, Any] = {"key": p.key, "op": p.op, "args": dict(p.args), "held_out": p.held_out, "index": index}
        try:
            samples, reason = self.sample(p)
        except Exception as error:  # a backend that refuses a shape must not end the run; it is written down
            samples, reason = [], f"{type(error).__name__}: {str(error)[:120]}"
        after = self.telemetry.read()
        wall = time.monotonic() - start
        self.cost_s[p.key] = wall
        if telemetry:
            fields |= {"before": telemetry, "after": after, "throttled": throttled(telemetry, after)}
        self.store.append("point", **fields, stopped=reason, wall_s=round(wall, 4), samples_s=[float(f"{s:.5g}") for s in samples])


def _point(data: Record) -> Point:
    return plans.point(data["op"], data["tier"], data["held_out"], **data["args"])


def open_device(settings: Settings) -> tuple[Device, dict[str, Any]]:
    """The device of a run and its fingerprint."""
    from microbench import environment as env

    if settings.device == "cpu":
        return CpuDevice(env.cache_bytes(), settings.working_set_bytes), env.cpu_environment()
    torch = import_module("torch")
    if not torch.cuda.is_available():
        raise SessionError("torch sees no CUDA device")
    found = env.cuda_environment()
    return CudaDevice(int(found["cache_bytes"])), found


def run(settings: Settings, raw: Path) -> Store:
    """Measure the plan of `settings` into the raw file, going on with an unfinished one."""
    device, environment = open_device(settings)
    return Session(settings, Store(raw), device=device, environment=environment).run()


def results(records: Sequence[Mapping[str, Any]]) -> list[Record]:
    """One record per point: samples pooled over the accepted passes (over all where none was), with its median and interval.

    `passes_s` keeps the median of each pass: how well it repeats.
    """
    verdicts = {r["index"]: r["ok"] for r in records if r["kind"] == "pass"}
    accepted = {i for i, ok in verdicts.items() if ok} or {r["index"] for r in records if r["kind"] == "point"}
    pooled: dict[str, list[Mapping[str, Any]]] = {}
    for r in records:
        if r["kind"] == "point" and r["index"] in accepted and r["samples_s"]:
            pooled.setdefault(r["key"], []).append(r)
    out = []
    for key, group in pooled.items():
        passes = [median_interval(r["samples_s"]).median for r in group]
        interval = median_interval([s for r in group for s in r["samples_s"]])
        out.append({
            "key": key, "op": group[0]["op"], "args": group[0]["args"], "held_out": group[0]["held_out"], "passes_s": passes,
            "time_s": interval.median, "low_s": interval.low, "high_s": interval.high, "throttled": any(r.get("throttled") for r in group),
        })  # fmt: skip
    return out
