# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Appends to shuffled pages and to FP8 caches in gfx942 machine code, executed on the CPU.

Oracles: index formulas in numpy, torch's own conversions to FP8, and what AITER's machine code wrote
(tests/rocm_tests/kv/data). Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import AppendParams, Divisor, Fault, IndexArray, MlaAppendParams, MlaSide, Strides, as_bytes

Array = npt.NDArray[Any]

THREADS = 256
WINDOW = 16  # kTileRows
GUARD = 0xA5
GOLDEN = Path(__file__).resolve().parent.parent / "kv" / "data" / "aiter_cache_golden.npz"
KINDS = {"float16": 1, "bfloat16": 2, "float32": 3}  # RowKind
FLAVOURS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.fixture
def code(code_objects: Any) -> CodeObject:
    found: CodeObject = code_objects("kernels/page.cu", "gfx942")
    return found


@dataclass
class Batch:
    """Rows with the page and the token of each; None is padding. Row `i` has a request of its own, of one page."""

    slots: list[tuple[int, int] | None]
    page_size: int
    pages: int

    def table(self, p: AppendParams | MlaAppendParams) -> list[Array]:
        """Fill in the table; the arrays must live as long as it is used."""
        n = len(self.slots)
        batch = np.array([-1 if s is None else i for i, s in enumerate(self.slots)], np.int32)
        positions = np.array([0 if s is None else s[1] for s in self.slots], np.int64)
        indptr = np.arange(n + 1, dtype=np.int32)
        ids = np.array([2**30 if s is None else s[0] for s in self.slots], np.int32)
        kept = [batch, positions, indptr, ids]
        t = p.table
        t.batch_indices, t.positions, t.kv_indptr, t.kv_indices = (
            IndexArray(a.ctypes.data, a.dtype == np.int64) for a in kept
        )
        t.nnz, t.batch_size, t.num_indices, t.num_pages, t.page_size = n, n, n, self.pages, self.page_size
        return kept


def ragged(page_size: int, pages: int) -> Batch:
    """The tail of a page from an odd token on, padding, two pages without a gap, single tokens, a short prompt."""
    slots: list[tuple[int, int] | None] = [(5, n) for n in range(page_size - 11, page_size)]
    slots += [None, *((p, n) for p in (2, 0) for n in range(page_size)), (4, 3), (7, 0), (7, 2), (1, 1)]
    slots += [(3, n) for n in range(page_size - 3)]
    return Batch(slots, page_size, pages)


def shuffled_index(heads: int, page_size: int, dim: int, element: int) -> tuple[Array, Array]:
    """Element index of (head, token, dimension) inside a page of K and of V: AITER's formulas."""
    h, n, d = np.ogrid[:heads, :page_size, :dim]
    x = 16 // element
    k = h * dim * page_size + d // x * page_size * x + n * x + d % x
    v = h * dim * page_size + n // x * dim * x + d * x + n % x
    return k, v


def append(
    code: CodeObject,
    emulator: Emulator,
    batch: Batch,
    rows: Array,
    pools: list[Array],
    element: int,
    kind: int = 0,
    fnuz: bool = False,
    inverse: tuple[float, float] = (1.0, 1.0),
    spread: int = 1,
) -> None:
    """Run the kernel on `[2, nnz, heads, dim]` rows and byte pools `[pages, page bytes]` of K and V."""
    _, _, heads, dim = rows.shape
    params, fault = AppendParams(), Fault()
    kept = batch.table(params)
    params.layout, params.row_kind, params.num_heads = 1, kind, heads
    params.head_bytes, params.element_bytes, params.fault = dim * element, element, ctypes.addressof(fault)
    for side, part, pool, by in zip((params.k, params.v), rows, pools, inverse, strict=True):
        side.rows, side.row_stride, side.row_head_stride = part.ctypes.data, part.strides[0], part.strides[1]
        side.pool, side.page_stride, side.head_stride = (
            pool.ctypes.data,
            pool.strides[0],
            batch.page_size * dim * element,
        )
        side.quantizer.inverse, side.quantizer.fnuz = by, fnuz
    vecs_per_head = dim * element // 16
    columns = vecs_per_head * heads
    # As the launcher has it: narrow rows leave half of a wide tile's threads idle.
    tile = 16 if columns <= 16 else 32
    kernel = code.kernel("append_shuffled_kernel", f"ILi{element}E", f"RowKindE{kind}ELi{tile}E")
    grid = (-(-len(batch.slots) // WINDOW), min(spread, -(-columns // tile)), 1)
    arguments = [as_bytes(params), as_bytes(Divisor(vecs_per_head, columns)), columns.to_bytes(4, "little")]
    emulator.launch(code, kernel, grid, (WINDOW // 2 * tile, 1, 1), arguments, seed=heads)
    assert fault.code == 0
    del kept


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "element", "spread"),
    [(3, 128, 16, 2, 1), (5, 64, 32, 2, 2), (1, 72, 24, 2, 1), (3, 64, 16, 1, 1), (2, 80, 48, 4, 9)],
)
def test_bytes_move_as_the_formulas_say(
    code: CodeObject, emulator: Emulator, heads: int, dim: int, page_size: int, element: int, spread: int
) -> None:
    batch = ragged(page_size, 9)
    kind = np.dtype(f"u{element}")
    rows = np.random.default_rng(dim).integers(0, 256, (2, len(batch.slots), heads, dim * element), np.uint8).view(kind)
    page_bytes = heads * dim * page_size * element
    pools = [np.full((batch.pages, page_bytes + 64), GUARD, np.uint8) for _ in range(2)]  # planes with gaps
    expected = [pool.copy() for pool in pools]
    for want, part, index in zip(expected, rows, shuffled_index(heads, page_size, dim, element), strict=True):
        for row, slot in zip(part, batch.slots, strict=True):
            if slot is not None:
                want[slot[0], :page_bytes].view(kind)[index[:, slot[1]]] = row
    append(code, emulator, batch, rows, pools, element, spread=spread)
    for pool, want in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(pool, want)


@pytest.mark.parametrize("case", ["bf16_h3_n16_d64", "bf16_h8_n16_d128", "bf16_h1_n32_d128"])
def test_bytes_are_those_of_aiters_machine_code(code: CodeObject, emulator: Emulator, case: str) -> None:
    with np.load(GOLDEN) as golden:
        key, value, slots, k_cache, v_cache = (
            golden[f"{case}_{name}"] for name in ("key", "value", "slots", "kcache", "vcache")
        )
    pages, _, _, page_size, _ = k_cache.shape
    batch = Batch([None if s < 0 else divmod(int(s), page_size) for s in slots], page_size, pages)
    pools = [np.full((pages, k_cache[0].nbytes), GUARD, np.uint8) for _ in range(2)]
    append(code, emulator, batch, np.stack([key, value]), pools, 2, spread=2)
    np.testing.assert_array_equal(pools[0], k_cache.reshape(pages, -1).view(np.uint8))
    np.testing.assert_array_equal(pools[1], v_cache.reshape(pages, -1).view(np.uint8))


def floats(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of every size that FP8 knows, and beyond; zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-14, 11, shape, generator=generator))
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 464.0, 232.0, -240.0, 2.0**-10, 448.0]
    )
    values.view(-1)[: len(special)] = special
    return values.to(dtype)


def as_fp8(rows: torch.Tensor, inverse: float, flavour: torch.dtype) -> Array:
    """torch's conversion, held to the largest value, NaN without a sign."""
    most = torch.finfo(flavour).max
    scaled = rows.float() * torch.tensor(inverse)
    codes = scaled.clamp(-most, most).to(flavour).view(torch.uint8)
    codes[scaled.isnan()] = 0x80 if flavour == torch.float8_e4m3fnuz else 0x7F
    found: Array = codes.numpy()
    return found


def raw(rows: torch.Tensor) -> Array:
    found: Array = rows.view({2: torch.int16, 4: torch.int32}[rows.element_size()]).numpy()
    return found


@pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_shuffled_fp8(code: CodeObject, emulator: Emulator, name: str, flavour: torch.dtype) -> None:
    heads, dim, page_size, inverse = 2, 96, 16, (float(np.float32(1 / 0.7)), 0.5)
    batch = ragged(page_size, 9)
    rows = torch.stack([floats((len(batch.slots), heads, dim), getattr(torch, name), s) for s in (1, 2)])
    pools = [np.full((batch.pages, heads * dim * page_size), GUARD, np.uint8) for _ in range(2)]
    expected = [pool.copy() for pool in pools]
    index = shuffled_index(heads, page_size, dim, 1)
    for want, part, where, by in zip(expected, rows, index, inverse, strict=True):
        for row, slot in zip(as_fp8(part, by, flavour), batch.slots, strict=True):
            if slot is not None:
                want[slot[0]][where[:, slot[1]]] = row
    append(code, emulator, batch, raw(rows), pools, 1, KINDS[name], flavour == FLAVOURS[1], inverse)
    for pool, want in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(pool, want)


@pytest.mark.parametrize("flavour", FLAVOURS, ids=str)
@pytest.mark.parametrize(
    ("name", "width", "vector"),
    [("bfloat16", 64, "Vec16"), ("float16", 24, "Ih"), ("float32", 64, "Vec16"), ("float32", 24, "Ih")],
)
def test_mla_fp8(
    code: CodeObject, emulator: Emulator, name: str, width: int, vector: str, flavour: torch.dtype
) -> None:
    """Rows of 16-byte vectors, and rows that go byte by byte."""
    batch, fault, inverse = ragged(16, 9), Fault(), 0.25
    # Whole waves have work or none: the emulator reads LDS for idle lanes as well, whatever address they hold.
    batch.slots += [None] * (64 - len(batch.slots))
    params = MlaAppendParams()
    kept: list[Any] = batch.table(params)
    params.fault, params.row_kind = ctypes.addressof(fault), KINDS[name]
    params.quantizer.inverse, params.quantizer.fnuz = inverse, flavour == FLAVOURS[1]
    checks = []
    for seed, (side, size) in enumerate((("ckv", width), ("kpe", width // 2))):
        rows = floats((len(batch.slots), size), getattr(torch, name), seed)
        pool = np.full((batch.pages, 16, size), GUARD, np.uint8)
        expected = pool.copy()
        for row, slot in zip(as_fp8(rows, inverse, flavour), batch.slots, strict=True):
            if slot is not None:
                expected[slot] = row
        kept.append(rows)
        setattr(
            params,
            side,
            MlaSide(rows.data_ptr(), size * rows.element_size(), pool.ctypes.data, *pool.strides[:2], size),
        )
        checks.append((pool, expected))
    per_row = (width + width // 2) // (16 if vector == "Vec16" else 1)
    kernel = code.kernel("append_mla_kernel", vector, f"RowKindE{KINDS[name]}")
    arguments = [as_bytes(params), as_bytes(Strides(64, per_row, per_row))]
    emulator.launch(code, kernel, (1, 1, 1), (THREADS, 1, 1), arguments)
    for pool, expected in checks:
        np.testing.assert_array_equal(pool, expected)
    assert fault.code == 0
