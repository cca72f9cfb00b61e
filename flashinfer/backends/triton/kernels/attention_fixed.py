# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in pieces of a fixed size: sums of a request have the same order in every batch.

As in attention.py programs share the work evenly, but each piece of keys is summed up by itself, whoever does it, and
its result waits in memory of its own until all pieces of its rows are joined in order.
"""

import triton
import triton.language as tl

from flashinfer.backends.triton.kernels.attention import RECORD_WORDS, VOLATILE, join, store, store_rows
from flashinfer.backends.triton.kernels.attention_batch import PIECES_SHORT, report, request, seek, total_of, units_of
from flashinfer.backends.triton.kernels.attention_block import attend_block


@triton.jit(do_not_specialize=[*VOLATILE, "room"])
def attention_fixed(
    q, k, v, kv_indices, qo_indptr, kv_indptr, last_page_len, sinks, custom_mask, mask_indptr, fault, scratch, out, lse,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_token, out_head, lse_token, lse_head,
    group, kv_heads, score_scale, cap_into, cap_out_of, v_scale, window, batch, tokens, bound, num_pages, op, room,
    WORKERS: tl.constexpr, BATCH: tl.constexpr, UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    CUSTOM: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The arguments of `attention_split`; a unit is a piece.

    `scratch`, float32: `[room * ROWS, DV]` results of pieces, as many LSE, `[room, RECORD_WORDS]` int32, and the number
    of pieces. More pieces than `room` are reported, and their rows are not written.
    """
    worker = tl.program_id(0)
    meta = qo_indptr, kv_indptr, last_page_len, tokens, bound
    heads = group, kv_heads, window
    wanted = total_of(batch, meta, heads, fault, op, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, True, BATCH)
    all_units = tl.minimum(wanted, room).to(tl.int64)
    slots = room * ROWS
    records = (scratch + slots * (DV + 1)).to(tl.pointer_type(tl.int32))
    if worker == 0:
        tl.store(records + room * RECORD_WORDS, all_units.to(tl.int32))
        if wanted > room:
            report(fault, op, PIECES_SHORT, worker, wanted, room + worker)
    unit = (worker * all_units // WORKERS).to(tl.int32)
    stop = ((worker + 1) * all_units // WORKERS).to(tl.int32)
    b, before = seek(unit, batch, meta, heads, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, True, BATCH)
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
            kv_head = item % kv_heads
            block = item // kv_heads
            lo = (unit_0 + piece) * UNIT
            result, row_lse, q_row, head, live = attend_block(
                q, sinks, (k, v, k_page, k_slot, v_page, v_slot), (kv_indices, num_pages), (custom_mask, mask_indptr),
                (q_token, q_head, k_head, v_head), heads, (score_scale, cap_into, cap_out_of, v_scale), fault, op,
                b, (q_begin, q_len, first, kv_len), block, kv_head, lo, lo + UNIT, piece == 0,
                PAGE_SIZE, LAYOUT, X, ROWS, TILE, DQ, DQ1, DQ2, DV, DVP, CAUSAL, WINDOW, SOFT_CAP, CUSTOM, SINKS,
                NEGATE, VECTORS, STAGES,
            )  # fmt: skip
            record = records + unit * RECORD_WORDS
            if per_item == 1:
                to_out = out + (q_row * out_token + head * out_head)[:, None]
                store_rows(to_out, result, lse + q_row * lse_token + head * lse_head, row_lse, live, DV, DVP)
                tl.store(record, 0)
            else:
                place = unit * ROWS + tl.arange(0, ROWS)
                store(scratch + place[:, None] * DV, result, scratch + slots * DV + place, row_lse, live, DV, DVP)
                tl.store(record, tl.where((piece == 0) & (unit + per_item <= all_units), per_item, 0))
                tl.store(record + 1, q_begin)
                tl.store(record + 2, q_len)
                tl.store(record + 3, block)
                tl.store(record + 4, kv_head)
            unit += 1


@triton.jit(do_not_specialize=["room"])
def attention_fixed_merge(
    scratch, out, lse, out_token, out_head, lse_token, lse_head, group, room,
    WORKERS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Joins the pieces of every item that has more than one, STEP rows a program."""
    slots = room * ROWS
    records = (scratch + slots * (DV + 1)).to(tl.pointer_type(tl.int32))
    strides = out_token, out_head, lse_token, lse_head
    for unit in range(tl.program_id(0), tl.load(records + room * RECORD_WORDS), WORKERS):
        record = records + unit * RECORD_WORDS
        pieces = tl.load(record)
        if pieces > 0:
            join(record, pieces, slots, unit, scratch, out, lse, strides, group, ROWS, STEP, DV, DVP, 1, 0)
