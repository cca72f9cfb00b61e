# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`concat_mla_k`, element by element, on memory whose every byte is watched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


SIDE_BY_SIDE: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "in each row": ((5, 3, 208), lambda b: (b[..., :96], b[..., 96:160], b[:, :1, 160:192])),
    "row by row, before": ((5, 3, 208), lambda b: (b[..., 112:], b[..., 48:112], b[:, :1, 16:48])),
    "heads by heads": ((5, 7, 96), lambda b: (b[:, :3], b[:, 3:6, :64], b[:, 6:, 32:64])),
    "tokens by tokens": ((10, 3, 96), lambda b: (b[::2], b[1::2, :, :64], b[1::2, :1, 64:])),
    "one after the other": ((15, 3, 96), lambda b: (b[:5], b[5:10, :, 7:71], b[10:, :1, :32])),
    "one token": ((1, 7, 96), lambda b: (b[:, :3], b[:, 3:6, :64], b[:, 6:, 32:64])),
    "one head": ((5, 1, 200), lambda b: (b[..., 100:196], b[..., :64], b[..., 66:98])),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_parts_of_one_buffer_that_lie_side_by_side(name: str, backend: str) -> None:
    """Memory of k is looked at element by element, not from its first to its last."""
    shape, cut = SIDE_BY_SIDE[name]
    buffer = random_bits(shape, torch.bfloat16)
    k, nope, rope = cut(buffer)
    want = torch.cat([nope, rope.expand(-1, k.size(1), -1)], dim=-1)
    flashinfer.concat_mla_k(k, nope, rope, backend=backend)
    assert_equal_bits(k, want)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.lists(st.sampled_from([0, 8, 16, 24, 40, 48, 64, 100]), min_size=4, max_size=4),
    st.integers(0, 120),
    st.booleans(),
)
def test_memory_that_both_have_is_refused(extra: list[int], steps: list[int], apart: int, shares_rope: bool) -> None:
    """Against the set of their elements: nothing is let through, and refused is what both have or what is too irregular
    to be told, never parts that are far apart. The compiled op and the check in Python agree."""
    tokens, heads = 1 + extra[0], 1 + extra[1]
    buffer, far = torch.zeros(4000, dtype=torch.bfloat16), torch.zeros(4000, dtype=torch.bfloat16)
    k = buffer.as_strided((tokens, heads, 16), (steps[0] + 16 * heads, 16, 1), 400)
    shape = (tokens, 1 if shares_rope else heads, 8)
    part = buffer.as_strided(shape, (steps[1], steps[2], 1), 280 + 2 * apart)
    other = far.as_strided((tokens, heads if shares_rope else 1, 8), (8, 0, 1))
    parts = (other, part) if shares_rope else (part, other)

    def places(t: torch.Tensor) -> set[int]:
        return set(torch.arange(4000).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())

    in_place = not shares_rope and places(part) == places(k[..., :8]) and part.data_ptr() == k.data_ptr()
    takes = {backend: is_taken(k, *parts, backend) for backend in BACKENDS}
    assert takes["native"] == takes["reference"]
    if places(part) & places(k):
        assert takes["native"] <= in_place
    elif max(places(part)) < min(places(k)) or max(places(k)) < min(places(part)):
        assert takes["native"]


def is_taken(k: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor, backend: str) -> bool:
    try:
        flashinfer.concat_mla_k(k, nope, rope, backend=backend)
    except flashinfer.InvalidArgumentError as e:
        return "outside of k, which is written while it is read" not in str(e)
    return True


def test_names_and_signature_are_flashinfers() -> None:
    assert flashinfer.concat_ops.concat_mla_k is flashinfer.concat_mla_k
    case = ConcatCase(2, 2, 16, 8, torch.float16)
    flashinfer.concat_mla_k(case.k, case.nope, case.rope, backend="default")
    case.compare()
    answers = flashinfer.explain(flashinfer.concat_mla_k, case.k, case.nope, case.rope)
    assert answers == {"native": None, "reference": None}


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_nothing_is_recorded_for_autograd(backend: str) -> None:
    case = ConcatCase(2, 2, 16, 8, torch.float16)
    parts = case.nope.clone().requires_grad_(), case.rope.clone().requires_grad_()
    flashinfer.concat_mla_k(case.k, *parts, backend=backend)
    assert not case.k.requires_grad
    case.compare()


def test_mixed_dtypes_are_refused() -> None:
    case = ConcatCase(2, 2, 16, 8, torch.float16)
    with pytest.raises(ValueError, match=r"concat_mla_k: k_rope must be of k's dtype and device, torch\.float16 on"):
        flashinfer.concat_mla_k(case.k, case.nope, case.rope.bfloat16())
    with pytest.raises(ValueError, match="k_nope must be of k's dtype"):
        flashinfer.concat_mla_k(case.k, case.nope.view(torch.uint8)[..., :16].view(OCP), case.rope)
