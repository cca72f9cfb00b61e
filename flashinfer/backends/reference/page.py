# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append and its metadata in plain torch."""

from __future__ import annotations

import torch

from flashinfer.core.errors import InvalidArgumentError


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
    if bool((batch >= indptr.numel() - 1).any()):
        raise InvalidArgumentError(f"{op}: batch_indices must be below {indptr.numel() - 1}, got {batch.max()}")
    column = position.div(page_size, rounding_mode="floor")
    if bool(((column < 0) | (column >= (indptr[batch + 1] - indptr[batch]))).any()):
        raise InvalidArgumentError(f"{op}: positions must lie in their request's pages, got {position.tolist()}")
    entry = indptr[batch] + column
    if bool((entry >= kv_indices.numel()).any()):
        raise InvalidArgumentError(f"{op}: kv_indices must cover kv_indptr, got length {kv_indices.numel()}")
    page = kv_indices[entry].long()
    if bool(((page < 0) | (page >= num_pages)).any()):
        raise InvalidArgumentError(f"{op}: kv_indices must be below {num_pages}, got {page.tolist()}")
    return rows, page, position % page_size


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
) -> None:
    page_size = k_cache.size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])
    rows, page, token = _slots(
        "append_paged_kv_cache", batch_indices, positions, kv_indices, kv_indptr, k_cache.size(0), page_size
    )
    key, value = append_key[rows], append_value[rows]
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
) -> None:
    pages, page_size = ckv_cache.size(0), ckv_cache.size(1)
    rows, page, token = _slots(
        "append_paged_mla_kv_cache", batch_indices, positions, kv_indices, kv_indptr, pages, page_size
    )
    _put(ckv_cache, (page, token), append_ckv[rows])
    _put(kpe_cache, (page, token), append_kpe[rows])


def why_not_get_batch_indices_positions(*args: object) -> str | None:
    return None


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    batch_indices.fill_(-1)
    positions.zero_()
    lengths = append_indptr.diff().long()
    count = min(int(lengths.sum()), batch_indices.numel())
    owner = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)[:count]
    offset = torch.arange(count, device=lengths.device) - append_indptr[owner]
    batch_indices[:count] = owner.int()
    positions[:count] = (offset + seq_lens[owner] - lengths[owner]).int()


def why_not_get_seq_lens(*args: object) -> str | None:
    return None


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, seq_lens: torch.Tensor
) -> None:
    seq_lens.copy_((kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len)
