# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages or ragged keys. `attention_split` cuts the keys of a batch evenly among its programs and
`attention_merge` joins the pieces of a block; in `attention_whole` each program has a block of query rows to itself.

Rows of a request are its query tokens times the query heads of one KV head, token by token: a tile of keys, loaded
once, serves all of them. Who does what follows from the metadata where they lie, so that nothing is planned and the
grid does not depend on lengths. Names: `b` a request, `at` places of keys in it, `d` and `e` dimensions of K and V.
"""

import triton
import triton.language as tl

from flashinfer.backends.triton.kernels.attention_batch import request, seek, total_of, units_of
from flashinfer.backends.triton.kernels.attention_block import attend_block

RECORD_WORDS = tl.constexpr(8)  # flashinfer/core/attention_work.py
# They change from call to call, and nothing is gained by kernels for each kind.
VOLATILE = ["window", "batch", "tokens", "bound", "num_pages", "op"]


@triton.jit
def store_rows(to, result, lse_to, lse, live, DV: tl.constexpr, DVP: tl.constexpr):
    """Write final rows; an LSE of +inf marks those of a request that has a bad page."""
    lost = lse == float("inf")
    store(to, tl.where(lost[:, None], 0.0, result), lse_to, tl.where(lost, float("-inf"), lse), live, DV, DVP)


@triton.jit
def store(to, result, lse_to, lse, live, DV: tl.constexpr, DVP: tl.constexpr):
    e = tl.arange(0, DVP)
    tl.store(to + e[None, :], result.to(to.dtype.element_ty), live[:, None] & (e < DV)[None, :])
    tl.store(lse_to, lse, live)


@triton.jit(do_not_specialize=VOLATILE)
def attention_split(
    q, k, v, kv_indices, qo_indptr, kv_indptr, last_page_len, sinks, custom_mask, mask_indptr, fault, scratch, out, lse,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_token, out_head, lse_token, lse_head,
    group, kv_heads, score_scale, cap_into, cap_out_of, v_scale, window, batch, tokens, bound, num_pages, op,
    WORKERS: tl.constexpr, BATCH: tl.constexpr, UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    CUSTOM: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each worker takes its share of the batch's units: the end of an item, whole ones, the beginning of another.

    `scratch`, float32: `[2 * WORKERS * ROWS, DV]` results, as many LSE, and `[WORKERS, RECORD_WORDS]` int32. `fault`:
    int64 [4]. `score_scale`: of `q k^T`, to base 2. `bound`: entries of `kv_indices`, or keys.
    """
    worker = tl.program_id(0)
    meta = qo_indptr, kv_indptr, last_page_len, tokens, bound
    heads = group, kv_heads, window
    all_units = total_of(batch, meta, heads, fault, op, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, True, BATCH).to(tl.int64)
    slots = 2 * WORKERS * ROWS
    record = (scratch + slots * (DV + 1)).to(tl.pointer_type(tl.int32)) + worker * RECORD_WORDS
    # Of fewer units than workers each worker has one, or none: its share is empty then, as Triton 3.6 cannot compile a
    # return before a `while`.
    active = tl.maximum(tl.minimum(all_units, WORKERS), 1)
    unit = (worker * all_units // active).to(tl.int32)
    stop = tl.where(worker < active, ((worker + 1) * all_units // active).to(tl.int32), unit)
    b, before = seek(unit, batch, meta, heads, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, True, BATCH)
    pieces = 0
    while unit < stop:
        q_begin, q_len, first, kv_len, _ = request(b, True, meta, PAGE_SIZE, LAYOUT)
        blocks, unit_0, unit_n = units_of(q_len, kv_len, group, kv_heads, window, ROWS, UNIT, WINDOW)
        per_item = unit_n - unit_0
        of_request = blocks * kv_heads * per_item
        if unit - before >= of_request:
            before += of_request
            b += 1
        else:
            item = (unit - before) // per_item
            piece = (unit - before) % per_item
            piece_end = tl.minimum(per_item, piece + stop - unit)
            kv_head = item % kv_heads
            block = item // kv_heads
            result, row_lse, q_row, head, live = attend_block(
                q, sinks, (k, v, k_page, k_slot, v_page, v_slot), (kv_indices, num_pages), (custom_mask, mask_indptr),
                (q_token, q_head, k_head, v_head), heads, (score_scale, cap_into, cap_out_of, v_scale), fault, op,
                b, (q_begin, q_len, first, kv_len), block, kv_head,
                (unit_0 + piece) * UNIT, (unit_0 + piece_end) * UNIT, piece == 0,
                PAGE_SIZE, LAYOUT, X, ROWS, TILE, DQ, DQ1, DQ2, DV, DVP, CAUSAL, WINDOW, SOFT_CAP, CUSTOM, SINKS,
                NEGATE, VECTORS, STAGES,
            )  # fmt: skip
            if piece == 0 and piece_end == per_item:
                to_out = out + (q_row * out_token + head * out_head)[:, None]
                store_rows(to_out, result, lse + q_row * lse_token + head * lse_head, row_lse, live, DV, DVP)
            else:
                # The end of an item that others began has the first slot.
                slot = 2 * worker + (1 if piece == 0 else 0)
                place = slot * ROWS + tl.arange(0, ROWS)
                store(scratch + place[:, None] * DV, result, scratch + slots * DV + place, row_lse, live, DV, DVP)
                if piece == 0:
                    # Workers whose shares begin before the item ends.
                    item_end = (unit + per_item).to(tl.int64)
                    pieces = ((item_end * active - 1) // all_units).to(tl.int32) - worker + 1
                    tl.store(record + 1, q_begin)
                    tl.store(record + 2, q_len)
                    tl.store(record + 3, block)
                    tl.store(record + 4, kv_head)
            unit += piece_end - piece
    tl.store(record, pieces)


@triton.jit
def join(
    record, pieces, slots, base, scratch, out, lse, strides, group, ROWS: tl.constexpr, STEP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Joins an item's pieces in their order: the first has slot `base + FIRST`, those behind it `base + n * STRIDE`."""
    out_token, out_head, lse_token, lse_head = strides
    inside = tl.program_id(1) * STEP + tl.arange(0, STEP)
    row = tl.load(record + 3) * ROWS + inside
    token = row // group
    live = token < tl.load(record + 2)
    head = tl.load(record + 4) * group + row % group
    q_row = (tl.load(record + 1) + token).to(tl.int64)
    e = tl.arange(0, DVP)
    top = tl.full([STEP], float("-inf"), tl.float32)
    total = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, DVP], tl.float32)
    lost = tl.zeros([STEP], tl.int32)
    for piece in range(pieces):
        slot = base + STRIDE * piece + (FIRST if piece == 0 else 0)
        place = slot * ROWS + inside
        piece_lse = tl.load(scratch + slots * DV + place, live, float("-inf"))
        lost = tl.where(piece_lse == float("inf"), 1, lost)
        result = tl.load(scratch + place[:, None] * DV + e[None, :], live[:, None] & (e < DV)[None, :], 0.0)
        new_top = tl.maximum(top, piece_lse)
        base_2 = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base_2)
        weight = tl.exp2(piece_lse - base_2)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + result * weight[:, None]
        top = new_top
    acc = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    row_lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    row_lse = tl.where(lost > 0, float("inf"), row_lse)
    to = out + (q_row * out_token + head * out_head)[:, None]
    store_rows(to, acc, lse + q_row * lse_token + head * lse_head, row_lse, live, DV, DVP)


@triton.jit
def attention_merge(
    scratch, out, lse, out_token, out_head, lse_token, lse_head, group,
    WORKERS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Joins the pieces of the item that a worker began and others ended, STEP rows a program."""
    worker = tl.program_id(0)
    slots = 2 * WORKERS * ROWS
    record = (scratch + slots * (DV + 1)).to(tl.pointer_type(tl.int32)) + worker * RECORD_WORDS
    pieces = tl.load(record)
    if pieces == 0:
        return
    strides = out_token, out_head, lse_token, lse_head
    join(record, pieces, slots, 2 * worker, scratch, out, lse, strides, group, ROWS, STEP, DV, DVP, 2, 1)


@triton.jit(do_not_specialize=VOLATILE)
def attention_whole(
    q, k, v, kv_indices, qo_indptr, kv_indptr, last_page_len, sinks, custom_mask, mask_indptr, fault, scratch, out, lse,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_token, out_head, lse_token, lse_head,
    group, kv_heads, score_scale, cap_into, cap_out_of, v_scale, window, batch, tokens, bound, num_pages, op,
    WORKERS: tl.constexpr, BATCH: tl.constexpr, UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    CUSTOM: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows and all keys that it sees; the arguments of `attention_split`, whose scratch is not used.

    The last blocks of a request, which see the most keys, go first, and the heads of a block side by side: of gfx942's
    eight dies, which take programs in turn, each then keeps the keys of few heads in its cache.
    """
    kv_head = tl.program_id(0) % kv_heads
    unit = tl.num_programs(0) // kv_heads - 1 - tl.program_id(0) // kv_heads
    meta = qo_indptr, kv_indptr, last_page_len, tokens, bound
    heads = group, kv_heads, window
    if tl.program_id(0) == 0:
        total_of(batch, meta, heads, fault, op, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, False, BATCH)
    b, before = seek(unit, batch, meta, heads, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, False, BATCH)
    if b >= batch:
        return
    q_begin, q_len, first, kv_len, _ = request(b, True, meta, PAGE_SIZE, LAYOUT)
    result, row_lse, q_row, head, live = attend_block(
        q, sinks, (k, v, k_page, k_slot, v_page, v_slot), (kv_indices, num_pages), (custom_mask, mask_indptr),
        (q_token, q_head, k_head, v_head), heads, (score_scale, cap_into, cap_out_of, v_scale), fault, op,
        b, (q_begin, q_len, first, kv_len), unit - before, kv_head, 0, kv_len, True,
        PAGE_SIZE, LAYOUT, X, ROWS, TILE, DQ, DQ1, DQ2, DV, DVP, CAUSAL, WINDOW, SOFT_CAP, CUSTOM, SINKS, NEGATE,
        VECTORS, STAGES,
    )  # fmt: skip
    to = out + (q_row * out_token + head * out_head)[:, None]
    store_rows(to, result, lse + q_row * lse_token + head * lse_head, row_lse, live, DV, DVP)
