"""What a profile holds: hardware numbers with their source, attention-kernel descriptors, engine facts.

SI base units (bytes, bytes/s, FLOP/s, seconds); peaks are dense, one multiply-add = 2 FLOP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from planner.errors import ProfileError

Origin = Literal["datasheet", "measured", "fitted", "assumed", "announced"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a number comes from."""

    origin: Origin
    reference: str
    date: str


@dataclass(frozen=True)
class GpuProfile:
    """One accelerator (one package; a rack or a node is several)."""

    id: str
    name: str
    arch: str
    """ampere | ada | hopper | blackwell | blackwell-ultra | blackwell-consumer | volta | cdna3 | cdna4 | rubin | lpu | cpu"""
    memory_bytes: float
    """Marketing capacity."""
    usable_memory_bytes: float
    """What an engine can allocate (nvidia-smi total, ECC and reservations taken off)."""
    bytes_per_s: float
    """Peak memory bandwidth."""
    peak_flop_per_s: Mapping[str, float]
    """Dense matmul peaks by activation dtype: bf16, fp16, fp8, int8, nvfp4, mxfp4, tf32, fp32 (absent = not supported)."""
    bandwidth_eff: float
    """Attainable share of bytes_per_s."""
    matmul_eff: Mapping[str, float]
    """Attainable share of each peak (max achievable matmul figures)."""
    launch_s: float
    """Fixed time of one kernel inside a CUDA graph."""
    link_bytes_per_s: float
    """GPU to GPU, one direction."""
    link_kind: str
    max_link_gpus: int
    """GPUs reachable over that link (8 in an HGX node, 72 in NVL72, 2 for a bridge)."""
    aliases: tuple[str, ...] = ()
    compute_capability: str | None = None
    sm_count: int | None = None
    l2_bytes: float | None = None
    tdp_w: float | None = None
    usd_per_hour: float | None = None
    sources: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    """One per field above; `sources[field]`."""
    notes: tuple[str, ...] = ()
    calibration: Mapping[str, object] | None = None
    """A `draftline calibrate` result, when the profile is measured: fitted kernel parameters by stack (see fitted/)."""

    def peak(self, dtype: str) -> float:
        """Dense peak of `dtype` in FLOP/s. A missing peak is an error, never a guess."""
        try:
            return self.peak_flop_per_s[dtype]
        except KeyError:
            raise ProfileError(
                f"no dense {dtype} matmul peak", where=f"GPU {self.id}", expected=f"one of {sorted(self.peak_flop_per_s)}",
                hint="Choose act_dtype among them, or a GPU that has it.",
            ) from None  # fmt: skip

    def ridge_flop_per_byte(self, dtype: str) -> float:
        """Dense peak over peak bandwidth: where a matmul of `dtype` stops being memory bound."""
        return self.peak(dtype) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """How one attention backend lays out the R = G(1+D) query rows of a KV head."""

    id: str
    packs_gqa: bool
    """Rows of a KV head's query group share one tile when 1+D > 1."""
    row_tiles: tuple[int, ...]
    """Tile sizes in rows, ascending; above the last, multiples of it."""
    tokens_per_cta: bool = False
    """A tile holds whole tokens: floor(tile/G) of them."""
    split_kv_multi_query: bool = True
    """The context is still split over CTAs when 1+D > 1."""
    per_token_rows: bool = False
    """One CTA row per token: cost linear in 1+D."""
    head_dim_tiles: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Other tiles for a head dim: ((64, (192,)), (96, (192,)))."""
    tile_cost: tuple[tuple[int, float], ...] = ()
    """Relative cost of a KV pass by tile size, smallest tile = 1 (vendor heuristic or fitted)."""
    source: str = ""
    note: str = ""

    def tiles_for(self, head_dim: int) -> tuple[int, ...]:
        return dict(self.head_dim_tiles).get(head_dim, self.row_tiles)
