"""The built-in engine behind a small HTTP server with vLLM's paths and metric names, so that everything that talks to servers runs without one.

Requests in flight take turns on one lock, a round at a time, each a batch of its own: no continuous batching, so that more requests only make
each slower. The speculation counters are sums of the engine's own drafted and accepted arrays; like vLLM's they leave out rounds without a draft
and do not cut the last round to the length asked for.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from planner.verify.engine import Drafter, Rounds, decode_round, prefill
from planner.verify.nets.transformer import Transformer
from planner.verify.sampling import Sampler

VERSION = "0.0+builtin"
_SOCKET_S = 5.0
"""Seconds that a connection may be silent before its thread ends."""
_MOST_BODY_BYTES = 4 * 2**20
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class Engine:
    """What is served. drafter: makes a fresh one for a request (None: plain decoding); encode and decode: text to tokens and back."""

    target: Transformer
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    drafter: Callable[[], Drafter] | None = None
    draft_len: int = 0
    model: str = "builtin"
    per_request: bool = False
    """Tell each request's acceptance in its answer, as vLLM does with --per-request-spec-decode-metrics detailed."""
    schedule: tuple[tuple[int, int, int], ...] = ()
    """(first, last, D) by requests running, as vLLM's num_speculative_tokens_per_batch_size; the last D goes on above. Rounds at 0 are plain, and a
    drafter with a cache of its own misses what they read: its drafts are worse after, outputs are not."""
    api_key: str | None = field(default=None, repr=False)
    """Wanted as a bearer token on the paths under /v1, as vLLM does with --api-key."""

    def draft_len_at(self, running: int) -> int:
        """D of a round with so many requests running."""
        under = [d for first, _, d in self.schedule if first <= running]
        return min(self.draft_len, under[-1]) if under else self.draft_len


@dataclass
class _Metrics:
    """The counters, under vLLM's names; labels as vLLM sets them."""

    engine: Engine
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        def made(kind: Any, name: str, *more: str) -> Any:
            return kind(f"vllm:{name}", name, ["model_name", "engine", *more], registry=self.registry)

        self.running = made(Gauge, "num_requests_running").labels(*self.labels)
        self.waiting = made(Gauge, "num_requests_waiting").labels(*self.labels)
        self.prompt_tokens = made(Counter, "prompt_tokens").labels(*self.labels)
        self.generated = made(Counter, "generation_tokens").labels(*self.labels)
        self.success = made(Counter, "request_success", "finished_reason").labels(*self.labels, "length")
        names = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds")
        self.ttft, self.itl, self.tpot = (made(Histogram, n).labels(*self.labels) for n in names)
        self.input_len, self.output_len = (made(Histogram, n).labels(*self.labels) for n in ("request_prompt_tokens", "request_generation_tokens"))
        if not self.engine.draft_len:
            return
        self.drafts, self.drafted, self.accepted = (
            made(Counter, f"spec_decode_num_{n}").labels(*self.labels) for n in ("drafts", "draft_tokens", "accepted_tokens")
        )
        family = made(Counter, "spec_decode_num_accepted_tokens_per_pos", "position")
        self.per_pos = [family.labels(*self.labels, str(i)) for i in range(self.engine.draft_len)]

    @property
    def labels(self) -> tuple[str, str]:
        return self.engine.model, "0"

    def round(self, drafted: int, accepted: int) -> None:
        """One row of the engine's arrays."""
        if drafted == 0:
            return
        self.drafts.inc()
        self.drafted.inc(drafted)
        self.accepted.inc(accepted)
        for series in self.per_pos[:accepted]:
            series.inc()


@dataclass
class EngineServer:
    """A running server: `url`, and per finished request the engine's own (drafted, accepted) of each round."""

    engine: Engine
    port: int
    metrics: _Metrics
    history: list[list[tuple[int, int]]] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    running: list[object] = field(default_factory=list)
    """One entry for each request under way."""
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def generate(self, asked: _Asked) -> Generator[list[int], None, None]:
        """New tokens as they are decided, a list per round; `output_len` in all. What each round drafted and accepted is left in `asked.rounds`."""
        prompt, output_len, sampler = asked.prompt, asked.output_len, asked.sampler
        arrived, m, engine = time.perf_counter(), self.metrics, self.engine
        rounds = Rounds()
        slots = len(prompt) + output_len + 2 * (engine.draft_len + 2)
        m.running.inc()
        self.running.append(asked)
        try:
            with self.turn, torch.inference_mode():
                batch, cache = prefill(engine.target, [prompt], slots, sampler)
                drafter = engine.drafter() if engine.drafter is not None and engine.draft_len else None
                if drafter is not None:
                    drafter.begin(batch, slots)
            first = last = time.perf_counter()
            m.ttft.observe(first - arrived)
            m.prompt_tokens.inc(len(prompt))
            m.generated.inc()
            done = 1
            yield [int(batch.tokens[0, len(prompt)])]
            while done < output_len and not self.stopping.is_set():
                with self.turn:
                    decode_round(engine.target, cache, batch, drafter, engine.draft_len_at(len(self.running)), sampler, rounds)
                    drafted, accepted = int(rounds.drafted[-1][0]), int(rounds.accepted[-1][0])
                    m.round(drafted, accepted)
                    asked.rounds.append((drafted, accepted))
                now = time.perf_counter()
                m.itl.observe(now - last)
                last = now
                end = len(prompt) + min(output_len, done + accepted + 1)
                new = batch.tokens[0, len(prompt) + done : end].tolist()
                m.generated.inc(len(new))
                done += len(new)
                yield new
            if done == output_len:
                m.success.inc()
                m.input_len.observe(len(prompt))
                m.output_len.observe(output_len)
                m.tpot.observe((last - first) / max(1, output_len - 1))
        finally:
            m.running.dec()
            self.running.pop()
            self.history.append(asked.rounds)


@contextmanager
def serving(engine: Engine, port: int = 0) -> Iterator[EngineServer]:
    """Serve on loopback until the block ends; `port` 0 takes a free one."""
    http = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    http.daemon_threads = False  # so that closing waits for the answers under way
    server = EngineServer(engine, http.server_address[1], _Metrics(engine))
    http.engine_server = server  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        http.shutdown()
        thread.join()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    """The five paths. Connections are closed after each answer, so that no idle one keeps a thread."""

    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_S

    @property
    def home(self) -> EngineServer:
        return self.server.engine_server  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def _refused(self) -> bool:
        """Whether 401 was answered because the key is missing or another one."""
        wanted, given = self.home.engine.api_key, self.headers.get("Authorization", "")
        if wanted is None or not self.path.startswith("/v1") or hmac.compare_digest(given.encode(), f"Bearer {wanted}".encode()):
            return False
        self._json(401, {"error": "Unauthorized"})
        return True

    def do_GET(self) -> None:
        if self._refused():
            return
        engine = self.home.engine
        match self.path.split("?")[0]:
            case "/health":
                self._answer(200, b"")
            case "/version":
                self._json(200, {"version": VERSION})
            case "/v1/models":
                self._json(200, {"object": "list", "data": [{"id": engine.model, "object": "model", "owned_by": "vllm"}]})
            case "/metrics":
                self._answer(200, generate_latest(self.home.metrics.registry), "text/plain; version=0.0.4; charset=utf-8")
            case _:
                self._json(404, {"error": {"message": f"no such path: {self.path}"}})

    def do_POST(self) -> None:
        if self._refused():
            return
        if self.path != "/v1/completions":
            self._json(404, {"error": {"message": f"no such path: {self.path}"}})
            return
        try:
            asked = _asked(self.rfile.read(self._length()), self.home.engine)
        except (ValueError, TypeError, RecursionError) as error:
            self._json(400, {"error": {"message": str(error)}})
            return
        rounds = self.home.generate(asked)
        try:
            self._stream(asked, rounds) if asked.stream else self._whole(asked, rounds)
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True
        finally:
            rounds.close()

    def _length(self) -> int:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= _MOST_BODY_BYTES:
            raise ValueError(f"a body of {length} bytes; 1 to {_MOST_BODY_BYTES} are taken")
        return length

    def _whole(self, asked: _Asked, rounds: Iterator[list[int]]) -> None:
        tokens = [t for new in rounds for t in new]
        self._json(200, asked.event(self.home.engine, self.home.engine.decode(tokens), finished=True) | asked.usage(self.home.engine, len(tokens)))

    def _stream(self, asked: _Asked, rounds: Iterator[list[int]]) -> None:
        engine = self.home.engine
        self._head(200, "text/event-stream", chunked=True)
        said, text = [], ""
        for new in rounds:
            said += new
            whole = engine.decode(said)  # tokens may be parts of characters: only the whole text has a meaning
            self._chunk(asked.event(engine, whole[len(text) :], finished=False))
            text = whole
        self._chunk(asked.event(engine, "", finished=True))
        self._chunk({**asked.event(engine, "", finished=True), "choices": [], **asked.usage(engine, len(said))})
        self._chunk(None)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any] | None) -> None:
        data = f"data: {'[DONE]' if event is None else json.dumps(event)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _head(self, status: int, kind: str, length: int = 0, *, chunked: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(length))))
        self.end_headers()

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _json(self, status: int, value: Any) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json")


@dataclass(frozen=True)
class _Asked:
    """A completion request."""

    prompt: list[int]
    output_len: int
    sampler: Sampler
    stream: bool
    rounds: list[tuple[int, int]] = field(default_factory=list)

    def event(self, engine: Engine, text: str, *, finished: bool) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": "length" if finished else None}
        return {"object": "text_completion", "model": engine.model, "choices": [choice]}

    def usage(self, engine: Engine, tokens: int) -> dict[str, Any]:
        """What stands at the end: tokens, and the request's own acceptance where that is switched on."""
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": tokens, "total_tokens": len(self.prompt) + tokens}
        steps = [(d, a) for d, a in self.rounds if d]
        if not engine.per_request or not steps:
            return {"usage": usage}
        accepted, drafted = sum(a for _, a in steps), sum(d for d, _ in steps)
        own = {
            "mean_acceptance_length": 1 + accepted / len(steps), "draft_acceptance_rate": accepted / drafted, "num_spec_steps": len(steps),
            "acceptance_histogram": [sum(a == i for _, a in steps) for i in range(engine.draft_len + 1)], "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted, "num_spec_tokens": engine.draft_len, "per_step_accepted": [a for _, a in steps],
            "per_step_drafted": [d for d, _ in steps],
        }  # fmt: skip
        return {"usage": usage, "metrics": {"speculative_decoding": own}}


def _asked(body: bytes, engine: Engine) -> _Asked:
    """The fields that are understood; end-of-text is a token like any other, whatever ignore_eos says."""
    raw = json.loads(body)
    if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str):
        raise ValueError("prompt must be one text")
    output_len = raw.get("max_tokens", 16)
    if not isinstance(output_len, int) or not 1 <= output_len <= _MOST_TOKENS:
        raise ValueError(f"max_tokens must be a whole number in 1..{_MOST_TOKENS}")
    temperature = float(raw.get("temperature", 0.0))
    if not 0 <= temperature <= 100:
        raise ValueError("temperature must be in 0..100")
    generator = torch.Generator(engine.target.embed_tokens.weight.device).manual_seed(int(raw.get("seed") or 0)) if temperature else None
    prompt = list(engine.encode(raw["prompt"]))
    if not prompt:
        raise ValueError("the prompt is empty")
    return _Asked(prompt, output_len, Sampler(temperature, generator), bool(raw.get("stream")))
