# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA context in plain torch, step by step: gather, matrix product, copies. Reads the metadata on the host."""

from __future__ import annotations

import itertools

import torch

from flashinfer.core import faults
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.core.mla_project import project, widened, widened_weight

OP = "gather_kv_b_proj"
INDICES = "mla_context_indices"


def why_not_gather_kv_b_proj(*args: object) -> str | None:
    return None


# A weight is a parameter: without this the results would be recorded as made from it.
@torch.no_grad()
def gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    rows = _cache_rows(kv_cache, kv_indptr, kv_indices, kv_prefix_sum_context_lens, k_out.size(0))
    tokens, dtype = rows.size(0), k_out.dtype
    rank, v_dim = kv_b_proj_weight.size(1), v_out.size(2)
    page_size = kv_cache.size(1)
    gathered = kv_cache[rows // page_size, rows % page_size]
    latent = widened(gathered, kv_scale, dtype)
    up = project(latent, widened_weight(kv_b_proj_weight, weight_scale, dtype), k_out.size(1))
    nope = up.size(2) - v_dim
    k_out[:tokens, :, :nope] = up[..., :nope]
    k_out[:tokens, :, nope:] = latent[:, None, rank:]
    v_out[:tokens] = up[..., nope:]


def _cache_rows(
    kv_cache: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, prefix: torch.Tensor, rows: int
) -> torch.Tensor:
    """Page times page size plus place, of each context token."""
    pages, page_size, _ = kv_cache.shape
    first, before = kv_indptr.tolist(), prefix.tolist()
    for name, indptr in (("kv_indptr", first), ("kv_prefix_sum_context_lens", before)):
        for b, (low, high) in enumerate(itertools.pairwise(indptr)):
            if high < low or low < 0:
                raise InvalidArgumentError(f"{OP}: {name} must start at 0 and not fall, got {low} and {high} at [{b}]")
    if before[0] != 0 or before[-1] > rows:
        raise InvalidArgumentError(
            f"{OP}: kv_prefix_sum_context_lens must begin with 0 and end at most at k_out's rows {rows}, "
            f"got {before[0]} and {before[-1]}"
        )
    found = []
    for b, start in enumerate(before[:-1]):
        length = before[b + 1] - start
        have = min(first[b + 1], kv_indices.size(0)) - first[b]
        if length > have * page_size:
            faults.refuse(OP, faults.CONTEXT_PAGES, start + max(have, 0) * page_size, 0, before[-1])
        ids = kv_indices[first[b] : first[b] + -(-length // page_size)].long()
        bad = ((ids < 0) | (ids >= pages)).nonzero()
        if bad.numel():
            at = int(bad[0])
            faults.refuse(OP, faults.PAGE_ID_RANGE, first[b] + at, int(ids[at]), pages)
        places = torch.arange(length, device=ids.device)
        found.append(ids[places // page_size] * page_size + places % page_size)
    return torch.cat(found) if found else kv_indices.new_empty(0, dtype=torch.int64)


def why_not_mla_context_indices(*args: object) -> str | None:
    return None


def mla_context_indices(
    block_tables: torch.Tensor,
    piece_requests: torch.Tensor,
    piece_starts: torch.Tensor,
    piece_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
    kv_indices: torch.Tensor,
) -> None:
    requests, columns = block_tables.shape
    kv_indices.fill_(-1)
    indptr = piece_indptr.tolist()
    pieces = zip(piece_requests.tolist(), piece_starts.tolist(), indptr, indptr[1:], strict=False)
    for i, (request, start, low, high) in enumerate(pieces):
        if high <= low:
            continue
        if not 0 <= request < requests:
            faults.refuse(INDICES, faults.PIECE_REQUEST, i, request, requests)
        if start < 0 or start + high - low > columns * page_size:
            past = start if start < 0 else columns * page_size
            faults.refuse(INDICES, faults.BLOCK_TABLE_SHORT, request, past, columns * page_size)
        position = torch.arange(start, start + high - low, device=block_tables.device)
        ids = block_tables[request].long()[position // page_size]
        bad = ((ids < 0) | (ids >= num_pages)).nonzero()
        if bad.numel():
            column = int(position[bad[0]]) // page_size
            faults.refuse(
                INDICES, faults.BLOCK_TABLE_RANGE, request * columns + column, int(ids[int(bad[0])]), num_pages
            )
        kv_indices[low:high] = (ids * page_size + position % page_size).int()
