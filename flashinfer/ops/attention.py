# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ops of attention: over a paged KV cache, and over keys and values that lie one request after the other."""

from __future__ import annotations

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, index_vector, integer
from flashinfer.core.dtypes import FP8
from flashinfer.core.op import Op
from flashinfer.ops.page import LAYOUTS

PAGED = "paged_attention"
RAGGED = "ragged_attention"
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Both ops end with the same arguments, said once.
OPTIONS = (
    "bool causal, float sm_scale, int window_left, float logits_soft_cap, float k_scale, float v_scale, "
    "Tensor? sinks, Tensor? custom_mask, Tensor? mask_indptr, bool needs_lse, int max_q_len, int max_kv_len, "
    "int split_size, Tensor(a!)? scratch, Tensor(b!) out, Tensor(c!) lse"
)


def cache_geometry(k_cache: torch.Tensor, kv_layout: str) -> tuple[int, int, int]:
    """`(num_kv_heads, page_size, head_dim)` of a K cache."""
    if kv_layout == "NHD":
        return k_cache.size(2), k_cache.size(1), k_cache.size(3)
    if kv_layout == "HND":
        return k_cache.size(1), k_cache.size(2), k_cache.size(3)
    return k_cache.size(1), k_cache.size(3), k_cache.size(2) * k_cache.size(4)


def _check_q(op: str, q: torch.Tensor) -> None:
    if q.dim() != 3:
        fail(op, "q", "[tokens, heads, head_dim]", describe(q))
    if q.size(1) < 1 or q.size(2) < 1:
        fail(op, "q", "of at least one head, and rows that are not empty", list(q.shape))
    if q.dtype not in QUERY_DTYPES:
        fail(op, "q", "a floating-point tensor of 16 bits or more", describe(q))
    if q.size(2) > 1 and q.stride(2) != 1:
        fail(op, "q", "contiguous in its last dimension", f"stride {q.stride()}", "pass q.contiguous()")


def _check_stored(op: str, q: torch.Tensor, named: tuple[tuple[str, torch.Tensor], ...], rank: int, what: str) -> None:
    """Rank, device and dtype of K and V."""
    for name, t in named:
        if t.dim() != rank:
            fail(op, name, f"{rank}-D{what}", describe(t))
        if t.device != q.device:
            fail(op, name, f"of q's device {q.device}", t.device)
        if t.dtype != q.dtype and t.dtype not in FP8:
            fail(op, name, f"of q's dtype {q.dtype} or FP8 (E4M3)", t.dtype)
        if t.size(-1) > 1 and t.stride(-1) != 1:
            fail(op, name, "contiguous in its last dimension", f"stride {t.stride()}")
    (k_name, k), (v_name, v) = named
    if v.dtype != k.dtype:
        fail(op, v_name, f"of {k_name}'s dtype {k.dtype}", v.dtype)


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> None:
    rank = 5 if kv_layout == "SHUFFLED" else 4
    _check_stored(PAGED, q, (("k_cache", k_cache), ("v_cache", v_cache)), rank, f" for {kv_layout}")
    heads, page_size, dim = cache_geometry(k_cache, kv_layout)
    shape: tuple[int, ...] = tuple(k_cache.shape)
    dim_vo = v_cache.size(3)
    if kv_layout == "SHUFFLED":
        x = 16 // k_cache.element_size()
        if k_cache.size(4) != x or page_size % x:
            fail(
                PAGED,
                "k_cache",
                f"[pages, heads, dim / {x}, page_size, {x}], page size divisible by {x}",
                list(shape),
            )
        if tuple(v_cache.shape) != (shape[0], heads, page_size // x, dim_vo, x):
            fail(PAGED, "v_cache", f"[{shape[0]}, {heads}, {page_size // x}, head_dim_vo, {x}]", list(v_cache.shape))
        for name, cache, inner in (("k_cache", k_cache, page_size), ("v_cache", v_cache, dim_vo)):
            if tuple(cache.stride()[2:4]) != (inner * x, x) and cache.numel():
                fail(
                    PAGED, name, "dense inside a head; only pages and heads may be strided", f"stride {cache.stride()}"
                )
    elif v_cache.shape[:3] != shape[:3]:
        fail(PAGED, "v_cache", f"[{shape[0]}, {shape[1]}, {shape[2]}, head_dim_vo]", list(v_cache.shape))
    if dim_vo < 1:
        fail(PAGED, "v_cache", "of rows that are not empty", list(v_cache.shape))
    if dim != q.size(2):
        fail(PAGED, "k_cache", f"of q's head dimension {q.size(2)}", dim)
    if page_size < 1:
        fail(PAGED, "k_cache", "of a page_size of at least 1", list(k_cache.shape))
    if heads < 1 or q.size(1) % heads:
        fail(PAGED, "q", f"of heads divisible by the cache's {heads}", q.size(1))


def _check_options(
    op: str,
    q: torch.Tensor,
    batch: int,
    window_left: int,
    logits_soft_cap: float,
    scales: tuple[float, float],
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    sizes: tuple[int, int, int],
    scratch: torch.Tensor | None,
) -> None:
    integer(op, "window_left", window_left, -1, INT32_MAX)
    for name, value in zip(("max_q_len", "max_kv_len", "split_size"), sizes, strict=True):
        integer(op, name, value, 0, INT32_MAX)
    if not logits_soft_cap >= 0:
        fail(op, "logits_soft_cap", "positive, or 0 for none", logits_soft_cap)
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        # One of a quantisation: zero or a negative one is a mistake.
        if not scale > 0:
            fail(op, name, "positive", scale)
    if sinks is not None and (
        sinks.shape != q.shape[1:2]
        or sinks.dtype != torch.float32
        or sinks.device != q.device
        or not sinks.is_contiguous()
    ):
        fail(op, "sinks", f"contiguous float32[{q.size(1)}] on {q.device}", describe(sinks))
    if (custom_mask is None) != (mask_indptr is None):
        fail(op, "custom_mask and mask_indptr", "given together", "one of them")
    if custom_mask is not None and mask_indptr is not None:
        if custom_mask.dim() != 1 or custom_mask.dtype != torch.uint8 or custom_mask.device != q.device:
            fail(op, "custom_mask", f"uint8[bytes] on {q.device}, 8 keys to a byte", describe(custom_mask))
        if not custom_mask.is_contiguous():
            fail(op, "custom_mask", "contiguous", f"stride {custom_mask.stride()}")
        index_vector(op, "mask_indptr", mask_indptr, q.device)
        if mask_indptr.size(0) != batch + 1:
            fail(op, "mask_indptr", f"of length {batch + 1}, one more than there are requests", mask_indptr.size(0))
    if scratch is not None and (
        scratch.dim() != 1
        or scratch.dtype != torch.float32
        or scratch.device != q.device
        or not scratch.is_contiguous()
    ):
        fail(op, "scratch", f"contiguous float32[elements] on {q.device}", describe(scratch))


def _check_results(op: str, q: torch.Tensor, dim_vo: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    shape = (*q.shape[:2], dim_vo)
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        word = str(q.dtype).removeprefix("torch.")
        fail(op, "out", f"{word}{list(shape)} on {q.device}", describe(out))
    if out.size(2) > 1 and out.stride(2) != 1:
        fail(op, "out", "contiguous in its last dimension", f"stride {out.stride()}")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device:
        fail(op, "lse", f"float32{list(q.shape[:2])} on {q.device}", describe(lse))


def _check_paged_attention(
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
    _check_q(PAGED, q)
    if kv_layout not in LAYOUTS:
        fail(PAGED, "kv_layout", f"one of {LAYOUTS}", repr(kv_layout))
    _check_caches(q, k_cache, v_cache, kv_layout)
    named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
    for name, t in {**named, "kv_last_page_len": kv_last_page_len}.items():
        index_vector(PAGED, name, t, q.device)
    batch = kv_last_page_len.size(0)
    for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if t.size(0) != batch + 1:
            fail(PAGED, name, f"of length {batch + 1}, one more than kv_last_page_len", t.size(0))
    _check_options(
        *(PAGED, q, batch, window_left, logits_soft_cap, (k_scale, v_scale), sinks, custom_mask, mask_indptr),
        *((max_q_len, max_kv_len, split_size), scratch),
    )
    _check_results(PAGED, q, v_cache.size(3), out, lse)


def _check_ragged_attention(
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
    _check_q(RAGGED, q)
    _check_stored(RAGGED, q, (("k", k), ("v", v)), 3, " [tokens, num_kv_heads, head_dim]")
    if k.size(2) != q.size(2):
        fail(RAGGED, "k", f"of q's head dimension {q.size(2)}", k.size(2))
    if v.shape[:2] != k.shape[:2] or v.size(2) < 1:
        fail(RAGGED, "v", f"[{k.size(0)}, {k.size(1)}, head_dim_vo] as k", list(v.shape))
    if k.size(1) < 1 or q.size(1) % k.size(1):
        fail(RAGGED, "q", f"of heads divisible by k's {k.size(1)}", q.size(1))
    for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        index_vector(RAGGED, name, t, q.device)
    if qo_indptr.size(0) < 1:
        fail(RAGGED, "qo_indptr", "of length batch_size + 1", 0)
    if kv_indptr.size(0) != qo_indptr.size(0):
        fail(RAGGED, "kv_indptr", f"of qo_indptr's length {qo_indptr.size(0)}", kv_indptr.size(0))
    _check_options(
        *(RAGGED, q, qo_indptr.size(0) - 1, window_left, logits_soft_cap, (k_scale, v_scale), sinks, custom_mask),
        *(mask_indptr, (max_q_len, max_kv_len, split_size), scratch),
    )
    _check_results(RAGGED, q, v.size(2), out, lse)


paged_attention = Op(
    PAGED,
    "attention",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, "
    f"Tensor kv_last_page_len, str kv_layout, {OPTIONS} -> ()",
    check=_check_paged_attention,
    # AITER's kernels have not been measured against the first; the last is for the CPU, and for dtypes that have no
    # matrix instructions.
    backends=("triton", "aiter", "reference"),
)

ragged_attention = Op(
    RAGGED,
    "attention",
    f"Tensor q, Tensor k, Tensor v, Tensor qo_indptr, Tensor kv_indptr, {OPTIONS} -> ()",
    check=_check_ragged_attention,
    # AITER's kernels have not been measured against the first; the last is for the CPU, and for dtypes that have no
    # matrix instructions.
    backends=("triton", "aiter", "reference"),
)
