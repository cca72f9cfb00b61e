# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`reorder_batch` against a search of all swap sequences."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer
from flashinfer.phases import reorder_batch, split_phases

THRESHOLD = 4
# (new tokens, computed, prompt) of a request of each rank: decode, short extend, long extend, prefill.
KINDS = ((1, 40, 30), (2, 16, 18), (9, 32, 64), (1, 0, 1))


class Recorder:
    """A batch of lists that must all be moved."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self.requests = list(requests)
        self.swaps: list[tuple[int, int]] = []

    def swap(self, i: int, j: int) -> None:
        self.swaps.append((i, j))
        self.requests[i], self.requests[j] = self.requests[j], self.requests[i]


def reorder(ranks: Sequence[int]) -> Recorder:
    """Requests are (rank, where they stood)."""
    batch = Recorder([(rank, i) for i, rank in enumerate(ranks)])
    columns = [[KINDS[rank][column] for rank in ranks] for column in range(3)]
    made = reorder_batch(batch, *columns, decode_threshold=THRESHOLD)
    assert made == len(batch.swaps)
    return batch


def fewest(ranks: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Swaps between the sorted order and every arrangement of the same ranks, by breadth-first search."""
    start = tuple(sorted(ranks))
    found, queue = {start: 0}, deque([start])
    while queue:
        at = queue.popleft()
        for i, j in itertools.combinations(range(len(at)), 2):
            to = list(at)
            to[i], to[j] = to[j], to[i]
            if tuple(to) not in found:
                found[tuple(to)] = found[at] + 1
                queue.append(tuple(to))
    return found


@pytest.mark.parametrize("n", range(7))
def test_every_order_of_up_to_six_requests(n: int) -> None:
    """All cycle lengths, among them positions that must move twice."""
    for multiset in itertools.combinations_with_replacement(range(4), n):
        for arrangement, least in fewest(multiset).items():
            batch = reorder(arrangement)
            assert [rank for rank, _ in batch.requests] == sorted(arrangement), arrangement
            assert sorted(i for _, i in batch.requests) == list(range(n))
            assert len(batch.swaps) == least, (arrangement, batch.swaps)


@given(st.lists(st.sampled_from(range(4)), max_size=300))
def test_longer_batches(ranks: list[int]) -> None:
    batch = reorder(ranks)
    target = sorted(ranks)
    assert [rank for rank, _ in batch.requests] == target
    # No more moves than a cycle decomposition needs, and nobody moves who stands right.
    wrong = sum(a != b for a, b in zip(ranks, target, strict=True))
    assert -(-wrong // 2) <= len(batch.swaps) <= max(0, wrong - 1)
    assert all(batch.requests[i] == (rank, i) for i, rank in enumerate(target) if ranks[i] == rank)


@given(st.lists(st.booleans(), max_size=200))
def test_requests_that_move_alike_keep_their_order(is_decode: list[bool]) -> None:
    batch = reorder([0 if d else 3 for d in is_decode])
    decodes = sum(is_decode)
    moved = [i for position, (_, i) in enumerate(batch.requests[:decodes]) if i != position]
    assert moved == sorted(moved)


def test_the_case_of_the_report() -> None:
    """A cycle of three: each position moves, one of them twice."""
    batch = reorder([2, 3, 0])
    assert [i for _, i in batch.requests] == [2, 0, 1]
    assert len(batch.swaps) == 2


def test_decodes_of_several_tokens_stay_in_front_of_short_prompt_chunks() -> None:
    """Known from serving with speculation: a one-token chunk went in front and made the whole batch prefill."""
    names = "BEADC"
    query, computed, prompt = [1, 9, 4, 1, 4], [16, 32, 100, 0, 80], [17, 64, 50, 1, 50]
    batch = Recorder(names)
    reorder_batch(batch, query, computed, prompt, decode_threshold=THRESHOLD)
    order = [names.index(name) for name in batch.requests]
    assert set(batch.requests[:2]) == {"A", "C"}
    assert batch.requests[2:] == ["B", "E", "D"]
    query, computed = [query[i] for i in order], [computed[i] for i in order]
    split = split_phases(query, [q + c for q, c in zip(query, computed, strict=True)], computed, THRESHOLD)
    assert (split.num_decodes, split.num_extends, split.num_prefills) == (3, 1, 1)


def test_a_batch_in_order_is_not_touched() -> None:
    for ranks in ([], [0], [3, 3], [0, 0, 1, 2, 2, 3]):
        assert not reorder(ranks).swaps


def test_tensors_and_no_prompts() -> None:
    batch = Recorder("xyz")
    assert reorder_batch(batch, torch.tensor([5, 1, 1]), torch.tensor([0, 9, 0])) == 1
    assert batch.requests == ["y", "x", "z"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1], [1, 2]), "num_computed must be of length 1, that of query_lens, got 2"),
        (([1], [1], [1, 2]), "num_prompt must be of length 1, that of query_lens, got 2"),
        (([-1], [1]), "query_lens must be of lengths that are not negative, got -1"),
        (
            (torch.ones(2), [1, 1]),
            "query_lens must be a 1-D tensor of integers on the host, got float32[2] on cpu; pass query_lens.cpu()",
        ),
    ],
)
def test_lengths_that_make_no_batch(arguments: Any, sentence: str) -> None:
    batch = Recorder("xy")
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        reorder_batch(batch, *arguments)
    assert str(caught.value) == f"reorder_batch: {sentence}"
    assert not batch.swaps
