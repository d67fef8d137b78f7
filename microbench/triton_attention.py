"""Our own verify attention in Triton: an explicit BLOCK_M, the G(1 + D) rows of a KV head packed, the context split over programs.

Grid (row tiles, sequences x KV heads, splits): a program streams its share of the context once for BLOCK_M packed rows; a second kernel
combines the splits. Row r of a KV head is token r // G of query head r % G; token i of the 1 + D new ones sees the context up to and with
itself (bottom-right causal). One such kernel with BLOCK_M 16, 64 or 128 shows the steps that FlashInfer (16/64/128) and
FlashAttention 3 (128) have, without their wheels. Imported only where Triton is; TRITON_INTERPRET=1 runs it on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

ROW_TILES = (16, 32, 64, 128)
#: Warps by BLOCK_M: 128 rows spill with 4 (facts: 124 bytes on sm_90, 348 on sm_80).
WARPS = {16: 4, 32: 4, 64: 4, 128: 8}
BLOCK_N = 64
COMBINE_ROWS = 16


def _split(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    q, k, v, partial, stats, scale, query_len, context_len, rows, split_len, kv_heads,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row tile of one KV head of one sequence over one share of the context."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    split = tl.program_id(2)
    batch = batch_head // kv_heads
    head = batch_head % kv_heads
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    inside = row < rows
    q_at = q + batch * stride_qb + query_head[:, None] * stride_qh + token[:, None] * stride_qt + dim[None, :]
    query = tl.load(q_at, mask=inside[:, None], other=0.0)
    last = context_len - query_len + token  # the last key that a row sees
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    begin = split * split_len
    end = tl.minimum(begin + split_len, context_len)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = key < end
        keys = tl.load(k + batch * stride_kb + head * stride_kh + key[None, :] * stride_kt + dim[:, None], mask=valid[None, :], other=0.0)
        score = tl.dot(query, keys) * scale
        score = tl.where(valid[None, :] & (key[None, :] <= last[:, None]), score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        values = tl.load(v + batch * stride_vb + head * stride_vh + key[:, None] * stride_vt + dim[None, :], mask=valid[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
        top = new_top
    at = (batch_head * SPLITS + split) * rows + row
    tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside[:, None])
    tl.store(stats + 2 * at, top, mask=inside)
    tl.store(stats + 2 * at + 1, total, mask=inside)


def _combine(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    partial, stats, out, rows, kv_heads, stride_ob, stride_oh, stride_ot,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weights the shares of the context by their softmax sums."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1)
    batch = batch_head // kv_heads
    head = batch_head % kv_heads
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    inside = row < rows
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for split in range(SPLITS):
        at = (batch_head * SPLITS + split) * rows + row
        other_top = tl.load(stats + 2 * at, mask=inside, other=float("-inf"))
        other_total = tl.load(stats + 2 * at + 1, mask=inside, other=0.0)
        part = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=inside[:, None], other=0.0)
        new_top = tl.maximum(top, other_top)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        mine = tl.exp(top - safe)
        theirs = tl.exp(other_top - safe)
        total = total * mine + other_total * theirs
        acc = acc * mine[:, None] + part * theirs[:, None]
        top = new_top
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out + batch * stride_ob + (head * GROUP + row % GROUP)[:, None] * stride_oh + (row // GROUP)[:, None] * stride_ot + dim[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside[:, None])


SPLIT = triton.jit(_split)
COMBINE = triton.jit(_combine)


def row_tile(rows: int) -> int:
    """The smallest tile that holds the rows; 128 beyond."""
    return next((t for t in ROW_TILES if rows <= t), ROW_TILES[-1])


def num_splits(units: int, context_len: int, sm_count: int) -> int:
    """Shares of the context: so many that programs fill the GPU, each with four key blocks at least, 32 at most."""
    return max(1, min(sm_count // max(units, 1), context_len // (4 * BLOCK_N), 32))


def verify_attention(q: Any, k: Any, v: Any, *, block_m: int | None = None, splits: int | None = None, sm_count: int = 132) -> Any:
    """Attention of q [sequences, heads, 1 + D, head dim] over k, v [sequences, KV heads, context, head dim]; same layout as q out.

    The last 1 + D tokens of the context are the new ones. The head dim is a power of two; heads are a multiple of KV heads.
    """
    torch = import_module("torch")
    batch, heads, query_len, dim = q.shape
    kv_heads, context_len = k.shape[1], k.shape[2]
    group, rows = heads // kv_heads, heads // kv_heads * query_len
    tile = block_m or row_tile(rows)
    tiles = -(-rows // tile)
    parts = splits or num_splits(batch * kv_heads * tiles, context_len, sm_count)
    split_len = -(-context_len // (parts * BLOCK_N)) * BLOCK_N
    out = torch.empty_like(q)
    partial = torch.empty((batch * kv_heads, parts, rows, dim), device=q.device, dtype=torch.float32)
    stats = torch.empty((batch * kv_heads, parts, rows, 2), device=q.device, dtype=torch.float32)
    SPLIT[(tiles, batch * kv_heads, parts)](
        q, k, v, partial, stats, dim**-0.5, query_len, context_len, rows, split_len, kv_heads,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        GROUP=group, HEAD_DIM=dim, BLOCK_M=tile, BLOCK_N=BLOCK_N, SPLITS=parts, num_warps=WARPS[tile],
    )  # fmt: skip
    COMBINE[(-(-rows // COMBINE_ROWS), batch * kv_heads)](
        partial, stats, out, rows, kv_heads, *out.stride()[:3], GROUP=group, HEAD_DIM=dim, BLOCK_M=COMBINE_ROWS, SPLITS=parts, num_warps=4
    )
    return out


def compile_for(capability: int, block_m: int, *, group: int = 8, head_dim: int = 128, splits: int = 8) -> dict[str, str]:
    """Compile both kernels for a GPU that need not be here (capability 80, 89, 90, 100, 120): {kernel: PTX}."""
    compiler = import_module("triton.compiler")
    target = import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    ints = dict.fromkeys(("query_len", "context_len", "rows", "split_len", "kv_heads"), "i32")
    strides = {f"stride_{t}{a}": "i32" for t in "qkv" for a in ("b", "h", "t")}
    pointers = dict.fromkeys("qkv", "*bf16") | {"partial": "*fp32", "stats": "*fp32"}
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "SPLITS": splits}
    out_strides = {f"stride_o{a}": "i32" for a in ("b", "h", "t")}
    jobs = {
        "split": (SPLIT, pointers | {"scale": "fp32"} | ints | strides, constants, WARPS[block_m]),
        "combine": (
            COMBINE, {"partial": "*fp32", "stats": "*fp32", "out": "*bf16", "rows": "i32", "kv_heads": "i32"} | out_strides,
            {n: c for n, c in constants.items() if n != "BLOCK_N"} | {"BLOCK_M": COMBINE_ROWS}, 4,
        ),
    }  # fmt: skip
    ptx = {}
    for name, (kernel, signature, values, warps) in jobs.items():
        source = compiler.ASTSource(kernel, signature | dict.fromkeys(values, "constexpr"), constexprs=values)
        ptx[name] = str(triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"])
    return ptx
