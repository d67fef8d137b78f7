"""Where acceptance data comes from: a text, a file, a run folder or an address -> one `Document`, with what parses as JSON parsed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InputError

TIMEOUT_S = 10.0
_MOST_BYTES = 256 * 2**20
#: In a run folder of Model-Optimizer specdec_bench or aiperf, the file that holds acceptance.
_RUN_FILES = ("acceptance_rate.json", "specbench_results.json", "profile_export_aiperf.json", "server_metrics_export.json")


@dataclass(frozen=True, slots=True)
class Document:
    """One input. `values`: the JSON values it consists of (one, or one per line), empty when it is not JSON."""

    text: str
    where: str
    values: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    json_error: str = ""


def read_source(source: str | Path) -> Document:
    """Text itself, the path of a file or run folder, or an http(s) address."""
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        return _document(_fetch(source), source)
    if isinstance(source, str) and (not source.strip() or "\n" in source or source.lstrip()[:1] in ("{", "[") or len(source) > 1024):
        return _document(source, "text")
    path = Path(source)
    try:
        if path.is_dir():
            path = _run_file(path)
        if not path.exists():
            if isinstance(source, Path) or "=" not in source:
                raise InputError("no such file", where=str(source), expected="a file, a run folder, an http(s) address or the text itself")
            return _document(source, "text")
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("the file is too large", where=str(path), got=path.stat().st_size, expected=f"at most {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError("cannot read the file", where=str(source)[:200], hint=str(error)) from None
    return _document(text, str(path), path.parent)


def _run_file(folder: Path) -> Path:
    for name in _RUN_FILES:
        if (folder / name).is_file():
            return folder / name
    raise InputError("the folder holds no acceptance file", where=str(folder), expected=" or ".join(_RUN_FILES))


def _fetch(address: str) -> str:
    """GET an address; a bare host means its /metrics."""
    import httpx

    try:
        url = httpx.URL(address)
        if url.path in ("", "/"):
            url = url.copy_with(path="/metrics")
        local = url.host in ("127.0.0.1", "localhost", "::1")
        with httpx.Client(timeout=TIMEOUT_S, trust_env=not local, follow_redirects=False) as client, client.stream("GET", url) as answer:
            if answer.status_code != 200:
                hint = "vLLM and SGLang need metrics switched on and the right path (/metrics, /server_info)."
                raise InputError("the server did not answer with data", where=str(url), got=answer.status_code, expected="status 200", hint=hint)
            body = bytearray()
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise InputError("the answer is too large", where=str(url), expected=f"at most {_MOST_BYTES} bytes")
            return body.decode("utf-8", errors="replace")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        hint = "Is the server running, and is this its address?"
        raise InputError(f"cannot read the address ({type(error).__name__})", where=address, hint=hint) from None


def _document(text: str, where: str, folder: Path | None = None) -> Document:
    if not text.strip():
        raise InputError("the input is empty", where=where, expected="a scrape, log, result file or table with acceptance figures")
    values, cut, error = _decode(text)
    notes = ("the last JSON value is cut off and left out",) if cut else ()
    return Document(text, where, values, notes, folder, error)


def _decode(text: str) -> tuple[tuple[Any, ...], bool, str]:
    """Every JSON value of a text (one, or one after the other), whether the last is cut, and the first error.

    Bare Infinity and NaN are tolerated (SGLang's bench_serving writes `"request_rate": Infinity`).
    """
    decoder = json.JSONDecoder()
    body = text.lstrip("\ufeff \t\r\n")
    if body.startswith("data:"):  # a saved stream of server-sent events
        body = "\n".join(line[5:].strip() for line in body.splitlines() if line.startswith("data:") and line[5:].strip() != "[DONE]")
    if body[:1] not in ("{", "["):
        return (), False, ""
    values: list[Any] = []
    at = 0
    while at < len(body):
        while at < len(body) and body[at] in " \t\r\n,":
            at += 1
        if at >= len(body):
            break
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            truncated = bool(values) and body[at] == "{" and "\n{" not in body[at:]
            return (tuple(values), True, "") if truncated else ((), False, str(error)[:200])
        if not isinstance(value, dict | list):
            return (), False, "a bare value between the objects"
        values.append(value)
    return tuple(values), False, ""
