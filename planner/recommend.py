"""From evaluated grids to recommendations, reasons and output rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.bands import band, quotient, speedup_bands, speedup_regime, spread
from planner.edges import edges_of
from planner.question import Run
from planner.roofline import PARTS
from planner.search import Arm, Cell, Choice, Grid, choose, pareto_front
from planner.serving import target_step


def cell_of(run: Run, i: int, j: int) -> Cell:
    """All arms at concurrency i and context j, off first."""
    q = run.question
    plain_verify = float(run.off.served.round.verify_s[i, 0, j])
    columns: dict[str, list[Any]] = {k: [] for k in ("arm", "d", "value", "draft", "verify", "over", "al", "band", "ok")}
    for a, (arm, g) in enumerate(zip(run.arms, run.grids, strict=True)):
        s = g.served
        r = s.round
        value = s.tokens_per_s[i, :, j] if q.metric == "throughput" else 1.0 / s.tpot_s[i, :, j]
        ok = g.feasible[i, :, j].copy()
        if q.slo_tpot_s is not None:
            ok &= s.tpot_s[i, :, j] <= q.slo_tpot_s
        if q.slo_ttft_s is not None:
            ok &= ~(s.ttft_s[i, :, j] + s.queue_s[i, :, j] > q.slo_ttft_s)
        widths = np.zeros(len(g.draft_len)) if arm.survival is None else np.asarray([arm.survival.log_band(int(d)) for d in g.draft_len])
        for key, x in zip(
            columns,
            (
                np.full(len(g.draft_len), a),
                g.draft_len,
                value,
                _at(r.draft_s, s, i, j),
                _at(r.verify_s, s, i, j),
                _at(r.overhead_s, s, i, j),
                s.acceptance_len[i, :, j],
                widths,
                ok,
            ),
            strict=True,
        ):
            columns[key].append(x)
    c = {k: np.concatenate(v) for k, v in columns.items()}
    plain = np.full(len(c["d"]), plain_verify)
    return Cell(c["arm"], c["d"], c["value"], c["draft"], c["verify"], c["over"], c["al"], c["band"], plain, c["ok"])


def _at(x: NDArray[np.float64], s: Any, i: int, j: int) -> NDArray[np.float64]:
    return np.asarray(np.broadcast_to(x, s.tpot_s.shape)[i, :, j], dtype=np.float64)


def recommend(run: Run, i: int, j: int) -> dict[str, Any]:
    cell = cell_of(run, i, j)
    concurrency, context = int(run.concurrency[i]), float(run.contexts[j])
    head: dict[str, Any] = {"concurrency": concurrency, "context_len": context}
    choice = choose(cell, 0)
    if choice is None:
        return head | {
            "drafter": None,
            "drafter_model": None,
            "draft_len": None,
            "num_seqs": None,
            "near_optimal": [],
            "speedup": None,
            "speedup_low": None,
            "speedup_high": None,
            "tpot_speedup": None,
            "prob_best": None,
            "expected_regret_frac": None,
            "reasons": [_why_nothing(run, i, j)],
        }
    k = choice.chosen
    arm, d = run.arms[int(cell.arm[k])], int(cell.draft_len[k])
    grid, off = run.grids[int(cell.arm[k])].served, run.off.served
    at = int(np.flatnonzero(run.grids[int(cell.arm[k])].draft_len == d)[0])
    speedup = float(grid.tokens_per_s[i, at, j] / off.tokens_per_s[i, 0, j])
    doubt = band("speedup", speedup_regime(d))
    low, high = (1.0, 1.0) if d == 0 else map(float, spread(speedup, doubt, float(cell.acceptance_band[k])))
    near = sorted({int(cell.draft_len[n]) for n in choice.near_optimal if cell.arm[n] == cell.arm[k]} | {d})
    return head | {
        "drafter": arm.kind,
        "drafter_model": arm.model,
        "draft_len": d,
        "num_seqs": _running(run, arm, i, j, d),
        "near_optimal": near,
        "speedup": speedup,
        "speedup_low": low,
        "speedup_high": high,
        "tpot_speedup": float(off.tpot_s[i, 0, j] / grid.tpot_s[i, at, j]),
        "prob_best": choice.prob_best,
        "expected_regret_frac": choice.expected_regret_frac,
        "reasons": _reasons(run, cell, choice, i, j),
    }


def _why_nothing(run: Run, i: int, j: int) -> str:
    s = run.off.served
    if not run.off.feasible[i, 0, j]:
        return "no sequence of this context fits the memory left beside the weights"
    return f"no arm meets the SLO; plain decoding has TPOT {s.tpot_s[i, 0, j] * 1e3:.1f} ms"


def _reasons(run: Run, cell: Cell, choice: Choice, i: int, j: int) -> list[str]:
    """Why this D, and why not one more: the marginal rule s_(D+1)/AL against dT/T, then what the kernels say."""
    k = choice.chosen
    arm, d = run.arms[int(cell.arm[k])], int(cell.draft_len[k])
    t = cell.draft_s + cell.verify_s + cell.overhead_s
    out: list[str] = []
    if d == 0:
        others = np.flatnonzero(cell.allowed & (cell.draft_len > 0))
        if len(others):
            b = others[int(np.argmax(cell.value[others]))]
            out.append(
                f"best speculative arm {run.arms[int(cell.arm[b])].name} D={cell.draft_len[b]}: a round costs {t[b] / t[0]:.2f} plain steps and"
                f" yields {cell.acceptance_len[b]:.2f} tokens"
            )
        else:
            out.append("no speculative arm is feasible here")
    else:
        out.append(
            f"a round costs {t[k] / t[0]:.2f} plain steps (draft {cell.draft_s[k] / t[k]:.0%}, verify {cell.verify_s[k] / t[k]:.0%}) and yields"
            f" {cell.acceptance_len[k]:.2f} tokens"
        )
        follow = np.flatnonzero((cell.arm == cell.arm[k]) & (cell.draft_len == d + 1))
        if len(follow):
            n = int(follow[0])
            gain = cell.acceptance_len[n] / cell.acceptance_len[k] - 1.0
            cost = t[n] / t[k] - 1.0
            out.append(f"D={d + 1} would add {gain:.1%} tokens for {cost:.1%} time")
        elif d == arm.max_draft_len and arm.dep.drafter is not None and arm.dep.drafter.max_trained_draft_len == d:
            out.append(f"D={d} is the most this drafter was trained for")
    out.append(_what_binds(run.grids[run.arms.index(arm)], i, j, d))
    out += edges_of(arm.dep, _running(run, arm, i, j, d), d)[:2]
    return out


def _what_binds(grid: Grid, i: int, j: int, draft_len: int) -> str:
    """The two largest shares of the target's pass."""
    at = int(np.flatnonzero(grid.draft_len == draft_len)[0])
    shape = grid.served.tpot_s.shape
    parts = {name: float(np.broadcast_to(p, shape)[i, at, j]) for name, p in zip(PARTS, grid.served.round.parts[1:], strict=True)}
    total = sum(parts.values()) or 1.0
    first, second = sorted(parts, key=lambda k: -parts[k])[:2]
    return f"the target's pass is {parts[first] / total:.0%} {first}, {parts[second] / total:.0%} {second} bound"


def _running(run: Run, arm: Arm, i: int, j: int, draft_len: int) -> int:
    """Sequences that run at once in a cell."""
    grid = run.grids[run.arms.index(arm)]
    return int(grid.served.num_seqs[i, int(np.flatnonzero(grid.draft_len == draft_len)[0]), j])


# ---------------------------------------------------------------- output rows
def points_of(run: Run) -> list[dict[str, Any]]:
    """Every arm x D x concurrency x context with the predict keys; infeasible ones carry no throughput."""
    flat = [_grid_columns(run, a) for a in range(len(run.arms))]
    columns = {k: np.concatenate([f[k] for f in flat]) for k in flat[0]}
    ok = columns["feasible"]
    front = np.zeros(len(ok), dtype=np.bool_)
    for j in range(len(run.contexts)):
        here = np.flatnonzero(ok & (columns["context_len"] == run.contexts[j]))
        front[here] = pareto_front(columns["tokens_per_s_per_user"][here], columns["tokens_per_s_per_gpu"][here])
    values = {k: v.tolist() for k, v in columns.items()}
    bounds = (*PARTS, "host")
    measured = [k for k in values if k not in ("arm", "draft_len", "concurrency", "context_len", "feasible")]
    rows: list[dict[str, Any]] = []
    for n, feasible in enumerate(values["feasible"]):
        row: dict[str, Any] = {
            "drafter": run.arms[values["arm"][n]].kind,
            "drafter_model": run.arms[values["arm"][n]].model,
            "draft_len": values["draft_len"][n],
            "concurrency": values["concurrency"][n],
            "context_len": values["context_len"][n],
            "feasible": feasible,
            "infeasible_reason": None if feasible else "one sequence does not fit the memory left beside the weights",
            "on_pareto_front": bool(front[n]),
        }
        for k in measured:
            v = values[k][n]
            row[k] = v if feasible and not math.isnan(v) else None
        row["bound"] = bounds[int(row["bound"])] if feasible else None
        queued = feasible and row["num_seqs"] < row["concurrency"]
        row["warnings"] = [f"{row['num_seqs']} of {row['concurrency']} requests run at once; the rest queue"] if queued else []
        rows.append(row)
    return rows


def _grid_columns(run: Run, a: int) -> dict[str, NDArray[Any]]:
    arm, g = run.arms[a], run.grids[a]
    s, r = g.served, g.served.round
    shape = s.tpot_s.shape
    al_band = np.zeros(len(g.draft_len)) if arm.survival is None else np.asarray([arm.survival.log_band(int(d)) for d in g.draft_len])
    speedup = s.tokens_per_s / np.broadcast_to(run.off.served.tokens_per_s, shape)
    gain = speedup_bands(g.draft_len[None, :, None])
    bands = run.tpot_bands if arm.survival is None else [quotient(b, gain) for b in run.tpot_bands]
    low, high = (np.concatenate(x) for x in zip(*(spread(s.tpot_s[i : i + 1], b, al_band[None, :, None]) for i, b in enumerate(bands)), strict=True))
    s_low, s_high = (speedup, speedup) if arm.survival is None else spread(speedup, gain, al_band[None, :, None])
    gpus = arm.dep.layout.n_gpus + arm.dep.extra_gpus
    same_batch = bool((s.num_seqs == np.broadcast_to(run.off.served.num_seqs, shape)).all())
    target = run.off.served.round.round_s if same_batch else target_step(run.arms[0].dep, s.num_seqs, run.traffic, run.anchor)
    columns: dict[str, Any] = {
        "arm": np.int64(a),
        "draft_len": g.draft_len[None, :, None],
        "concurrency": run.concurrency[:, None, None],
        "context_len": run.contexts[None, None, :],
        "feasible": g.feasible,
        "tpot_s": s.tpot_s,
        "tpot_low_s": low,
        "tpot_high_s": high,
        "ttft_s": s.ttft_s + s.queue_s,
        "tokens_per_s": s.tokens_per_s,
        "tokens_per_s_per_user": 1.0 / s.tpot_s,
        "tokens_per_s_per_gpu": s.tokens_per_s / gpus,
        "round_s": r.round_s,
        "draft_s": r.draft_s,
        "verify_s": r.verify_s,
        "overhead_s": r.overhead_s,
        "target_step_s": target,
        "acceptance_len": s.acceptance_len,
        "speedup": speedup,
        "speedup_low": s_low,
        "speedup_high": s_high,
        "bound": _bound(g),
        "num_seqs": s.num_seqs.astype(np.int64),
        "capacity_seqs": np.minimum(s.capacity_seqs, 1e9).astype(np.int64),
    }
    return {k: np.broadcast_to(v, shape).ravel() for k, v in columns.items()}


def _bound(g: Grid) -> NDArray[np.int64]:
    """Index into (*PARTS, "host") of what takes most of the verification and its overhead."""
    r, shape = g.served.round, g.served.tpot_s.shape
    parts = [np.broadcast_to(x, shape) for x in (*r.parts[1:], r.overhead_s)]
    return np.asarray(np.argmax(np.stack(parts), axis=0), dtype=np.int64)


def main_arm(run: Run, recommendations: Sequence[Mapping[str, Any]]) -> Arm | None:
    """The drafter recommended in most cells (ties: the one recommended at the lowest concurrency)."""
    chosen = [(r["drafter"], r["drafter_model"]) for r in recommendations if r["drafter"]]
    if not chosen:
        return None
    best = max(dict.fromkeys(chosen), key=chosen.count)
    return next(a for a in run.arms if (a.kind, a.model) == best)
