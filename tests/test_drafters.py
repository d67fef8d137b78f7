"""Drafter specifications (configs, usual heads) and the catalogue of published drafters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.acceptance import KINDS
from planner.drafter_catalogue import base_name, family_name
from planner.drafters import DrafterSpec, drafter_from, drafters_for, find_drafter, list_drafters
from planner.errors import InputError, ModelConfigError
from planner.models.read import read_model
from planner.models.spec import KvAttention, LatentAttention, ModelSpec

CONFIGS = Path(__file__).parent / "data" / "configs"
HEADS = CONFIGS / "drafters"


def model(name: str) -> ModelSpec:
    return read_model(str(CONFIGS / f"{name}_config.json"))


@pytest.fixture(scope="module")
def dense() -> ModelSpec:
    return model("Qwen--Qwen3-8B")


def head(kind: str, name: str, target: ModelSpec, **more: Any) -> DrafterSpec:
    return drafter_from({"kind": kind, "model": str(HEADS / f"{name}.json"), **more}, target)


# ---------------------------------------------------------------- heads read from their configs
@pytest.mark.parametrize(
    ("kind", "name", "layers", "vocab", "most", "markov"),
    [
        ("eagle3", "SpecForge--qwen3-8b-eagle3", 1, 32000, None, 0),
        ("eagle3", "synthetic--speculators-eagle3", 1, 32000, None, 0),
        ("eagle3", "SpecForge--qwen3-8b-peagle", 4, 32000, None, 0),
        ("dflash", "SpecForge--qwen3-8b-dflash", 5, 151936, 15, 0),
        ("dflash", "synthetic--speculators-dflash", 5, 32000, 7, 0),
        ("dspark", "SpecForge--qwen3-8b-dspark", 5, 151936, 7, 256),
        ("dspark", "synthetic--speculators-dspark", 5, 32000, 7, 256),
    ],
)
def test_head_configs(kind: str, name: str, layers: int, vocab: int, most: int | None, markov: int, dense: ModelSpec) -> None:  # noqa: PLR0913, PLR0917
    """Field lists of the configs; D = block - 1 for DFlash, block for DSpark."""
    d = head(kind, name, dense)
    assert (d.num_layers, d.head_vocab, d.max_trained_draft_len, d.markov_rank) == (layers, vocab, most, markov)
    assert d.hidden_size == 4096 and not d.block_assumed and not d.warnings
    core = d.layers[0].attention
    assert isinstance(core, KvAttention) and (core.num_heads, core.num_kv_heads, core.head_dim) == (32, 8, 128)


def test_eagle3_parameters_by_hand(dense: ModelSpec) -> None:
    """One layer whose attention reads 2h, fc 3h -> h, own head of 32,000 rows."""
    d = head("eagle3", "SpecForge--qwen3-8b-eagle3", dense)
    h, q, kv, ffn = 4096, 32 * 128, 8 * 128, 12288
    layer = 2 * h * (q + 2 * kv) + q * h + 3 * h * ffn + 2 * h
    assert d.params == layer + 3 * h * h + 32000 * h
    assert d.head_params == 32000 * h and d.embed_params == 0
    assert [(m.n, m.k) for m in d.extend_matrices] == [(h, 3 * h)] and d.matrices == ()


def test_dflash_and_dspark_parameters(dense: ModelSpec) -> None:
    """Published sizes: z-lab/Qwen3-8B-DFlash-b16 1B, Qwen3-4B 0.5B; GLM-5.2 and Kimi-K3 shapes of 3-4B with their tables."""
    assert head("dflash", "SpecForge--qwen3-8b-dflash", dense).params == pytest.approx(1.05e9, rel=0.02)
    assert drafter_from({"kind": "dflash", "model": str(HEADS / "SpecForge--qwen3-4b-dflash.json")}, dense).params == pytest.approx(0.55e9, rel=0.05)
    d = head("dspark", "SpecForge--qwen3-8b-dspark", dense)
    assert d.head_params == 2 * 151936 * 256 and d.sequential_head and d.parallel
    assert [(m.n, m.k) for m in d.matrices] == [(4096, 5 * 4096)]


def test_sliding_windows_of_a_head() -> None:
    """Qwen3.6-27B DFlash: four layers of window 2,048, the last one full."""
    d = head("dflash", "SpecForge--qwen3.6-27b-dflash", model("Qwen--Qwen3.5-27B"))
    assert [x.attention.window for x in d.layers if isinstance(x.attention, KvAttention)] == [2048] * 4 + [None]
    assert not any("made for another target" in w for w in d.warnings)


def test_config_object_and_overrides(dense: ModelSpec) -> None:
    d = head("dflash", "SpecForge--qwen3-8b-dflash", dense, layers=3, block=8, window=1024, weights_dtype="fp8", tp=4)
    assert (d.num_layers, d.block, d.max_trained_draft_len, d.weights_dtype, d.tp) == (3, 8, 7, "fp8", 4)
    assert any("layers 3 as given" in a for a in d.assumptions)
    assert all(isinstance(x.attention, KvAttention) and x.attention.window == 1024 for x in d.layers)


def test_a_head_of_another_target_is_said(dense: ModelSpec) -> None:
    d = head("eagle3", "SpecForge--gpt-oss-120B-eagle3", dense)
    assert any("vocabulary is not the target's" in w for w in d.warnings)


def test_mlp_speculator(dense: ModelSpec) -> None:
    raw = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": 4096, "inner_dim": 3072,
           "n_predict": 3, "vocab_size": 151936}  # fmt: skip
    d = drafter_from({"kind": "eagle3", "model": raw}, dense)
    assert d.layers[0].attention is None and d.max_trained_draft_len == 3 and d.hidden_size == 3072


# ---------------------------------------------------------------- usual heads
def test_every_kind_has_a_usual_form(dense: ModelSpec) -> None:
    for kind in KINDS:
        d = drafter_from({"kind": kind}, dense)
        assert d.kind == kind and d.assumptions
        assert (d.num_layers == 0) == (kind in ("ngram", "suffix"))
        assert d.passes(0) == 0
        assert d.passes(4) == (0 if not d.layers else 1 if kind in ("dflash", "dspark", "pard") else 4)


def test_usual_eagle3_is_the_published_shape() -> None:
    """SpecForge gpt-oss-120B: 1 layer x 2880, FFN 17280, 64/8 heads of 64, 32,000 rows."""
    target = model("openai--gpt-oss-120b")
    usual, real = drafter_from({"kind": "eagle3"}, target), head("eagle3", "SpecForge--gpt-oss-120B-eagle3", target)
    assert usual.layers[0].matrices == real.layers[0].matrices and usual.params == real.params


def test_usual_blocks(dense: ModelSpec) -> None:
    dflash, dspark = drafter_from({"kind": "dflash"}, dense), drafter_from({"kind": "dspark"}, dense)
    assert (dflash.block, dflash.max_trained_draft_len, dflash.block_assumed) == (16, 15, True)
    assert (dspark.block, dspark.max_trained_draft_len, dspark.markov_rank) == (7, 7, 256)
    assert not drafter_from({"kind": "dflash", "block": 8}, dense).block_assumed


def test_external(dense: ModelSpec) -> None:
    known = drafter_from({"kind": "external", "model": str(CONFIGS / "Qwen--Qwen3-0.6B_config.json")}, dense)
    assert known.spec is not None and known.num_layers == 28 and known.hidden_size == 1024
    assert known.embed_params == 151936 * 1024 and known.head_params == 0 and not known.warnings
    plain = drafter_from({"kind": "external"}, dense)
    assert plain.params == pytest.approx(known.params, rel=0.02) and "usual size" in plain.assumptions[0]
    assert known.passes(5) == 5 and known.tokens_verified(5) == 6
    pard = drafter_from({"kind": "pard"}, dense)
    assert pard.parallel and pard.passes(5) == 1 and pard.tokens_verified(5) == 10


@given(st.floats(2e8, 4e10))
def test_synthesised_external_has_its_parameters(params: float) -> None:
    d = drafter_from({"kind": "external", "params": params}, model("meta-llama--Meta-Llama-3.1-70B"))
    assert d.head_vocab == 128256 and all(x.attention is not None for x in d.layers)
    if params > 4e8:
        assert d.params == pytest.approx(params, rel=0.25)


def test_vocabulary_mismatch_is_said() -> None:
    d = drafter_from({"kind": "external", "model": str(CONFIGS / "Qwen--Qwen3-0.6B_config.json")}, model("meta-llama--Meta-Llama-3.1-70B"))
    assert "151936 against 128256" in d.warnings[0]


# ---------------------------------------------------------------- MTP
def test_native_mtp_is_the_declared_block() -> None:
    """DeepSeek-R1: one MLA + MoE layer, 11.6B parameters with the join; fp8 like the checkpoint."""
    d = drafter_from({"kind": "mtp", "layers": 1}, model("deepseek-ai--DeepSeek-R1"), strict=True)
    assert d.num_layers == 1 and isinstance(d.layers[0].attention, LatentAttention) and d.layers[0].experts is not None
    assert d.params == pytest.approx(11.6e9, rel=0.01) and d.weights_dtype == "fp8" and d.n_predict == 1
    assert d.max_trained_draft_len is None and d.embed_params == d.head_params == 0


def test_several_mtp_blocks_stay_resident() -> None:
    d = drafter_from({"kind": "mtp"}, model("stepfun-ai--Step-3.7-Flash"))
    assert d.n_predict == 3 and d.num_layers == 1 and d.head_params == pytest.approx(2 * d.params / 3, rel=0.01)


def test_missing_mtp_warns_or_refuses(dense: ModelSpec) -> None:
    d = drafter_from({"kind": "mtp", "layers": 1}, dense)
    assert d.num_layers == 1 and d.layers[0] == dense.layers[-1] and "declares no MTP" in d.warnings[0]
    with pytest.raises(ModelConfigError) as caught:
        drafter_from({"kind": "mtp"}, model("Qwen--Qwen3-32B"), strict=True)
    assert caught.value.where == "drafter.kind" and caught.value.hint


def test_gemma_assistant_shares_the_cache() -> None:
    """Gemma-4: four small layers that read the target's KV cache."""
    d = drafter_from({"kind": "mtp", "layers": 4}, model("nvidia--Gemma-4-31B-IT-NVFP4"))
    assert d.num_layers == 4 and d.hidden_size == 1024
    assert all(isinstance(x.attention, KvAttention) and x.attention.shares_kv for x in d.layers)
    assert d.params * 2 == pytest.approx(0.84e9, rel=0.2)


# ---------------------------------------------------------------- catalogue
def test_catalogue_matches_the_source_rows() -> None:
    """Rows copied by hand from the sources named in them."""
    assert len(list_drafters()) == 308
    assert all(row["kind"] in KINDS for row in list_drafters())
    assert all(row["source_url"].startswith("https://") for row in list_drafters() if row["status"] != "no model")
    expected: list[tuple[str, str, dict[str, Any]]] = [
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash", {"layers": 5, "hidden_size": 4096, "block": 16, "max_draft_len": 15, "params": 10**9}),
        ("deepseek-ai/dspark_qwen3_8b_block7", "dspark", {"block": 7, "max_draft_len": 7}),
        ("RedHatAI/Qwen3.8-27B-speculator.dspark", "dspark", {"layers": 5, "block": 8, "max_draft_len": 8, "license": "apache-2.0"}),
        ("LithosAI/Kimi-K3.1-Pro-DSpark", "dspark", {"max_draft_len": 7}),
        ("nvidia/gpt-oss-120b-Eagle3-throughput", "eagle3", {"max_draft_len": 1}),
        ("amazon/gpt-oss-20b-p-eagle", "eagle3", {"layers": 4, "max_draft_len": 10, "variant": "p-eagle"}),
        ("google/gemma-4-12B-it-assistant", "mtp", {"layers": 4, "hidden_size": 1024, "n_predict": 1, "variant": "assistant"}),
        ("Dogacel/specdrift-gpt-oss-120b-eagle3", "eagle3", {"training_gpu_hours": {"low": None, "high": 80, "gpu": "H200"}}),
    ]
    for name, kind, facts in expected:
        row = find_drafter(name.upper(), kind)
        assert row is not None, name
        assert {k: row.get(k) for k in facts} == facts, name


def test_drafters_for_prefers_the_exact_target(dense: ModelSpec) -> None:
    found = drafters_for("qwen/qwen3-8b", dense)
    assert {"eagle3", "dflash", "dspark", "pard", "ngram", "suffix", "external"} <= {d["kind"] for d in found}
    assert found[0]["match"] == "exact" and "mtp" not in {d["kind"] for d in found if d["match"] != "exact"}
    first = next(d for d in found if d["kind"] == "dflash")
    assert first.get("variant") is None


def test_variants_warn() -> None:
    fp8 = [d for d in drafters_for("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8") if d.get("model") == "nebius/EAGLE3-Qwen3-235B-A22B-Instruct-2507"]
    assert fp8[0]["match"] == "quantisation" and "another quantisation" in fp8[0]["warnings"][0]
    tuned = [d for d in drafters_for("Qwen/Qwen3-235B-A22B") if d.get("model") == "nebius/EAGLE3-Qwen3-235B-A22B-Instruct-2507"]
    assert tuned[0]["match"] == "variant" and "another fine-tune" in tuned[0]["warnings"][0]


def test_absent_mtp_is_not_offered() -> None:
    """MiniMax-M2.5 declares MTP modules and ships none: https://github.com/MiniMax-AI/MiniMax-M2.5/issues/8"""
    target = model("MiniMaxAI--MiniMax-M2.5")
    assert "mtp" not in {d["kind"] for d in drafters_for("MiniMaxAI/MiniMax-M2.5", target)}
    assert "mtp" in {d["kind"] for d in drafters_for("deepseek-ai/DeepSeek-R1", model("deepseek-ai--DeepSeek-R1"))}


@pytest.mark.parametrize(
    ("name", "base", "family"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b", "qwen3"),
        ("Qwen--Qwen3-8B_config.json", "qwen3-8b", "qwen3"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", "llama-3"),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4", "nemotron-3-ultra-550b-a55b", "nemotron-3-ultra"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder-30b-a3b", "qwen3"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "gpt-oss"),
    ],
)
def test_names(name: str, base: str, family: str) -> None:
    assert (base_name(name), family_name(name)) == (base, family)


def test_catalogue_facts_shape_the_head() -> None:
    d = drafter_from({"kind": "eagle3", "model": "nvidia/gpt-oss-120b-Eagle3-throughput"}, model("openai--gpt-oss-120b"))
    assert d.max_trained_draft_len == 1 and any("one draft token" in w for w in d.warnings)
    wrong = drafter_from({"kind": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}, model("openai--gpt-oss-120b"))
    assert any("was made for Qwen/Qwen3-8B" in w for w in wrong.warnings)
    unknown = drafter_from({"kind": "dflash", "model": "z-lab/Qwen3-8B-DFlash"}, model("Qwen--Qwen3-8B"))
    assert any("Did you mean z-lab/Qwen3-8B-DFlash-b16" in w for w in unknown.warnings)


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("spec", "where", "says"),
    [
        ({}, "drafter.kind", "one of external"),
        ({"kind": "eagle"}, "drafter.kind", "Did you mean eagle3"),
        ({"kind": "NEXTN"}, "drafter.kind", "Did you mean mtp"),
        ({"kind": "eagl3"}, "drafter.kind", "Did you mean eagle3"),
        ({"kind": "eagle3", "layer": 1}, "drafter", "Did you mean layers"),
        ({"kind": "eagle3", "layers": -1}, "drafter.layers", "at least 1"),
        ({"kind": "eagle3", "layers": 1.5}, "drafter.layers", "whole number"),
        ({"kind": "eagle3", "layers": math.nan}, "drafter.layers", "whole number"),
        ({"kind": "eagle3", "layers": True}, "drafter.layers", "whole number"),
        ({"kind": "dflash", "block": 0}, "drafter.block", "at least 1"),
        ({"kind": "external", "params": "1B"}, "drafter.params", "1.5e9"),
        ({"kind": "external", "params": math.inf}, "drafter.params", "number"),
        ({"kind": "ngram", "match_prob": 1.5}, "drafter.match_prob", "0..1"),
        ({"kind": "eagle3", "weights_dtype": "f8"}, "drafter.weights_dtype", "fp8"),
        ({"kind": "eagle3", "tp": 3}, "drafter.tp", "divisor of 32"),
        ({"kind": "external", "tp": 2, "n_gpus": 3}, "drafter.tp", "divisor of n_gpus"),
        ({"kind": "eagle3", "topk": 4}, "drafter.topk", "verify_width"),
        ({"kind": "eagle3", "model": 7}, "drafter.model", "catalogue id"),
        ({"kind": "eagle3", "model": "nowhere/config.json"}, "drafter.model", "cannot read"),
        ({"kind": "dspark", "model": str(HEADS / "SpecForge--qwen3-8b-dflash.json")}, "drafter.model", '"kind": "dflash"'),
        ({"kind": "external", "model": str(HEADS / "SpecForge--qwen3-8b-eagle3.json")}, "drafter.model", '"kind": "eagle3"'),
        (
            {"kind": "dflash", "model": {"architectures": ["DFlashDraftModel"], "hidden_size": 4096}},
            "drafter.model",
            "lacks num_attention_heads",
        ),
        ({"kind": "external", "model": "Qwen/Qwen3-0.6Bx"}, "", "Qwen3-0.6B"),
        ("eagle3", "drafter", "not an object"),
    ],
)
def test_bad_drafters(spec: Any, where: str, says: str, dense: ModelSpec) -> None:
    with pytest.raises(InputError) as caught:
        drafter_from(spec, dense)
    assert not where or caught.value.where == where
    assert says in str(caught.value)


def test_trees_are_priced_with_their_width(dense: ModelSpec) -> None:
    assert drafter_from({"kind": "eagle3", "topk": 4, "verify_width": 16}, dense).tokens_verified(3) == 16


@given(
    st.dictionaries(
        st.sampled_from(["kind", "model", "layers", "params", "block", "tp", "window", "x"]),
        st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=4),
    )
)
def test_anything_in_is_a_drafter_or_one_clear_error(spec: dict[str, Any]) -> None:
    target = model("Qwen--Qwen3-8B")
    try:
        assert isinstance(drafter_from(spec, target), DrafterSpec)
    except InputError as error:
        assert str(error)
