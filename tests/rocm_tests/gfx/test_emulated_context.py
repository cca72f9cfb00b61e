# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Keys put together, and rows of contexts, in gfx942 machine code, executed on the CPU, against loops in numpy.

Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int32, c_int64, c_uint64
from typing import Any

import numpy as np
import pytest

from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import Fault, IndexArray, as_bytes

THREADS = 256
GUARD = 0x5C5C


class ConcatMlaParams(ctypes.Structure):
    """Of csrc_rocm/kernels/concat_mla.h."""

    _fields_ = (
        ("k", c_uint64),
        ("nope", c_uint64),
        ("rope", c_uint64),
        ("k_token", c_int64),
        ("k_head", c_int64),
        ("nope_token", c_int64),
        ("nope_head", c_int64),
        ("rope_token", c_int64),
        ("tokens", c_int64),
        ("heads", c_int32),
        ("nope_bytes", c_int32),
        ("rope_bytes", c_int32),
    )


class MlaContextIndicesParams(ctypes.Structure):
    """Of csrc_rocm/kernels/mla_context.h."""

    _fields_ = (
        ("block_tables", IndexArray),
        ("table_stride", c_int64),
        ("requests", c_int64),
        ("columns", c_int64),
        ("piece_requests", c_uint64),
        ("piece_starts", c_uint64),
        ("piece_indptr", c_uint64),
        ("pieces", c_int64),
        ("tokens", c_int64),
        ("num_pages", c_int64),
        ("page_size", c_int32),
        ("rows", c_uint64),
        ("fault", c_uint64),
    )


@pytest.mark.parametrize(
    ("nope", "rope", "vector"), [(128, 64, "Vec16"), (24, 40, "Vec16"), (20, 4, "Vec8"), (3, 5, "ItEE")]
)
def test_concat_mla_k(nope: int, rope: int, vector: str, code_objects: Any, emulator: Emulator) -> None:
    """5 tokens of 3 heads in strided buffers, 7 rows to a workgroup: the last one has fewer."""
    code: CodeObject = code_objects("kernels/concat_mla.cu", "gfx942")
    tokens, heads, rows = 5, 3, 7
    rng = np.random.default_rng(nope)
    parts = rng.integers(0, 2**16, (tokens, heads, nope + 8), dtype=np.uint16)
    shared = rng.integers(0, 2**16, (tokens, rope + 16), dtype=np.uint16)
    k = np.full((tokens, heads + 1, nope + rope + 8), GUARD, np.uint16)
    expected = k.copy()
    for t in range(tokens):
        for h in range(heads):
            expected[t, h, :nope] = parts[t, h, :nope]
            expected[t, h, nope : nope + rope] = shared[t, :rope]
    p = ConcatMlaParams(k.ctypes.data, parts.ctypes.data, shared.ctypes.data, *k.strides[:2], *parts.strides[:2])
    p.rope_token, p.tokens, p.heads = shared.strides[0], tokens, heads
    p.nope_bytes, p.rope_bytes = 2 * nope, 2 * rope
    grid = -(-tokens * heads // rows)
    kernel = code.kernel("concat_mla_kernel", vector)
    emulator.launch(code, kernel, (grid, 1, 1), (THREADS, 1, 1), [as_bytes(p), struct.pack("<i", rows)])
    np.testing.assert_array_equal(k, expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("value", "report"), [(None, (0, 0, 0, 0)), (99, (8 << 8 | 24, 15, 99, 50))])
def test_mla_context_indices(value: int | None, report: Any, dtype: Any, code_objects: Any, emulator: Emulator) -> None:
    """300 tokens of three pieces, one of them empty, and rows behind them; then with a page that is not there."""
    code: CodeObject = code_objects("kernels/mla_context.cu", "gfx942")
    page_size, columns = 16, 14
    tables = np.random.default_rng(0).integers(0, 50, (3, columns + 2)).astype(dtype)
    if value is not None:
        tables[1, 1] = value
    requests, starts = np.array([1, 0, 2], np.int32), np.array([16, 0, 3], np.int32)
    indptr, rows = np.array([0, 200, 200, 300], np.int32), np.full(310, GUARD, np.int32)
    fault = Fault()
    p = MlaContextIndicesParams(IndexArray(tables.ctypes.data, dtype == np.int64), columns + 2, 3, columns)
    p.piece_requests, p.piece_starts, p.piece_indptr = (a.ctypes.data for a in (requests, starts, indptr))
    p.pieces, p.tokens, p.num_pages, p.page_size = 3, 310, 50, page_size
    p.rows, p.fault = rows.ctypes.data, ctypes.addressof(fault)
    expected = [-1] * 310
    for piece, request in enumerate(requests):
        for i in range(indptr[piece], indptr[piece + 1]):
            at = i - indptr[piece] + starts[piece]
            page = int(tables[request, at // page_size])
            expected[i] = page * page_size + int(at) % page_size if page < 50 else -1
    emulator.launch(code, code.kernel("mla_context_indices_kernel"), (2, 1, 1), (THREADS, 1, 1), [as_bytes(p)])
    assert rows.tolist() == expected
    assert (fault.code, fault.where, fault.value, fault.bound) == report
