# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The rest of page conversion in gfx942 machine code, executed on the CPU: re-encoding, little pages in a large one,
and from one pool to another.

The oracles are index formulas and torch's own 8-bit floats. Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.params import KINDS, PageLayout, as_bytes
from rocm_tests.gfx.test_emulated import Bytes, Pool, Request, Shape, element_index, fast_tiling, request


@pytest.fixture
def code(code_objects: Any) -> CodeObject:
    found: CodeObject = code_objects("kernels/page_convert.cu", "gfx942")
    return found


def run(code: CodeObject, emulator: Emulator, shape: Shape, r: Request, instance: str) -> None:
    """With the fast kernel of small pages, or with the generic one where `instance` is a letter of an element type."""
    if len(instance) == 1:
        kernel = code.kernel("convert_any_kernel", f"I{instance}Lb1E")
        emulator.launch(code, kernel, (2, 1, 1), (512, 1, 1), [as_bytes(r.params)], seed=1)
        return
    tiling, threads = fast_tiling(shape)
    kernel = code.kernel("20convert_pages_kernel", instance)
    grid = -(-tiling.items // tiling.pages_per_group)
    emulator.launch(code, kernel, (grid, 1, 1), (threads, 1, 1), [as_bytes(r.params), as_bytes(tiling)], seed=2)


OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def recoded(codes: Bytes, mode: int) -> Bytes:
    """Bytes of one flavour as bytes of the other, by way of torch's floats. Modes as in kernels/common/fp8.h."""
    src, dst = (OCP, FNUZ) if mode in (1, 3) else (FNUZ, OCP)
    values = torch.from_numpy(codes.copy()).view(src).float()
    if mode == 1:
        values = values / 2
    elif mode == 2:
        values = (values * 2).clamp(-448, 448)
    else:
        largest = 240.0 if dst == FNUZ else 448.0
        values = values.clamp(-largest, largest)
    out: Bytes = values.to(dst).view(torch.uint8).numpy()
    return out


def same_value(got: Bytes, want: Bytes, mode: int) -> None:
    """Equal bytes, but that any NaN will do."""
    dst = FNUZ if mode in (1, 3) else OCP
    a, b = (torch.from_numpy(t.copy()).view(dst).float() for t in (got, want))
    same = torch.from_numpy(got == want) | (a.isnan() & b.isnan())
    assert bool(same.all()), f"{int((~same).sum())} bytes differ"


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("src", "dst", "instance"),
    [
        ("standard", "shuffled", "ILi1ELi64ELb1E"),
        ("shuffled", "standard", "ILi1ELi64ELb0E"),
        ("split_nhd", "shuffled", "h"),
    ],
)
def test_kind_and_flavour(code: CodeObject, emulator: Emulator, src: str, dst: str, instance: str, mode: int) -> None:
    """Known fault 36: the same byte is twice the value in the other flavour."""
    shape = Shape(2, 16, 64, element=1, blocks=(2, 0))
    r = request(shape, src, dst)
    # Every code occurs: a page has 4096 bytes.
    for page in shape.blocks:
        for half in r.pool.halves(0, page):
            half[:] = np.random.default_rng(page).permutation(np.arange(half.size) % 256).astype(np.uint8)
    expected = Pool(shape)
    expected.memory = r.pool.converted(src, dst)
    expected.start = r.pool.start
    r.params.recode = mode
    run(code, emulator, shape, r, instance)
    for page in range(shape.pages):
        for got, moved in zip(r.pool.halves(0, page), expected.halves(0, page), strict=True):
            if page in shape.blocks:
                same_value(got, recoded(moved, mode), mode)
            else:
                np.testing.assert_array_equal(got, moved)
    assert r.fault.code == 0


def pieces_index(kind: str, s: Shape, heads: int, tokens: int) -> Any:
    """Index of (kv, h, n, d) in a page that is a row of little ones, token block by token block, piece by piece."""
    little = element_index(kind, Shape(heads, tokens, s.dim, s.element))
    out = np.empty((2, s.heads, s.tokens, s.dim), np.int64)
    for block in range(s.tokens // tokens):
        for piece in range(s.heads // heads):
            at = slice(piece * heads, (piece + 1) * heads), slice(block * tokens, (block + 1) * tokens)
            out[:, at[0], at[1]] = little + (block * (s.heads // heads) + piece) * little.size
    return out


@pytest.mark.parametrize(
    ("kind", "heads", "tokens", "instance"),
    [
        ("standard", 2, 16, "ILi2ELi64ELb1E"),  # blocks of 16 tokens in a page of 32
        ("standard", 1, 32, "ILi2ELi64ELb1E"),  # head slices of two ranks
        ("split_nhd", 1, 16, "t"),
    ],
)
def test_little_pages_in_a_large_one(
    code: CodeObject, emulator: Emulator, kind: str, heads: int, tokens: int, instance: str
) -> None:
    """Known fault 46: blocks of unlike size."""
    shape = Shape(2, 32, 64, blocks=(2, 0))
    r = request(shape, kind, "shuffled")
    r.params.src = PageLayout(KINDS.index(kind), heads, tokens)
    at_src, at_dst = pieces_index(kind, shape, heads, tokens), element_index("shuffled", shape)
    want = {}
    for page in range(shape.pages):
        old = np.concatenate(r.pool.halves(0, page)).reshape(-1, 2)
        want[page] = old.copy()
        if page in shape.blocks:
            want[page][at_dst.reshape(-1)] = old[at_src.reshape(-1)]
    run(code, emulator, shape, r, instance)
    for page in range(shape.pages):
        np.testing.assert_array_equal(np.concatenate(r.pool.halves(0, page)).reshape(-1, 2), want[page])


@pytest.mark.parametrize(
    ("src", "dst", "instance"),
    [
        ("standard", "shuffled", "ILi2ELi64ELb1E"),
        ("shuffled", "standard", "ILi2ELi64ELb0E"),
        ("split_hnd", "x_packed", "t"),
    ],
)
def test_from_one_pool_to_another(code: CodeObject, emulator: Emulator, src: str, dst: str, instance: str) -> None:
    shape = Shape(3, 16, 64, layers=2, blocks=(2, 0))
    r, source = request(shape, src, dst), request(Shape(3, 16, 64, layers=2, blocks=(0, 1)), src, dst)
    before, untouched = r.pool.memory.copy(), source.pool.memory.copy()
    r.params.source, r.params.in_place = source.params.source, False
    run(code, emulator, shape, r, instance)
    at_src, at_dst = element_index(src, shape), element_index(dst, shape)
    after = r.pool.memory.copy()
    r.pool.memory[:] = before
    for layer in range(shape.layers):
        for taken, given in zip((0, 1), (2, 0), strict=True):
            old = np.concatenate(source.pool.halves(layer, taken)).reshape(-1, 2)
            new = np.empty_like(old)
            new[at_dst.reshape(-1)] = old[at_src.reshape(-1)]
            k, v = r.pool.halves(layer, given)
            k[:], v[:] = new.reshape(2, -1)
    np.testing.assert_array_equal(after, r.pool.memory)
    np.testing.assert_array_equal(source.pool.memory, untouched)
