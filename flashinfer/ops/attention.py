# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Op of attention over a paged KV cache."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, index_vector, require_tensor
from flashinfer.core.op import Op
from flashinfer.ops.page import LAYOUTS

OP = "paged_attention"
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cache_geometry(k_cache: torch.Tensor, kv_layout: str) -> tuple[int, int, int]:
    """`(num_kv_heads, page_size, head_dim)` of a K cache."""
    if kv_layout == "NHD":
        return k_cache.size(2), k_cache.size(1), k_cache.size(3)
    if kv_layout == "HND":
        return k_cache.size(1), k_cache.size(2), k_cache.size(3)
    return k_cache.size(1), k_cache.size(3), k_cache.size(2) * k_cache.size(4)


def _check_caches(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> None:
    rank = 5 if kv_layout == "SHUFFLED" else 4
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_tensor(OP, name, cache)
        if cache.dim() != rank:
            fail(OP, name, f"{rank}-D for {kv_layout}", describe(cache))
        for what in ("dtype", "device"):
            want, got = getattr(q, what), getattr(cache, what)
            if got != want:
                fail(OP, name, f"of q's {what} {want}", got)
    heads, page_size, dim = cache_geometry(k_cache, kv_layout)
    shape: tuple[int, ...] = tuple(k_cache.shape)
    if kv_layout == "SHUFFLED":
        x = 16 // k_cache.element_size()
        if k_cache.size(4) != x or page_size % x:
            fail(
                OP,
                "k_cache",
                f"[pages, heads, dim / {x}, page_size, {x}], page size divisible by {x}",
                list(shape),
            )
        shape = (shape[0], heads, page_size // x, dim, x)
    if tuple(v_cache.shape) != shape:
        fail(OP, "v_cache", f"of shape {list(shape)}", list(v_cache.shape))
    if dim != q.size(2):
        fail(OP, "k_cache", f"of q's head dimension {q.size(2)}", dim)
    if page_size < 1:
        fail(OP, "k_cache", "of a page_size of at least 1", list(k_cache.shape))
    if heads < 1 or q.size(1) % heads:
        fail(OP, "q", f"of heads divisible by the cache's {heads}", q.size(1))


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
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    require_tensor(OP, "q", q)
    if q.dim() != 3:
        fail(OP, "q", "[tokens, heads, head_dim]", describe(q))
    if q.size(1) < 1 or q.size(2) < 1:
        fail(OP, "q", "of at least one head, and rows that are not empty", list(q.shape))
    if q.dtype not in QUERY_DTYPES:
        fail(OP, "q", "a floating-point tensor of 16 bits or more", describe(q))
    if kv_layout not in LAYOUTS:
        fail(OP, "kv_layout", f"one of {LAYOUTS}", repr(kv_layout))
    _check_caches(q, k_cache, v_cache, kv_layout)
    named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
    for name, t in {**named, "kv_last_page_len": kv_last_page_len}.items():
        index_vector(OP, name, t, q.device)
    batch = kv_last_page_len.size(0)
    for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if t.size(0) != batch + 1:
            fail(OP, name, f"of length {batch + 1}, one more than kv_last_page_len", t.size(0))
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        fail(OP, "out", f"like q, {describe(q)}", describe(out))
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or lse.device != q.device:
        fail(OP, "lse", f"float32{list(q.shape[:2])} on {q.device}", describe(lse))


paged_attention = Op(
    OP,
    "attention",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, "
    "Tensor kv_last_page_len, str kv_layout, bool causal, float sm_scale, Tensor(a!) out, Tensor(b!) lse -> ()",
    check=_check_paged_attention,
    backends=("reference",),
)
