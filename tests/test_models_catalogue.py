"""The catalogue agrees with the configs it was built from, resolves names, and is cheap to load."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelConfigError
from planner.models import catalogue, describe_model, read_model
from planner.models.build_catalogue import build
from planner.models.catalogue_facts import ALIASES_OF, RENAMED

CONFIGS = Path(__file__).parent / "data" / "configs"
FILES = sorted(p for p in CONFIGS.glob("*_config.json") if not p.name.endswith("_hf_quant_config.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_entries_equal_their_configs(file: Path) -> None:
    """One reader, two sources: everything but the notes and the source line is the same."""
    direct = read_model(file)
    entry = read_model(RENAMED.get(direct.id, direct.id))
    assert entry.layers == direct.layers and entry.mtp == direct.mtp and entry.quant == direct.quant
    for name in ("hidden_size", "vocab_size", "tie_embeddings", "base_dtype", "max_context_tokens", "vector_params", "total_params"):
        assert getattr(entry, name) == getattr(direct, name), name


def test_the_committed_catalogue_is_what_the_script_writes(tmp_path: Path) -> None:
    count = build(CONFIGS, tmp_path)
    fresh = {p.name: p.read_text() for p in tmp_path.glob("*.json")}
    assert fresh == {p.name: p.read_text() for p in catalogue.FOLDER.glob("*.json")}
    assert len(fresh) == count + 1 == len(catalogue.catalogue_ids()) + 1


def test_every_id_and_alias_reads() -> None:
    for name in catalogue.catalogue_ids():
        spec = read_model(name)
        assert spec.id == name and spec.source
        assert catalogue.catalogue_entry(name) is not None
    for target, names in ALIASES_OF.items():
        for name in names:
            assert read_model(name).total_params == read_model(target).total_params


@pytest.mark.parametrize(
    "asked, id",
    [
        ("qwen/qwen3-32b", "Qwen/Qwen3-32B"),
        ("QWEN3-32B", "Qwen/Qwen3-32B"),
        ("gpt-oss-120b", "openai/gpt-oss-120b"),
        ("meta-llama/llama-3.3-70b-instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("zai-org/GLM-4.7", "zai-org/GLM-4.7"),
    ],
)
def test_names(asked: str, id: str) -> None:
    assert read_model(asked).id == id
    assert read_model(asked, id="mine").id == "mine"


def test_table() -> None:
    rows = {row["id"]: row for row in catalogue.catalogue_table()}
    assert rows["Qwen/Qwen3-32B"] == {
        "id": "Qwen/Qwen3-32B", "total_params": 32_762_123_264, "active_params": 32_762_123_264, "max_context_tokens": 40960,
        "quant": "none",
    }  # fmt: skip
    assert set(rows) == set(catalogue.catalogue_ids())


def test_written_gemma_equals_the_quantised_twin() -> None:
    assert read_model("google/gemma-4-31B-it").layers == read_model("nvidia/Gemma-4-31B-IT-NVFP4").layers


def test_alias_is_noted() -> None:
    assert any("is read as meta-llama/Meta-Llama-3.1-70B" in note for note in read_model("meta-llama/Llama-3.3-70B-Instruct").notes)


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_hub(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_hub)
    with pytest.raises(ModelConfigError, match=r"Did you mean Qwen/Qwen3-32B.*draftline\[hub\].*path of its config.json"):
        read_model("Qwen/Qwen3-33B")
    with pytest.raises(ModelConfigError, match="unknown model"):
        read_model("no such model")
    for bad in ("", "  ", 3, None):
        with pytest.raises(ModelConfigError, match="no model given"):
            read_model(bad)  # type: ignore[arg-type]


def test_hub_fallback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With huggingface_hub importable an unknown id is fetched; a missing quantisation file is no fault, a lost connection is one."""
    file = tmp_path / "config.json"
    file.write_text((CONFIGS / "Qwen--Qwen3-8B_config.json").read_text())

    class EntryNotFoundError(OSError):
        """Named as the hub's client names a file that the repository lacks."""

    class Hub:
        @staticmethod
        def hf_hub_download(name: str, what: str) -> str:
            if what != "config.json":
                raise ConnectionError("reset") if "lost" in name else EntryNotFoundError("404")
            if "missing" in name:
                raise EntryNotFoundError("404")
            return str(file)

    class Local:
        HF_HUB_OFFLINE = True
        ENDPOINT = "https://hub.example"

    Hub.constants = Local  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    spec = read_model("someone/unlisted-model-a")
    assert spec.id == "someone/unlisted-model-a" and spec.num_layers == 36
    with pytest.raises(ModelConfigError, match="404"):
        read_model("someone/missing-model")
    with pytest.raises(ModelConfigError, match="did not say whether there is a hf_quant_config.json"):
        read_model("someone/lost-connection")


def test_loading_needs_no_heavy_library() -> None:
    """Without pydantic, numpy, pandas or torch."""
    code = (
        "import sys; from planner.models import read_model; read_model('nvidia/GLM-5.2-NVFP4');"
        "print([m for m in ('pydantic', 'numpy', 'torch', 'pandas') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout.strip() == "[]"


def test_cached() -> None:
    assert read_model("Qwen/Qwen3-8B") is read_model("Qwen/Qwen3-8B")


def test_description_is_plain() -> None:
    text = describe_model(read_model("deepseek-ai/DeepSeek-V3"))
    assert json.loads(json.dumps(text)) == text
    assert text["mtp"]["n_predict"] == 1 and text["quantisation"]["weights"]["experts"] == "fp8"
    assert [part["count"] for part in text["layers"]] == [3, 58]
