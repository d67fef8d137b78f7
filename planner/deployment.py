"""A question made concrete: model, GPU, engine, layout, dtypes and drafter resolved once, with what was assumed and what looked odd.

`Deployment` is what the cost code works on; it holds no traffic. Building one costs milliseconds, so `deployment` caches by content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_profiles.load import file_stamp
from gpu_profiles.schema import EngineProfile, GpuProfile
from planner.cases import Case, EngineConfig, WeightsByClass
from planner.draft import LOOKUP, DraftPlan
from planner.drafters import DrafterSpec, drafter_from
from planner.errors import InfeasibleError, InputError
from planner.memory import cache_bytes, state_bytes, weight_bytes
from planner.models.read import model_stamps, read_model
from planner.models.spec import KvAttention, LatentAttention, ModelSpec
from planner.ops import Dtypes, Layout, Network, Num, distinct
from planner.passes import PassPlan
from planner.roofline import Machine, machine

QUANTISED = ("attn", "linear_attn", "mlp", "shared", "experts")
"""Classes a weights_dtype string replaces: embeddings, norms, router and LM head stay 16-bit."""

RESERVED_FRAC = 0.02
"""Of usable memory for activations, CUDA graphs and collectives beyond the engine's own headroom (assumed)."""


MIN_CACHE_FRAC = 0.02
LARGEST_MEMORY_FRAC = 0.97
"""Where the default memory fraction leaves almost no cache, people raise it: up to this share of usable memory."""


class Memory(NamedTuple):
    """Bytes on one rank."""

    weights: float
    draft_weights: float
    free: float
    """Left for KV cache and states."""


@dataclass(frozen=True)
class Deployment:
    """Everything but the traffic."""

    model: ModelSpec
    network: Network
    plan: PassPlan
    machine: Machine
    layout: Layout
    dtypes: Dtypes
    config: EngineConfig
    drafter: DrafterSpec | None = None
    draft: DraftPlan | None = None
    k0_tier: bool = False
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    _pads: dict[int, NDArray[np.float64]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpu(self) -> GpuProfile:
        return self.machine.gpu

    @property
    def engine(self) -> EngineProfile:
        return self.machine.engine

    @cached_property
    def overheads(self) -> Mapping[str, float]:
        """Seconds per step, layer, sequence, round, draft pass and verified token that kernel sums miss (engine profile)."""
        return self.machine.overheads

    @property
    def draft_plan(self) -> DraftPlan:
        assert self.draft is not None
        return self.draft

    @property
    def residual_layers(self) -> int:
        """Layers that pay the per-layer residual."""
        return self.network.num_layers

    @cached_property
    def chunk_tokens(self) -> float:
        """Prompt tokens per chunk of a chunked prefill."""
        limit = self.config.max_num_batched_tokens or self.engine.limits(self.gpu).max_num_batched_tokens
        return float(limit or 1 << 20)

    @cached_property
    def max_num_seqs(self) -> int:
        """Sequences the engine runs at once over the deployment, whatever memory allows."""
        limit = (self.config.max_num_seqs or self.engine.limits(self.gpu).max_num_seqs or 1 << 20) * self.layout.dp
        if self.drafter is not None and self.config.max_num_seqs is None and self.engine.max_running_with_speculation:
            limit = min(limit, self.engine.max_running_with_speculation)  # of the whole server: data-parallel groups share it
        return limit

    @cached_property
    def memory_notes(self) -> tuple[str, ...]:
        """Said when the engine's default memory fraction had to be raised for the weights to leave any cache."""
        limits, memory = self.engine.limits(self.gpu), self.memory
        usable = self.gpu.usable_memory_bytes * (1.0 - RESERVED_FRAC)
        default = usable * limits.memory_frac - memory.weights - memory.draft_weights
        if self.config.memory_frac is not None or self.engine.memory_frac_of == "free" or memory.free <= default:
            return ()
        need = (memory.weights + memory.draft_weights + memory.free) / usable
        return (f"the default memory fraction {limits.memory_frac:.2f} leaves no room for a cache: raise it to {need:.2f} as assumed here",)

    @property
    def extra_gpus(self) -> int:
        """GPUs of a drafter on its own device."""
        if self.drafter is None or self.drafter.gpu is None or self.draft is None or self.draft.body is None:
            return 0
        return max(self.drafter.n_gpus or 1, self.draft.body.layout.tp)

    # ---- CUDA graphs
    def _captured(self, query_len: int) -> NDArray[np.float64]:
        if query_len not in self._pads:
            sizes: tuple[int, ...] = ()
            if not self.config.eager:
                sizes = self.engine.captured_tokens(query_len - 1, self.gpu, max_num_seqs=self.config.max_num_seqs)
                if (top := self.config.cuda_graph_max_tokens) is not None:
                    sizes = tuple(s for s in sizes if s <= top) or (top,)
            self._pads[query_len] = np.asarray(sizes, dtype=np.float64)
        return self._pads[query_len]

    def padded_rows(self, num_seqs: Num, query_len: Num) -> NDArray[np.float64]:
        """Rows of a pass once padded to a captured CUDA-graph size."""
        q = np.asarray(query_len, dtype=np.float64)
        rows = np.asarray(num_seqs, dtype=np.float64) * q
        for width in distinct(q):
            sizes = self._captured(int(width))
            if not len(sizes):
                continue
            index = np.searchsorted(sizes, rows)
            padded = np.where(index >= len(sizes), rows, sizes[np.minimum(index, len(sizes) - 1)])
            rows = np.where(q == width, padded, rows)
        return np.asarray(rows, dtype=np.float64)

    def runs_eager(self, num_seqs: Num, query_len: Num) -> NDArray[np.bool_]:
        """True where the pass is wider than the largest captured graph (or the engine runs eagerly)."""
        q = np.asarray(query_len, dtype=np.float64)
        largest = np.full(q.shape, -1.0 if self.config.eager else np.inf)
        for width in distinct(q):
            sizes = self._captured(int(width))
            if len(sizes):
                largest = np.where(q == width, sizes[-1], largest)
        return np.asarray(np.asarray(num_seqs, dtype=np.float64) * q > largest, dtype=np.bool_)

    # ---- memory
    @cached_property
    def memory(self) -> Memory:
        """Bytes of one rank. Raises InfeasibleError when weights alone do not fit."""
        model, gpu = self.model, self.gpu
        weights = weight_bytes(self.network, self.layout, self.dtypes, embed_params=model.embed_params, tied=model.tie_embeddings)
        draft = 0.0
        if self.draft is not None and self.draft.body is not None and not self.extra_gpus:
            draft = self.draft.weight_bytes
        self.check_draft_device()
        limits = self.engine.limits(gpu)
        frac = self.config.memory_frac or limits.memory_frac
        usable = gpu.usable_memory_bytes * (1.0 - RESERVED_FRAC)
        of_free = self.engine.memory_frac_of == "free" and self.config.memory_frac is None
        free = (usable - weights - draft) * frac if of_free else usable * frac - weights - draft
        if free <= MIN_CACHE_FRAC * usable and self.config.memory_frac is None:
            free = max(free, usable * LARGEST_MEMORY_FRAC - weights - draft)  # what people do then: raise the engine's memory setting
        if free <= 0:
            raise InfeasibleError(
                f"{model.id}: weights need {(weights + draft) / 1e9:.1f} GB per GPU and {gpu.id} offers {usable * frac / 1e9:.1f} GB"
                f" (usable memory x {frac:g}) at tp {self.layout.tp}, pp {self.layout.pp}, ep {self.layout.ep}."
                " Use more GPUs, a larger tp or ep, or a smaller weights_dtype."
            )
        return Memory(weights, draft, free)

    def check_draft_device(self) -> None:
        """A drafter on its own GPUs must fit them. Raises InfeasibleError."""
        if self.draft is None or self.draft.body is None or self.extra_gpus == 0:
            return
        have = self.draft.machine.gpu.usable_memory_bytes * LARGEST_MEMORY_FRAC
        if self.draft.weight_bytes > have:
            raise InfeasibleError(
                f"the drafter needs {self.draft.weight_bytes / 1e9:.1f} GB per GPU and {self.draft.machine.gpu.id} has {have / 1e9:.1f} GB usable."
                " Give it more GPUs (drafter.n_gpus, drafter.tp), a smaller weights_dtype, or the target's own GPUs."
            )

    def bytes_per_seq(self, context_len: Num, draft_len: Num) -> NDArray[np.float64]:
        """Cache and state of one sequence on one rank: KV of target and drafter with D look-ahead slots, 1 + D states for rollback."""
        d = np.asarray(draft_len, dtype=np.float64)
        stored = np.asarray(context_len, dtype=np.float64) + d
        tp, pp = self.layout.tp, self.layout.pp
        kv = cache_bytes(self.network, tp, self.dtypes.kv, context_len=stored) / pp
        state = state_bytes(self.network, tp, self.dtypes.state) * (1.0 + d) / pp
        draft: Num = 0.0
        if self.draft is not None and not self.extra_gpus:
            draft = np.where(d > 0, self.draft.cache_bytes(stored), 0.0)
        return np.asarray(kv + state + draft, dtype=np.float64)

    def capacity_seqs(self, context_len: Num, draft_len: Num) -> NDArray[np.float64]:
        """Sequences of mean length context_len that fit the deployment's memory at once."""
        per_seq = np.maximum(self.bytes_per_seq(context_len, draft_len), 1.0)
        return np.floor(self.memory.free / per_seq) * self.layout.dp


# ---------------------------------------------------------------- resolving a case
def layout_of(case: Case) -> tuple[Layout, tuple[str, ...]]:
    """tp, pp, dp, ep of a case; what is missing is derived. Raises InputError when they contradict n_gpus."""
    notes: list[str] = []
    pp, tp, dp, n = case.pp, case.tp, case.dp, case.n_gpus
    if tp is None:
        tp = max(1, (n or pp * (dp or 1)) // (pp * (dp or 1)))
    if dp is None:
        dp = 1 if n is None else max(1, n // (tp * pp))
        if dp > 1:
            notes.append(f"dp {dp} follows from n_gpus {n} / (tp {tp} x pp {pp})")
    if n is not None and n != tp * dp * pp:
        raise InputError(
            "n_gpus must equal tp x dp x pp", where="layout", got=f"{n} != {tp} x {dp} x {pp}", hint="Correct one of n_gpus, tp, dp, pp."
        )
    if (tp * dp) % case.ep:
        raise InputError("ep must divide tp x dp", where="layout", got=case.ep, expected=f"a divisor of {tp * dp}")
    return Layout(tp, pp, dp, case.ep), tuple(notes)


def check_layout(model: ModelSpec, layout: Layout) -> None:
    """Tensor parallelism must divide the query heads, ep the experts, pp at most the layers."""
    for core, _ in model.attention_cores():
        if isinstance(core, KvAttention | LatentAttention) and core.num_heads % layout.tp:
            raise InputError(
                "tp must divide the attention heads",
                where=model.id,
                got=f"tp {layout.tp}",
                expected=f"a divisor of {core.num_heads} heads",
                hint="Choose another tp, or use dp for the rest of the GPUs.",
            )
    for layer, _ in model.groups:
        if layer.experts and layer.experts.num_experts % layout.ep:
            raise InputError(
                "ep must divide the experts", where=model.id, got=f"ep {layout.ep}", expected=f"a divisor of {layer.experts.num_experts}"
            )
    if layout.ep > 1 and not model.is_moe:
        raise InputError("ep needs experts", where=model.id, got=f"ep {layout.ep}", expected="1 for a dense model")
    if layout.pp > model.num_layers:
        raise InputError("pp exceeds the layers", where=model.id, got=layout.pp, expected=f"at most {model.num_layers}")


#: Storage that is not quantised.
WIDE = ("bf16", "fp16", "fp32")


def dtypes_of(model: ModelSpec, case: Case, gpu: GpuProfile, engine: EngineProfile) -> tuple[Dtypes, tuple[str, ...]]:
    """Storage per tensor class and the arithmetic of each, with what was assumed."""
    notes: list[str] = []
    weights: dict[str, str] = {c: model.quant.weights_dtype(c, model.base_dtype) for c in (*QUANTISED, "lm_head", "router")}  # type: ignore[arg-type]
    matrices = {} if isinstance(case.weights_dtype, str) else dict(model.quant.matrices)
    kv = model.quant.kv_dtype or "bf16"
    block = model.quant.block_scaled
    if isinstance(case.weights_dtype, str):
        weights.update(dict.fromkeys(QUANTISED, case.weights_dtype))
        weights.update(lm_head=model.base_dtype, router=model.base_dtype)
        kv, block = "bf16", case.weights_dtype == "fp8" and (block or model.is_moe)  # FP8 checkpoints of MoE models are block-scaled
    elif isinstance(case.weights_dtype, WeightsByClass):
        named = case.weights_dtype.model_dump(exclude_none=True)
        weights.update(named)
        weights["shared"] = named.get("mlp", weights["shared"])
    head = engine.lm_head_dtype
    named_head = isinstance(case.weights_dtype, WeightsByClass) and case.weights_dtype.lm_head is not None
    if head is not None and not named_head and weights["lm_head"] in WIDE and any(weights[c] not in WIDE for c in QUANTISED):
        weights["lm_head"] = head
        notes.append(f"LM head in {head}: {engine.name} stores it so beside quantised weights")
    kv = case.kv_dtype or kv
    wide = widest(gpu)
    if wide != "bf16":
        weights = {c: wide if d == "bf16" else d for c, d in weights.items()}
        notes.append(f"what is 16-bit in the checkpoint is {wide} on {gpu.id}, which has no bf16")
        if wide == "fp32" and kv == "bf16":  # an engine that computes in 32 bit alone caches in it too
            kv = wide
    act: dict[str, str] = {}
    for storage in sorted({*weights.values(), *matrices.values(), wide}):
        act[storage] = case.act_dtype or stated_act(model, case, storage, gpu) or engine.act_dtype(storage, gpu)[0]
        gpu.peak(act[storage])
        if act[storage] != storage and bytes_differ(storage, act[storage]):
            notes.append(f"{storage} weights compute in {act[storage]} on {gpu.id}")
    if case.kv_dtype is None and model.quant.kv_dtype is None:
        notes.append(f"KV cache in {'32' if kv == 'fp32' else '16'} bit (the checkpoint does not say)")
    attn = case.attn_dtype or ("fp8" if kv == "fp8" and "fp8" in gpu.peak_flop_per_s else wide)
    return Dtypes(weights=weights, matrices=matrices, act=act, kv=kv, attn=attn, state=case.state_dtype, block_scaled=block), tuple(notes)


def widest(gpu: GpuProfile) -> str:
    """The dtype that stands for 16 bit on this GPU: bf16, fp16 on Volta, fp8 on machines that have nothing wider."""
    return next(d for d in ("bf16", "fp16", "fp8", *sorted(gpu.peak_flop_per_s)) if d in gpu.peak_flop_per_s)


def stated_act(model: ModelSpec, case: Case, storage: str, gpu: GpuProfile) -> str | None:
    """The activation dtype that the checkpoint's scheme states for its quantised weights (W4A16), where this GPU has it."""
    stated = model.quant.act_dtype
    if stated is None or isinstance(case.weights_dtype, str) or storage in ("bf16", "fp16", "fp32"):
        return None
    return stated if stated in gpu.peak_flop_per_s else None


def bytes_differ(storage: str, act: str) -> bool:
    """bf16 and fp16 are the same size: no conversion worth a note."""
    return {storage, act} != {"bf16", "fp16"}


_TRAFFIC = frozenset(
    {"id", "concurrency", "request_rate_per_s", "input_len", "output_len", "cached_input_len", "context_len", "draft_len", "acceptance", "baseline"}
)


#: Key of the stamps of files in a deployment_key.
_FILES = "_files"


def deployment_key(raw: Mapping[str, Any]) -> str:
    """Cases with the same key share a deployment; a file that was written anew between them makes another key."""
    plain = not raw.get("draft_len") and not raw.get("k0_tier")
    baseline = raw.get("baseline") or ()
    anchored_on_drafts = any(isinstance(b, Mapping) and b.get("draft_len") for b in baseline) if isinstance(baseline, Sequence) else False
    # D = 0 has no speculative configuration, whatever drafter is named; but a run with drafts that it is anchored on had that drafter
    ignored = _TRAFFIC | {"drafter"} if plain and not anchored_on_drafts else _TRAFFIC
    kept = {k: v for k, v in raw.items() if k not in ignored and v is not None}
    drafter = kept.get("drafter")
    own = drafter if isinstance(drafter, Mapping) else {}
    stamps: list[object] = [s for gpu in (kept.get("gpu"), own.get("gpu")) if isinstance(gpu, str) and (s := file_stamp(gpu)) is not None]
    stamps += [m for model in (kept.get("model"), own.get("model")) if isinstance(model, str) and (m := model_stamps(model)) is not None]
    return json.dumps(kept | ({_FILES: stamps} if stamps else {}), sort_keys=True, default=str)


def resolve(case: Case, *, strict: bool = False) -> Deployment:
    """The deployment of a case. strict: a drafter the checkpoint cannot have is an error, not a warning. Raises DraftlineError."""
    model = read_model(case.model)
    where = machine(case.gpu, case.engine, case.attention_backend)
    where.attention_kernel("gqa")
    layout, notes = layout_of(case)
    check_layout(model, layout)
    dtypes, more = dtypes_of(model, case, where.gpu, where.engine)
    network = Network.of(model)
    warnings: list[str] = []
    drafter = draft = None
    if case.drafter is not None:
        drafter = drafter_from(case.drafter, model, strict=strict)
        draft, more_notes = place_drafter(drafter, model, layout, dtypes, where)
        notes += more_notes
        warnings += drafter.warnings
        if where.engine.drafters.get(drafter.kind, "") is None:
            warnings.append(f"{where.engine.name} has no {drafter.kind} drafting: priced as if it had")
    unused = [k for k in ("attn_dtype", "moe_backend") if getattr(case, k) is not None]
    unused += [f"engine_config.{k}" for k in ("version", "async_scheduling") if getattr(case.engine_config, k) is not None]
    if unused:
        warnings.append(f"{', '.join(unused)}: accepted, but the cost model has no number that depends on it")
    reach = where.gpu.max_link_gpus
    if layout.tp > reach:
        warnings.append(f"tp {layout.tp} exceeds the {reach} GPUs that {where.gpu.link_kind} joins: the network between nodes is a guess")
    return Deployment(
        model=model,
        network=network,
        plan=PassPlan(network, layout, dtypes),
        machine=where,
        layout=layout,
        dtypes=dtypes,
        config=case.engine_config,
        drafter=drafter,
        draft=draft,
        k0_tier=case.k0_tier,
        assumptions=(*model.notes, *notes, *more),
        warnings=tuple(warnings),
    )


@lru_cache(maxsize=512)
def cached_resolve(key: str, strict: bool = False) -> Deployment:
    """`resolve` of a deployment_key."""
    raw = json.loads(key)
    raw.pop(_FILES, None)
    return resolve(Case.model_validate({**raw, "concurrency": 1, "context_len": 1}), strict=strict)


def place_drafter(drafter: DrafterSpec, model: ModelSpec, layout: Layout, dtypes: Dtypes, where: Machine) -> tuple[DraftPlan, tuple[str, ...]]:
    """A drafter on its device: the target's own ranks unless it names a GPU."""
    if drafter.kind in LOOKUP or not drafter.layers:
        return DraftPlan(drafter.kind, None, where), tuple(drafter.assumptions)
    own = where if drafter.gpu is None else machine(drafter.gpu, where.engine.id)
    tp = drafter.tp or (layout.tp if drafter.gpu is None else drafter.n_gpus or 1)
    counts: dict[Any, int] = {}
    for layer in drafter.layers:
        counts[layer] = counts.get(layer, 0) + 1
    hidden = drafter.hidden_size or model.hidden_size
    network = Network(tuple(counts.items()), hidden, drafter.head_vocab, drafter.matrices)
    moe = any(layer.experts for layer in drafter.layers)
    spread = Layout(tp, 1, layout.dp, layout.ep) if moe and drafter.gpu is None and tp == layout.tp else Layout(tp)
    base = widest(own.gpu)
    stored = drafter.weights_dtype or base
    head = base
    if drafter.kind in SHARES_HEAD and not drafter.embed_params and drafter.head_vocab == model.vocab_size:
        head = dtypes.weights.get("lm_head", base)
    weights = dict.fromkeys(QUANTISED, stored) | {"lm_head": head, "router": base}
    act = {d: own.engine.act_dtype(d, own.gpu)[0] for d in {stored, base, head}}
    types = Dtypes(weights=weights, act=act, kv=drafter.kv_dtype or dtypes.kv, attn=base)
    notes = (*drafter.assumptions, f"drafter weights in {stored}, tp {tp}")
    if drafter.gpu is not None and (drafter.n_gpus or tp) < tp:
        raise InputError("drafter.tp exceeds drafter.n_gpus", where="drafter", got=f"tp {tp} on {drafter.n_gpus} GPU(s)", expected="n_gpus >= tp")
    plan = DraftPlan(
        drafter.kind,
        PassPlan(network, spread, types, expert_overlap=0.0),
        own,
        drafter.parallel,
        drafter.extend_matrices,
        markov_rank=drafter.markov_rank,
        link_s=0.0 if drafter.gpu is None else LINK_ROUND_TRIP_S,
        embed_params=drafter.embed_params,
        head_params=drafter.head_params,
    )
    return plan, notes


SHARES_HEAD = ("mtp", "dflash", "dspark")
"""Drafters that read the target's own LM head, in its dtype (unless they bring a table or a smaller vocabulary)."""

LINK_ROUND_TRIP_S = 20e-6
"""Draft tokens there and back between devices: two 10 us peer messages (the p2p latency aiconfigurator assumes; DESIGN section 3)."""
