"""Time of attention over a KV cache: plain decode, verification of 1 + D tokens, and prefill chunks are one function.

    t = fixed + split + | wave_s waves , | | hbm + ramp , cta |_q , compute |_p |_q        with |a, b|_p the p-norm

A CTA owns one row tile of one KV head of one sequence (units), cut along the context when fewer units than SMs run. `hbm` reads each
sequence's KV once whatever the query length is; `cta` is what one SM can stream, so units that do not fill the GPU, and row tiles
beyond the first (each streams the KV again, from L2), show there; rows padded to the tile cost `compute`. `context_len` counts
the KV tokens of the sequence, the new ones included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpu_profiles import tiles
from gpu_profiles.schema import AttentionKernel, GpuProfile
from planner.kernels.base import Array, KernelTime, Num, Params, as_array, kernel_time, smooth_max

#: Query tokens per sequence up to which an engine runs its decode kernel.
VERIFY_MAX_QUERY = 32.0
PREFILL_PRIOR = {"prefill_flop": 0.55, "prefill_fixed_s": 8e-6, "prefill_keys": 128.0, "prefill_fill": 0.7}


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Numbers of one (GPU, engine, KV dtype) stack; of latent attention (MLA) too. Rates are attainable ones."""

    bytes_per_s: float
    """KV stream from memory."""
    cta_bytes_per_s: float
    """KV stream of all SMs together when memory is no limit."""
    flop_per_s: float
    """Decode and verify tiles."""
    fixed_s: float
    wave_s: float = 2e-6
    """Start and end of a CTA, per wave of CTAs."""
    split_s: float = 1e-6
    """Combining a context that was cut."""
    split_tokens: float = 256.0
    """Context tokens a CTA keeps at least."""
    max_splits: float = 32.0
    ramp_s: float = 0.0
    """Extra time of memory-bound calls, reached half at `ramp_bytes` (bandwidth is 0.5 at 100 MB and 0.9 beyond 1 GB)."""
    ramp_bytes: float = 3e7
    stream_knee: float = 2.0
    knee: float = 3.0
    l2_bytes: float = 0.0
    """KV bytes that stay in L2 when a benchmark repeats a call (see `repeated`)."""
    l2_sharp: float = 4.0
    sm_count: float = 132.0
    prefill_flop_per_s: float = 4e14
    prefill_fixed_s: float = 8e-6
    prefill_keys: float = 128.0
    """Keys that each row computes beyond those it needs (half-masked tiles)."""
    prefill_fill: float = 0.7
    """How far idle SMs show when a chunk has few tiles."""
    single: AttentionFit | None = None
    """Numbers for one query row per KV head, where the engine runs another program there (FlashAttention 2, XQA)."""

    @classmethod
    def from_gpu(cls, gpu: GpuProfile, dtype: str) -> AttentionFit:
        """Prior without a fit. `dtype` is what the kernel multiplies in; the shares are typical of the fitted stacks."""
        p = {
            "fixed_s": 2.5 * gpu.launch_s, "wave_s": 2e-6, "cta_bandwidth": 3.0, "bandwidth": 1.08 * gpu.bandwidth_eff, "l2_share": 0.7,
            "l2_sharp": 6.0, "stream_knee": 2.0, "flop": 0.5, "knee": 2.5, "split_s": 8e-7, "split_tokens": 256.0, "max_splits": 20.0,
            "ramp_s": 5e-6, "ramp_bytes": 1.5e7,
        }  # fmt: skip
        return cls.from_params(p, gpu, dtype)

    @classmethod
    def from_params(cls, p: Params, gpu: GpuProfile, dtype: str, single: AttentionFit | None = None) -> AttentionFit:
        """Fitted shares on the peaks of `gpu`."""
        p, peak = {**PREFILL_PRIOR, **p}, gpu.peak(dtype)
        return cls(
            bytes_per_s=p["bandwidth"] * gpu.bytes_per_s, cta_bytes_per_s=p["cta_bandwidth"] * gpu.bytes_per_s,
            flop_per_s=p["flop"] * peak, fixed_s=p["fixed_s"], wave_s=p["wave_s"], split_s=p["split_s"], split_tokens=p["split_tokens"],
            max_splits=p["max_splits"], ramp_s=p["ramp_s"], ramp_bytes=p["ramp_bytes"], single=single,
            stream_knee=p["stream_knee"], knee=p["knee"], l2_bytes=p["l2_share"] * (gpu.l2_bytes or 5e7), l2_sharp=p["l2_sharp"],
            sm_count=float(gpu.sm_count or 132), prefill_flop_per_s=p["prefill_flop"] * peak, prefill_fixed_s=p["prefill_fixed_s"],
            prefill_keys=p["prefill_keys"], prefill_fill=p["prefill_fill"],
        )  # fmt: skip


class Work(NamedTuple):
    """What a decode-like kernel does, whatever the attention is called; a fit lays it out once and times it under many numbers."""

    units: Array
    """num_seqs x KV heads x row tiles."""
    context: Array
    token_bytes: Array
    """KV bytes of a token and KV head."""
    tile_flop: Array
    """FLOP of one row tile on one KV token."""
    read_bytes: Array
    """KV and activations from memory, each sequence once."""


def stream_time(w: Work, fit: AttentionFit, repeated: bool) -> KernelTime:
    """Seconds of decode or verification (see attention_time for `repeated`)."""
    splits = np.clip(fit.sm_count / w.units, 1.0, np.maximum(1.0, np.minimum(w.context / fit.split_tokens, fit.max_splits)))
    waves = np.maximum(w.units * splits / fit.sm_count, 1.0)
    per_sm = waves * w.context / splits * fit.sm_count
    cta = per_sm * w.token_bytes / fit.cta_bytes_per_s
    compute = per_sm * w.tile_flop / fit.flop_per_s  # masked corners of a tile are computed too
    cold = w.read_bytes
    if repeated and fit.l2_bytes > 0:
        cold = cold / (1.0 + (fit.l2_bytes / w.read_bytes) ** fit.l2_sharp)
    memory = cold / fit.bytes_per_s + fit.ramp_s * w.read_bytes / (w.read_bytes + fit.ramp_bytes)
    body = smooth_max(smooth_max(as_array(memory), as_array(cta), fit.stream_knee), as_array(compute), fit.knee)
    fixed = fit.fixed_s + fit.split_s * (1.0 - 1.0 / splits)
    return kernel_time(fixed + smooth_max(as_array(fit.wave_s * waves), body, fit.stream_knee), np.maximum(memory, cta), compute, fixed)


def padded_rows(query_len: Num, group: Num, head_dim: int, kernel: AttentionKernel | None) -> tuple[Array, Array]:
    """(rows computed per KV head, passes over its KV) for query_len tokens and `group` query heads per KV head.

    gpu_profiles.tiles lays out the tiles; without a kernel rows stay as they are, in passes of 128.
    """
    if kernel is None:
        rows = as_array(query_len) * as_array(group)
        return rows, np.ceil(rows / 128.0)
    args = (kernel, np.asarray(group), np.asarray(query_len), head_dim)
    return as_array(tiles.padded_rows(*args)), as_array(tiles.num_row_tiles(*args))


def decode_work(  # noqa: PLR0913
    num_seqs: Num, query_len: Num, context_len: Num, *, num_heads: Num, num_kv_heads: Num, head_dim: int, v_head_dim: int | None = None,
    kv_bytes_per_element: Num, kernel: AttentionKernel | None = None,
) -> Work:  # fmt: skip
    """Work of decode and verification; query tokens beyond VERIFY_MAX_QUERY lay out no more tiles."""
    b, q, s = as_array(num_seqs), as_array(query_len), as_array(context_len)
    kv_heads, heads = as_array(num_kv_heads), as_array(num_heads)
    width = float(head_dim + (v_head_dim or head_dim))
    token = width * as_array(kv_bytes_per_element)
    rows, passes = padded_rows(np.minimum(q, VERIFY_MAX_QUERY), heads / kv_heads, head_dim, kernel)
    return Work(
        units=b * kv_heads * passes, context=s, token_bytes=token, tile_flop=2.0 * width * rows / passes,
        read_bytes=b * (s * kv_heads * token + q * heads * (2.0 * width)),
    )  # fmt: skip


def attention_time(  # noqa: PLR0913
    num_seqs: Num, query_len: Num, context_len: Num, *, num_heads: Num, num_kv_heads: Num, head_dim: int, v_head_dim: int | None = None,
    kv_bytes_per_element: Num, fit: AttentionFit, kernel: AttentionKernel | None = None, repeated: bool = False,
) -> KernelTime:  # fmt: skip
    """Seconds of one attention layer on one rank for num_seqs sequences of query_len new tokens each (heads of the rank).

    repeated: as a benchmark measures it, the same KV again and again, so that what fits in L2 stays there; a served step is cold.
    """
    b, q, s = as_array(num_seqs), as_array(query_len), as_array(context_len)
    kv_heads, heads = as_array(num_kv_heads), as_array(num_heads)
    width = float(head_dim + (v_head_dim or head_dim))
    chunk = np.broadcast_to(q > VERIFY_MAX_QUERY, np.broadcast(b, q, s, kv_heads).shape)
    token = width * as_array(kv_bytes_per_element)
    read = b * (s * kv_heads * token + q * heads * (2.0 * width))
    if chunk.all():
        return _prefill(b, q, s, heads=heads, read=read, flop_per_pair=2.0 * width, fit=fit)
    work = decode_work(
        b, q, s, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
        kv_bytes_per_element=kv_bytes_per_element, kernel=kernel,
    )  # fmt: skip
    decode = stream_time(work, fit, repeated)
    one = np.broadcast_to(heads / kv_heads * q <= 1.0, decode.time_s.shape)
    if fit.single is not None and one.any():
        decode = kernel_time(*(np.where(one, x, y) for x, y in zip(stream_time(work, fit.single, repeated), decode, strict=True)))
    if not chunk.any():
        return decode
    long = _prefill(b, q, s, heads=heads, read=read, flop_per_pair=2.0 * width, fit=fit)
    return kernel_time(*(np.where(chunk, x, y) for x, y in zip(long, decode, strict=True)))


def _prefill(  # noqa: PLR0913
    b: Array, q: Array, s: Array, *, heads: Array, read: Array, flop_per_pair: float, fit: AttentionFit
) -> KernelTime:  # fmt: skip
    """A chunk of a prompt: compute bound once its tiles fill the GPU."""
    keys = np.maximum(s - (q - 1.0) / 2.0, 1.0) + fit.prefill_keys
    idle = np.maximum(fit.sm_count / (b * heads * np.ceil(q / 128.0)), 1.0)
    compute = flop_per_pair * heads * b * q * keys / fit.prefill_flop_per_s * idle**fit.prefill_fill
    memory = read / fit.bytes_per_s
    body = smooth_max(as_array(memory), as_array(compute), 2.0)
    return kernel_time(fit.prefill_fixed_s + body, memory, compute, fit.prefill_fixed_s)


def mla_work(  # noqa: PLR0913
    num_seqs: Num, query_len: Num, context_len: Num, *, num_heads: Num, kv_rank: int, rope_dim: int, kv_bytes_per_element: Num,
    kernel: AttentionKernel | None = None,
) -> Work:  # fmt: skip
    """Work of absorbed latent attention (see mla_time)."""
    b, q, s = as_array(num_seqs), as_array(query_len), as_array(context_len)
    rows, passes = padded_rows(q, num_heads, kv_rank + rope_dim, kernel)
    token = (kv_rank + rope_dim) * as_array(kv_bytes_per_element)
    width = 2.0 * kv_rank + rope_dim
    return Work(
        units=b * passes, context=s, token_bytes=token, tile_flop=2.0 * width * rows / passes,
        read_bytes=b * (s * token + q * as_array(num_heads) * (2.0 * width)),
    )  # fmt: skip


def mla_time(  # noqa: PLR0913
    num_seqs: Num, query_len: Num, context_len: Num, *, num_heads: Num, kv_rank: int, rope_dim: int, kv_bytes_per_element: Num,
    fit: AttentionFit, kernel: AttentionKernel | None = None, repeated: bool = False,
) -> KernelTime:  # fmt: skip
    """Seconds of absorbed latent attention: one latent of kv_rank + rope_dim per token serves all heads of the rank.

    2R(2r + d) FLOP per token for R = heads x query_len rows: past the ridge of Hopper at 128 heads and one query. Long prompt chunks
    expand the latent to per-head keys and values instead: use attention_time there.
    """
    work = mla_work(
        num_seqs, query_len, context_len, num_heads=num_heads, kv_rank=kv_rank, rope_dim=rope_dim,
        kv_bytes_per_element=kv_bytes_per_element, kernel=kernel,
    )  # fmt: skip
    return stream_time(work, fit, repeated)
