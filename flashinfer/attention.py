# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache, one call for decode, extend and prefill alike."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, number, require_tensor
from flashinfer.ops import attention as ops
from flashinfer.page import split_cache


def paged_attention(
    q: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's queries over the keys and values in its pages.

    `out = softmax(q k^T * sm_scale) v` for each query head, whose KV head is `head // (heads / num_kv_heads)`.

    Parameters
    ----------
    q
        `[tokens, heads, head_dim]`, the requests one after the other.
    paged_kv_cache, kv_layout
        As in `append_paged_kv_cache`, of q's dtype.
    qo_indptr
        `[batch_size + 1]` int32 or int64, where each request's queries begin.
    kv_indptr, kv_indices, kv_last_page_len
        Page table. A request's length is `(pages - 1) * page_size + last_page_len`, its new tokens included.
    causal
        Whether query i of a request of `q_len` sees only its first `kv_len - q_len + i + 1` keys.
    sm_scale
        Scale of the scores, `head_dim ** -0.5` by default.
    out, lse
        Tensors to write into; allocated if None.
    return_lse
        Whether to return the log-sum-exp as well.
    backend
        "auto", or the name of one.

    Returns
    -------
    torch.Tensor or tuple
        `out` like q, or `(out, lse)` with lse float32 `[tokens, heads]` in base 2. A query that sees no key gives
        output 0 and lse -inf.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit, page ids out of range, a page table that is too short, or an
        `indptr` that decreases or starts elsewhere than at 0.
    """
    require_tensor(ops.OP, "q", q)
    if q.dim() != 3:
        fail(ops.OP, "q", "[tokens, heads, head_dim]", describe(q))
    k_cache, v_cache = split_cache(ops.OP, paged_kv_cache, kv_layout)
    if out is None:
        out = torch.empty_like(q)
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if sm_scale is None:
        # The op refuses rows without elements, in words.
        sm_scale = max(q.size(-1), 1) ** -0.5
    number(ops.OP, "sm_scale", sm_scale)
    ops.paged_attention(
        q,
        k_cache,
        v_cache,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        kv_layout,
        causal,
        float(sm_scale),
        out,
        lse,
        backend=backend,
    )
    return (out, lse) if return_lse else out
