# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Op of MLA attention over a paged cache of compressed keys and values."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, index_vector
from flashinfer.core.dtypes import FP8
from flashinfer.core.mla_plan import OP as OP
from flashinfer.core.mla_plan import Shape
from flashinfer.core.op import Op

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_queries(q_nope: torch.Tensor, q_pe: torch.Tensor) -> None:
    if q_nope.dim() != 3:
        fail(OP, "q_nope", "[tokens, heads, head_dim_ckv]", describe(q_nope))
    if q_nope.dtype not in QUERY_DTYPES:
        fail(OP, "q_nope", "a floating-point tensor of 16 bits or more", describe(q_nope))
    if q_nope.size(1) < 1 or q_nope.size(2) < 1:
        fail(OP, "q_nope", "of at least one head, and rows that are not empty", list(q_nope.shape))
    if q_pe.dim() != 3 or q_pe.shape[:2] != q_nope.shape[:2]:
        fail(OP, "q_pe", f"[{q_nope.size(0)}, {q_nope.size(1)}, head_dim_kpe] as q_nope", describe(q_pe))
    for what in ("dtype", "device"):
        want, got = getattr(q_nope, what), getattr(q_pe, what)
        if got != want:
            fail(OP, "q_pe", f"of q_nope's {what} {want}", got)
    for name, q in (("q_nope", q_nope), ("q_pe", q_pe)):
        if q.size(2) > 1 and q.stride(2) != 1:
            fail(OP, name, "contiguous in its last dimension", f"stride {q.stride()}", f"pass {name}.contiguous()")


def _check_caches(q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> None:
    for name, cache, q in (("ckv_cache", ckv_cache, q_nope), ("kpe_cache", kpe_cache, q_pe)):
        if cache.dim() == 4:
            # Squeezed away silently it would look like another page size.
            fail(
                OP, name, "3-D [pages, page_size, dim]", describe(cache), f"pass {name}.squeeze() of the axis of heads"
            )
        if cache.dim() != 3 or cache.size(2) != q.size(2):
            fail(OP, name, f"[pages, page_size, {q.size(2)}]", describe(cache))
        if cache.device != q.device:
            fail(OP, name, f"on {q.device}", cache.device)
        if cache.dtype != q_nope.dtype and cache.dtype not in FP8:
            fail(OP, name, f"of q's dtype {q_nope.dtype} or FP8 (E4M3)", cache.dtype)
        if cache.size(2) > 1 and cache.stride(2) != 1:
            fail(OP, name, "contiguous in its last dimension", f"stride {cache.stride()}")
    if ckv_cache.size(1) < 1:
        fail(OP, "ckv_cache", "of a page_size of at least 1", list(ckv_cache.shape))
    if kpe_cache.shape[:2] != ckv_cache.shape[:2]:
        fail(OP, "kpe_cache", f"of ckv_cache's pages {list(ckv_cache.shape[:2])}", list(kpe_cache.shape[:2]))
    if kpe_cache.dtype != ckv_cache.dtype:
        fail(OP, "kpe_cache", f"of ckv_cache's dtype {ckv_cache.dtype}", kpe_cache.dtype)


def _check_plan(
    q_nope: torch.Tensor,
    schedule: torch.Tensor | None,
    rows_per_item: int,
    workers: int,
    scratch: torch.Tensor | None,
) -> None:
    if (schedule is None) != (scratch is None):
        fail(OP, "schedule and scratch", "given together", "one of them")
    if schedule is None or scratch is None:
        return
    if rows_per_item not in (16, 32, 64) or workers < 1:
        fail(OP, "rows_per_item and workers", "those of the schedule", f"{rows_per_item} and {workers}")
    heads, dim = q_nope.size(1), q_nope.size(2)
    shape = Shape(rows_per_item, workers, -(-heads // rows_per_item))
    for name, t, dtype, least in (
        ("schedule", schedule, torch.int32, shape.schedule_words),
        ("scratch", scratch, torch.float32, shape.scratch_elements(dim)),
    ):
        if t.dim() != 1 or t.dtype != dtype or t.device != q_nope.device or not t.is_contiguous() or t.numel() < least:
            word = str(dtype).removeprefix("torch.")
            fail(OP, name, f"contiguous {word}[>= {least}] on {q_nope.device}", describe(t))


def _check_mla_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    ckv_scale: float,
    kpe_scale: float,
    needs_lse: bool,
    max_q_len: int,
    uniform_q: bool,
    schedule: torch.Tensor | None,
    rows_per_item: int,
    workers: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    _check_queries(q_nope, q_pe)
    _check_caches(q_nope, q_pe, ckv_cache, kpe_cache)
    named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
    for name, t in named.items():
        index_vector(OP, name, t, q_nope.device)
    batch = kv_len_arr.size(0)
    for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if t.size(0) != batch + 1:
            fail(OP, name, f"of length {batch + 1}, one more than kv_len_arr", t.size(0))
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        # A negative or zero scale would divide and order what it must not; it is one of a quantisation.
        if not scale > 0:
            fail(OP, name, "positive", scale)
        if scale != 1.0 and ckv_cache.dtype == q_nope.dtype:
            fail(OP, name, "1.0 for caches that are not FP8", scale)
    if max_q_len < 0:
        fail(OP, "max_q_len", "0, for not known, or more", max_q_len)
    _check_plan(q_nope, schedule, rows_per_item, workers, scratch)
    if out.shape != q_nope.shape or out.dtype != q_nope.dtype or out.device != q_nope.device:
        fail(OP, "out", f"like q_nope, {describe(q_nope)}", describe(out))
    if out.stride(2) != 1:
        fail(OP, "out", "contiguous in its last dimension", f"stride {out.stride()}")
    if lse.shape != q_nope.shape[:2] or lse.dtype != torch.float32 or lse.device != q_nope.device:
        fail(OP, "lse", f"float32{list(q_nope.shape[:2])} on {q_nope.device}", describe(lse))


mla_paged_attention = Op(
    OP,
    "mla",
    "Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor qo_indptr, Tensor kv_indptr, "
    "Tensor kv_indices, Tensor kv_len_arr, bool causal, float sm_scale, float ckv_scale, float kpe_scale, "
    "bool needs_lse, int max_q_len, bool uniform_q, Tensor? schedule, int rows_per_item, int workers, "
    "Tensor(a!)? scratch, Tensor(b!) out, Tensor(c!) lse -> ()",
    check=_check_mla_paged_attention,
    # On an MI300X AITER is reported to decode in 1.01 to 1.09 times the time of reading the keys; Triton has not been
    # measured there. The last is for the CPU: plain torch, request by request.
    backends=("aiter", "triton", "reference"),
)
