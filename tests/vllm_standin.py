"""Stands in for `vllm serve MODEL --speculative-config JSON ... --port N`: the built-in engine behind its HTTP server, same flags, same metric names.

With FAIL_AT set, the server whose speculative configuration holds that text dies at its start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading

import torch

from planner.verify.family import load_family
from planner.verify.server import Engine, serving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--speculative-config", default="{}")
    parser.add_argument("--port", type=int)
    args, _ = parser.parse_known_args()
    if os.environ.get("FAIL_AT") and os.environ["FAIL_AT"] in args.speculative_config:
        sys.exit("out of memory")
    torch.set_num_threads(1)
    config, family = json.loads(args.speculative_config), load_family()
    kind = {None: None, "ngram": "ngram", "eagle3": "eagle3", "draft_model": "external"}[config.get("method")]
    factory = None if kind is None else lambda: family.drafter(kind)
    with serving(Engine(family.target, family.encode, family.tokenizer.decode, factory, config.get("num_speculative_tokens", 0)), args.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
