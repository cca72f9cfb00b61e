# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A block of query rows of one request over a stretch of its keys."""

import triton
import triton.language as tl

from flashinfer.backends.triton.kernels.attention_batch import NO_KEY, PAGE_ID_RANGE, RAGGED, report
from flashinfer.backends.triton.kernels.attention_tile import attend

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(
    to_q, live, DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr, NEGATE: tl.constexpr,
):  # fmt: skip
    """Rows, in two parts whose sizes are powers of 2."""
    d1 = tl.arange(0, DQ1)
    q1 = tl.load(to_q + d1[None, :], live[:, None] & (d1 < DQ)[None, :], 0.0)
    q1 = -q1 if NEGATE else q1
    q2 = q1
    if DQ2 > 0:
        d2 = DQ1 + tl.arange(0, DQ2)
        q2 = tl.load(to_q + d2[None, :], live[:, None] & (d2 < DQ)[None, :], 0.0)
        q2 = -q2 if NEGATE else q2
    return q1, q2


@triton.jit
def first_bad_page(pages, entry, end, num_pages, STEP: tl.constexpr):
    """The first entry from `entry` on whose page does not exist."""
    found = NO_KEY + entry * 0
    for base in range(entry, end, STEP):
        at = base + tl.arange(0, STEP)
        page = tl.load(pages + at, at < end, 0)
        found = tl.minimum(found, tl.min(tl.where((page < 0) | (page >= num_pages), at, NO_KEY), 0))
    return found


@triton.jit
def tell_bad_pages(lse, worst, pages, first, begin, end, num_pages, fault, op, PAGE_SIZE: tl.constexpr):
    """Report a page that does not exist. Nothing of the request is then to be believed, which an LSE of +inf says."""
    if (tl.max(worst, 0) >= num_pages.to(worst.dtype)) & (end > begin):
        bad = first_bad_page(pages, begin // PAGE_SIZE, tl.cdiv(end, PAGE_SIZE), num_pages, 64)
        report(fault, op, PAGE_ID_RANGE, first + bad, tl.load(pages + bad), num_pages + bad * 0)
        lse = tl.full(lse.shape, float("inf"), tl.float32)
    return lse


@triton.jit
def attend_block(
    q, sinks, stored, paged, masks, strides, heads, scales, fault, op, b, of_request, block, kv_head, lo, hi,
    begins, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, X: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, CUSTOM: tl.constexpr, SINKS: tl.constexpr,
    NEGATE: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of a block over the keys [lo, hi): result and LSE, and whose rows they are."""
    q_token, q_head, k_head, v_head = strides
    group, _, window = heads
    score_scale, cap_into, cap_out_of, v_scale = scales
    k, v, k_page, k_slot, v_page, v_slot = stored
    kv_indices, num_pages = paged
    custom_mask, mask_indptr = masks
    q_begin, q_len, first, kv_len = of_request
    row = block * ROWS + tl.arange(0, ROWS)
    token = row // group
    head = kv_head * group + row % group
    live = token < q_len
    # Token times stride may pass 2^31.
    q_row = (q_begin + token).to(tl.int64)
    queries = load_queries(q + (q_row * q_token + head * q_head)[:, None], live, DQ, DQ1, DQ2, NEGATE)

    # Place of the request's first query among its keys; the last query is the last key's.
    origin = kv_len - q_len
    t0 = block * ROWS // group
    t1 = tl.minimum(q_len, tl.cdiv((block + 1) * ROWS, group)) - 1
    begin, end, seen_by_all = lo, tl.minimum(hi, kv_len), kv_len
    last_seen = kv_len - 1 + token * 0
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(origin + t1 + 1, 0))
        seen_by_all = tl.minimum(kv_len, tl.maximum(origin + t0 + 1, 0))
        last_seen = tl.minimum(last_seen, origin + token)
    first_seen = last_seen
    if WINDOW:
        first_seen = origin + token - window
        begin = tl.maximum(begin, tl.maximum(origin + t0 - window, 0) // TILE * TILE)
    mask_bits = q_row
    if CUSTOM:
        mask_bits = tl.load(mask_indptr + b).to(tl.int64) * 8 + token.to(tl.int64) * kv_len

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # noqa: SIM102
        # One more key, of value 0, with the first piece.
        if begins:
            top = tl.load(sinks + head, live, float("-inf")) * LOG2E
            total = tl.where(live, 1.0, 0.0)
    # Page ids of a tile: one for each run, else one for each key.
    IDS: tl.constexpr = TILE // min(PAGE_SIZE & -PAGE_SIZE, TILE) if VECTORS == 2 else TILE
    unsigned = tl.uint64 if kv_indices.dtype.element_ty == tl.int64 else tl.uint32
    state = top, total, tl.zeros([ROWS, DVP], tl.float32), tl.zeros([IDS], unsigned)
    k += kv_head * k_head
    v += kv_head * v_head
    pages = kv_indices
    if LAYOUT == RAGGED:
        k += first.to(tl.int64) * k_slot
        v += first.to(tl.int64) * v_slot
    else:
        pages += first
    keys = pages, kv_len - 1, tl.maximum(num_pages - 1, 0)
    rows = first_seen, last_seen, custom_mask, mask_bits
    into = k, v, k_page, k_slot, v_page, v_slot
    by = score_scale, cap_into, cap_out_of
    edge = begin
    if not WINDOW and not CUSTOM:
        edge = tl.maximum(begin, tl.minimum(end, seen_by_all) // TILE * TILE)
        state = attend(
            state, queries, rows, keys, into, by, begin, edge,
            PAGE_SIZE, LAYOUT, X, TILE, DQ, DQ1, DQ2, DV, DVP, SOFT_CAP, WINDOW, CUSTOM, False, VECTORS, STAGES,
        )  # fmt: skip
    state = attend(
        state, queries, rows, keys, into, by, edge, end,
        PAGE_SIZE, LAYOUT, X, TILE, DQ, DQ1, DQ2, DV, DVP, SOFT_CAP, WINDOW, CUSTOM, True, VECTORS, STAGES,
    )  # fmt: skip
    top, total, acc, worst = state
    result = acc * tl.where(total > 0, v_scale / total, 0.0)[:, None]
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    if LAYOUT != RAGGED:
        lse = tell_bad_pages(lse, worst, pages, first, begin, end, num_pages, fault, op, PAGE_SIZE)
    return result, lse, q_row, head, live
