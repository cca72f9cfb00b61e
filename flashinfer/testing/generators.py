# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Hostile inputs for tests and benchmarks: guarded pools, and page tables with poison in unused entries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from flashinfer.core.errors import InvalidArgumentError

# A page id that no pool has: whoever follows it faults or is told, and never gets a plausible page.
UNUSED_PAGE_ID = 2**30

# The byte between pages: an odd pattern that is neither zero, all ones nor any dtype's NaN.
GUARD_BYTE = 0xA5

_BASE_ALIGNMENT = 16


class GuardedPool:
    """KV pages with guard bytes before, between and after them, all in one allocation.

    Memory is guard pages, then plane 0 of page 0, gap, plane 1 of page 0, gap, plane 0 of page 1, gap and so
    on, then guard pages: each plane is a tensor whose page stride is larger than its page.

    Parameters
    ----------
    num_pages
        Pages of the pool.
    page_shape
        Shape of one page of one plane.
    dtype
        Element type.
    planes
        1, or 2 for K and V planes that alternate page by page.
    gap_bytes
        Guard bytes after every page of every plane; a multiple of the element size. 16 keeps vectors aligned.
    guard_pages
        Whole guard pages at either end.
    device
        Where the pool lies.
    poison
        Fill the pages with NaN (integers: the guard byte); else with zero.

    Attributes
    ----------
    planes
        One tensor `[num_pages, *page_shape]` per plane.
    """

    def __init__(
        self,
        num_pages: int,
        page_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        planes: int = 1,
        gap_bytes: int = 64,
        guard_pages: int = 1,
        device: torch.device | str = "cpu",
        poison: bool = True,
    ) -> None:
        page_bytes = math.prod(page_shape) * dtype.itemsize
        if gap_bytes < 1 or gap_bytes % dtype.itemsize != 0:
            raise InvalidArgumentError(
                f"GuardedPool: gap_bytes must be a positive multiple of {dtype.itemsize}, got {gap_bytes}"
            )
        self.page_bytes = page_bytes
        self._slot_bytes = page_bytes + gap_bytes
        self._start = -(-guard_pages * self._slot_bytes // _BASE_ALIGNMENT) * _BASE_ALIGNMENT
        self._slots = num_pages * planes
        total = 2 * self._start + self._slots * self._slot_bytes
        # Whole elements, so that the buffer can be seen as `dtype`.
        total = -(-total // dtype.itemsize) * dtype.itemsize
        self._bytes = torch.full((total,), GUARD_BYTE, dtype=torch.uint8, device=device)
        elements = self._bytes.view(dtype)
        shape = (num_pages, *page_shape)
        page_stride = planes * self._slot_bytes // dtype.itemsize
        strides = (page_stride, *torch.empty(tuple(page_shape), device="meta").stride())
        starts = ((self._start + plane * self._slot_bytes) // dtype.itemsize for plane in range(planes))
        self.planes = tuple(elements.as_strided(shape, strides, start) for start in starts)
        for plane in self.planes:
            if not poison:
                plane.zero_()
            elif dtype.is_floating_point:
                plane.fill_(float("nan"))
        self._snapshot: torch.Tensor | None = None

    @property
    def pages(self) -> torch.Tensor:
        """The only plane."""
        if len(self.planes) != 1:
            raise InvalidArgumentError(
                f"GuardedPool.pages: pool must have one plane, got {len(self.planes)}; use planes"
            )
        return self.planes[0]

    def remember(self) -> None:
        """Take the present bytes as what `check_only_changed` compares with."""
        self._snapshot = self._bytes.clone()

    def check_guards(self) -> None:
        """Fail if any byte outside the pages changed since the pool was made."""
        outside = torch.ones_like(self._bytes, dtype=torch.bool)
        for slot in range(self._slots):
            outside[self._page_range(slot)] = False
        self._fail_where(outside & (self._bytes != GUARD_BYTE), "a guard byte was overwritten")

    def check_only_changed(self, page_ids: Iterable[int]) -> None:
        """Fail if a byte outside the pages `page_ids` differs from the last `remember()`, guards included."""
        if self._snapshot is None:
            raise InvalidArgumentError("GuardedPool.check_only_changed: remember() must be called first")
        changed = self._bytes != self._snapshot
        for page in page_ids:
            for plane in range(len(self.planes)):
                changed[self._page_range(page * len(self.planes) + plane)] = False
        self._fail_where(changed, "a byte outside the named pages changed")

    def _page_range(self, slot: int) -> slice:
        start = self._start + slot * self._slot_bytes
        return slice(start, start + self.page_bytes)

    def _fail_where(self, wrong: torch.Tensor, what: str) -> None:
        if not bool(wrong.any()):
            return
        at = int(wrong.nonzero()[0])
        slot, inside = divmod(at - self._start, self._slot_bytes)
        if not 0 <= slot < self._slots:
            where = f"in the guard {'before' if slot < 0 else 'after'} the pool"
        else:
            page, plane = divmod(slot, len(self.planes))
            part = "in" if inside < self.page_bytes else f"{inside - self.page_bytes} bytes past"
            where = f"{part} page {page} of plane {plane}"
        raise AssertionError(f"{what} {where} (byte {at} of the buffer); {int(wrong.sum())} bytes in all")


@dataclasses.dataclass(frozen=True)
class PageTable:
    """A batch's pages, ragged (`indptr`, `indices`, `last_page_len`) and dense (`block_table`).

    `indices` is longer than `indptr[-1]` and `block_table` wider than any request: both hold `UNUSED_PAGE_ID`
    there.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_pages: int
    page_size: int

    def pages_of(self, request: int) -> list[int]:
        """The page ids of one request, in token order."""
        first, last = (int(bound) for bound in self.indptr[request : request + 2])
        return [int(page) for page in self.indices[first:last]]


def ragged_page_table(
    seq_lens: Sequence[int],
    page_size: int,
    *,
    seed: int = 0,
    spare_pages: int = 3,
    tail: int = 5,
    index_dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> PageTable:
    """Scatter a batch over a pool: every request gets its own pages, in no order.

    Parameters
    ----------
    seq_lens
        Tokens of each request; 0 is a request without pages and with `last_page_len` 0.
    page_size
        Tokens of a page.
    seed
        Of the shuffle.
    spare_pages
        Pages of the pool that nobody owns.
    tail
        Over-allocated entries behind `indptr[-1]` and in each row of `block_table`.
    index_dtype
        int32 or int64, of every tensor.
    device
        Where the tensors lie.
    """
    counts = [-(-length // page_size) for length in seq_lens]
    total = sum(counts)
    num_pages = total + spare_pages
    ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))[:total].tolist()
    indptr = [0]
    for count in counts:
        indptr.append(indptr[-1] + count)
    width = max(counts, default=0) + tail
    rows = [ids[indptr[i] : indptr[i + 1]] for i in range(len(counts))]
    padded = [row + [UNUSED_PAGE_ID] * (width - len(row)) for row in rows]
    last = [length - (count - 1) * page_size if count else 0 for length, count in zip(seq_lens, counts, strict=True)]

    def index_tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=index_dtype, device=device)

    return PageTable(
        indptr=index_tensor(indptr),
        indices=index_tensor(ids + [UNUSED_PAGE_ID] * tail),
        last_page_len=index_tensor(last),
        seq_lens=index_tensor(list(seq_lens)),
        block_table=torch.tensor(padded, dtype=index_dtype, device=device).reshape(len(counts), width),
        num_pages=num_pages,
        page_size=page_size,
    )


def random_bits(shape: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Every bit pattern, NaNs included: for what must move bits and not look at values."""
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(tuple(shape))
