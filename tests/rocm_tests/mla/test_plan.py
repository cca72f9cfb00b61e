# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The cutting of a batch: every row sees every key that it must exactly once, in pieces of about equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.core import mla_plan
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.core.mla_plan import Shape

UNIT = 64
CPU = torch.device("cpu")


def cut(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    shape: Shape,
    *,
    heads: int = 16,
    page_size: int = 1,
    causal: bool = False,
) -> mla_plan.HostPlan:
    qo, lens = torch.tensor([0, *q_lens]).cumsum(0), torch.tensor(list(kv_lens), dtype=torch.int64)
    pages = torch.tensor([0, *(-(-n // page_size) for n in kv_lens)]).cumsum(0)
    return mla_plan.plan([qo, pages, lens], heads, page_size, causal, [shape], CPU)


def items_of(plan: mla_plan.HostPlan, shape: Shape) -> list[list[list[int]]]:
    """Items by worker."""
    schedule = plan.split(plan.words)[-1].tolist()
    starts = schedule[: shape.workers + 1]
    first = shape.schedule_words
    assert (len(schedule) - first) % 8 == 0
    items = [schedule[i : i + 8] for i in range(first, len(schedule), 8)]
    assert starts[0] == 0
    assert starts[-1] == len(items)
    return [items[a:b] for a, b in itertools.pairwise(starts)]


def merges_of(plan: mla_plan.HostPlan, shape: Shape) -> list[list[int]]:
    schedule = plan.split(plan.words)[-1].tolist()
    entries = schedule[shape.workers + 1 : shape.schedule_words]
    return [e for e in (entries[i : i + 5] for i in range(0, len(entries), 5)) if e[4]]


def check(q_lens: Sequence[int], kv_lens: Sequence[int], shape: Shape, heads: int, causal: bool) -> None:
    plan = cut(q_lens, kv_lens, shape, heads=heads, causal=causal)
    by_worker = items_of(plan, shape)
    starts = torch.tensor([0, *q_lens]).cumsum(0).tolist()
    pages = torch.tensor([0, *kv_lens]).cumsum(0).tolist()
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    block = shape.rows_per_item * shape.parts
    for item in (i for items in by_worker for i in items):
        q_begin, row, q_len, page, kv_len, begin, end, slot = item
        b = next(r for r in range(len(q_lens)) if starts[r] == q_begin and q_lens[r] and pages[r] == page)
        assert (q_len, kv_len) == (q_lens[b], kv_lens[b])
        assert row % block == 0
        pieces.setdefault((b, row), []).append((begin, end, slot))
    wanted = {(b, row) for b, n in enumerate(q_lens) for row in range(0, n * heads, block)}
    assert set(pieces) == wanted
    merges = {(q, row): (first, count) for q, row, _, first, count in merges_of(plan, shape)}
    slots = []
    for (b, row), found in pieces.items():
        last_token = min(q_lens[b], -(-(row + block) // heads)) - 1
        keys = max(0, min(kv_lens[b], kv_lens[b] - q_lens[b] + last_token + 1)) if causal else kv_lens[b]
        assert [p[0] for p in found] == [0, *(p[1] for p in found[:-1])]
        assert found[-1][1] == keys
        assert all(end % UNIT == 0 for _, end, _ in found[:-1])
        if len(found) == 1:
            assert found[0][2] == -1
            assert (starts[b], row) not in merges
        else:
            first = found[0][2]
            assert [p[2] for p in found] == list(range(first, first + len(found)))
            assert merges[starts[b], row] == (first, len(found))
            slots += [p[2] for p in found]
    assert len(merges) <= shape.workers
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= 2 * shape.workers
    costs = [sum(1 + -(-(i[6] - i[5]) // UNIT) for i in items) for items in by_worker]
    total = sum(costs)
    assert max(costs, default=0) <= -(-total // shape.workers) + 3


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2000)), max_size=12),
    st.sampled_from([1, 3, 16, 24, 128]),
    st.integers(1, 40),
    st.booleans(),
)
@settings(deadline=None, max_examples=120)
def test_any_batch(lens: list[tuple[int, int]], heads: int, workers: int, causal: bool) -> None:
    most = heads * max((q for q, _ in lens), default=1)
    rows = next((r for r in (16, 32) if most <= r), 64)
    shape = Shape(rows, workers, -(-heads // rows))
    check([q for q, _ in lens], [k for _, k in lens], shape, heads, causal)


@pytest.mark.parametrize("batch", [1, 8, 132, 256])
def test_equal_requests_are_spread_over_all_workers(batch: int) -> None:
    shape = Shape(16, 132, 1)
    plan = cut([1] * batch, [8192] * batch, shape)
    tiles = [sum(-(-(i[6] - i[5]) // UNIT) for i in items) for items in items_of(plan, shape)]
    assert sum(tiles) == batch * 128
    assert max(tiles) <= batch * 128 / 132 + 3


def test_the_metadata_come_first_and_last_pages_with_them() -> None:
    plan = cut([1, 2, 0], [5, 0, 8], Shape(16, 3, 1), page_size=4)
    qo, kv, lens, last, _ = plan.split(plan.words)
    assert [t.tolist() for t in (qo, kv, lens, last)] == [[0, 1, 3, 3], [0, 2, 2, 4], [5, 0, 8], [1, 0, 4]]
    assert (plan.total_q, plan.total_pages, plan.total_kv, plan.max_q_len) == (3, 4, 13, 2)
    # A graph's kernels have this address baked in: it depends on the batch size alone.
    assert plan.schedule_at == 16


@pytest.mark.parametrize(("q_len", "heads", "rows"), [(1, 16, 16), (2, 8, 16), (3, 8, 32), (5, 8, 64), (1, 96, 64)])
def test_the_planner_takes_the_first_shape_that_holds_a_request(q_len: int, heads: int, rows: int) -> None:
    metadata = [torch.tensor([0, 1, 1 + q_len]), torch.tensor([0, 1, 2]), torch.tensor([1, 9])]
    shapes = mla_plan.shapes_for(heads, CPU)
    plan = mla_plan.plan(metadata, heads, 16, False, shapes, CPU)
    assert plan.shape == next(s for s in shapes if s.rows_per_item == rows)
    assert plan.max_q_len == q_len
    assert plan.is_uniform == (q_len == 1)


def test_requests_with_more_queries_than_keys_are_noticed() -> None:
    shape = Shape(16, 3, 1)
    assert [cut(q, k, shape).has_unseen for q, k in (([1, 3], [1, 3]), ([1, 3], [1, 2]), ([1, 0], [0, 5]))] == [
        False,
        True,
        True,
    ]


def test_a_long_request_among_short_ones_is_cut() -> None:
    shape = Shape(16, 8, 1)
    plan = cut([1] * 4, [100_000, 3, 3, 3], shape)
    assert merges_of(plan, shape)[0][4] == 8


def test_numbers_that_do_not_fit_are_refused() -> None:
    """2^32 + 1 is 1 in 32 bits."""
    qo, pages, lens = torch.tensor([0, 2**32 + 1]), torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(InvalidArgumentError, match="must be numbers of 32 bits, got 4294967297"):
        mla_plan.plan([qo, pages, lens], 16, 1, False, [Shape(16, 3, 1)], CPU)


@pytest.mark.parametrize(
    ("pages", "length", "page_size", "is_good"),
    [
        *((p, n, 4, p == -(-n // 4)) for p in (0, 1, 2, 3) for n in (0, 1, 4, 5, 8, 9)),
        (1, 2**31 - 1, 2**62, True),
        (2**31 - 1, 2**31 - 1, 1, True),
        (2**31 - 1, 1, 2**62, False),
    ],
)
def test_pages_of_a_request(pages: int, length: int, page_size: int, is_good: bool) -> None:
    lists = [torch.tensor([0, 1]), torch.tensor([0, pages]), torch.tensor([length])]
    arguments = (lists, 1, page_size, False, [Shape(16, 3, 1)], CPU)
    if is_good:
        assert mla_plan.plan(*arguments).total_pages == pages
    else:
        message = f"got {pages} pages for the {length} tokens of request 0"
        with pytest.raises(InvalidArgumentError, match=message):
            mla_plan.plan(*arguments)
