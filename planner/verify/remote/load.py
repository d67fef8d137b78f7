"""Closed-loop load: exactly `concurrency` requests in flight, bounded in number and time, streamed, each timed where it is received.

Output lengths are forced (`ignore_eos`, as many tokens as asked for), tokens are counted by the server's usage and not by chunks: a chunk of a
speculating server holds a round's tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from planner.errors import InputError
from planner.verify.remote.client import Endpoint, KeyRefused, Timeouts

#: Parts of an answer that hold a request's own acceptance, as `import_acceptance` reads them.
_OWN = ("metrics", "timings", "sglext", "meta_info", "usage")


_BUSY_FRAC = 0.8
"""Above it, answers wait in the client's socket and times are its own."""


@dataclass(frozen=True)
class Sent:
    """One finished request. start_s and chunk_s are seconds since the load began; tokens as the server counts them; own: the objects in which the
    server told this request's acceptance, if it did."""

    prompt: int
    worker: int
    start_s: float
    chunk_s: tuple[float, ...]
    end_s: float
    tokens: int
    text: str
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for one token."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between chunks."""
        return tuple(b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False))


@dataclass(frozen=True)
class Load:
    """What a load measured. error: why it ended early (None: it ran to its end); failures: requests that failed on the way; what was
    completed before counts all the same."""

    concurrency: int
    requested: int
    output_len: int
    sent: tuple[Sent, ...]
    failures: tuple[str, ...] = ()
    error: str | None = None
    duration_s: float = 0.0
    client_busy_frac: float = 0.0
    """Share of the time that this client's own thread was computing."""

    @property
    def window(self) -> tuple[float, float] | None:
        """(begin, end) in seconds of the time in which all were in flight: until the first of them finds nothing left to do. None if never."""
        ends = [max((r.end_s for r in self.sent if r.worker == w), default=0.0) for w in range(self.concurrency)]
        begin, end = max((min(r.start_s for r in self.sent if r.worker == w) for w in {r.worker for r in self.sent}), default=0.0), min(ends)
        return (begin, end) if end > begin else None

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second in the steady window; a request's tokens are spread evenly over its chunks."""
        if self.window is None:
            return None
        begin, end = self.window
        inside = (r.tokens * sum(begin < c <= end for c in r.chunk_s) / len(r.chunk_s) for r in self.sent)
        return sum(inside) / (end - begin)

    @property
    def tpot_s(self) -> float | None:
        """Mean over requests of (time of the last token - TTFT)/(tokens - 1)."""
        each = [r.tpot_s for r in self.sent if r.tpot_s is not None]
        return fmean(each) if each else None

    @property
    def ttft_s(self) -> float | None:
        return fmean(r.ttft_s for r in self.sent) if self.sent else None

    @property
    def itl_s(self) -> float | None:
        """Mean gap between streamed chunks: with speculation about a round (llama.cpp streams each token by itself: there it says nothing)."""
        gaps = [g for r in self.sent for g in r.gaps_s]
        return fmean(gaps) if gaps else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the texts."""
        figures = {k: getattr(self, k) for k in ("tokens_per_s", "tpot_s", "itl_s", "ttft_s", "duration_s", "client_busy_frac")}
        return {
            "concurrency": self.concurrency,
            "output_len": self.output_len,
            "requests": len(self.sent),
            **figures,
            "problems": list(self.problems),
        }

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes the figures doubtful, in words."""
        out = [self.error] if self.error else []
        if self.failures:
            out.append(f"{len(self.failures)} of {self.requested} requests failed, the first: {self.failures[0]}")
        short = [r for r in self.sent if r.tokens != self.output_len]
        if short:
            out.append(f"{len(short)} of {len(self.sent)} answers have another length than the {self.output_len} tokens asked for, the first "
                       f"{short[0].tokens}: ignore_eos or max_tokens is not obeyed, so arms are not comparable")  # fmt: skip
        if self.client_busy_frac > _BUSY_FRAC:
            out.append(f"this client was busy {self.client_busy_frac:.0%} of the time: it, not the server, may set the pace")
        return tuple(out)


@dataclass(frozen=True)
class LoadSpec:
    """A load to run: `requests` completions of `output_len` tokens, `concurrency` at a time, for at most `limit_s` seconds; more than
    `most_failures` failed requests end it."""

    concurrency: int
    output_len: int
    requests: int
    limit_s: float
    temperature: float = 0.0
    seed: int = 0
    most_failures: int = 2


class _Stop(Exception):
    """The load cannot go on; the text says why."""


@dataclass
class _State:
    """A load under way."""

    endpoint: Endpoint
    prompts: Sequence[str]
    spec: LoadSpec
    timeouts: Timeouts
    numbers: Iterator[int]
    begin: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.begin


def closed_loop(endpoint: Endpoint, prompts: Sequence[str], spec: LoadSpec, *, timeouts: Timeouts = Timeouts()) -> Load:
    """Send a load, prompts in turn, and time every answer.

    A dead server, too many failed requests or the end of the time stops the load; what was completed is kept and `Load.error` says why. Warm up
    with a load of its own before. Not to be called inside a running event loop.
    """
    if not prompts or spec.concurrency < 1 or spec.output_len < 1 or spec.requests < spec.concurrency or spec.limit_s <= 0:
        raise InputError("this load cannot be run", where="closed_loop", got=f"{len(prompts)} prompts, {spec}",
                         expected="prompts, at least as many requests as concurrency, tokens and seconds above 0")  # fmt: skip
    state = _State(endpoint, prompts, spec, timeouts, iter(range(spec.requests)))
    computed = time.thread_time()
    error = asyncio.run(_drive(state))
    computed = time.thread_time() - computed
    if error is not None:
        error = f"{endpoint.base_url}: {error} ({len(state.sent)} of {spec.requests} requests done)"
    sent = tuple(sorted(state.sent, key=lambda r: r.start_s))
    return Load(spec.concurrency, spec.requests, spec.output_len, sent, tuple(state.failures), error, state.now(), computed / state.now())


def _request(endpoint: Endpoint, spec: LoadSpec, prompt: str) -> tuple[str, dict[str, Any]]:
    """Path and body of one completion."""
    common = {"prompt": prompt, "temperature": spec.temperature, "stream": True, "ignore_eos": True, "seed": spec.seed}
    if endpoint.engine == "llamacpp":
        # Its own path: the OpenAI one gives no timings for streams. A cached prompt would make TTFT another thing.
        return "/completion", common | {"n_predict": spec.output_len, "cache_prompt": False}
    body = common | {"model": endpoint.model, "max_tokens": spec.output_len, "min_tokens": spec.output_len, "stream_options": {"include_usage": True}}
    return "/v1/completions", body | ({"return_spec_tokens_details": True} if endpoint.engine == "sglang" else {})


async def _drive(state: _State) -> str | None:
    """Run the workers; why it ended early, or None."""
    import httpx

    concurrency, limit_s = state.spec.concurrency, state.spec.limit_s
    # llama-server (build 11434) now and then closes a connection after a stream without saying so: the next request on it would break off.
    kept = 0 if state.endpoint.engine == "llamacpp" else concurrency
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=kept)
    waits = httpx.Timeout(state.timeouts.silence_s, connect=state.timeouts.connect_s)
    async with httpx.AsyncClient(timeout=waits, limits=limits, trust_env=not state.endpoint.local) as client:
        state.begin = time.perf_counter()
        workers = [asyncio.create_task(_worker(state, client, w)) for w in range(concurrency)]
        done, pending = await asyncio.wait(workers, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    faults = [t.exception() for t in workers if not t.cancelled()]
    fault = next((f for f in faults if f is not None), None)
    if fault is not None and not isinstance(fault, _Stop):
        raise fault
    if fault is not None:
        return str(fault)
    return f"the load was stopped at its limit of {limit_s:g} s" if pending else None


async def _worker(state: _State, client: Any, worker: int) -> None:
    import httpx

    for number in state.numbers:
        try:
            state.sent.append(await _one(state, client, number, worker))
            continue
        except httpx.ConnectTimeout:
            raise _Stop(f"no connection within {state.timeouts.connect_s:g} s") from None
        except httpx.ConnectError:
            raise _Stop("the server no longer takes connections: it died or was stopped") from None
        except httpx.TimeoutException:
            fault = f"the server sent nothing for {state.timeouts.silence_s:g} s: it is too slow or hangs"
        except httpx.HTTPError as error:
            fault = f"the connection broke off in the middle of an answer ({type(error).__name__})"
        except InputError as error:
            fault = state.endpoint.hidden(str(error))
        state.failures.append(f"request {number}: {fault}")
        if len(state.failures) > state.spec.most_failures:
            raise _Stop(f"stopped after {len(state.failures)} failed requests, the last: {fault}")


async def _one(state: _State, client: Any, number: int, worker: int) -> Sent:
    """One streamed completion."""
    prompt = number % len(state.prompts)
    path, body = _request(state.endpoint, state.spec, state.prompts[prompt])
    start, chunks, texts = state.now(), [], []
    own: dict[str, Any] = {}
    async with client.stream("POST", state.endpoint.at(path), json=body, headers=state.endpoint.headers) as answer:
        if answer.status_code in (401, 403):
            raise _Stop(str(KeyRefused(state.endpoint, state.endpoint.at(path), answer.status_code)))
        if answer.status_code != 200:
            said = state.endpoint.hidden((await answer.aread()).decode("utf-8", errors="replace").strip())[:200]
            raise InputError("the server answers with an error", got=f"{answer.status_code} {said}", expected="status 200")
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                continue
            event = _event(line[5:], state.endpoint)
            own |= {k: event[k] for k in _OWN if isinstance(event.get(k), Mapping)}
            own |= {"tokens_predicted": event["tokens_predicted"]} if event.get("stop") and "tokens_predicted" in event else {}
            text, carried = _text(event)
            if carried:
                chunks.append(state.now())
                texts.append(text)
    end = state.now()
    tokens = _tokens(own)
    if tokens is None:
        raise InputError("the stream ended without its token count", got=f"{len(chunks)} chunks", expected="usage.completion_tokens at the end")
    if tokens < 1 or not chunks:
        raise InputError("the answer is empty", got=f"{tokens} tokens in {len(chunks)} chunks", expected=f"{state.spec.output_len} tokens")
    return Sent(prompt, worker, start, tuple(chunks), end, tokens, "".join(texts), own)


def _event(data: str, endpoint: Endpoint) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, Mapping):
        raise InputError("a streamed event cannot be read", got=endpoint.hidden(data.strip())[:80], expected="a JSON object")
    if event.get("error"):
        raise InputError("the server reports an error in the stream", got=endpoint.hidden(str(event["error"]))[:200])
    return event


def _text(event: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of an event and whether it carried tokens (half a character is a token without text)."""
    if "content" in event:  # llama.cpp
        return str(event["content"] or ""), bool(event["content"]) or bool(event.get("tokens"))
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping):
        return "", False
    text = str(first.get("text") or "")
    return text, bool(text) or first.get("finish_reason") is None


def _tokens(own: Mapping[str, Any]) -> int | None:
    usage = own.get("usage")
    count = own.get("tokens_predicted", usage.get("completion_tokens") if isinstance(usage, Mapping) else None)
    return count if isinstance(count, int) and not isinstance(count, bool) else None
