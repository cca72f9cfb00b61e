# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in Triton's interpreter, on the CPU: the arithmetic of every case that GPUs run."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from rocm_tests.attention import triton_cases
from rocm_tests.attention.case import Case
from rocm_tests.interpreted import assert_holds

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_a_case(name: str) -> None:
    assert_holds(triton_cases.__name__, name)


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
