"""The shipped engine numbers and bands are what the fits make of the packaged measurements, starting from defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_profiles.load import load_engine
from planner.calibrate.engine import FITTED_ENGINES, left_out
from planner.calibrate.rounds import rounds_left_out
from planner.calibrate.ship import shipped
from planner.validate.rows import find_data

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return shipped(find_data(None))


@pytest.mark.slow
@pytest.mark.parametrize("engine", FITTED_ENGINES)
def test_shipped_overheads_are_re_made(made: dict[str, Any], engine: str) -> None:
    profile = load_engine(engine)
    for name, value in made["overheads"].items():
        key, _, arch = name.partition("@")
        if arch and arch not in profile.overheads_by_arch:
            continue  # an engine that does not run there
        held = profile.overheads_by_arch[arch] if arch else profile.overheads
        assert held[key] == pytest.approx(value, rel=0.02, abs=2e-7 if key == "per_seq_s" else 1e-9), key


@pytest.mark.slow
def test_shipped_bands_are_re_made(made: dict[str, Any]) -> None:
    held = json.loads((ROOT / "planner" / "data" / "bands.json").read_text(encoding="utf-8"))["bands"]
    assert set(held) == set(made["bands"])
    for key, (low, high) in made["bands"].items():
        assert held[key] == pytest.approx([low, high], abs=0.01), key
        assert low < 0 < high


@pytest.mark.slow
def test_left_out_errors_stay_within_bounds() -> None:
    """Printed by `validate --refit`; a change that worsens them must be looked at."""
    data = find_data(None)
    table = {r["fit"]: r for r in left_out(data) + rounds_left_out(data)}
    print({k: (round(r["median"], 4), round(r["p90"], 4)) for k, r in table.items()})
    assert table["TPOT, (model, GPU) left out"]["median"] < 0.11 and table["TPOT, (model, GPU) left out"]["p90"] < 0.30
    assert table["TPOT, GPU left out"]["median"] < 0.12 and table["TPOT, GPU left out"]["p90"] < 0.32
    eight = table["TPOT, (model, GPU) left out but 8 rows of the deployment"]
    assert eight["median"] < 0.06 and eight["p90"] < 0.18
    assert table["speedup, (source, model) left out"]["median"] < 0.13 and table["speedup, (source, model) left out"]["p90"] < 0.32


def test_readme_headline_figures_stand_on_the_accuracy_page() -> None:
    """CI re-makes the page; the README repeats some of it by hand."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/accuracy.md", "README.md"))
    section = readme.split("## How sure it is\n")[1].split("\n## ")[0]
    figures = set(re.findall(r"(\d+\.\d) %", section))
    assert len(figures) > 20
    missing = {x for x in figures if not re.search(rf"(?<![\d.]){re.escape(x)}%", page)}
    assert not missing, "run `draftline validate --refit --out docs/accuracy.md` and correct the README"
