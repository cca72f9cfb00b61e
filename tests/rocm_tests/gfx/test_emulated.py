# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion in gfx942 machine code, executed on the CPU.

The oracle is written from the index formulas of AITER's cache writers, not from this project's own layouts.
Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import KINDS, ConvertParams, Fault, IndexArray, PageLayout, Tiling, as_bytes

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

GUARD = 0x5C


@dataclass(frozen=True)
class Shape:
    """A pool of pages and the request to convert some of them."""

    heads: int
    tokens: int
    dim: int
    element: int = 2
    layers: int = 1
    pages: int = 3
    blocks: tuple[int, ...] = (2, 0)
    wide_ids: bool = False
    one_plane: bool = False

    @property
    def half(self) -> int:
        return self.heads * self.tokens * self.dim * self.element


def element_index(kind: str, s: Shape) -> Indices:
    """Index in elements of (kv, h, n, d) in a page, as an array of that shape."""
    kv, h, n, d = np.indices((2, s.heads, s.tokens, s.dim), dtype=np.int64)
    H, N, D, x = s.heads, s.tokens, s.dim, 16 // s.element
    k_packed = h * D * N + (d // x) * N * x + n * x + d % x
    if kind == "standard":
        return ((h * N + n) * 2 + kv) * D + d
    half = H * N * D
    if kind == "shuffled":
        return np.where(kv == 0, k_packed, half + h * D * N + (n // x) * D * x + d * x + n % x)
    if kind == "x_packed":
        return np.where(kv == 0, k_packed, half + h * D * N + d * N + n)
    if kind == "split_hnd":
        return kv * half + (h * N + n) * D + d
    return kv * half + (n * H + h) * D + d  # split_nhd


class Pool:
    """K and V planes of every layer in one buffer, with a guard between all pages."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        rng = np.random.default_rng(shape.heads * 1000 + shape.dim)
        gap = 32
        self.stride = (2 * shape.half if shape.one_plane else shape.half) + gap
        planes = 1 if shape.one_plane else 2
        size = self.stride * shape.pages * planes * shape.layers + 64
        self.memory: Bytes = np.full(size, GUARD, np.uint8)
        self.start = -self.memory.ctypes.data % 16 + 16
        self.plane = self.stride * shape.pages
        for layer in range(shape.layers):
            for page in range(shape.pages):
                for half in self.halves(layer, page):
                    half[:] = rng.integers(0, 256, shape.half, dtype=np.uint8)

    def offsets(self, layer: int) -> tuple[int, int]:
        """Where the K and the V plane of a layer start."""
        if self.shape.one_plane:
            k = self.start + layer * self.plane
            return k, k + self.shape.half
        k = self.start + 2 * layer * self.plane
        return k, k + self.plane

    def halves(self, layer: int, page: int) -> tuple[Bytes, Bytes]:
        k, v = (at + page * self.stride for at in self.offsets(layer))
        return self.memory[k : k + self.shape.half], self.memory[v : v + self.shape.half]

    def converted(self, src: str, dst: str) -> Bytes:
        """The whole buffer as it must be after the conversion."""
        expected = Pool(self.shape)
        base = self.start  # the two buffers are aligned alike only up to their first byte
        expected.memory = np.full_like(self.memory, GUARD)
        expected.memory[:] = self.memory
        expected.start = base
        at_src, at_dst = element_index(src, self.shape), element_index(dst, self.shape)
        for layer in range(self.shape.layers):
            for page in self.shape.blocks:
                if not 0 <= page < self.shape.pages:
                    continue
                k, v = expected.halves(layer, page)
                old = np.concatenate([k, v]).reshape(-1, self.shape.element)
                new = np.empty_like(old)
                new[at_dst.reshape(-1)] = old[at_src.reshape(-1)]
                k[:], v[:] = new.reshape(2, -1)
        return expected.memory


@dataclass
class Request:
    """A pool with the parameters of its conversion; holds what the parameters point to."""

    pool: Pool
    params: ConvertParams
    fault: Fault
    held: tuple[Any, ...]


def request(shape: Shape, src: str, dst: str, scratch_pages: int = 4) -> Request:
    pool, fault = Pool(shape), Fault()
    ids = np.array(shape.blocks, np.int64 if shape.wide_ids else np.int32)
    scratch = np.full(scratch_pages * 2 * shape.half + 16, GUARD, np.uint8)
    tickets = np.zeros(4096, np.uint32)
    p = ConvertParams()
    base = pool.memory.ctypes.data
    for planes in (p.source, p.to):
        for layer in range(shape.layers):
            k, v = pool.offsets(layer)
            planes.k[layer], planes.v[layer] = base + k, base + v
        planes.k_stride = planes.v_stride = pool.stride
        planes.ids = IndexArray(ids.ctypes.data, shape.wide_ids)
        planes.num_pages = shape.pages
    p.num_blocks = len(shape.blocks)
    p.fault = ctypes.addressof(fault)
    p.scratch = scratch.ctypes.data + (-scratch.ctypes.data % 16)
    p.tickets = tickets.ctypes.data
    p.scratch_pages, p.num_layers = scratch_pages, shape.layers
    p.num_heads, p.page_size, p.head_dim = shape.heads, shape.tokens, shape.dim
    p.element_bytes, p.in_place = shape.element, True
    p.src = PageLayout(KINDS.index(src), shape.heads, shape.tokens)
    p.dst = PageLayout(KINDS.index(dst), shape.heads, shape.tokens)
    return Request(pool, p, fault, (ids, scratch, tickets))


def fast_tiling(shape: Shape) -> tuple[Tiling, int]:
    """How the launcher cuts a request up, and the threads of a workgroup: 64 KiB of registers in 16-token units."""
    unit_threads = shape.dim * shape.element // 8  # of one half, eight 16-byte vectors a thread
    tile = 512 // (2 * unit_threads)
    t = Tiling()
    t.units_per_page = shape.heads * (shape.tokens // 16)
    t.items = len(shape.blocks) * shape.layers
    t.groups_per_page = -(-t.units_per_page // tile)
    t.pages_per_group = tile // t.units_per_page if t.groups_per_page == 1 else 1
    t.units_per_group = t.pages_per_group * t.units_per_page if t.groups_per_page == 1 else tile
    return t, t.units_per_group * 2 * unit_threads


@pytest.fixture
def code(code_objects: Any) -> CodeObject:
    found: CodeObject = code_objects("kernels/page_convert.cu", "gfx942")
    return found


def run_fast(code: CodeObject, emulator: Emulator, shape: Shape, src: str, dst: str) -> Request:
    r = request(shape, src, dst)
    tiling, threads = fast_tiling(shape)
    to_shuffled = int(dst == "shuffled")
    instance = f"ILi{shape.element}ELi{shape.dim}ELb{to_shuffled}E"
    if tiling.groups_per_page == 1:
        kernel = code.kernel("20convert_pages_kernel", instance)
        grid = -(-tiling.items // tiling.pages_per_group)
    else:
        kernel = code.kernel("convert_large_pages_kernel", instance)
        grid = tiling.items * tiling.groups_per_page
    emulator.launch(
        code, kernel, (grid, 1, 1), (threads, 1, 1), [as_bytes(r.params), as_bytes(tiling)], seed=shape.heads
    )
    return r


DIRECTIONS = [("standard", "shuffled"), ("shuffled", "standard")]

SMALL = [
    Shape(2, 16, 128, layers=2),
    Shape(8, 16, 128, wide_ids=True, blocks=(1,)),  # one page fills a tile
    Shape(3, 16, 128, blocks=(2, 1, 0), one_plane=True),  # two pages to a workgroup, the last one alone
    Shape(1, 64, 64, blocks=(0, 2)),
    Shape(1, 32, 256, blocks=(1, 0)),
    Shape(3, 16, 64, element=1, layers=2),
    Shape(1, 128, 128, element=1, blocks=(2, 1)),
]

# Several workgroups to a page.
LARGE = [
    Shape(9, 16, 128, blocks=(2, 0, 1)),
    Shape(3, 32, 256, blocks=(1,)),
    Shape(5, 64, 64, layers=2),
    Shape(5, 128, 64, element=1, blocks=(0, 2)),
]


@pytest.mark.parametrize(("src", "dst"), DIRECTIONS)
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_fast_kernel(code: CodeObject, emulator: Emulator, shape: Shape, src: str, dst: str) -> None:
    expected = request(shape, src, dst).pool.converted(src, dst)
    r = run_fast(code, emulator, shape, src, dst)
    np.testing.assert_array_equal(r.pool.memory[r.pool.start :], expected[r.pool.start :])
    assert r.fault.code == 0


@pytest.mark.parametrize("blocks", [(0, 7), (-1, 2)])
def test_a_bad_block_id_is_reported_and_skipped(code: CodeObject, emulator: Emulator, blocks: tuple[int, int]) -> None:
    shape = Shape(2, 16, 128, blocks=blocks, wide_ids=True)
    expected = request(shape, "standard", "shuffled").pool.converted("standard", "shuffled")
    r = run_fast(code, emulator, shape, "standard", "shuffled")
    np.testing.assert_array_equal(r.pool.memory, expected)
    where = next(i for i, page in enumerate(blocks) if not 0 <= page < shape.pages)
    assert (r.fault.code, r.fault.where, r.fault.value, r.fault.bound) == (3 << 8 | 5, where, blocks[where], 3)


@pytest.mark.parametrize(("element", "letter"), [(1, "h"), (2, "t"), (4, "j")])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("standard", "x_packed"),
        ("x_packed", "split_nhd"),
        ("split_nhd", "shuffled"),
        ("shuffled", "split_hnd"),
        ("split_hnd", "standard"),
    ],
)
def test_generic_kernel(code: CodeObject, emulator: Emulator, src: str, dst: str, element: int, letter: str) -> None:
    shape = Shape(3, 16, 32, element=element, layers=2)
    expected = request(shape, src, dst).pool.converted(src, dst)
    r = request(shape, src, dst)
    kernel = code.kernel("convert_any_kernel", f"I{letter}Lb1E")
    # Two workgroups of two pages each.
    emulator.launch(code, kernel, (2, 1, 1), (512, 1, 1), [as_bytes(r.params)], seed=element)
    np.testing.assert_array_equal(r.pool.memory, expected)
    assert r.fault.code == 0
