"""A real pass of a small transformer: what the sum of its kernels misses (norms, rotation, activation, cache writes, dispatch)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from microbench.plan import Point, point
from microbench.timing import Device, Work


def kernels(p: Point) -> list[tuple[Point, int]]:
    """The GEMM and attention points that the pass consists of, with how often each runs."""
    dtype, layers, m = p.text("dtype"), p.num("layers"), p.num("num_seqs") * p.num("query_len")
    h, f, d = p.num("hidden"), p.num("ffn"), p.num("head_dim")
    heads, kv = p.num("heads"), p.num("kv_heads")
    shapes = [((heads + 2 * kv) * d, h), (h, heads * d), (2 * f, h), (h, f)]
    out = [(point("gemm", 3, dtype=dtype, m=m, n=n, k=k), layers) for n, k in shapes]
    out.append((point("gemm", 3, dtype=dtype, m=m, n=p.num("vocab"), k=h), 1))
    attention = point(
        "attention", 3, backend="sdpa", dtype=dtype, num_seqs=p.num("num_seqs"), query_len=p.num("query_len"), context_len=p.num("context_len"),
        num_heads=heads, num_kv_heads=kv, head_dim=d,
    )  # fmt: skip
    return [*out, (attention, layers)]


def work(p: Point, device: Device) -> Work:
    """Pre-norm decoder layers with grouped attention over a filled cache, gated MLP, and the head; one launch is one pass."""
    torch = import_module("torch")
    functional = torch.nn.functional
    dtype, b, q, s = p.text("dtype"), p.num("num_seqs"), p.num("query_len"), p.num("context_len")
    h, f, d, heads, kv = p.num("hidden"), p.num("ffn"), p.num("head_dim"), p.num("heads"), p.num("kv_heads")
    qkv_out, at = (heads + 2 * kv) * d, 0
    layers = []
    for _ in range(p.num("layers")):
        shapes = ((qkv_out, h), (h, heads * d), (2 * f, h), (h, f))
        weights = [device.tensor(shape, dtype, at + j) * 0.02 for j, shape in enumerate(shapes)]
        cache = [device.tensor((b, kv, s, d), dtype, at + j).clone() for j in (5, 6)]
        layers.append((weights, cache))
        at += 7
    head = device.tensor((p.num("vocab"), h), dtype, at) * 0.02
    x0 = device.tensor((b * q, h), dtype, 3).clone()
    norm = torch.ones(h, device=x0.device, dtype=x0.dtype)
    angle = torch.rand(q, d, device=x0.device, dtype=x0.dtype)

    def rotate(t: Any) -> Any:
        return t * angle + torch.roll(t, d // 2, dims=-1) * angle

    def launch(i: int) -> Any:
        x = x0
        for (w_qkv, w_out, w_up, w_down), (keys, values) in layers:
            y = functional.linear(functional.rms_norm(x, (h,), norm), w_qkv).view(b, q, heads + 2 * kv, d).transpose(1, 2)
            query, key, value = y.split((heads, kv, kv), dim=1)
            keys[:, :, s - q :] = rotate(key)
            values[:, :, s - q :] = value
            seen = functional.scaled_dot_product_attention(rotate(query), keys, values, enable_gqa=heads != kv)
            x = x + functional.linear(seen.transpose(1, 2).reshape(b * q, heads * d), w_out)
            gate, up = functional.linear(functional.rms_norm(x, (h,), norm), w_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, w_down)
        return functional.linear(functional.rms_norm(x, (h,), norm), head)

    return Work(launch)
