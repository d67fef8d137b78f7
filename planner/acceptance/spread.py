"""Acceptance as a distribution: requests differ, rounds differ, and a mean over one is not a mean over the other.

A round has the same width for everyone (each sequence drafts D and waits for the verify), while sequences advance raggedly by 1..1+D tokens.
So a request of N tokens needs about N/AL rounds of `round_s`, whatever its neighbours do, and

* the deployment's AL is the token-weighted harmonic mean over requests, sum N / sum (N / AL): what counters pooled over rounds give;
* the plain mean over requests is never lower (aiperf's and specdec_bench's averages, trtllm-bench before weighting by iterations);
* E[AL] over a mixture of alphas is above AL at the mean alpha, since AL is convex in alpha.

Pure functions of numpy arrays. AL and tokens in tokens, `round_s` and TPOT in seconds; sources: DESIGN 3, facts on heterogeneity
(theory 3.1), autocorrelation 0.307 of accepted lengths (https://github.com/pramodjella/speculative-decoding-draft-length-audit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import InputError

Floats = NDArray[np.float64]

AUTOCORRELATION = 0.307
"""Of the tokens accepted in successive rounds of one request (measured by others, one model pair)."""

#: What a source's AL is the mean over (see `Imported.weighting`): by format name of the importers.
WEIGHTING_BY_FORMAT = {
    "vllm /metrics": "rounds",
    "llamacpp /metrics": "rounds",
    "sglang /metrics": "interval",
    "trtllm /metrics": "interval",
    "vllm bench": "rounds",
    "vllm per-request": "rounds",
    "aiperf rows": "rounds",
    "vllm log": "rounds",
    "vllm V0 log": "rounds",
    "sglang /server_info": "rounds",
    "sglang bench_serving": "rounds",
    "sglang /generate": "rounds",
    "sglang log": "rounds",
    "trtllm iteration stats": "rounds",
    "trtllm-bench report": "requests",
    "trtllm per-request": "rounds",
    "llamacpp timings": "rounds",
    "llamacpp log": "rounds",
    "llamacpp speculative": "rounds",
    "aiperf profile": "rounds",
    "aiperf server metrics": "rounds",
    "specdec_bench": "rounds",
    "specdec_bench category": "requests",
    "golden AL yaml": "rounds",
    "speculators acceptance.csv": "rounds",
    "counter snapshot": "rounds",
}


def _lengths(acceptance_len: ArrayLike) -> Floats:
    al = np.atleast_1d(np.asarray(acceptance_len, dtype=np.float64))
    if al.ndim != 1 or al.size == 0 or not np.all(np.isfinite(al)) or np.any(al < 1 - 1e-12):
        raise InputError("not acceptance lengths", where="acceptance_len", got=al.tolist()[:5], expected="numbers of 1 or more, one per request")
    return np.asarray(al)


def _weights(weights: ArrayLike | None, n: int) -> Floats:
    w = np.ones(n) if weights is None else np.atleast_1d(np.asarray(weights, dtype=np.float64))
    if w.shape != (n,) or not np.all(np.isfinite(w)) or np.any(w < 0) or not w.sum() > 0:
        raise InputError("weights do not fit", where="weights", got=list(w.shape), expected=f"{n} numbers of 0 or more, not all 0")
    return np.asarray(w / w.sum())


def request_mean(acceptance_len: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Plain mean of the requests' AL: what per-request averages report."""
    al = _lengths(acceptance_len)
    return float(_weights(weights, len(al)) @ al)


def pooled_mean(acceptance_len: ArrayLike, output_tokens: ArrayLike | None = None) -> float:
    """Tokens over rounds of all requests together: the harmonic mean weighted by tokens, which throughput follows."""
    al = _lengths(acceptance_len)
    return float(1.0 / (_weights(output_tokens, len(al)) @ (1.0 / al)))


def chain_acceptance_len(alpha: ArrayLike, draft_len: int) -> Floats:
    """AL of independent acceptance with probability alpha: 1 + alpha + ... + alpha^D."""
    a = np.asarray(alpha, dtype=np.float64)
    if draft_len < 0 or not np.all((a >= 0) & (a <= 1)):
        raise InputError("not a probability and a draft length", where="alpha", got=np.atleast_1d(a).tolist()[:5], expected="0..1 and D of 0 or more")
    return np.asarray(np.polynomial.polynomial.polyval(a, np.ones(draft_len + 1)))


def beta_mixture(mean_prob: float, concentration: float, draft_len: int) -> Floats:
    """Survival s_1..s_D, over rounds drawn from requests whose alpha is Beta-distributed with this mean; `concentration` = a + b.

    E[alpha^i] in closed form; a smaller concentration means requests that differ more. The conditional rates rise with position: what is
    still alive comes from the easier requests.
    """
    if not (0 < mean_prob < 1 and concentration > 0 and math.isfinite(concentration) and draft_len >= 0):
        raise InputError("not a Beta distribution", where="beta_mixture", got=(mean_prob, concentration), expected="a mean in 0..1, a + b above 0")
    j = np.arange(draft_len, dtype=np.float64)
    return np.asarray(np.cumprod((mean_prob * concentration + j) / (concentration + j)))


def mixture_survival(curves: Sequence[ArrayLike], weights: ArrayLike | None = None, *, by: str = "rounds") -> Floats:
    """Survival of a mixture of curves of equal D. `by`: weights are shares of 'rounds', or of 'tokens' (a curve of low AL then has more rounds)."""
    table = np.asarray([np.asarray(c, dtype=np.float64) for c in curves])
    if table.ndim != 2 or not np.all((table >= 0) & (table <= 1)) or np.any(np.diff(table, axis=1) > 1e-12):
        raise InputError("not survival curves of one length", where="curves", got=list(table.shape), expected="rows of non-increasing values in 0..1")
    w = _weights(weights, len(table))
    if by == "tokens":
        w = w / (1.0 + table.sum(axis=1))
    elif by != "rounds":
        raise InputError("unknown weighting", where="by", got=by, expected="rounds or tokens")
    return np.asarray(w @ table / w.sum())


def tokens_per_round(survival: ArrayLike) -> tuple[float, float]:
    """(mean, variance) of the tokens one round emits, from s_1..s_D: P(emitted > i) = s_i."""
    s = np.atleast_1d(np.asarray(survival, dtype=np.float64))
    i = np.arange(1, len(s) + 1, dtype=np.float64)
    mean = 1.0 + float(s.sum())
    second = 1.0 + float(((2 * i + 1) * s).sum())
    return mean, max(0.0, second - mean * mean)


def rounds_needed(survival: ArrayLike, output_tokens: int, *, autocorrelation: float = AUTOCORRELATION) -> tuple[float, float]:
    """(mean, standard deviation) of the rounds one request needs for `output_tokens`: renewal theory with the overshoot of the last round."""
    mean, variance = tokens_per_round(survival)
    n = float(output_tokens)
    overshoot = (variance / mean + mean - 1.0) / 2.0
    spread = variance * (1 + autocorrelation) / (1 - autocorrelation)
    return (n + overshoot) / mean, math.sqrt(n * spread / mean**3)


def user_tpot(
    survivals: Sequence[ArrayLike],
    *,
    round_s: float,
    output_tokens: int,
    weights: ArrayLike | None = None,
    quantiles: Sequence[float] = (0.5, 0.99),
    autocorrelation: float = AUTOCORRELATION,
) -> tuple[float, ...]:
    """Quantiles over requests of TPOT in seconds, for a mixture of request types with shares `weights`.

    TPOT = rounds * round_s / tokens after the first; rounds of a type are near normal (many rounds a request). The spread has two parts:
    requests differ, and one request's rounds differ; long outputs average the second away.
    """
    if output_tokens < 2 or not (math.isfinite(round_s) and round_s > 0) or not 0 <= autocorrelation < 1:
        raise InputError("not a request", where="user_tpot", got=(output_tokens, round_s), expected="2 or more tokens, a positive round, 0..1")
    w = _weights(weights, len(survivals))
    tokens = output_tokens - 1
    moments = np.array([rounds_needed(s, tokens, autocorrelation=autocorrelation) for s in survivals])
    centre, width = moments[:, 0], np.maximum(moments[:, 1], 1e-12)
    out = []
    for q in quantiles:
        if not 0 < q < 1:
            raise InputError("not a quantile", where="quantiles", got=q, expected="between 0 and 1")
        low, high = float((centre - 9 * width).min()), float((centre + 9 * width).max())
        for _ in range(80):
            middle = (low + high) / 2
            below = sum(wi * 0.5 * math.erfc((c - middle) / (d * math.sqrt(2))) for wi, c, d in zip(w, centre, width, strict=True))
            low, high = (middle, high) if below < q else (low, middle)
        out.append(max(1.0, (low + high) / 2) * round_s / tokens)
    return tuple(out)


def batch_rounds(survival: ArrayLike, output_tokens: int, num_seqs: int, *, autocorrelation: float = AUTOCORRELATION) -> tuple[float, float]:
    """(mean rounds of one sequence, expected rounds until the last of `num_seqs` equal sequences is done): the price of ragged progress.

    The maximum of n normals by Blom's formula; served continuously (a new request takes a free slot) only the first matters.
    """
    mean, spread = rounds_needed(survival, output_tokens, autocorrelation=autocorrelation)
    if num_seqs < 1:
        raise InputError("not a batch", where="num_seqs", got=num_seqs, expected="1 or more")
    return mean, mean + spread * _normal_quantile((num_seqs - 0.375) / (num_seqs + 0.25)) if num_seqs > 1 else mean


def _normal_quantile(p: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)
