# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache in plain torch, request by request, accumulated in float32 at least."""

from __future__ import annotations

import itertools
import math

import torch

from flashinfer.core.checks import fail

OP = "paged_attention"


def why_not_paged_attention(*args: object) -> str | None:
    return None


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
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    last = kv_last_page_len.tolist()
    page_size = k_cache.size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])
    _check_indptr("qo_indptr", qo)
    _check_indptr("kv_indptr", kv)
    if qo[-1] != q.size(0):
        fail(OP, "qo_indptr", f"running from 0 to q's {q.size(0)} rows", f"{qo[0]}..{qo[-1]}")
    if kv[-1] > kv_indices.numel():
        fail(OP, "kv_indices", f"as long as kv_indptr[-1] = {kv[-1]} says", f"length {kv_indices.numel()}")
    for b, tail in enumerate(last):
        pages = kv_indices[kv[b] : kv[b + 1]].long()
        count = pages.numel()
        if not 0 <= tail <= page_size:
            fail(OP, f"kv_last_page_len[{b}]", f"in [0, {page_size}]", tail)
        if count and not 0 <= int(pages.min()) <= int(pages.max()) < k_cache.size(0):
            fail(OP, "kv_indices", f"page ids below {k_cache.size(0)}", f"{pages.tolist()} for request {b}")
        kv_len = (count - 1) * page_size + tail if count else 0
        rows = slice(qo[b], qo[b + 1])
        k = _tokens(k_cache, pages, kv_layout, is_v=False)[:kv_len]
        v = _tokens(v_cache, pages, kv_layout, is_v=True)[:kv_len]
        _attend(q[rows], k, v, causal, sm_scale, out[rows], lse[rows])


def _check_indptr(name: str, indptr: list[int]) -> None:
    """Where requests begin: from 0 on, and never back."""
    if indptr[0] != 0:
        fail(OP, f"{name}[0]", "0", indptr[0])
    for b, (first, last) in enumerate(itertools.pairwise(indptr)):
        if last < first:
            fail(OP, name, "non-decreasing", f"{first} at [{b}] and then {last}")


def _tokens(cache: torch.Tensor, pages: torch.Tensor, kv_layout: str, *, is_v: bool) -> torch.Tensor:
    """Keys or values of the pages in token order, `[pages * page_size, heads, head_dim]`."""
    p = cache[pages]
    if kv_layout == "HND":
        p = p.permute(0, 2, 1, 3)
    elif kv_layout == "SHUFFLED" and is_v:
        p = p.permute(0, 2, 4, 1, 3).flatten(1, 2)  # [P, H, N/x, D, x] -> [P, N/x, x, H, D]
    elif kv_layout == "SHUFFLED":
        p = p.permute(0, 3, 1, 2, 4).flatten(3, 4)  # [P, H, D/x, N, x] -> [P, N, H, D/x, x]
    return p.flatten(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    sm_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One request: `softmax(q k^T * sm_scale) v` per head, and log2 of the sum of exponentials."""
    q_len, kv_len, group = q.size(0), k.size(0), q.size(1) // k.size(1)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(work).unflatten(1, (k.size(1), group)).permute(1, 2, 0, 3)  # [KV, group, q_len, D]
    keys, values = k.to(work).permute(1, 2, 0).unsqueeze(1), v.to(work).transpose(0, 1).unsqueeze(1)
    scores = grouped @ keys * sm_scale
    if causal:
        # Bottom-right alignment: the last query sees the last key.
        last_key = torch.arange(q_len, device=q.device) + (kv_len - q_len)
        hidden = torch.arange(kv_len, device=q.device) > last_key.unsqueeze(1)
        scores = scores.masked_fill(hidden, -math.inf)
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    # A row that sees no key has weight nowhere: output 0 and lse -inf, not NaN.
    weights = (scores - total.masked_fill(total == -math.inf, 0)).exp()
    out.copy_((weights @ values).permute(2, 0, 1, 3).flatten(1, 2))
    lse.copy_((total.squeeze(-1) / math.log(2)).permute(2, 0, 1).flatten(1))
