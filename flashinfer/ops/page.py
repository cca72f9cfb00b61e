# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ops of the paged append and of its metadata."""

from __future__ import annotations

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, index_vector, integer, require_tensor
from flashinfer.core.dtypes import FP8
from flashinfer.core.op import Op

LAYOUTS = ("NHD", "HND", "SHUFFLED")
# Bytes of an element decide how rows move; values are looked at only on their way into an FP8 cache.
ELEMENT_SIZES = (1, 2, 4)
QUANTIZED_FROM = (torch.float16, torch.bfloat16, torch.float32)
# Such scales have a float32 reciprocal that is neither zero, infinite nor subnormal.
SCALE_LEAST, SCALE_MOST = 2.0**-126, 2.0**126


def _check_page_table(
    op: str,
    rows: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    device = rows.device
    index_vector(op, "batch_indices", batch_indices, device)
    index_vector(op, "positions", positions, device)
    index_vector(op, "kv_indices", kv_indices, device)
    index_vector(op, "kv_indptr", kv_indptr, device)
    nnz = rows.size(0)
    if batch_indices.size(0) != nnz:
        fail(op, "batch_indices", f"of length {nnz}, one per appended row", batch_indices.size(0))
    if positions.size(0) != nnz:
        fail(op, "positions", f"of length {nnz}, one per appended row", positions.size(0))
    if kv_indptr.size(0) < 1:
        fail(op, "kv_indptr", "of length batch_size + 1", 0)


def _check_rows(op: str, name: str, t: torch.Tensor, rank: int) -> None:
    require_tensor(op, name, t)
    if t.dim() != rank:
        fail(op, name, f"{rank}-D", describe(t))
    # Kernels divide by what a row holds.
    if t.numel() == 0 and t.size(0) != 0:
        fail(op, name, "of rows that are not empty", list(t.shape))
    if t.element_size() not in ELEMENT_SIZES:
        fail(op, name, "of 1-, 2- or 4-byte elements", describe(t))
    if t.size(-1) > 1 and t.stride(-1) != 1:
        fail(op, name, "contiguous in its last dimension", f"stride {t.stride()}", f"pass {name}.contiguous()")


def _check_cache(op: str, name: str, cache: torch.Tensor, rows: torch.Tensor, shape: tuple[object, ...]) -> None:
    """`shape` holds the sizes that are known and a letter for those that are free."""
    require_tensor(op, name, cache)
    if cache.dim() != len(shape):
        fail(op, name, f"{len(shape)}-D {list(shape)}", describe(cache))
    for dim, want in enumerate(shape):
        if isinstance(want, str):
            # No pages is a pool too, but kernels divide by the page size.
            if dim and cache.size(dim) < 1:
                fail(op, name, f"of a {want} of at least 1", list(cache.shape))
            continue
        if cache.size(dim) != want:
            fail(op, name, f"of shape {list(shape)}", list(cache.shape))
    if cache.dtype != rows.dtype and not (cache.dtype in FP8 and rows.dtype in QUANTIZED_FROM):
        fail(op, name, f"of the rows' dtype {rows.dtype}, or FP8 (E4M3) for floats", cache.dtype)
    if cache.device != rows.device:
        fail(op, name, f"on {rows.device}", cache.device)
    if cache.size(-1) > 1 and cache.stride(-1) != 1:
        fail(op, name, "contiguous in its last dimension", f"stride {cache.stride()}")


def _check_scale(op: str, name: str, scale: float, rows: torch.Tensor, cache: torch.Tensor) -> None:
    if cache.dtype == rows.dtype:
        if scale != 1:
            fail(op, name, "1.0 where rows are of the cache's dtype, as they are stored as they are", scale)
    elif not SCALE_LEAST <= scale <= SCALE_MOST:
        fail(op, name, f"from {SCALE_LEAST} to {SCALE_MOST}", scale)


def _check_shuffled(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor) -> None:
    heads, dim, x = key.size(1), key.size(2), 16 // k_cache.element_size()
    if dim % x:
        fail(op, "append_key", f"of head dimension divisible by {x} for shuffled pages", dim)
    _check_cache(op, "k_cache", k_cache, key, ("pages", heads, dim // x, "page_size", x))
    page_size = k_cache.size(3)
    if page_size % x:
        fail(op, "k_cache", f"of a page size divisible by {x} for shuffled pages", page_size)
    _check_cache(op, "v_cache", v_cache, key, (k_cache.size(0), heads, page_size // x, dim, x))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        # Heads and pages may lie anywhere; what a head's page holds is addressed as one block.
        want = (cache.size(3) * x, x, 1)
        if cache.numel() and tuple(cache.stride()[2:]) != want:
            fail(
                op,
                name,
                f"dense inside a head's page, strides [..., {want[0]}, {want[1]}, 1]",
                cache.stride(),
            )


def _check_append_paged_kv_cache(
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
    op = "append_paged_kv_cache"
    _check_rows(op, "append_key", append_key, 3)
    _check_rows(op, "append_value", append_value, 3)
    if append_value.shape != append_key.shape:
        fail(op, "append_value", f"of append_key's shape {list(append_key.shape)}", list(append_value.shape))
    if append_value.dtype != append_key.dtype:
        fail(op, "append_value", f"of append_key's dtype {append_key.dtype}", append_value.dtype)
    if append_value.device != append_key.device:
        fail(op, "append_value", f"on {append_key.device}", append_value.device)
    _check_page_table(op, append_key, batch_indices, positions, kv_indices, kv_indptr)
    heads, dim = append_key.size(1), append_key.size(2)
    require_tensor(op, "k_cache", k_cache)
    require_tensor(op, "v_cache", v_cache)
    if kv_layout == "SHUFFLED":
        _check_shuffled(op, k_cache, v_cache, append_key)
    elif kv_layout == "NHD":
        _check_cache(op, "k_cache", k_cache, append_key, ("pages", "page_size", heads, dim))
        _check_cache(op, "v_cache", v_cache, append_key, tuple(k_cache.shape))
    elif kv_layout == "HND":
        _check_cache(op, "k_cache", k_cache, append_key, ("pages", heads, "page_size", dim))
        _check_cache(op, "v_cache", v_cache, append_key, tuple(k_cache.shape))
    else:
        fail(op, "kv_layout", f"one of {LAYOUTS}", repr(kv_layout))
    if v_cache.dtype != k_cache.dtype:
        fail(op, "v_cache", f"of k_cache's dtype {k_cache.dtype}", v_cache.dtype)
    _check_scale(op, "k_scale", k_scale, append_key, k_cache)
    _check_scale(op, "v_scale", v_scale, append_value, v_cache)


append_paged_kv_cache = Op(
    "append_paged_kv_cache",
    "page",
    "Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, str kv_layout, float k_scale, float v_scale -> ()",
    check=_check_append_paged_kv_cache,
    # Native first: 93% of a copy's bandwidth at 262,144 rows (H200, docs/measurements.md). On an MI300X AITER's kernel,
    # without Python in its way, took 11.6 us for 4,096 rows and 751 us for 262,144 where FlashInfer's took 7.4 and 593
    # (2.86 TB/s to 3.62; measured by the authors of the ROCm port's shim, not yet repeated with this one).
    backends=("native", "aiter", "reference"),
)


def _check_append_paged_mla_kv_cache(
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
    op = "append_paged_mla_kv_cache"
    for name, rows in (("append_ckv", append_ckv), ("append_kpe", append_kpe)):
        _check_rows(op, name, rows, 2)
        width = rows.size(1) * rows.element_size()
        if width % 8:
            fail(op, name, "rows of a multiple of 8 bytes", f"{width} bytes")
    for what in ("dtype", "device"):
        want, got = getattr(append_ckv, what), getattr(append_kpe, what)
        if got != want:
            fail(op, "append_kpe", f"of append_ckv's {what} {want}", got)
    if append_kpe.size(0) != append_ckv.size(0):
        fail(op, "append_kpe", f"of append_ckv's {append_ckv.size(0)} rows", append_kpe.size(0))
    _check_page_table(op, append_ckv, batch_indices, positions, kv_indices, kv_indptr)
    _check_cache(op, "ckv_cache", ckv_cache, append_ckv, ("pages", "page_size", append_ckv.size(1)))
    pages, page_size = ckv_cache.size(0), ckv_cache.size(1)
    _check_cache(op, "kpe_cache", kpe_cache, append_kpe, (pages, page_size, append_kpe.size(1)))
    if kpe_cache.dtype != ckv_cache.dtype:
        fail(op, "kpe_cache", f"of ckv_cache's dtype {ckv_cache.dtype}", kpe_cache.dtype)
    _check_scale(op, "kv_scale", kv_scale, append_ckv, ckv_cache)


append_paged_mla_kv_cache = Op(
    "append_paged_mla_kv_cache",
    "page",
    "Tensor append_ckv, Tensor append_kpe, Tensor batch_indices, Tensor positions, Tensor(a!) ckv_cache, "
    "Tensor(b!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, float kv_scale -> ()",
    check=_check_append_paged_mla_kv_cache,
    backends=("native", "reference"),
)


def _check_get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    op = "get_batch_indices_positions"
    device = append_indptr.device
    index_vector(op, "append_indptr", append_indptr, device)
    index_vector(op, "seq_lens", seq_lens, device)
    index_vector(op, "batch_indices", batch_indices, device)
    index_vector(op, "positions", positions, device)
    if append_indptr.size(0) != seq_lens.size(0) + 1:
        fail(
            op,
            "append_indptr",
            f"of length {seq_lens.size(0) + 1}, one more than seq_lens",
            append_indptr.size(0),
        )
    for name, t in (("batch_indices", batch_indices), ("positions", positions)):
        if t.dtype != torch.int32:
            fail(op, name, "int32", t.dtype)
        if t.size(0) != batch_indices.size(0):
            fail(op, name, f"of batch_indices' length {batch_indices.size(0)}", t.size(0))


get_batch_indices_positions = Op(
    "get_batch_indices_positions",
    "page",
    "Tensor append_indptr, Tensor seq_lens, Tensor(a!) batch_indices, Tensor(b!) positions -> ()",
    check=_check_get_batch_indices_positions,
    backends=("native", "reference"),
)


def _check_get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, seq_lens: torch.Tensor
) -> None:
    op = "get_seq_lens"
    index_vector(op, "kv_indptr", kv_indptr, kv_indptr.device)
    index_vector(op, "kv_last_page_len", kv_last_page_len, kv_indptr.device)
    index_vector(op, "seq_lens", seq_lens, kv_indptr.device)
    batch = kv_last_page_len.size(0)
    if kv_indptr.size(0) != batch + 1:
        fail(op, "kv_indptr", f"of length {batch + 1}, one more than kv_last_page_len", kv_indptr.size(0))
    integer(op, "page_size", page_size, 1, INT32_MAX)
    if seq_lens.dtype != torch.int32 or seq_lens.size(0) != batch:
        fail(op, "seq_lens", f"int32 of length {batch}", describe(seq_lens))


get_seq_lens = Op(
    "get_seq_lens",
    "page",
    "Tensor kv_indptr, Tensor kv_last_page_len, int page_size, Tensor(a!) seq_lens -> ()",
    check=_check_get_seq_lens,
    backends=("native", "reference"),
)
