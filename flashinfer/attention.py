# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in one call, for decode, extend and prefill alike: over a paged KV cache, or over ragged keys."""

from __future__ import annotations

import torch

from flashinfer.batch_attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from flashinfer.core.checks import describe, fail, number, require_tensor
from flashinfer.ops import attention as ops
from flashinfer.page import split_cache

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "paged_attention",
    "ragged_attention",
]


def _results(
    op: str, q: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors to write into. V's rank is looked at by the op."""
    require_tensor(op, "v", v)
    if out is None:
        dim = v.size(3 if v.dim() > 3 else -1)
        out = torch.empty_like(q) if dim == q.size(2) else q.new_empty((*q.shape[:2], dim))
    if lse is None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return out, lse


def _scale(op: str, q: torch.Tensor, sm_scale: float | None) -> float:
    if sm_scale is None:
        # The op refuses rows without elements, in words.
        return float(max(q.size(-1), 1) ** -0.5)
    number(op, "sm_scale", sm_scale)
    return float(sm_scale)


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
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    max_q_len: int = 0,
    max_kv_len: int = 0,
    split_size: int = 0,
    scratch: torch.Tensor | None = None,
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
        As in `append_paged_kv_cache`, of q's dtype or FP8 (E4M3); V's head dimension may be another than K's.
    qo_indptr
        `[batch_size + 1]` int32 or int64, where each request's queries begin.
    kv_indptr, kv_indices, kv_last_page_len
        Page table. A request's length is `(pages - 1) * page_size + last_page_len`, its new tokens included. What
        follows `kv_indices[kv_indptr[-1]]` is not looked at.
    causal
        Whether query i of a request of `q_len` sees only its first `kv_len - q_len + i + 1` keys.
    sm_scale
        Scale of the scores, `head_dim ** -0.5` by default.
    window_left
        How many keys before its own place a query sees besides it; -1 for all. Its place is `kv_len - q_len + i`.
    logits_soft_cap
        If positive, scores become `cap * tanh(score / cap)`.
    k_scale, v_scale
        What stored keys and values are to be multiplied with.
    sinks
        float32 `[heads]`: the score of one more key, whose value is 0, in natural units. The log-sum-exp includes it.
    custom_mask, mask_indptr
        In place of `causal`: bits, one for each query and key, 1 where the key is seen, `[q_len, kv_len]` row-major
        and little-endian. Request b's begin with byte `mask_indptr[b]` of the uint8 `custom_mask`.
    max_q_len, max_kv_len
        The longest query and the longest request, if known, else 0. They choose how work is cut, never its result.
    split_size
        0: the keys of a batch are cut as suits the device, and the order in which a request's are summed up depends on
        the batch. Else every so many of its keys (rounded up to 128) are summed up by themselves, and a request has
        the same result, bit by bit, in every batch with the same `max_q_len`; 2^31 - 1 cuts nothing.
    scratch
        float32 for partial results, `flashinfer.core.attention_work.scratch_elements` of them, or what `FixedPieces`
        there says with a `split_size`; allocated if None.
    out, lse
        Tensors to write into; allocated if None.
    return_lse
        Whether to return the log-sum-exp as well.
    backend
        "auto", or the name of one.

    Returns
    -------
    torch.Tensor or tuple
        `out [tokens, heads, v's head_dim]` of q's dtype, or `(out, lse)` with lse float32 `[tokens, heads]` in base
        2. A query that sees no key gives output 0 and lse -inf (with sinks: the sink's).

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit; on the CPU also for page ids out of range, a page table that is
        too short, or an `indptr` that decreases or starts elsewhere than at 0. On a GPU the request that has such a
        page or entry gives 0 and -inf, and it is reported through `flashinfer.check_device_errors()`.
    """
    require_tensor(ops.PAGED, "q", q)
    if q.dim() != 3:
        fail(ops.PAGED, "q", "[tokens, heads, head_dim]", describe(q))
    k_cache, v_cache = split_cache(ops.PAGED, paged_kv_cache, kv_layout)
    needs_lse = return_lse or lse is not None
    out, lse = _results(ops.PAGED, q, v_cache, out, lse)
    ops.paged_attention(
        *(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, kv_layout, causal),
        *(_scale(ops.PAGED, q, sm_scale), window_left, logits_soft_cap, k_scale, v_scale),
        *(sinks, custom_mask, mask_indptr, needs_lse, max_q_len, max_kv_len, split_size, scratch, out, lse),
        backend=backend,
    )
    return (out, lse) if return_lse else out


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    max_q_len: int = 0,
    max_kv_len: int = 0,
    split_size: int = 0,
    scratch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's queries over keys and values that lie one request after the other.

    Parameters
    ----------
    q
        `[tokens, heads, head_dim]`.
    k, v
        `[kv_tokens, num_kv_heads, head_dim]` and `[kv_tokens, num_kv_heads, head_dim_vo]` of q's dtype or FP8 (E4M3);
        tokens and heads may be strided.
    qo_indptr, kv_indptr
        `[batch_size + 1]` int32 or int64, where each request's queries and keys begin.
    causal, sm_scale, window_left, logits_soft_cap, k_scale, v_scale, sinks, custom_mask, mask_indptr, max_q_len, \
max_kv_len, split_size, scratch, out, lse, return_lse, backend
        As in `paged_attention`.

    Returns
    -------
    torch.Tensor or tuple
        `out [tokens, heads, head_dim_vo]` of q's dtype, or `(out, lse)`, as `paged_attention`.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit; on the CPU also for an `indptr` that decreases or does not span
        its rows. On a GPU such a request gives 0 and -inf, and it is reported.
    """
    require_tensor(ops.RAGGED, "q", q)
    if q.dim() != 3:
        fail(ops.RAGGED, "q", "[tokens, heads, head_dim]", describe(q))
    needs_lse = return_lse or lse is not None
    out, lse = _results(ops.RAGGED, q, v, out, lse)
    ops.ragged_attention(
        *(q, k, v, qo_indptr, kv_indptr, causal, _scale(ops.RAGGED, q, sm_scale), window_left, logits_soft_cap),
        *(k_scale, v_scale, sinks, custom_mask, mask_indptr, needs_lse, max_q_len, max_kv_len, split_size),
        *(scratch, out, lse),
        backend=backend,
    )
    return (out, lse) if return_lse else out
