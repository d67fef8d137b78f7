"""Which server is this, and what does it say that it has loaded?

Recognised by `owned_by` of /v1/models, else by the prefix of its metrics, else by /props (llama.cpp) and /server_info (SGLang). What a server says
about itself is material to check against its counters (`counters.check_loaded`), not proof.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.acceptance.importers.engines import having, sglang_draft_len
from planner.acceptance.importers.source import Document
from planner.errors import InputError
from planner.export import LLAMACPP_TYPE, VLLM_METHOD

LOCAL = ("127.0.0.1", "localhost", "::1")
_MOST_BYTES = 64 * 2**20
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}
_PREFIXES = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llamacpp", "trtllm_": "trtllm"}
#: Engines' own words -> our drafter kinds. `draft_model` is also how vLLM runs PARD; "external" stands for both.
KIND_OF_METHOD = {m: k for k, m in reversed(VLLM_METHOD.items())} | {t: k for k, t in LLAMACPP_TYPE.items()} | {"ngram_gpu": "ngram"}


#: Keys that engines take from the environment by themselves.
KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY", "HF_TOKEN")
#: A shorter value there is a placeholder; hiding it ("vllm", say) would blot out what servers say.
SHORTEST_KEY = 8


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait: for a connection, for the next bytes of an answer, for a whole answer."""

    connect_s: float = 5.0
    silence_s: float = 30.0
    answer_s: float = 60.0


@dataclass(frozen=True)
class Endpoint:
    """Where an engine listens. engine: vllm, sglang, trtllm, llamacpp or openai (any server with /v1/completions). api_key: sent with every
    request as a bearer token, and shown nowhere."""

    base_url: str = "http://127.0.0.1:8000"
    engine: str = "openai"
    model: str = ""
    api_key: str | None = field(default=None, repr=False)

    @property
    def local(self) -> bool:
        """On this machine: then no proxy of the environment stands between."""
        import httpx

        return httpx.URL(self.base_url).host in LOCAL

    def at(self, path: str) -> str:
        return self.base_url.rstrip("/") + path

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def hidden(self, text: str) -> str:
        """`text` without the key, nor those that a server inherits with the environment: they may say them back in errors and logs."""
        inherited = (value for name in KEY_VARIABLES if len(value := os.environ.get(name, "")) >= SHORTEST_KEY)
        for secret in sorted(filter(None, (self.api_key, *inherited)), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


class KeyRefused(InputError):
    """401 or 403: no further request can do better."""

    def __init__(self, endpoint: Endpoint, url: str, status: int) -> None:
        asked = "the server wants an API key" if endpoint.api_key is None else "the server refuses the API key"
        hint = "Put the key into an environment variable and name that with --api-key-env NAME."
        super().__init__(asked, where=url, got=f"status {status}", expected="a key that it accepts", hint=hint)


@dataclass(frozen=True)
class Answer:
    """Status and text of one GET."""

    url: str
    status: int
    text: str

    @property
    def values(self) -> Mapping[str, Any]:
        """The JSON object it holds, empty where it holds none."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class ServerIdentity:
    """What a server says about itself; None = it does not say. method is the engine's own word, kind ours, draft_len in tokens, max_seqs the
    requests that it decodes at once."""

    endpoint: Endpoint
    version: str | None = None
    method: str | None = None
    kind: str | None = None
    draft_len: int | None = None
    speculating: bool | None = None
    max_seqs: int | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = {None: "does not say whether it speculates", False: "no speculation", True: f"{self.method or 'a drafter that it does not name'}"}
        said = what[self.speculating] + (f" with D={self.draft_len}" if self.draft_len is not None else "")
        return f"{self.endpoint.engine} {self.version or ''} at {self.endpoint.base_url}: {said}".replace("  ", " ")


def fetch(endpoint: Endpoint, path: str, timeouts: Timeouts) -> Answer:
    """GET; any status is an answer, but for 401 and 403 (KeyRefused). No connection, silence or an endless answer is one InputError."""
    import httpx

    url, begin = endpoint.at(path), time.monotonic()
    limits = httpx.Timeout(timeouts.silence_s, connect=timeouts.connect_s)
    try:
        with httpx.Client(timeout=limits, trust_env=not endpoint.local) as client, client.stream("GET", url, headers=endpoint.headers) as answer:
            if answer.status_code in (401, 403):
                raise KeyRefused(endpoint, url, answer.status_code)
            body = bytearray()
            for chunk in answer.iter_bytes():
                body += chunk
                # httpx limits each read; a server that drips bytes for ever is stopped here.
                if time.monotonic() - begin > timeouts.answer_s or len(body) > _MOST_BYTES:
                    raise InputError("the answer does not end", where=url, got=f"{len(body)} bytes in {time.monotonic() - begin:.1f} s",
                                     expected=f"at most {_MOST_BYTES} bytes within {timeouts.answer_s:g} s")  # fmt: skip
            return Answer(url, answer.status_code, endpoint.hidden(body.decode("utf-8", errors="replace")))
    except httpx.TimeoutException as error:
        which = timeouts.connect_s if isinstance(error, httpx.ConnectTimeout) else timeouts.silence_s
        hint = "It may still be loading, be overloaded, or hang."
        raise InputError("the server answers too slowly", where=url, got=f"nothing for {which:g} s", expected="an answer", hint=hint) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        what = "the connection broke off" if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) else "the server cannot be reached"
        hint = "Is it running, and is this its address?"
        raise InputError(f"{what} ({type(error).__name__})", where=url, hint=hint) from None


def _optional(endpoint: Endpoint, path: str, timeouts: Timeouts) -> Answer:
    """GET of what not every server has; a 4xx leaves the text empty, a 5xx is an error of the server's."""
    answer = fetch(endpoint, path, timeouts)
    if answer.status >= 500:
        got = f"{answer.status} {answer.text[:200].strip()}"
        raise InputError("the server answers with an error", where=answer.url, got=got, expected="status 200", hint="Its own log says more.")
    return answer if answer.status == 200 else replace(answer, text="")


def identify(server: str | Endpoint, *, timeouts: Timeouts = Timeouts()) -> ServerIdentity:
    """Ask a server (its address, or an `Endpoint` with a key) what it is. Raises InputError when it cannot be reached, answers 5xx, wants another
    key or is no OpenAI-compatible server."""
    given = server if isinstance(server, Endpoint) else Endpoint(server)
    if not given.base_url.lower().startswith(("http://", "https://")):
        raise InputError("not a server's address", where="url", got=given.base_url, expected="http://HOST:PORT")
    end = replace(given, base_url=given.base_url.rstrip("/").removesuffix("/v1"))
    models = _optional(end, "/v1/models", timeouts)
    data = models.values.get("data")
    cards = [c for c in data if isinstance(c, Mapping)] if isinstance(data, list) else []
    metrics = _optional(end, "/metrics", timeouts).text
    owner = str(cards[0].get("owned_by", "")) if cards else ""
    engine = _OWNERS.get(owner) or next((e for p, e in _PREFIXES.items() if f"\n{p}" in "\n" + metrics), None)
    if engine is None and "default_generation_settings" in _optional(end, "/props", timeouts).values:
        engine = "llamacpp"
    if engine is None and "speculative_algorithm" in _optional(end, "/server_info", timeouts).values:
        engine = "sglang"
    if engine is None and not cards:
        raise InputError(
            "no engine is recognised", where=end.base_url, got=models.text[:80] or f"status {models.status} of /v1/models",
            expected="vLLM, SGLang, TensorRT-LLM or llama.cpp with an OpenAI-compatible API", hint="Is this the server's root address?",
        )  # fmt: skip
    end = replace(end, engine=engine or "openai", model=str(cards[0].get("id", "")) if cards else "")
    said = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}.get(end.engine)
    if said is not None:
        return said(end, metrics, timeouts)
    note = "this engine does not say which drafter it has loaded: only what it drafts can be checked"
    return ServerIdentity(end, _version(end, timeouts), notes=(note,))


def _version(end: Endpoint, timeouts: Timeouts) -> str | None:
    version = _optional(end, "/version", timeouts).values.get("version")
    return None if version is None else str(version)


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6 else None


def _vllm(end: Endpoint, metrics: str, timeouts: Timeouts) -> ServerIdentity:
    """D is the number of per-position series, which exist from the start. The method is told only in development mode (VLLM_SERVER_DEV_MODE=1)."""
    from planner.acceptance.importers.prometheus import parse

    version = _version(end, timeouts)
    if "vllm:" not in metrics:
        return ServerIdentity(end, version, notes=("/metrics is missing or empty: nothing can be said about speculation",))
    values = parse(Document(metrics, end.at("/metrics"))).values
    positions = {dict(labels).get("position") for labels in values.get("vllm:spec_decode_num_accepted_tokens_per_pos", {})}
    speculating = "vllm:spec_decode_num_drafts" in values or bool(positions)
    found = ServerIdentity(end, version, draft_len=len(positions) or None, speculating=speculating)
    info = _optional(end, "/server_info?config_format=json", timeouts)
    told = having(Document(info.text, info.url, (info.values,)), "method", "num_speculative_tokens")
    if not told:
        note = "vLLM tells its method only in development mode: only its counters are checked"
        return replace(found, notes=(note,)) if speculating else found
    method = str(told[0][1]["method"])
    kind = "mtp" if method.endswith("_mtp") else KIND_OF_METHOD.get(method)
    return replace(found, method=method, kind=kind, draft_len=found.draft_len or _whole(told[0][1]["num_speculative_tokens"]), speculating=True)


def _sglang(end: Endpoint, metrics: str, timeouts: Timeouts) -> ServerIdentity:
    info = _optional(end, "/server_info", timeouts)
    if not info.text:
        info = _optional(end, "/get_server_info", timeouts)  # before 0.5
    rows = having(Document(info.text, info.url, (info.values,)), "speculative_algorithm")
    values = rows[0][1] if rows else {}
    version = values.get("version") or info.values.get("version")
    base = ServerIdentity(end, None if version is None else str(version), max_seqs=_whole(values.get("max_running_requests")))
    if not values:
        return replace(base, notes=("/server_info does not name a speculative_algorithm",))
    if not values.get("speculative_algorithm"):
        return replace(base, speculating=False)
    draft_len, flags, kind = sglang_draft_len(values, info.url)
    notes = ("it drafts a tree (topk > 1 or n-gram): D is its depth or size, not a chain's length",) if "tree" in flags else ()
    return replace(base, method=str(values["speculative_algorithm"]), kind=kind, draft_len=draft_len, speculating=True, notes=notes)


def _llamacpp(end: Endpoint, metrics: str, timeouts: Timeouts) -> ServerIdentity:
    """/props holds the defaults of a request, where build 11434 says "none" although it drafts; whether a slot can speculate stands in /slots, and
    with which method once it has answered a request."""
    props = _optional(end, "/props", timeouts).values
    settings = props.get("default_generation_settings")
    slots = fetch(end, "/slots", timeouts)  # 501 where it was started without
    slot = _first_slot(slots) if slots.status == 200 else {}
    said = [v["params"] for v in (slot, settings) if isinstance(v, Mapping) and isinstance(v.get("params"), Mapping)]
    methods = [_llamacpp_method(p.get("speculative.types", p.get("speculative.type"))) for p in said]
    method = next((m for m in methods if m not in (None, "none")), None)
    speculating = True if method else slot.get("speculative") if isinstance(slot.get("speculative"), bool) else False if "none" in methods else None
    build = props.get("build_info")
    model = end.model or str(props.get("model_alias") or props.get("model_path") or "")
    base = ServerIdentity(replace(end, model=model), None if build is None else str(build), max_seqs=_whole(props.get("total_slots")))
    notes = () if "llamacpp:" in metrics else ("started without --metrics: acceptance comes from the answers' timings, without positions",)
    if method is None:
        return replace(base, speculating=speculating, notes=notes)
    lookup = method.startswith("ngram-")
    kind = "ngram" if lookup else KIND_OF_METHOD.get(method)
    # n_max is the D of draft models in older builds; look-up types have settings of their own, which are not shown.
    draft_len = None if lookup else next((_whole(p["speculative.n_max"]) for p in said if "speculative.n_max" in p), None)
    return replace(base, method=method, kind=kind, draft_len=draft_len, speculating=True, notes=notes)


def _first_slot(answer: Answer) -> Mapping[str, Any]:
    """The first of /slots that says a method, else the first."""
    try:
        slots = [s for s in json.loads(answer.text) if isinstance(s, Mapping)]
    except (ValueError, TypeError, RecursionError):
        return {}
    return next((s for s in slots if "params" in s), slots[0] if slots else {})


def _llamacpp_method(types: object) -> str | None:
    """A type given on the command line is put after the default: "none,draft-simple"."""
    named = [str(t) for t in types] if isinstance(types, list) else str(types).split(",") if types else []
    return ",".join(t for t in named if t != "none") or ("none" if named else None)
