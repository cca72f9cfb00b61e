# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The read floor of MLA: a kernel that reads each row of a batch once, through its page table, and adds them up."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def read_kernel(pool, pages, out, rows, row_elements: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    program = tl.program_id(0)
    share = tl.cdiv(rows, tl.num_programs(0))
    column = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float32)
    for start in range(program * share, min((program + 1) * share, rows), TILE):
        row = start + tl.arange(0, TILE)
        page = tl.load(pages + tl.minimum(row, rows - 1) // PAGE_SIZE).to(tl.int64)
        at = (page * PAGE_SIZE + row % PAGE_SIZE) * row_elements
        mask = (column < row_elements)[None, :] & (row < rows)[:, None]
        total += tl.sum(tl.load(pool + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32), 0)
    tl.store(out + program * 1024 + column, total)


def read_rows(
    pool: torch.Tensor, pages: torch.Tensor, rows: int, out: torch.Tensor, programs: int, tile: int
) -> Callable[[object], None]:
    """A launch over the first `rows` rows that `pages` names in `pool [pages, page_size, elements]`."""

    def read(_: object) -> None:
        read_kernel[(programs,)](pool, pages, out, rows, pool.size(2), pool.size(1), tile, num_warps=4)

    return read
