# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Guards see every stray byte, and page tables are as hostile as they promise."""

from __future__ import annotations

import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.testing.generators import UNUSED_PAGE_ID, GuardedPool, ragged_page_table, random_bits


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_a_pool_is_made_of_strided_planes(planes: int, dtype: torch.dtype) -> None:
    pool = GuardedPool(3, (2, 5), dtype, planes=planes)
    for plane in pool.planes:
        assert plane.shape == (3, 2, 5)
        assert plane.stride()[1:] == (5, 1)
        assert plane.stride(0) * dtype.itemsize == planes * (10 * dtype.itemsize + 64)
        if dtype.is_floating_point:
            assert bool(plane.float().isnan().all())
    assert len({plane.untyped_storage().data_ptr() for plane in pool.planes}) == 1
    pool.planes[-1].zero_()
    pool.check_guards()


def test_pages_are_aligned_for_vectors() -> None:
    pool = GuardedPool(3, (16,), torch.bfloat16, planes=2)
    assert [plane[page].data_ptr() % 16 for plane in pool.planes for page in range(3)] == [0] * 6


def poke(pool: GuardedPool, element: int) -> None:
    """Overwrite one element, counted from the start of page 0."""
    first = pool.planes[0]
    first.as_strided((1,), (1,), first.storage_offset() + element).fill_(7)


# A page of 8 elements and a gap of 10, two pages.
@pytest.mark.parametrize(
    ("element", "where"),
    [
        (-1, "in the guard before the pool"),
        (8, "0 bytes past page 0 of plane 0"),
        (17, "18 bytes past page 0 of plane 0"),
        (35, "18 bytes past page 1 of plane 0"),
        (36, "in the guard after the pool"),
    ],
)
def test_a_stray_write_is_seen(element: int, where: str) -> None:
    pool = GuardedPool(2, (8,), torch.int16, gap_bytes=20)
    pool.remember()
    poke(pool, element)
    with pytest.raises(AssertionError, match=f"a guard byte was overwritten {where} .*; 2 bytes in all"):
        pool.check_guards()
    with pytest.raises(AssertionError, match=f"outside the named pages changed {where}"):
        pool.check_only_changed([0, 1])


def test_a_write_into_another_page_is_seen() -> None:
    pool = GuardedPool(3, (8,), torch.int16, planes=2)
    with pytest.raises(InvalidArgumentError, match=r"remember\(\) must be called first"):
        pool.check_only_changed([])
    pool.remember()
    pool.planes[0][1] = 7
    pool.planes[1][1, 3] = 7
    pool.check_guards()
    pool.check_only_changed([1])
    with pytest.raises(AssertionError, match="in page 1 of plane 0"):
        pool.check_only_changed([0, 2])
    pool.remember()
    pool.planes[1][2, 7] = 7
    with pytest.raises(AssertionError, match="in page 2 of plane 1"):
        pool.check_only_changed([1])


def test_bad_pools_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="gap_bytes must be a positive multiple of 2, got 3"):
        GuardedPool(1, (8,), torch.int16, gap_bytes=3)
    with pytest.raises(InvalidArgumentError, match="must have one plane, got 2"):
        GuardedPool(1, (8,), torch.int16, planes=2).pages  # noqa: B018
    assert bool((GuardedPool(1, (8,), torch.int16, poison=False).pages == 0).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_page_tables(index_dtype: torch.dtype) -> None:
    lengths = [13, 0, 1, 16, 17, 4]
    table = ragged_page_table(lengths, 4, index_dtype=index_dtype, tail=3, spare_pages=2)
    assert table.indptr.tolist() == [0, 4, 4, 5, 9, 14, 15]
    assert table.last_page_len.tolist() == [1, 0, 1, 4, 1, 4]
    assert table.seq_lens.tolist() == lengths
    assert table.num_pages == 17
    used = table.indices[:15].tolist()
    assert len(set(used)) == 15
    assert set(used) < set(range(17))
    assert used != sorted(used)
    assert table.indices[15:].tolist() == [UNUSED_PAGE_ID] * 3
    assert table.block_table.shape == (6, 5 + 3)
    for request, row in enumerate(table.block_table.tolist()):
        pages = table.pages_of(request)
        assert len(pages) == -(-lengths[request] // 4)
        assert row == pages + [UNUSED_PAGE_ID] * (8 - len(pages))
    for tensor in (table.indptr, table.indices, table.last_page_len, table.seq_lens, table.block_table):
        assert tensor.dtype == index_dtype
    assert ragged_page_table(lengths, 4, seed=1).indices.tolist() != table.indices.tolist()


def test_an_empty_batch() -> None:
    table = ragged_page_table([], 4, tail=2)
    assert table.indptr.tolist() == [0]
    assert table.indices.tolist() == [UNUSED_PAGE_ID] * 2
    assert table.block_table.shape == (0, 2)


def test_random_bits_hold_every_byte() -> None:
    bits = random_bits((64, 128), torch.bfloat16)
    assert bits.dtype == torch.bfloat16
    assert len(bits.view(torch.uint8).unique()) == 256
    assert bool(bits.isnan().any())
