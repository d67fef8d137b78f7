"""Errors a user can cause, each with one clear text.

DraftlineError                 base; the command line prints it without a traceback
|-- InputError                 exit 2: a file, key or value is wrong
|   |-- ModelConfigError       a model or drafter config cannot be read
|   `-- ProfileError           a GPU or engine profile is unknown or lacks a number
|-- InternalError              a fault of ours, kept to the one line that shows it
`-- InfeasibleError            exit 3: nothing asked for fits the hardware
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DraftlineError(Exception):
    """Base of every error that the user, not the program, can mend."""

    exit_code = 2


class InputError(DraftlineError):
    """Bad input. The text says where, what, got, expected and the next step."""

    def __init__(self, what: str, *, where: str = "", got: object = None, expected: str = "", hint: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.hint = what, where, got, expected, hint
        parts = [f"{where}: {what}" if where else what]
        if got is not None:
            parts.append(f"got {got!r}")
        if expected:
            parts.append(f"expected {expected}")
        text = "; ".join(parts)
        super().__init__(f"{text}. {hint}" if hint else text)


class ModelConfigError(InputError):
    """A config.json lacks what is needed or contradicts itself."""


class ProfileError(InputError):
    """A GPU or engine profile is unknown, or lacks a number that the question needs."""


class InfeasibleError(DraftlineError):
    """What was asked for does not fit the hardware."""

    exit_code = 3


class InternalError(DraftlineError):
    """A fault of the program, reported on the line that met it so that the other lines keep their answers."""

    exit_code = 1

    @classmethod
    def of(cls, fault: Exception) -> InternalError:
        return cls(f"Draftline failed on this input ({type(fault).__name__}: {str(fault)[:200]}). Please report it with the line.")


def suggest(name: str, known: Iterable[str], n: int = 3) -> str:
    """``Did you mean a, b?`` for the nearest known names, or an empty string."""
    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), list(lower), n=n, cutoff=0.45)
    return f"Did you mean {', '.join(lower[c] for c in close)}?" if close else ""
