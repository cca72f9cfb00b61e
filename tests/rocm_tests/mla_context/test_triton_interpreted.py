# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The fused kernel in Triton's interpreter, on the CPU: the arithmetic of every case that GPUs run."""

from __future__ import annotations

import pytest
import torch

from flashinfer.selection import explain
from rocm_tests.interpreted import assert_holds
from rocm_tests.mla_context import triton_cases
from rocm_tests.mla_context.case import Case

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_a_case(name: str) -> None:
    assert_holds(triton_cases.__name__, name)


def test_what_is_declined_is_declined_in_words() -> None:
    case = Case([5], dtype=torch.bfloat16)
    answers = explain("gather_kv_b_proj", *case.arguments, *case.results())
    assert answers == {
        "aiter": "needs an AMD GPU, got cpu",
        "triton": "needs a GPU, got cpu",
        "reference": None,
    }
