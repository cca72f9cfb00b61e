# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Formats of unlike size: token blocks and head pieces inside one page, and conversion from one pool to another."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashinfer
from flashinfer.kv import KINDS, PageFormat, convert_kv_pages, convert_kv_pages_into
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import random_bits
from rocm_tests.kv.pages import Layers, bits, places

BACKENDS = ["native", "reference"]
PAIRS = list(itertools.permutations(KINDS, 2))


def nested_places(page: PageFormat, H: int, N: int) -> torch.Tensor:
    """`[2, H, N, D]`: index of each element in a page that is a row of little ones, block by block, piece by piece."""
    little, pieces = places(page), H // page.num_kv_heads
    elements = little.numel()
    out = torch.empty(2, H, N, page.head_dim, dtype=torch.int64)
    for block in range(N // page.page_size):
        for piece in range(pieces):
            heads = slice(piece * page.num_kv_heads, (piece + 1) * page.num_kv_heads)
            tokens = slice(block * page.page_size, (block + 1) * page.page_size)
            out[:, heads, tokens] = little + (block * pieces + piece) * elements
    return out


def expected(pages: torch.Tensor, src: PageFormat, dst: PageFormat) -> torch.Tensor:
    H, N = max(src.num_kv_heads, dst.num_kv_heads), max(src.page_size, dst.page_size)
    new = torch.empty_like(pages)
    new[:, nested_places(dst, H, N).flatten()] = pages[:, nested_places(src, H, N).flatten()]
    return new


def check_both_ways(little: PageFormat, large: PageFormat, backend: str, planes: int = 2) -> None:
    layers, ids = Layers(large, planes=planes), [4, 0, 3]
    convert_kv_pages(layers.caches, torch.tensor(ids), little, large, backend=backend)
    for i, before in enumerate(layers.before):
        want = before.clone()
        want[ids] = expected(before[ids], little, large)
        assert_equal_bits(layers.of(i), want)
        layers.pools[i].check_only_changed(ids)
        layers.pools[i].check_guards()
    convert_kv_pages(layers.caches, torch.tensor(ids), large, little, backend=backend)
    layers.check_untouched()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_remote_pages_of_16_tokens_in_a_larger_local_page(tokens: int, backend: str) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn"):
        little, large = PageFormat("standard", dtype, 3, 16, 64), PageFormat("shuffled", dtype, 3, tokens, 64)
        check_both_ways(little, large, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pieces", [2, 3, 6])
def test_head_slices_of_several_ranks(pieces: int, backend: str) -> None:
    for kind in KINDS:
        little, large = PageFormat(kind, "bfloat16", 6 // pieces, 16, 32), PageFormat("shuffled", "bfloat16", 6, 16, 32)
        check_both_ways(little, large, backend, planes=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_blocks_and_pieces_together(kind: str, other: str, backend: str) -> None:
    little, large = PageFormat(kind, "float16", 2, 8, 16), PageFormat(other, "float16", 4, 24, 16)
    check_both_ways(little, large, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_kind_of_two_sizes(backend: str) -> None:
    """Not an identity: the heads of two small pages are interleaved."""
    check_both_ways(
        PageFormat("split_hnd", "bfloat16", 2, 8, 16), PageFormat("split_hnd", "bfloat16", 2, 16, 16), backend
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_partial_last_page(backend: str) -> None:
    """Three remote pages in the room of four: their tokens are right whatever the rest holds."""
    little, large = PageFormat("standard", "bfloat16", 2, 16, 32), PageFormat("shuffled", "bfloat16", 2, 64, 32)
    valid = random_bits((3, little.page_bytes // 2), torch.bfloat16, seed=1)
    results = []
    for seed in (2, 3):
        junk = random_bits((1, little.page_bytes // 2), torch.bfloat16, seed=seed)
        page = torch.cat([valid, junk]).view(1, -1).clone()
        convert_kv_pages([page], torch.tensor([0]), little, large, backend=backend)
        results.append(bits(page)[0, places(large)[:, :, :48].flatten()])
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "other"), [*PAIRS, ("shuffled", "shuffled")])
def test_from_pool_to_pool(kind: str, other: str, backend: str) -> None:
    src, dst = (PageFormat(k, "bfloat16", 3, 16, 64) for k in (kind, other))
    sources, target = Layers(src, planes=1, gap_bytes=32), Layers(dst, planes=2, pages=5, gap_bytes=96, seed=9)
    source_ids, ids = [4, 1, 4], [0, 4, 2]  # a page may be read twice
    arguments = sources.caches, torch.tensor(source_ids), target.caches, torch.tensor(ids, dtype=torch.int32)
    convert_kv_pages_into(*arguments, src, dst, backend=backend)
    sources.check_untouched()
    for i, before in enumerate(target.before):
        want = before.clone()
        want[ids] = expected(sources.before[i][source_ids], src, dst)
        assert_equal_bits(target.of(i), want)
        target.pools[i].check_only_changed(ids)
        target.pools[i].check_guards()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("source_ids", "ids", "sentence"),
    [
        ([0, 9], [0, 1], "source_ids[1] must be a page id in [0, 6), got 9"),
        ([0, 1], [5, -1], "block_ids[1] must be a page id in [0, 6), got -1"),
        ([0, 1], [3, 3], "block_ids must be distinct, got 3 at [0] and [1]; convert each page once"),
    ],
)
def test_bad_ids_between_pools(source_ids: list[int], ids: list[int], sentence: str, backend: str) -> None:
    src, dst = (PageFormat(k, "bfloat16", 2, 16, 32) for k in ("standard", "shuffled"))
    sources, target = Layers(src), Layers(dst, seed=5)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        convert_kv_pages_into(
            sources.caches, torch.tensor(source_ids), target.caches, torch.tensor(ids), src, dst, backend=backend
        )
    assert sentence in str(caught.value)
    target.check_untouched()


def test_two_windows_of_one_request_commute() -> None:
    little, large = PageFormat("standard", "bfloat16", 2, 16, 32), PageFormat("shuffled", "bfloat16", 2, 32, 32)
    orders = []
    for order in ([[0, 2], [1]], [[1], [0, 2]]):
        layers = Layers(large)
        for ids in order:
            convert_kv_pages(layers.caches, torch.tensor(ids), little, large)
        orders.append(layers.of(0))
    assert torch.equal(*orders)
