# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, on the CPU: the arithmetic of every case that GPUs run."""

from __future__ import annotations

import pytest
import torch

from flashinfer.selection import explain
from rocm_tests.interpreted import assert_holds
from rocm_tests.mla import triton_cases
from rocm_tests.mla.case import SCALE, Case

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_a_case(name: str) -> None:
    assert_holds(triton_cases.__name__, name)


def test_without_the_interpreter_the_cpu_is_declined_in_words() -> None:
    case = Case([1], [5], dtype=torch.bfloat16)
    plan = None, 0, 0, None
    out, lse = torch.empty_like(case.queries[0]), torch.empty(1, 4)
    arguments = (*case.queries, *case.caches, *case.metadata, False, SCALE, 1.0, 1.0, True, 0, False, *plan, out, lse)
    assert explain("mla_paged_attention", *arguments) == {
        "aiter": "needs an AMD GPU, got cpu",
        "triton": "needs a GPU, got cpu",
        "reference": None,
    }
