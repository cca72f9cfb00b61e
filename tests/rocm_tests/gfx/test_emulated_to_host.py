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
    found = [np.full(a.size // step + 2, -1, a.dtype) for a, step in sources]
    p = ToHostParams(count=len(sources))
    for i, ((a, step), to) in enumerate(zip(sources, found, strict=True)):
        p.vectors[i] = ToHostVector(a.ctypes.data, to.ctypes.data, a.size // step, step, a.dtype == np.int64)
    emulator.launch(code, code.kernel("to_host_kernel"), (2, len(sources), 1), (THREADS, 1, 1), [as_bytes(p)])
    for (a, step), to in zip(sources, found, strict=True):
        assert to.tolist() == [*a[::step].tolist(), -1, -1]
