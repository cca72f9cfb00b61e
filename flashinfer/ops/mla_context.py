# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ops of an MLA prefill's context: which rows of the cache it is in, and its way from there to keys and values."""

from __future__ import annotations

import torch

from flashinfer.core.checks import INT32_MAX, apart, describe, fail, index_vector, integer
from flashinfer.core.dtypes import FP8
from flashinfer.core.mla_project import SCALE_BLOCK, scale_mode
from flashinfer.core.op import Op

OP = "gather_kv_b_proj"
INDICES = "mla_context_indices"
RESULT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RANK_MULTIPLE = 64


def _check_results(kv_cache: torch.Tensor, weight: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    for name, t, shape in (
        ("kv_cache", kv_cache, "[pages, page_size, kv_lora_rank + rope_dim]"),
        ("k_out", k_out, "[tokens, heads, nope_dim + rope_dim]"),
        ("v_out", v_out, "[tokens, heads, v_dim]"),
    ):
        if t.dim() != 3:
            fail(OP, name, f"3-D {shape}", describe(t))
    if weight.dim() != 2:
        fail(OP, "kv_b_proj_weight", "2-D [heads * (nope_dim + v_dim), kv_lora_rank]", describe(weight))
    device = kv_cache.device
    for name, t in (("kv_b_proj_weight", weight), ("k_out", k_out), ("v_out", v_out)):
        if t.device != device:
            fail(OP, name, f"on {device}", t.device)
    for name, t in (("kv_cache", kv_cache), ("kv_b_proj_weight", weight), ("k_out", k_out), ("v_out", v_out)):
        if t.size(-1) > 1 and t.stride(-1) != 1:
            fail(OP, name, "contiguous in its last dimension", f"stride {t.stride()}")
    if k_out.dtype not in RESULT_DTYPES:
        fail(OP, "k_out", "a floating-point tensor of 16 bits or more", describe(k_out))
    if v_out.dtype != k_out.dtype or v_out.shape[:2] != k_out.shape[:2]:
        fail(OP, "v_out", f"of k_out's tokens, heads and dtype, {describe(k_out)}", describe(v_out))
    for name, t in (("kv_cache", kv_cache), ("kv_b_proj_weight", weight)):
        if t.dtype != k_out.dtype and t.dtype not in FP8:
            fail(OP, name, f"of k_out's dtype {k_out.dtype} or FP8 (E4M3)", t.dtype)
    if kv_cache.size(1) < 1:
        fail(OP, "kv_cache", "of a page_size of at least 1", list(kv_cache.shape))


def _check_sizes(kv_cache: torch.Tensor, weight: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    heads, rank, v_dim = k_out.size(1), weight.size(1), v_out.size(2)
    if rank < 1 or rank % RANK_MULTIPLE:
        fail(OP, "kv_b_proj_weight", f"of a kv_lora_rank that is a multiple of {RANK_MULTIPLE}", rank)
    rope = kv_cache.size(2) - rank
    if rope < 0:
        fail(OP, "kv_cache", f"of rows of at least kv_lora_rank = {rank}", list(kv_cache.shape))
    nope = k_out.size(2) - rope
    if heads < 1 or nope < 1 or v_dim < 1:
        fail(OP, "k_out and v_out", f"of a head and of dims beside the {rope} of rope", list(k_out.shape))
    if weight.size(0) != heads * (nope + v_dim):
        want = f"of {heads * (nope + v_dim)} rows, {heads} heads of {nope} + {v_dim}"
        fail(OP, "kv_b_proj_weight", want, list(weight.shape))


def _check_scales(
    kv_cache: torch.Tensor, kv_scale: torch.Tensor | None, weight: torch.Tensor, weight_scale: torch.Tensor | None
) -> None:
    for name, scale, scaled in (("kv_scale", kv_scale, kv_cache), ("weight_scale", weight_scale, weight)):
        if scale is None:
            if scaled.dtype in FP8:
                fail(OP, name, f"given with values of {scaled.dtype}", None)
            continue
        if scaled.dtype not in FP8:
            fail(OP, name, f"None with values of {scaled.dtype}", describe(scale))
        if scale.dtype != torch.float32 or scale.device != kv_cache.device or not scale.is_contiguous():
            fail(OP, name, f"contiguous float32 on {kv_cache.device}", describe(scale))
    if kv_scale is not None and kv_scale.numel() != 1:
        fail(OP, "kv_scale", "of one element", list(kv_scale.shape))
    if weight_scale is not None and scale_mode(weight, weight_scale) is None:
        rows, blocks = weight.size(0), [-(-n // SCALE_BLOCK) for n in weight.shape]
        want = f"[{rows}], one a row, or {blocks}, one for each {SCALE_BLOCK} x {SCALE_BLOCK} block"
        fail(OP, "weight_scale", want, list(weight_scale.shape))


def _check_gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    _check_results(kv_cache, kv_b_proj_weight, k_out, v_out)
    _check_sizes(kv_cache, kv_b_proj_weight, k_out, v_out)
    _check_scales(kv_cache, kv_scale, kv_b_proj_weight, weight_scale)
    apart(OP, "v_out", v_out, "k_out", k_out)
    for name, written in (("k_out", k_out), ("v_out", v_out)):
        apart(OP, "kv_cache", kv_cache, name, written)
    prefix = kv_prefix_sum_context_lens
    named = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_prefix_sum_context_lens": prefix}
    for name, t in named.items():
        index_vector(OP, name, t, kv_cache.device)
    if kv_indptr.size(0) < 1:
        fail(OP, "kv_indptr", "of length batch_size + 1", 0)
    if prefix.size(0) != kv_indptr.size(0):
        fail(OP, "kv_prefix_sum_context_lens", f"of kv_indptr's length {kv_indptr.size(0)}", prefix.size(0))


def _check_mla_context_indices(
    block_tables: torch.Tensor,
    piece_requests: torch.Tensor,
    piece_starts: torch.Tensor,
    piece_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
    kv_indices: torch.Tensor,
) -> None:
    if block_tables.dim() != 2 or block_tables.dtype not in (torch.int32, torch.int64):
        fail(INDICES, "block_tables", "int32 or int64 [requests, columns]", describe(block_tables))
    if block_tables.size(1) > 1 and block_tables.stride(1) != 1:
        fail(INDICES, "block_tables", "contiguous in its last dimension", f"stride {block_tables.stride()}")
    device = block_tables.device
    named = {"piece_requests": piece_requests, "piece_starts": piece_starts, "piece_indptr": piece_indptr}
    for name, t in {**named, "kv_indices": kv_indices}.items():
        index_vector(INDICES, name, t, device)
        if t.dtype != torch.int32:
            fail(INDICES, name, "int32", t.dtype)
    pieces = piece_requests.size(0)
    if piece_starts.size(0) != pieces:
        fail(INDICES, "piece_starts", f"of piece_requests' length {pieces}", piece_starts.size(0))
    if piece_indptr.size(0) != pieces + 1:
        fail(INDICES, "piece_indptr", f"of length {pieces + 1}, one more than piece_requests", piece_indptr.size(0))
    integer(INDICES, "page_size", page_size, 1, INT32_MAX)
    integer(INDICES, "num_pages", num_pages, 0, INT32_MAX)
    if not torch.compiler.is_compiling() and num_pages * page_size > INT32_MAX:
        fail(INDICES, "num_pages * page_size", f"at most {INT32_MAX}, as rows are int32", num_pages * page_size)


gather_kv_b_proj = Op(
    OP,
    "mla_context",
    "Tensor kv_cache, Tensor? kv_scale, Tensor kv_indptr, Tensor kv_indices, Tensor kv_prefix_sum_context_lens, "
    "Tensor kv_b_proj_weight, Tensor? weight_scale, Tensor(a!) k_out, Tensor(b!) v_out -> ()",
    check=_check_gather_kv_b_proj,
    # AITER's kernel has run on AMD GPUs, the Triton one has not. On an H200 the latter beats gather, matrix product and
    # copies in every case measured, by 1.4 to 1.7 times (docs/measurements.md).
    backends=("aiter", "triton", "reference"),
)

mla_context_indices = Op(
    INDICES,
    "mla_context",
    "Tensor block_tables, Tensor piece_requests, Tensor piece_starts, Tensor piece_indptr, int num_pages, "
    "int page_size, Tensor(a!) kv_indices -> ()",
    check=_check_mla_context_indices,
    # The second is for devices that no compiler is at hand for: it reads the pieces on the host.
    backends=("native", "reference"),
)
