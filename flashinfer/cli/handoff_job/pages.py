# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page pools in the two formats of the hand-off, and the page table of one sequence."""

from __future__ import annotations

import dataclasses

import torch

from flashinfer.kv import PageFormat
from flashinfer.page import get_batch_indices_positions, get_seq_lens


@dataclasses.dataclass(frozen=True)
class PagePool:
    """The KV pages of all layers of one process.

    Attributes
    ----------
    page_format
        What the bytes of a page mean.
    kv_layout
        The name under which the ops know these caches.
    memory
        Per layer the tensors that hold the pages, one a plane, each `[blocks, ...]` and contiguous.
    caches
        Per layer the `(K, V)` views of that memory that the ops take.
    """

    page_format: PageFormat
    kv_layout: str
    memory: tuple[tuple[torch.Tensor, ...], ...]
    caches: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer."""
        return self.memory[0][0].shape[0]


def standard_pool(page_format: PageFormat, num_layers: int, num_blocks: int) -> PagePool:
    """Zeroed pages `[blocks, H, N, 2D]`; to the ops their two halves along the last dimension are K and V."""
    shape = (num_blocks, page_format.num_kv_heads, page_format.page_size, 2 * page_format.head_dim)
    dtype = getattr(torch, page_format.dtype)
    pages = [torch.zeros(shape, dtype=dtype) for _ in range(num_layers)]
    return PagePool(
        page_format,
        "HND",
        tuple((layer,) for layer in pages),
        tuple((layer[..., : page_format.head_dim], layer[..., page_format.head_dim :]) for layer in pages),
    )


def shuffled_pool(page_format: PageFormat, num_layers: int, num_blocks: int) -> PagePool:
    """Zeroed K planes `[blocks, H, D/x, N, x]` and V planes `[blocks, H, N/x, D, x]`, each in memory of its own."""
    H, N, D, x = page_format.num_kv_heads, page_format.page_size, page_format.head_dim, page_format.x
    dtype = getattr(torch, page_format.dtype)
    caches = tuple(
        (
            torch.zeros(num_blocks, H, D // x, N, x, dtype=dtype),
            torch.zeros(num_blocks, H, N // x, D, x, dtype=dtype),
        )
        for _ in range(num_layers)
    )
    return PagePool(page_format, "SHUFFLED", caches, caches)


def scattered_blocks(count: int, num_blocks: int, seed: int) -> torch.Tensor:
    """`count` distinct block ids in no order, int32: what a long-running process's free list looks like."""
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))[:count].int()


@dataclasses.dataclass(frozen=True)
class Step:
    """Page table and positions of one forward pass, as the ops take them; all int32."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor


@dataclasses.dataclass
class Sequence:
    """One sequence's place in a pool.

    Parameters
    ----------
    pool
        Where its pages are.
    block_ids
        The blocks it may use, in order of position.
    length
        Tokens whose K and V are in the pages.
    """

    pool: PagePool
    block_ids: torch.Tensor
    length: int = 0

    def pages(self, length: int) -> int:
        """Pages that `length` tokens take."""
        return -(-length // self.pool.page_format.page_size)

    def extend(self, count: int) -> Step:
        """Make room for `count` more tokens."""
        page_size = self.pool.page_format.page_size
        self.length += count
        used = self.pages(self.length)
        qo_indptr = torch.tensor([0, count], dtype=torch.int32)
        kv_indptr = torch.tensor([0, used], dtype=torch.int32)
        kv_last_page_len = torch.tensor([self.length - (used - 1) * page_size], dtype=torch.int32)
        seq_lens = get_seq_lens(kv_indptr, kv_last_page_len, page_size)
        batch_indices, positions = get_batch_indices_positions(qo_indptr, seq_lens, count)
        return Step(qo_indptr, kv_indptr, self.block_ids[:used], kv_last_page_len, batch_indices, positions)
