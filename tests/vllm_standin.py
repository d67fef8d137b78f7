"""Stands in for `vllm serve MODEL --speculative-config JSON ... --port N`: the built-in engine behind its HTTP server, same flags, same metric names.

With FAIL_AT set, the server whose speculative configuration holds that text dies at its start. Like vLLM it wants the key of VLLM_API_KEY.
With DEAF set it does not obey a schedule.
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
    key = os.environ.get("VLLM_API_KEY")
    print(f"non-default args: api_key={key}", flush=True)  # what a log may hold
    draft_len = config.get("num_speculative_tokens", 0)
    tiers = tuple(map(tuple, config.get("num_speculative_tokens_per_batch_size", [])))
    if os.environ.get("DEAF") and tiers:
        tiers = ()
    with serving(Engine(family.target, family.encode, family.tokenizer.decode, factory, draft_len, schedule=tiers, api_key=key), args.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
