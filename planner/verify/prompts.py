"""Prompt sets: JSON lines as SPEED-Bench writes them, ShareGPT, or plain lines; the built-in set of code, prose and structured text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InputError


@dataclass(frozen=True)
class PromptSet:
    """Prompts as (category, text), in the order of their file."""

    rows: tuple[tuple[str, str], ...]
    source: str

    def counts(self) -> dict[str, int]:
        return dict(Counter(c for c, _ in self.rows))

    def take(self, category: str, count: int) -> list[str]:
        """The first `count` prompts of a category; fewer are repeated in turn. Raises InputError where there are none."""
        found = [t for c, t in self.rows if c == category]
        if not found:
            raise InputError("no prompts of this category", where=self.source, got=category, expected=", ".join(sorted(self.counts())))
        return [found[i % len(found)] for i in range(count)]

    def others(self, used: int, count: int) -> list[str]:
        """`count` prompts that `take(..., used)` leaves out, categories in turn; where a file has too few, its last ones."""
        by_category = {c: [t for k, t in self.rows if k == c] for c in self.counts()}
        spare = [rows[used:] or rows[-1:] for rows in by_category.values()]
        turns = [rows[i % len(rows)] for i in range(count) for rows in spare]
        return turns[:count]


def builtin_prompt_set() -> PromptSet:
    """Held-out text that ships with the family."""
    from planner.verify.family import builtin_prompts

    return PromptSet(tuple((r.category, r.prompt) for r in builtin_prompts()), "built-in prompts")


def read_prompts(path: Path) -> PromptSet:
    """A prompt file, recognised by its content. Raises InputError naming the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("cannot read the prompt file", where=str(path), hint=str(error)) from None
    stripped = text.lstrip()
    if stripped.startswith("["):
        rows = _whole(stripped, path)
    elif stripped.startswith("{"):
        rows = [_line(line, f"{path}, line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        rows = [("prompts", line) for line in text.splitlines() if line.strip()]
    if not rows:
        raise InputError("holds no prompts", where=str(path), expected='JSON lines with "prompt" (and "category"), ShareGPT, or one prompt a line')
    return PromptSet(tuple(rows), str(path))


def _whole(text: str, path: Path) -> list[tuple[str, str]]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("not valid JSON", where=str(path), hint=str(error)) from None
    return [_row(item, f"{path}, item {i}") for i, item in enumerate(items)]


def _line(line: str, where: str) -> tuple[str, str]:
    try:
        return _row(json.loads(line), where)
    except (ValueError, RecursionError) as error:
        raise InputError("not valid JSON", where=where, got=line[:60], hint=str(error)) from None


def _row(item: Any, where: str) -> tuple[str, str]:
    """SPEED-Bench: `turns` and `category`; ShareGPT: `conversations` of `from` and `value`; chat: `messages`; plain: `prompt` or `text`."""
    if isinstance(item, str) and item:
        return "prompts", item
    if not isinstance(item, Mapping):
        raise InputError("not a prompt", where=where, got=type(item).__name__, expected="an object or a string")
    category = str(item.get("category") or item.get("workload") or "prompts")
    turns = item.get("turns") or item.get("conversations") or item.get("messages")
    if isinstance(turns, list) and turns:
        first = turns[0]
        text = first if isinstance(first, str) else (first.get("value") or first.get("content") if isinstance(first, Mapping) else None)
    else:
        text = next((item[k] for k in ("prompt", "text", "input", "question") if isinstance(item.get(k), str)), None)
    if not isinstance(text, str) or not text:
        raise InputError("no prompt text", where=where, got=sorted(map(str, item)), expected="one of turns, conversations, messages, prompt, text")
    return category, text
