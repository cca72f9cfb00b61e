# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch, request by request, accumulated in float32 at least."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from flashinfer.core.checks import fail

PAGED, RAGGED = "paged_attention", "ragged_attention"


@dataclass(frozen=True)
class _Options:
    """What both ops take besides tensors of the batch; `mask` holds the packed bits of one request."""

    causal: bool
    score_scale: float
    window_left: int
    logits_soft_cap: float
    v_scale: float
    sinks: torch.Tensor | None


def why_not_paged_attention(*args: object) -> str | None:
    return None


def why_not_ragged_attention(*args: object) -> str | None:
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
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    last = kv_last_page_len.tolist()
    page_size = k_cache.size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])
    _check_indptr(PAGED, "qo_indptr", qo)
    _check_indptr(PAGED, "kv_indptr", kv)
    _check_total(PAGED, "qo_indptr", qo, "q", q.size(0))
    if kv[-1] > kv_indices.numel():
        fail(PAGED, "kv_indices", f"as long as kv_indptr[-1] = {kv[-1]} says", f"length {kv_indices.numel()}")
    options = _Options(causal, sm_scale * k_scale, window_left, logits_soft_cap, v_scale, sinks)
    tables = [kv_indices[first:last].long() for first, last in itertools.pairwise(kv)]
    lens = [(t.numel() - 1) * page_size + tail if t.numel() else 0 for t, tail in zip(tables, last, strict=True)]
    for b, (pages, tail) in enumerate(zip(tables, last, strict=True)):
        if not 0 <= tail <= page_size:
            fail(PAGED, f"kv_last_page_len[{b}]", f"in [0, {page_size}]", tail)
        if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < k_cache.size(0):
            fail(PAGED, "kv_indices", f"page ids in [0, {k_cache.size(0)})", f"{pages.tolist()} for request {b}")
    masks = _masks(PAGED, custom_mask, mask_indptr, qo, lens)
    for b, pages in enumerate(tables):
        rows = slice(qo[b], qo[b + 1])
        k = _tokens(k_cache, pages, kv_layout, is_v=False)[: lens[b]]
        v = _tokens(v_cache, pages, kv_layout, is_v=True)[: lens[b]]
        _attend(q[rows], k, v, options, masks[b], out[rows], lse[rows])


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
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    for name, indptr, rows_of, t in (("qo_indptr", qo, "q", q), ("kv_indptr", kv, "k", k)):
        _check_indptr(RAGGED, name, indptr)
        _check_total(RAGGED, name, indptr, rows_of, t.size(0))
    options = _Options(causal, sm_scale * k_scale, window_left, logits_soft_cap, v_scale, sinks)
    lens = [last - first for first, last in itertools.pairwise(kv)]
    masks = _masks(RAGGED, custom_mask, mask_indptr, qo, lens)
    for b in range(len(lens)):
        rows, keys = slice(qo[b], qo[b + 1]), slice(kv[b], kv[b + 1])
        _attend(q[rows], k[keys], v[keys], options, masks[b], out[rows], lse[rows])


def _check_indptr(op: str, name: str, indptr: list[int]) -> None:
    """Where requests begin: from 0 on, and never back."""
    if indptr[0] != 0:
        fail(op, f"{name}[0]", "0", indptr[0])
    for b, (first, last) in enumerate(itertools.pairwise(indptr)):
        if last < first:
            fail(op, name, "non-decreasing", f"{first} at [{b}] and then {last}")


def _check_total(op: str, name: str, indptr: list[int], rows_of: str, rows: int) -> None:
    if indptr[-1] != rows:
        fail(op, name, f"running from 0 to {rows_of}'s {rows} rows", f"{indptr[0]}..{indptr[-1]}")


def _masks(
    op: str, custom_mask: torch.Tensor | None, mask_indptr: torch.Tensor | None, qo: list[int], kv_lens: list[int]
) -> list[torch.Tensor | None]:
    """Per request `[q_len, kv_len]`, True where a key is seen: little-endian bits, a request's begin with a byte."""
    if custom_mask is None or mask_indptr is None:
        return [None] * len(kv_lens)
    starts = mask_indptr.tolist()
    found: list[torch.Tensor | None] = []
    shifts = torch.arange(8, device=custom_mask.device, dtype=torch.uint8)
    for b, kv_len in enumerate(kv_lens):
        q_len = qo[b + 1] - qo[b]
        need = -(-q_len * kv_len // 8)
        if not 0 <= starts[b] <= starts[b + 1] <= custom_mask.numel():
            fail(op, "mask_indptr", f"non-decreasing, within custom_mask's {custom_mask.numel()} bytes", starts)
        if starts[b + 1] - starts[b] < need:
            fail(op, "mask_indptr", f"giving request {b} its {need} bytes", starts[b + 1] - starts[b])
        bits = custom_mask[starts[b] : starts[b] + need].unsqueeze(1) >> shifts & 1
        found.append(bits.flatten()[: q_len * kv_len].view(q_len, kv_len).bool())
    return found


def _tokens(cache: torch.Tensor, pages: torch.Tensor, kv_layout: str, *, is_v: bool) -> torch.Tensor:
    """Keys or values of the pages in token order, `[pages * page_size, heads, head_dim]`."""
    # Indexing knows no FP8 on every device; bytes it does.
    p = cache.view(torch.uint8)[pages].view(cache.dtype) if cache.element_size() == 1 else cache[pages]
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
    options: _Options,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """One request: `softmax(q k^T * scale) v` per head, and log2 of the sum of exponentials."""
    q_len, kv_len, group = q.size(0), k.size(0), q.size(1) // k.size(1)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(work).unflatten(1, (k.size(1), group)).permute(1, 2, 0, 3)  # [KV, group, q_len, D]
    keys, values = k.to(work).permute(1, 2, 0).unsqueeze(1), v.to(work).transpose(0, 1).unsqueeze(1)
    scores = grouped @ keys * options.score_scale
    if options.logits_soft_cap > 0:
        scores = (scores / options.logits_soft_cap).tanh() * options.logits_soft_cap
    scores = scores.masked_fill(~_seen(q_len, kv_len, options, mask, q.device), -math.inf)
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    if options.sinks is not None:
        # A key that every row sees and whose value is 0.
        total = torch.logaddexp(total, options.sinks.to(work).view(k.size(1), group, 1, 1))
    # A row that sees no key has weight nowhere: output 0 and lse -inf, not NaN.
    weights = (scores - total.masked_fill(total == -math.inf, 0)).exp()
    out.copy_((weights @ values * options.v_scale).permute(2, 0, 1, 3).flatten(1, 2))
    lse.copy_((total.squeeze(-1) / math.log(2)).permute(2, 0, 1).flatten(1))


def _seen(q_len: int, kv_len: int, options: _Options, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`[q_len, kv_len]`, True where a query sees a key."""
    # Bottom-right alignment: the last query is the last key's.
    place = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1)
    keys = torch.arange(kv_len, device=device)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if mask is not None:
        seen = mask
    elif options.causal:
        seen = keys <= place
    if options.window_left >= 0:
        seen = seen & (keys >= place - options.window_left)
    return seen
