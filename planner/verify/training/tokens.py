"""The family's tokenizer (byte-level BPE, 2,048 entries) and token streams of the corpus."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from planner.verify.training import corpus

#: In this order, from id 0. `<mask>` is what a block drafter is asked to fill.
SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>")
VOCAB_SIZE = 2048


def train_tokenizer(out: Path, *, chars_per_workload: int = 2_000_000) -> Tokenizer:
    """Byte-level BPE over equal shares of the three workloads (prose is smaller and given whole)."""
    rng = random.Random(0)
    texts = []
    for found in corpus.documents(held_out=False).values():
        docs = rng.sample(found, len(found))
        size = 0
        for d in docs:
            if size > chars_per_workload:
                break
            texts.append(d.text)
            size += len(d.text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(out))
    return tokenizer


def streams(tokenizer: Tokenizer, *, held_out: bool) -> dict[str, np.ndarray]:
    """All documents of a workload as one stream: `<bos> text <eos> <bos> text ...`, uint16."""
    bos, eos = SPECIAL.index("<bos>"), SPECIAL.index("<eos>")
    out = {}
    for workload, docs in corpus.documents(held_out=held_out).items():
        ids: list[int] = []
        for encoded in tokenizer.encode_batch([d.text for d in docs]):
            ids += [bos, *encoded.ids, eos]
        out[workload] = np.array(ids, dtype=np.uint16)
    return out
