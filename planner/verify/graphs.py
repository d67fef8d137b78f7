"""Passes of a network as CUDA graphs: one replay in place of some hundred launches a pass.

A graph has fixed shapes, so a pass attends to every slot of its cache under a mask: the cost is that of the cache's length, not of the
sequences'. On a CPU nothing is captured and the same masked pass runs as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.verify.nets.transformer import Hidden, KVCache, Shape, Transformer

#: Passes before a capture, so that libraries choose their kernels and workspaces.
WARM_PASSES = 3


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    hidden: Hidden


class Graphed:
    """A network over one cache. Each (B, q) is captured when it is first met. Graphs share one memory pool, so that a pass may overwrite
    what any earlier one returned: take what is needed of it before the next.

    Raises ValueError for a second cache: a captured pass writes to the first.
    """

    def __init__(self, net: Transformer) -> None:
        self.net = net
        self.cache: KVCache | None = None
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None

    @property
    def shape(self) -> Shape:
        return self.net.shape

    @property
    def embed_tokens(self) -> torch.nn.Embedding:
        return self.net.embed_tokens

    def logits(self, final: Tensor) -> Tensor:
        return self.net.logits(final)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache, *, whole: bool = False) -> Hidden:
        """As `Transformer.forward`; a whole prompt is read uncaptured."""
        if self.cache is None:
            self.cache = cache
        elif self.cache is not cache:
            raise ValueError("a graphed network belongs to one cache")
        if whole:
            out: Hidden = self.net(tokens, positions, cache, whole=True)
            return out
        if not tokens.is_cuda:
            return self._masked(tokens, positions)
        key = (tokens.shape[0], tokens.shape[1])
        if key not in self._captured:
            self._captured[key] = self._capture(tokens, positions)
        captured = self._captured[key]
        captured.tokens.copy_(tokens)
        captured.positions.copy_(positions)
        captured.graph.replay()
        return captured.hidden

    def _masked(self, tokens: Tensor, positions: Tensor) -> Hidden:
        assert self.cache is not None
        out: Hidden = self.net(tokens, positions, self.cache, length=self.cache.slots)
        return out

    def _capture(self, tokens: Tensor, positions: Tensor) -> _Captured:
        tokens, positions = tokens.clone(), positions.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_PASSES):
                self._masked(tokens, positions)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._masked(tokens, positions)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, tokens, positions, hidden)
