# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk planner by hand, and by its promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.core.chunks import Chunk, plan_chunks
from flashinfer.core.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("contexts", "chunks"),
    [
        ([], []),
        ([0, 0], []),
        # Whole contexts are packed, without those that have none at either end.
        ([0, 3, 0, 5, 0], [Chunk(1, [0, 0, 0], [3, 0, 5], False)]),
        # Exactly the budget, one less, one more.
        ([8], [Chunk(0, [0], [8], False)]),
        ([7], [Chunk(0, [0], [7], False)]),
        ([9], [Chunk(0, [0], [8], False), Chunk(0, [8], [1], True)]),
        # Cuts are aligned to 4; what follows shares the chunk of a remainder.
        ([3, 6], [Chunk(0, [0, 0], [3, 4], False), Chunk(1, [4], [2], True)]),
        ([5, 6], [Chunk(0, [0], [5], False), Chunk(1, [0], [6], False)]),
        ([20, 4, 1], [Chunk(0, [0], [8], False), Chunk(0, [8], [8], True), Chunk(0, [16, 0], [4, 4], True),
                      Chunk(2, [0], [1], False)]),
        # A gap at the end of a chunk belongs to none.
        ([8, 0, 8], [Chunk(0, [0], [8], False), Chunk(2, [0], [8], False)]),
        ([6, 0, 8], [Chunk(0, [0], [6], False), Chunk(2, [0], [8], False)]),
    ],
)  # fmt: skip
def test_budget_of_eight_in_pages_of_four(contexts: list[int], chunks: list[Chunk]) -> None:
    assert plan_chunks("op", contexts, 8, 4) == chunks


def test_indptr() -> None:
    chunk = Chunk(1, [0, 0, 0], [3, 0, 5], False)
    assert chunk.indptr == [0, 3, 3, 8]
    assert chunk.tokens == 8


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 16), st.integers(0, 70))
def test_promises(contexts: list[int], alignment: int, more: int) -> None:
    budget = alignment + more
    pieces: dict[int, list[tuple[int, int]]] = {}
    before = None
    for chunk in plan_chunks("op", contexts, budget, alignment):
        assert 0 < chunk.tokens <= budget
        assert chunk.lengths[0]
        assert chunk.lengths[-1]
        assert chunk.continues == (chunk.first in pieces)
        assert chunk.first == before or not chunk.continues
        for i, (start, length) in enumerate(zip(chunk.starts, chunk.lengths, strict=True)):
            before = chunk.first + i
            assert start % alignment == 0
            if length:
                assert i == 0 or start == 0, "only the first piece continues one"
                pieces.setdefault(before, []).append((start, length))
            else:
                assert contexts[before] == 0
    joined = {request: [t for s, n in parts for t in range(s, s + n)] for request, parts in pieces.items()}
    assert joined == {request: list(range(context)) for request, context in enumerate(contexts) if context}


@given(st.lists(st.integers(0, 64), max_size=20))
def test_no_chunk_but_the_last_has_room_for_a_page(contexts: list[int]) -> None:
    assert all(32 - chunk.tokens < 8 for chunk in plan_chunks("op", contexts, 32, 8)[:-1])


def test_a_budget_below_a_page_is_refused_where_there_is_a_context() -> None:
    assert plan_chunks("op", [0], 3, 4) == []
    with pytest.raises(InvalidArgumentError, match="op: the chunk budget must be at least a page, 4 tokens, got 3; pa"):
        plan_chunks("op", [0, 1], 3, 4)
