# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The comparisons fail when they should, and say where."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.testing.compare import assert_close, assert_equal_bits
from flashinfer.testing.tolerances import EXACT, TABLE, Tolerance, tolerance_of


def test_close_within_the_tables_line() -> None:
    expected = torch.linspace(-2, 2, 101, dtype=torch.float64)
    for dtype in TABLE:
        assert_close(expected.to(dtype), expected)
    assert_close(torch.tensor([3, 4]), torch.tensor([3, 4]))


def test_the_first_difference_is_named() -> None:
    expected = torch.zeros(2, 3, 4)
    actual = expected.clone()
    actual[1, 0, 2] = 0.5
    actual[1, 2, 3] = -8
    with pytest.raises(AssertionError, match=r"out\[1, 0, 2\]: got 0.5, expected 0; 2 of 24 differ, largest error 8"):
        assert_close(actual, expected, name="out")


@pytest.mark.parametrize("leak", [math.nan, math.inf, -math.inf])
def test_poison_that_leaks_is_never_close(leak: float) -> None:
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, leak]), torch.tensor([1.0, 1.0]))
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, 1.0]), torch.tensor([1.0, leak]))


def test_infinities_equal_themselves_only() -> None:
    states = torch.tensor([-math.inf, math.inf])
    assert_close(states, states.clone())
    with pytest.raises(AssertionError, match=r"\[0\]: got -inf, expected inf; 2 of 2 differ; allowed"):
        assert_close(states, -states)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([math.nan]), torch.tensor([math.nan]))


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"shape is \[2\], expected \[2, 1\]"):
        assert_close(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="shape"):
        assert_equal_bits(torch.zeros(2), torch.zeros(2, 1))


def test_bits_tell_zeros_and_nans_apart() -> None:
    nans = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert_equal_bits(nans, nans.clone())
    with pytest.raises(AssertionError, match=r"\[1\]: got 0x7fc1, expected 0x7fc0; 1 of 2 differ"):
        assert_equal_bits(nans, nans[[0, 0]])
    with pytest.raises(AssertionError, match=r"\[0\]: got 0x80000000, expected 0x00000000"):
        assert_equal_bits(torch.tensor([-0.0]), torch.tensor([0.0]))
    with pytest.raises(AssertionError, match=r"dtype is torch\.float16, expected torch\.bfloat16"):
        assert_equal_bits(torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.bfloat16))


def test_a_tolerance_can_be_given() -> None:
    assert_close(torch.tensor([1.0]), torch.tensor([1.4]), tolerance=Tolerance(0.0, 0.5, "for the test"))
    with pytest.raises(AssertionError, match=r"allowed 0 \+ 0 \* \|expected\| \(a copy"):
        assert_close(torch.tensor([1.0]), torch.tensor([1.0001]), tolerance=EXACT)


def test_tolerances_grow_with_coarser_types() -> None:
    order = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    limits = [tolerance_of(dtype).rtol for dtype in order]
    assert limits == sorted(limits)
    assert all(line.reason for line in TABLE.values())
    # No table line is tighter than one rounding, or so wide that a wrong factor of two passes.
    for dtype in order:
        assert torch.finfo(dtype).eps / 2 <= tolerance_of(dtype).rtol <= 0.25
    assert tolerance_of(torch.int64) == EXACT
    with pytest.raises(InvalidArgumentError, match=r"dtype must be one of .*complex64"):
        tolerance_of(torch.complex64)
