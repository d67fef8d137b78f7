"""`explain`: one point, operation by operation: FLOP, bytes, seconds, share, percent of speed of light, what binds, rows and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.cases import parse_case
from planner.deployment import Deployment, resolve
from planner.edges import edges_of
from planner.errors import DraftlineError
from planner.kernels import padded_rows
from planner.ops import AllGather, AllReduce, AllToAll, ExpertsOp, Gemm, KvOp, LatentOp, Op
from planner.prediction import predict_many
from planner.roofline import Machine
from planner.round import step_ops, verify_rows


def explain_case(raw: Mapping[str, Any]) -> dict[str, Any]:
    """{"prediction", "verify": [...], "draft": [...], "residuals", "edges"} of one case. Raises DraftlineError."""
    answer = predict_many([raw])[0]
    if isinstance(answer, DraftlineError):
        raise answer
    case = parse_case(raw)
    dep = resolve(case)
    per_rank = float(np.ceil(np.ceil(answer.num_seqs / dep.layout.dp) / dep.layout.pp))
    context = float(case.context_len or (case.input_len or 1024) + (case.output_len or 0) / 2.0)
    width = float(np.asarray(verify_rows(dep, float(case.draft_len))))
    verify = [op_row(op, dep.machine, dep) for op in step_ops(dep, per_rank, width, context + case.draft_len)]
    draft: list[dict[str, Any]] = []
    if case.draft_len and dep.draft is not None and dep.draft.body is not None:
        parallel = dep.draft.parallel
        rows = width if parallel else 1.0
        draft = [op_row(op, dep.draft.machine, dep) for op in dep.draft.pass_ops(per_rank, rows, context, rows if parallel else 1.0)]
    o = dep.overheads
    return {
        "prediction": answer.model_dump(),
        "gpu": dep.gpu.id,
        "engine": dep.engine.id,
        "model": dep.model.id,
        "rows": {"num_seqs_per_rank": per_rank, "query_len": width, "rows": per_rank * width, "padded_rows": float(dep.padded_rows(per_rank, width))},
        "verify": with_share(verify),
        "draft_pass": with_share(draft),
        "residuals": {k: v for k, v in o.items() if v},
        "edges": list(edges_of(dep, answer.num_seqs, case.draft_len)),
        "basis": basis(dep),
    }


def op_row(op: Op, m: Machine, dep: Deployment) -> dict[str, Any]:
    """One operation over a whole pass (all its layers)."""
    t = m.op_time(op)
    time = float(m.served_s(op))
    flop, moved = float(np.asarray(op.flop)) * op.count, float(np.asarray(op.bytes)) * op.count
    if isinstance(op, AllReduce | AllGather | AllToAll):
        bound, light = "network", moved / m.gpu.link_bytes_per_s
    else:
        parts = {"memory": float(np.asarray(t.memory_s)), "compute": float(np.asarray(t.compute_s)), "launch": float(np.asarray(t.fixed_s))}
        bound = max(parts, key=lambda k: parts[k])
        light = max(moved / m.gpu.bytes_per_s, flop / m.gpu.peak(arithmetic(op, m)))
    row: dict[str, Any] = {
        "op": op.name,
        "count": op.count,
        "flop": flop,
        "bytes": moved,
        "time_s": time,
        "bound": bound,
        "speed_of_light_frac": light / time if time > 0 else None,
    }
    if isinstance(op, Gemm):
        row |= {"rows": float(np.asarray(op.rows)), "shape": [op.n, op.k], "weights_dtype": op.weights_dtype, "act_dtype": op.act_dtype}
    elif isinstance(op, KvOp):
        group = op.num_heads / op.num_kv_heads
        used = float(np.asarray(op.query_len)) * group
        padded = float(padded_rows(op.query_len, group, op.core.head_dim, m.attention_kernel("gqa"))[0])
        row |= {"rows": used, "padded_rows": padded, "kv_dtype": op.kv_dtype}
    elif isinstance(op, LatentOp):
        row |= {"rows": float(np.asarray(op.query_len)) * op.num_heads, "kv_dtype": op.kv_dtype}
    elif isinstance(op, ExpertsOp):
        row |= {
            "rows": float(np.asarray(op.expert_rows / op.touched)),
            "experts_touched": float(np.asarray(op.touched)),
            "weights_dtype": op.weights_dtype,
        }
    return row


def arithmetic(op: Op, m: Machine) -> str:
    """Dtype whose peak bounds the operation."""
    if isinstance(op, Gemm | ExpertsOp):
        return op.act_dtype
    if isinstance(op, KvOp | LatentOp) and op.attn_dtype in m.gpu.peak_flop_per_s:
        return op.attn_dtype
    return "bf16" if "bf16" in m.gpu.peak_flop_per_s else "fp16"


def with_share(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    total = sum(r["time_s"] for r in rows) or 1.0
    return [r | {"share": r["time_s"] / total} for r in sorted(rows, key=lambda r: -r["time_s"])]


def basis(dep: Deployment) -> list[str]:
    """What the numbers of each kernel class rest on."""
    return sorted({f"{op} {dtype}: {fitted.provenance}" for (op, dtype), fitted in dep.machine.looked_up()})
