# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""bench_mla_hip.py on the CPU, small: that each mode runs, and what it says that was moved."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rocm_tests.conftest import ROOT
from rocm_tests.mla import aiter_standin

NAME = "bench_mla_hip"
CPU = torch.device("cpu")
ROW = 2 * (512 + 64)
SMALL = ["--heads", "2", "--batch", "2", "--kv-len", "9", "--page-size", "4", "1"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "benchmarks" / "rocm_benchmarks" / f"{NAME}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    return module


def records(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *options: str
) -> list[dict[str, dict[str, object]]]:
    monkeypatch.setattr(sys, "argv", [NAME, *SMALL, "--device", "cpu", "--json", str(out), *options])
    assert bench.main() == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("separate", [False, True])
def test_every_mode_runs(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, separate: bool) -> None:
    found = records(bench, monkeypatch, tmp_path / "out.jsonl", *(["--separate"] if separate else []))
    # Bars are those of a GPU.
    assert not [r for r in found if "bar" in r]
    by_mode = {mode: [r for r in found if r["case"]["mode"] == mode] for mode in bench.MODES}
    assert {mode: len(rows) for mode, rows in by_mode.items()} == {"attn": 2, "cat": 1, "plan": 8, "pool": 2}
    assert [r["case"]["page_size"] for r in by_mode["attn"]] == [1, 4]
    for r in by_mode["attn"]:
        assert r["chosen"] == "reference"
        # Keys, queries and results once, and nothing for where they lie: the reference needs no combined buffer.
        assert r["bytes_moved"] == 2 * (9 * ROW + 2 * (ROW + 1024))
    # Of the first shape, pages of one token: read and written.
    assert by_mode["cat"][0]["bytes_moved"] == 2 * 2 * 9 * ROW
    assert {r["bytes_moved"] for r in by_mode["pool"]} == {8 * (1024 * ROW + 2 * (ROW + 1024))}


@pytest.mark.parametrize(("page_size", "pages"), [(1, 9), (4, 3)])
def test_a_copy_is_counted_where_it_is_made(bench: ModuleType, tmp_path: Path, page_size: int, pages: int) -> None:
    aiter_standin.install(tmp_path, "0.1.20+rocm7")
    with aiter_standin.found(tmp_path):
        moved = []
        for separate in (False, True):
            step = bench.Step(bench.Case(2, 9, 16, page_size, separate=separate), CPU, "auto")
            assert step.chosen == "aiter"
            moved.append(step.bytes_moved())
    # The kernel reads 9 keys of a request; whole pages are copied.
    assert moved[1] - moved[0] == 2 * 2 * pages * page_size * ROW


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--page-size", "16", "0"], "--page-size must be positive, got 0"),
        (["--batch", "-1"], "--batch must be positive, got -1"),
        (["--json", "/no/such/out.jsonl"], "there is no folder /no/such to write out.jsonl into"),
        (["--mode", "plan", "--plot", "a.png"], "--plot draws what --mode attn measures"),
        (["--mode", "all"], "invalid choice: 'all'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_options_are_refused_before_anything_is_measured(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [NAME, *options])
    with pytest.raises(SystemExit) as exit_:
        bench.main()
    assert exit_.value.code == 2
    assert sentence in capsys.readouterr().err
