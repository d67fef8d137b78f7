"""Train the built-in family: tokenizer, target, drafters, in that order, each saved as it ends.

`python -m planner.verify.training --out DIR [--only NAME ...]`. Killed, it goes on where it was when the same command is given again. On a GPU,
`--device cuda --longer 20` is what a GPU is for (not run on one yet); what it makes is another family than the shipped one.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from planner.verify import family
from planner.verify.engine import generate
from planner.verify.nets.transformer import Transformer, initialise
from planner.verify.sampling import Sampler
from planner.verify.training.loop import MIX, Recipe, batches, train
from planner.verify.training.losses import block_loss, distillation_loss, head_loss, markov_loss, next_token_loss
from planner.verify.training.tokens import streams, train_tokenizer

LENGTH = family.TRAINED_CONTEXT_LEN
RECIPES = {
    "target": Recipe("target", steps=3600, batch_size=8, learning_rate=3e-3),
    "external": Recipe("external", steps=2200, batch_size=8, learning_rate=4e-3),
    "eagle3": Recipe("eagle3", steps=1300, batch_size=4, learning_rate=4e-3),
    "mtp": Recipe("mtp", steps=1000, batch_size=4, learning_rate=4e-3),
    "dflash": Recipe("dflash", steps=3000, batch_size=4, learning_rate=3e-3),
    "dspark": Recipe("dspark", steps=400, batch_size=4, learning_rate=2e-3),
}
#: Drafts that EAGLE-3 is unrolled over in training; MTP learns the first only, as DeepSeek's module does.
UNROLL = {"eagle3": 4, "mtp": 1}


@dataclass
class Workbench:
    """What every run needs: where to write, and the token streams."""

    out: Path
    work: Path
    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    device: str = "cpu"
    longer: float = 1.0
    """Steps of every recipe, times this."""

    @property
    def log(self) -> Path:
        return self.out / "training_log.jsonl"

    def note(self, row: dict[str, object]) -> None:
        with self.log.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")

    def saved(self, name: str) -> Path:
        return self.out / f"{name}.safetensors"


def workbench(out: Path, device: str = "cpu", longer: float = 1.0) -> Workbench:
    """Tokenizer and streams, made once."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    if not (out / "tokenizer.json").exists():
        train_tokenizer(out / "tokenizer.json")
    tokenizer = family.load_tokenizer(out)
    parts = []
    for side in ("train", "held_out"):
        path = work / f"{side}.npz"
        if not path.exists():
            np.savez(path, **streams(tokenizer, held_out=side == "held_out"))  # type: ignore[arg-type]
        parts.append(dict(np.load(path)))
    return Workbench(out, work, parts[0], parts[1], device, longer)


def held_out_windows(bench: Workbench, workload: str, rows: int = 24) -> Tensor:
    """Windows [rows, LENGTH] spread evenly over a held-out stream."""
    stream = bench.held_out[workload]
    starts = np.linspace(0, len(stream) - LENGTH - 1, rows).astype(int)
    return torch.stack([torch.from_numpy(stream[s : s + LENGTH].astype(np.int64)) for s in starts]).to(bench.device)


def run(net: nn.Module, name: str, loss_of: Callable[[Tensor], Tensor], bench: Workbench, written: dict[str, np.ndarray] | None = None) -> None:
    """Train and save one network unless it is there, with its held-out loss by workload in the log."""
    path, recipe = bench.saved(name), RECIPES[name]
    recipe = replace(recipe, steps=max(1, round(recipe.steps * bench.longer)))
    if path.exists():
        family.load_net(net.to(bench.device), path)
        return
    initialise(net, recipe.seed)
    net.to(bench.device)
    train(net, recipe, loss_of, batches(bench.train, recipe, LENGTH, written), bench.work, bench.log)
    family.save_net(net, path)
    losses = {}
    with torch.no_grad():
        for workload in MIX:
            torch.manual_seed(0)
            losses[workload] = round(float(loss_of(held_out_windows(bench, workload))), 4)
    bench.note({"run": name, "saved": path.name, "parameters": sum(p.numel() for p in net.parameters()), "held_out_loss": losses})
    family.load_net(net, path)


def target_writings(target: Transformer, bench: Workbench, *, rounds: int = 8, rows: int = 96, prompt_len: int = 96) -> dict[str, np.ndarray]:
    """What the target itself writes after training prompts, half greedy and half sampled, [N, LENGTH] by workload: drafters learn its text too."""
    path = bench.work / "written.npz"
    if not path.exists():
        began = time.perf_counter()
        out: dict[str, np.ndarray] = {}
        for workload, share in MIX.items():
            rng = np.random.default_rng(3)
            stream, texts = bench.train[workload], []
            for i in range(max(2, round(rounds * 3 * share))):
                starts = rng.integers(0, len(stream) - prompt_len, rows)
                prompts = [stream[s : s + prompt_len].astype(int).tolist() for s in starts]
                sampler = Sampler(float(i % 2), torch.Generator(bench.device).manual_seed(i))
                texts += [p + t for p, t in zip(prompts, generate(target, prompts, LENGTH - prompt_len, sampler=sampler).tokens, strict=True)]
            out[workload] = np.array(texts, dtype=np.uint16)
        np.savez(path, **out)  # type: ignore[arg-type]
        bench.note({"run": "written", "sequences": {k: len(v) for k, v in out.items()}, "seconds": round(time.perf_counter() - began, 1)})
    return dict(np.load(path))


def main() -> None:
    """Run every stage that is not there yet."""
    parser = argparse.ArgumentParser(prog="python -m planner.verify.training", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES), help="runs; the target must be there for the others")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--longer", type=float, default=1.0, help="steps of every run, times this")
    args = parser.parse_args()
    if not args.longer > 0:
        parser.error(f"--longer {args.longer:g} must be above 0")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    bench = workbench(args.out, args.device, args.longer)
    bench.note({
        "started": args.only, "device": args.device, "longer": args.longer,
        "python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "tokens": {k: len(v) for k, v in bench.train.items()}, "held_out_tokens": {k: len(v) for k, v in bench.held_out.items()},
        "prepared_s": round(time.perf_counter() - began, 1),
    })  # fmt: skip
    target = family.new_target()
    run(target, "target", lambda tokens: next_token_loss(target, tokens), bench)
    target.requires_grad_(False)
    if args.only == ["target"]:
        return
    written = target_writings(target, bench)
    if "external" in args.only:
        small = Transformer(family.EXTERNAL)
        run(small, "external", lambda tokens: distillation_loss(small, target, tokens), bench, written)
    for kind in ("eagle3", "mtp"):
        if kind in args.only:
            head = family.new_head(kind)
            run(head, kind, lambda tokens, head=head, kind=kind: head_loss(head, target, tokens, UNROLL[kind]), bench, written)  # type: ignore[misc]
    if "dflash" in args.only or "dspark" in args.only:
        block = family.new_block()
        run(block, "dflash", lambda tokens: block_loss(block, target, tokens), bench, written)
        block.requires_grad_(False)
        if "dspark" in args.only:
            markov = family.new_markov()
            run(markov, "dspark", lambda tokens: markov_loss(markov, block, target, tokens), bench, written)


if __name__ == "__main__":
    main()
