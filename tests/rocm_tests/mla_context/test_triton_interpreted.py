# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The fused kernel in Triton's interpreter, on the CPU: the arithmetic of every case that GPUs run."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from flashinfer.selection import explain
from rocm_tests.conftest import ROOT
from rocm_tests.mla_context.case import Case
from rocm_tests.mla_context.triton_cases import CASES

pytestmark = pytest.mark.triton


@functools.cache
def report() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "rocm_tests.mla_context.triton_cases"],
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


def test_what_is_declined_is_declined_in_words() -> None:
    case = Case([5], dtype=torch.bfloat16)
    answers = explain("gather_kv_b_proj", *case.arguments, *case.results())
    assert answers == {
        "aiter": "needs an AMD GPU, got cpu",
        "triton": "needs a GPU, got cpu",
        "reference": None,
    }
