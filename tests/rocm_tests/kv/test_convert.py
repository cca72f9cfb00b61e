# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`convert_kv_pages` against counted pages, with guards around every page."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.kv import KINDS, PageFormat, convert_kv_pages
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, random_bits
from rocm_tests.kv.pages import Layers, converted

BACKENDS = ("native", "reference")
PAIRS = list(itertools.permutations(KINDS, 2))
BOTH_WAYS = [("standard", "shuffled"), ("shuffled", "standard")]


def formats(src: str, dst: str, dtype: str, H: int, N: int, D: int) -> tuple[PageFormat, PageFormat]:
    return PageFormat(src, dtype, H, N, D), PageFormat(dst, dtype, H, N, D)


def run_and_check(layers: Layers, ids: list[int], src: PageFormat, dst: PageFormat, backend: str) -> None:
    convert_kv_pages(layers.caches, torch.tensor(ids, dtype=torch.int32), src, dst, backend=backend)
    layers.check(ids, src, dst)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_every_pair(kind: str, other: str, planes: int, backend: str) -> None:
    """Odd head counts split a standard page in the middle of a head: the hand-off's two half pages are not K and V."""
    for H, dtype in ((3, "bfloat16"), (1, "float8_e4m3fnuz"), (2, "float32")):
        src, dst = formats(kind, other, dtype, H, 16, 32)
        run_and_check(Layers(src, planes=planes), [4, 0, 3], src, dst, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", [64, 72, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(("kind", "other"), BOTH_WAYS)
def test_head_sizes(kind: str, other: str, D: int, backend: str) -> None:
    """flashinfer-ai/flashinfer#4299: D=72 is a multiple of 8 and not of 16, so 1-byte pages refuse it by name."""
    src, dst = formats(kind, other, "float16", 3, 16, D)
    run_and_check(Layers(src, layers=1, pages=3), [2, 0], src, dst, backend)
    if D % 16 == 0:
        src, dst = formats(kind, other, "uint8", 1, 32, D)
        run_and_check(Layers(src, layers=1, pages=2), [1], src, dst, backend)
    else:
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"need head_dim to be a multiple of 16, got {D}"):
            formats(kind, other, "float8_e4m3fn", 3, 16, D)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("N", [16, 32, 64, 128])
@pytest.mark.parametrize(("kind", "other"), BOTH_WAYS)
def test_page_sizes(kind: str, other: str, N: int, backend: str) -> None:
    src, dst = formats(kind, other, "bfloat16", 8, N, 128)
    run_and_check(Layers(src, layers=1, pages=3), [2, 1], src, dst, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_fit_no_vector(backend: str) -> None:
    """Kinds without vectors take any page size and head size."""
    for kind, other in itertools.permutations(("standard", "split_hnd", "split_nhd"), 2):
        for dtype, N, D in (("bfloat16", 5, 7), ("uint8", 1, 3), ("float32", 3, 1)):
            src, dst = formats(kind, other, dtype, 3, N, D)
            run_and_check(Layers(src, planes=1, gap_bytes=12), [5, 1], src, dst, backend)
    src, dst = formats("standard", "x_packed", "bfloat16", 3, 5, 24)
    run_and_check(Layers(src, gap_bytes=2), [5, 1], src, dst, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_plane_and_two_hold_the_same_pages(backend: str) -> None:
    src, dst = formats("standard", "shuffled", "bfloat16", 3, 16, 64)
    whole = random_bits((4, 3, 16, 128), torch.bfloat16)
    halves = tuple(half.clone() for half in whole.flatten(1).chunk(2, dim=1))
    ids = torch.tensor([2, 0])
    convert_kv_pages([whole], ids, src, dst, backend=backend)
    convert_kv_pages([halves], ids, src, dst, backend=backend)
    assert_equal_bits(torch.cat(halves, dim=1), whole.flatten(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_one_buffer(backend: str) -> None:
    """Layers inside pages, as a cross-layer pool has them: each layer is a strided view that starts in mid-storage."""
    src, dst = formats("standard", "shuffled", "bfloat16", 2, 16, 32)
    pool = random_bits((5, 3, 2, 16, 64), torch.bfloat16)
    expected = pool.clone()
    expected[[3, 1]] = converted(pool[[3, 1]].view(6, -1), src, dst).view(2, 3, 2, 16, 64)
    convert_kv_pages([pool[:, layer] for layer in range(3)], torch.tensor([3, 1]), src, dst, backend=backend)
    assert_equal_bits(pool, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_layers_than_one_launch_takes(backend: str) -> None:
    src, dst = formats("standard", "shuffled", "uint8", 1, 16, 16)
    run_and_check(Layers(src, layers=300, pages=2), [1], src, dst, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_unlike_strides(backend: str) -> None:
    src, dst = formats("shuffled", "split_nhd", "bfloat16", 2, 16, 16)
    run_and_check(Layers(src, layers=5, gap_bytes=[64, 32, 32, 64, 6]), [0, 5], src, dst, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do_changes_nothing(backend: str) -> None:
    src, dst = formats("standard", "shuffled", "bfloat16", 2, 16, 16)
    layers = Layers(src)
    for dtype in (torch.int32, torch.int64):
        convert_kv_pages(layers.caches, torch.tensor([], dtype=dtype), src, dst, backend=backend)
        convert_kv_pages(layers.caches, torch.tensor([2, 0], dtype=dtype), src, src, backend=backend)
    convert_kv_pages([], torch.tensor([1]), src, dst, backend=backend)
    empty = torch.zeros(0, 2, 16, 32, dtype=torch.bfloat16)
    convert_kv_pages([empty], torch.tensor([], dtype=torch.int64), src, dst, backend=backend)
    layers.check_untouched()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([0, 6, 1], "block_ids[1] must be a page id in [0, 6), got 6"),
        ([0, 1, -1], "block_ids[2] must be a page id in [0, 6), got -1"),
        ([UNUSED_PAGE_ID], f"block_ids[0] must be a page id in [0, 6), got {UNUSED_PAGE_ID}"),
        # Two requests that share a page: converted twice it would be garbage.
        ([4, 1, 4], "block_ids must be distinct, got 4 at [0] and [2]; convert each page once"),
    ],
)
def test_bad_ids_are_named_and_nothing_is_converted(
    ids: list[int], sentence: str, dtype: torch.dtype, backend: str
) -> None:
    src, dst = formats("standard", "shuffled", "bfloat16", 2, 16, 16)
    # Unlike strides: on some backends a launch each, and the first must not have run either.
    layers = Layers(src, layers=3, gap_bytes=[64, 32, 16])
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        convert_kv_pages(layers.caches, torch.tensor(ids, dtype=dtype), src, dst, backend=backend)
    assert str(caught.value) == f"convert_kv_pages: {sentence}"
    layers.check_untouched()
    run_and_check(layers, [4, 1], src, dst, backend)


FORMAT = PageFormat("standard", "bfloat16", 2, 16, 16)
PLANE = torch.zeros(3, 2, 16, 32, dtype=torch.bfloat16)
HALF = torch.zeros(3, 512, dtype=torch.bfloat16)
HALF_2 = HALF.clone()
IDS = torch.tensor([1])
BAD = {
    "caches must be a list with one entry a layer, got bfloat16[3, 2, 16, 32] on cpu; pass [cache]": (PLANE, IDS),
    "caches[1] must be a tuple of K and V plane, as all layers or none, got bfloat16[3, 2, 16, 32] on cpu": (
        [(HALF, HALF_2), PLANE],
        IDS,
    ),
    "caches[0] must be a tuple of K and V plane, as all layers or none, got 3 planes": ([(HALF, HALF, HALF)], IDS),
    "planes[1] must be a plane of its own, got the memory of planes[0]": ([PLANE, PLANE], IDS),
    "caches must be a list with one entry a layer, got generator; pass [cache]": ((p for p in [PLANE]), IDS),
    "caches[0] must be a tuple of K and V plane, as all layers or none, got NoneType": ([None], IDS),
    "planes[1] must be a tensor, got tuple": ([PLANE, (HALF, HALF)], IDS),
    "caches must be of 2-byte elements as bfloat16, got float32[3, 2, 16, 32] on cpu": ([PLANE.float()], IDS),
    "planes[1] must be of the first plane's dtype torch.bfloat16, got torch.float16": ([PLANE, PLANE.half()], IDS),
    "planes[1] must be of the first plane's device cpu, got meta": ([PLANE, PLANE.to("meta")], IDS),
    "planes[1] must be of the first plane's 3 pages, got 2": ([PLANE, PLANE[:2]], IDS),
    "planes[0] must be of 2048 bytes to a page, as the format says, got 1024 bytes, bfloat16[3, 512] on cpu": (
        [HALF],
        IDS,
    ),
    "planes[0] must be of 1024 bytes to a page, as the format says, got 2048 bytes, bfloat16[3, 2, 16, 32] on cpu": (
        [(PLANE, PLANE)],
        IDS,
    ),
    "planes[0] must be [pages, ...], got bfloat16[1536] on cpu": ([HALF.flatten()], IDS),
    "planes[0] must be dense inside a page; only pages may be strided, got stride (1024, 32, 64, 1)": (
        [PLANE.view(3, 16, 2, 32).transpose(1, 2)],
        IDS,
    ),
    "planes[0] must be of pages that do not overlap, got stride (0, 512, 32, 1)": (
        [PLANE[:1].expand(3, 2, 16, 32)],
        IDS,
    ),
    "block_ids must be 1-D, got int64[1, 1] on cpu": ([PLANE], IDS.view(1, 1)),
    "block_ids must be int32 or int64, got float32[1] on cpu; pass block_ids.int()": ([PLANE], IDS.float()),
    "block_ids must be on cpu, got meta; pass block_ids.to('cpu')": ([PLANE], IDS.to("meta")),
    "block_ids must be contiguous, got stride (2,); pass block_ids.contiguous()": ([PLANE], torch.zeros(4).long()[::2]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, backend: str) -> None:
    caches, ids = BAD[message]
    dst = PageFormat("shuffled", "bfloat16", 2, 16, 16)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        convert_kv_pages(caches, ids, FORMAT, dst, backend=backend)
    assert str(caught.value) == f"convert_kv_pages: {message}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float16"}, "of src's dtype bfloat16, got float16"),
        ({"num_kv_heads": 3}, "of a num_kv_heads that divides src's 2 or is a multiple of it, got 3"),
        ({"page_size": 24}, "of a page_size that divides src's 16 or is a multiple of it, got 24"),
        ({"head_dim": 32}, "of src's head_dim 16, got 32"),
    ],
)
def test_formats_of_unlike_geometry_are_refused(changes: dict[str, object], sentence: str) -> None:
    fields = {"kind": "shuffled", "dtype": "bfloat16", "num_kv_heads": 2, "page_size": 16, "head_dim": 16}
    with pytest.raises(flashinfer.InvalidArgumentError, match=f"convert_kv_pages: dst must be {sentence}"):
        convert_kv_pages([PLANE], IDS, FORMAT, PageFormat(**{**fields, **changes}))  # type: ignore[arg-type]


@st.composite
def conversions(draw: st.DrawFn) -> tuple[PageFormat, PageFormat]:
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"]))
    x = 16 // getattr(torch, dtype).itemsize
    geometry = (draw(st.integers(1, 5)), x * draw(st.integers(1, 3)), x * draw(st.integers(1, 3)))
    return formats(*draw(st.sampled_from(PAIRS)), dtype, *geometry)


@given(
    pair=conversions(),
    planes=st.integers(1, 2),
    gaps=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ids=st.lists(st.integers(0, 5), unique=True, max_size=6),
    seed=st.integers(0, 99),
    backend=st.sampled_from(BACKENDS),
)
@settings(deadline=None, max_examples=60)
def test_there_and_back(
    pair: tuple[PageFormat, PageFormat], planes: int, gaps: list[int], ids: list[int], seed: int, backend: str
) -> None:
    src, dst = pair
    layers = Layers(src, layers=len(gaps), planes=planes, gap_bytes=[g * src.element_size for g in gaps], seed=seed)
    run_and_check(layers, ids, src, dst, backend)
    convert_kv_pages(layers.caches, torch.tensor(ids, dtype=torch.int64), dst, src, backend=backend)
    layers.check_untouched()


@given(pair=conversions(), order=st.permutations(range(6)), cut=st.integers(0, 6), backend=st.sampled_from(BACKENDS))
@settings(deadline=None, max_examples=25)
def test_requests_on_different_pages_commute(
    pair: tuple[PageFormat, PageFormat], order: list[int], cut: int, backend: str
) -> None:
    """Two requests whose pages alternate in the pool, in either order, as in one call."""
    src, dst = pair
    first, second = order[:cut], order[cut:]
    for requests in ((first, second), (second, first), (first + second,)):
        layers = Layers(src)
        for ids in requests:
            convert_kv_pages(layers.caches, torch.tensor(ids, dtype=torch.int64), src, dst, backend=backend)
        layers.check(range(6), src, dst)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("stride_bytes", "page"), [(1 << 20, 2100), (1 << 20, 4200), (2048, 2_200_000)])
def test_offsets_past_32_bits(stride_bytes: int, page: int, backend: str) -> None:
    """ROCm/aiter#2893, vllm-project/vllm#52109: 2^31 and 2^32 bytes by a large stride, and by a large id."""
    src, dst = formats("standard", "shuffled", "bfloat16", 2, 16, 16)
    # The operating system gives memory only for pages that are touched.
    pool = torch.empty((page + 1) * stride_bytes, dtype=torch.uint8).view(torch.bfloat16).view(page + 1, -1)
    plane = pool[:, : src.page_bytes // 2]
    plane[page] = random_bits((src.page_bytes // 2,), torch.bfloat16)
    expected = converted(plane[page : page + 1].clone(), src, dst)
    strays = [page * stride_bytes % 2**width // stride_bytes for width in (31, 32)]
    before = [(p, plane[p].clone()) for p in strays if p != page]
    convert_kv_pages([plane], torch.tensor([page]), src, dst, backend=backend)
    assert_equal_bits(plane[page : page + 1], expected)
    for p, old in before:
        assert_equal_bits(plane[p], old)


@pytest.mark.parametrize("backend", BACKENDS)
def test_planes_that_share_bytes_are_refused(backend: str) -> None:
    """They would be converted twice where they meet; pages that take turns in memory share nothing."""
    src, dst = PageFormat("split_hnd", "uint8", 1, 2, 1), PageFormat("standard", "uint8", 1, 2, 1)
    row = torch.arange(24, dtype=torch.uint8)
    ids, before = torch.tensor([0]), row.clone()
    bad = (
        [row[0:4].view(1, 4), row[1:5].view(1, 4)],
        [row[0:16].view(4, 4), row[8:24].view(4, 4)],
        [row[0:16].view(2, 8)[:, :4], row[2:18].view(2, 8)[:, :4]],
        [row[0:16].view(2, 8)[:, :4], row[4:20].view(4, 4)[:2]],
    )
    for planes in bad:
        with pytest.raises(
            flashinfer.InvalidArgumentError, match=r"planes\[1\] must be a plane of its own, got the mem"
        ):
            convert_kv_pages(planes, ids, src, dst, backend=backend)
    assert torch.equal(row, before)
    pages = row[:16].view(2, 2, 4)
    convert_kv_pages([pages[:, 0], pages[:, 1]], ids, src, dst, backend=backend)
    assert row.tolist()[:8] == [0, 2, 1, 3, 4, 6, 5, 7]
