# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""PageFormat against index formulas written out here, one scalar at a time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv.format import DTYPES, KINDS, PageFormat, why_not_format

SIZE_OF = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "uint8": 1}
SIZE_OF |= {name: 1 for name in DTYPES if name.startswith("float8")}


@st.composite
def page_formats(draw: st.DrawFn) -> PageFormat:
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from(DTYPES))
    heads = draw(st.integers(1, 5))
    x = 16 // SIZE_OF[dtype]
    size = draw(st.integers(1, 3)) * x if kind == "shuffled" else draw(st.integers(1, 20))
    dim = draw(st.integers(1, 3)) * x if kind in ("shuffled", "x_packed") else draw(st.integers(1, 40))
    return PageFormat(kind, dtype, heads, size, dim)


def oracle(page: PageFormat, kv: int, h: int, n: int, d: int) -> int:
    """Element index in the page, from the formulas of the writers of each kind."""
    H, N, D = page.num_kv_heads, page.page_size, page.head_dim
    x = 16 // SIZE_OF[page.dtype]
    if page.kind == "standard":
        return h * N * 2 * D + n * 2 * D + kv * D + d
    in_k = {
        "shuffled": h * D * N + (d // x) * N * x + n * x + d % x,
        "x_packed": h * D * N + (d // x) * N * x + n * x + d % x,
        "split_hnd": h * N * D + n * D + d,
        "split_nhd": n * H * D + h * D + d,
    }
    in_v = {
        "shuffled": h * D * N + (n // x) * D * x + d * x + n % x,
        "x_packed": h * D * N + d * N + n,
        "split_hnd": h * N * D + n * D + d,
        "split_nhd": n * H * D + h * D + d,
    }
    return H * N * D + in_v[page.kind] if kv else in_k[page.kind]


@given(page_formats(), st.data())
def test_offset_is_the_written_formula(page: PageFormat, data: st.DataObject) -> None:
    kv = data.draw(st.integers(0, 1))
    h = data.draw(st.integers(0, page.num_kv_heads - 1))
    n = data.draw(st.integers(0, page.page_size - 1))
    d = data.draw(st.integers(0, page.head_dim - 1))
    expected = oracle(page, kv, h, n, d) * SIZE_OF[page.dtype]
    assert page.offset(kv, h, n, d) == expected
    assert page.offsets()[kv, h, n, d] == expected


@given(page_formats())
def test_offsets_fill_the_page_exactly_once(page: PageFormat) -> None:
    offsets = page.offsets()
    assert offsets.dtype == torch.int64
    assert list(offsets.shape) == [2, page.num_kv_heads, page.page_size, page.head_dim]
    assert offsets.flatten().sort().values.tolist() == list(range(0, page.page_bytes, SIZE_OF[page.dtype]))


@given(page_formats())
def test_planes_cover_the_page_and_part_k_from_v(page: PageFormat) -> None:
    assert page.page_bytes == 2 * page.half_bytes
    assert len(page.planes) == page.head_slots
    ends = [start + length for start, length in page.planes]
    assert [start for start, _ in page.planes] == [0, *ends[:-1]]
    assert ends[-1] == page.page_bytes
    if page.head_slots == 2:
        assert page.offsets()[0].max() < page.half_bytes <= page.offsets()[1].min()


def test_offset_by_hand() -> None:
    """Written down from the row-major shapes, with x = 8 and head 1, token 9, element 10."""
    at = (1, 9, 10)
    # [2, 16, 64]: 16 tokens of 64 elements of head 0, 9 tokens of head 1, then K and V.
    assert PageFormat("standard", "bfloat16", 2, 16, 32).offset(0, *at) == 2 * (16 * 64 + 9 * 64 + 10)
    assert PageFormat("standard", "bfloat16", 2, 16, 32).offset(1, *at) == 2 * (16 * 64 + 9 * 64 + 32 + 10)
    shuffled = PageFormat("shuffled", "bfloat16", 2, 16, 32)
    # K [2, 4, 16, 8] at [1, 1, 9, 2]; V [2, 2, 32, 8] at [1, 1, 10, 1], behind 1024 elements of K.
    assert shuffled.offset(0, *at) == 2 * (512 + 128 + 72 + 2)
    assert shuffled.offset(1, *at) == 2 * (1024 + 512 + 256 + 80 + 1)
    # V [2, 32, 16] at [1, 10, 9].
    assert PageFormat("x_packed", "bfloat16", 2, 16, 32).offset(1, *at) == 2 * (1024 + 512 + 160 + 9)
    # [16, 2, 32] at [9, 1, 10].
    assert PageFormat("split_nhd", "bfloat16", 2, 16, 32).offset(0, *at) == 2 * (9 * 64 + 32 + 10)


@pytest.mark.parametrize(
    ("coordinate", "name"),
    [
        ((2, 0, 0, 0), "kv"),
        ((-1, 0, 0, 0), "kv"),
        ((0, 3, 0, 0), "h"),
        ((0, -1, 0, 0), "h"),
        ((0, 0, 16, 0), "n"),
        ((1, 0, 0, 64), "d"),
    ],
)
def test_a_coordinate_outside_the_page_is_refused(coordinate: tuple[int, int, int, int], name: str) -> None:
    page = PageFormat("split_hnd", "float16", 3, 16, 64)
    with pytest.raises(InvalidArgumentError, match=rf"PageFormat\.offset: {name} must be in 0\.\."):
        page.offset(*coordinate)


@given(page_formats(), st.data())
@settings(deadline=None)
def test_head_ranges_are_a_page_of_those_heads(page: PageFormat, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, page.num_kv_heads))
    first = data.draw(st.integers(0, page.num_kv_heads - count))
    ranges = page.head_ranges(first, count)
    e = page.element_size
    listed = [byte for start, length in ranges for byte in range(start, start + length, e)]
    # The bytes of the slice in ascending order, and no two ranges that could be one inside a plane.
    assert listed == page.offsets()[:, first : first + count].flatten().sort().values.tolist()
    starts = {start for start, _ in page.planes}
    for (start, length), (following, _) in itertools.pairwise(ranges):
        assert start + length < following or following in starts
    # Read one after the other, they are what a rank with just these heads writes.
    part = dataclasses.replace(page, num_kv_heads=count)
    place = {byte: i * e for i, byte in enumerate(listed)}
    moved = [place[byte] for byte in page.offsets()[:, first : first + count].flatten().tolist()]
    assert moved == part.offsets().flatten().tolist()


def test_head_ranges_by_hand() -> None:
    head = 16 * 32 * 2
    assert PageFormat("standard", "bfloat16", 4, 16, 32).head_ranges(1, 2) == ((2 * head, 4 * head),)
    for kind in ("shuffled", "x_packed", "split_hnd"):
        page = PageFormat(kind, "bfloat16", 4, 16, 32)
        assert page.head_ranges(1, 2) == ((head, 2 * head), (5 * head, 2 * head))
        # All of it is still two ranges: the planes may lie apart.
        assert page.head_ranges(0, 4) == ((0, 4 * head), (4 * head, 4 * head))
    ranges = PageFormat("split_nhd", "bfloat16", 4, 16, 32).head_ranges(3, 1)
    assert len(ranges) == 32
    assert ranges[0] == (3 * 64, 64)
    assert ranges[31] == (4 * head + 15 * 256 + 3 * 64, 64)


@pytest.mark.parametrize(("first", "count"), [(0, 0), (-1, 1), (2, 3), (4, 1)])
def test_head_ranges_outside_the_page_are_refused(first: int, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"heads must be a non-empty part of 0\.\.3"):
        PageFormat("standard", "bfloat16", 4, 16, 32).head_ranges(first, count)


def test_tag() -> None:
    page = PageFormat("shuffled", torch.bfloat16, 8, 16, 128)
    assert page.tag == "fi-kv/1;shuffled;bfloat16;h8;n16;d128"
    scaled = PageFormat("standard", "float8_e4m3fnuz", 1, 32, 64, scale_mode="per_tensor")
    assert scaled.tag == "fi-kv/1;standard;float8_e4m3fnuz;h1;n32;d64;per_tensor"


@given(page_formats(), page_formats())
def test_tags_are_equal_exactly_where_formats_are(one: PageFormat, other: PageFormat) -> None:
    assert (one.tag == other.tag) == (one == other)
    assert one.tag.isascii()
    assert one.tag.isprintable()


def test_each_fp8_flavour_has_its_own_tag() -> None:
    """Known fault 36: the same byte means twice the value in the other flavour."""
    tags = {PageFormat("standard", dtype, 8, 16, 128).tag for dtype in DTYPES}
    assert len(tags) == len(DTYPES)
    for vague in ("fp8", "float8", "float8_e4m3"):
        with pytest.raises(InvalidArgumentError, match=r"dtype must be one of .*float8_e4m3fnuz"):
            PageFormat("standard", vague, 8, 16, 128)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_by_name_and_by_value(name: str) -> None:
    page = PageFormat("standard", name, 2, 16, 64)
    assert page == PageFormat("standard", getattr(torch, name), 2, 16, 64)
    assert page.dtype == name
    assert page.element_size == SIZE_OF[name]
    assert page.x == 16 // SIZE_OF[name]
    assert page.page_bytes == 2 * 2 * 16 * 64 * SIZE_OF[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("packed", "bfloat16", 8, 16, 128),
            "kind must be one of standard, shuffled, x_packed, split_hnd, split_nhd",
        ),
        (("standard", "float64", 8, 16, 128), "dtype must be one of bfloat16, .*, got 'float64'"),
        (("standard", torch.complex64, 8, 16, 128), "dtype must be one of .*, got 'complex64'"),
        (("standard", "bfloat16", 0, 16, 128), "num_kv_heads must be a positive integer, got 0"),
        (("standard", "bfloat16", 8, -16, 128), "page_size must be a positive integer, got -16"),
        (("standard", "bfloat16", 8, 16, 1.5), "head_dim must be a positive integer, got 1.5"),
        (("shuffled", "bfloat16", 8, 12, 128), "need page_size to be a multiple of 8, got 12"),
        (("shuffled", "float8_e4m3fn", 8, 8, 128), "need page_size to be a multiple of 16, got 8"),
        (("shuffled", "bfloat16", 8, 16, 100), "need head_dim to be a multiple of 8, got 100"),
        (("x_packed", "uint8", 8, 16, 72), "need head_dim to be a multiple of 16, got 72"),
        (("standard", "uint8", 8, 16, 64, "per_moon"), "scale_mode must be one of per_tensor, "),
        (("standard", "bfloat16", 8, 16, 64, "per_tensor"), "scale_mode must be None for bfloat16 pages"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"PageFormat: .*{message}"):
        PageFormat(*arguments)  # type: ignore[arg-type]


def test_what_only_some_kinds_need() -> None:
    assert [kind for kind in KINDS if why_not_format(kind, 2, 12, 128)] == ["shuffled"]
    assert [kind for kind in KINDS if why_not_format(kind, 2, 16, 100)] == ["shuffled", "x_packed"]
    assert [kind for kind in KINDS if why_not_format(kind, 4, 4, 4)] == []
    assert PageFormat("x_packed", "bfloat16", 1, 5, 8).page_bytes == 2 * 5 * 8 * 2


def test_shape_is_told_with_the_vector_width() -> None:
    shapes = [PageFormat(kind, "float8_e4m3fn", 2, 16, 64).shape for kind in KINDS]
    assert shapes == [
        "[H, N, 2D], per token K then V",
        "K [H, D/16, N, 16], then V [H, N/16, D, 16]",
        "K [H, D/16, N, 16], then V [H, D, N]",
        "K [H, N, D], then V [H, N, D]",
        "K [N, H, D], then V [N, H, D]",
    ]


def test_formats_are_frozen_values() -> None:
    page = PageFormat("standard", "bfloat16", 8, 16, 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        page.kind = "shuffled"  # type: ignore[misc]
    assert len({page, PageFormat("standard", torch.bfloat16, 8, 16, 128)}) == 1
    with pytest.raises(InvalidArgumentError):
        dataclasses.replace(page, kind="shuffled", page_size=5)
