# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA attention over pages: `mla_split` attends to pieces of the keys, `mla_merge` joins the pieces of a row.

Rows of a request are its query tokens times the heads, token by token. All rows share the keys, so that a tile of
keys, loaded once, serves ROWS of them, be they 128 heads of one token or 16 heads of 4. Which program does what is in
the schedule (csrc_rocm/kernels/mla_plan.h): the grid does not depend on the batch.
"""

import triton
import triton.language as tl

# Words of a record, as in csrc_rocm/kernels/mla_plan.h.
ITEM_WORDS = tl.constexpr(8)
MERGE_WORDS = tl.constexpr(5)


@triton.jit
def rows_of(item, part, heads, ROWS: tl.constexpr):
    """Token in the batch, token in the request, head, and whether there is such a row, of the rows of a program."""
    row = tl.load(item + 1) + part * ROWS + tl.arange(0, ROWS)
    token = row // heads
    # Token times stride may pass 2^31.
    return (tl.load(item) + token).to(tl.int64), token, row % heads, token < tl.load(item + 2)


@triton.jit
def keys_of(item, part, heads, ROWS: tl.constexpr):
    """First key, and one past the last. A part beyond the request's last row has nothing to do."""
    begin = tl.load(item + 5)
    some = tl.load(item + 1) + part * ROWS < tl.load(item + 2) * heads
    return begin, tl.where(some, tl.load(item + 6), begin)


@triton.jit
def store_rows(to, result, lse_to, lse, live):
    tl.store(to, result.to(to.dtype.element_ty), live[:, None])
    tl.store(lse_to, lse, live)


@triton.jit
def nothing_yet(ROWS: tl.constexpr, DV: tl.constexpr):
    """Maximum, sum and weighted values of no keys."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DV], tl.float32)


@triton.jit
def soften(scores, top, total):
    """One step of the running softmax in base 2: weights, what older sums shrink by, new maximum and sum."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet: -inf minus -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def lse_of(top, total):
    """Base 2; a row that saw no key has -inf."""
    return tl.where(total > 0, top + tl.log2(total), float("-inf"))


@triton.jit
def mla_split(
    q_nope,  # [tokens, heads, DV]
    q_pe,  # [tokens, heads, DR]
    ckv,  # [pages, PAGE_SIZE, DV]
    kpe,  # [pages, PAGE_SIZE, DR]
    kv_indices,
    schedule,  # int32
    partial,  # float32 [slots * parts, ROWS, DV]
    partial_lse,  # float32 [slots * parts, ROWS]
    out,  # [tokens, heads, DV]
    lse,  # float32 [tokens, heads]
    q_nope_token,
    q_nope_head,
    q_pe_token,
    q_pe_head,
    ckv_page,
    ckv_slot,
    kpe_page,
    kpe_slot,
    out_token,
    out_head,
    lse_token,
    lse_head,
    score_scale,  # sm_scale * ckv_scale * log2(e)
    pe_scale,  # kpe_scale / ckv_scale
    out_scale,  # ckv_scale
    heads,
    workers,
    PARTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
):
    part = tl.program_id(0) % PARTS
    worker = tl.program_id(0) // PARTS
    value = tl.arange(0, DV)
    for index in range(tl.load(schedule + worker), tl.load(schedule + worker + 1)):
        item = schedule + workers + 1 + MERGE_WORDS * workers + index * ITEM_WORDS
        q_row, token, head, live = rows_of(item, part, heads, ROWS)
        pages = kv_indices + tl.load(item + 3)
        kv_begin, kv_end = keys_of(item, part, heads, ROWS)
        q = tl.load(q_nope + (q_row * q_nope_token + head * q_nope_head)[:, None] + value[None, :], live[:, None], 0.0)
        if DR > 0:
            rope = tl.arange(0, DR)
            qr = tl.load(q_pe + (q_row * q_pe_token + head * q_pe_head)[:, None] + rope[None, :], live[:, None], 0.0)
        # One past the last key that a row sees; the last query sees the last key.
        seen = kv_end + tl.zeros([ROWS], tl.int32)
        if CAUSAL:
            seen = tl.minimum(seen, tl.load(item + 4) - tl.load(item + 2) + token + 1)
        top, total, acc = nothing_yet(ROWS, DV)
        for start in range(kv_begin, kv_end, TILE):
            at = start + tl.arange(0, TILE)
            # Past the end the last key stands in: real memory, finite values, and a weight of 0.
            key = tl.minimum(at, kv_end - 1)
            page = tl.load(pages + key // PAGE_SIZE).to(tl.int64)
            place = key % PAGE_SIZE
            k = tl.load(ckv + (page * ckv_page + place * ckv_slot)[:, None] + value[None, :]).to(q.dtype)
            scores = tl.dot(q, tl.trans(k))
            if DR > 0:
                kr = tl.load(kpe + (page * kpe_page + place * kpe_slot)[:, None] + rope[None, :]).to(q.dtype)
                if SCALED:
                    scores += tl.dot(qr, tl.trans(kr)) * pe_scale
                else:
                    scores = tl.dot(qr, tl.trans(kr), scores)
            scores = tl.where(at[None, :] < seen[:, None], scores * score_scale, float("-inf"))
            weights, shrink, top, total = soften(scores, top, total)
            acc = tl.dot(weights.to(q.dtype), k, acc * shrink[:, None])
        result = acc * tl.where(total > 0, out_scale / total, 0.0)[:, None]
        row_lse = lse_of(top, total)
        slot = tl.load(item + 7)
        if slot < 0:
            to = out + (q_row * out_token + head * out_head)[:, None] + value[None, :]
            store_rows(to, result, lse + q_row * lse_token + head * lse_head, row_lse, live)
        else:
            row = (slot * PARTS + part).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            store_rows(partial + row[:, None] * DV + value[None, :], result, partial_lse + row, row_lse, live)


@triton.jit
def mla_merge(
    schedule,
    partial,
    partial_lse,
    out,
    lse,
    out_token,
    out_head,
    lse_token,
    lse_head,
    heads,
    workers,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,  # rows of a program
    DV: tl.constexpr,
):
    entry = schedule + workers + 1 + tl.program_id(0) * MERGE_WORDS
    pieces = tl.load(entry + 4)
    if pieces == 0:
        return
    q_begin = tl.load(entry)
    first = tl.load(entry + 3)
    inside = tl.program_id(1) * STEP + tl.arange(0, STEP)
    row = tl.load(entry + 1) + inside
    token = row // heads
    head = row % heads
    live = token < tl.load(entry + 2)
    value = tl.arange(0, DV)
    part = inside // ROWS

    top, total, acc = nothing_yet(STEP, DV)
    for piece in range(pieces):
        place = ((first + piece) * PARTS + part).to(tl.int64) * ROWS + inside % ROWS
        piece_lse = tl.load(partial_lse + place, mask=live, other=float("-inf"))
        result = tl.load(partial + place[:, None] * DV + value[None, :], mask=live[:, None], other=0.0)
        new_top = tl.maximum(top, piece_lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(piece_lse - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + result * weight[:, None]
        top = new_top
    acc = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    q_row = (q_begin + token).to(tl.int64)
    to = out + (q_row * out_token + head * out_head)[:, None] + value[None, :]
    store_rows(to, acc, lse + q_row * lse_token + head * lse_head, lse_of(top, total), live)
