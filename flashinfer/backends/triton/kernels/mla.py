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
def nothing_yet(ROWS: tl.constexpr):
    """Maximum and sum of no keys."""
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def pages_of(pages, start, kv_begin, kv_end, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Page and slot of the keys of a tile.

    Past the end the last key stands in: real memory, finite values, and a weight of 0. Of no keys there is none.
    """
    key = tl.minimum(start + tl.arange(0, TILE), kv_end - 1)
    return tl.load(pages + key // PAGE_SIZE, key >= kv_begin, 0), key % PAGE_SIZE


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
    kv_indices, schedule,  # int32
    partial, partial_lse,  # float32 [slots * parts, ROWS, DV] and [slots * parts, ROWS]
    out,  # [tokens, heads, DV]
    lse,  # float32 [tokens, heads]
    q_nope_token, q_nope_head, q_pe_token, q_pe_head,
    ckv_page, ckv_slot, kpe_page, kpe_slot,
    out_token, out_head, lse_token, lse_head,
    heads, workers,
    score_scale, pe_scale, out_scale,  # sm_scale * ckv_scale * log2(e), kpe_scale / ckv_scale, ckv_scale
    PARTS: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr,  # of DV: what is loaded and multiplied at a time
    DR: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    worker = tl.program_id(0) // PARTS
    column = tl.arange(0, CHUNK)
    CHUNKS: tl.constexpr = DV // CHUNK
    for index in range(tl.load(schedule + worker), tl.load(schedule + worker + 1)):
        item = schedule + workers + 1 + MERGE_WORDS * workers + index * ITEM_WORDS
        q_row, token, head, live = rows_of(item, part, heads, ROWS)
        pages = kv_indices + tl.load(item + 3)
        kv_begin, kv_end = keys_of(item, part, heads, ROWS)
        q_at = q_nope + (q_row * q_nope_token + head * q_nope_head)[:, None] + column[None, :]
        q, acc = (), ()
        for c in tl.static_range(CHUNKS):
            q = q + (tl.load(q_at + c * CHUNK, live[:, None], 0.0),)
            acc = acc + (tl.zeros([ROWS, CHUNK], tl.float32),)
        if DR > 0:
            rope = tl.arange(0, DR)
            qr = tl.load(q_pe + (q_row * q_pe_token + head * q_pe_head)[:, None] + rope[None, :], live[:, None], 0.0)
        # One past the last key that a row sees; the last query sees the last key.
        seen = kv_end + tl.zeros([ROWS], tl.int32)
        if CAUSAL:
            seen = tl.minimum(seen, tl.load(item + 4) - tl.load(item + 2) + token + 1)
        top, total = nothing_yet(ROWS)
        # Read a tile ahead: a row's address then waits for nothing, and the copies of several tiles can be under way.
        page, place = pages_of(pages, kv_begin, kv_begin, kv_end, PAGE_SIZE, TILE)
        for start in range(kv_begin, kv_end, TILE):
            page_64 = page.to(tl.int64)
            k_at = ckv + (page_64 * ckv_page + place * ckv_slot)[:, None] + column[None, :]
            k = ()
            for c in tl.static_range(CHUNKS):
                k = k + (tl.load(k_at + c * CHUNK).to(q_nope.dtype.element_ty),)
            scores = tl.zeros([ROWS, TILE], tl.float32)
            if DR > 0:
                kr = tl.load(kpe + (page_64 * kpe_page + place * kpe_slot)[:, None] + rope[None, :])
                scores = tl.dot(qr, tl.trans(kr.to(q_nope.dtype.element_ty)), scores)
                if SCALED:
                    scores *= pe_scale
            page, place = pages_of(pages, start + TILE, kv_begin, kv_end, PAGE_SIZE, TILE)
            for c in tl.static_range(CHUNKS):
                scores = tl.dot(q[c], tl.trans(k[c]), scores)
            at = start + tl.arange(0, TILE)
            scores = tl.where(at[None, :] < seen[:, None], scores * score_scale, float("-inf"))
            weights, shrink, top, total = soften(scores, top, total)
            grown = ()
            for c in tl.static_range(CHUNKS):
                grown = grown + (tl.dot(weights.to(q_nope.dtype.element_ty), k[c], acc[c] * shrink[:, None]),)
            acc = grown
        share = tl.where(total > 0, out_scale / total, 0.0)
        row_lse = lse_of(top, total)
        slot = tl.load(item + 7)
        if slot < 0:
            to = out + (q_row * out_token + head * out_head)[:, None] + column[None, :]
            for c in tl.static_range(CHUNKS):
                tl.store(to + c * CHUNK, (acc[c] * share[:, None]).to(out.dtype.element_ty), live[:, None])
            tl.store(lse + q_row * lse_token + head * lse_head, row_lse, live)
        else:
            row = (slot * PARTS + part).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            for c in tl.static_range(CHUNKS):
                tl.store(
                    partial + row[:, None] * DV + column[None, :] + c * CHUNK, acc[c] * share[:, None], live[:, None]
                )
            tl.store(partial_lse + row, row_lse, live)


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

    top, total = nothing_yet(STEP)
    acc = tl.zeros([STEP, DV], tl.float32)
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
    tl.store(to, acc.to(out.dtype.element_ty), live[:, None])
    tl.store(lse + q_row * lse_token + head * lse_head, lse_of(top, total), live)
