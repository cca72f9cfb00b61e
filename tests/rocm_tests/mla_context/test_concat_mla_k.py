# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`concat_mla_k`, element by element, on memory whose every byte is watched."""

from __future__ import annotations

import pytest
import torch

import flashinfer
import flashinfer.concat_ops
from flashinfer.core.dtypes import OCP
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import random_bits
from rocm_tests.mla_context.concat_case import DTYPES, ConcatCase

BACKENDS = ("native", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "rope"),
    [
        (3, 128, 128, 64),
        (5, 3, 128, 64),
        (1, 1, 8, 8),
        (7, 2, 24, 40),
        (2, 5, 192, 8),
        (0, 4, 128, 64),
        (33, 16, 16, 72),
    ],
)
def test_shapes(tokens: int, heads: int, nope: int, rope: int, dtype: torch.dtype, backend: str) -> None:
    ConcatCase(tokens, heads, nope, rope, dtype).check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_addresses_that_allow_no_wide_access(offset: int, backend: str) -> None:
    """Rows that begin at any element, and at distances of any number of elements."""
    ConcatCase(4, 3, 16, 8, torch.bfloat16, offset=offset, pad=offset + 1).check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nope_already_in_place(backend: str) -> None:
    """k's own first part may be given as k_nope."""
    k = random_bits((5, 3, 192), torch.bfloat16)
    rope = random_bits((5, 1, 64), torch.bfloat16, seed=1)
    want = torch.cat([k[..., :128], rope.expand(5, 3, 64)], dim=-1)
    flashinfer.concat_mla_k(k, k[..., :128], rope, backend=backend)
    assert_equal_bits(k, want)


def test_names_and_signature_are_flashinfers() -> None:
    assert flashinfer.concat_ops.concat_mla_k is flashinfer.concat_mla_k
    case = ConcatCase(2, 2, 16, 8, torch.float16)
    flashinfer.concat_mla_k(case.k, case.nope, case.rope, backend="default")
    case.compare()
    answers = flashinfer.explain(flashinfer.concat_mla_k, case.k, case.nope, case.rope)
    assert answers == {"native": None, "reference": None}


def test_mixed_dtypes_are_refused() -> None:
    case = ConcatCase(2, 2, 16, 8, torch.float16)
    with pytest.raises(ValueError, match=r"concat_mla_k: k_rope must be of k's dtype and device, torch\.float16 on"):
        flashinfer.concat_mla_k(case.k, case.nope, case.rope.bfloat16())
    with pytest.raises(ValueError, match="k_nope must be of k's dtype"):
        flashinfer.concat_mla_k(case.k, case.nope.view(torch.uint8)[..., :16].view(OCP), case.rope)
