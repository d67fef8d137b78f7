"""`draftline calibrate --from-tables` to its end on a sample of the public tables: results, broken tables, runs that are broken off."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.calibrate import refit
from planner.calibrate.kernel_models import SPECS, thin
from planner.errors import InputError

TABLES = Path(__file__).parent / "data" / "tables"
GEMM = Path("h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet")
STACKS = (
    "gemm h200-sxm vllm bf16", "attention h200-sxm vllm bf16", "mla h200-sxm trtllm bf16", "moe h200-sxm vllm bf16",
    "state b200-sxm sglang bf16",
)  # fmt: skip


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "planner.cli.main", "calibrate", *args], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.CompletedProcess[str]]]:
    out = tmp_path_factory.mktemp("refit")
    yield out, command("--from-tables", str(TABLES), "--out", str(out))


def test_every_kind_of_table_ends_in_a_fit(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = run
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "5 stacks fitted" in done.stdout and "0 left out" in done.stdout
    fits, report = refit.read_fits(out)
    assert tuple(report["stacks"]) == STACKS
    assert not (out / refit.PARTIAL).exists()
    for key in STACKS:
        op, gpu, engine, dtype = key.split()
        entry, told = fits["gpus"][gpu][op][engine][dtype], report["stacks"][key]
        assert len(entry["p"]) == len(SPECS[op])
        assert entry["band"][0] < 1 < entry["band"][1]
        assert told["sample"] == told["rows"] and told["held_out"][0] < 0.1
    link = fits["gpus"]["h200-sxm"]["allreduce"]["nccl"]["bf16"]
    assert link["ranks"] == [2, 4, 8] and all(np.diff(row).min() >= 0 for row in link["us"])
    packaged = refit.read_fits()
    assert {"source", "license", "params", "step_m", "comm_bytes"} <= set(packaged[0]) and packaged[0]["params"] == fits["params"]


def test_a_few_hundred_rows_find_what_the_packaged_fit_found_on_all(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    fits, _ = refit.read_fits(run[0])
    packaged, _ = refit.read_fits()
    for op, name in (("gemm", "bandwidth"), ("attention", "bandwidth"), ("attention", "prefill_flop"), ("moe", "bandwidth")):
        i = list(SPECS[op]).index(name)
        mine, theirs = (f["gpus"]["h200-sxm"][op]["vllm"]["bf16"]["p"][i] for f in (fits, packaged))
        assert mine == pytest.approx(theirs, rel=0.1), (op, name)


def test_broken_tables_cost_only_themselves(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(TABLES, tmp_path / "tables")
    whole = (TABLES / GEMM).read_bytes()
    cut = tmp_path / "tables" / "h200_sxm/gemm/sglang/0.5.14/gemm_perf.parquet"
    cut.parent.mkdir(parents=True)
    cut.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "tables" / GEMM).write_bytes(whole)
    other = pq.read_table(TABLES / "h200_sxm/moe/vllm/0.24.0/moe_perf.parquet")
    pq.write_table(other.drop_columns(["topk"]), tmp_path / "tables" / "h200_sxm/moe/vllm/0.24.0/moe_perf.parquet")
    mla = "h200_sxm/mla/trtllm/1.3.0rc20/generation_mla_perf.parquet"
    table = pq.read_table(TABLES / mla)
    zero = table.set_column(table.column_names.index("latency"), "latency", pa.array(np.zeros(len(table))))
    pq.write_table(zero, tmp_path / "tables" / mla)
    nccl = tmp_path / "tables" / "h200_sxm/comm/nccl/2.29.2/nccl_perf.parquet"
    nccl.write_bytes(b"not a table")

    done = command("--from-tables", str(tmp_path / "tables"), "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 4, done.stderr
    for path, says in (
        (cut, "cannot read this table"),
        ("moe_perf", "no column topk"),
        ("generation_mla_perf", "times that are"),
        (nccl, "cannot read"),
    ):
        assert sum(str(path) in line and says in line for line in lines) == 1, (path, lines)
    answer = json.loads(done.stdout)
    assert len(answer["left_out"]) == 4
    assert set(answer["ops"]) == {"gemm", "attention", "state"}
    fits, _ = refit.read_fits(tmp_path / "out")
    assert set(fits["gpus"]["h200-sxm"]) == {"gemm", "attention"}


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, run: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: Any) -> None:
    def stop(op: str, done: int, total: int) -> None:
        if op == "moe":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refit.write(TABLES, tmp_path, stop)
    partial = tmp_path / refit.PARTIAL
    assert len(partial.read_text().splitlines()) == 3
    with partial.open("a") as f:
        f.write('{"kind": "stack", "key": "moe h2')  # a kill in the middle of a line
    kept = partial.read_bytes()
    made = refit.write(TABLES, tmp_path)
    assert made.resumed == 3 and made.skipped == []
    for name in ("kernels.json", "kernels_report.json"):
        assert (tmp_path / name).read_bytes() == (run[0] / name).read_bytes()  # the same to the last digit as in one go
    assert not partial.exists()

    partial.write_bytes(kept)  # other code may fit other numbers: nothing is taken over
    monkeypatch.setattr(refit, "recipe", lambda: 0)
    monkeypatch.setattr(refit, "OPS", {"mla": refit.OPS["mla"]})
    assert refit.write(TABLES, tmp_path).resumed == 0


def test_what_cannot_be_gone_on_with_is_said(tmp_path: Path) -> None:
    (tmp_path / refit.PARTIAL).write_text('{"kind": "stack"}\n')
    with pytest.raises(InputError, match="not a record of this command"):
        refit.write(TABLES, tmp_path)
    (tmp_path / "empty").mkdir()
    done = command("--from-tables", str(tmp_path / "empty"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "no table could be used" in done.stderr and "Traceback" not in done.stderr


def test_a_sample_is_the_same_every_time_and_of_the_size_told() -> None:
    rows = {"m": np.repeat(2.0 ** np.arange(10), 1000), "kernel": np.full(10000, "a"), "time_s": np.arange(10000) + 1.0}
    some = thin(rows, 500)
    assert len(some["m"]) == 500 and len(np.unique(some["time_s"])) == 500
    assert np.unique(some["m"], return_counts=True)[1].min() > 25
    assert all((thin(rows, 500)[name] == some[name]).all() for name in rows)
    assert thin(rows, 10000) is rows


def test_distances_leave_out_what_a_fit_does_not_know() -> None:
    def fit(bandwidth: float, weak: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        p = [start for start, _, _ in SPECS["moe"].values()]
        p[list(SPECS["moe"]).index("bandwidth")] = bandwidth
        told = {"stderr_log": dict.fromkeys(SPECS["moe"], 0.03), "unidentified": weak}
        return {"params": {"moe": list(SPECS["moe"])}, "gpus": {"g": {"moe": {"e": {"d": {"p": p}}}}}}, {"stacks": {"moe g e d": told}}

    far = refit.distances("moe g e d", fit(0.8, []), fit(0.8 * np.exp(0.06 * np.sqrt(2.0)), []))
    assert max(far) == pytest.approx(2.0) and len(far) == len(SPECS["moe"])
    assert max(refit.distances("moe g e d", fit(0.8, []), fit(0.4, ["bandwidth"]))) == 0.0
