"""What a round of the built-in engine costs on this machine: a measured profile, the engine's own overheads, then the planner's own model.

Kernels are measured alone (`microbench`, the shapes of these networks). What their sum misses (dispatch, norms, rotation, cache writes, the
sampler) is fitted per drafter kind, by non-negative least squares on relative error, to a few calibration arms: off, the shortest and the
longest draft, each at the smallest and largest batch, on text that no verification arm uses. All other arms are predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu_profiles.schema import GpuProfile
from planner.cases import Case
from planner.deployment import Deployment, resolve
from planner.draft import LOOKUP
from planner.errors import InputError
from planner.round import round_time
from planner.verify.arms import Arm, Visit, any_match_prob, match_prob, round_seconds
from planner.verify.builtin import TARGETS
from planner.verify.family import BLOCK, BLOCK_SIZE, HEAD
from planner.verify.hf_export import llama_config

#: Rows of a pass that the family meets: batch 1 to 8 times 1 + D of 1 to 9.
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 40, 64, 72, 128)
HELD_OUT_ROWS = (6, 12, 33, 96, 448)
#: Rows on either side of the tiles of GPU kernels; a sweep measures those of them that it meets.
ROWS_EDGES = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 40, 48, 64, 72, 80, 96, 104, 112, 120, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
#: Fitted terms of a plain step, and those that a drafter adds.
STEP_TERMS = ("per_step_s", "per_layer_s", "per_seq_s")
IN_DRAFT = ("per_draft_pass_s", "draft_base_s", "draft_per_seq_s", "lookup_base_s", "lookup_per_seq_s")
IN_REST = ("per_round_s", "per_verified_token_s")
DRAFT_TERMS = (*IN_DRAFT, *IN_REST)


#: What a config.json says of weights stored so.
STORED: Mapping[str, Mapping[str, Any]] = {
    "fp32": {}, "bf16": {"torch_dtype": "bfloat16"}, "int8": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
}  # fmt: skip


def target_config(target: str) -> dict[str, Any]:
    """The target's config.json, as a checkpoint of that size and storage would have it."""
    size = TARGETS[target]
    return {**llama_config(size.shape), **STORED[size.weights]}


def drafter_object(target: str, kind: str | None, match_prob: float | None = None) -> dict[str, Any] | None:
    """The `drafter` of a case for a drafter of the family."""
    match kind:
        case None:
            return None
        case "external":
            size = TARGETS[target]
            return {"kind": kind, "model": {**llama_config(size.external), **(STORED["bf16"] if size.weights == "bf16" else {})}}
        case "dflash" | "dspark":
            return {"kind": kind, "layers": BLOCK.num_hidden_layers, "hidden_size": BLOCK.hidden_size, "block": BLOCK_SIZE}
        case "eagle3" | "mtp":
            return {"kind": kind, "layers": 1, "hidden_size": HEAD.hidden_size, "draft_vocab": HEAD.vocab_size}
    return {"kind": kind} if match_prob is None else {"kind": kind, "match_prob": match_prob}


@dataclass(frozen=True)
class Kernels:
    """Where kernels are measured: device, rows of a GEMM, (sequences, context) and query lengths of attention."""

    device: str = "cpu"
    rows: tuple[int, ...] = ROWS
    cells: tuple[tuple[int, int], ...] = ((1, 128), (1, 256), (8, 128), (8, 256))
    queries: tuple[int, ...] = (1, 2, 3, 5, 9)


def kernel_points(targets: Sequence[str], where: Kernels | None = None) -> list[Any]:
    """Microbenchmark points: stream bandwidth, every matrix of the targets at the rows that occur, attention at their heads."""
    from microbench.attention import PACKED
    from microbench.environment import cache_bytes, cuda_environment
    from microbench.plan import bandwidth_points, ordered, point

    where = where or Kernels()
    gpu = where.device == "cuda"
    points = [*bandwidth_points(cuda_environment()["cache_bytes"] if gpu else cache_bytes())[:3], point("launch", 0, kind="tiny")]
    held = set(HELD_OUT_ROWS) & set(where.rows[1:-1]) or set(where.rows[2:-1:4])
    for dtype, n, k in dict.fromkeys(shape for target in targets for shape in matrix_shapes(target)):
        points += [point("gemm", 3 if m in held else 1, m in held, dtype=dtype, m=m, n=n, k=k) for m in where.rows]
    held_query = where.queries[len(where.queries) // 2]
    for shape in dict.fromkeys(TARGETS[target].shape for target in targets):
        heads: dict[str, Any] = {"num_heads": shape.num_attention_heads, "num_kv_heads": shape.num_key_value_heads, "head_dim": shape.head_dim}
        heads |= {"backend": PACKED, "dtype": "bf16"} if gpu else {"backend": "sdpa", "dtype": "fp32"}
        for (seqs, context), query in itertools.product(where.cells, where.queries):
            out = query == held_query
            points.append(point("attention", 3 if out else 2, out, num_seqs=seqs, query_len=query, context_len=context, **heads))
    return ordered(points)


def matrix_shapes(target: str, share: float = 1.0) -> list[tuple[str, int, int]]:
    """(dtype, N, K) of a target's matrices as microbench names them, the largest first, down to those that together hold `share` of its weights.

    What stays in fp32 beside int8 weights (LM head, drafters) is as small as the small target, and takes its matrices; a drafter in bf16 has its own.
    """
    from microbench.gemm import INT8_WEIGHTS

    size = TARGETS[target]
    own = heaviest(target_config(target), share)
    match size.weights:
        case "int8":
            return [(INT8_WEIGHTS, n, k) for n, k in own] + matrix_shapes("small", share)
        case "bf16":
            return [("bf16", n, k) for n, k in [*own, *heaviest(llama_config(size.external), share)]]
        case _:
            return [("fp32", n, k) for n, k in own]


def heaviest(config: Mapping[str, Any], share: float) -> list[tuple[int, int]]:
    """(N, K) of a model's matrices, the largest first, down to those that together hold `share` of its weights."""
    case = Case.model_validate({"model": config, "gpu": "h100-sxm", "engine": "ideal", "context_len": 128, "concurrency": 1})
    sizes = {(int(s.n), int(s.k)): float(s.n * s.k * count) for _, s, count in resolve(case).plan.gemms}
    found, held = [], 0.0
    for shape, weights in sorted(sizes.items(), key=lambda item: -item[1]):
        if held < share * sum(sizes.values()):
            found.append(shape)
        held += weights
    return found


def measure_kernels(targets: Sequence[str], budget_s: float, raw: Path, where: Kernels | None = None) -> list[dict[str, Any]]:
    """Records of the microbenchmark; an unfinished raw file is gone on with."""
    from microbench.session import SessionError, Settings, run

    where = where or Kernels()
    try:
        return list(run(Settings(device=where.device, budget_s=budget_s, points=kernel_points(targets, where), passes=2), raw).records)
    except SessionError as error:
        raise InputError("kernels cannot be measured", where=str(raw), got=str(error)) from None


def profile_of(records: Sequence[Mapping[str, Any]], target: str) -> GpuProfile:
    """This machine as a target sees it: GEMM numbers from the matrices that hold nine tenths of its weights, since one curve over rows serves all
    and wide matrices climb from one row to three more steeply than square ones."""
    from planner.calibrate.bench import fit_profile

    own = set(matrix_shapes(target, 0.9))
    kept = [
        r for r in records if r.get("op") != "gemm" or r.get("kind") != "point" or tuple(r["args"][a] for a in ("dtype", "n", "k")) in own
    ]  # fmt: skip
    profile = fit_profile(kept).profile
    return replace(profile, id=f"{profile.id}-{target}")


def deployment(profile: GpuProfile, folder: Path, target: str, kind: str | None, match_prob: float | None = None) -> Deployment:
    """A target and a drafter of the family on this machine's profile."""
    return resolve(Case.model_validate(case_of(write_profile(profile, folder), target, kind, match_prob) | {"context_len": 1, "concurrency": 1}))


def case_of(profile_path: Path, target: str, kind: str | None, match_prob: float | None = None) -> dict[str, Any]:
    """The deployment part of a case."""
    return {"model": target_config(target), "gpu": str(profile_path), "engine": "builtin", "drafter": drafter_object(target, kind, match_prob)}


def profile_text(profile: GpuProfile) -> str:
    """The profile as a file that `--gpu` takes."""
    from planner.calibrate import bench

    return bench.profile_text(profile)


def write_profile(profile: GpuProfile, folder: Path) -> Path:
    """`folder`/ID.json."""
    from microbench.store import write_atomic

    path = folder / f"{profile.id}.json"
    write_atomic(path, profile_text(profile))
    return path


@dataclass(frozen=True)
class Seen:
    """A calibration arm as timed: seconds of a round and the mean context of its passes."""

    arm: Arm
    visits: tuple[Visit, ...]
    context_len: float

    @property
    def round_s(self) -> float:
        return round_seconds(self.visits)

    @property
    def any_match(self) -> float | None:
        """Share of rounds that drafted, for a look-up: the others were plain steps, and their cost is no overhead."""
        return any_match_prob(match_prob(self.visits), self.arm.num_seqs) if self.arm.drafter in LOOKUP else None

    @property
    def draft_frac(self) -> float:
        """Share of a round that goes into drafting."""
        return sum(v.draft_s for v in self.visits) / sum(v.total_s for v in self.visits)


@dataclass(frozen=True)
class Terms:
    """A round under an engine that adds nothing, drafting and the rest apart, and the derivatives of both by each overhead (by name)."""

    draft_s: float
    rest_s: float
    by_draft: Mapping[str, float]
    by_rest: Mapping[str, float]


def terms(dep: Deployment, arm: Arm, context_len: float, names: Sequence[str] = (*STEP_TERMS, *DRAFT_TERMS)) -> Terms:
    """The planner's own round for an arm. It is linear in the overheads, so a unit of each gives its derivative."""
    from planner.calibrate.engine import with_overheads

    def seconds(**overheads: float) -> tuple[float, float]:
        r = round_time(with_overheads(dep, **overheads), arm.num_seqs, context_len, arm.draft_len)
        return float(r.draft_s), float(r.verify_s + r.overhead_s)

    draft_s, rest_s = seconds()
    units = {name: seconds(**{name: 1.0}) for name in names}
    return Terms(draft_s, rest_s, {k: d - draft_s for k, (d, _) in units.items()}, {k: r - rest_s for k, (_, r) in units.items()})


def solve(rows: Sequence[tuple[float, float, Sequence[float]]]) -> list[float]:
    """Non-negative overheads from (measured, bare, derivatives), weighing relative errors alike."""
    from scipy.optimize import nnls

    matrix = np.array([np.asarray(d) / measured for measured, _, d in rows])
    wanted = np.array([(measured - bare) / measured for measured, bare, _ in rows])
    return [float(x) for x in nnls(matrix, wanted)[0]]


class Fitter:
    """Overheads from timed arms; deployments are resolved once."""

    def __init__(self, profile: GpuProfile, folder: Path) -> None:
        self.profile, self.folder = profile, folder
        self.deployments: dict[tuple[str, str | None, float | None], Deployment] = {}

    def deployment(self, target: str, kind: str | None, match: float | None = None) -> Deployment:
        key = (target, kind, match)
        if key not in self.deployments:
            self.deployments[key] = deployment(self.profile, self.folder, target, kind, match)
        return self.deployments[key]

    def terms(self, s: Seen) -> Terms:
        return terms(self.deployment(s.arm.target, s.arm.drafter, s.any_match), s.arm, s.context_len)

    def step(self, seen: Sequence[Seen]) -> dict[str, float]:
        """Every engine number, those of a plain step fitted to the arms that are off, the others zero."""
        off = [s for s in seen if s.arm.drafter is None]
        rows = [(s.round_s, t.rest_s, [t.by_rest[n] for n in STEP_TERMS]) for s, t in ((s, self.terms(s)) for s in off)]
        zero = dict.fromkeys(self.deployment(off[0].arm.target, None).engine.overheads, 0.0)
        return zero | {"kernel_scale": 1.0} | dict(zip(STEP_TERMS, solve(rows), strict=True))

    def draft(self, seen: Sequence[Seen], step: Mapping[str, float]) -> dict[str, float]:
        """What drafting adds to `step`: the time of drafting and that of the rest of a round are fitted apart, each to its own terms."""
        drafting, verifying = [], []
        for s, t in ((s, self.terms(s)) for s in seen):
            draft_s = s.draft_frac * s.round_s
            plain = t.rest_s + sum(t.by_rest[name] * step[name] for name in STEP_TERMS)
            if draft_s > 0:
                drafting.append((draft_s, t.draft_s, [t.by_draft[n] for n in IN_DRAFT]))
            verifying.append((s.round_s - draft_s, plain, [t.by_rest[n] for n in IN_REST]))
        fitted = dict(zip(IN_DRAFT, solve(drafting), strict=True)) if drafting else {}
        return dict(step) | fitted | dict(zip(IN_REST, solve(verifying), strict=True))


def fit_overheads(profile: GpuProfile, folder: Path, seen: Sequence[Seen], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Engine numbers by drafter kind (key "off": without one)."""
    fitter = Fitter(profile, folder)
    step = fitter.step(seen)
    return {"off": step} | {kind: fitter.draft([s for s in seen if s.arm.drafter == kind], step) for kind in kinds}


def shared_overheads(profile: GpuProfile, folder: Path, seen: Sequence[Seen]) -> dict[str, float]:
    """One set of engine numbers for all drafter kinds."""
    fitter = Fitter(profile, folder)
    return fitter.draft([s for s in seen if s.arm.drafter is not None], fitter.step(seen))


def with_engine(profile: GpuProfile, kind: str, overheads: Mapping[str, float]) -> GpuProfile:
    """The machine's profile with the engine's numbers for one drafter kind inside, as `calibrate --from-bench` writes them."""
    calibration = dict(profile.calibration or {}) | {"overheads": {"builtin": dict(overheads)}}
    return replace(profile, id=f"{profile.id}-{kind}", calibration=calibration)
