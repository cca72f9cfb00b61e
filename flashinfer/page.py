# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged KV cache: append, and the metadata of an append. Signatures follow FlashInfer 0.7.4."""

from __future__ import annotations

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, integer, require_tensor
from flashinfer.ops import page as ops


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: str = "auto",
) -> None:
    """Write keys and values of new tokens into the pages of their requests.

    Row `i` goes to token `positions[i] % page_size` of page
    `kv_indices[kv_indptr[b] + positions[i] // page_size]`, where `b = batch_indices[i]`.

    Parameters
    ----------
    append_key, append_value
        `[nnz, num_kv_heads, head_dim]`; rows and heads may be strided, the last dimension is contiguous.
    batch_indices
        `[nnz]` int32 or int64, request of each row; a negative entry is padding and is skipped.
    positions
        `[nnz]` int32 or int64, position of each row in its request.
    paged_kv_cache
        A tuple of K and V, or one tensor with K and V along dimension 1. Shapes of K and of V, any strides outside
        the last dimension, unlike ones for K and V included:

        - NHD: `[pages, page_size, num_kv_heads, head_dim]`
        - HND: `[pages, num_kv_heads, page_size, head_dim]`
        - SHUFFLED (tuple only): K `[pages, num_kv_heads, head_dim / x, page_size, x]` and
          V `[pages, num_kv_heads, page_size / x, head_dim, x]` with `x = 16 / element size`, dense inside a head

        3-D tensors in a tuple, `[pages, num_kv_heads, head_dim]`, or one 4-D tensor mean a page size of 1. A pool of
        `standard` pages `[pages, H, N, 2D]` is the HND tuple `(pool[..., :D], pool[..., D:])`.
    kv_indices
        `[>= kv_indptr[-1]]` int32 or int64, page ids.
    kv_indptr
        `[batch_size + 1]` int32 or int64, where each request's pages begin in `kv_indices`.
    kv_last_page_len
        Ignored, and accepted for FlashInfer's sake: positions say all that is needed.
    kv_layout
        "NHD", "HND" or "SHUFFLED".
    k_scale, v_scale
        For FP8 caches and float16, bfloat16 or float32 rows: what is stored is the row times the float32 reciprocal of
        the scale, rounded to nearest even and held to the largest finite value, NaN staying NaN. The flavour is that
        of the cache's dtype on every device: `float8_e4m3fn` (OCP) or `float8_e4m3fnuz` (FNUZ). 1.0 where rows are of
        the cache's dtype already and move as they are.
    backend
        "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes, strides or devices that do not fit; on the CPU also for a batch index, position or page id
        out of range, in which case nothing was written. On a GPU such a row is skipped and reported through
        `flashinfer.check_device_errors()`.
    BackendUnavailableError
        If no backend, or not the one named, takes the call.
    """
    k_cache, v_cache = split_cache("append_paged_kv_cache", paged_kv_cache, kv_layout)
    ops.append_paged_kv_cache(
        append_key,
        append_value,
        batch_indices,
        positions,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        kv_layout,
        k_scale,
        v_scale,
        backend=backend,
    )


def split_cache(
    op: str, cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a cache in any of its forms, with the axis of a page size of 1 spelled out."""
    if not isinstance(kv_layout, str) or kv_layout not in ops.LAYOUTS:
        fail(op, "kv_layout", f"one of {ops.LAYOUTS}", repr(kv_layout))
    if isinstance(cache, tuple):
        if len(cache) != 2 or not isinstance(cache[0], torch.Tensor) or not isinstance(cache[1], torch.Tensor):
            fail(op, "paged_kv_cache", "a tensor or a tuple of two", f"a tuple of {', '.join(map(describe, cache))}")
        k, v = cache
    elif isinstance(cache, torch.Tensor):
        require_tensor(op, "paged_kv_cache", cache)
        if kv_layout == "SHUFFLED":
            fail(op, "paged_kv_cache", "a tuple of K and V for SHUFFLED, whose shapes differ", describe(cache))
        if cache.dim() not in (4, 5) or cache.size(1) != 2:
            fail(
                op,
                "paged_kv_cache",
                "a tuple of K and V, or [pages, 2, ...] of 4 or 5 dimensions",
                describe(cache),
            )
        k, v = cache.unbind(1)
    else:
        fail(op, "paged_kv_cache", "a tensor or a tuple of two", describe(cache))
    if k.dim() == 3 and v.dim() == 3 and kv_layout != "SHUFFLED":
        # Page size 1: NHD and HND differ only in where the axis of length 1 stands.
        axis = 1 if kv_layout == "NHD" else 2
        k, v = k.unsqueeze(axis), v.unsqueeze(axis)
    return k, v


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    kv_scale: float = 1.0,
    backend: str = "auto",
) -> None:
    """Write compressed KV and rope keys of new tokens into the pages of their requests (MLA).

    Parameters
    ----------
    append_ckv, append_kpe
        `[nnz, ckv_dim]` and `[nnz, kpe_dim]` of one dtype; rows of a multiple of 8 bytes, which may be strided.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
        As in `append_paged_kv_cache`; the last is ignored there and here.
    ckv_cache, kpe_cache
        `[pages, page_size, ckv_dim]` and `[pages, page_size, kpe_dim]`, each with its own strides: two halves of one
        576-wide pool will do.
    kv_scale
        As `k_scale` of `append_paged_kv_cache`, for both caches.
    backend
        "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError, BackendUnavailableError
        As `append_paged_kv_cache`.
    """
    ops.append_paged_mla_kv_cache(
        append_ckv,
        append_kpe,
        batch_indices,
        positions,
        ckv_cache,
        kpe_cache,
        kv_indices,
        kv_indptr,
        kv_scale,
        backend=backend,
    )


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each appended row: `position = offset in the append + seq_len - append length`.

    Parameters
    ----------
    append_indptr
        `[batch_size + 1]` int32 or int64, where each request's rows begin.
    seq_lens
        `[batch_size]` int32 or int64, lengths with the appended tokens included.
    nnz
        Rows of the result; those beyond `append_indptr[-1]` get batch index -1 and position 0, which appends skip.
    batch_indices, positions
        `[nnz]` int32 tensors to write into; allocated if None.
    backend
        "auto", or the name of one.

    Returns
    -------
    tuple
        `(batch_indices, positions)`, int32 `[nnz]`.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit; on the CPU also for an `append_indptr` that decreases or is
        negative, or a request of fewer tokens than are appended to it.
    """
    op = "get_batch_indices_positions"
    integer(op, "nnz", nnz, 0, INT32_MAX)
    require_tensor(op, "append_indptr", append_indptr)
    for name, t in (("batch_indices", batch_indices), ("positions", positions)):
        if t is not None:
            require_tensor(op, name, t)
            if t.dim() != 1:
                fail(op, name, "1-D", describe(t))
    if batch_indices is None:
        batch_indices = append_indptr.new_empty(nnz, dtype=torch.int32)
    if positions is None:
        positions = append_indptr.new_empty(nnz, dtype=torch.int32)
    if batch_indices.size(0) != nnz:
        fail(op, "batch_indices", f"of length nnz = {nnz}", batch_indices.size(0))
    ops.get_batch_indices_positions(append_indptr, seq_lens, batch_indices, positions, backend=backend)
    return batch_indices, positions


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, *, backend: str = "auto"
) -> torch.Tensor:
    """Lengths of requests from their page tables: `max(pages - 1, 0) * page_size + last_page_len`.

    Parameters
    ----------
    kv_indptr
        `[batch_size + 1]` int32 or int64.
    kv_last_page_len
        `[batch_size]` int32 or int64, tokens in each request's last page.
    page_size
        Tokens to a page.
    backend
        "auto", or the name of one.

    Returns
    -------
    torch.Tensor
        int32 `[batch_size]`.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit; on the CPU also for a `kv_indptr` that decreases or is negative,
        or a length beyond int32.
    """
    require_tensor("get_seq_lens", "kv_last_page_len", kv_last_page_len)
    integer("get_seq_lens", "page_size", page_size, 1, INT32_MAX)
    seq_lens = kv_last_page_len.new_empty(kv_last_page_len.shape, dtype=torch.int32)
    ops.get_seq_lens(kv_indptr, kv_last_page_len, page_size, seq_lens, backend=backend)
    return seq_lens
