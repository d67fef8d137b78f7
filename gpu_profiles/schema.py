"""What a profile holds: hardware numbers with their source, attention-kernel descriptors, engine facts.

SI base units (bytes, bytes/s, FLOP/s, seconds); peaks are dense, one multiply-add = 2 FLOP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from planner.errors import ProfileError

Origin = Literal["datasheet", "measured", "fitted", "assumed", "announced"]

#: Storage dtypes that need no unpacking.
WIDE_DTYPES = frozenset({"bf16", "fp16", "fp32"})

#: What an engine adds to kernel sums. Keys ending in _s are seconds, by what they scale with; the last is a ratio.
OVERHEAD_KEYS = (
    "per_step_s",  # every forward step, speculation or not
    "per_layer_s",  # target layer and step: launch gaps and small kernels
    "per_seq_s",  # running sequence of the rank and step: scheduling, sampling, detokenising
    "per_draft_pass_s",  # draft pass
    "per_round_s",  # speculation round, on top of per_step_s
    "per_verified_token_s",  # further verified token on the rank
    "eager_per_layer_s",  # host time of a layer that runs outside a CUDA graph
    "lookup_base_s",  # n-gram or suffix look-up per round
    "lookup_per_seq_s",  # ... and per sequence
    "draft_base_s",  # drafting by a network per round, beside its passes: catching up with what was accepted
    "draft_per_seq_s",  # ... and per sequence and draft pass
    "kernel_scale",  # served kernel time over an isolated kernel's, its fixed part aside
)


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

    def summary(self) -> dict[str, object]:
        """The headline numbers as plain values, SI base units."""
        return {
            "id": self.id, "name": self.name, "arch": self.arch, "aliases": list(self.aliases), "usable_memory_bytes": self.usable_memory_bytes,
            "bytes_per_s": self.bytes_per_s, "peak_flop_per_s": dict(self.peak_flop_per_s), "link_bytes_per_s": self.link_bytes_per_s,
            "link_kind": self.link_kind, "max_link_gpus": self.max_link_gpus,
        }  # fmt: skip

    def detail(self) -> dict[str, object]:
        """Everything, each number with its source."""
        more = {
            "compute_capability": self.compute_capability, "sm_count": self.sm_count, "l2_bytes": self.l2_bytes, "memory_bytes": self.memory_bytes,
            "bandwidth_eff": self.bandwidth_eff, "matmul_eff": dict(self.matmul_eff), "launch_s": self.launch_s, "tdp_w": self.tdp_w,
            "usd_per_hour": self.usd_per_hour, "notes": list(self.notes),
        }  # fmt: skip
        sources = {k: {"origin": s.origin, "ref": s.reference, "date": s.date} for k, s in self.sources.items()}
        return self.summary() | more | {"sources": sources}

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
    unsplit_token_s: float = 0.0
    """Seconds a CTA takes per KV token when it walks the whole context alone (1+D > 1 without a split)."""
    """The context is still split over CTAs when 1+D > 1."""
    per_token_rows: bool = False
    """One CTA row per token: cost linear in 1+D."""
    head_dim_tiles: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Other tiles for a head dim: ((64, (192,)), (96, (192,)))."""
    tile_cost: tuple[tuple[int, float], ...] = ()
    """Relative cost of a KV pass by tile size, smallest tile = 1 (vendor heuristic or fitted)."""
    source: str = ""
    note: str = ""
    row_tiles_single: tuple[int, ...] = ()
    """Other tiles when 1+D = 1 (plain decoding takes another code path)."""
    tile_grows_with_group: bool = False
    """A group wider than the last tile takes a tile of the next power of two, one token each."""
    max_rows: int | None = None
    """Rows above which the kernel has no valid configuration."""
    origin: Origin = "assumed"
    date: str = ""

    def tiles_for(self, head_dim: int) -> tuple[int, ...]:
        return dict(self.head_dim_tiles).get(head_dim, self.row_tiles)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine allows by default on one GPU type."""

    max_num_seqs: int | None
    """Sequences running at once; None = no limit."""
    max_num_batched_tokens: int | None
    """Token budget of one step (the chunk of a chunked prefill); None = no limit."""
    cuda_graph_max: int
    """Largest captured size, in the engine's own unit (see EngineProfile.cuda_graph_unit); 0 = nothing is captured."""
    memory_frac: float
    """Share of usable memory the engine takes for weights, KV cache and buffers."""


@dataclass(frozen=True, slots=True)
class EngineTier:
    """Defaults below one memory size: engines choose their limits by the GPU's memory."""

    below_bytes: float
    limits: EngineLimits
    reserve_bytes: float | None = None
    """If given, memory_frac = 1 - reserve_bytes / usable memory."""
    not_gpus: tuple[str, ...] = ()
    """GPU id prefixes that this tier passes over, though their memory fits."""


@dataclass(frozen=True)
class EngineProfile:
    """One serving engine: kernels it picks, limits it sets, time it adds. Methods answer for one GPU."""

    id: str
    name: str
    version: str
    """Release the facts were read from."""
    attention_backends: Mapping[str, Mapping[str, str]]
    """kind (gqa | mla | sparse) -> arch -> attention kernel id; arch `default` for the rest."""
    native_act: Mapping[str, str]
    """Storage dtype -> activation dtype where the GPU has a matmul peak for both; all else computes in 16 bit."""
    dequant_factor: Mapping[str, float]
    """arch (or `default`) -> share of the 16-bit rate that a weight-only GEMM keeps (unpacking costs issue slots)."""
    tiers: tuple[EngineTier, ...]
    """Ascending in below_bytes; the last has no bound."""
    cuda_graph_unit: Literal["tokens", "seqs"]
    """What a captured size counts: query tokens of the step, or sequences (then 1+D tokens each)."""
    cuda_graph_sizes: tuple[int, ...]
    """Sizes captured by default, ascending, before the limit; empty = every size runs as it is (no padding, no cliff)."""
    cuda_graph_sizes_spec: tuple[int, ...]
    """The same with speculation on (equal to cuda_graph_sizes for most)."""
    max_running_with_speculation: int | None
    """Running sequences with speculation on, unless the user says otherwise."""
    drafters: Mapping[str, str | None]
    """Drafter kind -> the engine's method name; None = not supported."""
    schedule: Mapping[str, object] | None
    """How draft length by batch size is configured; None = a fixed draft length only."""
    async_scheduling: bool
    """Host work of the next step runs beside the GPU's step by default."""
    memory_frac_of: Literal["total", "free"]
    """memory_frac applies to usable memory, or to what is free once the weights are loaded (then to the KV cache alone)."""
    overheads: Mapping[str, float]
    """What the engine adds to kernel sums: see OVERHEAD_KEYS."""
    overheads_by_arch: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))
    """Start of an arch's name (cdna: cdna3 and cdna4) -> numbers that replace `overheads` there."""
    lm_head_dtype: str | None = None
    """Storage of the LM head where the engine's checkpoint format quantises it along with the other weights; None = it stays 16-bit."""
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, Source] = field(default_factory=lambda: MappingProxyType({}))
    """`sources["overheads.per_round_s"]`, `sources["limits"]`, ..."""
    notes: tuple[str, ...] = ()

    def overheads_on(self, arch: str) -> Mapping[str, float]:
        """`overheads` as they apply on `arch`."""
        own = [table for start, table in self.overheads_by_arch.items() if arch.startswith(start)]
        return self.overheads if not own else dict(self.overheads) | dict(own[0])

    def attention_kernel_id(self, arch: str, kind: str = "gqa") -> str:
        """Attention kernel id this engine uses on `arch` for layers of `kind` (gqa, mla, sparse)."""
        if kind not in self.attention_backends:
            raise ProfileError(
                f"no attention kernel for {kind!r} layers", where=f"engine {self.id}", expected=f"one of {sorted(self.attention_backends)}"
            )  # fmt: skip
        table = self.attention_backends[kind]
        return table.get(arch, table["default"])

    def act_dtype(self, weights_dtype: str, gpu: GpuProfile) -> tuple[str, float]:
        """(activation dtype, dequantisation factor) of a GEMM whose weights are stored as `weights_dtype`.

        The factor multiplies the FLOP rate: 1 for a native GEMM, less where weights are unpacked to 16 bit first.
        """
        peaks = gpu.peak_flop_per_s
        act = self.native_act.get(weights_dtype)
        if act is not None and weights_dtype in peaks and act in peaks:
            return act, 1.0
        wide: tuple[str, ...] = {"fp16": ("fp16", "bf16", "fp32"), "fp32": ("fp32",)}.get(weights_dtype, ("bf16", "fp16", "fp32"))
        chosen = next((d for d in wide if d in peaks), None)
        if chosen is None:
            raise ProfileError(
                f"no matmul peak that {weights_dtype} weights could compute in", where=f"GPU {gpu.id}, engine {self.id}",
                got=sorted(peaks), expected=f"one of {list(wide)}", hint="Choose another weights dtype, or a GPU that has one of them.",
            )  # fmt: skip
        if weights_dtype in WIDE_DTYPES:
            return chosen, 1.0
        return chosen, self.dequant_factor.get(gpu.arch, self.dequant_factor["default"])

    def limits(self, gpu: GpuProfile) -> EngineLimits:
        """Default limits on `gpu` (one GPU's memory decides, whatever the tensor width)."""
        usable = gpu.usable_memory_bytes
        fits = (t for t in self.tiers if usable < t.below_bytes and not gpu.id.startswith(t.not_gpus))
        tier = next(fits, self.tiers[-1])
        if tier.reserve_bytes is None:
            return tier.limits
        return replace(tier.limits, memory_frac=max(0.05, 1.0 - tier.reserve_bytes / usable))

    def captured_tokens(self, draft_len: int, gpu: GpuProfile, *, max_num_seqs: int | None = None) -> tuple[int, ...]:
        """Query-token counts with a CUDA graph for a step of 1 + `draft_len` tokens per sequence, ascending.

        A step is padded up to the next of them; above the last it runs without a graph. Empty = neither applies.
        `max_num_seqs` is the deployment's own limit where it is set.
        """
        width = 1 + draft_len
        base = self.cuda_graph_sizes_spec if draft_len else self.cuda_graph_sizes
        limits = self.limits(gpu)
        seqs = max_num_seqs or (self.max_running_with_speculation if draft_len else None) or limits.max_num_seqs
        top = limits.cuda_graph_max
        if self.cuda_graph_unit == "seqs":
            top = min(top, seqs) if seqs else top
            kept = {s for s in base if s <= top}
            return tuple(sorted(s * width for s in (kept | {top} if base and top else kept)))
        if seqs:
            top = min(top, 2 * seqs * width)
        return tuple(sorted({s for s in (-(-b // width) * width for b in base) if s <= top}))
