"""Start an engine's server, wait until it is healthy, stop it again whatever happens. Flags are those that `planner.export` writes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from planner.deployment import Deployment
from planner.errors import InputError
from planner.export import exports_of
from planner.search import Arm
from planner.verify.remote.client import Endpoint, KeyRefused, Timeouts, fetch

LAST_LINES = 15
_POLL_S = 0.2
_GRACE_S = 10.0
"""Seconds between asking a server to end and ending it."""
_VALUELESS = ("--speculative-adaptive", "--spec-default")


@dataclass(frozen=True)
class Serve:
    """What to serve. kind None: plain decoding. model_path: what the engine loads instead of the deployment's model id (llama.cpp: a .gguf file);
    drafter_model: the draft model or head, in llama.cpp the path of its .gguf."""

    engine: str
    deployment: Deployment
    kind: str | None
    draft_len: int
    num_seqs: int
    drafter_model: str | None = None
    model_path: str | None = None
    extra: tuple[str, ...] = ()
    k0_tier: bool = False
    """The drafter is loaded for D = `draft_len`, and a schedule drafts nothing up to `num_seqs` requests."""


def k0_refusal(engine: str, kind: str, dp: int = 1) -> str | None:
    """Why `engine` has no tier that drafts nothing for this drafter; None where it has. Facts: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM (2026)."""
    if engine == "vllm":
        fixed = dp > 1 or kind in ("suffix", "dspark", "pard")
        return "vLLM falls back to a fixed D with data parallelism, and for suffix, DSpark and PARD" if fixed else None
    if engine == "sglang":
        return None if kind in ("eagle3", "mtp") and dp == 1 else "SGLang adapts D for EAGLE heads and MTP alone, and without DP attention"
    if engine == "trtllm":
        return "the first tier of TensorRT-LLM's schedule must be its longest D"
    return f"{engine} has no schedule by batch"


def free_port() -> int:
    """A port of loopback that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def server_command(serve: Serve, *, port: int, folder: Path) -> list[str]:
    """The command line of one arm. TensorRT-LLM's settings are written as YAML into `folder`."""
    kind, draft_len = (serve.kind, serve.draft_len) if serve.kind and serve.draft_len else ("ngram", 1)
    plain = not (serve.kind and serve.draft_len)
    row = {"drafter": kind, "drafter_model": serve.drafter_model, "draft_len": draft_len, "num_seqs": serve.num_seqs}
    arm = Arm(kind, serve.drafter_model, serve.deployment, None, draft_len)
    schedule = None
    if serve.k0_tier:
        if (why := k0_refusal(serve.engine, kind, serve.deployment.layout.dp)) is not None:
            raise InputError(f"no K=0 tier of {kind}", where="engine", got=serve.engine, hint=f"{why}.")
        # above the running batch drafts go on, as in a schedule that is worth having
        schedule = {"ranges": [[1, serve.num_seqs, 0], [serve.num_seqs + 1, 2 * serve.num_seqs, draft_len]]}
    bodies = exports_of(serve.deployment, arm, schedule, [row])
    if serve.engine not in bodies:
        known = ", ".join(sorted(bodies)) or "none"
        raise InputError(f"{serve.engine} cannot run {kind} drafts", where="engine", expected=f"one of {known}")
    model = serve.model_path or serve.deployment.model.id
    if serve.engine == "trtllm":
        return [*_trtllm(bodies["trtllm"]["config"], model, plain, folder), "--host", "127.0.0.1", "--port", str(port), *serve.extra]
    args = shlex.split(str(bodies[serve.engine]["command"]))
    args = [model if a == serve.deployment.model.id else a for a in args]
    if plain:
        args = without_speculation(args)
    if serve.engine == "llamacpp":
        if serve.model_path is None:
            raise InputError("llama.cpp loads a file", where="model_path", expected="the path of a .gguf file")
        files = {"MODEL.gguf": serve.model_path, f"{serve.drafter_model}.gguf": serve.drafter_model or ""}
        args = [files.get(a, a) for a in args] + ["--metrics", "--parallel", str(serve.num_seqs)]
    if serve.engine == "sglang":
        args.append("--enable-metrics")
        args += _sglang_tiers(serve, folder) if serve.k0_tier else []
    return [*args, "--host", "127.0.0.1", "--port", str(port), *serve.extra]


def _sglang_tiers(serve: Serve, folder: Path) -> list[str]:
    """A table with one candidate a key; a batch takes the largest key that is not above it, and D itself must be among the candidates."""
    path = folder / "sglang-tiers.json"
    tiers = {"1": {"candidate_steps": [0]}, str(2 * serve.num_seqs): {"candidate_steps": [serve.draft_len]}}
    path.write_text(json.dumps(tiers) + "\n", encoding="utf-8")
    return ["--speculative-adaptive", "--speculative-adaptive-config", str(path)]


def _trtllm(config: Mapping[str, object], model: str, plain: bool, folder: Path) -> list[str]:
    import yaml

    kept = {k: v for k, v in config.items() if not (plain and k == "speculative_config")}
    path = folder / "trtllm.yaml"
    path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return ["trtllm-serve", model, "--config", str(path)]


def without_speculation(args: Sequence[str]) -> list[str]:
    """The same command line with every speculation flag and its value left out: plain decoding, all else equal."""
    out: list[str] = []
    skip = False
    for a in args:
        if skip:
            skip = False
        elif a.startswith(("--speculative-", "--spec-")) or a == "-md":
            skip = a not in _VALUELESS and "=" not in a
        else:
            out.append(a)
    return out


@dataclass
class Server:
    """A running server."""

    endpoint: Endpoint
    process: subprocess.Popen[bytes]
    log: Path
    args: tuple[str, ...] = field(default=())

    def last_lines(self, count: int = LAST_LINES) -> str:
        return self.endpoint.hidden(_tail(self.log, count))


def _tail(log: Path, count: int = LAST_LINES) -> str:
    try:
        with log.open("rb") as f:
            start = max(0, log.stat().st_size - 16384)
            f.seek(start)
            lines = f.read().decode("utf-8", errors="replace").splitlines()[1 if start else 0 :]  # half a line may hold half a key
    except OSError:
        return "(no log)"
    return "\n".join(lines[-count:]) or ("(the last line of the log is too long to show)" if start else "(the log is empty)")


@contextmanager
def launched(  # noqa: PLR0913
    args: Sequence[str], address: str | Endpoint, log: Path, *, start_limit_s: float = 900.0, health: str = "/health",
    env: Mapping[str, str] | None = None, timeouts: Timeouts = Timeouts(),
) -> Iterator[Server]:  # fmt: skip
    """Run `args` until the block ends; inside it the server at `address` is healthy. Its output is kept in `log`.

    One that dies, or is not healthy after `start_limit_s` seconds, is an InputError with the last lines of its log. Its whole process group is
    stopped at the end, also after an error.
    """
    endpoint = address if isinstance(address, Endpoint) else Endpoint(address)
    _refuse_taken(endpoint)
    with log.open("wb") as out:
        try:
            # A group of its own, so that workers which the server starts end with it.
            process = subprocess.Popen(
                list(args), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **(env or {})}
            )
        except OSError as error:
            raise InputError("the server cannot be started", where=str(args[0]), got=error.strerror, hint="Is the engine installed?") from None
    server = Server(endpoint, process, log, tuple(args))
    try:
        _wait(server, start_limit_s, health, timeouts)
        yield server
    finally:
        _stop(process)
        _hide(log, endpoint)


def _hide(log: Path, endpoint: Endpoint) -> None:
    """Engines print their settings, a key that they took from the environment among them."""
    written = log.read_text(encoding="utf-8", errors="replace")
    if (kept := endpoint.hidden(written)) != written:
        log.write_text(kept, encoding="utf-8")


def _refuse_taken(endpoint: Endpoint) -> None:
    """Another server at this address would be measured instead."""
    import httpx

    url = httpx.URL(endpoint.base_url)
    try:
        socket.create_connection((url.host, url.port or 80), timeout=1.0).close()
    except OSError:
        return
    raise InputError("something already listens there", where=endpoint.base_url, expected="a free port", hint="Stop it, or take another port.")


def _wait(server: Server, limit_s: float, health: str, timeouts: Timeouts) -> None:
    end = time.monotonic() + limit_s
    state = "it takes no connections"
    while time.monotonic() < end:
        code = server.process.poll()
        if code is not None:
            raise InputError(f"the server ended before it was ready (exit status {code})", where=server.args[0],
                             hint=f"Its last lines:\n{server.last_lines()}")  # fmt: skip
        left = max(0.1, end - time.monotonic())
        try:
            waits = Timeouts(*(min(left, w) for w in (timeouts.connect_s, timeouts.silence_s, timeouts.answer_s)))
            answer = fetch(server.endpoint, health, waits)
            if answer.status == 200:
                return
            state = f"{health} answers {answer.status}"
        except KeyRefused:
            raise
        except InputError as error:
            state = str(error.what)
        time.sleep(min(_POLL_S, left))
    raise InputError("the server is not ready in time", where=server.args[0], got=f"after {limit_s:g} s: {state}",
                     hint=f"Its last lines:\n{server.last_lines()}")  # fmt: skip


def _stop(process: subprocess.Popen[bytes]) -> None:
    for how, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        try:
            os.killpg(process.pid, how)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
        if how == signal.SIGKILL:
            break
        # The leader ended; workers that outlived it are ended now rather than left behind. The group is gone when this fails.
    process.wait(_GRACE_S)
