"""An operation on a machine -> seconds and what binds. Knows GPUs and no model.

A `Machine` is one GPU profile under one engine: it finds the fitted kernel numbers for each dtype (or the profile's prior) and the
attention kernel that the engine uses there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_profiles.fits import Fitted, kernel_fit
from gpu_profiles.load import load_attention_kernel
from gpu_profiles.schema import AttentionKernel, EngineProfile, GpuProfile
from planner.kernels import (
    GemmFit,
    KernelTime,
    allgather_time,
    allreduce_time,
    alltoall_time,
    attention_time,
    gemm_time,
    mla_time,
    moe_time,
    state_time,
)
from planner.kernels.attention import VERIFY_MAX_QUERY
from planner.ops import AllGather, AllReduce, AllToAll, ExpertsOp, Gemm, KvOp, LatentOp, Num, Op, StateOp, VectorOp, distinct_pairs
from planner.units import bytes_per_element

#: Order of the parts of a pass; the words users see under "bound".
PARTS = ("memory", "compute", "launch", "network")


SERVED_KNEE = 2.0
"""p of the smooth maximum of memory and compute time of a GEMM inside a step (served steps prefer 2 to 4)."""

GRID_SIZE = 4096
"""Arrays beyond this many points are grids with few distinct (sequences, query length)."""


INDEXER_LAUNCHES = 6
"""Kernels of a token-sparse indexer beside its projections (rotation, quantisation, scores, top-k and its merge): with and without the
indexer a decode module differs by 30 us at short contexts on B200 and H200 (aiconfigurator-core 0.12.0, dsa_generation_module tables)."""


class PassTime(NamedTuple):
    """Seconds of one pass and how they divide. The parts say what binds each operation; they add up to time_s."""

    time_s: NDArray[np.float64]
    memory_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    launch_s: NDArray[np.float64]
    network_s: NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """One GPU under one engine. Fits are looked up once per dtype."""

    gpu: GpuProfile
    engine: EngineProfile
    attention_backend: str | None = None
    """Overrides the engine's own choice of attention kernel."""
    isolated: bool = False
    """Kernels alone, as benchmarks time them (warm caches, fixed costs visible), instead of inside a served step."""
    _cache: dict[tuple[str, str], Fitted[Any]] = field(default_factory=dict, compare=False, repr=False)
    _served: dict[str, GemmFit] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def overheads(self) -> Mapping[str, float]:
        """The engine's numbers, those adapted to this machine (`calibrate --from-bench`) in place of the global ones."""
        own = (self.gpu.calibration or {}).get("overheads")
        adapted = own.get(self.engine.id, {}) if isinstance(own, Mapping) else {}
        return dict(self.engine.overheads_on(self.gpu.arch)) | {k: float(v) for k, v in adapted.items()}

    @property
    def adapted(self) -> bool:
        """True when served runs of this machine moved the engine's numbers."""
        return self.overheads != dict(self.engine.overheads_on(self.gpu.arch))

    def fit(self, op: str, dtype: str) -> Fitted[Any]:
        """Fitted numbers of a kernel class in a dtype, with provenance and residual band."""
        key = (op, dtype)
        if key not in self._cache:
            self._cache[key] = kernel_fit(op, self.gpu, self.engine.id, dtype)
        return self._cache[key]

    def looked_up(self) -> list[tuple[tuple[str, str], Fitted[Any]]]:
        """Fits used so far by (kernel class, dtype)."""
        return sorted(self._cache.items(), key=lambda item: item[0])

    def attention_kernel(self, kind: str) -> AttentionKernel:
        """Descriptor of the attention kernel for gqa, mla or sparse attention."""
        return load_attention_kernel(self.attention_backend or self.engine.attention_kernel_id(self.gpu.arch, kind))

    def op_time(self, op: Op) -> KernelTime:
        """Seconds of ONE execution of `op` (multiply by op.count for a pass)."""
        match op:
            case Gemm():
                return self._gemm(op)
            case KvOp():
                return self._kv(op)
            case LatentOp():
                return self._latent(op)
            case ExpertsOp():
                return self._experts(op)
            case StateOp():
                return state_time(op.num_seqs, op.query_len, op.state_bytes, op.flop, self.fit("state", "bf16").value)
            case VectorOp():
                moved = np.asarray(op.bytes, dtype=np.float64) / (self.gpu.bytes_per_s * self.gpu.bandwidth_eff)
                zero = np.zeros_like(moved)
                return KernelTime(moved + self.gpu.launch_s, moved, zero, zero + self.gpu.launch_s)
            case AllReduce():
                return allreduce_time(op.bytes, op.ranks, self.fit("allreduce", "bf16").value)
            case AllGather():
                return allgather_time(op.bytes, op.ranks, self.fit("allgather", "bf16").value)
            case AllToAll():
                return alltoall_time(op.bytes, op.ranks, self.fit("alltoall", "bf16").value)

    def _gemm(self, op: Gemm) -> KernelTime:
        return gemm_time(
            op.rows,
            op.n,
            op.k,
            self.gemm_fit(op.weights_dtype, op.act_dtype, op.block_scaled),
            weight_bytes_per_element=bytes_per_element(op.weights_dtype),
            act_bytes_per_element=bytes_per_element(op.act_dtype),
        )

    def gemm_fit(self, weights_dtype: str, act_dtype: str, block_scaled: bool) -> GemmFit:
        """Numbers of a GEMM: isolated as tabulated, or as it runs inside a served step.

        Inside a step the prologue, the K-loop latency and the activation quantisation that a benchmark times overlap with neighbours or
        are fused away: with the tables' own values, served steps that the fit has not seen are predicted 13.6 % off in the median, with
        the profile's attainable rates and the tables' steps in M 10.5 % (docs/accuracy.md). A profile calibrated on the machine itself is
        taken as it is.
        """
        kernel = gemm_key(weights_dtype, act_dtype, block_scaled)
        fitted = self.fit("gemm", kernel)
        if self.isolated or fitted.distance == "own":
            return fitted.value  # type: ignore[no-any-return]
        if kernel not in self._served:
            rates = GemmFit.from_gpu(self.gpu, act_dtype)
            if "/" in kernel:  # weights unpacked to the wider arithmetic inside the kernel
                rates = replace(rates, flop_per_s=rates.flop_per_s * self.engine.act_dtype(weights_dtype, self.gpu)[1])
            nodes, logs = whole_time_steps(fitted.value, bytes_per_element(weights_dtype))
            self._served[kernel] = replace(rates, per_k_s=0.0, knee=SERVED_KNEE, step_m=nodes, step_log=logs)
        return self._served[kernel]

    def _kv(self, op: KvOp) -> KernelTime:
        kernel = self.attention_kernel("sparse" if op.gathers_per_query else "gqa")
        fit = self.fit("attention", op.kv_dtype).value
        heads = (float(op.num_heads), float(op.num_kv_heads))
        size = bytes_per_element(op.kv_dtype) * (0.5 if op.core.k_is_v else 1.0)

        def dense(num_seqs: Num, query_len: Num, context_len: Num) -> KernelTime:
            return attention_time(
                num_seqs,
                query_len,
                context_len,
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_dim=op.core.head_dim,
                v_head_dim=op.core.v_head_dim,
                kv_bytes_per_element=size,
                fit=fit,
                kernel=kernel,
                repeated=self.isolated,
            )

        if op.core.sparse_topk is not None:
            chosen = np.minimum(np.asarray(op.attended_len, dtype=np.float64), op.core.sparse_topk)
            gathered = dense(op.num_seqs * op.query_len, 1.0, chosen + op.local_len)
            whole = dense(op.num_seqs, op.query_len, op.attended_len + op.local_len)
            return add(cheaper(gathered, whole), self._indexer(op.index_flop, op.index_bytes))
        if op.core.window is not None:
            # a chunk longer than its window is many window-sized chunks, each row seeing one window
            split = np.maximum(np.asarray(op.query_len, dtype=np.float64) / op.core.window, 1.0)
            seen = np.where(split > 1.0, 1.5 * op.core.window, op.attended_len)
            return unsplit(dense(op.num_seqs * split, op.query_len / split, seen), kernel, op.query_len, seen)
        length = op.attended_len + op.local_len
        return unsplit(dense(op.num_seqs, op.query_len, length), kernel, op.query_len, length)

    def _latent(self, op: LatentOp) -> KernelTime:
        fit, core = self.fit("mla", op.kv_dtype).value, op.core

        def absorbed(num_seqs: Num, query_len: Num, context_len: Num) -> KernelTime:
            kernel = self.attention_kernel("mla" if core.sparse_topk is None else "sparse")
            return mla_time(
                num_seqs,
                query_len,
                context_len,
                num_heads=float(op.num_heads),
                kv_rank=core.kv_rank,
                rope_dim=core.rope_dim,
                kv_bytes_per_element=bytes_per_element(op.kv_dtype),
                fit=fit,
                kernel=kernel,
                repeated=self.isolated,
            )

        def materialised() -> KernelTime:
            """Long query chunks expand the latent to per-head keys and values: nope + rope + v FLOP instead of 2r + rope."""
            return attention_time(
                op.num_seqs,
                op.query_len,
                op.context_len,
                num_heads=float(op.num_heads),
                num_kv_heads=float(op.num_heads),
                head_dim=core.nope_dim + core.rope_dim,
                v_head_dim=core.v_head_dim,
                kv_bytes_per_element=2.0,
                fit=self.fit("attention", "bf16").value,
                kernel=None,
            )

        if core.sparse_topk is None:
            return pick(np.asarray(op.query_len) > 64.0, materialised, lambda: absorbed(op.num_seqs, op.query_len, op.context_len))
        gathered = absorbed(op.num_seqs * op.query_len, 1.0, op.selected_len)
        index = self._indexer(op.index_flop, np.asarray(op.num_seqs) * op.context_len * float(core.index_kv_per_token))
        return add(pick(np.asarray(op.query_len) > 64.0, lambda: cheaper(gathered, materialised()), lambda: gathered), index)

    def _indexer(self, flop: Num, moved: Num) -> KernelTime:
        """Scores of token-sparse attention: 8-bit where the GPU has it, else 16-bit."""
        dtype = "fp8" if "fp8" in self.gpu.peak_flop_per_s else "fp16"
        compute = np.asarray(flop, dtype=np.float64) / (self.gpu.peak(dtype) * self.gpu.matmul_eff.get(dtype, 0.7) * 0.5)
        memory = np.asarray(moved, dtype=np.float64) / (self.gpu.bytes_per_s * self.gpu.bandwidth_eff)
        memory, compute = np.broadcast_arrays(memory, compute)
        fixed = np.full(memory.shape, INDEXER_LAUNCHES * self.gpu.launch_s)
        return KernelTime(np.maximum(memory, compute) + fixed, memory, compute, fixed)

    def _experts(self, op: ExpertsOp) -> KernelTime:
        fitted = self.fit("moe", gemm_key(op.weights_dtype, op.act_dtype, op.block_scaled))
        return moe_time(
            op.expert_rows * op.ep / op.core.top_k,
            top_k=float(op.core.top_k),
            width=float(op.core.width),
            ffn=op.ffn,
            experts_touched=op.touched,
            fit=fitted.value,
            weight_bytes_per_element=bytes_per_element(op.weights_dtype),
            matrices=float(op.core.matrices),
            num_experts=float(op.core.num_experts),
            local_experts=op.core.num_experts / op.ep,
        )

    def pass_time(self, ops: Sequence[Op]) -> PassTime:
        """Sum over operations as served; each one's time goes to the part that binds it.

        `kernel_scale` (fitted to served steps) is what remains of a kernel's own time there, its launch aside.
        """
        return PassTime(*(np.asarray(x, dtype=np.float64) for x in self._sum(ops)))

    def grid_time(self, ops_of: Callable[[Num, Num], Sequence[Op]], num_seqs: Num, query_len: Num) -> PassTime:
        """pass_time(ops_of(num_seqs, query_len)); on a grid, which repeats few distinct pairs, what reads no context is priced once a pair.

        The operations may use the two arguments as they are or combined, attention only as they are.
        """
        n, q = np.asarray(num_seqs, dtype=np.float64), np.asarray(query_len, dtype=np.float64)
        if np.broadcast(n, q).size <= GRID_SIZE or (n != np.floor(n)).any():
            return self.pass_time(ops_of(num_seqs, query_len))
        few_n, few_q, index = distinct_pairs(n, q)

        def whole(x: Num) -> Num:
            assert np.ndim(x) == 0 or x is few_n or x is few_q
            return n if x is few_n else q if x is few_q else x

        ops = ops_of(few_n, few_q)
        few = self._sum([op for op in ops if not isinstance(op, KvOp | LatentOp)])
        attention = [op for op in ops if isinstance(op, KvOp | LatentOp)]
        parts = self._sum([replace(op, num_seqs=whole(op.num_seqs), query_len=whole(op.query_len)) for op in attention])
        return PassTime(*(np.asarray(p + (np.asarray(f)[index] if np.ndim(f) else f)) for p, f in zip(parts, few, strict=True)))

    def served_s(self, op: Op) -> NDArray[np.float64]:
        """Seconds of one operation with its count inside a served step."""
        return np.asarray(self._sum([op])[0], dtype=np.float64)

    def _sum(self, ops: Sequence[Op]) -> list[Num]:
        total: Num = 0.0
        memory: Num = 0.0
        compute: Num = 0.0
        launch: Num = 0.0
        network: Num = 0.0
        scale = self.overheads["kernel_scale"]
        for op in ops:
            t = self.op_time(op)
            if isinstance(op, AllReduce | AllGather | AllToAll):
                network = network + op.count * scale * t.time_s
                total = total + op.count * scale * t.time_s
                continue
            alone = np.minimum(t.fixed_s, t.time_s)
            fixed = op.count * alone
            busy = op.count * scale * (t.time_s - alone)
            streaming = np.where(t.memory_s >= t.compute_s, busy, 0.0)
            total = total + (busy + fixed)
            launch = launch + fixed
            memory = memory + streaming
            compute = compute + (busy - streaming)
        return [total, memory, compute, launch, network]


STEP_SHAPE = 8192
"""N = K of the GEMM at which a table's step factor is turned into one of the whole kernel time."""


def whole_time_steps(fit: GemmFit, weight_bytes_per_element: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(M, log factor) of the steps on a kernel's whole time: a table's factor is on its roofline part alone, without fixed costs."""
    if not fit.step_m:
        return (), ()
    m = np.asarray(fit.step_m)
    stepped, smooth = (
        gemm_time(m, STEP_SHAPE, STEP_SHAPE, f, weight_bytes_per_element=weight_bytes_per_element).time_s
        for f in (fit, replace(fit, step_m=(), step_log=()))
    )
    return fit.step_m, tuple(float(x) for x in np.log(stepped / smooth))


def gemm_key(weights_dtype: str, act_dtype: str, block_scaled: bool) -> str:
    """Name of the kernel stack a weight runs in: its arithmetic when both agree, `w4a16`-like when only storage is small."""
    if weights_dtype == "fp8" and act_dtype == "fp8":
        return "fp8_block" if block_scaled else "fp8"
    if weights_dtype == act_dtype:
        return weights_dtype
    return f"{weights_dtype}/{act_dtype}"


def add(a: KernelTime, b: KernelTime) -> KernelTime:
    """One after the other."""
    return KernelTime(*(np.asarray(x + y) for x, y in zip(a, b, strict=True)))


def unsplit(t: KernelTime, kernel: AttentionKernel, query_len: Num, context_len: Num) -> KernelTime:
    """A kernel that cannot split the context over CTAs when it verifies walks it alone: a floor linear in the context."""
    if kernel.split_kv_multi_query or not kernel.unsplit_token_s:
        return t
    verifying = (np.asarray(query_len) > 1.0) & (np.asarray(query_len) <= VERIFY_MAX_QUERY)
    walk = np.where(verifying, kernel.unsplit_token_s * np.asarray(context_len, dtype=np.float64), 0.0)
    return KernelTime(np.maximum(t.time_s, walk), np.maximum(t.memory_s, walk), t.compute_s, t.fixed_s)


def cheaper(a: KernelTime, b: KernelTime) -> KernelTime:
    """Element by element the faster of two ways to compute the same thing."""
    first = a.time_s <= b.time_s
    return KernelTime(*(np.where(first, x, y) for x, y in zip(a, b, strict=True)))


def pick(mask: NDArray[np.bool_], yes: Any, no: Any) -> KernelTime:
    """Lazy where: computes only the branches that occur."""
    if mask.all():
        return yes()  # type: ignore[no-any-return]
    if not mask.any():
        return no()  # type: ignore[no-any-return]
    return KernelTime(*(np.where(mask, x, y) for x, y in zip(yes(), no(), strict=True)))


def machine(gpu: str, engine: str, attention_backend: str | None = None, *, isolated: bool = False) -> Machine:
    """The machine of a GPU (name or profile file) and an engine name. Raises ProfileError for unknown ones."""
    from gpu_profiles.load import file_stamp

    return _machine(gpu, engine, attention_backend, isolated, file_stamp(gpu))


@lru_cache(maxsize=256)
def _machine(gpu: str, engine: str, attention_backend: str | None, isolated: bool, stamp: object) -> Machine:
    from gpu_profiles.load import load_engine, load_gpu

    return Machine(load_gpu(gpu), load_engine(engine), attention_backend, isolated)
