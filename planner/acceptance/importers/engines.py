"""JSON of the engines themselves: vLLM bench and responses, SGLang server_info, bench lines and meta_info, TensorRT-LLM, llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.acceptance.importers.numbers import count, counts, number, share, tables, whole
from planner.acceptance.importers.reading import Reading
from planner.acceptance.importers.requests import SGLANG, TRTLLM, VLLM, pool
from planner.acceptance.importers.settle import merged
from planner.acceptance.importers.source import Document
from planner.errors import InputError

Records = list[tuple[str, Mapping[str, Any]]]
_SGLANG_KINDS = {"EAGLE3": "eagle3", "NEXTN": "mtp", "STANDALONE": "external", "NGRAM": "ngram", "DFLASH": "dflash", "DSPARK": "dspark"}


def having(document: Document, *keys: str) -> Records:
    """Objects anywhere in the document that hold all of the keys."""
    return [
        (f"{document.where}: {path}" if path else document.where, t) for v in document.values for path, t in tables(v) if all(k in t for k in keys)
    ]


# ---------------------------------------------------------------- vLLM


def vllm_bench(document: Document, kind: str | None) -> Reading:
    """`vllm bench serve --save-result`; several lines (--append-result) are added up."""
    found = (having(document, f"spec_decode_{k}") for k in ("acceptance_length", "num_drafts", "per_position_acceptance_rates"))
    rows = next(rows for rows in found if rows)
    readings = [_vllm_bench_row(where, row) for where, row in rows]
    return merged(readings, f"{len(readings)} runs added up")


def _vllm_bench_row(where: str, row: Mapping[str, Any]) -> Reading:
    rates = row.get("spec_decode_per_position_acceptance_rates")
    survival = None if not rates else tuple(counts(rates, f"{where}.spec_decode_per_position_acceptance_rates"))
    total = {k: row.get(f"spec_decode_{k}") for k in ("num_drafts", "draft_tokens", "accepted_tokens", "acceptance_rate", "acceptance_length")}
    drafts, drafted, accepted = (None if total[k] is None else count(total[k], f"{where}.spec_decode_{k}") for k in list(total)[:3])
    rate, warnings = None, []
    if total["acceptance_rate"] is not None and drafts != 0:
        percent = number(total["acceptance_rate"], f"{where}.spec_decode_acceptance_rate")
        if not 0 <= percent <= 100:
            raise InputError("the acceptance rate is no percentage", where=where, got=percent, expected="0..100 (vLLM bench gives percent)")
        rate = percent / 100
        if drafted and accepted is not None and abs(rate - accepted / drafted) > 0.01:
            if abs(percent - accepted / drafted) > 0.01:
                raise InputError(
                    "acceptance rate and counters disagree", where=where, got=f"{percent:g} % and {accepted:g}/{drafted:g}", expected="the same"
                )
            warnings, rate = ["spec_decode_acceptance_rate is a fraction here, vLLM writes percent: the counters are used"], percent
    al = total["acceptance_length"]
    generated, done = row.get("total_output_tokens"), row.get("completed")
    tokens = None
    if generated is not None:
        tokens = count(generated, f"{where}.total_output_tokens") - (count(done, f"{where}.completed") if done is not None else 0.0)
    return Reading(
        format="vllm bench", engine="vllm", where=where, num_drafts=drafts, drafted=drafted, accepted=accepted, survival=survival, rate=rate,
        definition="spec_decode_acceptance_length includes the bonus token; rate in percent; per-position rates are s_i (cumulative); "
        "D = length of the per-position list; warm-up excluded, other clients' traffic in the window included",
        draft_len=len(survival) if survival else None, acceptance_len=None if al is None else number(al, f"{where}.spec_decode_acceptance_length"),
        generated=tokens, skips_empty=True, warnings=tuple(warnings),
    )  # fmt: skip


def vllm_requests(document: Document, kind: str | None) -> Reading:
    """Responses with `metrics.speculative_decoding` (also inside guidellm reports), and aiperf rows with `spec_decode_acceptance`."""
    records = [(w, r) for w, r in having(document, VLLM.rounds) if VLLM.accepted in r or VLLM.histogram in r]
    aiperf = any(True for _ in having(document, "spec_decode_acceptance"))
    base = Reading(
        format="aiperf rows" if aiperf else "vllm per-request", engine="vllm", where=document.where, kind=kind, skips_empty=True,
        definition="per request: acceptance_histogram[j] = rounds that accepted exactly j drafts, so s_i = sum(j >= i)/rounds; "
        "mean_acceptance_length includes the bonus token; draft_acceptance_rate is a fraction",
    )  # fmt: skip
    reading = pool(records, VLLM, base)
    tokens = [count(r["completion_tokens"], f"{w}.completion_tokens") for w, r in records if r.get("completion_tokens") is not None]
    usage = [count(r["completion_tokens"], f"{w}.completion_tokens") for w, r in having(document, "completion_tokens", "prompt_tokens")]
    found = tokens or usage
    if len(found) == len(records):
        reading = replace(reading, generated=math.fsum(found) - len(found))
    return reading


# ---------------------------------------------------------------- SGLang


def sglang_draft_len(info: Mapping[str, Any], where: str) -> tuple[int | None, tuple[str, ...], str | None]:
    """(D, flags, drafter kind) from the server arguments. Which flag is D: facts of srt/arg_groups/speculative_hook.py."""
    algorithm = str(info.get("speculative_algorithm") or "").upper()
    steps, tokens = info.get("speculative_num_steps"), info.get("speculative_num_draft_tokens")
    topk = info.get("speculative_eagle_topk")
    flags = []
    if topk is not None and number(topk, f"{where}.speculative_eagle_topk") > 1:
        flags.append("tree")
    if algorithm == "NGRAM":
        flags.append("tree")
    if info.get("speculative_adaptive"):
        flags.append("mixture")
    by_tokens = algorithm in ("DFLASH", "DSPARK", "NGRAM")
    chosen = tokens if by_tokens or steps is None else steps
    if chosen is None:
        return None, tuple(flags), _SGLANG_KINDS.get(algorithm)
    draft_len = whole(chosen, f"{where}.speculative_num_{'draft_tokens' if chosen is tokens else 'steps'}", low=1)
    if chosen is tokens:
        draft_len = max(1, draft_len - 1)
    return draft_len, tuple(dict.fromkeys(flags)), _SGLANG_KINDS.get(algorithm)


def sglang_info(document: Document, kind: str | None) -> Reading:
    """`/server_info`, alone or inside a bench_serving line: an average since the server started."""
    infos = having(document, "internal_states")
    values = [
        number(state["avg_spec_accept_length"], f"{where}.avg_spec_accept_length")
        for where, info in infos
        for state in (info["internal_states"] if isinstance(info["internal_states"], list) else [])
        if isinstance(state, Mapping) and state.get("avg_spec_accept_length") is not None
    ]
    bench = having(document, "accept_length")
    values = [number(r["accept_length"], f"{w}.accept_length") for w, r in bench if r["accept_length"] is not None] or values
    values = [v for v in values if v != 0]
    if not values:
        hint = "avg_spec_accept_length is null or 0 until a request was decoded with speculation."
        raise InputError("no data: no acceptance length yet", where=document.where, expected="avg_spec_accept_length or accept_length", hint=hint)
    arguments = having(document, "speculative_algorithm") or infos
    draft_len, flags, inferred = sglang_draft_len(arguments[0][1], arguments[0][0]) if arguments else (None, (), None)
    warnings = ["cumulative since the server started (not a window): warm-up and earlier traffic are in it"]
    if "tree" in flags:
        warnings.append("a draft tree (topk > 1 or n-gram): AL is per tree, chain curves do not describe other depths")
    if "mixture" in flags:
        warnings.append("adaptive steps: rounds of different D are mixed")
    notes = []
    if len(values) > 1:
        what = (
            "runs: the last value, which holds the earlier ones" if bench else "engine states (data parallel): their plain mean, no counts are given"
        )
        notes.append(f"{len(values)} {what}")
    return Reading(
        format="sglang bench_serving" if bench else "sglang /server_info", engine="sglang", where=document.where, kind=inferred,
        acceptance_len=values[-1] if bench else math.fsum(values) / len(values), draft_len=draft_len, flags=(*flags, "cumulative"),
        definition="accept_length is the server's avg_spec_accept_length: tokens per verify, bonus included, since the server started; "
        "D = speculative_num_steps (chain) or speculative_num_draft_tokens - 1",
        notes=tuple(notes), warnings=tuple(warnings),
    )  # fmt: skip


def sglang_generate(document: Document, kind: str | None) -> Reading:
    """`/generate` responses with `meta_info.spec_*`."""
    records = having(document, SGLANG.rounds)
    base = Reading(
        format="sglang /generate", engine="sglang", where=document.where, kind=kind,
        definition="per request: spec_correct_drafts_histogram[j] = verifies that accepted exactly j drafts; AL = 1 + correct drafts/verifies; "
        "spec_num_proposed_drafts assumes the static window",
    )  # fmt: skip
    reading = pool(records, SGLANG, base)
    depth = len(reading.survival) if reading.survival else None
    if depth and reading.drafted and reading.num_drafts and reading.drafted / reading.num_drafts > depth * 1.001:
        said = "more drafts proposed than the histogram is deep: a draft tree, or adaptive steps; D is the histogram's depth"
        reading = replace(reading, flags=(*reading.flags, "tree"), warnings=(*reading.warnings, said), drafted=None)
    if len(records) == 1 and records[0][1].get(SGLANG.rate) is not None:
        reading = replace(reading, rate=number(records[0][1][SGLANG.rate], f"{records[0][0]}.spec_accept_rate"))
    return reading


# ---------------------------------------------------------------- TensorRT-LLM


def trtllm_iterations(document: Document, kind: str | None) -> Reading:
    """Iteration statistics with `specDecodingStats`, one object per engine iteration."""
    rounds = drafted = accepted = 0.0
    used = skipped = 0
    for where, row in having(document, "specDecodingStats"):
        stats = row["specDecodingStats"]
        if row.get("attentionDpRank") not in (None, 0):
            skipped += 1  # attention-DP ranks repeat rank 0's figures
            continue
        if not isinstance(stats, Mapping):
            continue
        at = f"{where}.specDecodingStats"
        drafted += count(stats.get("numDraftTokens", 0), f"{at}.numDraftTokens")
        accepted += count(stats.get("numAcceptedTokens", 0), f"{at}.numAcceptedTokens")
        rounds += count(stats.get("numRequestsWithDraftTokens", 0), f"{at}.numRequestsWithDraftTokens")
        used += 1
    notes = [f"{used} iterations added up"] + ([f"{skipped} rows of other attention-DP ranks left out: they repeat rank 0"] if skipped else [])
    return Reading(
        format="trtllm iteration stats", engine="trtllm", where=document.where, num_drafts=rounds, drafted=drafted, accepted=accepted,
        definition="AL = 1 + sum numAcceptedTokens / sum numRequestsWithDraftTokens (a request counts once per iteration); the bonus token is added",
        skips_empty=True, notes=tuple(notes),
    )  # fmt: skip


def trtllm_report(document: Document, kind: str | None) -> Reading:
    """`trtllm-bench --report_json`: percentiles over requests."""
    where, row = having(document, "decoding_stats")[0]
    stats = row["decoding_stats"]
    if not isinstance(stats, Mapping):
        raise InputError("no data: decoding_stats is empty", where=where, expected="a run with speculation")

    def average(name: str) -> float | None:
        table = stats.get(name)
        value = table.get("average") if isinstance(table, Mapping) else None
        return None if value is None else number(value, f"{where}.decoding_stats.{name}.average")

    al, rate = average("acceptance_length_percentiles"), average("draft_acceptance_rate_percentiles")
    if al is None:
        raise InputError("no data: no acceptance length", where=where, expected="decoding_stats.acceptance_length_percentiles.average")
    if rate is not None:
        share(rate, f"{where}.decoding_stats.draft_acceptance_rate_percentiles.average", "TensorRT-LLM gives a fraction.")
    total = stats.get("acceptance_length")
    pooled = None if total is None else number(total, f"{where}.decoding_stats.acceptance_length")
    guess = None if not rate else (al - 1.0) / rate
    near = guess is not None and guess >= 0.9 and abs(guess - round(guess)) <= 0.08 * round(guess)
    notes = [f"D is inferred from (AL - 1)/rate = {guess:.3g}: check it against max_draft_len"] if near and guess else []
    table = stats.get("acceptance_length_percentiles")
    named = table.items() if isinstance(table, Mapping) else ()
    parts = {"acceptance_len_percentiles": {str(k): v for k, v in named if isinstance(v, int | float) and math.isfinite(v)}}
    return Reading(
        format="trtllm-bench report", engine="trtllm", where=where, weighting="rounds" if pooled else "requests",
        acceptance_len=pooled or al, draft_len=round(guess) if near and guess else None, rate=None if pooled else rate,
        definition="AL = output tokens/(decode iterations + 1) per request, averaged (older versions: plain mean over requests)",
        request_acceptance_len=al if pooled else None, notes=tuple(notes), parts=parts,
    )  # fmt: skip


def trtllm_choices(document: Document, kind: str | None) -> Reading:
    """Per-choice `speculative_decoding` of a response."""
    records = having(document, TRTLLM.accepted, TRTLLM.rounds)
    base = Reading(
        format="trtllm per-request", engine="trtllm", where=document.where, kind=kind, skips_empty=True,
        definition="per choice: acceptance_histogram[j] = rounds that accepted exactly j drafts; acceptance_rate is a fraction; "
        "avg_decoded_tokens_per_iter counts plain iterations too and is not used",
    )  # fmt: skip
    return pool(records, TRTLLM, base)


# ---------------------------------------------------------------- llama.cpp


def llamacpp_timings(document: Document, kind: str | None) -> Reading:
    """Response `timings`: no round count, so rounds = predicted_n - draft_n_accepted (plain rounds included)."""
    records = having(document, "draft_n", "draft_n_accepted")
    rounds = drafted = accepted = 0.0
    lens = []
    for where, row in records:
        a, d = count(row["draft_n_accepted"], f"{where}.draft_n_accepted"), count(row["draft_n"], f"{where}.draft_n")
        n = count(row.get("predicted_n", math.nan), f"{where}.predicted_n")
        if n < a:
            raise InputError(
                "fewer tokens predicted than drafts accepted", where=where, got=f"{n:g} and {a:g}", expected="predicted_n >= draft_n_accepted"
            )
        rounds, drafted, accepted = rounds + n - a, drafted + d, accepted + a
        lens += [n / (n - a)] if n > a else []
    return Reading(
        format="llamacpp timings", engine="llamacpp", where=document.where, kind=kind, num_drafts=rounds, drafted=drafted, accepted=accepted,
        definition="rounds = predicted_n - draft_n_accepted, AL = predicted_n/rounds: bonus added, rounds without a draft counted as rounds of 1",
        request_acceptance_len=math.fsum(lens) / len(lens) if len(lens) > 1 else None,
        notes=("timings hold no round count: rounds are inferred from the tokens", f"{len(records)} request(s) pooled"),
    )  # fmt: skip


def llamacpp_old(fields: Mapping[str, Any], where: str) -> Reading:
    """examples/speculative: n_draft (the most per round), n_predict, n_drafted, n_accept."""
    n = {k: count(fields.get(k, math.nan), f"{where}: {k}") for k in ("n_predict", "n_drafted", "n_accept")}
    most = fields.get("n_draft")
    rounds = n["n_predict"] - n["n_accept"]
    if rounds <= 0 and n["n_drafted"] > 0:
        raise InputError("n_accept exceeds n_predict", where=where, got=f"{n['n_accept']:g} and {n['n_predict']:g}", expected="n_accept < n_predict")
    return Reading(
        format="llamacpp speculative", engine="llamacpp", where=where, num_drafts=rounds, drafted=n["n_drafted"], accepted=n["n_accept"],
        definition="rounds = n_predict - n_accept; AL = n_predict/rounds, bonus included; n_draft is the most a round drafts",
        draft_len=None if not most else whole(most, f"{where}: n_draft", low=1), notes=("rounds are inferred from the tokens",),
    )  # fmt: skip


def llamacpp_old_json(document: Document, kind: str | None) -> Reading:
    records: Sequence[tuple[str, Mapping[str, Any]]] = having(document, "n_drafted", "n_accept")
    return merged([llamacpp_old(row, where) for where, row in records], f"{len(records)} runs added up")
