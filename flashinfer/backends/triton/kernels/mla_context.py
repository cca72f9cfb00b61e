# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The up-projection of an MLA context: a matrix product whose left rows are gathered from pages and whose result goes
straight to where attention reads it, keys and values apart, with the rope part beside the keys of each head.

A tile of the product is BLOCK_M tokens times BLOCK_N columns of one head's keys or values. Tiles of GROUP blocks of
tokens follow each other, so that the programs that run together share both operands in the last-level cache.
"""

import triton
import triton.language as tl

# How a weight is scaled: not at all, by a factor a row, by one for each 128 x 128 block.
ROW_SCALES = tl.constexpr(1)
BLOCK_SCALES = tl.constexpr(2)
SCALE_BLOCK = tl.constexpr(128)
# As kernels report (csrc_rocm/kernels/common/fault.h): kOpGatherKvBProj << 8 | kPageIdRange, kContextPages or
# kContextRows.
BAD_PAGE = tl.constexpr(9 << 8 | 4)
NO_PAGE = tl.constexpr(9 << 8 | 26)
NO_ROW = tl.constexpr(9 << 8 | 28)


@triton.jit
def request_of(token, prefix, requests, steps):
    """The last request whose first token is at or before `token`; `steps` halvings leave one."""
    low = tl.zeros_like(token)
    high = low + requests
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(prefix + middle) <= token
        low = tl.where(before & (middle > low), middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def entry_of(token, prefix, kv_indptr, requests, steps, FLAT: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Entries of tokens in `kv_indices`, one past the last entry of their requests, and the place inside the page."""
    if FLAT:
        # Pages of one token, and a page table that begins where the tokens do: the search would find the token.
        return token, token + 1, tl.zeros_like(token)
    request = request_of(token, prefix, requests, steps)
    position = token - tl.load(prefix + request)
    # Before the first request's tokens there are none, and a remainder would be a row before the page.
    entry = tl.where(position < 0, -1, tl.load(kv_indptr + request) + position // PAGE_SIZE)
    return entry, tl.load(kv_indptr + request + 1), position % PAGE_SIZE


@triton.jit
def say(fault, code, where, value, bound):
    if tl.atomic_cas(fault, tl.zeros_like(code), code) == 0:
        tl.store(fault + 1, where.to(tl.int64))
        tl.store(fault + 2, value.to(tl.int64))
        tl.store(fault + 3, bound.to(tl.int64))


@triton.jit
def report(fault, bad, token, entry, kv_indices, entries, pages, total):
    """Say of the last bad token of a block, unless something was said before, that it has no page or none that is."""
    worst = tl.max(tl.where(bad, token, -1), 0)
    if worst >= 0:
        place = tl.max(tl.where(bad & (token == worst), entry, -1), 0)
        known = (place >= 0) & (place < entries)
        code = tl.where(known, BAD_PAGE, NO_PAGE).to(tl.int64)
        page = tl.load(kv_indices + tl.where(known, place, 0), mask=known, other=0)
        say(fault, code, tl.where(known, place, worst), page, tl.where(known, pages, total))


@triton.jit
def tile_at(index, blocks, columns, GROUP: tl.constexpr):
    """Block of tokens and column of tiles: GROUP blocks take turns at each column."""
    group = index // (GROUP * columns)
    height = tl.minimum(blocks - group * GROUP, GROUP)
    inside = index - group * GROUP * columns
    return group * GROUP + inside % height, inside // height


@triton.jit
def multiply(
    left,  # pointers to the first BLOCK_K values of the tile's rows, [BLOCK_M, BLOCK_K]
    kv_scale,
    weight,
    weight_scale,
    w_row,  # [BLOCK_N]
    weight_row,
    scale_row,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHT: tl.constexpr,
    RANK: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N], all scales included."""
    BLOCK_K: tl.constexpr = left.shape[1]
    right = weight + w_row.to(tl.int64)[None, :] * weight_row + tl.arange(0, BLOCK_K)[:, None]
    acc = tl.zeros([left.shape[0], w_row.shape[0]], tl.float32)
    for k in range(0, RANK, BLOCK_K):
        # FP8 values are values of either 16-bit format: a cast loses nothing, and scales are for the sum.
        a = tl.load(left + k).to(dtype)
        b = tl.load(right + k).to(dtype)
        if WEIGHT == BLOCK_SCALES:
            factor = tl.load(weight_scale + w_row // SCALE_BLOCK * scale_row + k // SCALE_BLOCK)
            acc += tl.dot(a, b) * factor[None, :]
        else:
            acc = tl.dot(a, b, acc)
    if WEIGHT == ROW_SCALES:
        acc *= tl.load(weight_scale + w_row)[None, :]
    if SCALED:
        acc *= tl.load(kv_scale)
    return acc


@triton.jit
def store_rope(to, row, live, kv_scale, SCALED: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr):
    rope = tl.arange(0, ROPE_BLOCK)[None, :]
    there = live[:, None] & (rope < ROPE)
    value = tl.load(row + rope, mask=there, other=0.0)
    if SCALED:
        value = value.to(tl.float32) * tl.load(kv_scale)
    tl.store(to + rope, value.to(to.dtype.element_ty), mask=there)


@triton.jit
def pages_of(
    token,
    total,
    column,
    fault,
    kv_indptr,
    kv_indices,
    prefix,
    entries,
    pages,
    requests,
    steps,
    FLAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Page of each token, its place inside, and whether there is one."""
    known = token < total
    entry, end, slot = entry_of(tl.minimum(token, total - 1), prefix, kv_indptr, requests, steps, FLAT, PAGE_SIZE)
    found = known & (entry >= 0) & (entry < tl.minimum(end, entries))
    page = tl.load(kv_indices + entry, mask=found, other=-1).to(tl.int64)
    live = known & (page >= 0) & (page < pages)
    if column == 0:
        report(fault, known & (live == 0), token, tl.where(entry < end, entry, -1), kv_indices, entries, pages, total)
    return tl.where(live, page, 0), slot, live


@triton.jit
def gather_kv_b_proj(
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE]
    kv_scale,  # float32 [1]
    kv_indptr,  # [requests + 1]
    kv_indices,  # [entries]
    prefix,  # [requests + 1], tokens before each request
    weight,  # [heads * (NOPE + DV), RANK]
    weight_scale,  # float32 [heads * (NOPE + DV)] or [ceil(. / 128), ceil(RANK / 128)]
    k_out,  # [tokens, heads, NOPE + ROPE]
    v_out,  # [tokens, heads, DV]
    fault,  # int64 [4]
    entries,
    pages,
    cache_page,
    cache_slot,
    weight_row,
    scale_row,
    k_token,
    k_head,
    v_token,
    v_head,
    tokens,
    heads,
    requests,
    steps,
    FLAT: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    K_TILES: tl.constexpr = (NOPE + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = K_TILES + (DV + BLOCK_N - 1) // BLOCK_N
    dtype = k_out.dtype.element_ty
    last = tl.load(prefix + requests)
    total = tl.minimum(last, tokens).to(tl.int32)
    columns = heads * TILES
    blocks = tl.cdiv(total, BLOCK_M)
    # The grid is that of all rows of the result; a captured graph may have fewer to fill.
    if tl.program_id(0) >= blocks * columns:
        return
    if (tl.program_id(0) == 0) & (last > tokens):
        # Sums are tensors, also of an argument that is 1, which the compiler makes a constant.
        none = tl.zeros_like(last)
        say(fault, tl.full([], NO_ROW, tl.int64), none + requests, last, none + tokens)
    block, column = tile_at(tl.program_id(0), blocks, columns, GROUP)
    head = column // TILES
    part = column % TILES
    is_key = part < K_TILES
    width = tl.where(is_key, NOPE, DV)

    token = block * BLOCK_M + tl.arange(0, BLOCK_M)
    page, slot, live = pages_of(
        token, total, column, fault, kv_indptr, kv_indices, prefix, entries, pages, requests, steps, FLAT, PAGE_SIZE
    )
    row = kv_cache + (page * cache_page + slot.to(tl.int64) * cache_slot)[:, None]
    col = tl.where(is_key, part, part - K_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past a head's width the last column stands in: real memory, and never stored.
    w_row = head * (NOPE + DV) + tl.where(is_key, 0, NOPE) + tl.minimum(col, width - 1)
    left = row + tl.arange(0, BLOCK_K)[None, :]
    acc = multiply(left, kv_scale, weight, weight_scale, w_row, weight_row, scale_row, dtype, SCALED, WEIGHT, RANK)
    wide_head = head.to(tl.int64)
    to = tl.where(is_key, k_out + wide_head * k_head, v_out + wide_head * v_head)
    to_row = to + token.to(tl.int64)[:, None] * tl.where(is_key, k_token, v_token)
    mask = live[:, None]
    if NOPE % BLOCK_N != 0 or DV % BLOCK_N != 0:
        mask = mask & (col < width)[None, :]
    tl.store(to_row + col[None, :], acc.to(dtype), mask=mask)
    if ROPE > 0:
        beside = part == K_TILES - 1
        if beside:
            store_rope(to_row + NOPE, row + RANK, live, kv_scale, SCALED, ROPE, ROPE_BLOCK)
