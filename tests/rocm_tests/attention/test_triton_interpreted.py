# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, on the CPU: the arithmetic of every case that GPUs run."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashinfer
from rocm_tests.attention.case import Case
from rocm_tests.attention.triton_cases import CASES

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.triton


@functools.cache
def report() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "rocm_tests.attention.triton_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str) -> None:
    failed = report()["failed"]
    assert isinstance(failed, dict)
    assert name in report()["cases"]  # type: ignore[operator]
    assert name not in failed, failed[name]


def test_without_the_interpreter_the_cpu_is_declined_in_words() -> None:
    answer = {"triton": "needs a GPU, got cpu", "reference": None}
    paged, ragged = (Case([1], [5], dtype=torch.bfloat16, kv_layout=layout) for layout in ("NHD", "RAGGED"))
    table = paged.qo_indptr, paged.table.indptr, paged.table.indices, paged.table.last_page_len
    found = flashinfer.explain(flashinfer.paged_attention, paged.q, paged.cache, *table)
    assert {name: found[name] for name in answer} == answer
    metadata = ragged.qo_indptr, ragged.kv_indptr
    found = flashinfer.explain(flashinfer.ragged_attention, ragged.q, *ragged.cache, *metadata)
    assert {name: found[name] for name in answer} == answer
    v, s = torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4)
    assert flashinfer.explain(flashinfer.merge_states, v, s) == answer
