# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append and its metadata in gfx942 machine code, executed on the CPU, against loops in numpy.

Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import (
    AppendParams,
    BatchPositionsParams,
    Fault,
    IndexArray,
    MlaAppendParams,
    MlaSide,
    PageTable,
    SeqLensParams,
    Strides,
    as_bytes,
)

Array = npt.NDArray[Any]

THREADS = 256
GUARD = 0x5C5C


@pytest.fixture
def code(code_objects: Any) -> CodeObject:
    found: CodeObject = code_objects("kernels/page.cu", "gfx942")
    return found


def indices(array: Array) -> IndexArray:
    return IndexArray(array.ctypes.data, array.dtype == np.int64)


class Case:
    """Two requests of 5 and 9 new tokens over pages of 8, after 6 and 15 earlier ones; one row is padding."""

    page_size = 8
    pages = 9

    def __init__(self, dtype: type[np.signedinteger[Any]]) -> None:
        lengths = (11, 24)
        self.kv_indptr = np.array([0, 2, 5], dtype)
        self.kv_indices = np.array([7, 2, 5, 0, 3, 2**30], dtype)  # the last one is beyond the table
        rows = [(0, p) for p in range(6, lengths[0])] + [(-1, 2**30)] + [(1, p) for p in range(15, lengths[1])]
        self.batch = np.array([b for b, _ in rows], dtype)
        self.positions = np.array([p for _, p in rows], dtype)

    def table(self) -> PageTable:
        t = PageTable(indices(self.batch), indices(self.positions), indices(self.kv_indptr), indices(self.kv_indices))
        t.nnz, t.batch_size = len(self.batch), len(self.kv_indptr) - 1
        t.num_indices, t.num_pages, t.page_size = len(self.kv_indices), self.pages, self.page_size
        return t

    def slots(self) -> list[tuple[int, int, int]]:
        """(row, page, token in the page) of every row that is written."""
        found = []
        for row, (b, position) in enumerate(zip(self.batch, self.positions, strict=True)):
            if b >= 0:
                page = self.kv_indices[self.kv_indptr[b] + position // self.page_size]
                found.append((row, int(page), int(position) % self.page_size))
        return found


def random_halves(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, 2**16, shape, dtype=np.uint16)


def run_append(
    code: CodeObject, emulator: Emulator, params: AppendParams, vector: str, layout: int, rows: int = 5
) -> None:
    kernel = code.kernel("append_kernel", vector, "RowKindE0", f"PoolLayoutE{layout}")
    grid = -(-params.table.nnz // rows)
    per_head = params.head_bytes // {"Vec16": 16, "Vec8": 8}.get(vector, 2)
    arguments = [as_bytes(params), as_bytes(Strides(rows, per_head * params.num_heads, per_head))]
    emulator.launch(code, kernel, (grid, 1, 1), (THREADS, 1, 1), arguments)


def append_params(case: Case, k: Array, v: Array, layout: int, fault: Fault) -> AppendParams:
    p = AppendParams()
    p.table, p.layout, p.num_heads, p.element_bytes = case.table(), layout, k.shape[1], 2
    p.head_bytes, p.fault = k.shape[2] * 2, ctypes.addressof(fault)
    for side, rows in ((p.k, k), (p.v, v)):
        side.rows, side.row_stride, side.row_head_stride = rows.ctypes.data, rows.strides[0], rows.strides[1]
    return p


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dim", "vector"), [(64, "Vec16"), (4, "Vec8"), (3, "ItLN")])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strided_append(code: CodeObject, emulator: Emulator, layout: str, dim: int, vector: str, dtype: Any) -> None:
    case, heads, fault = Case(dtype), 3, Fault()
    rows = random_halves(2, len(case.batch), heads, dim)
    shape = (case.pages, case.page_size, heads, dim) if layout == "NHD" else (case.pages, heads, case.page_size, dim)
    pools = np.full((2, *shape), GUARD, np.uint16)
    expected = pools.copy()
    for row, page, token in case.slots():
        at = (page, token) if layout == "NHD" else (page, slice(None), token)
        for side in range(2):
            expected[side][at] = rows[side, row]
    params = append_params(case, rows[0], rows[1], 0, fault)
    head_axis, token_axis = (2, 1) if layout == "NHD" else (1, 2)
    for side, pool in ((params.k, pools[0]), (params.v, pools[1])):
        side.pool, side.page_stride = pool.ctypes.data, pool.strides[0]
        side.head_stride, side.token_stride = pool.strides[head_axis], pool.strides[token_axis]
    run_append(code, emulator, params, vector, 0)
    np.testing.assert_array_equal(pools, expected)
    assert fault.code == 0


@pytest.mark.parametrize(
    ("field", "at", "value", "code_", "report"),
    [
        ("batch", 3, 2, 1, (3, 2, 2)),
        ("positions", 2, 16, 2, (2, 16, 16)),
        ("positions", 2, -1, 2, (2, -1, 16)),
        ("kv_indices", 1, 9, 4, (1, 9, 9)),
        ("kv_indices", 1, -1, 4, (1, -1, 9)),
    ],
)
def test_bad_metadata_is_reported_and_skipped(
    code: CodeObject, emulator: Emulator, field: str, at: int, value: int, code_: int, report: Any
) -> None:
    case, fault = Case(np.int64), Fault()
    getattr(case, field)[at] = value
    rows = random_halves(2, len(case.batch), 1, 64)
    pools = np.full((2, case.pages, case.page_size, 64), GUARD, np.uint16)
    params = append_params(case, rows[0], rows[1], 0, fault)
    for side, pool in ((params.k, pools[0]), (params.v, pools[1])):
        side.pool, side.page_stride = pool.ctypes.data, pool.strides[0]
        side.head_stride, side.token_stride = 0, pool.strides[1]
    guards = pools.copy()
    run_append(code, emulator, params, "Vec16", 0)
    assert fault.code == 1 << 8 | code_
    assert (fault.where, fault.value, fault.bound) == report
    good = {(page, token) for _, page, token in case_slots_without(case, field, at)}
    for page in range(case.pages):
        for token in range(case.page_size):
            if (page, token) not in good:
                np.testing.assert_array_equal(pools[:, page, token], guards[:, page, token])


def case_slots_without(case: Case, field: str, at: int) -> list[tuple[int, int, int]]:
    """Slots of the rows that the bad entry does not touch."""
    clean = Case(np.int64)
    slots = clean.slots()
    if field == "kv_indices":
        return [s for s in slots if s[1] != clean.kv_indices[at]]
    return [s for s in slots if s[0] != at]


def test_mla_append(code: CodeObject, emulator: Emulator) -> None:
    case, fault = Case(np.int32), Fault()
    params = MlaAppendParams()
    params.table, params.fault = case.table(), ctypes.addressof(fault)
    checks = []
    for name, width in (("ckv", 64), ("kpe", 8)):
        rows = random_halves(len(case.batch), width)
        pool = np.full((case.pages, case.page_size, width), GUARD, np.uint16)
        expected = pool.copy()
        for row, page, token in case.slots():
            expected[page, token] = rows[row]
        side = MlaSide(rows.ctypes.data, rows.strides[0], pool.ctypes.data, *pool.strides[:2], width * 2)
        setattr(params, name, side)
        checks.append((pool, expected, rows))
    kernel = code.kernel("append_mla_kernel", "Vec16", "RowKindE0")
    arguments = [as_bytes(params), as_bytes(Strides(7, 9, 9))]
    emulator.launch(code, kernel, (-(-params.table.nnz // 7), 1, 1), (THREADS, 1, 1), arguments)
    for pool, expected, _ in checks:
        np.testing.assert_array_equal(pool, expected)
    assert fault.code == 0


def test_batch_indices_positions(code: CodeObject, emulator: Emulator) -> None:
    indptr, lengths = np.array([0, 3, 3, 70], np.int32), np.array([5, 4, 67], np.int64)
    nnz = 75
    out = np.full((2, nnz), GUARD, np.int32)
    p = BatchPositionsParams(indices(indptr), indices(lengths), 3, nnz, out[0].ctypes.data, out[1].ctypes.data)
    fault = Fault()
    p.fault = ctypes.addressof(fault)
    kernel = code.kernel("batch_positions_kernel")
    emulator.launch(code, kernel, (1, 1, 1), (THREADS, 1, 1), [as_bytes(p)])
    expected = [(0, 2), (0, 3), (0, 4)] + [(2, i) for i in range(67)] + [(-1, 0)] * 5
    assert [tuple(int(v) for v in pair) for pair in out.T] == expected


def test_seq_lens(code: CodeObject, emulator: Emulator) -> None:
    indptr, last = np.array([0, 3, 3, 4], np.int64), np.array([5, 0, 16], np.int32)
    out = np.full(4, GUARD, np.int32)
    fault = Fault()
    p = SeqLensParams(indices(indptr), indices(last), 3, 16, out.ctypes.data, ctypes.addressof(fault))
    emulator.launch(code, code.kernel("seq_lens_kernel"), (1, 1, 1), (THREADS, 1, 1), [as_bytes(p)])
    assert out.tolist() == [37, 0, 16, GUARD]
    assert fault.code == 0
