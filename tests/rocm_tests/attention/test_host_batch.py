# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A batch measured on the host, against Python's own sums; what contradicts itself; and whose memory it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.host_batch import HostBatch, measure

CPU = torch.device("cpu")


def starts(lens: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lens)]


def take(qo: Any, kv: list[int], last: list[int] | None, dtype: torch.dtype = torch.int32, **options: Any) -> HostBatch:
    given_qo = qo if isinstance(qo, int) else torch.tensor(qo, dtype=dtype)
    tails = None if last is None else torch.tensor(last, dtype=dtype)
    return measure("who", given_qo, torch.tensor(kv, dtype=dtype), tails, options.pop("page_size", 4), "kv", **options)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 4)), max_size=9),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_any_batch(lens: list[tuple[int, int, int]], dtype: torch.dtype, is_uniform: bool, has_tails: bool) -> None:
    queries = [2] * len(lens) if is_uniform else [q for q, _, _ in lens]
    pages, tails = [p for _, p, _ in lens], [t for _, _, t in lens]
    qo: Any = 2 if is_uniform else starts(queries)
    batch = take(qo, starts(pages), tails if has_tails else None, dtype, device=CPU)
    assert (batch.total_q, batch.total_pages) == (sum(queries), sum(pages))
    assert (batch.max_q_len, batch.max_kv_len) == (max(queries, default=0), 4 * max(pages, default=0))
    assert (batch.q_lens(), batch.pages()) == (queries, pages)
    keys = [4 * (p - 1) + (t if has_tails else 4) if p else 0 for p, t in zip(pages, tails, strict=True)]
    assert batch.kv_lens() == keys
    assert batch.mask_bits().tolist() == [q * k for q, k in zip(queries, keys, strict=True)]
    for side in (batch.host, batch.there):
        found = [None if t is None else t.tolist() for t in side]
        assert found == [None if is_uniform else starts(queries), starts(pages), tails if has_tails else None]
        # Triton compiles for addresses of 16 bytes, whatever the size of the batch.
        assert all(t is None or (t.dtype == torch.int32 and t.data_ptr() % 16 == 0) for t in side)


@pytest.mark.parametrize(
    ("qo", "kv", "last", "message"),
    [
        ([1, 2], [0, 1], [1], r"qo_indptr\[0\] must be 0, got 1"),
        ([0, 2, 1], [0, 1, 2], [1, 1], r"qo_indptr must be non-decreasing, got 2 at \[1\] and then 1"),
        ([0, 1], [3, 4], [1], r"kv\[0\] must be 0, got 3"),
        (1, [0, 5, 4], [1, 1], r"kv must be non-decreasing, got 5 at \[1\] and then 4"),
        (1, [0, 1, 2], [4, 5], r"last_page_len\[1\] must be in \[0, 4\], got 5"),
        (1, [0, 1, 2], [-1, 4], r"last_page_len\[0\] must be in \[0, 4\], got -1"),
        ([0, 2**32 + 1], [0, 1], [1], r"qo_indptr\[1\] must be a number of 32 bits, got 4294967297"),
        (1, [0, -(2**33)], [1], r"kv\[1\] must be a number of 32 bits, got -8589934592"),
        (1, [0, 1], [2**32], r"last_page_len\[0\] must be a number of 32 bits, got 4294967296"),
    ],
)
def test_contradictions_are_named(qo: Any, kv: list[int], last: list[int], message: str) -> None:
    """2^32 + 1 is 1 in 32 bits."""
    with pytest.raises(InvalidArgumentError, match="^who: " + message):
        take(qo, kv, last, torch.int64)


def test_callers_may_write_their_tensors_again() -> None:
    qo, kv, last = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([3])
    batch = measure("who", qo, kv, last, 4, "kv")
    for t in (qo, kv, last):
        t.fill_(9)
    assert (batch.q_lens(), batch.pages(), batch.kv_lens()) == ([1], [2], [7])
