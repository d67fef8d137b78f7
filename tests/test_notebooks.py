"""Notebooks run from top to bottom; they end in asserts."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    assert all(not c.get("outputs") for c in book.cells), "commit notebooks without outputs"
    NotebookClient(book, timeout=300, kernel_name="python3").execute()
    assert "assert" in book.cells[-1].source
