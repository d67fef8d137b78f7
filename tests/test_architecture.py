"""Rules of the house that a machine can check: data flows one way, units are in names, only the command line prints."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "gpu_profiles", "microbench")

#: Lower layers first; a module may import from its own layer and those before it, at import time.
LAYERS = (
    ("planner.errors", "planner.units", "microbench"),
    ("gpu_profiles.schema", "gpu_profiles.reader", "gpu_profiles.engine_file", "gpu_profiles.tiles", "gpu_profiles.load", "gpu_profiles"),
    ("planner.kernels",),
    ("gpu_profiles.fits",),
    ("planner.models",),
    ("planner.ops",),
    ("planner.passes",),
    ("planner.memory",),
    ("planner.roofline",),
    ("planner.acceptance", "planner.drafter_input", "planner.drafter_heads", "planner.drafter_catalogue", "planner.drafters"),
    ("planner.cases", "planner.bands", "planner.draft"),
    ("planner.deployment",),
    ("planner.round",),
    ("planner.serving", "planner.edges"),
    ("planner.search",),
    ("planner.guidelines", "planner.schedule", "planner.export", "planner.prediction", "planner.kernel_cases"),
    ("planner.question", "planner.explain"),
    ("planner.recommend",),
    ("planner.planning",),
    ("planner.report", "planner.validate", "planner.calibrate"),
    ("planner.verify",),
    ("planner.cli", "planner"),
)
HEAVY = ("torch", "cupy", "scipy", "pandas", "plotly", "jinja2", "triton", "microbench")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def layer_of(name: str) -> int:
    best, found = -1, -1
    for i, members in enumerate(LAYERS):
        for m in members:
            if (name == m or name.startswith(m + ".")) and len(m) > best:
                best, found = len(m), i
    return found


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is loaded (not inside functions or TYPE_CHECKING)."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_every_module_has_a_layer_and_imports_only_downwards() -> None:
    faults = []
    for name, tree in modules():
        own = layer_of(name)
        assert own >= 0, f"{name} has no layer in LAYERS"
        for target in top_level_imports(tree):
            if target.split(".")[0] in ("planner", "gpu_profiles"):
                other = layer_of(target)
                if other > own:
                    faults.append(f"{name} imports {target} from a higher layer")
    assert not faults, "\n".join(faults)


def test_heavy_libraries_load_only_when_called() -> None:
    faults = [
        f"{name} imports {target}"
        for name, tree in modules()
        for target in top_level_imports(tree)
        if name.split(".")[0] in ("planner", "gpu_profiles") and target.split(".")[0] in HEAVY and not name.startswith("planner.verify.")
    ]
    assert not faults, "\n".join(faults)


def test_plan_starts_light() -> None:
    code = (
        "import sys\nfrom planner.cli.main import app\nfrom planner.planning import plan\nfrom planner.report.terminal import plan_text\n"
        "plan_text(plan('Qwen/Qwen3-32B', 'h100', concurrency=(1, 8)))\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_command_line_prints() -> None:
    faults = []
    for name, tree in modules():
        if name.startswith("planner.cli"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                faults.append(f"{name}:{node.lineno}")
    assert not faults, faults


QUANTITY_WORDS = ("time", "latency", "duration", "bandwidth", "throughput", "memory", "capacity")
SUFFIXES = (
    "_s",
    "_bytes",
    "_flop",
    "_bytes_per_s",
    "_flop_per_s",
    "_tokens",
    "_frac",
    "_prob",
    "_ratio",
    "_len",
    "_seqs",
    "_eff",
    "_per_s",
    "_w",
    "_ms",
    "_knee",
)


def test_quantities_carry_their_unit_in_the_name() -> None:
    """A float attribute named after a quantity ends in a unit; `_flops` (rate or count?) is banned everywhere."""
    faults = []
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.arg | ast.Attribute):
                ident = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else node.attr
                if ident.endswith("_flops"):
                    faults.append(f"{name}: {ident}")
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    kind = ast.unparse(field.annotation)
                    ident = field.target.id
                    if kind in ("float", "Num", "F") and any(w in ident.split("_") for w in QUANTITY_WORDS) and not ident.endswith(SUFFIXES):
                        faults.append(f"{name}.{node.name}.{ident}: {kind}")
    assert not faults, "\n".join(faults)


def test_engine_profiles_hold_at_most_24_fitted_numbers() -> None:
    count = 0

    def walk(value: object) -> None:
        nonlocal count
        if isinstance(value, dict):
            count += value.get("origin") == "fitted"
            for v in value.values():
                walk(v)
        elif isinstance(value, list):
            for v in value:
                walk(v)

    seen: set[str] = set()
    for path in sorted((ROOT / "gpu_profiles" / "engines").glob("*.json")):
        walk(json.loads(path.read_text(encoding="utf-8")))
        seen.add(path.stem)
    assert {"vllm", "sglang", "trtllm"} <= seen
    assert count <= 24, f"{count} fitted numbers"


def test_no_model_name_is_special_cased_in_the_cost_code() -> None:
    families = re.compile(r"qwen|llama|deepseek|gpt.?oss|minimax|kimi|gemma|nemotron|mixtral|glm", re.IGNORECASE)
    cost = (
        "ops",
        "passes",
        "memory",
        "roofline",
        "round",
        "serving",
        "search",
        "draft",
        "bands",
        "edges",
        "prediction",
        "question",
        "recommend",
        "planning",
    )
    for stem in cost:
        tree = ast.parse((ROOT / "planner" / f"{stem}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                body[0].value.value = ""  # docstrings may cite models
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        code_strings = [s for s in strings if families.fullmatch(s.strip())]
        assert not code_strings, (stem, code_strings)


def commands() -> list[str]:
    from planner.cli.main import app

    return [c.name or (c.callback.__name__ if c.callback else "") for c in app.registered_commands]


@pytest.mark.parametrize("name", commands())
def test_every_command_has_help_with_an_example_and_stands_in_the_readme(name: str) -> None:
    from planner.cli.main import app

    info = next(c for c in app.registered_commands if (c.name or (c.callback.__name__ if c.callback else "")) == name)
    assert info.callback is not None and info.callback.__doc__ is not None
    assert f"draftline {name}" in info.callback.__doc__
    assert f"draftline {name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_planner_belongs_to_draftline() -> None:
    """Others' distributions unpack to folders of the same names; the import must be ours."""
    import planner

    assert Path(planner.__file__ or "").resolve().is_relative_to(ROOT)
    assert 'name = "draftline"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_exam_material_is_never_opened() -> None:
    word = "silicon" + "_sample"
    hits = [
        p
        for package in (*PACKAGES, "tests", "notebooks")
        for p in (ROOT / package).rglob("*")
        if p.suffix in (".py", ".ipynb", ".sh") and word in p.read_text(encoding="utf-8")
    ]
    assert not hits
