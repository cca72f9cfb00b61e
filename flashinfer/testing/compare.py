# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Comparisons that say where the first difference is."""

from __future__ import annotations

import torch

from flashinfer.testing.tolerances import Tolerance, tolerance_of

_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    tolerance: Tolerance | None = None,
    name: str = "tensor",
) -> None:
    """Compare with the tolerance of `actual`'s dtype.

    Both are compared in float64. NaN equals nothing, so that a poisoned value that leaks always fails;
    infinities equal themselves.

    Parameters
    ----------
    actual
        The result under test.
    expected
        Its reference, of any dtype and device, same shape.
    tolerance
        Overrides the table; the caller writes the reason.
    name
        What the tensor is called in the message.

    Raises
    ------
    AssertionError
        With the first differing coordinate in row-major order, both values, the count and the largest error.
    """
    limit = tolerance_of(actual.dtype) if tolerance is None else tolerance
    _assert_same_shape(actual, expected, name)
    got = actual.detach().to(device="cpu", dtype=torch.float64)
    want = expected.detach().to(device="cpu", dtype=torch.float64)
    error = (got - want).abs()
    # inf - inf is NaN, and so is anything with a NaN: neither is close; equal infinities are let in by ==.
    close = (got == want) | (error <= limit.atol + limit.rtol * want.abs()) & want.isfinite()
    if bool(close.all()):
        return
    wrong = ~close
    finite = error[wrong & error.isfinite()]
    largest = f", largest error {finite.max().item():.6g}" if finite.numel() else ""
    raise AssertionError(
        f"{_first_difference(got, want, wrong, name)}{largest}; "
        f"allowed {limit.atol:g} + {limit.rtol:g} * |expected| ({limit.reason})"
    )


def assert_equal_bits(actual: torch.Tensor, expected: torch.Tensor, *, name: str = "tensor") -> None:
    """Same shape, same dtype and the same bits: -0 differs from 0, and a NaN equals the same NaN.

    Raises
    ------
    AssertionError
        With the first differing coordinate in row-major order, both values in hexadecimal and the count.
    """
    _assert_same_shape(actual, expected, name)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype is {actual.dtype}, expected {expected.dtype}")
    got, want = _bits(actual), _bits(expected)
    wrong = got != want
    if bool(wrong.any()):
        raise AssertionError(_first_difference(got, want, wrong, name))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(_BITS_OF_SIZE[tensor.element_size()])


def _assert_same_shape(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape is {list(actual.shape)}, expected {list(expected.shape)}")


def _first_difference(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, name: str) -> str:
    at = tuple(int(i) for i in wrong.nonzero()[0])
    values = (_shown(t[at]) for t in (got, want))
    count = f"{int(wrong.sum())} of {wrong.numel()} differ"
    return f"{name}{list(at)}: got {next(values)}, expected {next(values)}; {count}"


def _shown(value: torch.Tensor) -> str:
    if value.dtype.is_floating_point:
        return f"{value.item():.9g}"
    bits = 8 * value.element_size()
    return f"0x{int(value.item()) % (1 << bits):0{bits // 4}x}"
