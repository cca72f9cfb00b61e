# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Op of the paged gather."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, index_vector, require_tensor
from flashinfer.core.dtypes import FP8
from flashinfer.core.op import Op
from flashinfer.ops.page import ELEMENT_SIZES, LAYOUTS

OP = "gather_paged_kv"
# What FP8 elements can become.
DEQUANTISED = (torch.bfloat16, torch.float16, torch.float32)


def _check_outputs(k_out: torch.Tensor, v_out: torch.Tensor, k_cache: torch.Tensor) -> None:
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        require_tensor(OP, name, out)
        if out.dim() != 3:
            fail(OP, name, "[rows, num_kv_heads, head_dim]", describe(out))
        if out.numel() == 0 and out.size(0) != 0:
            fail(OP, name, "of rows that are not empty", list(out.shape))
        if out.device != k_cache.device:
            fail(OP, name, f"on {k_cache.device}", out.device)
        if out.size(-1) > 1 and out.stride(-1) != 1:
            fail(OP, name, "contiguous in its last dimension", f"stride {out.stride()}")
    if v_out.shape != k_out.shape:
        fail(OP, "v_out", f"of k_out's shape {list(k_out.shape)}", list(v_out.shape))
    if v_out.dtype != k_out.dtype:
        fail(OP, "v_out", f"of k_out's dtype {k_out.dtype}", v_out.dtype)


def _check_cache(name: str, cache: torch.Tensor, kv_layout: str, heads: int, dim: int, page_size: int) -> None:
    if kv_layout != "SHUFFLED":
        shape: tuple[int, ...] = (page_size, heads, dim) if kv_layout == "NHD" else (heads, page_size, dim)
    else:
        x = 16 // cache.element_size()
        if dim % x or page_size % x:
            fail(OP, name, f"of a head dimension and a page size divisible by {x} for SHUFFLED", f"{dim}, {page_size}")
        shape = (heads, dim // x, page_size, x) if name == "k_cache" else (heads, page_size // x, dim, x)
    if tuple(cache.shape[1:]) != shape:
        fail(OP, name, f"of shape {['pages', *shape]}", list(cache.shape))
    if cache.size(-1) > 1 and cache.stride(-1) != 1:
        fail(OP, name, "contiguous in its last dimension", f"stride {cache.stride()}")
    if kv_layout == "SHUFFLED" and cache.numel():
        want = (cache.size(3) * cache.size(4), cache.size(4), 1)
        if tuple(cache.stride()[2:]) != want:
            fail(OP, name, f"dense inside a head's page, strides [..., {want[0]}, {want[1]}, 1]", cache.stride())


def _check_dtypes(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: float, v_scale: float, out: torch.dtype
) -> None:
    for what in ("dtype", "device"):
        want, got = getattr(k_cache, what), getattr(v_cache, what)
        if want != got:
            fail(OP, "v_cache", f"of k_cache's {what} {want}", got)
    if k_cache.element_size() not in ELEMENT_SIZES:
        fail(OP, "k_cache", "of 1-, 2- or 4-byte elements", describe(k_cache))
    if out != k_cache.dtype:
        if k_cache.dtype not in FP8:
            fail(OP, "k_out", f"of the cache's dtype {k_cache.dtype}", out)
        if out not in DEQUANTISED:
            fail(OP, "k_out", f"of the cache's dtype or one of {DEQUANTISED}", out)
    elif k_scale != 1.0 or v_scale != 1.0:
        fail(OP, "k_scale and v_scale", f"1 where {out} is copied as it is", f"{k_scale} and {v_scale}")


def _check_gather_paged_kv(
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
    if kv_layout not in LAYOUTS:
        fail(OP, "kv_layout", f"one of {LAYOUTS}", repr(kv_layout))
    rank = 5 if kv_layout == "SHUFFLED" else 4
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_tensor(OP, name, cache)
        if cache.dim() != rank:
            fail(OP, name, f"{rank}-D for {kv_layout}", describe(cache))
    _check_outputs(k_out, v_out, k_cache)
    _check_dtypes(k_cache, v_cache, k_scale, v_scale, k_out.dtype)
    page_size = k_cache.size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])
    if page_size < 1:
        fail(OP, "k_cache", "of a page_size of at least 1", list(k_cache.shape))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache(name, cache, kv_layout, k_out.size(1), k_out.size(2), page_size)
    if v_cache.size(0) != k_cache.size(0):
        fail(OP, "v_cache", f"of k_cache's {k_cache.size(0)} pages", v_cache.size(0))
    named = {"kv_indices": kv_indices, "kv_indptr": kv_indptr, "starts": starts, "out_indptr": out_indptr}
    for name, t in named.items():
        index_vector(OP, name, t, k_cache.device)
    for name, t in (("kv_indptr", kv_indptr), ("out_indptr", out_indptr)):
        if t.size(0) != starts.size(0) + 1:
            fail(OP, name, f"of length {starts.size(0) + 1}, one more than starts", t.size(0))


gather_paged_kv = Op(
    OP,
    "gather",
    "Tensor k_cache, Tensor v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor starts, Tensor out_indptr, "
    "str kv_layout, float k_scale, float v_scale, Tensor(a!) k_out, Tensor(b!) v_out -> ()",
    check=_check_gather_paged_kv,
    backends=("native", "reference"),
)
