"""Measured rows -> cases of the contract. What a row does not say is said here, once, and counted when it makes the row unusable."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner.errors import InputError

#: Models whose own config is not packaged and that share another's architecture.
SAME_ARCHITECTURE = {
    "deepseek-ai/DeepSeek-V3": "deepseek-ai--DeepSeek-R1",
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama--Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai--DeepSeek-R1",
    "zhipuai/GLM-5": "zai-org--GLM-5",
    "nvidia/Qwen3-32B-NVFP4": "Qwen--Qwen3-32B",
}
SERVED_WEIGHTS = {"fp8": "fp8", "fp4": "nvfp4", "bf16": "bf16", "int4": "int4", "": "bf16"}
#: Words in a source's dtype text, most specific first.
DTYPE_WORDS = (
    ("MXFP4", "mxfp4"),
    ("NVFP4", "nvfp4"),
    ("W4A16", "int4"),
    ("FP4", "nvfp4"),
    ("FP8", "fp8"),
    ("BF16", "bf16"),
    ("FP16", "fp16"),
    ("F16", "fp16"),
    ("INT8", "int8"),
    ("Q8", "int8"),
    ("INT4", "int4"),
    ("AWQ", "int4"),
    ("GPTQ", "int4"),
    ("Q4", "int4"),
    ("IQ4", "int4"),
)
ENGINE_WORDS = (
    ("vllm", "vllm"),
    ("sglang", "sglang"),
    ("tensorrt", "trtllm"),
    ("trt-llm", "trtllm"),
    ("llama.cpp", "llamacpp"),
    ("transformers", "transformers"),
)
TABLE_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
UNSTATED_CONCURRENCY = 16
"""For sweeps of quality B that do not state it: their dense baselines fit 16."""


class Data(NamedTuple):
    """Where the measured rows and the configs they name lie."""

    truth: Path
    configs: Path


def find_data(root: Path | None) -> Data:
    """The given folder, or tests/data of the checkout this package runs from."""
    base = root or Path(__file__).resolve().parents[2] / "tests" / "data"
    truth = base / "truth" if (base / "truth").is_dir() else base
    configs = base / "configs" if (base / "configs").is_dir() else truth / "configs"
    if not (truth / "silicon_dev.csv").is_file() or not configs.is_dir():
        raise InputError(
            "no measured rows here", where=str(base), expected="silicon_dev.csv and a configs folder", hint="Give --data, or run from a checkout."
        )
    return Data(truth, configs)


def dtype_word(text: str | None) -> str | None:
    """The dtype a source's free text names, or None."""
    upper = (text or "").upper()
    return next((value for word, value in DTYPE_WORDS if word in upper), None)


def engine_word(text: str | None) -> str:
    lower = (text or "").lower()
    return next((value for word, value in ENGINE_WORDS if word in lower), "vllm")


def config_path(data: Data, model: str) -> str:
    """The packaged config of a model, else its name (the catalogue may know it)."""
    path = data.configs / f"{SAME_ARCHITECTURE.get(model, model.replace('/', '--'))}_config.json"
    return str(path) if path.exists() else model


# ---------------------------------------------------------------- served decode steps
def serving_rows(data: Data) -> list[dict[str, str]]:
    """Clean, unique, aggregated serving rows without speculation."""
    with (data.truth / "silicon_dev.csv").open(encoding="utf-8") as f:
        return [r for r in csv.DictReader(f) if r["use_for_scoring"] == "1"]


def serving_case(data: Data, row: Mapping[str, str]) -> dict[str, Any]:
    n, dp = int(float(row["gpus_fixed"])), int(float(row["attention_dp_fixed"] or 1))
    # gpt-oss ships one scheme (MXFP4 experts, 16-bit rest) whatever the row calls its precision
    own_scheme = "gpt-oss" in row["model_path"]
    return {
        "id": row["id"],
        **({} if own_scheme else {"weights_dtype": SERVED_WEIGHTS[row["precision"]]}),
        "model": config_path(data, row["model_path"]),
        "gpu": row["system"],
        "n_gpus": n,
        "dp": dp,
        "tp": max(1, n // dp),
        "ep": min(n, int(float(row["moe_ep_size"] or 1))),
        "engine": row["backend"],
        "concurrency": int(float(row["concurrency"])),
        "input_len": int(row["isl"]),
        "output_len": int(row["osl"]),
    }


# ---------------------------------------------------------------- draft-length sweeps
class Sweep(NamedTuple):
    """One setup measured at several D."""

    row: dict[str, Any]
    concurrency: int
    latency: bool
    """The metric is a time per token, not a rate of the deployment."""

    @property
    def id(self) -> str:
        return str(self.row["id"])

    @property
    def group(self) -> str:
        return str(self.row["group"])

    @property
    def arms(self) -> list[dict[str, Any]]:
        return list(self.row["arms"])

    def value(self, arm: Mapping[str, Any]) -> float:
        """Higher is better."""
        v = float(arm["metric_value"])
        return v if arm["higher_is_better"] else 1.0 / v

    @property
    def off(self) -> dict[str, Any]:
        return next(a for a in self.arms if a["D"] == 0)

    def regret(self, draft_len: int) -> float:
        """1 - metric(chosen arm) / best measured arm."""
        values = {int(a["D"]): self.value(a) for a in self.arms}
        return 1.0 - values[draft_len] / max(values.values())


def acceptance_of(arm: Mapping[str, Any]) -> float:
    return float(arm["AL"] or arm.get("al_proxy") or 1.0)


def sweeps(data: Data) -> tuple[list[Sweep], Counter[str]]:
    """Usable sweeps, and the others counted by what they lack."""
    keep, lacking = [], Counter[str]()
    for line in (data.truth / "dsweeps_dev.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        concurrency: int = row["concurrency"] or (UNSTATED_CONCURRENCY if row["quality"] == "B" else 0)
        reason = next(
            (
                why
                for missing, why in (
                    (row["quality"] not in "AB", "quality C"),
                    (not row.get("gpu"), "GPU not stated"),
                    (not row.get("config"), "no config of the model"),
                    (not concurrency, "concurrency not stated"),
                    (row["al_known"] not in ("all", "proxy"), "acceptance not stated"),
                    (not any(a["D"] == 0 for a in row["arms"]), "no arm without speculation"),
                )
                if missing
            ),
            None,
        )
        if reason:
            lacking[reason] += 1
            continue
        unit = (row["arms"][0]["unit"] or "").lower()
        keep.append(Sweep(row, concurrency, "tpot" in unit or "ms" in unit))
    return keep, lacking


def sweep_cases(data: Data, sweep: Sweep, *, baseline: bool = True, one_al: bool = False) -> list[dict[str, Any]]:
    """A case per arm. baseline: anchor on the measured plain arm. one_al: only the acceptance at the first D >= 2 is known."""
    s, off = sweep.row, sweep.off
    unit = (off["unit"] or "").lower()
    drafted = sorted((a for a in sweep.arms if a["D"]), key=lambda a: int(a["D"]))
    known = next((a for a in drafted if a["D"] >= 2), drafted[-1])
    head = s["drafter"] or {}
    drafter: dict[str, Any] = {"kind": s["drafter_kind"], **{k: head[k] for k in ("layers", "params") if isinstance(head.get(k), (int, float))}}
    if head.get("config") and (data.configs / "drafters" / head["config"]).exists():
        drafter["model"] = str(data.configs / "drafters" / head["config"])
    n = s["n_gpus"] or 1
    base: dict[str, Any] = {
        "model": str(data.configs / s["config"]),
        "gpu": s["gpu"],
        "n_gpus": n,
        "tp": s["tp"] or n,
        "ep": s["ep"] or 1,
        "engine": engine_word(s["engine"]),
        "concurrency": sweep.concurrency,
    }
    weights = dtype_word(s["weights_dtype"])
    if weights and weights != "mxfp4":
        base["weights_dtype"] = weights
    if kv := dtype_word(s["kv_dtype"]):
        base["kv_dtype"] = kv
    if s["output_len"]:
        base |= {"input_len": int(s["input_len"] or 256), "output_len": int(s["output_len"])}
    else:
        base["context_len"] = int(s["input_len"] or 1024)
    if baseline and off["metric_value"] and not unit.startswith("x "):
        v = float(off["metric_value"])
        tpot = v / 1e3 if "ms" in unit else 1.0 / v if "user" in unit else sweep.concurrency / v
        base["baseline"] = [{"tpot_s": tpot, "concurrency": sweep.concurrency}]
    cases = []
    for arm in sweep.arms:
        case = {**base, "id": f"{sweep.id}|{arm['D']}", "draft_len": arm["D"]}
        if arm["D"]:
            source = known if one_al else arm
            case |= {"drafter": drafter, "acceptance": {"acceptance_len": acceptance_of(source), "at_draft_len": source["D"]}}
        cases.append(case)
    return cases


# ---------------------------------------------------------------- kernels and acceptance
def gemm_cases(data: Data) -> list[tuple[tuple[str, ...], dict[str, Any], float]]:
    """(stack, case, measured seconds); fp8_block rows of vLLM were timed without CUDA graphs and are left out."""
    with (data.truth / "gemm_dev.csv").open(encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if r["dtype"] != "fp8_block"]
    return [
        (
            (r["gpu"], r["backend"], r["dtype"]),
            {
                "id": i,
                "gpu": r["gpu"],
                "engine": r["backend"],
                "op": "gemm",
                "m": int(r["M"]),
                "n": int(r["N"]),
                "k": int(r["K"]),
                "weights_dtype": TABLE_DTYPES.get(r["dtype"], r["dtype"]),
            },
            float(r["latency_ms"]) / 1e3,
        )
        for i, r in enumerate(rows)
    ]


def attention_cases(data: Data) -> list[tuple[tuple[str, ...], dict[str, Any], float]]:
    """(stack, case, measured seconds) at contexts from 512; TensorRT-LLM beyond 32 rows at one query is a known pathological kernel choice."""
    with (data.truth / "attention_dev.csv").open(encoding="utf-8") as f:
        rows = [r for r in csv.DictReader(f) if int(r["seq"]) >= 512 and not (r["backend"] == "trtllm" and int(r["heads"]) / int(r["kv_heads"]) > 32)]
    return [
        (
            (r["gpu"], r["backend"], r["kv_dtype"]),
            {
                "id": i,
                "gpu": r["gpu"],
                "engine": r["backend"],
                "op": "attention",
                "num_seqs": int(r["batch"]),
                "query_len": int(r["q_len"]),
                "context_len": int(r["seq"]),
                "num_heads": int(r["heads"]),
                "num_kv_heads": int(r["kv_heads"]),
                "head_dim": int(r["head_dim"]),
                "kv_dtype": TABLE_DTYPES.get(r["kv_dtype"], r["kv_dtype"]),
            },
            float(r["latency_ms"]) / 1e3,
        )
        for i, r in enumerate(rows)
    ]


def step_records(data: Data) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Measured step and round times with a GPU and a config; the others counted by reason."""
    keep, lacking = [], Counter[str]()
    for line in (data.truth / "steps_dev.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        reason = "GPU not stated" if not row.get("gpu") else "no config of the model" if not row.get("config") else None
        if reason:
            lacking[reason] += 1
        else:
            keep.append(row)
    return keep, lacking
