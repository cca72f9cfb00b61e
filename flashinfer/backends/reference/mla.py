# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA attention over a paged cache in plain torch, request by request, accumulated in float32 at least."""

from __future__ import annotations

import math

import torch

from flashinfer.core import mla_plan
from flashinfer.core.errors import InvalidArgumentError


def why_not_mla_paged_attention(*args: object) -> str | None:
    return None


def mla_paged_attention(
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
    work = torch.float64 if q_nope.dtype == torch.float64 else torch.float32
    qo, kv, lens = (t.tolist() for t in (qo_indptr, kv_indptr, kv_len_arr))
    page_size = ckv_cache.size(1)
    mla_plan.check(qo, kv, lens, page_size)
    mla_plan.require(qo[-1], kv[-1], q_nope.size(0), kv_indices.numel())
    for b, kv_len in enumerate(lens):
        pages = kv_indices[kv[b] : kv[b + 1]].long()
        if kv_len and not 0 <= int(pages.min()) <= int(pages.max()) < ckv_cache.size(0):
            valid = f"page ids in [0, {ckv_cache.size(0)})"
            raise InvalidArgumentError(
                f"{mla_plan.OP}: kv_indices must be {valid}, got {pages.tolist()} for request {b}"
            )
        rows = slice(qo[b], qo[b + 1])
        values = ckv_cache[pages].flatten(0, 1)[:kv_len].to(work) * ckv_scale
        ropes = kpe_cache[pages].flatten(0, 1)[:kv_len].to(work) * kpe_scale
        q, qr = q_nope[rows].to(work), q_pe[rows].to(work)
        scores = (torch.einsum("qhd,kd->qhk", q, values) + torch.einsum("qhd,kd->qhk", qr, ropes)) * sm_scale
        if causal:
            # Bottom-right alignment: the last query sees the last key.
            last_key = torch.arange(q.size(0), device=q.device) + (kv_len - q.size(0))
            hidden = torch.arange(kv_len, device=q.device) > last_key[:, None, None]
            scores = scores.masked_fill(hidden, -math.inf)
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        # A row that sees no key has weight nowhere: output 0 and lse -inf, not NaN.
        weights = (scores - total.masked_fill(total == -math.inf, 0)).exp()
        out[rows] = torch.einsum("qhk,kd->qhd", weights, values).to(out.dtype)
        lse[rows] = total.squeeze(-1).to(lse.dtype) / math.log(2)
