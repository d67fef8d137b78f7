"""A user's own serving measurements adapt the global engine numbers to their deployment, with shrinkage.

Two terms move: the kernel scale (everything proportionally) and the time per layer (what is added). A prior keeps both near the global set,
as wide as deployments differ from it; with few rows the answer stays close to global, with many it follows the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.calibrate.engine import SOFT_L1_SCALE, ServedRows, fit_steps

F = NDArray[np.float64]

PRIOR_LOG_SCALE = 0.15
"""How far a deployment's kernel scale strays from the global one (log standard deviation of per-deployment fits)."""
PRIOR_LOG_LAYER = 0.6
"""The same for the time per layer."""
NOISE = 0.04
"""Repeats of one serving measurement differ by 1.5 % in the median and 18 % in the worst decile."""
TELLS_APART = 0.97
"""Above this correlation of their effects the rows cannot tell the two terms apart."""


@dataclass(frozen=True)
class Adapted:
    """Engine numbers of one deployment."""

    overheads: dict[str, float]
    rows: int
    error_before: float
    """Median relative error of the global numbers on the given rows."""
    error_after: float
    stderr: dict[str, float]
    """Of the logarithm of each adapted number."""
    warnings: tuple[str, ...]


def adapt(rows: ServedRows, start: Mapping[str, float]) -> Adapted:
    """kernel_scale and per_layer_s for these rows, shrunk towards `start`."""
    from scipy.optimize import least_squares

    base = dict(start)

    def numbers(x: F) -> dict[str, float]:
        return base | {"kernel_scale": base["kernel_scale"] * float(np.exp(x[0])), "per_layer_s": base["per_layer_s"] * float(np.exp(x[1]))}

    def misfit(x: F) -> F:
        return np.log(rows.predict(numbers(x)) / rows.measured)

    def residual(x: F) -> F:
        prior = np.asarray([x[0] / PRIOR_LOG_SCALE, x[1] / PRIOR_LOG_LAYER])
        return np.concatenate([misfit(x) / NOISE, prior])

    found = least_squares(residual, np.zeros(2), loss="soft_l1", f_scale=SOFT_L1_SCALE / NOISE)
    jacobian = np.array(found.jac, dtype=np.float64).reshape(-1, 2)
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    effects = jacobian[: len(rows.measured), :]
    warnings = []
    scale, layer = effects[:, 0], effects[:, 1]
    together = float(abs(scale @ layer) / np.sqrt((scale @ scale) * (layer @ layer)))
    if len(effects) < 2 or together > TELLS_APART:
        warnings.append(
            "these rows cannot tell a slower GPU from a larger overhead: measure at more than one concurrency, low and high, to separate them"
        )
    errors = [float(np.median(np.abs(np.expm1(misfit(x))))) for x in (np.zeros(2), found.x)]
    stderr = dict(zip(("kernel_scale", "per_layer_s"), np.sqrt(np.diag(covariance)).tolist(), strict=True))
    return Adapted(numbers(found.x), len(rows.measured), errors[0], errors[1], stderr, tuple(warnings))


def with_own_rows(rows: ServedRows, count: int = 8) -> F:
    """log(predicted / measured) of every deployment's other rows after adapting to `count` of its own, spread over the list.

    The global numbers come from fits that have not seen the (model, GPU); deployments with fewer than count + 4 rows are left out.
    """
    out: list[float] = []
    for group in np.unique(rows.group):
        start = fit_steps(rows.take(rows.group != group))
        mine = rows.take(rows.group == group)
        for name in np.unique(mine.deployment):
            own = mine.take(mine.deployment == name)
            n = len(own.measured)
            if n < count + 4:
                continue
            known = np.zeros(n, dtype=np.bool_)
            known[np.linspace(0, n - 1, count).round().astype(int)] = True
            made = adapt(own.take(known), start)
            rest = own.take(~known)
            out += np.log(rest.predict(made.overheads) / rest.measured).tolist()
    return np.asarray(out)


def cases_of_runs(runs: Sequence[Mapping[str, Any]], deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A case per measured run: the deployment's keys with the run's concurrency and lengths."""
    return [dict(deployment) | {k: r[k] for k in ("concurrency", "input_len", "output_len") if r.get(k) is not None} for r in runs]
