# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The two flavours of 8-bit floats, and what it takes to turn bytes of one into bytes of the other.

gfx942 stores FNUZ (bias 8, largest 240, no -0), gfx950 and NVIDIA store OCP (bias 7, largest 448). The same byte means
half as much in FNUZ. csrc_rocm/kernels/common/fp8.h has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OCP = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
FP8 = (OCP, FNUZ)
# All that torch has, for what moves bytes and does not look at them.
FLOATS_OF_8_BITS = (*FP8, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def fp8_of(arch: str) -> torch.dtype:
    """The flavour that an architecture computes with: FNUZ on gfx940 to gfx942, OCP on all others."""
    return FNUZ if arch.startswith("gfx94") else OCP


@dataclass(frozen=True)
class Recode:
    """How bytes are re-encoded.

    Parameters
    ----------
    code
        `Recode` of csrc_rocm/kernels/common/fp8.h.
    exact
        Whether every value survives, the scale included.
    scale
        What the scale that goes with the values must be multiplied by.
    """

    code: int
    exact: bool
    scale: float


KEEP = Recode(0, True, 1.0)

# (from, to, whether a scale goes with the values)
_RECODES = {
    ("float8_e4m3fn", "float8_e4m3fnuz", True): Recode(1, True, 2.0),
    # The largest FNUZ code is NaN's in OCP, and becomes the largest there: 240 comes out as 224.
    ("float8_e4m3fnuz", "float8_e4m3fn", True): Recode(2, False, 0.5),
    # Without a scale to carry, what lies above 240 saturates ...
    ("float8_e4m3fn", "float8_e4m3fnuz", False): Recode(3, False, 1.0),
    # ... and what FNUZ resolves below 2^-6 is rounded.
    ("float8_e4m3fnuz", "float8_e4m3fn", False): Recode(4, False, 1.0),
}


def recode(src: str, dst: str, *, scaled: bool) -> Recode | None:
    """How to turn bytes of dtype `src` into bytes of `dst`; None where nobody can."""
    if src == dst:
        return KEEP
    return _RECODES.get((src, dst, scaled))
