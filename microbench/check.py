"""Points that no plan holds, measured afresh: a profile is judged on them, not on what it was fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from microbench import plan as plans
from microbench.plan import Point, point
from microbench.stats import StoppingRule, median_interval

ROWS = (1, 2, 3, 5, 8, 10, 16, 20, 32, 40, 64, 80)


def fresh_points(device: str, count: int, seed: int = 0) -> list[Point]:
    """Random GEMM and attention points off the standard plan, two GEMMs for each attention."""
    rng, planned, out = Random(seed), {p.key for p in plans.standard_plan(device, cache_bytes=1 << 25)}, list[Point]()
    sizes = (768, 1024, 1536, 2048, 2560, 3072) if device == "cpu" else (2048, 3072, 4096, 5120, 8192, 11008)
    dtypes = ("fp32", "bf16") if device == "cpu" else ("bf16",)
    while len(out) < count:
        turn = len(out) % (3 * len(dtypes))  # each dtype gets two GEMMs and one attention in turn
        dtype = dtypes[turn // 3]
        if turn % 3 < 2:
            p = point("gemm", 3, True, dtype=dtype, m=rng.choice(ROWS), n=rng.choice(sizes), k=rng.choice(sizes))
        else:
            kv, group = (4, rng.choice((1, 2, 4))) if device == "cpu" else (8, rng.choice((4, 8, 16)))
            shape = {"num_seqs": rng.choice((1, 2, 5)), "query_len": rng.choice((1, 2, 5, 7, 10)), "num_heads": kv * group, "num_kv_heads": kv}
            shape |= {"context_len": rng.choice((768, 1536, 3072)) * (1 if device == "cpu" else 8), "head_dim": 64 if device == "cpu" else 128}
            p = point("attention", 3, True, backend="sdpa" if device == "cpu" else "sdpa-flash", dtype=dtype, **shape)
        if p.key not in planned and p not in out:
            out.append(p)
    return out


def measure_points(device: str, points: Sequence[Point], repeats: int = 3) -> list[dict[str, Any]]:
    """Medians over interleaved repeats, in the form of `session.results`."""
    from microbench.session import Session, Settings, open_device
    from microbench.store import Store

    settings = Settings(device=device, budget_s=60.0, points=points)
    opened, environment = open_device(settings)
    samples: dict[str, list[float]] = {p.key: [] for p in points}
    with opened.guard():
        session = Session(settings, Store(), device=opened, environment=environment)
        for _ in range(repeats):
            for p in points:
                samples[p.key] += session.sample(p, StoppingRule(5, 30, 0.02, 0.1))[0]
    return [
        {"key": p.key, "op": p.op, "args": dict(p.args), "held_out": True, "time_s": median_interval(samples[p.key]).median}
        for p in points if samples[p.key]
    ]  # fmt: skip
