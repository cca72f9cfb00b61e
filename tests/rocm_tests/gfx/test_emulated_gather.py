# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged gather in gfx942 machine code, executed on the CPU, against index formulas in numpy.

Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import Fault, GatherParams, GatherTable, IndexArray, as_bytes

Array = npt.NDArray[Any]

THREADS = 256
GUARD = 0x5C
STRIDED, SHUFFLED = 0, 1
COPY, BF16 = 0, 1
N, PAGES = 16, 9


@pytest.fixture
def code(code_objects: Any) -> CodeObject:
    found: CodeObject = code_objects("kernels/gather.cu", "gfx942")
    return found


class Case:
    """Ranges of three requests, the middle one empty: from token 5, and from the start to beyond a page's end."""

    def __init__(self, dtype: Any) -> None:
        self.kv_indptr = np.array([0, 2, 2, 5], dtype)
        self.kv_indices = np.array([7, 2, 5, 0, 3, 2**30], dtype)
        self.starts = np.array([5, 0, 0], dtype)
        self.out_indptr = np.array([0, 14, 14, 37], dtype)
        self.rows = 37

    def sources(self, lost: range = range(0)) -> list[tuple[int, int]]:
        """(page, token in it) of each row that is not lost."""
        found = []
        for b, start in enumerate(self.starts):
            for i in range(self.out_indptr[b + 1] - self.out_indptr[b]):
                if self.out_indptr[b] + i in lost:
                    continue
                page = self.kv_indices[self.kv_indptr[b] + (start + i) // N]
                found.append((int(page), int(start + i) % N))
        return found

    def table(self) -> GatherTable:
        arrays = (self.kv_indices, self.kv_indptr, self.starts, self.out_indptr)
        t = GatherTable(*(IndexArray(a.ctypes.data, a.dtype == np.int64) for a in arrays))
        t.batch_size, t.rows, t.num_pages, t.page_size = len(self.starts), self.rows, PAGES, N
        t.num_indices = len(self.kv_indices)
        return t


def tokens_of(pool: Array, is_v: bool, layout: str, element: int, D: int) -> Array:
    """Bytes [pages, tokens, heads, D * element] of a pool of bytes, by the formulas of the page formats."""
    P, x = pool.shape[0], 16 // element
    if layout == "NHD":
        return pool.reshape(P, N, -1, D * element)
    if layout == "HND":
        return pool.reshape(P, -1, N, D * element).transpose(0, 2, 1, 3)
    if is_v:
        v = pool.reshape(P, -1, N // x, D, x, element)
        return v.transpose(0, 2, 4, 1, 3, 5).reshape(P, N, -1, D * element)
    return pool.reshape(P, -1, D // x, N, 16).transpose(0, 3, 1, 2, 4).reshape(P, N, -1, D * element)


def run(
    code: CodeObject,
    emulator: Emulator,
    case: Case,
    pools: Array,
    layout: str,
    heads: int,
    D: int,
    element: int,
    vector: str,
    *,
    out: int = COPY,
    fnuz: bool = False,
    scale: float = 1.0,
    rows: int = 16,
) -> tuple[Array, Fault]:
    """Gather on the emulator; `pools` are bytes [2, pages, bytes of a page]."""
    grown = element if out == COPY else 2
    found, fault = np.full((2, case.rows, heads, D * grown), GUARD, np.uint8), Fault()
    p = GatherParams()
    p.table, p.num_heads, p.head_dim, p.element_bytes = case.table(), heads, D, element
    p.layout, p.out, p.fnuz, p.fault = STRIDED if layout != "SHUFFLED" else SHUFFLED, out, fnuz, ctypes.addressof(fault)
    row = D * element
    head_stride, token_stride = (row, heads * row) if layout == "NHD" else (N * row, row)
    for side, pool, dense in zip((p.k, p.v), pools, found, strict=True):
        side.pool, side.page_stride = pool.ctypes.data, pool.strides[0]
        side.head_stride, side.token_stride, side.scale = head_stride, token_stride, scale
        side.out, side.row_stride, side.row_head_stride = dense.ctypes.data, *dense.strides[:2]
    grid = -(-case.rows // rows)
    if layout == "SHUFFLED":
        kernel = code.kernel("gather_shuffled_kernel", f"ILi{element}E", f"GatherOutE{out}ELb0")
        arguments = [as_bytes(p), struct.pack("<i", rows), struct.pack("<i", 2)]
        emulator.launch(code, kernel, (grid, -(-heads // 2), 1), (THREADS, 1, 1), arguments)
    else:
        kernel = code.kernel("gather_strided_kernel", vector, f"GatherOutE{out}EEE")
        emulator.launch(code, kernel, (grid, 1, 1), (THREADS, 1, 1), [as_bytes(p), struct.pack("<i", rows)])
    return found, fault


def expected_of(case: Case, pools: Array, layout: str, element: int, D: int, lost: range = range(0)) -> Array:
    return np.stack(
        [
            np.stack([tokens_of(pool, bool(side), layout, element, D)[at] for at in case.sources(lost)])
            for side, pool in enumerate(pools)
        ]
    )


def random_pools(heads: int, D: int, element: int) -> Array:
    return np.random.default_rng(D).integers(0, 256, (2, PAGES, heads * N * D * element), dtype=np.uint8)


@pytest.mark.parametrize(
    ("layout", "heads", "D", "element", "vector"),
    [
        ("NHD", 2, 64, 2, "Vec16"),
        ("HND", 3, 24, 1, "Vec8"),
        ("HND", 1, 3, 2, "ItLN"),
        ("SHUFFLED", 3, 64, 2, ""),
        ("SHUFFLED", 1, 32, 1, ""),
        ("SHUFFLED", 2, 20, 4, ""),
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_copies(
    code: CodeObject, emulator: Emulator, layout: str, heads: int, D: int, element: int, vector: str, dtype: Any
) -> None:
    case, pools = Case(dtype), random_pools(heads, D, element)
    found, fault = run(code, emulator, case, pools, layout, heads, D, element, vector)
    np.testing.assert_array_equal(found, expected_of(case, pools, layout, element, D))
    assert fault.code == 0


@pytest.mark.parametrize("flavour", [OCP, FNUZ], ids=str)
@pytest.mark.parametrize(("layout", "heads", "D"), [("NHD", 2, 32), ("SHUFFLED", 3, 32)])
def test_fp8_becomes_bfloat16(
    code: CodeObject, emulator: Emulator, layout: str, heads: int, D: int, flavour: torch.dtype
) -> None:
    case, pools = Case(np.int32), random_pools(heads, D, 1)
    found, fault = run(
        code, emulator, case, pools, layout, heads, D, 1, "Vec16", out=BF16, fnuz=flavour == FNUZ, scale=0.3
    )
    raw = torch.from_numpy(expected_of(case, pools, layout, 1, D)).view(flavour)
    assert len(raw.view(torch.uint8).unique()) == 256
    want = (raw.float() * torch.tensor(0.3)).bfloat16()
    torch.testing.assert_close(torch.from_numpy(found).view(torch.bfloat16), want, rtol=0, atol=0, equal_nan=True)
    assert fault.code == 0


@pytest.mark.parametrize(("layout", "element"), [("NHD", 2), ("SHUFFLED", 2), ("SHUFFLED", 1)])
@pytest.mark.parametrize(
    ("field", "at", "value", "fault_code", "where", "values", "bound", "lost"),
    [
        ("kv_indices", 3, PAGES, 4, 3, [PAGES], PAGES, range(30, 37)),
        ("kv_indices", 0, -1, 4, 0, [-1], PAGES, range(11)),
        ("starts", 0, 20, 22, 0, range(32, 34), 32, range(12, 14)),
        ("starts", 2, -5, 22, 2, range(-5, 0), 48, range(14, 19)),
        ("starts", 2, 2**40, 22, 2, range(2**40, 2**40 + 23), 48, range(14, 37)),
        ("kv_indptr", 3, 99, 3, 3, [99], 6, range(14, 37)),
        ("kv_indptr", 1, -7, 8, 0, [0], -7, range(14)),
    ],
)
def test_bad_metadata_is_reported_and_skipped(
    code: CodeObject,
    emulator: Emulator,
    field: str,
    at: int,
    value: int,
    fault_code: int,
    where: int,
    values: Sequence[int],
    bound: int,
    lost: range,
    layout: str,
    element: int,
) -> None:
    """Any of the lost rows may be the one that says so first. In shuffled pages a workgroup looks for runs among its
    rows, past those that are lost."""
    case, pools = Case(np.int64), random_pools(2, 32, element)
    getattr(case, field)[at] = value
    found, fault = run(code, emulator, case, pools, layout, 2, 32, element, "Vec16")
    assert (fault.code, fault.where, fault.bound) == (6 << 8 | fault_code, where, bound)
    assert fault.value in values
    assert (found[:, list(lost)] == GUARD).all()
    kept = [row for row in range(case.rows) if row not in lost]
    np.testing.assert_array_equal(found[:, kept], expected_of(case, pools, layout, element, 32, lost))
