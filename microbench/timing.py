"""Timing of one kernel on a device.

CUDA: a graph of k launches over rotating buffers several times the L2, at least 200 us a replay, an event pair around each replay.
CPU: one thread, process CPU time (what neighbours take does not count), k calls over rotating buffers beyond the last-level cache.
Data is random, never zeros: zeros draw less power and read up to 15 % fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple, Protocol

#: A replay or a repeat lasts at least this long, so that clocks resolve it (CUDA events: 0.5 us).
LEAST_S = {"cuda": 2e-4, "cpu": 2e-3}
#: Buffers rotate over this many cache sizes.
COLD_CACHES = {"cuda": 5, "cpu": 4}
SLAB_CAP_BYTES = 8e9
MAX_LAUNCHES = 64


class Work(NamedTuple):
    """A kernel ready to run: `launch(i)` runs it on the i-th set of buffers."""

    launch: Callable[[int], object]
    copies: int = 1
    """Sets of buffers that it rotates over."""


class Device(Protocol):
    """What a measurement needs of a device."""

    kind: str
    cache_bytes: int

    def tensor(self, shape: Sequence[int], dtype: str, copy: int = 0) -> Any:
        """A random tensor; another `copy` lies elsewhere in memory."""
        ...

    def copies(self, size_bytes: float) -> int:
        """How many copies of so many bytes leave no copy in cache."""
        ...

    def guard(self) -> AbstractContextManager[object]:
        """What measurements run inside of (no autograd)."""
        ...

    def timed(self, work: Work) -> Callable[[], float]:
        """Prepare `work`; each call of the result gives one sample, in seconds per launch."""
        ...


def torch_dtype(name: str) -> Any:
    torch = import_module("torch")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[name]


def inference_mode() -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = import_module("torch").inference_mode()
    return context


class _Slab:
    """Random memory per dtype, made once, that every weight and cache is a view of."""

    def __init__(self, device: str, cold_bytes: float) -> None:
        self.device, self.cold_bytes = device, cold_bytes
        self._slabs: dict[str, Any] = {}

    def view(self, shape: Sequence[int], dtype: str, copy: int) -> Any:
        torch = import_module("torch")
        kind = torch_dtype(dtype)
        count = 1
        for s in shape:
            count *= s
        size = kind.itemsize
        slab = self._slabs.get(dtype)
        if slab is None or slab.numel() < count:
            total = max(int(self.cold_bytes // size), count)
            self._slabs.pop(dtype, None)
            slab = torch.empty(total, device=self.device, dtype=kind)
            for start in range(0, total, 1 << 24):  # in parts: a float32 copy of it all would not fit beside it
                part = slab[start : start + (1 << 24)]
                part.copy_(torch.randn(part.numel(), device=self.device).to(kind))
            self._slabs[dtype] = slab
        step = -(-count * size // 4096) * 4096 // size  # copies begin on pages
        room = max((slab.numel() - count) // step + 1, 1)
        start = copy % room * step
        return slab[start : start + count].view(tuple(shape))

    def copies(self, size_bytes: float) -> int:
        return int(max(1, min(self.cold_bytes // max(size_bytes, 1.0), 4096)))


class CpuDevice:
    """This machine's processor, one thread."""

    kind = "cpu"

    def __init__(self, cache_bytes: int, working_set_bytes: float | None = None) -> None:
        """`working_set_bytes`: what a pass of the model touches, where that is known and may fit in cache."""
        torch = import_module("torch")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.cache_bytes = cache_bytes
        self._slab = _Slab("cpu", min(working_set_bytes or float("inf"), COLD_CACHES["cpu"] * cache_bytes))

    def tensor(self, shape: Sequence[int], dtype: str, copy: int = 0) -> Any:
        return self._slab.view(shape, dtype, copy)

    def copies(self, size_bytes: float) -> int:
        return self._slab.copies(size_bytes)

    def guard(self) -> AbstractContextManager[object]:
        return inference_mode()

    def timed(self, work: Work) -> Callable[[], float]:
        work.launch(0)
        start = time.process_time()
        work.launch(1)
        once = max(time.process_time() - start, 1e-7)
        calls, offset = max(1, min(4096, round(LEAST_S["cpu"] / once))), [2]

        def sample() -> float:
            first = offset[0]
            begin = time.process_time()
            for i in range(first, first + calls):
                work.launch(i)
            spent = time.process_time() - begin
            offset[0] = first + calls
            return spent / calls

        return sample


class CudaDevice:
    """GPU 0 through torch: graphs over rotating buffers, events around replays."""

    kind = "cuda"

    def __init__(self, cache_bytes: int) -> None:
        torch = import_module("torch")
        torch.manual_seed(0)
        self.cache_bytes = cache_bytes
        self._slab = _Slab("cuda", min(COLD_CACHES["cuda"] * cache_bytes + 1.5e9, SLAB_CAP_BYTES))

    def tensor(self, shape: Sequence[int], dtype: str, copy: int = 0) -> Any:
        return self._slab.view(shape, dtype, copy)

    def copies(self, size_bytes: float) -> int:
        """ceil(5 L2 / bytes) + 1, as many as the slab holds."""
        wanted = -(-COLD_CACHES["cuda"] * self.cache_bytes // max(int(size_bytes), 1)) + 1
        return max(1, min(wanted, self._slab.copies(size_bytes)))

    def guard(self) -> AbstractContextManager[object]:
        return inference_mode()

    def timed(self, work: Work) -> Callable[[], float]:
        torch = import_module("torch")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(3):  # compile, choose an algorithm, warm the allocator
                work.launch(i)
            stream.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            for i in range(4):
                work.launch(i)
            end.record(stream)
            end.synchronize()
            once = max(begin.elapsed_time(end) * 1e-3 / 4, 1e-6)
            launches = max(1, min(MAX_LAUNCHES, -(-int(LEAST_S["cuda"] * 1e9) // int(once * 1e9))))
            launches = max(launches, min(work.copies, MAX_LAUNCHES))  # every buffer is cold again when its turn comes
            graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                work.launch(i)
        replay_stream = torch.cuda.current_stream()
        graph.replay()
        torch.cuda.synchronize()

        def sample() -> float:
            begin.record(replay_stream)
            graph.replay()
            end.record(replay_stream)
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e-3 / launches

        return sample
