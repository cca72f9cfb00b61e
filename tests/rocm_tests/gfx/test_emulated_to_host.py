# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Vectors to the host in gfx942 machine code, executed on the CPU.

Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import ToHostParams, ToHostVector, as_bytes

THREADS = 256


def test_vectors_of_both_widths_and_any_stride(code_objects: Any, emulator: Emulator) -> None:
    """More than the blocks of one round hold, nothing, and every third; nothing is written behind an end."""
    code = code_objects("kernels/to_host.cu", "gfx942")
    sources = [
        (np.arange(1300, dtype=np.int32) * 7 - 3, 1),
        (np.arange(0, dtype=np.int32), 1),
        (np.arange(30, dtype=np.int64) << 33, 3),
    ]
    sizes = [a.size // step for a, step in sources]
    begins = np.cumsum([0, *((n + 2) * 8 for n in sizes)])
    block = np.full(begins[-1], 0x5C, np.uint8)
    p = ToHostParams(block=block.ctypes.data, count=len(sources))
    for i, ((a, step), begin, n) in enumerate(zip(sources, begins, sizes, strict=False)):
        p.vectors[i] = ToHostVector(a.ctypes.data, begin, n, step, a.dtype == np.int64)
    emulator.launch(code, code.kernel("to_host_kernel"), (2, len(sources), 1), (THREADS, 1, 1), [as_bytes(p)])
    for (a, step), begin, end in zip(sources, begins, begins[1:], strict=False):
        wanted = a[::step].tobytes()
        found = block[begin:end].tobytes()
        assert found == wanted + b"\x5c" * (len(found) - len(wanted))
