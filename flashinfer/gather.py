# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of token ranges out of a paged KV cache, as dense tensors."""

from __future__ import annotations

import torch

from flashinfer.core.checks import INT32_MAX, fail, integer, number, require_tensor
from flashinfer.ops import gather as ops
from flashinfer.ops.attention import cache_geometry
from flashinfer.page import split_cache


def gather_paged_kv(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    starts: torch.Tensor,
    out_indptr: torch.Tensor,
    nnz: int,
    kv_layout: str = "NHD",
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the keys and values of a range of tokens of each request into dense rows.

    Row `out_indptr[b] + i` becomes token `starts[b] + i` of request `b`, for each `i` below
    `out_indptr[b + 1] - out_indptr[b]`. Other rows stay as they are.

    Parameters
    ----------
    paged_kv_cache, kv_layout
        As in `append_paged_kv_cache`.
    kv_indices
        `[>= kv_indptr[-1]]` int32 or int64, page ids.
    kv_indptr
        `[batch_size + 1]` int32 or int64, where each request's pages begin in `kv_indices`. A slice of the table of a
        larger batch will do.
    starts
        `[batch_size]` int32 or int64, first token of each range.
    out_indptr
        `[batch_size + 1]` int32 or int64, where each range begins among the rows.
    nnz
        Rows of the result, at least `out_indptr[-1]`.
    k_scale, v_scale
        What FP8 elements are multiplied by when they are dequantised.
    dtype
        Of the result: the cache's, or for an FP8 cache also bfloat16, float16 or float32. The cache's by default.
    out
        K and V `[nnz, num_kv_heads, head_dim]` to write into, contiguous in the last dimension; allocated if None.
    backend
        "auto", or the name of one.

    Returns
    -------
    tuple
        K and V, `[nnz, num_kv_heads, head_dim]`.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes, strides or devices that do not fit; on the CPU also for a range beyond its request's pages,
        a page id out of range or an `out_indptr` that decreases or exceeds `nnz`, in which case nothing was written.
        On a GPU such a row is skipped and reported through `flashinfer.check_device_errors()`.
    BackendUnavailableError
        If no backend, or not the one named, takes the call.
    """
    integer(ops.OP, "nnz", nnz, 0, INT32_MAX)
    k_cache, v_cache = split_cache(ops.OP, paged_kv_cache, kv_layout)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        number(ops.OP, name, scale)
    if out is None:
        require_tensor(ops.OP, "paged_kv_cache", k_cache)
        if k_cache.dim() != (5 if kv_layout == "SHUFFLED" else 4):
            fail(ops.OP, "paged_kv_cache", f"of pages for {kv_layout}", list(k_cache.shape))
        heads, _, dim = cache_geometry(k_cache, kv_layout)
        shape = (nnz, heads, dim)
        out = (k_cache.new_empty(shape, dtype=dtype), k_cache.new_empty(shape, dtype=dtype))
    elif not isinstance(out, tuple) or len(out) != 2:
        fail(ops.OP, "out", "a tuple of K and V", type(out).__name__)
    k_out, v_out = out
    require_tensor(ops.OP, "out", k_out)
    if k_out.dim() != 3 or k_out.size(0) != nnz:
        fail(ops.OP, "out", f"of nnz = {nnz} rows of heads", list(k_out.shape))
    if dtype is not None and k_out.dtype != dtype:
        fail(ops.OP, "out", f"of dtype {dtype}", k_out.dtype)
    ops.gather_paged_kv(
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        starts,
        out_indptr,
        kv_layout,
        float(k_scale),
        float(v_scale),
        k_out,
        v_out,
        backend=backend,
    )
    return k_out, v_out
