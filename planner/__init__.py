"""Draftline's planner: `plan` and `predict`, and the values they are made of.

Names are loaded when asked for, so that `import planner` costs nothing.
"""

from __future__ import annotations

from typing import Any

_HOME = {
    "plan": "planner.planning",
    "Plan": "planner.planning",
    "Question": "planner.question",
    "predict": "planner.prediction",
    "predict_many": "planner.prediction",
    "Case": "planner.cases",
    "Prediction": "planner.cases",
    "Deployment": "planner.deployment",
    "ModelSpec": "planner.models.spec",
    "read_model": "planner.models.read",
    "DrafterSpec": "planner.drafters",
    "Survival": "planner.acceptance.survival",
    "import_acceptance": "planner.acceptance.importers",
    "DraftlineError": "planner.errors",
    "InputError": "planner.errors",
    "InfeasibleError": "planner.errors",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
