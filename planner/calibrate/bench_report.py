"""What a microbenchmark shows beside the fits: where curves step, what kernel sums miss in a whole pass, predictions of its points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_profiles.fits import kernel_fit
from gpu_profiles.load import load_attention_kernel
from gpu_profiles.schema import GpuProfile
from planner.calibrate.kernel_models import gemm_bytes
from planner.kernels import attention_time, gemm_time, moe_time

Array = npt.NDArray[np.float64]
Row = Mapping[str, Any]

#: Edges that steps are tested at: tiles of known kernels (rows M of a GEMM, rows G(1 + D) of attention).
GEMM_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ATTENTION_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
#: Tile descriptor by measured backend.
DESCRIPTORS = {
    "sdpa": "cpu", "sdpa-packed": "torch-sdpa-packed", "sdpa-flash": "torch-sdpa", "sdpa-cudnn": "cudnn", "flex": "flex-decode",
    "flashinfer": "flashinfer-fa2", "fa3": "fa3", "triton": "flashinfer-fa2",
}  # fmt: skip


def select(rows: Iterable[Row], op: str, **where: object) -> list[Row]:
    """Rows of a kernel class whose arguments agree."""
    return [r for r in rows if r["op"] == op and all(r["args"].get(k) == v for k, v in where.items())]


def column(rows: Sequence[Row], name: str) -> Array:
    return np.asarray([r["args"][name] for r in rows], dtype=np.float64)


def times(rows: Sequence[Row]) -> Array:
    return np.asarray([r["time_s"] for r in rows], dtype=np.float64)


def short(value: float, digits: int = 4) -> float:
    """`digits` significant ones: files stay readable and fits do not pretend."""
    return float(f"{value:.{digits}g}")


def tested_steps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Curves whose steps survive the test against no step, with positions: GEMM over M, attention over rows G(1 + D)."""
    from microbench.plan import MOST_QUERY
    from microbench.steps import find_steps

    curves: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        a = r["args"]
        if r["op"] == "gemm":
            label, at = f"gemm {a['dtype']} n={a['n']} k={a['k']}", float(a["m"])
        elif r["op"] == "attention" and a["query_len"] <= MOST_QUERY:
            group = a["num_heads"] // a["num_kv_heads"]
            label = f"attention {a['backend']} {a['dtype']} G={group} context={a['context_len']} seqs={a['num_seqs']}"
            at = float(group * a["query_len"])
        else:
            continue
        curves.setdefault(label, []).extend((at, t) for t in r["passes_s"])
    out = []
    for label, pairs in sorted(curves.items()):
        xs = [x for x, _ in pairs]
        if len(set(xs)) < 7:
            continue
        found = find_steps(xs, [t for _, t in pairs], GEMM_EDGES if label.startswith("gemm") else ATTENTION_EDGES)
        steps = [{"above_rows": s.edge, "height_frac": short(s.height_frac, 3), "delta_bic": short(s.delta_bic, 3)} for s in found]
        out.append({"curve": label, "rows": len(set(xs)), "steps": steps})
    return out


def predict(row: Row, gpu: GpuProfile, engine: str = "builtin") -> float:
    """Seconds that the profile predicts for a GEMM, attention or expert row, through the same look-up as a plan."""
    op, dtype = str(row["op"]), str(row["args"]["dtype"])
    fit, (size, act) = kernel_fit(op, gpu, engine, dtype).value, gemm_bytes(dtype)
    a = {k: v for k, v in row["args"].items() if not isinstance(v, str)}
    if op == "gemm":
        return float(gemm_time(a["m"], a["n"], a["k"], fit, weight_bytes_per_element=size, act_bytes_per_element=act).time_s)
    if op == "moe":
        return float(moe_time(a["touched"] * a["rows_per_expert"], top_k=1.0, width=a["width"], ffn=a["ffn"], experts_touched=a["touched"],
                              fit=fit, weight_bytes_per_element=size).time_s)  # fmt: skip
    kernel = load_attention_kernel(DESCRIPTORS[str(row["args"]["backend"])])
    return float(attention_time(a["num_seqs"], a["query_len"], a["context_len"], num_heads=a["num_heads"], num_kv_heads=a["num_kv_heads"],
                                head_dim=a["head_dim"], kv_bytes_per_element=size, fit=fit, kernel=kernel).time_s)  # fmt: skip


def round_residual(rows: Sequence[Row], gpu: GpuProfile) -> dict[str, Any] | None:
    """Whole passes of a small transformer against the sum of their kernels: seconds per layer and per layer and token that sums miss."""
    from microbench.plan import point
    from microbench.round import kernels

    passes = select(rows, "round")
    if len(passes) < 3:
        return None
    total = [sum(count * predict({"op": k.op, "args": dict(k.args)}, gpu) for k, count in kernels(point("round", 3, **r["args"]))) for r in passes]
    tokens, layers = column(passes, "num_seqs") * column(passes, "query_len"), column(passes, "layers")
    missing = (times(passes) - np.asarray(total)) / layers
    slope, level = np.polyfit(tokens, missing, 1)
    points = [{"tokens": float(n), "measured_s": short(r["time_s"]), "kernels_s": short(k)} for n, r, k in zip(tokens, passes, total, strict=True)]
    return {
        "per_layer_s": short(float(level), 3), "per_layer_token_s": short(float(slope), 3),
        "kernel_share": short(float(np.median(np.asarray(total) / times(passes))), 3),
        "points": points,
    }  # fmt: skip


def agreement(first: GpuProfile, second: GpuProfile, rows: Sequence[Row]) -> dict[str, float]:
    """How far two calibrations of one device agree on `rows`.

    `within_frac`: share of rows where each profile's prediction lies in the other's band; `median_ratio`: median of the larger
    prediction over the smaller; `max_ratio`: the largest.
    """
    inside, ratios = [], []
    for row in rows:
        a, b = predict(row, first), predict(row, second)
        bands = [kernel_fit(str(row["op"]), gpu, "builtin", str(row["args"]["dtype"])).band for gpu in (first, second)]
        inside.append(bands[0][0] <= b / a <= bands[0][1] and bands[1][0] <= a / b <= bands[1][1])
        ratios.append(max(a / b, b / a))
    return {"within_frac": float(np.mean(inside)), "median_ratio": short(float(np.median(ratios))), "max_ratio": short(max(ratios))}
