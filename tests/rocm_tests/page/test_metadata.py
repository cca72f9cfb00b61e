# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`get_batch_indices_positions` and `get_seq_lens` against hand-computed cases and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing.generators import ragged_page_table

BACKENDS = ("native", "reference")
WIDTHS = (torch.int32, torch.int64)


def batch_positions(
    indptr: list[int], lens: list[int], nnz: int, dtype: torch.dtype, backend: str
) -> tuple[list[int], list[int]]:
    indptr_t, lens_t = torch.tensor(indptr, dtype=dtype), torch.tensor(lens, dtype=dtype)
    found = flashinfer.get_batch_indices_positions(indptr_t, lens_t, nnz, backend=backend)
    for t in found:
        assert t.dtype == torch.int32
        assert t.shape == (nnz,)
        assert t.is_contiguous()
    return found[0].tolist(), found[1].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize(
    ("indptr", "lens", "nnz", "batch", "positions"),
    [
        # The example of FlashInfer's documentation: appends of 1, 2 and 3 tokens, of lengths 4, 6 and 3.
        ([0, 1, 3, 6], [4, 6, 3], 6, [0, 1, 1, 2, 2, 2], [3, 4, 5, 0, 1, 2]),
        # Slots beyond indptr[-1] are padding: -1, never 0.
        ([0, 1, 2], [4, 1], 5, [0, 1, -1, -1, -1], [3, 0, 0, 0, 0]),
        # Requests without new tokens: first, in the middle, last.
        ([0, 0, 2, 2, 3, 3], [5, 2, 9, 7, 0], 3, [1, 1, 3], [0, 1, 6]),
        # Fewer slots than rows: what fits.
        ([0, 2, 5], [2, 3], 3, [0, 0, 1], [0, 1, 0]),
        ([0], [], 2, [-1, -1], [0, 0]),
        ([0], [], 0, [], []),
        ([0, 0, 0], [3, 4], 0, [], []),
        ([0, 0, 0], [3, 4], 2, [-1, -1], [0, 0]),
        # Rows before the first request's belong to nobody.
        ([2, 4], [5], 5, [-1, -1, 0, 0, -1], [0, 0, 3, 4, 0]),
    ],
)
def test_by_hand(
    indptr: list[int],
    lens: list[int],
    nnz: int,
    batch: list[int],
    positions: list[int],
    dtype: torch.dtype,
    backend: str,
) -> None:
    assert batch_positions(indptr, lens, nnz, dtype, backend) == (batch, positions)


@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12),
    padding=st.integers(-3, 5),
    dtype=st.sampled_from(WIDTHS),
    backend=st.sampled_from(BACKENDS),
)
@settings(deadline=None, max_examples=150)
def test_any_batch(requests: list[tuple[int, int]], padding: int, dtype: torch.dtype, backend: str) -> None:
    """Each request: tokens before the append, and tokens appended."""
    indptr, rows = [0], []
    for b, (before, appended) in enumerate(requests):
        indptr.append(indptr[-1] + appended)
        rows += [(b, before + i) for i in range(appended)]
    nnz = max(0, len(rows) + padding)
    rows = (rows + [(-1, 0)] * nnz)[:nnz]
    found = batch_positions(indptr, [sum(r) for r in requests], nnz, dtype, backend)
    assert list(zip(*found, strict=True)) == rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_go_into_given_tensors(backend: str) -> None:
    batch_indices, positions = (torch.full((4,), 77, dtype=torch.int32) for _ in range(2))
    indptr, lens = torch.tensor([0, 2]), torch.tensor([9])
    found = flashinfer.get_batch_indices_positions(indptr, lens, 4, batch_indices, positions, backend=backend)
    assert found[0] is batch_indices
    assert found[1] is positions
    assert batch_indices.tolist() == [0, 0, -1, -1]
    assert positions.tolist() == [7, 8, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize(
    ("indptr", "last", "page_size", "lens"),
    [
        ([0, 3, 4, 4, 6], [5, 1, 0, 16], 16, [37, 1, 0, 32]),
        ([0, 7, 8], [1, 1], 1, [7, 1]),
        # Without pages the last page's length stands alone.
        ([0, 0], [3], 16, [3]),
        ([0], [], 16, []),
        ([10, 12], [4], 64, [68]),
    ],
)
def test_lengths_by_hand(
    indptr: list[int], last: list[int], page_size: int, lens: list[int], dtype: torch.dtype, backend: str
) -> None:
    indptr_t, last_t = torch.tensor(indptr, dtype=dtype), torch.tensor(last, dtype=dtype)
    found = flashinfer.get_seq_lens(indptr_t, last_t, page_size, backend=backend)
    assert found.dtype == torch.int32
    assert found.tolist() == lens


@given(
    lens=st.lists(st.integers(0, 300), max_size=20),
    page_size=st.integers(1, 70),
    dtype=st.sampled_from(WIDTHS),
    backend=st.sampled_from(BACKENDS),
)
@settings(deadline=None, max_examples=80)
def test_lengths_come_back_from_a_page_table(lens: list[int], page_size: int, dtype: torch.dtype, backend: str) -> None:
    table = ragged_page_table(lens, page_size, index_dtype=dtype)
    found = flashinfer.get_seq_lens(table.indptr, table.last_page_len, page_size, backend=backend)
    assert found.tolist() == lens


I32 = torch.int32
BAD = {
    "get_batch_indices_positions: append_indptr must be of length 3, one more than seq_lens, got 2": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([1, 1]), 1)
    ),
    "get_batch_indices_positions: append_indptr must be 1-D, got int64[1, 2] on cpu": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([[0, 1]]), torch.tensor([1]), 1)
    ),
    "get_batch_indices_positions: seq_lens must be int32 or int64, got float32[1] on cpu; pass seq_lens.int()": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([1.0]), 1)
    ),
    "get_batch_indices_positions: append_indptr must be contiguous, got stride (2,); pass append_indptr.contiguous()": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([0, 5, 1, 5])[::2], torch.tensor([1]), 1)
    ),
    "get_batch_indices_positions: nnz must be an integer from 0 to 2147483647, got -1": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([1]), -1)
    ),
    "get_batch_indices_positions: seq_lens must be a tensor, got list": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([0, 1]), [1], 1)  # type: ignore[arg-type]
    ),
    "get_batch_indices_positions: append_indptr must be a tensor, got list": (
        lambda: flashinfer.get_batch_indices_positions([0, 1], torch.tensor([1]), 1)  # type: ignore[arg-type]
    ),
    "get_batch_indices_positions: positions must be a tensor, got int": (
        lambda: flashinfer.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([1]), 1, None, 7)  # type: ignore[arg-type]
    ),
    "get_seq_lens: kv_last_page_len must be a tensor, got NoneType": (
        lambda: flashinfer.get_seq_lens(torch.tensor([0, 1]), None, 16)  # type: ignore[arg-type]
    ),
    "get_batch_indices_positions: batch_indices must be of length nnz = 2, got 3": (
        lambda: flashinfer.get_batch_indices_positions(
            torch.tensor([0, 1]), torch.tensor([1]), 2, torch.zeros(3, dtype=I32)
        )
    ),
    "get_batch_indices_positions: positions must be of batch_indices' length 2, got 3": (
        lambda: flashinfer.get_batch_indices_positions(
            torch.tensor([0, 1]), torch.tensor([1]), 2, None, torch.zeros(3, dtype=I32)
        )
    ),
    "get_batch_indices_positions: batch_indices must be int32, got torch.int64": (
        lambda: flashinfer.get_batch_indices_positions(
            torch.tensor([0, 1]), torch.tensor([1]), 2, torch.zeros(2, dtype=torch.int64)
        )
    ),
    "get_seq_lens: kv_indptr must be of length 3, one more than kv_last_page_len, got 2": (
        lambda: flashinfer.get_seq_lens(torch.tensor([0, 1]), torch.tensor([1, 1]), 16)
    ),
    "get_seq_lens: page_size must be an integer from 1 to 2147483647, got 0": (
        lambda: flashinfer.get_seq_lens(torch.tensor([0, 1]), torch.tensor([1]), 0)
    ),
    "get_seq_lens: kv_last_page_len must be int32 or int64, got int16[1] on cpu; pass kv_last_page_len.int()": (
        lambda: flashinfer.get_seq_lens(torch.tensor([0, 1]), torch.tensor([1], dtype=torch.int16), 4)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        BAD[message]()
    assert str(caught.value) == message


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("append_indptr", "seq_lens", "sentence"),
    [
        ([0, 3, 1], [5, 5], "append_indptr must start at 0 or above and not decrease, got 3 at [1] and then 1"),
        ([-2, 3], [5], "append_indptr must start at 0 or above and not decrease, got -2 at [0] and then 3"),
        ([0, 5], [2], "seq_lens[0] must be at least 5, the tokens that are appended, got 2"),
    ],
)
def test_an_append_that_makes_no_sense(
    append_indptr: list[int], seq_lens: list[int], sentence: str, backend: str
) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.get_batch_indices_positions(torch.tensor(append_indptr), torch.tensor(seq_lens), 5, backend=backend)
    assert str(caught.value) == f"get_batch_indices_positions: {sentence}"


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("kv_indptr", "page_size", "sentence"),
    [
        ([0, 2, 1], 16, "kv_indptr must start at 0 or above and not decrease, got 2 at [1] and then 1"),
        (
            [0, 100000, 100001],
            100000,
            "kv_indptr and page_size must give lengths of at most 2147483647, got 9999900001 at [0]",
        ),
    ],
)
def test_lengths_that_make_no_sense(kv_indptr: list[int], page_size: int, sentence: str, backend: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.get_seq_lens(torch.tensor(kv_indptr), torch.tensor([1, 1]), page_size, backend=backend)
    assert str(caught.value) == f"get_seq_lens: {sentence}"


@pytest.mark.parametrize(
    ("nnz", "got"),
    [
        (None, "an integer, got None"),
        ("x", "an integer, got 'x'"),
        (1.5, "an integer, got 1.5"),
        (True, "an integer, got True"),
        (2**33, "an integer from 0 to 2147483647, got 8589934592"),
        (2**70, f"an integer from 0 to 2147483647, got {2**70}"),
    ],
)
def test_a_number_of_rows_is_an_integer_that_kernels_can_count(nnz: object, got: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([1]), nnz)  # type: ignore[arg-type]
    assert str(caught.value) == f"get_batch_indices_positions: nnz must be {got}"


def test_numpy_integers_are_integers() -> None:
    indptr, lens = torch.tensor([0, 1]), torch.tensor([1])
    for backend in BACKENDS:
        assert flashinfer.get_seq_lens(indptr, lens, np.int64(16), backend=backend).tolist() == [1]  # type: ignore[arg-type]
    assert flashinfer.get_batch_indices_positions(indptr, lens, np.int32(1))[0].tolist() == [0]  # type: ignore[arg-type]
