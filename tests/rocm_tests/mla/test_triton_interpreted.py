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

from flashinfer.selection import explain
from rocm_tests.mla.case import SCALE, Case
from rocm_tests.mla.triton_cases import CASES

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.triton


@functools.cache
def report() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "rocm_tests.mla.triton_cases"],
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
    case = Case([1], [5], dtype=torch.bfloat16)
    plan = None, 0, 0, None
    out, lse = torch.empty_like(case.queries[0]), torch.empty(1, 4)
    arguments = (*case.queries, *case.caches, *case.metadata, False, SCALE, 1.0, 1.0, True, 0, False, *plan, out, lse)
    assert explain("mla_paged_attention", *arguments) == {
        "aiter": "needs the package aiter, which is not installed",
        "triton": "needs a GPU, got cpu",
        "reference": None,
    }
