"""Reading an engine profile file (see schema.EngineProfile)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from gpu_profiles.reader import Reader
from gpu_profiles.schema import OVERHEAD_KEYS, EngineLimits, EngineProfile, EngineTier, Source


def engine_from_json(data: object, where: str) -> EngineProfile:
    """Check and build an engine profile; errors name the file and the field."""
    r = Reader(data, where)
    overheads = r.number_table("overheads", zero_ok=True)
    unknown = sorted(set(overheads) ^ set(OVERHEAD_KEYS))
    if unknown:
        raise r.error(f"overheads.{unknown[0]}", "unknown or missing overhead", expected=f"exactly {list(OVERHEAD_KEYS)}")
    by_arch, their_sources = _by_arch(r, where)
    backends = {kind: MappingProxyType(dict(table)) for kind, table in r.take("attention_backends").items()}
    for kind, table in backends.items():
        if "default" not in table:
            raise r.error(f"attention_backends.{kind}", "no `default` kernel")
    schedule = r.optional_object("schedule")
    sizes = tuple(r.take("cuda_graph_sizes"))
    running = r.optional_number("max_running_with_speculation", whole=True)
    profile = EngineProfile(
        id=r.text("id"), name=r.text("name"), version=r.text("version"), aliases=r.texts("aliases"), notes=r.texts("notes"),
        attention_backends=MappingProxyType(backends), native_act=MappingProxyType(dict(r.take("native_act"))),
        dequant_factor=r.number_table("dequant_factor", at_most=1.0),
        tiers=tuple(_tier(cell, where, i) for i, cell in enumerate(r.take("tiers"))),
        cuda_graph_unit=cast(Any, _one_of(r, "cuda_graph_unit", "tokens", "seqs")), cuda_graph_sizes=sizes,
        cuda_graph_sizes_spec=tuple(r.take_optional("cuda_graph_sizes_spec") or sizes),
        max_running_with_speculation=None if running is None else int(running),
        drafters=MappingProxyType(dict(r.take("drafters"))),
        schedule=None if schedule is None else MappingProxyType(dict(schedule)),
        async_scheduling=bool(r.take("async_scheduling")), memory_frac_of=cast(Any, _one_of(r, "memory_frac_of", "total", "free")),
        overheads=overheads, overheads_by_arch=by_arch, lm_head_dtype=_lm_head_dtype(r, where),
        sources=MappingProxyType({**r.sources, **their_sources}),
    )  # fmt: skip
    r.take_optional("limits_ref")
    r.done()
    return profile


def _by_arch(r: Reader, where: str) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, Source]]:
    """(start of an arch's name -> the numbers that replace the engine's own there, their sources)."""
    data = dict(r.optional_object("overheads_by_arch") or {})
    inner = Reader(data, where, "overheads_by_arch.")
    tables = {start: inner.number_table(start, zero_ok=True) for start in data}
    for start, table in tables.items():
        if unknown := sorted(set(table) - set(OVERHEAD_KEYS)):
            raise inner.error(f"{start}.{unknown[0]}", "unknown overhead", expected=f"some of {list(OVERHEAD_KEYS)}")
    return MappingProxyType(tables), {f"overheads_by_arch.{field}": source for field, source in inner.sources.items()}


def _lm_head_dtype(r: Reader, where: str) -> str | None:
    """`lm_head`: {"dtype", "ref"}, storage of the LM head in the engine's own checkpoint format."""
    cell = r.optional_object("lm_head")
    if cell is None:
        return None
    inner = Reader(cell, where, "lm_head.")
    dtype, _ = inner.text("dtype"), inner.text("ref")
    inner.done()
    return dtype


def _one_of(r: Reader, field: str, *words: str) -> str:
    word = r.text(field)
    if word not in words:
        raise r.error(field, "unknown word", got=word, expected=f"one of {list(words)}")
    return word


def _tier(data: object, where: str, index: int) -> EngineTier:
    r = Reader(data, where, f"tiers.{index}.")
    bound, reserve = r.take("below_bytes"), r.take_optional("reserve_bytes")
    tier = EngineTier(
        below_bytes=math.inf if bound is None else float(bound),
        reserve_bytes=None if reserve is None else float(reserve),
        not_gpus=r.texts("not_gpus"),
        limits=EngineLimits(
            max_num_seqs=r.take("max_num_seqs"), max_num_batched_tokens=r.take("max_num_batched_tokens"),
            cuda_graph_max=r.take("cuda_graph_max"), memory_frac=r.take("memory_frac"),
        ),
    )  # fmt: skip
    r.take("ref")
    r.done()
    return tier
