# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a batch in C++, word by word, against the rules in Python."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.phase_plan import BatchPlan, ChunkLaunch, plan_batch
from flashinfer.phases import split_phases
from rocm_tests.mla_context.chunk_rule import Piece, cut


@dataclasses.dataclass
class Batch:
    """Requests of (new tokens, context) in pages of `page_size`."""

    requests: list[tuple[int, int]]
    page_size: int
    dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        self.new = [new for new, _ in self.requests]
        self.contexts = [context for _, context in self.requests]
        pages = [-(-sum(r) // self.page_size) for r in self.requests]
        # Of a request without pages nothing is said.
        self.tails = [
            sum(r) - (n - 1) * self.page_size if n else b % (self.page_size + 1)
            for b, (r, n) in enumerate(zip(self.requests, pages, strict=True))
        ]
        self.qo, self.kv = [0, *accumulate(self.new)], [0, *accumulate(pages)]

    def plan(self, threshold: int, budget: int | None, **options: int | bool) -> BatchPlan:
        metadata = (torch.tensor(values, dtype=self.dtype) for values in (self.qo, self.kv, self.tails))
        return plan_batch("op", *metadata, self.page_size, threshold, budget, **options)  # type: ignore[arg-type]


def words_of(plan: BatchPlan, span: slice) -> list[int]:
    assert span.start % 4 == 0, "not on 16 bytes"
    found: list[int] = plan.words[span].tolist()
    assert len(found) == span.stop - span.start
    return found


def indptr(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def compare_launch(plan: BatchPlan, launch: ChunkLaunch, batch: Batch, pieces: list[Piece], d: int, e: int) -> None:
    """`pieces` of the extends `d` to `e - 1`, one for each request that takes part."""
    first, last = pieces[0][0], pieces[-1][0] + 1
    new = batch.new[d:e]
    assert (launch.requests.start, launch.requests.stop) == (d + first, d + last)
    assert (launch.rows.start, launch.rows.stop) == (sum(new[:first]), sum(new[:last]))
    assert launch.tokens == sum(tokens for _, _, tokens in pieces)
    assert words_of(plan, launch.starts) == [start for _, start, _ in pieces]
    assert words_of(plan, launch.kv_indptr) == indptr([tokens for _, _, tokens in pieces])
    assert words_of(plan, launch.qo_indptr) == indptr(new[first:last])


def compare_phase(plan: BatchPlan, pages_qo: slice, qo: slice, batch: Batch, first: int, last: int) -> None:
    if first == last:
        assert words_of(plan, pages_qo) == words_of(plan, qo) == []
        return
    assert words_of(plan, qo) == indptr(batch.new[first:last])
    assert words_of(plan, pages_qo) == [0] * first + indptr(batch.new[first:last])


REQUESTS = st.lists(st.tuples(st.sampled_from([0, 1, 1, 2, 5, 9]), st.sampled_from([0, 0, 1, 7, 8, 9, 40])), max_size=9)


@settings(deadline=None)
@given(
    REQUESTS,
    st.sampled_from([1, 4, 8]),
    st.integers(1, 3),
    st.sampled_from([None, 0, 3, 17]),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_a_plan_is_what_the_rules_say(
    requests: list[tuple[int, int]],
    page_size: int,
    threshold: int,
    more: int | None,
    widen: bool,
    spare: int | None,
    dtype: torch.dtype,
) -> None:
    batch = Batch(requests, page_size, dtype)
    budget = None if more is None else page_size + more
    split = split_phases(batch.new, [sum(r) for r in requests], batch.contexts, threshold)
    d, e = split.num_decodes, split.num_decodes + split.num_extends
    chunks = [] if budget is None else cut(batch.contexts[d:e], budget, page_size)
    launches = None if spare is None else len(chunks) + spare
    plan = batch.plan(threshold, budget, widen=widen, **({} if launches is None else {"launches": launches}))
    assert plan.split == split
    assert words_of(plan, plan.kv_indptr) == batch.kv
    assert words_of(plan, plan.last_page_len) == batch.tails
    assert words_of(plan, plan.decode_qo) == indptr(batch.new[:d])
    compare_phase(plan, plan.extend_pages_qo, plan.extend_qo, batch, d, e)
    compare_phase(plan, plan.prefill_pages_qo, plan.prefill_qo, batch, e, len(requests))
    longest = tuple(max(part, default=0) for part in (batch.new[:d], batch.new[d:e], batch.new[e:]))
    assert (plan.max_q_lens, plan.total_q, plan.total_pages) == (longest, batch.qo[-1], batch.kv[-1])
    nobody = [(request, 0, 0) for request in range(e - d)]
    if widen:
        chunks = [[next((p for p in chunk if p[0] == none[0]), none) for none in nobody] for chunk in chunks]
    assert len(plan.chunks) == len(chunks) + (spare or 0)
    for launch, pieces in zip(plan.chunks, chunks, strict=False):
        compare_launch(plan, launch, batch, pieces, d, e)
    for launch in plan.chunks[len(chunks) :]:
        assert launch.tokens == 0
        assert (launch.requests, launch.rows) == (slice(d, e), slice(0, sum(batch.new[d:e])))
        assert words_of(plan, launch.kv_indptr) == [0] * (e - d + 1)


def test_on_the_host_a_widened_launch_reads_what_it_fetched() -> None:
    batch = Batch([(4, 20), (3, 9)], 4)
    assert [launch.tokens for launch in batch.plan(1, 16, widen=True).chunks] == [16, 13]


@pytest.mark.parametrize(
    ("qo", "kv", "tails", "sentence"),
    [
        (
            [0, 2**31],
            [0, 1],
            [4],
            "counts of queries, pages and tokens up to request 0 must be at most 2147483647, got",
        ),
        (
            [0, 1],
            [0, 2**31],
            [4],
            "counts of queries, pages and tokens up to request 0 must be at most 2147483647, got",
        ),
        (
            [0, 1],
            [0, 2**62],
            [4],
            "counts of queries, pages and tokens up to request 0 must be at most 2147483647, got",
        ),
        # 2^29 pages of 4 tokens: one token too many.
        (
            [0, 1],
            [0, 2**29],
            [4],
            "counts of queries, pages and tokens up to request 0 must be at most 2147483647, got",
        ),
        # Other lengths, and good ones, if they were cut off to 32 bits.
        ([0, 2**32 + 1], [0, 1], [4], "counts of queries, pages and tokens up to request 0 must be at most 2147483647"),
        ([0, 1], [0, 1], [2**32 + 4], "kv_last_page_len[0] must be in [0, 4], got 4294967300"),
        ([0, 0], [0, 0], [-1], "kv_last_page_len[0] must be in [0, 4], got -1"),
        ([0, 1], [0, 0], [0], "the pages of request 0 must be of at least its 1 new tokens, got 0 tokens; append them"),
    ],
)
def test_counts_that_do_not_fit_are_refused(qo: list[int], kv: list[int], tails: list[int], sentence: str) -> None:
    metadata = (torch.tensor(values) for values in (qo, kv, tails))
    with pytest.raises(InvalidArgumentError) as caught:
        plan_batch("op", *metadata, 4, 1, 64)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"op: {sentence}")


def test_as_many_tokens_as_int32_counts() -> None:
    metadata = (torch.tensor(values) for values in ([0, 1], [0, 2**29], [3]))
    plan = plan_batch("op", *metadata, 4, 1, 64)  # type: ignore[arg-type]
    assert plan.total_pages == 2**29
