"""What a raw file shows at a glance: rates reached, curves of verify attention, the passes and how steady they were. No fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from microbench.attention import rows as query_rows
from microbench.bandwidth import ARRAYS_MOVED
from microbench.plan import EDGE_QUERY_ROWS, MOST_QUERY, point
from microbench.session import results
from microbench.steps import find_steps

Record = Mapping[str, Any]


def attention_error(device: str) -> float | None:
    """Largest error of our Triton kernel on the GPU against float64, over small shapes across its tiles; None where it cannot run."""
    if device != "cuda" or find_spec("triton") is None:
        return None
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return None
    module, worst = import_module("microbench.triton_attention"), 0.0
    for heads, kv_heads, query_len, context_len in ((8, 2, 1, 300), (8, 1, 5, 513), (16, 2, 9, 1025), (32, 1, 5, 700)):
        q = torch.randn(2, heads, query_len, 128, device="cuda", dtype=torch.float16)
        k, v = (torch.randn(2, kv_heads, context_len, 128, device="cuda", dtype=torch.float16) for _ in range(2))
        worst = max(worst, float((module.verify_attention(q, k, v).double() - reference(q, k, v)).abs().max()))
    return worst


def reference(q: Any, k: Any, v: Any) -> Any:
    """float64 attention with the bottom-right causal mask of verification."""
    torch = import_module("torch")
    group, query_len, context_len = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    score = q.double() @ keys.transpose(-1, -2) * q.shape[3] ** -0.5
    last = context_len - query_len + torch.arange(query_len, device=q.device)
    hidden = torch.arange(context_len, device=q.device)[None, :] > last[:, None]
    return score.masked_fill(hidden, float("-inf")).softmax(-1) @ values


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Bytes/s and FLOP/s reached, attention time by rows G(1 + D) with its tested steps, passes, points per class."""
    rows = results(records)
    environment = next(r["fingerprint"] for r in records if r["kind"] == "environment")
    stream = {
        r["key"]: ARRAYS_MOVED[r["args"]["pattern"]] * r["args"]["size_bytes"] / r["time_s"] for r in rows if r["op"] == "bandwidth"
    }  # fmt: skip
    best: dict[str, float] = {}
    for r in rows:
        if r["op"] == "gemm":
            a = r["args"]
            best[a["dtype"]] = max(best.get(a["dtype"], 0.0), 2.0 * a["m"] * a["n"] * a["k"] / r["time_s"])
    classes: dict[str, int] = {}
    for r in rows:
        classes[r["op"]] = classes.get(r["op"], 0) + 1
    refused = {r["key"]: r["stopped"] for r in records if r["kind"] == "point" and not r["samples_s"]}
    return {
        "environment": environment, "bytes_per_s": stream, "best_flop_per_s": best, "points": classes, "attention": attention_curves(rows),
        "passes": [{k: v for k, v in r.items() if k != "kind"} for r in records if r["kind"] == "pass"], "refused": refused,
        "throttled_points": sum(bool(r["throttled"]) for r in rows),
    }  # fmt: skip


def attention_curves(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """One curve per backend, dtype, group and context: (rows, seconds) and the steps that the data supports."""
    curves: dict[tuple[str, str, int, int], list[tuple[int, Record]]] = {}
    for r in rows:
        a = r["args"]
        if r["op"] == "attention" and a["num_seqs"] == 1 and a["query_len"] <= MOST_QUERY:
            key = (a["backend"], a["dtype"], a["num_heads"] // a["num_kv_heads"], a["context_len"])
            curves.setdefault(key, []).append((query_rows(point("attention", 0, **a)), r))
    out = []
    for (backend, dtype, group, context), unsorted in sorted(curves.items()):
        found = sorted(unsorted, key=lambda item: item[0])
        pairs = [(x, t) for x, r in found for t in r["passes_s"]]
        steps = find_steps([x for x, _ in pairs], [t for _, t in pairs], EDGE_QUERY_ROWS) if len(found) >= 7 else []
        out.append({
            "backend": backend, "dtype": dtype, "group": group, "context_len": context, "curve": [(x, r["time_s"]) for x, r in found],
            "steps": [{"above_rows": s.edge, "height_frac": s.height_frac, "delta_bic": s.delta_bic} for s in steps],
        })  # fmt: skip
    return out
