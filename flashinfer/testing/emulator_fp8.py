# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions from FP8 as the emulator of kernels runs them: tinygrad's knows one flavour, and no pairs."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from flashinfer.core.errors import LaunchError
from flashinfer.testing.emulator_steps import Step, Wave, running_lanes


@functools.cache
def _floats(arch: str) -> tuple[int, ...]:
    """float32, as bits, of each code: e4m3fnuz on gfx942, whose exponents are one less, and e4m3fn on gfx950."""
    is_fnuz = arch == "gfx942"
    bias = 8 if is_fnuz else 7

    def value(code: int) -> float:
        if code == 0x80 if is_fnuz else code & 0x7F == 0x7F:
            return float("nan")
        exponent, fraction = code >> 3 & 15, code & 7
        size = (8 + fraction) * 2.0 ** (exponent - bias - 3) if exponent else fraction * 2.0 ** (-bias - 2)
        return -size if code & 0x80 else size

    return struct.unpack("<256I", struct.pack("<256f", *map(value, range(256))))


@dataclass(frozen=True)
class FromFp8:
    """Bytes `first` to `first + count` of a vector register become as many float32."""

    source: int
    result: int
    first: int
    count: int
    floats: tuple[int, ...]

    @classmethod
    def decode(cls, name: str, code: bytes, arch: str) -> FromFp8 | None:
        """None for other instructions. The fields are those of CDNA3 ISA, "VOP1" and "SDWA"."""
        count = {"V_CVT_F32_FP8_E32": 1, "V_CVT_PK_F32_FP8_E32": 2}.get(name)
        if count is None:
            return None
        word, control = struct.unpack_from("<II", code)
        source, result, first = (word & 0x1FF) - 256, word >> 17 & 0xFF, 0
        if word & 0x1FF == 0xF9:
            # A byte, a word or all: 0 to 3, 4 and 5, 6. A scalar register is marked by a bit.
            first = (0, 1, 2, 3, 0, 2, 0, 0)[control >> 16 & 7]
            source = -1 if control >> 23 & 1 else control & 0xFF
        if source < 0:
            raise LaunchError(f"emulator: {name} must have its operand in a vector register")
        return cls(source, result, first, count, _floats(arch))

    def __call__(self, step: Step, wave: Wave) -> None:
        state = wave.state
        for lane in running_lanes(state):
            word = state._read_vgpr(self.source, lane) >> 8 * self.first
            for i in range(self.count):
                state._write_vgpr(self.result + i, lane, self.floats[word >> 8 * i & 0xFF])
        state.pc += step.size
