# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The reference converter against the offset function, in pools whose every other byte is guarded."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.backends.reference.page_convert import convert_kv_pages, why_not_convert_kv_pages
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv.format import KINDS, PageFormat
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import GuardedPool, random_bits

PAIRS = list(itertools.permutations(KINDS, 2))
DTYPES = ("bfloat16", "float16", "float32", "uint8", "float8_e4m3fn", "float8_e4m3fnuz")


def by_offset(pages: torch.Tensor, src: PageFormat, dst: PageFormat) -> torch.Tensor:
    """`[M, page_bytes]` bytes of `src` pages as `dst` pages, one element after the other."""
    converted = torch.empty_like(pages)
    for byte in range(src.element_size):
        converted[:, dst.offsets().flatten() + byte] = pages[:, src.offsets().flatten() + byte]
    return converted


def make_pools(page: PageFormat, planes: int, layers: int, pages: int, gap: int) -> list[GuardedPool]:
    """One guarded pool per layer, full of arbitrary bits."""
    shape = (2 * page.num_kv_heads * page.page_size * page.head_dim // planes,)
    dtype = getattr(torch, page.dtype)
    pools = [GuardedPool(pages, shape, dtype, planes=planes, gap_bytes=gap * dtype.itemsize) for _ in range(layers)]
    for seed, plane in enumerate(plane for pool in pools for plane in pool.planes):
        plane.copy_(random_bits(plane.shape, dtype, seed=seed))
    for pool in pools:
        pool.remember()
    return pools


def page_bytes(pool: GuardedPool, ids: list[int]) -> torch.Tensor:
    return torch.cat([plane[ids].view(torch.uint8) for plane in pool.planes], dim=1)


def convert(pools: list[GuardedPool], ids: torch.Tensor, src: PageFormat, dst: PageFormat) -> None:
    planes = [plane for pool in pools for plane in pool.planes]
    size = (src.num_kv_heads, src.page_size)
    arguments = (planes, len(pools[0].planes), ids, src.kind, *size, dst.kind, *size, src.head_dim, 0)
    assert why_not_convert_kv_pages(*arguments) is None
    convert_kv_pages(*arguments)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[str, int, int, int]:
    dtype = draw(st.sampled_from(DTYPES))
    x = 16 // getattr(torch, dtype).itemsize
    return dtype, draw(st.integers(1, 4)), x * draw(st.integers(1, 3)), x * draw(st.integers(1, 3))


@given(
    pair=st.sampled_from(PAIRS),
    geometry=geometries(),
    planes=st.integers(1, 2),
    layers=st.integers(1, 3),
    ids=st.lists(st.integers(0, 5), unique=True, max_size=6),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    gap=st.integers(1, 9),
)
@settings(deadline=None, max_examples=150)
def test_a_conversion_is_the_offset_function(
    pair: tuple[str, str],
    geometry: tuple[str, int, int, int],
    planes: int,
    layers: int,
    ids: list[int],
    index_dtype: torch.dtype,
    gap: int,
) -> None:
    src, dst = (PageFormat(kind, *geometry) for kind in pair)
    pools = make_pools(src, planes, layers, 6, gap)
    before = [page_bytes(pool, ids) for pool in pools]
    block_ids = torch.tensor(ids, dtype=index_dtype)
    convert(pools, block_ids, src, dst)
    for pool, old in zip(pools, before, strict=True):
        assert_equal_bits(page_bytes(pool, ids), by_offset(old, src, dst))
        pool.check_only_changed(ids)
        pool.check_guards()
    convert(pools, block_ids, dst, src)
    for pool, old in zip(pools, before, strict=True):
        assert_equal_bits(page_bytes(pool, ids), old)
        pool.check_only_changed([])


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_pair(src: str, dst: str) -> None:
    """The model sizes at hand: 3 heads and 8."""
    for heads, size, dim in ((3, 16, 64), (8, 32, 128)):
        one, other = (PageFormat(kind, "bfloat16", heads, size, dim) for kind in (src, dst))
        pools = make_pools(one, 2, 2, 4, 32)
        ids = [3, 0]
        before = [page_bytes(pool, ids) for pool in pools]
        convert(pools, torch.tensor(ids), one, other)
        for pool, old in zip(pools, before, strict=True):
            assert_equal_bits(page_bytes(pool, ids), by_offset(old, one, other))
            pool.check_only_changed(ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shuffled"])
def test_page_sizes_that_are_no_multiple_of_a_vector(kind: str) -> None:
    src, dst = PageFormat("split_nhd", "bfloat16", 2, 5, 24), PageFormat(kind, "bfloat16", 2, 5, 24)
    pools = make_pools(src, 1, 1, 3, 1)
    before = page_bytes(pools[0], [2])
    convert(pools, torch.tensor([2]), src, dst)
    assert_equal_bits(page_bytes(pools[0], [2]), by_offset(before, src, dst))


def test_half_pages_hold_the_bytes_of_a_standard_page() -> None:
    """The hand-off contract: one head and odd head counts split a standard page in the middle of a head."""
    for heads in (1, 3):
        src = PageFormat("standard", "float16", heads, 16, 64)
        dst = PageFormat("shuffled", "float16", heads, 16, 64)
        whole = make_pools(src, 1, 1, 2, 8)[0]
        halves = GuardedPool(2, (src.half_bytes // 2,), torch.float16, planes=2)
        for plane, part in zip(halves.planes, whole.pages.chunk(2, dim=1), strict=True):
            plane.copy_(part)
        convert([whole], torch.tensor([1]), src, dst)
        convert([halves], torch.tensor([1]), src, dst)
        assert_equal_bits(page_bytes(halves, [0, 1]), page_bytes(whole, [0, 1]))


@pytest.mark.parametrize(("ids", "got"), [([3, 1, 3], "3 at"), ([0, 4], "4$"), ([-1], "-1$")])
def test_ids_that_name_no_page_or_one_twice_are_refused(ids: list[int], got: str) -> None:
    src, dst = PageFormat("standard", "bfloat16", 2, 16, 64), PageFormat("shuffled", "bfloat16", 2, 16, 64)
    pools = make_pools(src, 2, 1, 4, 8)
    with pytest.raises(InvalidArgumentError, match=f"convert_kv_pages: block_ids.* must be .*, got {got}"):
        convert(pools, torch.tensor(ids), src, dst)
    pools[0].check_only_changed([])


def test_nothing_to_do_changes_nothing() -> None:
    src, dst = PageFormat("standard", "bfloat16", 2, 16, 64), PageFormat("shuffled", "bfloat16", 2, 16, 64)
    pools = make_pools(src, 1, 2, 3, 8)
    convert(pools, torch.tensor([], dtype=torch.int64), src, dst)
    convert(pools, torch.tensor([0, 2]), src, src)
    for pool in pools:
        pool.check_only_changed([])


def test_requests_on_different_pages_commute() -> None:
    src, dst = PageFormat("standard", "uint8", 2, 16, 32), PageFormat("x_packed", "uint8", 2, 16, 32)
    first, second = torch.tensor([4, 1]), torch.tensor([0, 3])
    results = []
    for order in ((first, second), (second, first)):
        pools = make_pools(src, 2, 1, 5, 16)
        for ids in order:
            convert(pools, ids, src, dst)
        results.append(page_bytes(pools[0], list(range(5))))
    assert_equal_bits(results[0], results[1])


def test_a_view_into_a_larger_pool() -> None:
    """Layers of one allocation: the plane starts in the middle of its storage."""
    src, dst = PageFormat("standard", "bfloat16", 1, 16, 32), PageFormat("shuffled", "bfloat16", 1, 16, 32)
    pool = random_bits((4, 3, 1, 16, 64), torch.bfloat16)
    before = pool.clone()
    convert_kv_pages([pool[:, 1]], 1, torch.tensor([2]), "standard", 1, 16, "shuffled", 1, 16, 32, 0)
    expected = before.clone()
    page = before[2, 1].flatten().view(torch.uint8).view(1, -1)
    expected[2, 1] = by_offset(page, src, dst).view(torch.bfloat16).view(1, 16, 64)
    assert_equal_bits(pool, expected)
