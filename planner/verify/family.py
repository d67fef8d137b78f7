"""The shipped family: one target, its drafters, one tokenizer. Weights are fp16 safetensors in `family_data/`, computed with in float32.

The target's 2.1 M parameters and all drafters share 6 MB; that is why it is not larger. Every drafter head reads the target's embedding and
LM head, as EAGLE-3, MTP and DFlash heads do, so that only what is its own is stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from planner.verify.drafters import ExternalDrafter, HeadDrafter, NgramDrafter, ParallelDrafter, SuffixDrafter
from planner.verify.engine import Drafter
from planner.verify.nets.heads import BlockDrafter, FeatureHead, MarkovHead
from planner.verify.nets.transformer import Shape, Transformer

TARGET = Shape(
    hidden_size=192, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=512, vocab_size=2048
)
EXTERNAL = Shape(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=192, vocab_size=2048
)
#: The heads' own layer(s); hidden size is their width, half of the target's.
HEAD = Shape(hidden_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=192, vocab_size=2048)
BLOCK = Shape(hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=192, vocab_size=2048)
#: Tokens of a block drafter's pass: the newest token and up to eight drafts.
BLOCK_SIZE = 9
#: Layers whose output the EAGLE-3 and DFlash heads read: low, middle, high.
TAPS = (1, 2, 4)
#: Id of the token that starts every text.
BOS = 1
#: Tokens of context that the family was trained with.
TRAINED_CONTEXT_LEN = 256


def data_folder() -> Path:
    """Where the weights lie in the installed package."""
    return Path(str(files("planner.verify") / "family_data"))


def load_tokenizer(folder: Path | None = None) -> Tokenizer:
    return Tokenizer.from_file(str((folder or data_folder()) / "tokenizer.json"))


def save_net(net: nn.Module, path: Path) -> None:
    """Trainable parameters only, fp16."""
    save_file({n: p.detach().half().cpu().contiguous() for n, p in net.named_parameters() if p.requires_grad}, path)


def load_net(net: nn.Module, path: Path) -> nn.Module:
    """Fill `net` from a file of `save_net`; a name that is missing or too many is an error of torch's."""
    tensors = {n: t.float() for n, t in load_file(path).items()}
    wanted = {n for n, p in net.named_parameters() if p.requires_grad}
    if wanted != tensors.keys():
        raise ValueError(f"{path}: holds {sorted(tensors.keys() - wanted)} too many and lacks {sorted(wanted - tensors.keys())}")
    for n, p in net.named_parameters():
        if p.requires_grad:
            p.data.copy_(tensors[n])
    return net.eval()


def new_target() -> Transformer:
    return Transformer(TARGET, TAPS)


def new_head(kind: str) -> FeatureHead:
    """`eagle3` reads three layers and its own state; `mtp` the final hidden state."""
    if kind == "eagle3":
        return FeatureHead(HEAD, TARGET, len(TAPS) * TARGET.hidden_size, recursive_state=True)
    return FeatureHead(HEAD, TARGET, TARGET.hidden_size, recursive_state=False)


def new_block() -> BlockDrafter:
    return BlockDrafter(BLOCK, TARGET, len(TAPS) * TARGET.hidden_size, BLOCK_SIZE)


def new_markov() -> MarkovHead:
    return MarkovHead(TARGET.hidden_size)


@dataclass(frozen=True)
class Prompt:
    """A line of a prompt set."""

    id: str
    category: str
    prompt: str


@lru_cache(maxsize=1)
def builtin_prompts() -> tuple[Prompt, ...]:
    """Held-out text of the three workloads, as the family's own prompt set."""
    lines = (data_folder() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Prompt(r["id"], r["category"], r["prompt"]) for r in map(json.loads, lines))


@dataclass(frozen=True)
class Family:
    """The loaded networks; drafters hold state of a run, so each run gets a new one."""

    folder: Path
    tokenizer: Tokenizer
    target: Transformer
    external: Transformer
    eagle3: FeatureHead
    mtp: FeatureHead
    block: BlockDrafter
    markov: MarkovHead

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return [BOS, *ids]

    def drafter(self, kind: str) -> Drafter:
        """A fresh drafter of a kind."""
        match kind:
            case "external":
                return ExternalDrafter(self.external)
            case "eagle3" | "mtp":
                return HeadDrafter(kind, self.eagle3 if kind == "eagle3" else self.mtp, self.target)
            case "dflash":
                return ParallelDrafter(self.block, self.target)
            case "dspark":
                return ParallelDrafter(self.block, self.target, self.markov)
            case "ngram":
                return NgramDrafter()
            case "suffix":
                return SuffixDrafter()
        raise ValueError(f"the built-in family has no {kind!r} drafter; it has {', '.join(KINDS)}")


#: Every kind that the family can draft with.
KINDS = ("external", "eagle3", "mtp", "dflash", "dspark", "ngram", "suffix")


def load_family(folder: Path | None = None) -> Family:
    """All networks, in float32, ready to run."""
    at = folder or data_folder()
    nets = {
        "target": new_target(), "external": Transformer(EXTERNAL), "eagle3": new_head("eagle3"), "mtp": new_head("mtp"), "dflash": new_block(),
        "dspark": new_markov(),
    }  # fmt: skip
    for name, net in nets.items():
        load_net(net, at / f"{name}.safetensors").requires_grad_(False)
    target, external, eagle3, mtp, block, markov = nets.values()
    return Family(at, load_tokenizer(at), target, external, eagle3, mtp, block, markov)  # type: ignore[arg-type]
