"""Paste-ready engine settings for a recommendation. Field names and rules: facts on vLLM 0.33, SGLang 0.5.23, TensorRT-LLM (2026), llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planner.deployment import QUANTISED, Deployment
from planner.search import Arm

VLLM_METHOD = {
    "external": "draft_model",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "dflash": "dflash",
    "dspark": "dspark",
    "pard": "draft_model",
    "ngram": "ngram",
    "suffix": "suffix",
}
SGLANG_ALGORITHM = {"external": "STANDALONE", "eagle3": "EAGLE3", "mtp": "NEXTN", "dflash": "DFLASH", "dspark": "DSPARK", "ngram": "NGRAM"}
TRTLLM_TYPE = {
    "external": "Draft_Target",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "pard": "PARD",
    "ngram": "NGram",
    "suffix": "SA",
}
LLAMACPP_TYPE = {
    "external": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
    "ngram": "ngram-simple",
}
_LLAMACPP_PATTERN = 4
"""Tokens that must have occurred before, as vLLM's prompt_lookup_max here; never more than D."""
NO_MODEL = ("mtp", "ngram", "suffix")


def exports_of(
    off: Deployment, arm: Arm, schedule: Mapping[str, Any] | None, recommendations: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """{engine: {"command" or "config", "notes"}} for every engine that has the method. D is the largest recommended one."""
    lengths = [int(r["draft_len"]) for r in recommendations if (r["drafter"], r["drafter_model"]) == (arm.kind, arm.model) and r["draft_len"]]
    if not lengths:
        return {}
    ranges = [list(map(int, r)) for r in schedule["ranges"]] if schedule else []
    most = max([*lengths, *(r[2] for r in ranges)])
    kind, model = arm.kind or "", arm.model
    batch = max(int(r["num_seqs"] or 1) for r in recommendations)
    out = {
        "vllm": _vllm(off, kind, model, most, ranges, batch),
        "sglang": _sglang(off, kind, model, most, batch),
        "trtllm": _trtllm(off, kind, model, most, ranges, batch),
        "llamacpp": _llamacpp(kind, model, most),
    }
    kept = {engine: body for engine, body in out.items() if body is not None}
    own = [f"the weights are taken as {w}: serve a checkpoint stored so" for w in _requantised(off)]
    if arm.dep.extra_gpus:
        own.append(f"the drafter runs on {arm.dep.extra_gpus} GPU(s) of its own: set that up in the engine's own way, no flag above does it")
    return {engine: body | {"notes": [*body["notes"], *own]} for engine, body in kept.items()}


def _requantised(off: Deployment) -> list[str]:
    """Storage dtypes that the plan assumes and the checkpoint does not have."""
    quant, base = off.model.quant, off.model.base_dtype
    stored: dict[str, str] = {c: quant.weights_dtype(c, base) for c in QUANTISED}  # type: ignore[arg-type]
    return sorted({off.dtypes.weights[c] for c in stored if off.dtypes.weights.get(c, stored[c]) != stored[c]})


def _head(kind: str, model: str | None) -> str | None:
    return None if kind in NO_MODEL else model or "ORG/HEAD"


def _vllm(off: Deployment, kind: str, model: str | None, most: int, ranges: list[list[int]], batch: int) -> dict[str, Any] | None:
    if kind not in VLLM_METHOD:
        return None
    spec: dict[str, Any] = {"method": VLLM_METHOD[kind], "num_speculative_tokens": most}
    notes = ["K=0 inside a schedule costs 7-22 % against no speculative config: where off is best for all your traffic, omit the flag"]
    if (head := _head(kind, model)) is not None:
        spec["model"] = head
    if kind == "pard":
        spec["parallel_drafting"] = True
    if kind == "ngram":
        spec |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if len(ranges) > 1 and kind not in ("suffix", "dspark") and off.layout.dp == 1:
        spec["num_speculative_tokens_per_batch_size"] = ranges
    widest = (
        [min(hi, batch) * (1 + d) for lo, hi, d in ranges if lo <= batch] if "num_speculative_tokens_per_batch_size" in spec else [batch * (1 + most)]
    )
    per_rank = -(-batch // off.layout.dp)  # vLLM's limits are per data-parallel engine
    graph = -(-max(widest) // off.layout.dp)
    tokens = int(off.chunk_tokens)
    slots = most * per_rank if kind in ("dflash", "pard") else per_rank
    command = (
        f"vllm serve {off.model.id} {_vllm_layout(off)}--max-num-seqs {per_rank}"
        f" --max-num-batched-tokens {max(tokens, 2 * slots)} --compilation-config '{json.dumps({'max_cudagraph_capture_size': graph})}'"
        f" --speculative-config '{json.dumps(spec)}'"
    )
    notes.append(f"max_cudagraph_capture_size {graph} (running requests x (1 + D), the widest tier) keeps verification inside a captured graph")
    return {"command": command, "speculative_config": spec, "notes": notes}


def _vllm_layout(off: Deployment) -> str:
    """Parallelism and cache flags, each only where it differs from the default."""
    layout = off.layout
    flags = [f"--tensor-parallel-size {layout.tp}"]
    flags += [f"--pipeline-parallel-size {layout.pp}"] if layout.pp > 1 else []
    flags += [f"--data-parallel-size {layout.dp}"] if layout.dp > 1 else []
    flags += ["--enable-expert-parallel"] if layout.ep > 1 else []
    flags += ["--kv-cache-dtype fp8"] if off.dtypes.kv == "fp8" else []
    return " ".join(flags) + " "


def _sglang_layout(off: Deployment) -> str:
    """SGLang counts tp over all ranks of attention and experts: attention data parallelism divides it."""
    layout = off.layout
    flags = [f"--tp {layout.tp * layout.dp}"]
    flags += [f"--pp {layout.pp}"] if layout.pp > 1 else []
    flags += [f"--dp {layout.dp} --enable-dp-attention"] if layout.dp > 1 else []
    flags += [f"--ep {layout.ep}"] if layout.ep > 1 else []
    flags += ["--kv-cache-dtype fp8_e4m3"] if off.dtypes.kv == "fp8" else []
    return " ".join(flags)


def _sglang(off: Deployment, kind: str, model: str | None, most: int, batch: int) -> dict[str, Any] | None:
    if kind not in SGLANG_ALGORITHM:
        return None
    flags = [f"--speculative-algorithm {SGLANG_ALGORITHM[kind]}"]
    if (head := _head(kind, model)) is not None:
        flags.append(f"--speculative-draft-model-path {head}")
    if kind == "dflash":
        flags.append(f"--speculative-dflash-block-size {most + 1}")
    elif kind == "dspark":
        flags.append(f"--speculative-dspark-block-size {most} --speculative-num-draft-tokens {most + 1}")
    elif kind == "ngram":
        flags.append(f"--speculative-num-draft-tokens {most + 1}")
    else:
        flags.append(f"--speculative-num-steps {most} --speculative-eagle-topk 1 --speculative-num-draft-tokens {most + 1}")
    flags.append(f"--max-running-requests {batch}")
    command = f"python -m sglang.launch_server --model-path {off.model.id} {_sglang_layout(off)} {' '.join(flags)}"
    return {"command": command, "notes": ["without --max-running-requests SGLang caps running requests at 48 when speculation is on"]}


def _trtllm(off: Deployment, kind: str, model: str | None, most: int, ranges: list[list[int]], batch: int) -> dict[str, Any] | None:
    if kind not in TRTLLM_TYPE:
        return None
    config: dict[str, Any] = {"decoding_type": TRTLLM_TYPE[kind], "max_draft_len": most}
    if (head := _head(kind, model)) is not None:
        config["speculative_model"] = head
    table = {hi: d for _, hi, d in ranges}
    if len(table) > 1 and ranges[0][2] == most and kind in ("eagle3", "external", "ngram"):
        config["draft_len_schedule"] = table
    return {
        "config": _trtllm_layout(off, batch) | {"speculative_config": config},
        "notes": ["draft_len_schedule keys are inclusive upper bounds; above the last key drafting stops (older releases read them as lower bounds)"],
    }


def _trtllm_layout(off: Deployment, batch: int) -> dict[str, Any]:
    layout = off.layout
    config: dict[str, Any] = {"tensor_parallel_size": layout.tp * layout.dp, "max_batch_size": -(-batch // layout.dp)}
    config |= {"pipeline_parallel_size": layout.pp} if layout.pp > 1 else {}
    config |= {"enable_attention_dp": True} if layout.dp > 1 else {}
    config |= {"moe_expert_parallel_size": layout.ep} if layout.ep > 1 else {}
    config |= {"kv_cache_config": {"dtype": "fp8"}} if off.dtypes.kv == "fp8" else {}
    return config


def settings_text(body: Mapping[str, Any]) -> str:
    """What to paste: the command line, or the YAML of a config file."""
    if "command" in body:
        return str(body["command"])
    import yaml

    return str(yaml.safe_dump(body["config"], sort_keys=False)).rstrip()


def _llamacpp(kind: str, model: str | None, most: int) -> dict[str, Any] | None:
    if kind not in LLAMACPP_TYPE:
        return None
    if kind == "ngram":
        # ngram-simple (build 11434, common/ngram-map.cpp) drops every draft shorter than the pattern, 12 tokens by default: D < 12 never drafts.
        sizes = f"--spec-ngram-simple-size-n {min(most, _LLAMACPP_PATTERN)} --spec-ngram-simple-size-m {most}"
        return {"command": f"llama-server -m MODEL.gguf --spec-type ngram-simple {sizes}", "notes": []}
    draft = "" if kind in NO_MODEL else f" -md {model or 'HEAD'}.gguf"
    return {"command": f"llama-server -m MODEL.gguf{draft} --spec-type {LLAMACPP_TYPE[kind]} --spec-draft-n-max {most}", "notes": []}
