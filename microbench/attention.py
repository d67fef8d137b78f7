"""Verify attention: 1 + D query rows per sequence over a KV cache, grouped heads, through every backend at hand.

`is_causal=True` of torch is upper-left and wrong here (it would let the first new token see one key). The mask among the 1 + D new
tokens costs nothing next to a long context, so backends run without a mask unless they take the bottom-right one for free.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from microbench.plan import Point
from microbench.timing import Device, Work

CPU_BACKENDS = ("sdpa",)
#: What the built-in engine calls: the G query heads of a KV head packed to rows, under a mask. Measured only where asked for.
PACKED = "sdpa-packed"
#: name -> module that must be importable.
CUDA_BACKENDS = {
    "triton": "triton", "sdpa-flash": "torch", "sdpa-cudnn": "torch", "flex": "triton", "flashinfer": "flashinfer", "fa3": "flash_attn_interface",
}  # fmt: skip


def backends(kind: str) -> tuple[str, ...]:
    """Backends whose library is installed, the one with a known tile first."""
    if kind == "cpu":
        return CPU_BACKENDS
    return tuple(name for name, module in CUDA_BACKENDS.items() if find_spec(module) is not None)


def kv_bytes(p: Point) -> float:
    """Keys and values of all sequences."""
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[p.text("dtype")]
    return float(2 * p.num("num_seqs") * p.num("num_kv_heads") * p.num("context_len") * p.num("head_dim") * size)


def rows(p: Point) -> int:
    """R = G(1 + D), the query rows of one KV head."""
    return p.num("num_heads") // p.num("num_kv_heads") * p.num("query_len")


def work(p: Point, device: Device) -> Work:
    """One attention layer over rotating caches. Layout [sequences, heads, tokens, head dim]."""
    b, h, hk, q, s, d = (p.num(n) for n in ("num_seqs", "num_heads", "num_kv_heads", "query_len", "context_len", "head_dim"))
    dtype = p.text("dtype")
    copies = device.copies(kv_bytes(p))
    query = device.tensor((b, h, q, d), dtype, 5).clone()
    packed = p.text("backend") == PACKED  # its cache is [sequences, tokens, heads, head dim]: the heads of a token lie together
    size = (b, s, hk, d) if packed else (b, hk, s, d)
    keys, values = ([device.tensor(size, dtype, 2 * i + which).transpose(1, 2 if packed else 1) for i in range(copies)] for which in (0, 1))
    call = _CALLS[p.text("backend")](query, keys[0], values[0])

    def launch(i: int) -> Any:
        return call(query, keys[i % copies], values[i % copies])

    return Work(launch, copies)


Call = Callable[[Any, Any, Any], Any]


def _sdpa(query: Any, key: Any, value: Any) -> Call:
    functional = import_module("torch").nn.functional
    grouped = query.shape[1] != key.shape[1]
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def _sdpa_packed(query: Any, key: Any, value: Any) -> Call:
    torch = import_module("torch")
    (b, h, q, d), (hk, s) = query.shape, key.shape[1:3]
    packed = query.reshape(b, hk, h // hk * q, d)
    new = torch.arange(q, device=query.device).repeat(h // hk)[:, None]  # row of query head g, new token i: g q + i
    mask = (torch.arange(s, device=query.device) <= s - q + new).expand(b, 1, -1, -1).contiguous()  # a captured pass masks one row too
    return lambda _, k, v: torch.nn.functional.scaled_dot_product_attention(packed, k, v, attn_mask=mask)


def _sdpa_with(name: str) -> Callable[[Any, Any, Any], Call]:
    def build(query: Any, key: Any, value: Any) -> Call:
        attention = import_module("torch.nn.attention")
        plain, backend = _sdpa(query, key, value), getattr(attention.SDPBackend, name)

        def call(q: Any, k: Any, v: Any) -> Any:
            with attention.sdpa_kernel(backend):
                return plain(q, k, v)

        return call

    return build


def _flex(query: Any, key: Any, value: Any) -> Call:
    """FlexAttention's decode kernel, compiled; it packs G(1 + D) rows into the next power of two."""
    torch, flex = import_module("torch"), import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    grouped = query.shape[1] != key.shape[1]
    return lambda q, k, v: compiled(q, k, v, enable_gqa=grouped)


def _triton(query: Any, key: Any, value: Any) -> Call:
    module = import_module("microbench.triton_attention")
    sms = import_module("torch").cuda.get_device_properties(0).multi_processor_count
    return lambda q, k, v: module.verify_attention(q, k, v, sm_count=sms)


def _flashinfer(query: Any, key: Any, value: Any) -> Call:
    """One sequence: the prefill kernel on packed rows, as engines run verification."""
    flashinfer = import_module("flashinfer")
    packed = query[0].transpose(0, 1).contiguous()
    return lambda q, k, v: flashinfer.single_prefill_with_kv_cache(packed, k[0], v[0], causal=True, kv_layout="HND", backend="fa2")


def _fa3(query: Any, key: Any, value: Any) -> Call:
    fa3 = import_module("flash_attn_interface")
    return lambda q, k, v: fa3.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)


_CALLS: dict[str, Callable[[Any, Any, Any], Call]] = {
    "sdpa": _sdpa, PACKED: _sdpa_packed, "sdpa-flash": _sdpa_with("FLASH_ATTENTION"), "sdpa-cudnn": _sdpa_with("CUDNN_ATTENTION"),
    "flex": _flex, "triton": _triton, "flashinfer": _flashinfer, "fa3": _fa3,
}  # fmt: skip


def supported(p: Point) -> bool:
    """Whether the backend takes the point's shape."""
    match p.text("backend"):
        case "flashinfer":
            return p.num("num_seqs") == 1
        case "flex":  # group a power of two, at most 128 rows (flex_decoding.py)
            group = p.num("num_heads") // p.num("num_kv_heads")
            return group & (group - 1) == 0 and rows(p) <= 128
        case _:
            return True
