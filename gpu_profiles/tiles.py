"""How many rows an attention kernel really computes: GQA packing and tile padding, per KV head and sequence.

A KV head of a rank has R = G(1+D) query rows (G = query heads per KV head on the rank; for MLA, G = heads of the rank and
there is one KV head). A kernel lays them out in tiles of a fixed number of rows; each tile streams the KV cache once (mostly
from L2 when tiles run side by side) and computes all its rows, filled or not. All functions broadcast over numpy arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpu_profiles.schema import AttentionKernel

Ints = NDArray[np.int64]


def _ceil_div(a: Ints, b: Ints) -> Ints:
    return -(-a // b)


def _layout(kernel: AttentionKernel, gqa_group: ArrayLike, query_len: ArrayLike, head_dim: int) -> tuple[Ints, Ints]:
    """(tile rows, number of tiles) for every element of the broadcast inputs."""
    group, query = np.broadcast_arrays(np.ceil(gqa_group).astype(np.int64), np.ceil(query_len).astype(np.int64))
    tile, count = _layout_for(kernel, group, query, kernel.tiles_for(head_dim))
    if kernel.row_tiles_single:
        tile_1, count_1 = _layout_for(kernel, group, query, kernel.row_tiles_single)
        single = query == 1
        tile, count = np.where(single, tile_1, tile), np.where(single, count_1, count)
    return tile, count


def _layout_for(kernel: AttentionKernel, group: Ints, query: Ints, row_tiles: tuple[int, ...]) -> tuple[Ints, Ints]:
    tiles = np.asarray(row_tiles, dtype=np.int64)
    apart = np.zeros(group.shape, dtype=bool) if kernel.packs_gqa else query > 1  # each query head has tiles of its own
    one_token = np.full(group.shape, kernel.per_token_rows)
    rows = np.where(apart, query, np.where(one_token, group, group * query))
    times = np.where(apart, group, np.where(one_token, query, 1))
    index = np.minimum(np.searchsorted(tiles, rows, side="left"), len(tiles) - 1)
    tile = tiles[index]
    if kernel.tile_grows_with_group:
        power = (2 ** np.ceil(np.log2(np.maximum(group, 1)))).astype(np.int64)
        tile = np.where(group > tiles[-1], power, tile)
    count = _ceil_div(rows, tile)
    if kernel.tokens_per_cta:  # whole tokens only: floor(tile / G) of them; a group wider than the tile is cut
        tokens = tile // np.maximum(group, 1)
        whole = _ceil_div(query, np.maximum(tokens, 1))
        count = np.where((rows > tile) & ~apart, np.where(tokens > 0, whole, query * _ceil_div(group, tile)), count)
    return tile, count * times


def row_tile(kernel: AttentionKernel, gqa_group: ArrayLike, query_len: ArrayLike, head_dim: int = 128) -> Ints:
    """Rows of the tile that the kernel picks."""
    return _layout(kernel, gqa_group, query_len, head_dim)[0]


def num_row_tiles(kernel: AttentionKernel, gqa_group: ArrayLike, query_len: ArrayLike, head_dim: int = 128) -> Ints:
    """Tiles per KV head and sequence: how often the KV cache is streamed to a CTA (from memory or from L2)."""
    return _layout(kernel, gqa_group, query_len, head_dim)[1]


def padded_rows(kernel: AttentionKernel, gqa_group: ArrayLike, query_len: ArrayLike, head_dim: int = 128) -> Ints:
    """Rows computed per KV head and sequence, padding included (at least G x query_len)."""
    tile, count = _layout(kernel, gqa_group, query_len, head_dim)
    return np.asarray(tile * count, dtype=np.int64)


def relative_tile_cost(kernel: AttentionKernel, gqa_group: ArrayLike, query_len: ArrayLike, head_dim: int = 128) -> NDArray[np.float64]:
    """Cost of one KV pass with the tile picked, smallest tile = 1 (1 everywhere where the kernel has no cost table)."""
    tile = row_tile(kernel, gqa_group, query_len, head_dim)
    if not kernel.tile_cost:
        return np.ones(tile.shape)
    sizes, costs = zip(*kernel.tile_cost, strict=True)
    return np.asarray(np.interp(tile, sizes, costs), dtype=np.float64)


def max_draft_len_in_tile(tile: ArrayLike, gqa_group: ArrayLike) -> Ints:
    """The source's rule: the largest D whose G(1+D) rows fill one tile, floor(tile/G) - 1 (0 where G alone exceeds it)."""
    return np.maximum(np.asarray(tile, dtype=np.int64) // np.asarray(gqa_group, dtype=np.int64) - 1, 0)
