"""What to measure and in which order: points by what they teach, so that a budget that ends early has cost the least valuable ones.

Tiers: 0 bandwidth, launch and the sentinel; 1 a coarse curve of every kernel class; 2 the edges where tiles change; 3 further shapes,
the points held out of the fit, and whole passes. Pure: no device and no library is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

Value = int | str
Shape = tuple[int, int]
"""(N output features, K input features)."""

#: Rows (tokens) at which GEMM and attention programs may change: every count up to 17, then both sides of each power of two.
EDGE_ROWS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 512, 1024, 2048)
#: A curve from few points: tier 1.
COARSE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Held out of every fit, to judge it: between the nodes, and one side of an edge.
HELD_OUT_ROWS = (6, 11, 14, 48, 96, 192, 384)
#: Where an attention program may change its tile, in rows G(1 + D) (facts: FlashInfer 16/64/128, FA3 128/192, XQA 32, FlashMLA 64).
EDGE_QUERY_ROWS = (16, 32, 64, 128, 192, 256)

#: Query tokens of the longest verify curve: with 4 query heads per KV head, 128 rows lie well inside.
MOST_QUERY = 48
#: Backends that compile every new shape.
SLOW_TO_COMPILE = ("flex",)

GPU_SHAPES: tuple[Shape, ...] = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 2048), (5120, 5120))
CPU_SHAPES: tuple[Shape, ...] = ((2048, 2048), (5632, 1024), (1024, 1024), (1024, 2816), (3072, 1024))
ROUND_CPU: Mapping[str, Value] = {"layers": 4, "hidden": 1024, "ffn": 2816, "heads": 16, "kv_heads": 4, "head_dim": 64, "vocab": 8192}
ROUND_GPU: Mapping[str, Value] = {"layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256}


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure. `args` sorted by name; `key` names the point in raw files."""

    op: str
    args: tuple[tuple[str, Value], ...]
    tier: int = 1
    held_out: bool = False
    """Not fitted: judges the fit and gives its band."""

    @property
    def key(self) -> str:
        return " ".join([self.op, *(f"{k}={v}" for k, v in self.args)])

    def num(self, name: str) -> int:
        value = dict(self.args)[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} of {self.key} is not a number")
        return value

    def text(self, name: str) -> str:
        return str(dict(self.args)[name])


def point(op: str, tier: int, held_out: bool = False, **args: Value) -> Point:
    """A point with its arguments in canonical order."""
    return Point(op, tuple(sorted(args.items())), tier, held_out)


def edge_rows(most: int) -> tuple[int, ...]:
    """Row counts up to `most` that show every usual tile edge."""
    return tuple(m for m in EDGE_ROWS if m <= most)


def gemm_points(shapes: Sequence[Shape], dtypes: Sequence[str], most_rows: int, most_flop: float) -> list[Point]:
    """t(M) of each (N, K): the first shape at every edge, the others coarser; the last of three or more is held out whole."""
    out = []
    for i, (n, k) in enumerate(shapes):
        whole = len(shapes) >= 3 and i == len(shapes) - 1
        for m in edge_rows(most_rows):
            if 2.0 * m * n * k > most_flop and m > 16:
                continue
            coarse, held = m in COARSE_ROWS, whole or m in HELD_OUT_ROWS
            if i >= 1 and not (coarse or m in (3, 6, 11, 17, 33, 65, 129)):
                continue
            tier = 3 if held else 1 if coarse and i == 0 else 2 if coarse or i == 0 else 3
            out += [point("gemm", tier, held, dtype=d, m=m, n=n, k=k) for d in dtypes]
    return out


def attention_points(  # noqa: PLR0913
    backends: Sequence[str],
    groups: Sequence[int],
    contexts: Sequence[int],
    *,
    dtypes: Sequence[str],
    kv_heads: int,
    head_dim: int,
    edges: Sequence[int] = EDGE_QUERY_ROWS,
) -> list[Point]:
    """Verify attention: query lengths so that the rows G(1 + D) lie on both sides of every tile edge, for each G and context.

    Two lengths above an edge, or a step could not be told from a change of slope.

    Without `edges` (no tiles, as on a CPU) a few lengths to 16 do. Backends that compile each shape for seconds get a few points only.
    """
    out = []
    for group in groups:
        queries = {1, 2, 3, 4, 6, 8, 12, 16} | {q for e in edges for q in (e // group, e // group + 1, -(-5 * e // (4 * group)))}
        for context in contexts:
            first = group == groups[0] and context == contexts[0]
            for query in sorted(q for q in queries if 1 <= q <= min(MOST_QUERY, context // 2)):
                coarse, held = query in (1, 2, 4, 8, 16), query in (3, 6, 12)
                for backend in backends:
                    if backend in SLOW_TO_COMPILE and not (first and coarse):
                        continue
                    late = held or context not in contexts[:2] or backend in SLOW_TO_COMPILE
                    tier = 3 if late else 1 if coarse and first and backend == backends[0] else 2
                    shape: dict[str, Value] = {"num_seqs": 1, "query_len": query, "context_len": context, "num_heads": group * kv_heads}
                    shape |= {"num_kv_heads": kv_heads, "head_dim": head_dim}
                    out += [point("attention", tier, held, backend=backend, dtype=d, **shape) for d in dtypes]
    return out


def batch_attention_points(backends: Sequence[str], dtypes: Sequence[str], group: int, kv_heads: int, head_dim: int, context: int) -> list[Point]:
    """More than one sequence: what a batch does to the same kernel."""
    return [
        point("attention", 3, num_seqs == 3, backend=b, dtype=d, num_seqs=num_seqs, query_len=q, context_len=context,
              num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
        for b in backends for d in dtypes for num_seqs in (2, 3, 8) for q in (1, 4, 8)
    ]  # fmt: skip


def prefill_points(backends: Sequence[str], dtypes: Sequence[str], group: int, kv_heads: int, head_dim: int, queries: Sequence[int]) -> list[Point]:
    """Prompt chunks: the whole prompt, and a chunk behind as much context again."""
    return [
        point("attention", 3, context != q and q == queries[0], backend=b, dtype=d, num_seqs=1, query_len=q, context_len=context,
              num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
        for b in backends for d in dtypes for q in queries for context in (q, 4 * q) if b not in SLOW_TO_COMPILE
    ]  # fmt: skip


def moe_points(dtypes: Sequence[str], experts: int, width: int, ffn: int) -> list[Point]:
    """Grouped expert GEMM: rows spread over 1, 2, 4, ... touched experts."""
    touched = [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t <= experts]
    return [
        point("moe", 3, t == 4, dtype=d, experts=experts, width=width, ffn=ffn, touched=t, rows_per_expert=rows)
        for d in dtypes for t in touched for rows in (1, 4, 16)
    ]  # fmt: skip


def round_points(sizes: Mapping[str, Value], dtype: str, context: int, batches: Sequence[int]) -> list[Point]:
    """Whole passes of a small transformer: what kernel sums miss. query_len 1 is a draft or plain pass, more is verification."""
    return [point("round", 3, True, dtype=dtype, num_seqs=b, query_len=q, context_len=context, **sizes) for b in batches for q in (1, 2, 4, 8)]


def bandwidth_points(cache_bytes: int) -> list[Point]:
    """Stream read, copy and triad, in cache and far beyond it. `size_bytes` of one array."""
    sizes = [2 * cache_bytes, cache_bytes // 16, 4 * cache_bytes, 8 * cache_bytes]
    return [point("bandwidth", 0 if size == sizes[0] else 3, pattern=p, size_bytes=size) for size in sizes for p in ("read", "triad", "copy")]


def standard_plan(
    device: str, *, cache_bytes: int, shapes: Sequence[Shape] = (), dtypes: Sequence[str] = (), backends: Sequence[str] = ("sdpa",)
) -> list[Point]:
    """The whole plan of a device, most valuable first. `shapes`: a model's own (N, K) instead of the standard set."""
    if device == "cpu":
        dtypes = tuple(dtypes) or ("fp32", "bf16")
        points = bandwidth_points(cache_bytes) + [point("launch", 0, kind="tiny")]
        points += gemm_points(tuple(shapes) or CPU_SHAPES, dtypes, 256, 6e8)
        points += attention_points(backends, (4, 1), (1024, 4096), dtypes=dtypes, kv_heads=4, head_dim=64, edges=())
        points += batch_attention_points(backends, dtypes, 4, 4, 64, 512)
        points += prefill_points(backends, dtypes, 4, 4, 64, (64, 256))
        points += moe_points(("fp32",), 16, 512, 1024)
        points += [point("sampler", 3, vocab=v, rows=r) for v in (32000, 151936) for r in (1, 8)]
        points += round_points(ROUND_CPU, "fp32", 512, (1, 4))
    else:
        dtypes = tuple(dtypes) or ("bf16", "fp8")
        points = bandwidth_points(cache_bytes) + [point("launch", 0, kind="tiny"), point("launch", 0, kind="chain")]
        points += gemm_points(tuple(shapes) or GPU_SHAPES, dtypes, 2048, 1e13)
        points += attention_points(backends, (8, 4, 16, 32), (8192, 32768, 2048, 131072), dtypes=("bf16",), kv_heads=8, head_dim=128)
        points += batch_attention_points(backends, ("bf16",), 8, 8, 128, 8192)
        points += prefill_points([b for b in backends if b != "triton"], ("bf16",), 8, 8, 128, (512, 2048))
        points += moe_points(("bf16",), 128, 4096, 1536)
        points += [point("sampler", 3, vocab=v, rows=r) for v in (32000, 151936) for r in (1, 8, 64, 256)]
        points += round_points(ROUND_GPU, "bf16", 4096, (1, 8, 32))
    return ordered(points)


def sentinel(device: str) -> Point:
    """The point that brackets each pass: it must not move."""
    if device == "cpu":
        return point("gemm", 0, dtype="fp32", m=8, n=1024, k=1024)
    return point("gemm", 0, dtype="bf16", m=64, n=4096, k=4096)


def ordered(points: Iterable[Point]) -> list[Point]:
    """By tier, each point once; inside a tier the classes take turns, so that none waits for another to finish."""
    unique = list({p.key: p for p in points}.values())
    turn: dict[tuple[int, str], int] = {}
    keyed = []
    for p in unique:
        count = turn[p.tier, p.op] = turn.get((p.tier, p.op), -1) + 1
        keyed.append((p.tier, count, p))
    return [p for _, _, p in sorted(keyed, key=lambda item: item[:2])]


def fit_budget(points: Sequence[Point], cost_s: Mapping[str, float], usual_cost_s: float, budget_s: float) -> list[Point]:
    """The longest prefix that fits in `budget_s`, with seconds per point where known and `usual_cost_s` where not; at least one point."""
    total = 0.0
    kept: list[Point] = []
    for p in points:
        total += cost_s.get(p.key, usual_cost_s)
        if kept and total > budget_s:
            break
        kept.append(p)
    return kept


def shuffled(points: Sequence[Point], seed: int, by_tier: bool) -> list[Point]:
    """A random order, so that drift does not look like a step; `by_tier` keeps the tiers in order (while the costs are unknown)."""
    rng = Random(seed)
    mixed = [(p.tier if by_tier else 0, rng.random(), p) for p in points]
    return [p for _, _, p in sorted(mixed, key=lambda item: item[:2])]
