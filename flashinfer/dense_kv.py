# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Dense keys and values in a workspace, gathered from pages before attention reads them many times."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer.host_batch import HostBatch

# Rows of queries that must see a key, on average, before gathering it pays. An H200 multiplies 252 TFLOP/s from
# shuffled pages of 128 dimensions and 460 from dense keys, and gathers at 2.3 TB/s: both ways take as long at 500 rows.
ROWS_WORTH = 512
# What follows partial results in a workspace begins on a line of the cache.
ALIGNMENT = 256


@dataclass(frozen=True)
class DenseTable:
    """Where dense keys and values of each request lie; int32, on the device.

    Attributes
    ----------
    starts
        `[batch_size]`, the first token gathered of each request: 0.
    kv_indptr
        `[batch_size + 1]`, where each request's keys begin.
    """

    starts: torch.Tensor
    kv_indptr: torch.Tensor


@dataclass(frozen=True)
class Gathered:
    """A plan to gather a batch.

    Attributes
    ----------
    begin
        Where K begins in the workspace, in bytes.
    rows
        Rows of K and of V that there is room for.
    row_bytes
        Of one row of K and one of V, all heads.
    table
        None where each run makes it anew, as in a graph, which follows what its buffers hold.
    """

    begin: int
    rows: int
    row_bytes: int
    table: DenseTable | None

    @property
    def end(self) -> int:
        """Bytes of workspace up to the end of V."""
        return self.begin + self.rows * self.row_bytes


def worth_gathering(batch: HostBatch, group: int, causal: bool, window_left: int) -> bool:
    """Whether enough rows of queries see a key that gathering it first costs less than reading it from its page.

    Parameters
    ----------
    batch
        Lengths; tokens of each request.
    group
        Query heads to a KV head.
    causal, window_left
        What queries do not see.
    """
    if batch.max_q_len * group < ROWS_WORTH:
        return False
    keys, seen = 0, 0
    for q, kv in zip(batch.q_lens(), batch.kv_lens(), strict=True):
        keys += kv
        # Of fewer keys than queries the first queries see none.
        some = min(q, kv)
        pairs = some * kv - some * (some - 1) // 2 if causal else q * kv
        seen += min(pairs, q * (window_left + 1)) if window_left >= 0 else pairs
    return keys > 0 and seen * group >= ROWS_WORTH * keys


def worth_in_a_graph(batch_size: int, most_rows: int, group: int) -> bool:
    """The same of what a graph's plans have in common: their requests, and the most queries of a batch."""
    return most_rows * group >= ROWS_WORTH * batch_size > 0


def dense_table(kv_indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> DenseTable:
    """The table of whole requests, from their pages; computed where the metadata lie, waiting for nothing."""
    batch = last_page_len.numel()
    words = torch.zeros(2 * batch + 1, dtype=torch.int32, device=kv_indptr.device)
    lens = ((kv_indptr.diff() - 1) * page_size + last_page_len).clamp_(min=0)
    torch.cumsum(lens, 0, dtype=torch.int32, out=words[batch + 1 :])
    return DenseTable(words[:batch], words[batch:])


def dense_kv(
    workspace: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[tokens, heads, head_dim]` at the beginning of uint8 memory."""
    tokens, heads, dim = shape
    half = tokens * heads * dim * dtype.itemsize
    k, v = workspace[:half], workspace[half : 2 * half]
    return k.view(dtype).view(shape), v.view(dtype).view(shape)
