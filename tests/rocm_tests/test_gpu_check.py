# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu_check` reads what benchmarks write: lines of measurements, and lines of bars."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashinfer.testing import bench

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks" / "rocm_benchmarks"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Or a file would be left beside the script.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def test_bars(gpu_check: ModuleType) -> None:
    assert gpu_check.bar({"bar": "a", "value": 1.5, "at_most": 1.5}) == ("a", "1.5 (at most 1.5)", True)
    assert gpu_check.bar({"bar": "a", "value": 0.5, "at_least": 0.75, "why": "b"}) == (
        *("a", "0.5 (at least 0.75); b", False),
    )


def test_a_benchmark_that_writes_no_bar_has_failed(gpu_check: ModuleType, tmp_path: Path) -> None:
    rows = gpu_check.benchmark("bench_page_append.py", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path, None)
    assert [row[2] for row in rows] == [False]


def test_what_a_benchmark_writes_is_read(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose bars do not depend on the device."""
    run = gpu_check.command
    monkeypatch.setattr(
        gpu_check, "command", lambda words, env: run([*words, "--requests", "2", "--device", "cpu"], env)
    )
    keep = tmp_path / "kept.jsonl"
    rows = gpu_check.benchmark("bench_attention_plan.py", {"PYTHONPATH": str(ROOT)}, tmp_path, keep)
    assert len(rows) == 6
    assert all(row[0].startswith("plan of ") and "at most 150" in row[1] for row in rows)
    assert sum("bar" in json.loads(line) for line in keep.read_text().splitlines()) == 6


def test_an_append_says_what_is_absent_without_a_bar(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where nothing is timed: AITER's column is absent, as on any GPU that is not AMD's."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    append = importlib.import_module("bench_page_append")
    timing = bench.Timing.of([1.0])
    for name in ("time_gpu", "time_cpu"):
        monkeypatch.setattr(append.bench, name, lambda *_, **__: timing)
    lines: list[str] = []
    append.run_case(append.Case("NHD", 32, bar=0.5), torch.device("cpu"), {}, lines.append)
    records = [json.loads(line) for line in lines]
    rows = [gpu_check.bar(record) for record in records if "bar" in record]
    assert [row[0].split(", ")[1] for row in rows] == ["share of copy", "host time of copy_"]
    assert [record["case"]["backend"] for record in records if "absent" in record] == ["aiter"]
