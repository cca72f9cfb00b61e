# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA attention through AITER's assembly kernels.

They read rows of ckv and kpe as one, a page per token, for 16 or 128 heads in bfloat16. Heads are padded to that, pages
become tokens, and caches that are not one buffer are copied, the rows of the batch only.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.nn.functional as functional

from flashinfer.backends.aiter import entry
from flashinfer.backends.aiter import mla_interface as aiter_mla
from flashinfer.core import mla_plan
from flashinfer.core.checks import INT32_MAX
from flashinfer.core.errors import BackendUnavailableError

HEADS = (16, 128)
DIMS = (512, 64)
# Decode kernels of 16 heads come for 1, up to 4 and up to 8 queries; longer ones are for the prefill kernel.
MOST_DECODE_QUERIES = 8
# With one piece some versions return before the LSE is written, and some write the result in another place.
SPLITS = (2, 16)

_has_warned = False


@functools.cache
def _compute_units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def why_not_mla_paged_attention(
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
    *args: object,
) -> str | None:
    if reason := entry.why_not(q_nope.device, aiter_mla.MODULE, aiter_mla.DECODE, aiter_mla.PREFILL):
        return reason
    if q_nope.dtype != torch.bfloat16 or ckv_cache.dtype != torch.bfloat16:
        return f"AITER's MLA kernels are called for bfloat16, got {q_nope.dtype} and caches of {ckv_cache.dtype}"
    if (dims := (q_nope.size(2), q_pe.size(2))) != DIMS:
        return f"AITER's MLA kernels are for widths of {DIMS}, got {dims}"
    if q_nope.size(1) > HEADS[-1]:
        return f"needs at most {HEADS[-1]} heads, got {q_nope.size(1)}"
    if ckv_cache.size(0) * ckv_cache.size(1) > INT32_MAX:
        return f"AITER counts tokens of the pool in 32 bits, got {ckv_cache.size(0) * ckv_cache.size(1)}"
    return _why_not_queries(causal, needs_lse, max_q_len, uniform_q)


def _why_not_queries(causal: bool, needs_lse: bool, max_q_len: int, uniform_q: bool) -> str | None:
    found = aiter_mla.interface()
    if found is not None and (reason := found.why_not()):
        return reason
    if max_q_len < 1:
        return "needs a plan, and in a causal batch keys for every query: AITER is told the longest query"
    if max_q_len > 1 and not causal:
        return f"AITER's kernels for several queries are causal, got {max_q_len} queries that are not"
    if max_q_len == 1 and not uniform_q:
        return "AITER's decode needs as many queries in every request, got requests without one"
    if not _is_decode(max_q_len, uniform_q):
        return "AITER's prefill returns no LSE" if needs_lse else None
    if needs_lse and found is not None and not found.has_lse:
        return f"needs AITER 0.1.13 or newer for the LSE, got {found.text}"
    return None


def _is_decode(max_q_len: int, uniform_q: bool) -> bool:
    """AITER's decode takes the queries of request b to begin at b times their number."""
    return uniform_q and max_q_len <= MOST_DECODE_QUERIES


def ready_mla_paged_attention(*args: object) -> None:
    """Import AITER; nothing to do after the first time."""
    for name in (aiter_mla.DECODE, aiter_mla.PREFILL):
        entry.entry_point(aiter_mla.MODULE, name)


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
    tokens, heads, _ = q_nope.shape
    batch, device = kv_len_arr.numel(), q_nope.device
    if not tokens or not kv_indices.numel():
        out.zero_()
        lse.fill_(-math.inf)
        return
    padded = next(h for h in HEADS if heads <= h)
    rows, token_indptr, token_ids = _keys(ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_len_arr)
    into = out if padded == heads and out.is_contiguous() else out.new_empty(tokens, padded, out.size(2))
    call = {
        "q": _queries(q_nope, q_pe, padded),
        "kv_buffer": rows,
        "o": into,
        "qo_indptr": qo_indptr.int(),
        "kv_indptr": token_indptr,
        "kv_indices": token_ids,
        "kv_last_page_lens": torch.ones(batch, dtype=torch.int32, device=device),
        "max_seqlen_q": max_q_len,
        "sm_scale": sm_scale,
    }
    if not _is_decode(max_q_len, uniform_q):
        entry.entry_point(aiter_mla.MODULE, aiter_mla.PREFILL)(**call)
        if into is not out:
            out.copy_(into[:, :heads])
        return
    found = aiter_mla.interface()
    splits = min(max(SPLITS[0], 2 * _compute_units(device) // batch), SPLITS[1])
    # Given by us: AITER's own is made once a process, for the GPU and the memory pool of the first call.
    call.update(num_kv_splits=splits, num_kv_splits_indptr=_steps(batch, splits, device))
    if found is not None and "causal" in found.decode:
        call["causal"] = True
    if needs_lse:
        call["return_lse"] = True
    _, natural = entry.entry_point(aiter_mla.MODULE, aiter_mla.DECODE)(**call)
    # Of no keys AITER makes 0 / 0.
    empty = (kv_len_arr == 0).repeat_interleave(max_q_len).unsqueeze(1)
    if into is not out:
        out.copy_(into[:, :heads])
    out.masked_fill_(empty.unsqueeze(2), 0.0)
    if not needs_lse:
        return
    if natural is None or natural.shape != (tokens, padded):
        got = None if natural is None else list(natural.shape)
        raise BackendUnavailableError(f"{mla_plan.OP}: {found and found.text} returned no LSE, got {got}")
    torch.mul(natural[:, :heads], 1 / math.log(2), out=lse)
    lse.masked_fill_(empty, -math.inf)


def _steps(batch: int, splits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (batch + 1) * splits, splits, dtype=torch.int32, device=device)


def _queries(q_nope: torch.Tensor, q_pe: torch.Tensor, padded: int) -> torch.Tensor:
    """Rows of both halves, and rows of zeros for the heads that there are not."""
    missing = padded - q_nope.size(1)
    view = mla_plan.mla_kv_view(q_nope, q_pe)
    if missing == 0 and view is not None:
        return view
    q = torch.cat((q_nope, q_pe), dim=-1) if view is None else view
    return functional.pad(q, (0, 0, 0, missing))


def _keys(
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[tokens, 1, 1, 576]`, where each request's tokens begin, and the tokens."""
    view = mla_plan.mla_kv_view(ckv_cache, kpe_cache)
    if view is not None and ckv_cache.size(1) == 1:
        return view.unsqueeze(2), kv_indptr.int(), kv_indices.int()
    indptr, ids = _tokens(ckv_cache.size(1), kv_indptr, kv_indices, kv_len_arr)
    if view is not None:
        return view.view(-1, 1, 1, view.size(2)), indptr, ids
    _warn()
    # As many as the table has room for: how many there are only the device knows.
    page, slot = ids // ckv_cache.size(1), ids % ckv_cache.size(1)
    rows = torch.cat((ckv_cache[page, slot], kpe_cache[page, slot]), dim=-1)
    return rows.view(-1, 1, 1, rows.size(1)), indptr, torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)


def _tokens(
    page_size: int, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages as tokens: where each request begins, and ids of tokens, 0 behind the last request."""
    indptr = functional.pad(kv_len_arr.cumsum(0), (1, 0))
    at = torch.arange(kv_indices.numel() * page_size, device=kv_indices.device)
    request = torch.searchsorted(indptr[1:], at, right=True)
    is_token = request < kv_len_arr.numel()
    request = request.clamp(max=kv_len_arr.numel() - 1)
    offset = at - indptr[request]
    page = kv_indptr[request] + offset // page_size
    ids = kv_indices[page.clamp(max=kv_indices.numel() - 1)] * page_size + offset % page_size
    return indptr.int(), torch.where(is_token, ids, 0).int()


def _warn() -> None:
    """Once a process: it is the allocation of the pool that is to be changed, not the call."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{mla_plan.OP}: ckv_cache and kpe_cache are not adjacent halves of one buffer, so that backend 'aiter' "
            "copies the rows of every batch; allocate one [pages, page_size, 576] buffer and split it, or use backend "
            "'triton'",
            stacklevel=2,
        )
