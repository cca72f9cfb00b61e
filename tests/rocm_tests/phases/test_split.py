# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`split_phases` by hand, and by what each phase can serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer
from flashinfer.phases import PhaseSplit, split_phases

Request = tuple[int, int]  # (new tokens, computed)


def split(requests: list[Request], threshold: int = 1) -> PhaseSplit:
    query, computed = [q for q, _ in requests], [c for _, c in requests]
    return split_phases(query, [q + c for q, c in requests], computed, threshold)


@pytest.mark.parametrize(
    ("requests", "threshold", "counts"),
    [
        ([], 1, (0, 0, 0)),
        ([(1, 5), (1, 6)], 1, (2, 0, 0)),
        ([(7, 5), (3, 6)], 1, (0, 2, 0)),
        ([(7, 0), (3, 0)], 1, (0, 0, 2)),
        ([(1, 5), (7, 5), (7, 0)], 1, (1, 1, 1)),
        # A first chunk of one token is a prefill, wherever that is possible.
        ([(1, 5), (1, 0)], 1, (1, 0, 1)),
        ([(1, 5), (9, 9), (1, 0), (8, 0)], 1, (1, 1, 2)),
        ([(1, 0)], 1, (0, 0, 1)),
        ([(1, 0), (1, 5)], 1, (2, 0, 0)),
        # Speculative tokens.
        ([(4, 5), (2, 9), (5, 5), (4, 0)], 4, (2, 1, 1)),
        ([(4, 5), (2, 9), (5, 5), (4, 0)], 3, (0, 3, 1)),
        # Nobody above the threshold, whatever a padded maximum may say.
        ([(2, 5), (3, 5)], 8, (2, 0, 0)),
        # Out of order: extends serve what stands in between.
        ([(7, 0), (1, 5)], 1, (0, 2, 0)),
        ([(1, 5), (7, 5), (7, 0), (7, 5)], 1, (1, 3, 0)),
        ([(7, 5), (1, 5), (7, 0)], 1, (0, 2, 1)),
        # Padded rows stay with the phase before them.
        ([(1, 5), (0, 0), (0, 0)], 1, (3, 0, 0)),
        ([(1, 5), (0, 0), (7, 0)], 1, (2, 0, 1)),
        ([(7, 5), (0, 0)], 1, (0, 2, 0)),
        ([(7, 0), (0, 0)], 1, (0, 0, 2)),
        ([(0, 0)], 1, (1, 0, 0)),
    ],
)
def test_boundaries(requests: list[Request], threshold: int, counts: tuple[int, int, int]) -> None:
    found = split(requests, threshold)
    assert (found.num_decodes, found.num_extends, found.num_prefills) == counts


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=30), st.integers(1, 5))
def test_each_phase_can_serve_its_requests(requests: list[Request], threshold: int) -> None:
    found = split(requests, threshold)
    d, e = found.num_decodes, found.num_decodes + found.num_extends
    assert e + found.num_prefills == len(requests)
    assert all(q <= threshold for q, _ in requests[:d])
    assert all(c == 0 for q, c in requests[e:])
    assert found.num_decode_tokens == sum(q for q, _ in requests[:d])
    assert found.num_extend_tokens == sum(q for q, _ in requests[d:e])
    assert found.num_prefill_tokens == sum(q for q, _ in requests[e:])
    rows = list(range(sum(q for q, _ in requests)))
    assert rows[found.decode_rows] + rows[found.extend_rows] + rows[found.prefill_rows] == rows


def test_context_follows_from_the_lengths() -> None:
    assert split_phases([1, 5, 5], [9, 9, 5]) == split([(1, 8), (5, 4), (5, 0)])
    tensors = torch.tensor([1, 5, 5], dtype=torch.int32), torch.tensor([9, 9, 5])
    assert split_phases(*tensors) == split([(1, 8), (5, 4), (5, 0)])
    # An upper bound of the length makes no context.
    assert split_phases([1, 5], [9, 9], [8, 0]) == split([(1, 8), (5, 0)])


def test_counts_are_integers() -> None:
    found = split_phases(torch.tensor([1, 5]), torch.tensor([9, 9]), torch.tensor([8, 4]))
    assert all(type(value) is int for value in vars(found).values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1], [1, 2]), "seq_lens must be of length 1, that of query_lens, got 2"),
        (([3], [2]), "seq_lens[0] must be at least the request's 3 cached and new tokens, got 2"),
        (([3, 3], [9, 9], [6, 7]), "seq_lens[1] must be at least the request's 10 cached and new tokens, got 9"),
        (([1], [1], [0], 0), "decode_threshold must be an integer from 1 to 2147483647, got 0"),
    ],
)
def test_lengths_that_contradict_each_other(arguments: Any, sentence: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        split_phases(*arguments)
    assert str(caught.value) == f"split_phases: {sentence}"
