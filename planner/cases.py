"""The contract: what a question is (`Case`) and what an answer is (`Prediction`), DESIGN section 5.

A line of JSON becomes a frozen `Case`; unknown keys, wrong types, NaN and contradictions become one InputError that names the key.
Sizes are tokens, times seconds, rates per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from planner.errors import InputError, suggest

WeightsDtype = Literal["bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4"]
DTYPES = ("bf16", "fp16", "fp8", "int8", "int4", "nvfp4", "mxfp4")
DRAFTER_KINDS = ("external", "eagle3", "mtp", "dflash", "dspark", "pard", "ngram", "suffix")
WORKLOADS = ("coding", "math", "chat", "summarization", "translation", "writing", "reasoning", "qa", "rag")


def _number(value: object) -> object:
    """Numbers only: no booleans and no numeric strings, which hide a broken producer."""
    if isinstance(value, (bool, str)):
        raise ValueError("must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _plain_id(value: object) -> object:
    """Text or a whole number, returned as it came."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be text or a whole number")
    return value


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Tokens = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WeightsByClass(_Frozen):
    """Storage dtype by tensor class; classes not named keep the checkpoint's."""

    experts: WeightsDtype | None = None
    mlp: WeightsDtype | None = None
    attn: WeightsDtype | None = None
    linear_attn: WeightsDtype | None = None
    lm_head: WeightsDtype | None = None


class EngineConfig(_Frozen):
    """Settings of the serving engine; None = the engine's own default on this GPU."""

    version: str | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    cuda_graph_max_tokens: Count | None = None
    memory_frac: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] | None = None
    eager: bool = False
    async_scheduling: bool | None = None


class Baseline(_Frozen):
    """One measured run of this deployment, to anchor on."""

    tpot_s: Positive | None = None
    tokens_per_s: Positive | None = None
    concurrency: Count
    draft_len: Tokens = 0
    acceptance_len: Annotated[float, BeforeValidator(_number), Field(ge=1)] = 1.0

    @model_validator(mode="after")
    def _one_metric(self) -> Baseline:
        if (self.tpot_s is None) == (self.tokens_per_s is None):
            raise ValueError("give exactly one of tpot_s and tokens_per_s")
        if self.acceptance_len > 1 + self.draft_len + 1e-9:
            raise ValueError(f"acceptance_len {self.acceptance_len:g} exceeds 1 + draft_len = {1 + self.draft_len}")
        return self


class Case(_Frozen):
    """One question: a deployment, a drafter with a draft length, and traffic."""

    id: Annotated[str | int | None, Field(union_mode="left_to_right"), BeforeValidator(_plain_id)] = None
    model: str | dict[str, Any]
    gpu: str
    n_gpus: Count | None = None
    tp: Count | None = None
    pp: Count = 1
    dp: Count | None = None
    ep: Count = 1
    engine: str = "vllm"
    engine_config: EngineConfig = EngineConfig()
    weights_dtype: WeightsDtype | WeightsByClass | None = None
    kv_dtype: WeightsDtype | None = None
    act_dtype: WeightsDtype | None = None
    attn_dtype: WeightsDtype | None = None
    state_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    concurrency: Count | None = None
    request_rate_per_s: Positive | None = None
    input_len: Count | None = None
    output_len: Count | None = None
    cached_input_len: Tokens = 0
    context_len: Count | None = None
    mode: Literal["agg", "disagg"] = "agg"
    drafter: dict[str, Any] | None = None
    draft_len: Annotated[int, BeforeValidator(_number), Field(ge=0, le=1024)] = 0
    acceptance: dict[str, Any] | None = None
    baseline: tuple[Baseline, ...] = ()
    attention_backend: str | None = None
    moe_backend: str | None = None
    k0_tier: bool = False

    @model_validator(mode="after")
    def _coherent(self) -> Case:
        if (self.concurrency is None) == (self.request_rate_per_s is None):
            raise ValueError("give exactly one of concurrency (closed loop) and request_rate_per_s (open loop)")
        if self.context_len is not None and (self.input_len is not None or self.output_len is not None):
            raise ValueError("give either context_len (pure decode) or input_len and output_len, not both")
        if self.context_len is None and (self.input_len is None) != (self.output_len is None):
            raise ValueError("input_len and output_len belong together (or give context_len)")
        if self.request_rate_per_s is not None and self.context_len is not None:
            raise ValueError("an arrival rate needs input_len and output_len: with context_len alone a request never ends")
        if self.draft_len > 0 and self.drafter is None:
            raise ValueError(f"draft_len is {self.draft_len} but drafter is null; name a drafter or set draft_len 0")
        if self.cached_input_len and self.input_len and self.cached_input_len > self.input_len:
            raise ValueError(f"cached_input_len {self.cached_input_len} exceeds input_len {self.input_len}")
        return self


class Prediction(_Frozen):
    """One answer. Bands are 80 % intervals; `speedup` compares with the same deployment without any speculative configuration."""

    id: str | int | None
    tpot_s: float
    tpot_low_s: float
    tpot_high_s: float
    ttft_s: float | None
    tokens_per_s: float
    tokens_per_s_per_user: float
    tokens_per_s_per_gpu: float
    round_s: float
    draft_s: float
    verify_s: float
    overhead_s: float
    target_step_s: float
    acceptance_len: float
    speedup: float
    speedup_low: float
    speedup_high: float
    bound: str
    num_seqs: int
    capacity_seqs: int
    edges: tuple[str, ...]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def explain_validation(error: ValidationError, where: str, known: Iterable[str]) -> InputError:
    """The first fault of a pydantic error as one InputError, with a suggestion when the key is unknown."""
    first = error.errors()[0]
    key = ".".join(str(p) for p in first["loc"] if not str(p).startswith(("function-", "literal[", "constrained"))) or "case"
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        hint = suggest(str(first["loc"][-1]), known) or f"Known keys: {', '.join(known)}."
        return InputError(f"unknown key {key!r}", where=where, hint=hint)
    if first["type"] == "missing":
        return InputError(f"required key {key!r} is missing", where=where, hint=f"Add {key!r} to the case.")
    got = first.get("input")
    shown = got if isinstance(got, (int, float, str, bool, type(None))) else None
    if first["type"] == "value_error" and not first["loc"]:
        return InputError(message, where=where)
    return InputError(f"{key}: {message[:1].lower()}{message[1:]}", where=where, got=shown)


def parse_case(raw: object, where: str = "case") -> Case:
    """A JSON object as a Case. Raises InputError."""
    if not isinstance(raw, Mapping):
        raise InputError("each line must be a JSON object", where=where, got=type(raw).__name__, expected="an object with model, gpu, concurrency")
    try:
        # null means "not given", also for keys whose default is not null
        return Case.model_validate({k: v for k, v in raw.items() if v is not None})
    except ValidationError as error:
        raise explain_validation(error, where, Case.model_fields) from None
