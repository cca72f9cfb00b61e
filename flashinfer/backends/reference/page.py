# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append and its metadata in plain torch."""

from __future__ import annotations

import torch

from flashinfer.core import faults


def _refuse_first(
    op: str, code: int, bad: torch.Tensor, where: torch.Tensor, value: torch.Tensor, bound: int | torch.Tensor
) -> None:
    """Raise for the first element that is bad, in the words of the compiled kernels."""
    found = bad.nonzero()
    if found.numel():
        i = int(found[0])
        faults.refuse(op, code, int(where[i]), int(value[i]), bound if isinstance(bound, int) else int(bound[i]))


def _slots(
    op: str,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows to write, with the page and the token of each; synchronises."""
    rows = (batch_indices >= 0).nonzero().squeeze(1)
    batch, position = batch_indices[rows].long(), positions[rows].long()
    indptr = kv_indptr.long()
    requests, entries = indptr.numel() - 1, kv_indices.numel()
    _refuse_first(op, faults.BATCH_INDEX_RANGE, batch >= requests, rows, batch, requests)
    first, last = indptr[batch], indptr[batch + 1]
    disorder = (first < 0) | (last < first)
    _refuse_first(op, faults.INDPTR_ORDER, disorder, batch, first, last)
    _refuse_first(op, faults.PAGE_TABLE_SHORT, last > entries, batch + 1, last, entries)
    column = position.div(page_size, rounding_mode="floor")
    beyond = (position < 0) | (column >= last - first)
    _refuse_first(op, faults.POSITION_RANGE, beyond, rows, position, (last - first) * page_size)
    page = kv_indices[first + column].long()
    nowhere = (page < 0) | (page >= num_pages)
    _refuse_first(op, faults.PAGE_ID_RANGE, nowhere, first + column, page, num_pages)
    return rows, page, position % page_size


def _stored(rows: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Rows as the cache holds them: as they are, or times the float32 reciprocal of the scale, saturated."""
    if rows.dtype == cache.dtype:
        return rows
    most = torch.finfo(cache.dtype).max
    inverse = torch.ones((), device=rows.device) / torch.tensor(scale, dtype=torch.float32, device=rows.device)
    scaled = rows.float() * inverse
    # clamp() lets NaN pass; its sign is dropped, as OCP has a NaN of either sign and compiled kernels store one.
    return scaled.masked_fill_(scaled.isnan(), float("nan")).clamp_(-most, most).to(cache.dtype)


def _put(cache: torch.Tensor, index: tuple[torch.Tensor | slice, ...], rows: torch.Tensor) -> None:
    """`cache[index] = rows` on bytes: torch has no indexed assignment for some 1-byte dtypes."""
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
    cache.view(raw)[index] = rows.view(raw)


def why_not_append_paged_kv_cache(*args: object) -> str | None:
    return None


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
) -> None:
    page_size = k_cache.size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])
    rows, page, token = _slots(
        "append_paged_kv_cache", batch_indices, positions, kv_indices, kv_indptr, k_cache.size(0), page_size
    )
    key, value = _stored(append_key[rows], k_cache, k_scale), _stored(append_value[rows], v_cache, v_scale)
    every = slice(None)
    if kv_layout == "NHD":
        _put(k_cache, (page, token), key)
        _put(v_cache, (page, token), value)
    elif kv_layout == "HND":
        _put(k_cache, (page, every, token), key)
        _put(v_cache, (page, every, token), value)
    else:
        x = k_cache.size(-1)
        count, heads, dim = key.shape
        _put(k_cache, (page, every, every, token), key.reshape(count, heads, dim // x, x))
        _put(v_cache, (page, every, token // x, every, token % x), value)


def why_not_append_paged_mla_kv_cache(*args: object) -> str | None:
    return None


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_scale: float,
) -> None:
    pages, page_size = ckv_cache.size(0), ckv_cache.size(1)
    rows, page, token = _slots(
        "append_paged_mla_kv_cache", batch_indices, positions, kv_indices, kv_indptr, pages, page_size
    )
    _put(ckv_cache, (page, token), _stored(append_ckv[rows], ckv_cache, kv_scale))
    _put(kpe_cache, (page, token), _stored(append_kpe[rows], kpe_cache, kv_scale))


def why_not_get_batch_indices_positions(*args: object) -> str | None:
    return None


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    op, lengths = "get_batch_indices_positions", append_indptr.diff().long()
    requests = torch.arange(lengths.numel(), device=lengths.device)
    first, last = append_indptr[:-1], append_indptr[1:]
    _refuse_first(op, faults.APPEND_INDPTR_ORDER, (first < 0) | (lengths < 0), requests, first, last)
    _refuse_first(op, faults.SEQ_LEN_SHORT, seq_lens < lengths, requests, seq_lens, lengths)
    batch_indices.fill_(-1)
    positions.zero_()
    owner = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    row = torch.arange(owner.numel(), device=lengths.device) + append_indptr[0]
    fits = row < batch_indices.numel()
    owner, row = owner[fits], row[fits]
    batch_indices[row] = owner.int()
    positions[row] = (row - append_indptr[owner] + seq_lens[owner] - lengths[owner]).int()


def why_not_get_seq_lens(*args: object) -> str | None:
    return None


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, seq_lens: torch.Tensor
) -> None:
    op, pages = "get_seq_lens", kv_indptr.long().diff()
    requests = torch.arange(pages.numel(), device=pages.device)
    first, last = kv_indptr[:-1], kv_indptr[1:]
    _refuse_first(op, faults.INDPTR_ORDER, (first < 0) | (pages < 0), requests, first, last)
    lengths = (pages - 1).clamp(min=0) * page_size + kv_last_page_len
    most = torch.iinfo(torch.int32).max
    _refuse_first(op, faults.SEQ_LEN_RANGE, (lengths < 0) | (lengths > most), requests, lengths, most)
    seq_lens.copy_(lengths)
