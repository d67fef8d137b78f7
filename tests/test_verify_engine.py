"""The built-in engine: every drafter kind is lossless, counters are right, a planted bug is caught, other engines agree on the exported models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from planner.verify import engine, family
from planner.verify.drafters import ExternalDrafter, HeadDrafter, NgramDrafter, ParallelDrafter, SuffixDrafter
from planner.verify.engine import Drafter, generate
from planner.verify.graphs import Graphed
from planner.verify.hf_export import export_llama
from planner.verify.inflate import Int8Linear, inflate, quantise_int8
from planner.verify.lookup import SuffixIndex, prompt_lookup
from planner.verify.lossless import compare_greedy, greedy_gap, tie_logit_gap
from planner.verify.nets.heads import BlockDrafter, FeatureHead, MarkovHead
from planner.verify.nets.transformer import Shape, Transformer, initialise
from planner.verify.sampling import Draft, Sampler, accept

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("external", "eagle3", "mtp", "dflash", "dspark", "ngram", "suffix")
OUTPUT_LEN = 24


@pytest.fixture(scope="module")
def shipped() -> family.Family:
    return family.load_family()


@pytest.fixture(scope="module")
def prompts(shipped: family.Family) -> list[list[int]]:
    """Two of each workload, of different lengths."""
    texts = family.builtin_prompts()
    rows = [[r.prompt for r in texts if r.category == c][i] for c in ("code", "prose", "structured") for i in (0, 1)]
    return [shipped.encode(text)[: 40 + 17 * i] for i, text in enumerate(rows)]


@pytest.fixture(scope="module")
def plain(shipped: family.Family, prompts: list[list[int]]) -> list[list[int]]:
    return [generate(shipped.target, [p], OUTPUT_LEN).tokens[0] for p in prompts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
@pytest.mark.parametrize("num_seqs", [1, 4])
def test_greedy_output_is_that_of_plain_decoding(
    shipped: family.Family, prompts: list[list[int]], plain: list[list[int]], kind: str, draft_len: int, num_seqs: int
) -> None:
    for first in range(0, 4, num_seqs):
        chosen = slice(first, first + num_seqs)
        run = generate(shipped.target, prompts[chosen], OUTPUT_LEN, drafter=shipped.drafter(kind), draft_len=draft_len)
        verdict = compare_greedy(shipped.target, prompts[chosen], plain[chosen], run.tokens)
        assert verdict.holds, verdict
        assert verdict.identical + verdict.ties == num_seqs
        assert 1.0 <= run.acceptance_len <= 1.0 + draft_len
        emitted = np.array(run.rounds.accepted).sum(axis=0) + len(run.rounds) + 1
        assert (emitted >= OUTPUT_LEN).all()


def test_model_drafters_do_draft(shipped: family.Family, prompts: list[list[int]]) -> None:
    """A drafter that never has a token accepted is lossless too; these were trained."""
    for kind in ("external", "eagle3", "mtp", "dflash", "dspark"):
        run = generate(shipped.target, prompts, OUTPUT_LEN, drafter=shipped.drafter(kind), draft_len=4)
        assert run.acceptance_len > 1.5, kind


def test_plain_decoding_of_a_batch_is_that_of_each_alone(shipped: family.Family, prompts: list[list[int]], plain: list[list[int]]) -> None:
    run = generate(shipped.target, prompts, OUTPUT_LEN)
    verdict = compare_greedy(shipped.target, prompts, plain, run.tokens)
    assert verdict.holds and run.acceptance_len == 1.0


@pytest.mark.parametrize("kind", ["external", "dflash", "suffix"])
def test_a_planted_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, shipped: family.Family, prompts: list[list[int]], plain: list[list[int]], kind: str
) -> None:
    """One token too many accepted: the check that guards every kind must see it."""

    def one_too_many(logits: torch.Tensor, draft: Draft, sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        accepted, _ = accept(logits, draft, sampler)
        accepted = torch.minimum(accepted + 1, draft.lengths)
        return accepted, logits.argmax(dim=-1).gather(1, accepted[:, None]).squeeze(1)

    monkeypatch.setattr(engine, "accept", one_too_many)
    run = generate(shipped.target, prompts, OUTPUT_LEN, drafter=shipped.drafter(kind), draft_len=4)
    verdict = compare_greedy(shipped.target, prompts, plain, run.tokens)
    assert not verdict.holds and all(gap > 1e-3 for _, _, gap in verdict.wrong)


# ---- sampling: a vocabulary small enough to enumerate ------------------------------------------------------------------------------

SMALL = Shape(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=8, intermediate_size=48, vocab_size=6)
SAMPLES = 6000


def small_family() -> tuple[Transformer, dict[str, Drafter]]:
    """Random networks with logits spread enough that drafts are both accepted and rejected."""
    target, external = Transformer(SMALL, (1, 2)), Transformer(dataclasses.replace(SMALL, num_hidden_layers=1))
    heads = {k: FeatureHead(SMALL, SMALL, 32 * (2 if k == "eagle3" else 1), recursive_state=k == "eagle3") for k in ("eagle3", "mtp")}
    block, markov = BlockDrafter(dataclasses.replace(SMALL, num_hidden_layers=1), SMALL, 64, 4), MarkovHead(32)
    for seed, net in enumerate((target, external, *heads.values(), block, markov)):
        initialise(net, seed)
        net.eval().requires_grad_(False)
    with torch.no_grad():
        target.embed_tokens.weight.mul_(4.0)
        external.embed_tokens.weight.mul_(1.0)  # its own opinion, so that drafts are rejected too
        markov.confidence.bias.fill_(0.4)
        markov.confidence.weight.mul_(30.0)
    return target, {
        "external": ExternalDrafter(external), "eagle3": HeadDrafter("eagle3", heads["eagle3"], target),
        "mtp": HeadDrafter("mtp", heads["mtp"], target),
        "dflash": ParallelDrafter(block, target), "dspark": ParallelDrafter(block, target, markov, min_survival=0.5), "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
    }  # fmt: skip


def exact_pairs(target: Transformer, prompt: list[int]) -> np.ndarray:
    """P(second and third new token) [V, V], by enumeration over the first."""
    vocab = SMALL.vocab_size

    def after(prefix: list[int]) -> np.ndarray:
        tokens = torch.tensor([prefix])
        return torch.softmax(target.logits(target(tokens, torch.arange(len(prefix))[None]).final[0, -1]).double(), dim=-1).numpy()

    first = after(prompt)
    pairs = np.zeros((vocab, vocab))
    for a in range(vocab):
        second = after([*prompt, a])
        for b in range(vocab):
            pairs[b] += first[a] * second[b] * after([*prompt, a, b])
    return pairs


#: Every token has followed a 2 before, so that look-up drafts in every round.
PROMPT = [2, 0, 1, 2, 1, 4, 2, 3, 0, 2, 4, 5, 2, 5, 3, 2, 2, 1, 2]


def chi_square(kind: str, *, seed: int) -> tuple[float, float]:
    """(p value, acceptance length) of SAMPLES sampled continuations against the exact distribution."""
    target, drafters = small_family()
    expected = exact_pairs(target, PROMPT).ravel()
    sampler = Sampler(1.0, torch.Generator().manual_seed(seed))
    run = generate(target, [PROMPT] * SAMPLES, 3, drafter=drafters[kind], draft_len=2, sampler=sampler)
    tokens = np.array(run.tokens)
    seen = np.bincount(tokens[:, 1] * SMALL.vocab_size + tokens[:, 2], minlength=SMALL.vocab_size**2)
    large = expected * SAMPLES >= 5
    seen_cells = np.append(seen[large], seen[~large].sum())
    expected_cells = np.append(expected[large], expected[~large].sum()) * SAMPLES
    keep = expected_cells > 0
    return float(stats.chisquare(seen_cells[keep], expected_cells[keep]).pvalue), run.acceptance_len


def test_the_chi_square_test_has_power() -> None:
    """With 6,000 samples and 35 degrees of freedom, moving 6 % of the probability (w = 0.12 at equal cells) is seen with 99 % power at level 1e-4."""
    noncentrality = SAMPLES * 0.12**2
    critical = stats.chi2.ppf(1 - 1e-4, 35)
    assert stats.ncx2.sf(critical, 35, noncentrality) > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_has_the_targets_distribution(kind: str) -> None:
    p_value, acceptance_len = chi_square(kind, seed=11)
    assert p_value > 1e-4, p_value
    assert 1.04 < acceptance_len < 2.95  # both branches of rejection sampling were taken


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Drawing from p instead of the residual after a rejection is the classic mistake; it must not pass."""
    monkeypatch.setattr("planner.verify.sampling.residual", lambda follow, draft, accepted: follow)
    assert chi_square(kind, seed=11)[0] < 1e-6


# ---- parts ---------------------------------------------------------------------------------------------------------------------


def test_prompt_lookup_takes_the_earliest_longest_match() -> None:
    assert prompt_lookup([1, 2, 3, 9, 1, 2, 3, 4, 5, 1, 2, 3], 2) == [9, 1]
    assert prompt_lookup([5, 1, 2, 8, 3, 1, 2, 3, 1, 2], 4) == [3, 1, 2]  # three tokens match before two do
    assert prompt_lookup([1, 2, 3, 4], 4) == []
    assert prompt_lookup([7], 4) == []


def test_suffix_index_follows_the_majority_and_stops_when_unsure() -> None:
    index = SuffixIndex(min_prob=0.4)
    said = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    index.extend(said, 0)
    assert index.draft(said, 3)[0] in (3, 4)
    assert index.draft([9, 9], 3) == []
    sure = SuffixIndex(min_prob=0.9)
    sure.extend([1, 2, 3] * 5, 0)
    assert sure.draft([1, 2, 3] * 5, 5) == [1, 2, 3, 1, 2]


def test_greedy_acceptance_counts_only_what_a_row_drafted() -> None:
    logits = torch.full((2, 4, 5), -1.0)
    for row in range(2):
        for at, token in enumerate((1, 2, 3, 4)):
            logits[row, at, token] = 1.0
    draft = Draft(torch.tensor([[1, 2, 0], [1, 2, 3]]), torch.tensor([1, 3]))
    accepted, follow = accept(logits, draft, Sampler())
    assert accepted.tolist() == [1, 3] and follow.tolist() == [2, 4]


def test_a_pass_over_all_slots_is_the_pass_over_those_in_use(shipped: family.Family, prompts: list[list[int]]) -> None:
    """What a captured graph computes: fixed shapes, every slot under the mask, stale ones beyond the end among them."""
    batch, cache = engine.prefill(shipped.target, prompts[:3], max(map(len, prompts[:3])) + 20, Sampler())
    with torch.inference_mode():
        cache.k[:, :, -15:], cache.v[:, :, -15:] = 7.0, 7.0  # what a rejected draft may have left
    for rows, width in ((slice(0, 3), 4), (slice(0, 3), 1)):
        tokens = torch.tensor([[5, 6, 7, 8]] * 3)[rows, :width]
        positions = (batch.lengths - 1)[rows, None] + torch.arange(width)
        with torch.inference_mode():
            usual = shipped.target(tokens, positions, cache).final
            masked = Graphed(shipped.target)(tokens, positions, cache).final
        assert float((usual - masked).abs().max()) < 1e-4
    alone, one = engine.prefill(shipped.target, prompts[:1], len(prompts[0]) + 20, Sampler())
    last, at = alone.span(alone.lengths - 1, 1)
    graphed = Graphed(shipped.target)
    with torch.inference_mode():
        one.k[:, :, -15:] = 7.0
        assert float((shipped.target(last, at, one).final - graphed(last, at, one).final).abs().max()) < 1e-4
        with pytest.raises(ValueError, match="one cache"):
            graphed(last, at, cache)


def test_the_gap_to_greedy_decoding_is_seen(shipped: family.Family, prompts: list[list[int]], plain: list[list[int]]) -> None:
    assert greedy_gap(shipped.target, prompts[0], plain[0]) <= tie_logit_gap(shipped.target)
    wrong = [*plain[0][:5], (plain[0][5] + 1) % 2048, *plain[0][6:]]
    assert greedy_gap(shipped.target, prompts[0], wrong) > 0.1


def test_draft_beyond_the_block_is_refused(shipped: family.Family, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="blocks of 8 drafts"):
        generate(shipped.target, prompts[:1], 4, drafter=shipped.drafter("dflash"), draft_len=9)


@pytest.mark.parametrize(
    "larger",
    [
        {"intermediate_size": 2048},
        {"hidden_size": 320, "intermediate_size": 640},
        {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 7},
        {"hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 1024},
    ],
    ids=["mlp", "stream", "heads and layers", "all"],
)
def test_inflation_changes_cost_and_nothing_else(
    shipped: family.Family, prompts: list[list[int]], plain: list[list[int]], larger: dict[str, int]
) -> None:
    wide = inflate(shipped.target, dataclasses.replace(family.TARGET, **larger))
    assert sum(p.numel() for p in wide.parameters()) > 1.4 * sum(p.numel() for p in shipped.target.parameters())
    tokens = torch.tensor([prompts[0]])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        before, after = (net.logits(net(tokens, positions).final) for net in (shipped.target, wide))
    assert float((before - after).abs().max()) < 1e-4
    for kind in ("eagle3", "mtp", "dflash", "external"):
        run = generate(wide, prompts[:4], OUTPUT_LEN, drafter=shipped.drafter(kind), draft_len=4)
        assert compare_greedy(shipped.target, prompts[:4], plain[:4], run.tokens).holds
        narrow = generate(shipped.target, prompts[:4], OUTPUT_LEN, drafter=shipped.drafter(kind), draft_len=4)
        assert len(run.rounds) == len(narrow.rounds), f"{kind} reads other features of the inflated target"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"intermediate_size": 100}, "below the model's"),
        ({"num_hidden_layers": 3}, "below"),
        ({"head_dim": 64}, "must stay 32"),
        ({"num_key_value_heads": 1}, "gqa_group_size"),
    ],
)
def test_inflation_refuses_what_it_cannot_pad(shipped: family.Family, wrong: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        inflate(shipped.target, dataclasses.replace(family.TARGET, **wrong))


def test_int8_weights_say_nearly_the_same(shipped: family.Family, prompts: list[list[int]]) -> None:
    small = quantise_int8(shipped.target)
    assert sum(isinstance(m, Int8Linear) for m in small.modules()) == 7 * family.TARGET.num_hidden_layers
    tokens = torch.tensor([prompts[0]])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        exact = torch.log_softmax(shipped.target.logits(shipped.target(tokens, positions).final), dim=-1)
        rounded = torch.log_softmax(small.logits(small(tokens, positions).final), dim=-1)
    assert float((exact.exp() * (exact - rounded)).sum(-1).mean()) < 0.02  # KL in nats
    run = generate(small, prompts[:2], OUTPUT_LEN, drafter=shipped.drafter("external"), draft_len=4)
    alone = [generate(small, [p], OUTPUT_LEN).tokens[0] for p in prompts[:2]]
    # bf16 activations round by 0.4 %: rows may part at near-ties that float32 would not have
    assert sum(a == b for a, b in zip(run.tokens, alone, strict=True)) >= 1


@pytest.mark.parametrize("name", ["target", "external"])
def test_hugging_face_export_has_the_same_logits(shipped: family.Family, tmp_path: Path, prompts: list[list[int]], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    net = shipped.target if name == "target" else shipped.external
    export_llama(net, shipped.tokenizer_file, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.tensor([prompts[0]])
    with torch.no_grad():
        ours = net.logits(net(tokens, torch.arange(tokens.shape[1])[None]).final)
        assert float((ours - theirs(tokens).logits).abs().max()) < 1e-4
        scale = float(ours.abs().max())
        assert float((ours - theirs(tokens).logits).abs().max()) < 1e-5 * max(1.0, scale)


def test_transformers_assisted_generation_agrees(shipped: family.Family, tmp_path: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    transformers = pytest.importorskip("transformers")
    models: dict[str, Any] = {}
    for name, net in (("target", shipped.target), ("external", shipped.external)):
        export_llama(net, shipped.tokenizer_file, tmp_path / name)
        models[name] = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
    for prompt, expected in list(zip(prompts, plain, strict=True))[:3]:
        out = models["target"].generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), assistant_model=models["external"], do_sample=False,
            max_new_tokens=OUTPUT_LEN, min_new_tokens=OUTPUT_LEN, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert compare_greedy(shipped.target, [prompt], [expected], [out[0, len(prompt) :].tolist()]).holds


def test_what_ships_is_small_and_complete(shipped: family.Family) -> None:
    weights = list(family.data_folder().glob("*.safetensors"))
    assert {p.stem for p in weights} == {"target", "external", "eagle3", "mtp", "dflash", "dspark"}
    assert sum(p.stat().st_size for p in weights) <= 6_000_000
    assert family.TARGET.gqa_group_size == 4
    assert {r.category for r in family.builtin_prompts()} == {"code", "prose", "structured"}
