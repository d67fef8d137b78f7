"""Arms in Hugging Face transformers, in this process: plain greedy decoding, assisted generation and prompt lookup (`ngram`), one sequence.

Rounds are counted by what `generate` streams: one chunk a round, accepted drafts and the bonus token. The rows have the form of a sweep over
servers (`remote.sweep`), so that the same comparison and the same report serve both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from planner.errors import InputError
from planner.verify.compare import Report
from planner.verify.journal import Journal
from planner.verify.prompts import PromptSet
from planner.verify.remote.sweep import Drafter, Progress, Sweep, report_of, row_of, server_name

KINDS = ("external", "ngram")


class Chunks:
    """A streamer that keeps the moment and the size of every chunk behind the prompt."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.at_s.append(time.perf_counter())
        self.sizes.append(int(value.numel()))

    def end(self) -> None: ...


class Transformers:
    """A model and its draft models, loaded once."""

    def __init__(self, sweep: Sweep) -> None:
        from transformers import AutoTokenizer

        self.sweep = sweep
        source = sweep.model_path or str(sweep.case["model"])
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(source)
            self.model = load(source)
            self.drafts = {d: load(d.model) for d in sweep.drafters if d.kind == "external" and d.model}
        except (OSError, ValueError) as error:
            raise InputError("transformers cannot load it", where=source, hint=str(error).splitlines()[0]) from None

    def options(self, drafter: Drafter | None, draft_len: int) -> dict[str, Any]:
        """Arguments of `generate` for an arm, D constant."""
        if drafter is None:
            return {}
        if drafter.kind == "ngram":
            return {"prompt_lookup_num_tokens": draft_len, "max_matching_ngram_size": 4}
        draft = self.drafts[drafter]
        draft.generation_config.update(num_assistant_tokens=draft_len, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
        return {"assistant_model": draft}

    @torch.inference_mode()
    def run(self, prompt: str, drafter: Drafter | None, draft_len: int) -> tuple[Chunks, list[int], int]:
        """(chunks, new tokens, prompt tokens) of one greedy completion of the sweep's output_len, end-of-text ignored."""
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.model.device)
        chunks, n = Chunks(), self.sweep.output_len
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, min_new_tokens=n, eos_token_id=None, pad_token_id=0,
            streamer=chunks, **self.options(drafter, draft_len),
        )  # fmt: skip
        return chunks, out[0, ids.shape[1] :].tolist(), int(ids.shape[1])

    def arm(self, drafter: Drafter | None, draft_len: int, copy: int, prompts: Sequence[str], workload: str) -> dict[str, Any]:
        """All prompts of an arm as one row."""
        times: list[float] = []
        sizes: list[int] = []
        texts, first, lengths = {}, [], []
        self.run(prompts[0], drafter, draft_len)  # every shape once, untimed
        for i, prompt in enumerate(prompts):
            began = time.perf_counter()
            chunks, tokens, prompt_len = self.run(prompt, drafter, draft_len)
            at, mine = chunks.at_s[1:], chunks.sizes[1:]  # the first chunk is the prompt itself
            times.append((at[-1] - at[0]) / max(1, sum(mine) - mine[0]))
            sizes += mine[1:-1]  # the first pass reads the prompt too, the last is cut at the end
            first.append(at[0] - began)
            lengths.append(prompt_len)
            texts[str(i)] = self.tokenizer.decode(tokens)
        survival = [sum(s > i for s in sizes) / max(1, len(sizes)) for i in range(1, draft_len + 1)]
        row = row_of((drafter, draft_len, copy), (workload, 1), times, texts)
        return row | {
            "identity": "transformers, in this process", "tokens_per_s": None, "ttft_s": sum(first) / len(first),
            "acceptance_len": 1.0 if drafter is None else 1.0 + sum(survival),
            "acceptance": None if drafter is None else {"survival_prob": survival, "at_draft_len": draft_len},
            "input_len": round(sum(lengths) / len(lengths)),
        }  # fmt: skip


def load(source: str) -> Any:
    """A causal language model, ready to run."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source)
    return model.eval()


def verify_transformers(sweep: Sweep, folder: Path, prompts: PromptSet, progress: Progress) -> Report:
    """Run (or go on with) a sweep in this process. Raises InputError for what transformers cannot do."""
    for d in sweep.drafters:
        if d.kind not in KINDS or (d.kind == "external" and not d.model):
            raise InputError("transformers drafts with external:MODEL or ngram here", where="--drafter", got=d.kind, expected=" or ".join(KINDS))
    if sweep.batches != (1,):
        raise InputError("assisted generation takes one sequence", where="--batches", got=sweep.batches, expected="1")
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "arms.jsonl", sweep)
    done = {(r["server"], r["workload"]) for r in journal.rows}
    engine: Transformers | None = None
    todo = [(s, w) for w in sweep.workloads for s in sweep.servers]
    for i, ((drafter, draft_len, copy), workload) in enumerate(todo):
        progress(server_name(drafter, draft_len, copy), i, len(todo))
        if (server_name(drafter, draft_len, copy), workload) not in done:
            engine = engine or Transformers(sweep)
            journal.add(engine.arm(drafter, draft_len, copy, prompts.take(workload, sweep.requests_per_seq), workload))
    return report_of(sweep, journal.rows)
