# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`ConversionQueue` and `PageConverter` that read another pool, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.kv import ConversionQueue, PageConverter, PageFormat
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID
from rocm_tests.kv.pages import Layers, converted

SRC, DST = (PageFormat(kind, "bfloat16", 2, 16, 16) for kind in ("standard", "shuffled"))


class Pools:
    """A pool to read, one plane a layer, and a pool to write, two planes a layer and of another size."""

    def __init__(self, device: str = "cpu") -> None:
        self.read = Layers(SRC, planes=1, pages=9, device=device, seed=100)
        self.written = Layers(SRC, pages=6, device=device)

    def queue(self, **options: Any) -> ConversionQueue:
        written: Any = self.written.caches
        return ConversionQueue(written, SRC, DST, sources=self.read.caches, **options)  # type: ignore[arg-type]

    def check(self, pairs: list[tuple[int, int]], dst: PageFormat = DST) -> None:
        """Of each pair, the first page there became the second here, and not a byte else changed."""
        self.read.check_untouched()
        for layer, pool in enumerate(self.written.pools):
            expected = self.written.before[layer].clone()
            for source, block in pairs:
                expected[block] = converted(self.read.before[layer][[source]], SRC, dst)[0]
            assert_equal_bits(self.written.of(layer), expected, name=f"layer {layer}")
            pool.check_guards()


@pytest.mark.parametrize("workers", [1, 3])
def test_each_request_converts_its_pages(workers: int) -> None:
    pools = Pools()
    with pools.queue(workers=workers) as queue:
        handles = [
            queue.submit([3, 1], source_ids=[8, 0]),
            queue.submit(torch.tensor([5, 0]), source_ids=torch.tensor([7, 7], dtype=torch.int32)),
            queue.submit([], source_ids=[]),
        ]
        for handle in handles:
            handle.result(60)
    pools.check([(8, 3), (0, 1), (7, 5), (7, 0)])


def test_pages_of_one_format_are_moved() -> None:
    pools = Pools()
    with ConversionQueue(pools.written.caches, SRC, SRC, sources=pools.read.caches) as queue:  # type: ignore[arg-type]
        queue.submit([4, 2], source_ids=[1, 8]).result(60)
    pools.check([(1, 4), (8, 2)], SRC)


@pytest.mark.parametrize(
    ("blocks", "sources", "words"),
    [
        ([1, 2], [3, 9], r"source_ids\[1\] must be a page id in \[0, 9\), got 9"),
        ([1, 2], [-1, 0], r"source_ids\[0\] must be a page id in \[0, 9\), got -1"),
        ([1, 2], [0, UNUSED_PAGE_ID], r"source_ids\[1\] must be"),
        ([1, 6], [0, 1], r"block_ids\[1\] must be a page id in \[0, 6\), got 6"),
        ([1, 1], [0, 1], r"block_ids must be distinct, got 1"),
    ],
)
def test_ids_that_no_page_has_are_told_by_their_request(blocks: list[int], sources: list[int], words: str) -> None:
    pools = Pools()
    with pools.queue() as queue:
        bad, good = queue.submit(blocks, source_ids=sources), queue.submit([4], source_ids=[2])
        with pytest.raises(flashinfer.InvalidArgumentError, match=words):
            bad.result(60)
        good.result(60)
    pools.check([(2, 4)])


def test_source_ids_go_with_sources() -> None:
    pools = Pools()
    with pools.queue() as queue:
        with pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be given if and only if"):
            queue.submit([1])
        with pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be of block_ids' length 1, got 2"):
            queue.submit([1], source_ids=[1, 2])
        with pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be integers"):
            queue.submit([1], source_ids=["1"])  # type: ignore[list-item]
    in_place = Layers(SRC)
    with (
        ConversionQueue(in_place.caches, SRC, DST) as queue,  # type: ignore[arg-type]
        pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be given if and only if"),
    ):
        queue.submit([1], source_ids=[1])
    pools.check([])
    in_place.check_untouched()


def test_a_pool_to_read_that_is_gone_is_told() -> None:
    memory = torch.zeros(9, SRC.page_bytes // 2, dtype=torch.bfloat16)
    pools = Pools()
    caches: Any = pools.written.caches
    with ConversionQueue(caches, SRC, DST, sources=[memory, memory.clone()]) as queue:
        memory.untyped_storage().resize_(0)
        with pytest.raises(flashinfer.PoolLostError, match="must keep its"):
            queue.submit([1], source_ids=[1]).result(60)
    pools.check([])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_converter_reads_its_sources(backend: str) -> None:
    pools = Pools()
    caches: Any = pools.written.caches
    sources: Any = pools.read.caches
    convert = PageConverter(caches, SRC, DST, backend=backend, sources=sources)
    convert(torch.tensor([3, 1]), torch.tensor([8, 0]))
    pools.check([(8, 3), (0, 1)])
    with pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be given if and only if"):
        convert(torch.tensor([3]))
    with pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be of block_ids' length"):
        convert(torch.tensor([3]), torch.tensor([3, 1]))


def test_pools_that_do_not_fit_are_refused_at_once() -> None:
    pools = Pools()
    caches: Any = pools.written.caches
    sources: Any = pools.read.caches
    with pytest.raises(flashinfer.InvalidArgumentError, match="must be of as many layers as sources"):
        ConversionQueue(caches, SRC, DST, sources=sources[:1])
    with pytest.raises(flashinfer.InvalidArgumentError, match="sources"):
        ConversionQueue(caches, SRC, DST, sources=[layer.view(torch.uint8) for layer in sources])
