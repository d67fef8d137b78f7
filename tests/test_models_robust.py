"""A mutated config either reads as a finite model or fails with a ModelConfigError; nothing else may escape."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ModelConfigError
from planner.models import describe_model, read_model

CONFIGS = Path(__file__).parent / "data" / "configs"
STEMS = (
    "meta-llama--Meta-Llama-3.1-8B", "Qwen--Qwen3-30B-A3B-FP8", "Qwen--Qwen3.5-35B-A3B", "deepseek-ai--DeepSeek-V3.2",
    "deepseek-ai--DeepSeek-V4-Flash", "openai--gpt-oss-20b", "google--gemma-4-26B-A4B", "zai-org--GLM-5.3", "moonshotai--Kimi-K3",
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "MiniMaxAI--MiniMax-M3",
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1", "XiaomiMiMo--MiMo-V2-Flash", "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "moonshotai--Kimi-K2.5",
)  # fmt: skip
LOADED: dict[str, dict[str, Any]] = {s: json.loads((CONFIGS / f"{s}_config.json").read_text()) for s in STEMS}
BAD: list[Any] = [
    None, float("nan"), float("inf"), -1, 0, 1, 3, 10**30, 2.5, "x", "", [], {}, [None], ["x"], [1], [0, 1], True, False, {"a": 1},
]  # fmt: skip
MISSING = object()


def paths(node: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of every object, and the first and last entry of every list."""
    out = []
    if isinstance(node, dict):
        for key, value in node.items():
            out += [(*prefix, key), *paths(value, (*prefix, key))]
    elif isinstance(node, list) and node:
        for i in sorted({0, len(node) - 1}):
            out += [(*prefix, i), *paths(node[i], (*prefix, i))]
    return out


PATHS = {stem: paths(config) for stem, config in LOADED.items()}


def mutate(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(config)
    node: Any = out
    for key in path[:-1]:
        node = node[key]
    if value is MISSING:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return out


def check(config: dict[str, Any]) -> None:
    try:
        spec = read_model(config)
    except ModelConfigError as error:
        assert len(str(error)) > 20
        return
    assert 0 < spec.active_params <= spec.total_params < 1e16
    text = describe_model(spec)
    for key in ("weights_bytes", "kv_bytes_per_token_16bit", "state_bytes_per_sequence"):
        assert math.isfinite(text[key]) and text[key] >= 0


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_one_or_two_mutations(data: st.DataObject) -> None:
    stem = data.draw(st.sampled_from(STEMS))
    config = LOADED[stem]
    for path in data.draw(st.lists(st.sampled_from(PATHS[stem]), min_size=1, max_size=2)):
        try:
            config = mutate(config, path, data.draw(st.sampled_from([*BAD, MISSING])))
        except (KeyError, IndexError, TypeError):
            continue  # the first mutation took away what the second would touch
    check(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["hidden_size", "layer_types", "text_config", "x"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted({p[-1] for ps in PATHS.values() for p in ps if isinstance(p[-1], str)})), JSON, max_size=12))
@settings(max_examples=200, deadline=None)
def test_arbitrary_objects(config: dict[str, Any]) -> None:
    check(config)


@pytest.mark.parametrize("stem", STEMS)
def test_every_key_of_every_kind(stem: str) -> None:
    """Exhaustive where it is cheap: each top-level and text_config key dropped, nulled and spoilt."""
    for path in PATHS[stem]:
        if len(path) == 1 or (len(path) == 2 and path[0] == "text_config"):
            for value in (MISSING, None, -1, "x", [], float("nan")):
                check(mutate(LOADED[stem], path, value))
