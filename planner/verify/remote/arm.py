"""One arm over HTTP: warm up, scrape, load, scrape, check that the server did what it was asked for; on a running server, or on one that is started
for the arm and stopped after it (every engine takes its method and D at the start only)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.verify.remote.client import Endpoint, ServerIdentity, Timeouts, identify
from planner.verify.remote.counters import Observed, check_loaded, observe, snapshot
from planner.verify.remote.launch import Serve, free_port, launched, server_command
from planner.verify.remote.load import Load, LoadSpec, closed_loop


@dataclass(frozen=True)
class Arm:
    """A measured arm. observed: None where the server died before its counters could be read; problems: everything that makes the figures doubtful,
    empty for a clean run."""

    identity: ServerIdentity
    load: Load
    observed: Observed | None
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        observed = None if self.observed is None else self.observed.to_dict()
        return {"server": str(self.identity), "load": self.load.to_dict(), "observed": observed, "problems": list(self.problems)}

    @property
    def acceptance_len(self) -> float | None:
        """Tokens a round, bonus included; 1 for plain decoding is not filled in here."""
        return None if self.observed is None or self.observed.acceptance is None else self.observed.acceptance.acceptance_len


def measure_arm(  # noqa: PLR0913
    server: str | Endpoint, prompts: Sequence[str], spec: LoadSpec, *, kind: str | None = None, draft_len: int = 0, warmup: int | None = None,
    timeouts: Timeouts = Timeouts(),
) -> Arm:  # fmt: skip
    """Measure one arm on a running server. `kind`, `draft_len`: what it was asked to run (None, 0: plain decoding; a kind
    with 0: a K = 0 tier). `warmup`: requests before
    anything is counted (default: one round of `concurrency`), of the same shape, so that every batch size in use has been compiled.

    A server that cannot be reached at the start is an InputError; one that fails later leaves its partial results and says so in `problems`.
    """
    identity = identify(server, timeouts=timeouts)
    endpoint, base_url = identity.endpoint, identity.endpoint.base_url
    count = spec.concurrency if warmup is None else warmup
    if count:
        warm = closed_loop(endpoint, prompts, replace(spec, requests=max(count, spec.concurrency)), timeouts=timeouts)
        if warm.error or not warm.sent:
            return Arm(identity, replace(warm, sent=()), None, (f"{base_url}: in the warm-up: {(*warm.problems, 'no request was answered')[0]}",))
    if endpoint.engine == "llamacpp":
        identity = identify(endpoint, timeouts=timeouts)  # it names its method once it has answered
    before = snapshot(endpoint, timeouts=timeouts)
    load = closed_loop(endpoint, prompts, spec, timeouts=timeouts)
    problems = list(load.problems)
    try:
        after = snapshot(endpoint, timeouts=timeouts)
    except InputError as error:
        return Arm(identity, load, None, (*problems, f"the counters after the load cannot be read: {error}"))
    observed = observe(before, after, load, kind=kind, draft_len=draft_len or None)
    problems += check_loaded(identity, observed, kind=kind, draft_len=draft_len)
    said = " ".join(problems)
    problems += [p for p in observed.problems if p not in said and draft_len > 0]
    if identity.max_seqs is not None and identity.max_seqs < spec.concurrency:
        problems.append(f"{base_url}: it decodes at most {identity.max_seqs} requests at once, {spec.concurrency} were in flight: the rest queued")
    return Arm(identity, load, observed, tuple(problems))


def launch_and_measure(  # noqa: PLR0913
    serve: Serve, prompts: Sequence[str], spec: LoadSpec, *, folder: Path, name: str, start_limit_s: float = 900.0, timeouts: Timeouts = Timeouts(),
) -> Arm:  # fmt: skip
    """Start the server of an arm, measure it, stop it. Its log is kept as NAME.log in `folder`."""
    port = free_port()
    command, url = server_command(serve, port=port, folder=folder), f"http://127.0.0.1:{port}"
    with launched(command, url, folder / f"{name}.log", start_limit_s=start_limit_s, timeouts=timeouts) as server:
        arm = measure_arm(url, prompts, spec, kind=serve.kind, draft_len=serve.draft_len, timeouts=timeouts)
        if arm.observed is None:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(2.0)  # its sockets close before its exit status is there
        if server.process.poll() is None:
            return arm
        died = f"the server ended with exit status {server.process.returncode}; its last lines:\n{server.last_lines()}"
        return replace(arm, problems=(*arm.problems, died))


@dataclass(frozen=True)
class SameTexts:
    """Greedy outputs of two arms, prompt by prompt. first_difference: (prompt, character) where the first differing pair parts.

    Over HTTP a tie of two logits cannot be told from a fault: kernels of different width round differently, so that real engines part now and then.
    """

    identical: int
    compared: int
    first_difference: tuple[int, int] | None


def same_texts(plain: Load, speculative: Load) -> SameTexts:
    """Compare what two arms said to the same prompts at temperature 0."""
    texts = [{r.prompt: r.text for r in reversed(load.sent)} for load in (plain, speculative)]
    both = sorted(texts[0].keys() & texts[1].keys())
    different = [p for p in both if texts[0][p] != texts[1][p]]
    first = None
    if different:
        a, b = (t[different[0]] for t in texts)
        first = (different[0], next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))))
    return SameTexts(len(both) - len(different), len(both), first)
