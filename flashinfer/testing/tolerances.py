# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""How far a value may lie from its float32 or float64 reference: one line per dtype, with its reason."""

from __future__ import annotations

import dataclasses

import torch

from flashinfer.core.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """`|actual - expected| <= atol + rtol * |expected|`, and why that much."""

    rtol: float
    atol: float
    reason: str


EXACT = Tolerance(0.0, 0.0, "a copy, or integer arithmetic")

# eps is the distance from 1 to the next value. Test inputs are of order 1, so atol covers sums that cancel.
TABLE: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-12, 1e-12, "eps 2.2e-16; sums of up to about 4096 terms in any order"),
    torch.float32: Tolerance(2e-5, 2e-5, "eps 1.2e-7; sums of 4096 terms in any order, and the GPU's fast exp2"),
    torch.float16: Tolerance(2e-3, 1e-3, "eps 9.8e-4; two roundings: a 16-bit intermediate and the result"),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2, "eps 7.8e-3; two roundings: a 16-bit intermediate and the result"),
}


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """The line of `dtype`: FP8 types follow from their own limits, integers and bool compare exactly."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return EXACT
    if dtype.is_floating_point and dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        reason = "FP8: one rounding that may fall the other way; near zero, the least subnormal"
        return Tolerance(limits.eps, limits.eps * limits.smallest_normal, reason)
    if dtype not in TABLE:
        known = ", ".join(str(entry) for entry in TABLE)
        raise InvalidArgumentError(f"tolerance_of: dtype must be one of {known} or an integer type, got {dtype}")
    return TABLE[dtype]
