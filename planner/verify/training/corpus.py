"""Text that every machine with Python has: the standard library (code), its help topics (prose), generated records and logs (structured).

A document belongs to the held-out part by the hash of its name, so that train and held-out never share a file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORKLOADS = ("code", "prose", "structured")
#: One document in so many is held out.
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Document:
    workload: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def code_documents() -> Iterator[Document]:
    """Modules of the standard library without tests, code pages and the help topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "idle_test", "lib2to3"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.intersection(relative.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if 200 <= len(text) <= 400_000:
            yield Document("code", relative.as_posix(), text)


def prose_documents(chars: int = 2000) -> Iterator[Document]:
    """The language reference that `help()` shows, in pieces of a topic. Topics repeat each other: a paragraph counts once, or held-out text
    would be trained on."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    topics = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    seen: set[str] = set()
    for name, text in sorted(topics.items()):
        fresh = [p for p in text.strip().split("\n\n") if not (p in seen or seen.add(p))]  # type: ignore[func-returns-value]
        piece: list[str] = []
        for i, paragraph in enumerate(fresh):
            piece.append(paragraph)
            if sum(map(len, piece)) >= chars or i == len(fresh) - 1:
                yield Document("prose", f"topic {name} to paragraph {i}", "\n\n".join(piece) + "\n")
                piece = []


_FIRST = [
    "ada",
    "alan",
    "barbara",
    "claude",
    "dennis",
    "donald",
    "edsger",
    "frances",
    "grace",
    "john",
    "ken",
    "leslie",
    "margaret",
    "niklaus",
    "robin",
    "sophie",
    "tony",
    "vint",
]
_SERVICES = [
    "api",
    "auth",
    "billing",
    "cache",
    "checkout",
    "gateway",
    "inventory",
    "mailer",
    "orders",
    "payments",
    "search",
    "shipping",
    "users",
    "worker",
]
_CITIES = [
    "Amsterdam",
    "Berlin",
    "Chicago",
    "Dublin",
    "Geneva",
    "Helsinki",
    "Lisbon",
    "London",
    "Madrid",
    "Oslo",
    "Paris",
    "Prague",
    "Rome",
    "Seoul",
    "Tokyo",
    "Vienna",
    "Zurich",
]
_PATHS = ["/v1/orders", "/v1/users", "/v1/search", "/v2/items", "/health", "/login", "/v1/payments", "/v2/cart", "/metrics", "/v1/export"]
_ERRORS = ("connection reset by peer", "deadline exceeded", "invalid token", "disk quota exceeded", "upstream timed out", "record not found")


def _record(rng: random.Random) -> str:
    rows = [
        {
            "id": rng.randrange(1000, 99999),
            "name": rng.choice(_FIRST),
            "city": rng.choice(_CITIES),
            "active": rng.random() < 0.7,
            "score": round(rng.uniform(0, 100), 1),
            "tags": rng.sample(_SERVICES, rng.randint(1, 3)),
            "address": {"street": f"{rng.randrange(1, 200)} {rng.choice(_CITIES)} Road", "zip": f"{rng.randrange(10000, 99999)}"},
        }
        for _ in range(rng.randint(3, 8))
    ]
    return json.dumps({"page": rng.randrange(1, 50), "total": rng.randrange(50, 900), "items": rows}, indent=rng.choice((1, 2, 4))) + "\n"


def _log(rng: random.Random) -> str:
    day, second, lines = f"2026-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}", rng.randrange(86400), []
    for _ in range(rng.randint(15, 40)):
        second += rng.randrange(0, 9)
        clock = f"{day}T{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
        service, path = rng.choice(_SERVICES), rng.choice(_PATHS)
        kind = rng.random()
        if kind < 0.6:
            item, status = rng.randrange(1, 9999), rng.choice((200, 200, 200, 201, 304, 404))
            line = f"INFO {service} GET {path}/{item} status={status} took={rng.randrange(1, 900)}ms"
        elif kind < 0.85:
            line = f"DEBUG {service} cache {rng.choice(('hit', 'miss'))} key=user:{rng.randrange(1, 9999)} shard={rng.randrange(16)}"
        else:
            line = f"ERROR {service} request {path} failed: {rng.choice(_ERRORS)} (attempt {rng.randrange(1, 5)} of 5)"
        lines.append(f"{clock} {line}")
    return "\n".join(lines) + "\n"


def structured_documents(count: int = 4000) -> Iterator[Document]:
    """Generated JSON pages and log files, each from its own seed."""
    for i in range(count):
        name = f"generated {i}"
        rng = random.Random(name)
        yield Document("structured", name, (_record if rng.random() < 0.5 else _log)(rng))


def documents(*, held_out: bool) -> dict[str, list[Document]]:
    """All documents of one side, by workload."""
    every = {"code": code_documents(), "prose": prose_documents(), "structured": structured_documents()}
    return {workload: [d for d in docs if d.held_out == held_out] for workload, docs in every.items()}


#: A prompt starts at the start of a line; of code, where a definition starts, or it would often be a docstring.
_STARTS = {"code": re.compile(r"^(?=(?:    )?(?:async )?(?:def|class) )", re.MULTILINE)}
_LINE = re.compile(r"^", re.MULTILINE)


def prompts(workload: str, count: int, *, chars: int = 400, seed: int = 7) -> list[dict[str, str]]:
    """Held-out prompts of `chars` characters: `[{"id", "category", "source", "prompt"}]`."""
    rng = random.Random(f"{seed} {workload}")
    places = [
        (doc, m.end())
        for doc in documents(held_out=True)[workload]
        for m in _STARTS.get(workload, _LINE).finditer(doc.text)
        if m.end() + chars <= len(doc.text)
    ]
    chosen = rng.sample(places, count)
    return [
        {"id": f"{workload}-{i}", "category": workload, "source": doc.name, "prompt": doc.text[at : at + chars]} for i, (doc, at) in enumerate(chosen)
    ]
