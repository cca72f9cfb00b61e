# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged gather in plain torch, request by request."""

from __future__ import annotations

import itertools

import torch

from flashinfer.core import faults

OP = "gather_paged_kv"


def why_not_gather_paged_kv(*args: object) -> str | None:
    return None


def gather_paged_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    starts: torch.Tensor,
    out_indptr: torch.Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    page_size = k_cache.size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])
    rows, kv = out_indptr.tolist(), kv_indptr.tolist()
    for b, (first, last) in enumerate(itertools.pairwise(rows)):
        if first < 0 or last < first:
            faults.refuse(OP, faults.OUT_INDPTR_ORDER, b, first, last)
        if last > k_out.size(0):
            faults.refuse(OP, faults.OUT_SHORT, b + 1, last, k_out.size(0))
    pieces = []
    for b, start in enumerate(starts.tolist()):
        first, last = rows[b], rows[b + 1]
        if last > first:
            pages = _pages(kv_indices, kv[b], kv[b + 1], b, start, start + last - first, page_size, k_cache.size(0))
            tokens = torch.arange(start, start + last - first, device=pages.device)
            pieces.append((slice(first, last), pages[tokens // page_size], tokens % page_size))
    for at, page, slot in pieces:
        for cache, scale, out, is_v in ((k_cache, k_scale, k_out, False), (v_cache, v_scale, v_out, True)):
            found = _rows(cache, page, slot, kv_layout, is_v)
            if out.dtype == cache.dtype:
                # Bits: FP8 tensors take no part in indexing on every device.
                out[at] = found.view(cache.dtype)
            else:
                out[at] = (found.view(cache.dtype).float() * scale).to(out.dtype)


def _pages(
    indices: torch.Tensor, first: int, last: int, b: int, start: int, end: int, page_size: int, num_pages: int
) -> torch.Tensor:
    """Page ids of request `b`, as far as its tokens from `start` to `end` need them."""
    if first < 0 or last < first:
        faults.refuse(OP, faults.INDPTR_ORDER, b, first, last)
    if last > indices.numel():
        faults.refuse(OP, faults.PAGE_TABLE_SHORT, b + 1, last, indices.numel())
    held = (last - first) * page_size
    if start < 0 or end > held:
        faults.refuse(OP, faults.TOKEN_RANGE, b, start if start < 0 else max(start, held), held)
    pages = indices[first:last].long()
    needed = slice(start // page_size, -(-end // page_size))
    wrong = (pages[needed] < 0) | (pages[needed] >= num_pages)
    if wrong.any():
        column = needed.start + int(wrong.nonzero()[0])
        faults.refuse(OP, faults.PAGE_ID_RANGE, first + column, int(pages[column]), num_pages)
    return pages


def _rows(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, kv_layout: str, is_v: bool) -> torch.Tensor:
    """Rows `[tokens, heads, head_dim]`, elements as integers of their size."""
    bits = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()])
    if kv_layout == "NHD":
        return bits[page, slot]
    if kv_layout == "HND":
        return bits[page, :, slot]
    if is_v:
        x = cache.size(4)
        return bits[page, :, slot // x, :, slot % x]  # [pages, H, N/x, D, x]
    return bits[page, :, :, slot].flatten(2)  # [pages, H, D/x, N, x]
