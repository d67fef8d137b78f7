"""The built-in engine's plain decoding beside transformers' own generate: same model, same prompt, batch 1, one thread. Reported, never asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.verify import family
from planner.verify.builtin import single_thread
from planner.verify.engine import generate
from planner.verify.hf_export import export_llama

OUTPUT_LEN = 64


@pytest.fixture
def shipped() -> family.Family:
    return family.load_family()


def test_builtin_plain_decoding(benchmark: Any, shipped: family.Family) -> None:
    prompt = shipped.encode(family.builtin_prompts()[0].prompt)
    with single_thread():
        run = benchmark.pedantic(lambda: generate(shipped.target, [prompt], OUTPUT_LEN), rounds=15, warmup_rounds=2)
    assert len(run.tokens[0]) == OUTPUT_LEN


def test_transformers_generate(benchmark: Any, shipped: family.Family, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_llama(shipped.target, shipped.tokenizer_file, tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = torch.tensor([shipped.encode(family.builtin_prompts()[0].prompt)])
    options = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "max_new_tokens": OUTPUT_LEN,
        "min_new_tokens": OUTPUT_LEN,
        "pad_token_id": 0,
    }
    with single_thread():
        out = benchmark.pedantic(lambda: model.generate(prompt, eos_token_id=None, **options), rounds=15, warmup_rounds=2)
    assert out.shape[1] == prompt.shape[1] + OUTPUT_LEN
