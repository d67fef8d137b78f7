"""What a speculation round adds to kernel sums, fitted to published draft-length sweeps: per round, per draft pass, per verified token.

Only ratios to the sweep's own plain arm are used, so the error of the plain step cancels; each (source, model) group weighs the same,
whatever its number of sweeps. The marginal cost of a draft token decides D: an additive error makes drafts look cheap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.calibrate.engine import FITTED_ENGINES, summary
from planner.cases import Case, parse_case
from planner.deployment import Deployment, cached_resolve, deployment_key
from planner.prediction import anchor_of
from planner.serving import Anchor, Traffic, plain, serve
from planner.validate.rows import Data, Sweep, acceptance_of, sweep_cases, sweeps

F = NDArray[np.float64]

#: name -> (start, lower bound, upper bound) in the unit fitted
ROUND_PARAMETERS = {
    "per_round_s": (0.8, 0.0, 6.0),
    "per_draft_pass_s": (0.3, 0.0, 3.0),
    "per_verified_token_s": (0.018, 0.0, 0.4),
    "per_verified_token_s@cdna": (0.036, 0.0, 0.4),
}
"""`name@start` holds on GPUs whose arch begins so. A verified token costs twice as much under ROCm: with one number for all GPUs, models left
out are predicted worse there and elsewhere. (Those sweeps do not state their concurrency: at twice the assumed 16 the number would be that of
NVIDIA's GPUs, and predictions for such rows the same.) The published 36 us include what is priced apart here (tiles, padding, experts,
samplers); about half is left on NVIDIA's GPUs. When differences between drafted arms weigh 4 to 64 times as much as their common level, the
numbers come out at 16 to 21 and 44 to 47 us, also from a start at 36 us when they weigh most."""
UNIT = 1e-3
PRIOR_WEIGHT = 0.3
"""Pull towards the start (for a verified token: half of what is published), in log units. Published fits of the same terms (0.8-1.5 ms,
0.4-0.9 ms with draft kernels inside, 36-121 us) identify them only weakly, and so do these rows."""


@dataclass(frozen=True)
class SweepArms:
    """Arms with D > 0: measured speedup, and the plain and speculative seconds per token with what each parameter adds."""

    measured: F
    plain_s: F
    round_s: F
    """Seconds per emitted token without any round parameter."""
    per_parameter: F
    """(parameters, arms): seconds per emitted token that one second of each parameter adds."""
    to_metric: F
    """Ratio of the metric's speedup to the TPOT speedup (prefill and queueing in a throughput)."""
    draft_len: F
    sweep: NDArray[np.str_]
    group: NDArray[np.str_]
    assumed: NDArray[np.bool_]
    """The sweep's concurrency is an assumption."""

    def speedup(self, p: Sequence[float] | F) -> F:
        return self.to_metric * self.plain_s / (self.round_s + np.asarray(p) @ self.per_parameter)

    def take(self, mask: NDArray[np.bool_]) -> SweepArms:
        return SweepArms(*(getattr(self, n)[..., mask] for n in self.__dataclass_fields__))

    @property
    def weight(self) -> F:
        """Each group counts once."""
        count = {g: float((self.group == g).sum()) for g in np.unique(self.group)}
        return np.asarray([1.0 / count[g] for g in self.group])


def on_arch(numbers: Mapping[str, float], arch: str) -> dict[str, float]:
    """Numbers as they apply on an architecture: `name@start` in place of `name` where the arch begins so."""
    own = {k.split("@")[0]: v for k, v in numbers.items() if "@" in k and arch.startswith(k.split("@")[1])}
    return {k: v for k, v in numbers.items() if "@" not in k} | own


def with_numbers(dep: Deployment, **changes: float) -> Deployment:
    """The deployment under an engine with some numbers changed."""
    held = dict(dep.engine.overheads_on(dep.gpu.arch)) | on_arch(changes, dep.gpu.arch)
    return replace(dep, machine=replace(dep.machine, engine=replace(dep.engine, overheads=held, overheads_by_arch={})))


def without_round_terms(dep: Deployment, **changes: float) -> Deployment:
    """The deployment with its step-level numbers, and of the round-level ones only `changes`."""
    return with_numbers(dep, **dict.fromkeys(ROUND_PARAMETERS, 0.0) | changes)


def sweep_arms(data: Data, steps: Mapping[str, float] | None = None) -> SweepArms:
    """Features of every usable sweep of an engine that is fitted, anchored on its own plain arm.

    steps: step-level numbers to use instead of the shipped ones. Other engines keep assumed numbers, so their sweeps say nothing here.
    """
    columns: dict[str, list[Any]] = defaultdict(list)
    for sweep in sweeps(data)[0]:
        cases = {c["draft_len"]: c for c in sweep_cases(data, sweep)}
        drafted = [a for a in sweep.arms if a["D"]]
        dep = cached_resolve(deployment_key(cases[drafted[0]["D"]]))
        if dep.engine.id not in FITTED_ENGINES:
            continue
        dep = with_numbers(dep, **(steps or {}))
        case = parse_case(cases[drafted[0]["D"]])
        _collect(columns, sweep, dep, case)
    per = np.asarray(columns.pop("per")).T
    names = [n for n in SweepArms.__dataclass_fields__ if n != "per_parameter"]
    return SweepArms(per_parameter=per, **{n: np.asarray(columns[n]) for n in names})


def _collect(columns: dict[str, list[Any]], sweep: Sweep, dep: Deployment, case: Case) -> None:
    drafted = [a for a in sweep.arms if a["D"]]
    d = np.asarray([float(a["D"]) for a in drafted])
    al = np.asarray([acceptance_of(a) for a in drafted])
    if case.context_len is not None:
        traffic = Traffic.at_context(np.full(len(d), float(case.context_len)))
    else:
        traffic = Traffic.of_lengths(np.full(len(d), float(case.input_len or 1)), np.full(len(d), float(case.output_len or 1)))
    anchor = anchor_of(dep, case) if case.baseline else Anchor()

    def run(dep: Deployment, d: F, al: F) -> Any:
        return serve(dep, concurrency=float(sweep.concurrency), draft_len=d, acceptance_len=al, traffic=traffic, anchor=anchor)

    off = run(plain(dep), np.zeros_like(d), np.ones_like(al))
    now, bare = run(dep, d, al), run(without_round_terms(dep), d, al)
    rate = 1.0 / now.tpot_s if sweep.latency else now.tokens_per_s
    rate_off = 1.0 / off.tpot_s if sweep.latency else off.tokens_per_s
    columns["measured"] += [sweep.value(a) / sweep.value(sweep.off) for a in drafted]
    columns["plain_s"] += off.tpot_s.tolist()
    columns["round_s"] += bare.tpot_s.tolist()
    columns["to_metric"] += (rate / rate_off / (off.tpot_s / now.tpot_s)).tolist()
    added = [(run(without_round_terms(dep, **{n: 1.0}), d, al).tpot_s - bare.tpot_s) for n in ROUND_PARAMETERS]
    columns["per"] += np.asarray(added).T.tolist()
    columns["draft_len"] += d.tolist()
    columns["sweep"] += [sweep.id] * len(d)
    columns["group"] += [sweep.group] * len(d)
    columns["assumed"] += [sweep.row["concurrency"] is None] * len(d)


def fit_rounds(arms: SweepArms) -> dict[str, float]:
    """The three numbers, seconds: group-weighted soft-L1 on log speedup with a weak pull towards published values."""
    from scipy.optimize import least_squares

    start, low, high = (np.asarray(x) for x in zip(*ROUND_PARAMETERS.values(), strict=True))
    weight = np.sqrt(arms.weight)

    def residual(x: F) -> F:
        data = weight * np.log(arms.speedup(x * UNIT) / arms.measured)
        return np.concatenate([data, PRIOR_WEIGHT * np.log((x + 1e-3) / (start + 1e-3))])

    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return dict(zip(ROUND_PARAMETERS, (found.x * UNIT).tolist(), strict=True))


def left_out_speedups(arms: SweepArms) -> F:
    """Speedup of every arm by a fit that has not seen its (source, model) group."""
    out = np.zeros(len(arms.measured))
    for g in np.unique(arms.group):
        mine = arms.group == g
        out[mine] = arms.take(mine).speedup(list(fit_rounds(arms.take(~mine)).values()))
    return out


def rounds_left_out(data: Data) -> list[dict[str, Any]]:
    """Error of the speedup with groups left out; the fit without sweeps whose concurrency is assumed, scored on all."""
    arms = sweep_arms(data)
    fitted, stated = fit_rounds(arms), fit_rounds(arms.take(~arms.assumed))
    said = {
        "speedup, all sweeps seen": arms.speedup(list(fitted.values())),
        "speedup, (source, model) left out": left_out_speedups(arms),
        "speedup, fitted on stated concurrency only": arms.speedup(list(stated.values())),
    }
    return [{"fit": name, **summary(np.log(speedup / arms.measured))} for name, speedup in said.items()]


def choices_left_out(data: Data) -> list[dict[str, Any]]:
    """Regret of D by the fit that has seen every sweep and by fits without the sweep's (source, model) group; engines that are fitted."""
    arms = sweep_arms(data)
    said = {"all sweeps seen": arms.speedup(list(fit_rounds(arms).values())), "(source, model) left out": left_out_speedups(arms)}
    rows = []
    for name, speedup in said.items():
        regret = regrets(arms, speedup)
        worst = float(np.sort(regret)[min(len(regret) - 1, int(0.9 * len(regret)))])
        rows.append({"fit": name, "rows": len(regret), "mean": float(regret.mean()), "p90": worst, "within_3": float((regret <= 0.03).mean())})
    return rows


def regrets(arms: SweepArms, speedup: F) -> F:
    """1 - metric(D of the largest speedup, off included) / best measured arm, per sweep."""
    out = []
    for s in dict.fromkeys(arms.sweep.tolist()):
        mine = arms.sweep == s
        said, truth = np.append(1.0, speedup[mine]), np.append(1.0, arms.measured[mine])
        out.append(1.0 - truth[int(np.argmax(said))] / truth.max())
    return np.asarray(out)
