"""Wrong formulas must turn the suite red: each mutant is applied to a copy of the source, and a named test must fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    killed_by: str
    """The test recorded as failing, as pytest's node id."""


MUTANTS = (
    Mutant(
        "bonus token dropped",
        "planner/acceptance/survival.py",
        "np.concatenate([[1.0], 1.0 + np.cumsum(",
        "np.concatenate([[1.0], 0.0 + np.cumsum(",
        "tests/test_acceptance.py",
    ),
    Mutant(
        "KV charged per draft token",
        "planner/ops.py",
        "        read = read + self.local_len\n",
        "        read = read * self.query_len + self.local_len\n",
        "tests/test_physics.py::test_dense_attention_reads_kv_once_and_sparse_gathers_per_query",
    ),
    Mutant(
        "sparse gathers read once",
        "planner/ops.py",
        "read = self.selected_len if self.core.sparse_topk is None else self.selected_len * self.query_len",
        "read = self.selected_len",
        "tests/test_physics.py::test_dense_attention_reads_kv_once_and_sparse_gathers_per_query",
    ),
    Mutant(
        "sparsity doubled",
        "gpu_profiles/gpus/h100-sxm.json",
        "1978900000000000.0",
        "3957800000000000.0",
        "tests/test_gpu_profiles.py",
    ),
    Mutant(
        "GB for GiB",
        "gpu_profiles/gpus/h200-sxm.json",
        "150754820096.0",
        "143771000000.0",
        "tests/test_gpu_profiles.py",
    ),
    Mutant(
        "G not divided by TP",
        "planner/ops.py",
        "return max(1, -(-num_heads // tp) // kv_heads_per_rank(num_kv_heads, tp))",
        "return max(1, num_heads // kv_heads_per_rank(num_kv_heads, tp))",
        "tests/test_physics.py::test_group_size_is_per_rank_and_kv_heads_replicate_beyond_tp",
    ),
    Mutant(
        "KV heads split below one",
        "planner/ops.py",
        "return max(1, -(-num_kv_heads // tp))",
        "return num_kv_heads / tp",
        "tests/test_physics.py::test_group_size_is_per_rank_and_kv_heads_replicate_beyond_tp",
    ),
    Mutant(
        "MLA latent divided by TP",
        "planner/memory.py",
        "total = total + count * context_len * ((core.kv_rank",
        "total = total + count * context_len / tp * ((core.kv_rank",
        "tests/test_physics.py::test_mla_latent_is_whole_on_every_rank",
    ),
    Mutant(
        "rollback states forgotten",
        "planner/deployment.py",
        "* (1.0 + d) / pp",
        "/ pp",
        "tests/test_physics.py::test_rollback_keeps_one_state_per_drafted_token",
    ),
    Mutant(
        "windows ignored in memory",
        "planner/memory.py",
        "entries = np.minimum(entries, float(core.window))",
        "entries = entries * 1.0",
        "tests/test_physics.py::test_windows_cap_the_cache",
    ),
    Mutant(
        "one multiply-add counted once",
        "planner/ops.py",
        "main = 2.0 * self.num_seqs * self.query_len * seen * self.num_heads * (2 * self.core.kv_rank",
        "main = 1.0 * self.num_seqs * self.query_len * seen * self.num_heads * (2 * self.core.kv_rank",
        "tests/test_physics.py::test_mla_intensity_at_128_heads_is_242_flop_per_byte",
    ),
    Mutant(
        "drafting is free",
        "planner/round.py",
        "return Round(draft + verify + overhead, draft, verify, overhead, parts, eager)",
        "return Round(verify + overhead, draft, verify, overhead, parts, eager)",
        "tests/test_physics.py::test_a_round_is_its_parts_and_speedup_is_a_ratio",
    ),
    Mutant(
        "experts grow without overlap or saturation",
        "planner/kernels/moe.py",
        "return as_array(-experts * np.expm1(",
        "return as_array(experts - experts * 0 + 0 * np.expm1(",
        "tests/test_physics.py::test_sparse_moe_verify_is_dearer_at_batch_one",
    ),
    Mutant(
        "speculation ignores the engine's request limit",
        "planner/deployment.py",
        "limit = min(limit, self.engine.max_running_with_speculation)",
        "limit = limit",
        "tests/test_physics.py::test_sglang_caps_running_requests_when_speculating",
    ),
    Mutant(
        "no all-reduce",
        "planner/passes.py",
        "    if plan.layout.tp > 1:",
        "    if plan.layout.tp > 1000:",
        "tests/test_physics.py::test_all_to_all_appears_only_with_data_parallel_attention",
    ),
    Mutant(
        "front keeps the beaten",
        "planner/search.py",
        "on[order] = per_gpu[order] > before",
        "on[order] = per_gpu[order] >= before",
        "tests/test_search.py::test_pareto_front_equals_the_oracle",
    ),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of the project that tests import, in a folder of their own."""
    root = tmp_path_factory.mktemp("mutants")
    for name in ("planner", "gpu_profiles", "microbench", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "benchmarks"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_mutant_is_killed(mutant: Mutant, copy: Path) -> None:
    path = copy / mutant.file
    original = path.read_text(encoding="utf-8")
    assert original.count(mutant.right) >= 1, f"{mutant.name}: the right text is gone from {mutant.file}; update the mutant"
    path.write_text(original.replace(mutant.right, mutant.wrong), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.killed_by],
            cwd=copy,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
    finally:
        path.write_text(original, encoding="utf-8")
    assert done.returncode == 1, f"{mutant.name} survived {mutant.killed_by}:\n{done.stdout[-800:]}{done.stderr[-400:]}"
