"""Servers that do one thing wrong each, with real sockets on loopback. Runs inside a test, or as a program of its own (to be killed):
`python bad_server.py PORT BEHAVIOUR`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sesame-4711"
LABELS = 'engine="0",model_name="m"'


def metrics(draft_len: int, drafts: int, *, leave_out: str = "") -> str:
    """A vLLM scrape: every round drafts D, half of them have the first draft accepted."""
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{LABELS}}} {drafts}",
        f"vllm:spec_decode_num_draft_tokens_total{{{LABELS}}} {drafts * draft_len}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{LABELS}}} {drafts / 2}",
        *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="{i}"}} {drafts / 2 if i == 0 else 0}' for i in range(draft_len)),
        f"vllm:num_requests_running{{{LABELS}}} 2",
        f"vllm:generation_tokens_total{{{LABELS}}} {drafts * 1.5}",
    ]
    return "\n".join(line for line in lines if not leave_out or leave_out not in line) + "\n"


class Handler(BaseHTTPRequestHandler):
    """A stub of a vLLM server; `behaviour` says what is wrong."""

    protocol_version = "HTTP/1.1"
    timeout = 5.0

    def log_message(self, format: str, *args: Any) -> None: ...

    @property
    def behaviour(self) -> str:
        return self.server.behaviour  # type: ignore[attr-defined]

    def send(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        """`wants_key`: 401 which says the key back, as some do."""
        given = self.headers.get("Authorization", "")
        if self.behaviour != "wants_key" or given == f"Bearer {KEY}":
            return False
        self.send(401, f"wrong key: {given}")
        return True

    def do_GET(self) -> None:
        if self.refused():
            return None
        path = self.path.split("?")[0]
        if self.behaviour == "error" or (self.behaviour == "loading" and path == "/health"):
            return self.send(500 if self.behaviour == "error" else 503, "Internal Server Error: out of memory")
        if self.behaviour == "silent":
            self.server.over.wait(10)  # type: ignore[attr-defined]
            return None
        if self.behaviour == "drip":
            return self.drip()
        owner = {"sglang": "sglang", "llamacpp": "llamacpp", "trtllm": "tensorrt_llm"}.get(self.behaviour.split("_")[0], "vllm")
        pages = {
            "/health": "{}",
            "/version": '{"version": "0.33.0"}',
            "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": owner}]}),
            "/metrics": self.metrics(),
        } | PAGES.get(self.behaviour, {})
        return self.send(200, pages[path], "text/plain") if path in pages else self.send(404, "{}")

    def metrics(self) -> str:
        drafts = 100 * self.server.completions  # type: ignore[attr-defined]
        match self.behaviour:
            case "no_metrics":
                return ""
            case "plain":
                return f"vllm:num_requests_running{{{LABELS}}} 1\n"
            case "clamped":
                return metrics(2, drafts)
            case "no_positions":
                return metrics(4, drafts, leave_out="per_pos")
            case "no_accepted":
                return metrics(4, drafts, leave_out="num_accepted_tokens_total")
            case "drafts_nothing":
                return metrics(4, 0)
            case "cut":
                return metrics(4, drafts) + 'vllm:spec_decode_num_drafts_total{engine="0'
        return metrics(4, drafts)

    def do_POST(self) -> None:
        if self.refused():
            return None
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/completion":
            return self.llamacpp(body)
        self.server.completions += 1  # type: ignore[attr-defined]
        if self.behaviour in ("fails", "fails_later") and (self.behaviour == "fails" or self.server.completions > 4):  # type: ignore[attr-defined]
            return self.send(500, '{"error": "CUDA error: device-side assert triggered"}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        n = body["max_tokens"]
        for i in range(n):
            self.event({"choices": [{"text": f"{i} ", "finish_reason": None}]})
            if self.behaviour == "stalls" and i == 1:
                self.server.over.wait(10)  # type: ignore[attr-defined]
            if self.behaviour == "breaks" and i == 1:
                return self.connection.close()
            if self.behaviour == "is_killed" and self.server.completions > 10 and i == 2:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02 if self.behaviour == "slow" else 0.001)
        if self.behaviour == "cuda_in_stream":
            self.event({"error": {"message": "EngineDeadError"}})
        if self.behaviour != "no_usage":
            self.event({"choices": [], "usage": {"completion_tokens": n - 3 if self.behaviour == "short" else n}})
        self.wfile.write(b"0\r\n\r\n")
        return None

    def llamacpp(self, body: dict[str, Any]) -> None:
        """llama-server's own streaming: an event per token, the counts at the end."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        n = body["n_predict"]
        for i in range(n):
            self.event({"content": "" if i == 1 else "t ", "tokens": [i], "stop": False})
        timings = {"predicted_n": n, "draft_n": 2 * n, "draft_n_accepted": n // 2}
        self.event({"content": "", "tokens": [], "stop": True, "tokens_predicted": n, "timings": timings})
        self.wfile.write(b"0\r\n\r\n")

    def event(self, value: dict[str, Any]) -> None:
        data = f"data: {json.dumps(value)}\n\n".encode()
        try:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        except OSError:
            self.close_connection = True

    def drip(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        while not self.server.over.wait(0.05):  # type: ignore[attr-defined]
            try:
                self.wfile.write(b"x")
            except OSError:
                return


PAGES: dict[str, dict[str, str]] = {
    "another_method": {"/server_info": json.dumps({"vllm_config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}})},
    "sglang": {
        "/metrics": "",
        "/server_info": json.dumps({
            "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
            "version": "0.5.23", "max_running_requests": 48, "internal_states": [{"avg_spec_accept_length": 2.5}],
        }),
    },
    "llamacpp": {
        "/metrics": "",
        "/props": json.dumps({
            "default_generation_settings": {"params": {"speculative.n_max": 5, "speculative.types": "draft-eagle3"}}, "total_slots": 2,
            "build_info": "b1-abc",
        }),
    },
    "llamacpp_draft": {
        "/metrics": "llamacpp:requests_processing 0\n",
        "/props": json.dumps({"default_generation_settings": {"params": {"speculative.types": "none"}}, "total_slots": 1}),
        "/slots": json.dumps([{"id": 0, "speculative": True, "params": {"speculative.types": "none,draft-simple"}}]),
    },
    "trtllm": {"/metrics": "[]", "/version": '{"version": "1.3.0"}'},
}  # fmt: skip


_ROWS = [
    {"specDecodingStats": {"numDraftTokens": 6, "numAcceptedTokens": 3, "numRequestsWithDraftTokens": 2, "iterLatencyMS": 8.0}},
    {"specDecodingStats": {"numDraftTokens": 12, "numAcceptedTokens": 6, "numRequestsWithDraftTokens": 4, "iterLatencyMS": 12.0}},
    {"iter": 3},
]
_UNTIMED = [{k: {n: v for n, v in s.items() if n != "iterLatencyMS"}} for row in _ROWS[:2] for k, s in row.items()]
PAGES |= {"trtllm_live": {"/metrics": json.dumps(_ROWS)}, "trtllm_untimed": {"/metrics": json.dumps(_UNTIMED)}}


class _Http(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away on purpose here."""


def make(port: int, behaviour: str) -> _Http:
    http = _Http(("127.0.0.1", port), Handler)
    http.behaviour, http.completions, http.over = behaviour, 0, threading.Event()  # type: ignore[attr-defined]
    return http


@contextmanager
def bad_server(behaviour: str) -> Iterator[str]:
    """The address of a server that misbehaves."""
    http = make(0, behaviour)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.over.set()  # type: ignore[attr-defined]
        http.shutdown()
        thread.join()
        http.server_close()


if __name__ == "__main__":
    print("loading weights", flush=True)
    if sys.argv[2] == "dies_at_start":
        sys.exit("ValueError: num_speculative_tokens:7 must be divisible by n_predict=5")
    make(int(sys.argv[1]), sys.argv[2]).serve_forever()
