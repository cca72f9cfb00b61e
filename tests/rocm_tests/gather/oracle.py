# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What a gather must do, written as loops over index formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from flashinfer.testing.generators import UNUSED_PAGE_ID, ragged_page_table
from rocm_tests.page.oracle import Cache, bits, page_size_of, planes_of


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Token ranges of the requests of a page table."""

    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    starts: torch.Tensor
    out_indptr: torch.Tensor
    num_pages: int

    @property
    def nnz(self) -> int:
        return int(self.out_indptr[-1])

    def metadata(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        return tuple(t.to(device) for t in (self.kv_indices, self.kv_indptr, self.starts, self.out_indptr))


def make_ranges(
    seq_lens: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    page_size: int,
    *,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> Ranges:
    """Ranges are (start, length). The table has entries beyond its end that no pool has."""
    table = ragged_page_table(seq_lens, page_size, seed=seed, index_dtype=index_dtype)
    junk = torch.full((5,), UNUSED_PAGE_ID, dtype=index_dtype)
    lengths = torch.tensor([0, *(length for _, length in ranges)])
    return Ranges(
        kv_indices=torch.cat([table.indices, junk]),
        kv_indptr=table.indptr,
        starts=torch.tensor([start for start, _ in ranges], dtype=index_dtype),
        out_indptr=lengths.cumsum(0).to(index_dtype),
        num_pages=table.num_pages,
    )


def gather_by_loop(
    cache: Cache, ranges: Ranges, kv_layout: str, outputs: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, one head after the other, from the formulas of the page formats; bits as they are."""
    k, v = (bits(t) for t in planes_of(cache, kv_layout))
    N, H, D = page_size_of(cache, kv_layout), outputs[0].size(1), outputs[0].size(2)
    x, d = 16 // k.element_size(), torch.arange(D, device=k.device)
    indices, indptr, starts, rows = (t.tolist() for t in ranges.metadata())
    for b, start in enumerate(starts):
        for row in range(rows[b], rows[b + 1]):
            token = start + row - rows[b]
            page, n = indices[indptr[b] + token // N], token % N
            for h in range(H):
                if kv_layout == "NHD":
                    at = ((page, n, h, d), (page, n, h, d))
                elif kv_layout == "HND":
                    at = ((page, h, n, d), (page, h, n, d))
                else:
                    at = ((page, h, d // x, n, d % x), (page, h, n // x, d, n % x))
                for out, plane, where in zip(outputs, (k, v), at, strict=True):
                    bits(out)[row, h] = plane[where]
    return outputs
