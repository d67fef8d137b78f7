"""Predictions against other people's measurements: rows to cases, answers to figures, a table for people."""

from planner.validate.markdown import accuracy_markdown
from planner.validate.scores import validate_all

__all__ = ["accuracy_markdown", "validate_all"]
