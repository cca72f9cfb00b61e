# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`MlaContextPlanner`: chunks within the budget, rows by the block tables, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.mla_context import MlaContextPlan, MlaContextPlanner
from flashinfer.testing.generators import PageTable, ragged_page_table
from rocm_tests.mla_context.chunk_rule import cut

CPU = torch.device("cpu")


def planned(
    lens: list[int], budget: int, page_size: int, q_lens: list[int] | None = None
) -> tuple[MlaContextPlan, PageTable]:
    table = ragged_page_table(lens, page_size)
    qo_indptr = [0]
    for q in [1] * len(lens) if q_lens is None else q_lens:
        qo_indptr.append(qo_indptr[-1] + q)
    plan = MlaContextPlanner(budget, page_size, CPU).plan(qo_indptr, lens, table.block_table, table.num_pages)
    return plan, table


def shown(plan: MlaContextPlan) -> list[tuple[int, list[int], bool]]:
    """First request, tokens of the pieces, whether the first continues."""
    return [(s.chunk.first, s.kv_indptr.diff().tolist(), s.chunk.continues) for s in plan.steps]


@pytest.mark.parametrize(
    ("lens", "chunks"),
    [
        ([], []),
        ([0, 0, 0], []),
        ([1], [(0, [1], False)]),
        ([3, 4], [(0, [3, 4], False)]),
        # The edge of a chunk, and one token more and less.
        ([7], [(0, [7], False)]),
        ([8], [(0, [8], False)]),
        ([9], [(0, [8], False), (0, [1], True)]),
        ([8, 1], [(0, [8], False), (1, [1], False)]),
        # One context over three chunks.
        ([20], [(0, [8], False), (0, [8], True), (0, [4], True)]),
        # Cut at a page (4 tokens), and not begun in less than one.
        ([3, 9], [(0, [3, 4], False), (1, [5], True)]),
        ([5, 9], [(0, [5], False), (1, [8], False), (1, [1], True)]),
        # What follows a continuation, and requests without context between, before and behind.
        ([10, 3, 2], [(0, [8], False), (0, [2, 3, 2], True)]),
        ([0, 3, 0, 0, 2, 0], [(1, [3, 0, 0, 2], False)]),
        ([8, 0, 8], [(0, [8], False), (2, [8], False)]),
    ],
    ids=str,
)
def test_chunks_by_hand(lens: list[int], chunks: list[Any]) -> None:
    """A budget of 8 tokens, pages of 4."""
    plan, _ = planned(lens, 8, 4)
    assert shown(plan) == chunks
    assert plan.tokens == sum(lens)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 5),
    st.integers(0, 15),
    st.integers(0, 3),
)
def test_cut_by_the_rules_and_found_in_the_tables(
    lens: list[int], page_size: int, pages: int, more: int, first_q: int
) -> None:
    """Against the rules written down above, and the block table, token by token."""
    budget = page_size * pages + more
    q_lens = [(first_q + b) % 4 for b in range(len(lens))]
    plan, table = planned(lens, budget, page_size, q_lens)
    expected = cut(lens, budget, page_size)
    assert len(plan.chunks) == len(expected)
    for step, pieces in zip(plan.steps, expected, strict=True):
        chunk, lengths = step.chunk, [tokens for _, _, tokens in pieces]
        (first, start, _), last = pieces[0], pieces[-1][0] + 1
        assert [request for request, _, _ in pieces] == list(range(first, last))
        assert (chunk.first, chunk.requests, chunk.tokens) == (first, len(pieces), sum(lengths))
        assert chunk.continues is (start > 0)
        assert step.kv_indptr.diff().tolist() == lengths
        assert chunk.max_kv_len == max(lengths)
        assert step.qo_indptr.diff().tolist() == q_lens[first:last]
        assert (chunk.q_begin, chunk.q_end) == (sum(q_lens[:first]), sum(q_lens[:last]))
        assert chunk.max_q_len == max(q_lens[first:last])
        rows = [
            table.pages_of(request)[t // page_size] * page_size + t % page_size
            for request, begin, tokens in pieces
            for t in range(begin, begin + tokens)
        ]
        assert step.kv_indices.tolist() == rows


def test_more_chunks_than_room_was_made_for() -> None:
    plan, _ = planned([1000, 3], 4, 2)
    assert len(plan.chunks) == 251
    assert [chunk.continues for chunk in plan.chunks] == [False] + [True] * 249 + [False]


@settings(deadline=None)
@given(st.lists(st.integers(0, 64), max_size=20))
def test_no_chunk_but_the_last_has_room_for_a_page(lens: list[int]) -> None:
    plan, _ = planned(lens, 32, 8)
    assert all(32 - chunk.tokens < 8 for chunk in plan.chunks[:-1])


def test_a_budget_below_a_page_is_refused_where_there_is_a_context_only() -> None:
    plan, _ = planned([0, 0], 3, 4)
    assert plan.steps == ()


def test_index_tensors_begin_on_16_bytes() -> None:
    """Triton compiles a kernel anew for a pointer that is aligned to less."""
    plan, _ = planned([5, 9, 0, 3, 31], 12, 4)
    assert len(plan.steps) > 3
    for step in plan.steps:
        assert step.qo_indptr.data_ptr() % 16 == step.kv_indptr.data_ptr() % 16 == 0
    assert plan.steps[0].kv_indices.data_ptr() % 16 == 0


def test_a_plan_is_not_changed_by_the_next() -> None:
    first, _ = planned([5, 9], 8, 4)
    before = [[t.clone() for t in step[1:]] for step in first.steps]
    for _ in range(4):
        planned([9, 5, 30], 8, 4)
    for step, tensors in zip(first.steps, before, strict=True):
        assert all(torch.equal(got, want) for got, want in zip(step[1:], tensors, strict=True))


def test_the_whole_batch_is_known_too() -> None:
    plan, _ = planned([4, 0, 9], 100, 4, [3, 0, 2])
    assert plan.qo_indptr.tolist() == [0, 3, 3, 5]
    assert (plan.batch, plan.max_q_len, plan.tokens) == (3, 3, 13)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stride", [1, 2])
def test_lengths_may_be_tensors(dtype: torch.dtype, stride: int) -> None:
    table = ragged_page_table([5, 9], 4, index_dtype=dtype)
    qo, lens = (
        torch.tensor([[n, 7] for n in values], dtype=dtype).flatten()[::2] if stride == 2 else torch.tensor(values)
        for values in ([0, 1, 2], [5, 9])
    )
    plan = MlaContextPlanner(64, 4, CPU).plan(qo, lens, table.block_table, table.num_pages)
    assert shown(plan) == [(0, [5, 9], False)]


def test_no_requests_under_another_default_device() -> None:
    with torch.device("meta"):
        plan = MlaContextPlanner(64, 4, CPU).plan([0], [], torch.zeros(0, 0, dtype=torch.int32, device=CPU), 9)
    assert (plan.steps, plan.qo_indptr.tolist()) == ((), [0])


GOOD: dict[str, Any] = {"qo_indptr": [0, 1, 2], "context_lens": [5, 9], "num_pages": 99}


@pytest.mark.parametrize(
    ("budget", "change", "sentence"),
    [
        (64, {"context_lens": [5, -1]}, "context_lens must not be negative, got -1 for request 1"),
        (64, {"context_lens": [2**31 - 1, 5]}, "context_lens must sum up to at most 2147483647 tokens, got 2147483652"),
        (64, {"qo_indptr": [1, 1, 2]}, "qo_indptr[0] must be 0, got 1"),
        (64, {"qo_indptr": [0, 2, 1]}, "qo_indptr must not fall, got 1 after 2 at request 1"),
        (64, {"qo_indptr": [0, 2]}, "qo_indptr must be of length 3, one more than context_lens, got 2"),
        (64, {"context_lens": [5, 9.5]}, "context_lens must be a list, or a 1-D int32 or int64 tensor, got list: "),
        (64, {"context_lens": [5, 2**63]}, "context_lens must be a list, or a 1-D int32 or int64 tensor, got list: "),
        (64, {"context_lens": "ab"}, "context_lens must be a list, or a 1-D int32 or int64 tensor, got str"),
        (64, {"context_lens": b"16 bytes of text"}, "context_lens must be a list, or a 1-D int32 or int64 tensor, got"),
        (64, {"qo_indptr": torch.zeros(3, device="meta").int()}, "qo_indptr must be on the host or on cpu, got meta"),
        (64, {"context_lens": None}, "context_lens must be a list, or a 1-D int32 or int64 tensor, got NoneType"),
        # What would be other lengths in 32 bits.
        (
            64,
            {"context_lens": torch.tensor([5, 2**32 + 1])},
            "context_lens must sum up to at most 2147483647 tokens, got 4294967297",
        ),
        (64, {"context_lens": [2**62, 2**62]}, "context_lens must sum up to at most 2147483647 tokens, got 461"),
        (64, {"qo_indptr": [0, 1, 2**32]}, "qo_indptr must be at most 2147483647, got 4294967296 at request 1"),
        (64, {"qo_indptr": torch.tensor([[0, 1, 2]])}, "qo_indptr must be a list, or a 1-D int32 or int64 tensor, got"),
        (64, {"num_pages": 9.0}, "num_pages must be an integer, got 9.0"),
        (64, {"num_pages": -1}, "num_pages must be an integer from 0 to 2147483647, got -1"),
        (64, {"qo_indptr": torch.zeros(3)}, "qo_indptr must be a list, or a 1-D int32 or int64 tensor, got float32[3]"),
        (3, {}, "chunk_tokens must be at least a page, 4 tokens, got 3; pass a larger workspace"),
        (64, {"context_lens": [5, 40]}, "block_tables must be of 10 columns at least, for a context of 40 tokens, got"),
        (64, {"block_tables": torch.zeros(1, 9, dtype=torch.int32)}, "block_tables must be [>= 2, columns], a row for"),
        (64, {"block_tables": torch.zeros(2, 9, device="meta")}, "block_tables must be on cpu, got meta"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_makes_no_step_is_refused(budget: int, change: dict[str, Any], sentence: str) -> None:
    table = ragged_page_table([5, 9], 4, tail=1)
    arguments = {**GOOD, "block_tables": table.block_table, **change}
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        MlaContextPlanner(budget, 4, CPU).plan(**arguments)
    assert str(caught.value).startswith(f"MlaContextPlanner: {sentence}")


@pytest.mark.parametrize("size", [0, 2, 8])
def test_decode_context_parallelism_is_refused(size: int) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        MlaContextPlanner(64, 4, CPU, dcp_world_size=size)
    assert "MlaContextPlanner: dcp_world_size must be 1: with more, a rank's cache holds a part" in str(caught.value)
    assert f"got {size}; keep the engine's own path" in str(caught.value)


def test_pages_that_are_not_there_are_named() -> None:
    table = ragged_page_table([5, 9], 4)
    table.block_table[1, 2] = 2**30
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        MlaContextPlanner(64, 4, CPU).plan([0, 1, 2], [5, 9], table.block_table, table.num_pages)
    at = table.block_table.size(1) + 2
    sentence = f"mla_context_indices: block_tables, entry {at} row by row, must be a page id in [0, {table.num_pages})"
    assert str(caught.value) == f"{sentence}, got {2**30}"


def test_rows_past_int32_are_refused() -> None:
    table = ragged_page_table([5], 4)
    with pytest.raises(flashinfer.InvalidArgumentError, match="num_pages \\* page_size must be at most 2147483647"):
        MlaContextPlanner(64, 4, CPU).plan([0, 1], [5], table.block_table, 2**30)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_indices_of_strided_tables_and_beyond_the_pieces(backend: str) -> None:
    tables = torch.arange(60, dtype=torch.int64).view(3, 20)[:, 4:10]
    pieces = (torch.tensor(v, dtype=torch.int32) for v in ([2, 0], [3, 0], [0, 6, 6]))
    rows = torch.full((9,), 7, dtype=torch.int32)
    flashinfer.mla_context_indices(tables, *pieces, 60, 4, rows, backend=backend)
    assert rows.tolist() == [44 * 4 + 3, 45 * 4, 45 * 4 + 1, 45 * 4 + 2, 45 * 4 + 3, 46 * 4, -1, -1, -1]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("request_", "start", "sentence"),
    [
        (3, 0, "piece_requests[0] must be a row of block_tables below 3, got 3"),
        (-1, 0, "piece_requests[0] must be a row of block_tables below 3, got -1"),
        (1, 22, "block_tables must have columns for 24 tokens and more, got token 24 of row 1"),
        (1, -1, "block_tables must have columns for 24 tokens and more, got token -1 of row 1"),
    ],
)
def test_pieces_without_a_place_are_refused(request_: int, start: int, sentence: str, backend: str) -> None:
    tables = torch.zeros(3, 6, dtype=torch.int32)
    pieces = (torch.tensor(v, dtype=torch.int32) for v in ([request_], [start], [0, 4]))
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.mla_context_indices(tables, *pieces, 60, 4, torch.zeros(4, dtype=torch.int32), backend=backend)
    assert str(caught.value) == f"mla_context_indices: {sentence}"
