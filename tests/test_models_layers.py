"""What the layers are: windows, heads, latents, states, experts, cache and state bytes, per family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from planner.models import describe_model, read_model
from planner.models.count import (
    core_kind,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    kv_elements_per_token,
    state_bytes_per_sequence,
    weights_bytes,
)  # fmt: skip
from planner.models.spec import KvAttention, LatentAttention, Layer, ModelSpec, StateAttention

CONFIGS = Path(__file__).parent / "data" / "configs"
FILES = sorted(p for p in CONFIGS.glob("*.json") if not p.name.endswith("_hf_quant_config.json"))


def model(stem: str) -> ModelSpec:
    return read_model(CONFIGS / f"{stem}_config.json")


def kinds(spec: ModelSpec) -> Counter[str]:
    return Counter(core_kind(layer.attention) for layer in spec.layers)


def shapes(layer: Layer) -> dict[str, tuple[int, int]]:
    return {m.name: (m.n, m.k) for m in layer.matrices}


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_every_config_reads(file: Path) -> None:
    spec = read_model(file)
    assert spec.total_params > 0 and 0 < spec.active_params <= spec.total_params
    assert spec.source and spec.num_layers > 0
    for layer in spec.layers:
        assert layer.params > 0
        for one in layer.matrices:
            assert one.n > 0 and one.k > 0
            assert one.fused == "" or len({m.k for m in layer.matrices if m.fused == one.fused}) == 1
    text = describe_model(spec)
    assert sum(part["count"] for part in text["layers"]) == spec.num_layers
    assert text["weights_bytes"] > 0 and text["id"]


def test_all_configs_are_there() -> None:
    assert len(FILES) == 98


@pytest.mark.parametrize("file", sorted((CONFIGS / "drafters").glob("SpecForge*.json")), ids=lambda p: p.stem)
def test_drafter_configs_read_as_plain_decoders(file: Path) -> None:
    assert read_model(file).num_layers >= 1


# ------------------------------------------------------------------------------------------------- cache, golden


@pytest.mark.parametrize(
    "stem, bytes_per_token",
    [
        # 2 (K, V) x 8 heads x 128 x 64 layers x 2 B.
        ("Qwen--Qwen3-32B", 2 * 8 * 128 * 64 * 2),
        # 512 + 64 latent elements x 61 layers x 2 B.
        ("deepseek-ai--DeepSeek-V3", 576 * 61 * 2),
        # + 128 indexer elements per layer.
        ("deepseek-ai--DeepSeek-V3.2", (576 + 128) * 61 * 2),
        # 21 of 78 layers hold an indexer; the others share its choice.
        ("zai-org--GLM-5.2", (576 * 78 + 128 * 21) * 2),
        # 8 attention layers of 88: https://github.com/manjunathshiva/turboquant-mlx/pull/52 (8 KB/token, not 88).
        ("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 2 * 2 * 128 * 8 * 2),
        # 15 of 60 layers attend: 2 x 2 heads x 256.
        ("Qwen--Qwen3.5-397B-A17B", 2 * 2 * 256 * 15 * 2),
        # K 192 and V 128 wide; 9 full layers of 4 heads, 39 sliding ones of 8.
        ("XiaomiMiMo--MiMo-V2-Flash", (4 * 320 * 9 + 8 * 320 * 39) * 2),
        # 24 MLA layers of 93.
        ("moonshotai--Kimi-K3", 576 * 24 * 2),
        # 49 of 80 NAS blocks have attention.
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", 2 * 8 * 128 * 49 * 2),
    ],
)
def test_cache_bytes_per_token(stem: str, bytes_per_token: int) -> None:
    assert kv_bytes_per_token(model(stem)) == bytes_per_token


def test_sliding_layers_are_capped_not_dropped() -> None:
    """https://github.com/ollama/ollama/pull/16958: 56 GB was estimated for what takes 3 GB."""
    spec = model("google--gemma-4-26B-A4B")
    assert kinds(spec) == {"sliding 1024": 25, "full": 5}
    full, sliding = spec.layers[5].attention, spec.layers[0].attention
    assert isinstance(full, KvAttention) and isinstance(sliding, KvAttention)
    assert (full.head_dim, full.num_kv_heads, sliding.head_dim, sliding.num_kv_heads) == (512, 2, 256, 8)
    assert "v" not in shapes(spec.layers[5]) and "v" in shapes(spec.layers[0])
    context = 131_072
    expected = (5 * 2 * 2 * 512 * context + 25 * 2 * 8 * 256 * 1024) * 2
    assert kv_bytes_per_sequence(spec, context) == expected
    assert expected == pytest.approx(3.0e9, rel=0.05)


def test_gpt_oss_counts_both_kinds() -> None:
    """36.6 KB/token at long context, not 36.0: sliding layers hold their 128 tokens too."""
    spec = model("openai--gpt-oss-120b")
    assert kinds(spec) == {"sliding 128": 18, "full": 18}
    assert kv_bytes_per_token(spec, growing_only=True) == 18 * 2 * 8 * 64 * 2
    assert kv_bytes_per_sequence(spec, 8192) == 18 * 2 * 8 * 64 * 2 * (8192 + 128)
    experts = spec.layers[0].experts
    assert experts is not None and experts.expert_bias == 2 * 2880 + 2880


def test_mla_geometry() -> None:
    spec = model("deepseek-ai--DeepSeek-V3")
    core = spec.layers[-1].attention
    assert isinstance(core, LatentAttention)
    assert (core.num_heads, core.kv_rank, core.rope_dim, core.nope_dim, core.v_head_dim) == (128, 512, 64, 128, 128)
    assert kv_elements_per_token(core) == 576
    got = shapes(spec.layers[-1])
    assert got["q_a"] == (1536, 7168) and got["kv_a"] == (576, 7168)
    assert got["q_b"] == (128 * 192, 1536) and got["kv_b"] == (128 * 256, 512) and got["o"] == (7168, 128 * 128)
    assert {m.fused for m in spec.layers[0].matrices if m.name in ("q_a", "kv_a")} == {"qkv_a"}
    assert [bool(layer.experts) for layer in spec.layers[:5]] == [False, False, False, True, True]
    assert spec.mtp is not None and spec.mtp.n_predict == 1 and not spec.mtp.verified


def test_shared_indexers() -> None:
    spec = model("zai-org--GLM-5.3")
    holders = [layer.attention for layer in spec.layers if isinstance(layer.attention, LatentAttention) and layer.attention.index_heads]
    assert len(holders) == 21
    assert all(isinstance(x.attention, LatentAttention) and x.attention.sparse_topk == 2048 for x in spec.layers)


def test_compressed_attention() -> None:
    """DeepSeek-V4: 2 window-only layers, then compression by 4 (with an indexer) and by 128 in turn."""
    spec = model("deepseek-ai--DeepSeek-V4-Flash")
    assert kinds(spec) == {"sliding 128": 2, "compressed 1/4": 21, "compressed 1/128": 20}
    core = spec.layers[2].attention
    assert isinstance(core, KvAttention)
    assert (core.sparse_topk, core.index_heads, core.k_is_v, core.num_kv_heads, core.local_window) == (512, 64, True, 1, 128)
    assert kv_elements_per_token(core) == 512 / 4 + 128 / 4
    coarse = spec.layers[3].attention
    assert isinstance(coarse, KvAttention) and coarse.sparse_topk is None


def test_block_sparse_attention() -> None:
    spec = model("MiniMaxAI--MiniMax-M3")
    assert kinds(spec) == {"full": 3, "sparse top-2048": 57}
    core = spec.layers[-1].attention
    assert isinstance(core, KvAttention) and (core.index_heads, core.index_head_dim) == (4, 128)
    assert any("num_mtp_modules = 7 contradicts" in note for note in spec.notes)


# ------------------------------------------------------------------------------------------------- states, golden


def test_gated_delta_states() -> None:
    """Qwen3.5-397B: 45 layers x 64 heads x 128 x 128 x 4 B = 189 MB of recurrent state per sequence."""
    spec = model("Qwen--Qwen3.5-397B-A17B")
    assert kinds(spec) == {"state": 45, "full": 15}
    core = spec.layers[0].attention
    assert isinstance(core, StateAttention)
    assert (core.state_elements, core.state_dtype, core.conv_elements) == (64 * 128 * 128, "fp32", (2 * 16 * 128 + 64 * 128) * 3)
    assert 45 * core.state_elements * 4 == pytest.approx(189e6, rel=0.005)
    assert state_bytes_per_sequence(spec) == 45 * (core.state_elements * 4 + core.conv_elements * 2)
    assert core.flop_per_token == 8 * core.state_elements + 2 * 4 * (2 * 16 * 128 + 64 * 128)
    full = spec.layers[3]
    assert shapes(full)["q"] == (2 * 32 * 256, 4096), "the output gate doubles q_proj"


def test_mamba_states_and_blocks() -> None:
    spec = model("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8")
    assert kinds(spec) == {"state": 40, "none": 40, "full": 8}
    core = spec.layers[0].attention
    assert isinstance(core, StateAttention)
    assert core.state_elements == 128 * 64 * 128 and core.state_dtype == "fp32"
    assert core.conv_elements == (128 * 64 + 2 * 8 * 128) * 3
    experts = spec.layers[1].experts
    assert experts is not None and (experts.width, experts.ffn, experts.matrices, experts.top_k) == (1024, 2688, 2, 22)
    assert spec.mtp is not None and len(spec.mtp.layers) == 2


def test_kda_layers() -> None:
    spec = model("moonshotai--Kimi-K3")
    assert kinds(spec) == {"state": 69, "mla": 24}
    core = spec.layers[0].attention
    assert isinstance(core, StateAttention) and core.state_elements == 96 * 128 * 128
    assert isinstance(spec.layers[3].attention, LatentAttention), "layer numbers of the lists start at 1"
    experts = spec.layers[-1].experts
    assert experts is not None and (experts.num_experts, experts.top_k, experts.width) == (896, 16, 3584)


# ------------------------------------------------------------------------------------------------- experts and MLPs


def test_llama4_interleaves_and_chunks() -> None:
    spec = model("meta-llama--Llama-4-Maverick-17B-128E-Instruct")
    assert [bool(layer.experts) for layer in spec.layers[:4]] == [False, True, False, True]
    assert shapes(spec.layers[0])["up"] == (16384, 5120) and shapes(spec.layers[1])["shared_up"] == (8192, 5120)
    assert kinds(spec) == {"sliding 8192": 36, "full": 12}
    assert core_kind(spec.layers[3].attention) == "full"


def test_gemma4_has_a_dense_mlp_beside_the_experts() -> None:
    layer = model("google--gemma-4-26B-A4B").layers[0]
    assert layer.experts is not None and (layer.experts.top_k, layer.experts.ffn) == (8, 704)
    assert shapes(layer)["up"] == (2112, 2816)


def test_nas_blocks_differ() -> None:
    spec = model("nvidia--Llama-3_3-Nemotron-Super-49B-v1")
    assert kinds(spec) == {"full": 49, "none": 31}
    widths = Counter(shapes(layer)["up"][0] for layer in spec.layers)
    assert widths[28672] == 49 and min(widths) == 2816


def test_expert_width_may_be_the_plain_intermediate_size() -> None:
    for stem, ffn in (("mistralai--Mixtral-8x7B-v0.1", 14336), ("MiniMaxAI--MiniMax-M2.5", 1536), ("openai--gpt-oss-20b", 2880)):
        experts = model(stem).layers[0].experts
        assert experts is not None and experts.ffn == ffn


def test_weight_bytes() -> None:
    assert weights_bytes(model("Qwen--Qwen3-32B")) == 2 * 32_762_123_264
    fp8 = model("Qwen--Qwen3-32B-FP8")
    tables = 2 * fp8.embed_params
    assert weights_bytes(fp8) == pytest.approx(32_762_123_264 + tables, rel=1e-4)
    # 61 GB checkpoint: MXFP4 experts (116.8B x 4.25 bit) and 16-bit rest.
    assert weights_bytes(model("openai--gpt-oss-120b")) == pytest.approx(65.2e9, rel=0.03)
    mtp = model("deepseek-ai--DeepSeek-V3")
    assert mtp.mtp is not None
    assert weights_bytes(mtp, with_mtp=True) - weights_bytes(mtp) == mtp.mtp.params
