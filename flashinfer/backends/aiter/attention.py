# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention through AITER's Python functions: `flash_attn_varlen_func` for ragged keys, `paged_attention_ragged` for
decoding from NHD and HND pages.

AITER's log-sum-exp is natural and `[heads, tokens]`; its windows end with the query itself where attention is causal.
AITER takes the longest query and request from the host, so calls that leave them to the device are declined.
"""

from __future__ import annotations

import math

import torch

from flashinfer.backends.aiter import entry
from flashinfer.core.checks import INT32_MAX

DTYPES = (torch.float16, torch.bfloat16)
MODULE, RAGGED, PAGED = "aiter", "flash_attn_varlen_func", "paged_attention_ragged"
# What AITER's own tests run.
PAGE_SIZES = (16, 32)
DECODE_HEAD_DIMS = (64, 128)
LARGEST_HEAD_DIM = 256
# Keys of a partition, in AITER's kernel.
PARTITION = 256


def _why_not(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    indices: tuple[torch.Tensor, ...],
) -> str | None:
    if q.dtype not in DTYPES:
        return f"AITER needs q in float16 or bfloat16, got {q.dtype}"
    if k.dtype != q.dtype:
        return f"needs keys of q's dtype {q.dtype}, got {k.dtype}"
    if sinks is not None or custom_mask is not None:
        return "AITER is given no sinks and no custom mask here"
    if split_size:
        return f"AITER cuts keys as it likes, got split_size {split_size}"
    if max_q_len < 1 or max_kv_len < 1:
        return f"AITER needs max_q_len and max_kv_len on the host, got {max_q_len} and {max_kv_len}"
    if any(t.dtype != torch.int32 for t in indices):
        return "AITER needs int32 metadata"
    return entry.why_not(q.device, MODULE, function)


def why_not_ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    needs_lse: bool,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> str | None:
    if window_left == 0:
        # It asks whether a side is larger than 0 to know a window.
        return "AITER takes a window of the query alone for none"
    if max(q.size(2), v.size(2)) > LARGEST_HEAD_DIM or q.size(2) % 8 or v.size(2) % 8:
        return f"AITER needs head dimensions up to {LARGEST_HEAD_DIM}, in eights, got {q.size(2)} and {v.size(2)}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not t.is_contiguous():
            return f"AITER would copy {name}, which is not contiguous"
    return _why_not(RAGGED, q, k, sinks, custom_mask, max_q_len, max_kv_len, split_size, (qo_indptr, kv_indptr))


def ready_ragged_attention(*args: object) -> None:
    """Import AITER; nothing to do after the first time."""
    entry.entry_point(MODULE, RAGGED)


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    needs_lse: bool,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    if q.size(0) == 0:
        return
    found = entry.entry_point(MODULE, RAGGED)(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=qo_indptr,
        cu_seqlens_k=kv_indptr,
        max_seqlen_q=max_q_len,
        max_seqlen_k=max_kv_len,
        softmax_scale=sm_scale * k_scale,
        logits_soft_cap=logits_soft_cap,
        causal=causal,
        window_size=(window_left, 0 if causal else -1),
        return_lse=needs_lse,
    )
    result = found[0] if isinstance(found, (tuple, list)) else found
    torch.mul(result, v_scale, out=out) if v_scale != 1.0 else out.copy_(result)
    # What AITER leaves in rows that see no key differs from kernel to kernel.
    blind = _rows_without_keys(q.size(0), qo_indptr, kv_indptr, causal)
    out.masked_fill_(blind.view(-1, 1, 1), 0)
    if needs_lse:
        lse.copy_(found[1].t()).div_(math.log(2)).masked_fill_(blind.unsqueeze(1), -math.inf)


def _rows_without_keys(tokens: int, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, causal: bool) -> torch.Tensor:
    """bool `[tokens]`, found on the device without waiting for it."""
    q_lens, kv_lens = qo_indptr.diff(), kv_indptr.diff()
    before = kv_lens - q_lens if causal else kv_lens - 1
    token = torch.arange(tokens, device=qo_indptr.device)
    request = torch.searchsorted(qo_indptr[1:].contiguous(), token, right=True).clamp_(max=q_lens.numel() - 1)
    place = before[request] + (token - qo_indptr[request] if causal else 0)
    return place < 0


def why_not_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str,
    causal: bool,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    needs_lse: bool,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> str | None:
    if kv_layout not in ("NHD", "HND"):
        return f"AITER's paged_attention_ragged reads NHD and HND pages, got {kv_layout}"
    if max_q_len != 1 or q.size(0) != kv_last_page_len.size(0):
        return f"AITER takes one query a request, got max_q_len {max_q_len} and {q.size(0)} queries"
    if needs_lse or window_left >= 0:
        return "AITER's paged_attention_ragged has no window and returns no log-sum-exp"
    page_size = k_cache.size(1 if kv_layout == "NHD" else 2)
    if page_size not in PAGE_SIZES:
        return f"AITER needs pages of {' or '.join(map(str, PAGE_SIZES))} tokens, got {page_size}"
    if q.size(2) not in DECODE_HEAD_DIMS or v_cache.size(3) != q.size(2):
        return f"AITER needs a head dimension of {' or '.join(map(str, DECODE_HEAD_DIMS))}, got {q.size(2)}"
    if k_cache.stride() != v_cache.stride() or max(k_cache.stride()) > INT32_MAX:
        return f"AITER takes one set of 32-bit strides for K and V, got {k_cache.stride()} and {v_cache.stride()}"
    if q.size(1) > 1 and q.stride(1) != q.size(2):
        return f"AITER needs the heads of a query side by side, got stride {q.stride()}"
    indices = (kv_indptr, kv_indices, kv_last_page_len)
    return _why_not(PAGED, q, k_cache, sinks, custom_mask, max_q_len, max_kv_len, split_size, indices)


def ready_paged_attention(*args: object) -> None:
    """Import AITER; nothing to do after the first time."""
    entry.entry_point(MODULE, PAGED)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str,
    causal: bool,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    needs_lse: bool,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    batch, heads, dim = q.shape
    if batch == 0:
        return
    partitions = -(-max_kv_len // PARTITION)
    slots = batch * heads * partitions
    unit = torch.ones(1, device=q.device)
    result = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    entry.entry_point(MODULE, PAGED)(
        out=result,
        # Partial results, then two floats for each: AITER's formula.
        workspace_buffer=q.new_empty(slots * (dim * q.element_size() + 8), dtype=torch.uint8),
        query=q,
        key_cache=k_cache,
        value_cache=v_cache,
        scale=sm_scale * k_scale,
        kv_indptr=kv_indptr,
        kv_page_indices=kv_indices,
        kv_last_page_lens=kv_last_page_len,
        block_size=k_cache.size(1 if kv_layout == "NHD" else 2),
        max_num_partitions=partitions,
        alibi_slopes=None,
        kv_cache_dtype="auto",
        kv_cache_layout=kv_layout,
        logits_soft_cap=logits_soft_cap,
        # Read also where they scale nothing.
        k_scale=unit,
        v_scale=unit,
        partition_size=PARTITION,
    )
    if result is not out or v_scale != 1.0:
        torch.mul(result, v_scale, out=out)
    # A request without pages has a negative length there, unless its last page's is 0.
    out.masked_fill_((kv_indptr.diff() == 0).view(-1, 1, 1), 0)
