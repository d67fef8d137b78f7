"""Time of attention over a KV cache: plain decode, verification of 1 + D tokens, and prefill chunks are one function.

The KV of a sequence is read once whatever the query length is; the R = G * query_len rows of a KV head pad to the tile of the attention
kernel, and rows beyond one tile re-read KV (mostly from L2). `context_len` counts the KV tokens of the sequence, the new ones included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_profiles.schema import AttentionKernel, GpuProfile
from planner.kernels.base import Array, KernelTime, Num, as_array, smooth_max


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Numbers of one (GPU, engine, KV dtype) stack. Rates are attainable ones."""

    bytes_per_s: float
    """KV stream at saturation."""
    flop_per_s: float
    """Decode and verify tiles."""
    prefill_flop_per_s: float
    """Long query chunks."""
    fixed_s: float
    """Smallest time of a call that is worth splitting."""
    floor_s: float = 0.0
    """Smallest time at all (tiny context)."""
    knee: float = 4.0
    half_bytes: float = 0.0
    """KV bytes of the call at which half of the bandwidth is reached."""
    half_heads: float = 0.0
    """num_seqs x kv_heads at which half of the parallelism is reached."""
    reread: float = 0.0
    """Share of a KV pass that each further row tile costs, when memory bound."""


@dataclass(frozen=True, slots=True)
class MlaFit:
    """Numbers of one stack for the absorbed latent attention (DeepSeek, Kimi)."""

    bytes_per_s: float
    flop_per_s: float
    fixed_s: float
    knee: float = 4.0
    half_bytes: float = 0.0
    floor_s: float = 0.0


def attention_from_gpu(gpu: GpuProfile, dtype: str) -> AttentionFit:
    """Prior without a fit. `dtype` is what the kernel multiplies in."""
    flop = gpu.peak(dtype) * gpu.matmul_eff.get(dtype, 0.7)
    return AttentionFit(gpu.bytes_per_s * gpu.bandwidth_eff, 0.6 * flop, 0.7 * flop, 3 * gpu.launch_s, gpu.launch_s, 4.0, 40e6)


def mla_from_gpu(gpu: GpuProfile, dtype: str) -> MlaFit:
    """Prior without a fit."""
    return MlaFit(gpu.bytes_per_s * gpu.bandwidth_eff, 0.6 * gpu.peak(dtype) * gpu.matmul_eff.get(dtype, 0.7), 3 * gpu.launch_s, 4.0, 40e6)


def padded_rows(query_len: Num, group: Num, head_dim: int, kernel: AttentionKernel | None) -> tuple[Array, Array]:
    """(rows computed per KV head, passes over its KV) for query_len tokens and `group` query heads per KV head.

    The one place where tiles are laid out (AttentionKernel says how; None = rows as they are, one pass).
    """
    query_len, group = as_array(query_len), as_array(group)
    rows = query_len * group
    if kernel is None:
        return rows, np.ones_like(rows)
    tiles = as_array(kernel.tiles_for(head_dim))
    last = tiles[-1]
    if kernel.per_token_rows:
        per_token = _tile_of(group, tiles) * np.ceil(group / last)
        return as_array(per_token * query_len), as_array(query_len * np.ceil(group / last))
    if not kernel.packs_gqa:
        # one head per tile when there is more than one token; a single token still packs its group
        single = query_len <= 1
        tile = np.where(single, _tile_of(group, tiles), _tile_of(query_len, tiles))
        count = np.where(single, np.ceil(group / last), group * np.ceil(query_len / last))
        return as_array(tile * count), as_array(count)
    if kernel.tokens_per_cta:
        tile = _tile_of(np.minimum(rows, np.maximum(last, group)), tiles)
        tile = np.maximum(tile, np.ceil(group / last) * last * (group > last))
        count = np.ceil(query_len / np.maximum(1.0, np.floor(tile / group)))
        return as_array(tile * count), as_array(count)
    count = np.ceil(rows / last)
    return as_array(_tile_of(rows, tiles) * count), as_array(count)


def _tile_of(rows: Array, tiles: Array) -> Array:
    """The smallest tile that holds `rows`, else the largest."""
    return as_array(tiles[np.minimum(np.searchsorted(tiles, rows), len(tiles) - 1)])


def attention_time(  # noqa: PLR0913
    num_seqs: Num, query_len: Num, context_len: Num, *, num_heads: Num, num_kv_heads: Num, head_dim: int, v_head_dim: int | None = None,
    kv_bytes_per_element: Num, fit: AttentionFit, kernel: AttentionKernel | None = None,
) -> KernelTime:  # fmt: skip
    """Seconds of one attention layer on one rank for num_seqs sequences of query_len new tokens each (heads of the rank)."""
    b, q, s = as_array(num_seqs), as_array(query_len), as_array(context_len)
    kv_heads = as_array(num_kv_heads)
    width = head_dim + (v_head_dim or head_dim)
    rows, passes = padded_rows(q, as_array(num_heads) / kv_heads, head_dim, kernel)
    keys = np.maximum(s - (q - 1.0) / 2.0, 1.0)
    kv_bytes = b * s * kv_heads * width * kv_bytes_per_element
    io_bytes = b * q * num_heads * width * 2.0
    saturation = 1.0 + fit.half_bytes / np.maximum(kv_bytes, 1.0)
    short = q * as_array(num_heads) / kv_heads <= 256.0
    memory = (kv_bytes * np.where(short, 1.0 + fit.reread * (passes - 1.0), 1.0) * 1.0 + io_bytes) / fit.bytes_per_s
    memory = memory + fit.half_bytes / fit.bytes_per_s * (1.0 - 1.0 / saturation)
    rate = np.where(short, fit.flop_per_s, fit.prefill_flop_per_s)
    compute = 2.0 * width * kv_heads * b * rows * keys / rate
    fixed = np.full(np.broadcast(memory, compute).shape, fit.fixed_s)
    body = smooth_max(as_array(memory + 0 * compute), as_array(compute + 0 * memory), fit.knee)
    return KernelTime(as_array(np.maximum(fixed + body, fit.floor_s)), as_array(memory), as_array(compute), fixed)


def mla_time(  # noqa: PLR0913
    num_seqs: Num, query_len: Num, context_len: Num, *, num_heads: Num, kv_rank: int, rope_dim: int, kv_bytes_per_element: Num,
    fit: MlaFit, kernel: AttentionKernel | None = None,
) -> KernelTime:  # fmt: skip
    """Seconds of absorbed latent attention: one latent of kv_rank + rope_dim per token serves all heads of the rank.

    2R(2r + d) FLOP per token for R = heads x query_len rows: past the ridge of Hopper at 128 heads and one query.
    """
    b, q, s = as_array(num_seqs), as_array(query_len), as_array(context_len)
    rows, passes = padded_rows(q, as_array(num_heads), kv_rank, kernel)
    keys = np.maximum(s - (q - 1.0) / 2.0, 1.0)
    latent = b * s * (kv_rank + rope_dim) * kv_bytes_per_element
    memory = (latent + fit.half_bytes * latent / (latent + fit.half_bytes + 1.0)) / fit.bytes_per_s
    compute = 2.0 * (2.0 * kv_rank + rope_dim) * rows * b * keys / fit.flop_per_s
    fixed = np.full(np.broadcast(memory, compute).shape, fit.fixed_s)
    body = smooth_max(as_array(memory + 0 * compute), as_array(compute + 0 * memory), fit.knee)
    return KernelTime(as_array(np.maximum(fixed + body, fit.floor_s)), as_array(memory), as_array(compute), fixed)
