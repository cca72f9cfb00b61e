# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's metadata, read where they lie: lengths, what is wrong with them, and who has which part of the work."""

import triton
import triton.language as tl

# Layouts of keys and values. DENSE is NHD and HND, which differ in strides only.
DENSE = tl.constexpr(0)
SHUFFLED = tl.constexpr(1)
RAGGED = tl.constexpr(2)
# flashinfer/core/faults.py.
PAGE_TABLE_SHORT = tl.constexpr(3)
PAGE_ID_RANGE = tl.constexpr(4)
INDPTR_ORDER = tl.constexpr(8)
QO_INDPTR_RANGE = tl.constexpr(12)
LAST_PAGE_RANGE = tl.constexpr(13)
KV_INDPTR_RANGE = tl.constexpr(14)
PIECES_SHORT = tl.constexpr(15)
NO_KEY = tl.constexpr(2147483647)


@triton.jit
def report(fault, op, code, where, value, bound):
    """As csrc_rocm/kernels/common/fault.h: the first report stays."""
    word = (op * 256 + code).to(tl.int64)
    old = tl.atomic_cas(fault, word * 0, word)
    if old == 0:
        tl.store(fault + 1, where.to(tl.int64))
        tl.store(fault + 2, value.to(tl.int64))
        tl.store(fault + 3, bound.to(tl.int64))


@triton.jit
def request(b, live, meta, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr):
    """First query, queries, first entry of the page table (or key), keys, and what is wrong, of one request or many.

    A request that contradicts its page table has no keys; one whose queries are nowhere has none.
    """
    qo_indptr, kv_indptr, last_page_len, tokens, bound = meta
    q_begin = tl.load(qo_indptr + b, live, 0).to(tl.int32)
    q_end = tl.load(qo_indptr + b + 1, live, 0).to(tl.int32)
    first = tl.load(kv_indptr + b, live, 0).to(tl.int32)
    end = tl.load(kv_indptr + b + 1, live, 0).to(tl.int32)
    wrong = tl.where((first < 0) | (end < first), INDPTR_ORDER, 0)
    kv_len = end - first
    if LAYOUT == RAGGED:
        wrong = tl.where((wrong == 0) & (end > bound), KV_INDPTR_RANGE, wrong)
    else:
        wrong = tl.where((wrong == 0) & (end > bound), PAGE_TABLE_SHORT, wrong)
        tail = tl.load(last_page_len + b, live, 0).to(tl.int32)
        wrong = tl.where((wrong == 0) & ((tail < 0) | (tail > PAGE_SIZE)), LAST_PAGE_RANGE, wrong)
        kv_len = tl.where(kv_len > 0, (kv_len - 1) * PAGE_SIZE + tail, 0)
    kv_len = tl.where(wrong == 0, kv_len, 0)
    lost = (q_begin < 0) | (q_end < q_begin) | (q_end > tokens)
    q_len = tl.where(lost, 0, q_end - q_begin)
    wrong = tl.where(lost, QO_INDPTR_RANGE, wrong)
    return q_begin, q_len, first, kv_len, wrong


@triton.jit
def units_of(q_len, kv_len, group, kv_heads, window, ROWS: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Blocks of rows in a request, first unit of keys that they see, and one past the last; at least one."""
    blocks = tl.cdiv(q_len * group, ROWS)
    first = kv_len * 0
    if WINDOW:
        first = tl.maximum(kv_len - q_len - window, 0) // UNIT
    return blocks, first, tl.maximum(tl.cdiv(kv_len, UNIT), first + 1)


@triton.jit
def amount(
    b, live, meta, heads, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Work of requests, in units of keys or, with SPLIT False, in blocks of rows."""
    group, kv_heads, window = heads
    _, q_len, _, kv_len, wrong = request(b, live, meta, PAGE_SIZE, LAYOUT)
    blocks, first, last = units_of(q_len, kv_len, group, kv_heads, window, ROWS, UNIT, WINDOW)
    if SPLIT:
        return blocks * kv_heads * (last - first), wrong
    return blocks, wrong


@triton.jit
def total_of(
    batch, meta, heads, fault, op, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Work of the batch. The first program also says what is wrong with its metadata."""
    total = 0
    for base in range(0, batch, BATCH):
        b = base + tl.arange(0, BATCH)
        n, wrong = amount(b, b < batch, meta, heads, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, SPLIT)
        total += tl.sum(n, 0)
        if tl.program_id(0) == 0:  # noqa: SIM102, and so below: compiled, not evaluated
            if tl.max(wrong, 0) > 0:
                where = tl.min(tl.where(wrong > 0, b, NO_KEY), 0)
                report_request(fault, op, where, meta, PAGE_SIZE, LAYOUT)
    return total


@triton.jit
def report_request(fault, op, b, meta, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr):
    """Say what is wrong with request `b`, as the host would."""
    qo_indptr, kv_indptr, last_page_len, tokens, bound = meta
    _, _, _, _, code = request(b, True, meta, PAGE_SIZE, LAYOUT)
    if code == QO_INDPTR_RANGE:
        report(fault, op, code, b, tl.load(qo_indptr + b + 1), tokens + b * 0)
    elif code == INDPTR_ORDER:
        report(fault, op, code, b, tl.load(kv_indptr + b), tl.load(kv_indptr + b + 1))
    elif code == LAST_PAGE_RANGE:
        report(fault, op, code, b, tl.load(last_page_len + b), PAGE_SIZE + b * 0)
    else:
        report(fault, op, code, b + 1, tl.load(kv_indptr + b + 1), bound + b * 0)


@triton.jit
def seek(
    unit, batch, meta, heads, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """The request that holds a unit of the batch's work (`batch` if none does), and the units before it."""
    found, before, run = 0, 0, 0
    for base in range(0, batch, BATCH):
        b = base + tl.arange(0, BATCH)
        n, _ = amount(b, b < batch, meta, heads, PAGE_SIZE, LAYOUT, ROWS, UNIT, WINDOW, SPLIT)
        past = (run + tl.cumsum(n, 0) <= unit) & (b < batch)
        found += tl.sum(past.to(tl.int32), 0)
        before += tl.sum(tl.where(past, n, 0), 0)
        run += tl.sum(n, 0)
    return found, before
