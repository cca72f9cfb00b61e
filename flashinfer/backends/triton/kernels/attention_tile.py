# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A tile of keys and values against a block of query rows."""

import triton
import triton.language as tl

from flashinfer.backends.triton.kernels.attention_batch import RAGGED, SHUFFLED


@triton.jit
def soften(scores, scale, top, total, MASKED: tl.constexpr):
    """One step of the running softmax in base 2: weights, what older sums shrink by, new maximum and sum."""
    if MASKED:
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
    else:
        # The scale is not negative: it may wait for the subtraction, which makes one instruction of both.
        base = tl.maximum(top, tl.max(scores, 1) * scale)
        new_top = base
        weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def load_keys(
    k, k_row, d, DQ: tl.constexpr, END: tl.constexpr, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Dimensions `d`, up to END, of keys; those from DQ on are 0."""
    column = (d // X) * (PAGE_SIZE * X) + d % X if LAYOUT == SHUFFLED else d
    to_k = k + k_row[:, None] + column[None, :]
    return tl.load(to_k) if END <= DQ else tl.load(to_k, (d < DQ)[None, :], 0.0)


@triton.jit
def score(
    queries, k, k_row, DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr, TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """`q k^T` of a tile whose keys begin at `k_row`."""
    q1, q2 = queries
    k1 = load_keys(k, k_row, tl.arange(0, DQ1), DQ, DQ1, PAGE_SIZE, LAYOUT, X)
    scores = tl.dot(q1, tl.trans(k1.to(q1.dtype)))
    if DQ2 > 0:
        k2 = load_keys(k, k_row, DQ1 + tl.arange(0, DQ2), DQ, DQ1 + DQ2, PAGE_SIZE, LAYOUT, X)
        scores = tl.dot(q2, tl.trans(k2.to(q1.dtype)), scores)
    return scores


@triton.jit
def hide(scores, rows, at, WINDOW: tl.constexpr, CUSTOM: tl.constexpr):
    """-inf where a row does not see a key."""
    first_seen, last_seen, custom_mask, mask_bits = rows
    seen = at[None, :] <= last_seen[:, None]
    if WINDOW:
        seen = seen & (at[None, :] >= first_seen[:, None])
    if CUSTOM:
        # From a row's first byte on 32 bits suffice.
        bit = (mask_bits & 7).to(tl.int32)[:, None] + at[None, :]
        byte = tl.load((custom_mask + (mask_bits >> 3))[:, None] + (bit >> 3), seen, 0).to(tl.int32)
        seen = seen & (((byte >> (bit & 7)) & 1) != 0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def page_of(at, keys, worst, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Pages of keys, as an existing one where there is none, and their ids; past the last key its page stands in."""
    pages, last_key, _ = keys
    entry = tl.minimum(at, last_key) // PAGE_SIZE if MASKED else at // PAGE_SIZE
    # Without a sign a negative id is one too large.
    page = tl.load(pages + entry).to(worst.dtype)
    return existing(page, keys), page


@triton.jit
def existing(page, keys):
    """Ids without a sign, and in place of those that are too large the last page."""
    return tl.minimum(page, keys[2].to(page.dtype)).to(tl.int64)


@triton.jit
def load_runs(
    k, v, page, at, strides, dtype: tl.constexpr, PAGE_SIZE: tl.constexpr, X: tl.constexpr, TILE: tl.constexpr,
    RUN: tl.constexpr, DQ: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Keys `[DQ, TILE]` and values `[TILE, DV]` of shuffled pages, in runs of RUN tokens that begin with `at`.

    Loaded as they lie: a run is a stretch of memory for each X dimensions of K, and one for all of V. Tensors of more
    axes, tokens and dimensions apart, would give neighbouring lanes addresses far apart, in the cache (1.29 times the
    read floor) or, in another order, in shared memory (2.5 times).
    """
    k_page, v_page = strides
    place = at % PAGE_SIZE
    k_run = page * k_page + place * X
    v_run = page * v_page + place * DV
    chunk = tl.arange(0, DQ // X) * (PAGE_SIZE * X)
    k3 = tl.load(k + chunk[:, None, None] + k_run[None, :, None] + tl.arange(0, RUN * X)[None, None, :])
    v2 = tl.load(v + v_run[:, None] + tl.arange(0, RUN * DV)[None, :])
    keys = tl.reshape(tl.permute(tl.reshape(k3, (DQ // X, TILE, X)), (0, 2, 1)), (DQ, TILE))
    values = tl.reshape(tl.permute(tl.reshape(v2, (TILE // X, DV, X)), (0, 2, 1)), (TILE, DV))
    return keys.to(dtype), values.to(dtype)


@triton.jit
def ids_of_runs(run, start, end, keys, PAGE_SIZE: tl.constexpr):
    """Ids of the pages of a tile's runs, if the tile is before `end`; past the last key its page stands in."""
    pages, last_key, _ = keys
    return tl.load(pages + tl.minimum(start + run, last_key) // PAGE_SIZE, start + run * 0 < end, 0)


@triton.jit
def attend(
    state, queries, rows, keys, stored, scales, begin, end,
    PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, X: tl.constexpr, TILE: tl.constexpr, DQ: tl.constexpr,
    DQ1: tl.constexpr, DQ2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, CUSTOM: tl.constexpr, MASKED: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of a block of rows to the keys [begin, end) of a request; begin is a multiple of TILE.

    Not MASKED: every row sees every key, and end is a multiple of TILE as well.
    """
    top, total, acc, worst = state
    q1, last_key = queries[0], keys[1]
    k, v, k_page, k_slot, v_page, v_slot = stored
    score_scale, cap_into, cap_out_of = scales
    e = tl.arange(0, DVP)
    # Tokens of a page that lie in one tile: a power of 2, and all of them as a rule.
    RUN: tl.constexpr = min(PAGE_SIZE & -PAGE_SIZE, TILE)
    run = tl.arange(0, TILE // RUN) * RUN
    if VECTORS == 2:
        # Read a tile ahead, so that its copies wait for nothing (1.06 times the read floor, and 1.17 without).
        ids = ids_of_runs(run, begin, end, keys, PAGE_SIZE)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        if LAYOUT == RAGGED:
            # Past the end the last key stands in: real memory, and a weight of 0.
            token = (tl.minimum(at, last_key) if MASKED else at).to(tl.int64)
            k_row = token * k_slot
            v_row = token * v_slot
        elif VECTORS == 2:
            page = existing(ids.to(worst.dtype), keys)
            worst = tl.maximum(worst, ids.to(worst.dtype))
            ids = ids_of_runs(run, start + TILE, end, keys, PAGE_SIZE)
        else:
            page, ids = page_of(at, keys, worst, MASKED, PAGE_SIZE)
            worst = tl.maximum(worst, ids)
            place = at % PAGE_SIZE
            if LAYOUT == SHUFFLED:
                k_row = page * k_page + place * X
                v_row = page * v_page + (place // X) * (DV * X) + place % X
                if VECTORS:
                    # What the compiler cannot see, as pages come out of memory: X tokens are one vector of V.
                    v_row = tl.max_contiguous(tl.multiple_of(v_row, X), X)
            else:
                k_row = page * k_page + place * k_slot
                v_row = page * v_page + place * v_slot
        if VECTORS == 2:
            strides = k_page, v_page
            k_tile, values = load_runs(k, v, page, start + run, strides, q1.dtype, PAGE_SIZE, X, TILE, RUN, DQ, DV)
            scores = tl.dot(q1, k_tile)
        else:
            scores = score(queries, k, k_row, DQ, DQ1, DQ2, TILE, PAGE_SIZE, LAYOUT, X)
        if SOFT_CAP:
            # cap * tanh(score / cap), to base 2.
            scores = (2.0 * tl.sigmoid(cap_into * scores) - 1.0) * cap_out_of
        if MASKED:
            scores = hide(scores if SOFT_CAP else scores * score_scale, rows, at, WINDOW, CUSTOM)
        weights, shrink, top, total = soften(scores, 1.0 if SOFT_CAP else score_scale, top, total, MASKED)
        if VECTORS != 2:
            to_v = v + v_row[:, None] + (e * X if LAYOUT == SHUFFLED else e)[None, :]
            values = (tl.load(to_v) if DVP == DV else tl.load(to_v, (e < DV)[None, :], 0.0)).to(q1.dtype)
        if MASKED and LAYOUT != RAGGED:
            # What follows the last key in its page may be anything, NaN included.
            values = tl.where((at <= last_key)[:, None], values, 0.0)
        acc = tl.dot(weights.to(q1.dtype), values, acc * shrink[:, None])
    return top, total, acc, worst
