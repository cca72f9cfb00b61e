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

LOG2E = tl.constexpr(1.4426950408889634)
RECORD_WORDS = tl.constexpr(8)  # flashinfer/core/attention_work.py
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
NO_KEY = tl.constexpr(2147483647)
# They change from call to call, and nothing is gained by kernels for each kind.
VOLATILE = ["window", "batch", "tokens", "bound", "num_pages", "op"]


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
def capped(scores, cap_scales):
    """`cap * tanh(scores / cap)`, to base 2."""
    into, out_of = cap_scales
    return (2.0 * tl.sigmoid(2.0 * into * scores) - 1.0) * out_of


@triton.jit
def load_keys(
    k, k_row, d, DQ: tl.constexpr, END: tl.constexpr, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Dimensions `d`, up to END, of keys; those from DQ on are 0."""
    column = (d // X) * (PAGE_SIZE * X) + d % X if LAYOUT == SHUFFLED else d
    to_k = k + k_row[:, None] + column[None, :]
    return tl.load(to_k) if END <= DQ else tl.load(to_k, (d < DQ)[None, :], 0.0)


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
    q1, q2, quarters = queries
    first_seen, last_seen, custom_mask, mask_bits = rows
    pages, last_key, last_page = keys
    k, v, k_page, k_slot, v_page, v_slot = stored
    score_scale, cap_into, cap_out_of = scales
    e = tl.arange(0, DVP)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        at = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        if LAYOUT == RAGGED:
            # Past the end the last key stands in: real memory, and a weight of 0.
            token = (tl.minimum(at, last_key) if MASKED else at).to(tl.int64)
            k_row = token * k_slot
            v_row = token * v_slot
        else:
            entry = tl.minimum(at, last_key) // PAGE_SIZE if MASKED else at // PAGE_SIZE
            # Without a sign a negative id is one too large.
            page = tl.load(pages + entry).to(worst.dtype)
            worst = tl.maximum(worst, page)
            page = tl.minimum(page, last_page.to(worst.dtype)).to(tl.int64)
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
            qa, qb, qc, qd = quarters
            QUARTER: tl.constexpr = DQ1 // 4
            d = tl.arange(0, QUARTER)
            ka = load_keys(k, k_row, d, DQ, QUARTER, PAGE_SIZE, LAYOUT, X)
            scores = tl.dot(qa, tl.trans(ka.to(q1.dtype)))
            kb = load_keys(k, k_row, QUARTER + d, DQ, 2 * QUARTER, PAGE_SIZE, LAYOUT, X)
            scores = tl.dot(qb, tl.trans(kb.to(q1.dtype)), scores)
            kc = load_keys(k, k_row, 2 * QUARTER + d, DQ, 3 * QUARTER, PAGE_SIZE, LAYOUT, X)
            scores = tl.dot(qc, tl.trans(kc.to(q1.dtype)), scores)
            kd = load_keys(k, k_row, 3 * QUARTER + d, DQ, DQ1, PAGE_SIZE, LAYOUT, X)
            scores = tl.dot(qd, tl.trans(kd.to(q1.dtype)), scores)
        elif VECTORS == 1:
            # Neighbouring lanes take neighbouring tokens, whose vectors of keys lie side by side.
            chunk = tl.arange(0, DQ1 // X) * (PAGE_SIZE * X)
            k3 = tl.load(k + chunk[:, None, None] + k_row[None, :, None] + tl.arange(0, X)[None, None, :])
            scores = tl.dot(q1, tl.reshape(tl.permute(k3, (0, 2, 1)), (DQ1, TILE)).to(q1.dtype))
        else:
            k1 = load_keys(k, k_row, tl.arange(0, DQ1), DQ, DQ1, PAGE_SIZE, LAYOUT, X)
            scores = tl.dot(q1, tl.trans(k1.to(q1.dtype)))
        if DQ2 > 0:
            k2 = load_keys(k, k_row, DQ1 + tl.arange(0, DQ2), DQ, DQ1 + DQ2, PAGE_SIZE, LAYOUT, X)
            scores = tl.dot(q2, tl.trans(k2.to(q1.dtype)), scores)
        if SOFT_CAP:
            # cap * tanh(score / cap), to base 2.
            scores = (2.0 * tl.sigmoid(cap_into * scores) - 1.0) * cap_out_of
        if MASKED:
            scores = scores if SOFT_CAP else scores * score_scale
            seen = at[None, :] <= last_seen[:, None]
            if WINDOW:
                seen = seen & (at[None, :] >= first_seen[:, None])
            if CUSTOM:
                # From a row's first byte on 32 bits suffice.
                bit = (mask_bits & 7).to(tl.int32)[:, None] + at[None, :]
                byte = tl.load((custom_mask + (mask_bits >> 3))[:, None] + (bit >> 3), seen, 0).to(tl.int32)
                seen = seen & (((byte >> (bit & 7)) & 1) != 0)
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, top, total = soften(scores, 1.0 if SOFT_CAP else score_scale, top, total, MASKED)
        if VECTORS == 1:
            # A vector of V is X tokens of one dimension.
            some = start + tl.arange(0, TILE // X) * X
            entry = tl.minimum(some, last_key) // PAGE_SIZE if MASKED else some // PAGE_SIZE
            page = tl.minimum(tl.load(pages + entry).to(worst.dtype), last_page.to(worst.dtype)).to(tl.int64)
            v_row = page * v_page + (some % PAGE_SIZE) * DV
            v3 = tl.load(v + v_row[:, None, None] + (e * X)[None, :, None] + tl.arange(0, X)[None, None, :])
            values = tl.reshape(tl.permute(v3, (0, 2, 1)), (TILE, DVP)).to(q1.dtype)
        else:
            to_v = v + v_row[:, None] + (e * X if LAYOUT == SHUFFLED else e)[None, :]
            values = (tl.load(to_v) if DVP == DV else tl.load(to_v, (e < DV)[None, :], 0.0)).to(q1.dtype)
        if MASKED and LAYOUT != RAGGED:
            # What follows the last key in its page may be anything, NaN included.
            values = tl.where((at <= last_key)[:, None], values, 0.0)
        acc = tl.dot(weights.to(q1.dtype), values, acc * shrink[:, None])
    return top, total, acc, worst


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
    d1 = tl.arange(0, DQ1)
    to_q = q + (q_row * q_token + head * q_head)[:, None]
    q1 = tl.load(to_q + d1[None, :], live[:, None] & (d1 < DQ)[None, :], 0.0)
    q1 = -q1 if NEGATE else q1
    q2 = q1
    if DQ2 > 0:
        d2 = DQ1 + tl.arange(0, DQ2)
        q2 = tl.load(to_q + d2[None, :], live[:, None] & (d2 < DQ)[None, :], 0.0)
        q2 = -q2 if NEGATE else q2
    quarters = q1, q1, q1, q1
    if VECTORS == 2:
        d = tl.arange(0, DQ1 // 4)[None, :]
        qa = tl.load(to_q + d, live[:, None], 0.0)
        qb = tl.load(to_q + (DQ1 // 4 + d), live[:, None], 0.0)
        qc = tl.load(to_q + (DQ1 // 2 + d), live[:, None], 0.0)
        qd = tl.load(to_q + (3 * DQ1 // 4 + d), live[:, None], 0.0)
        quarters = (-qa, -qb, -qc, -qd) if NEGATE else (qa, qb, qc, qd)

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
    unsigned = tl.uint64 if kv_indices.dtype.element_ty == tl.int64 else tl.uint32
    state = top, total, tl.zeros([ROWS, DVP], tl.float32), tl.zeros([TILE], unsigned)
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
            state, (q1, q2, quarters), rows, keys, into, by, begin, edge,
            PAGE_SIZE, LAYOUT, X, TILE, DQ, DQ1, DQ2, DV, DVP, SOFT_CAP, WINDOW, CUSTOM, False, VECTORS, STAGES,
        )  # fmt: skip
    state = attend(
        state, (q1, q2, quarters), rows, keys, into, by, edge, end,
        PAGE_SIZE, LAYOUT, X, TILE, DQ, DQ1, DQ2, DV, DVP, SOFT_CAP, WINDOW, CUSTOM, True, VECTORS, STAGES,
    )  # fmt: skip
    top, total, acc, worst = state
    result = acc * tl.where(total > 0, v_scale / total, 0.0)[:, None]
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    if LAYOUT != RAGGED:  # noqa: SIM102
        if (tl.max(worst, 0) >= num_pages.to(unsigned)) & (end > begin):
            # Nothing of the request is to be believed, and what stood in for the page may have been NaN.
            bad = first_bad_page(pages, begin // PAGE_SIZE, tl.cdiv(end, PAGE_SIZE), num_pages, 64)
            report(fault, op, PAGE_ID_RANGE, first + bad, tl.load(pages + bad), num_pages + bad * 0)
            lse = tl.full([ROWS], float("inf"), tl.float32)
    return result, lse, q_row, head, live


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
    q,  # [tokens, heads, DQ]
    k,
    v,
    kv_indices,
    qo_indptr,
    kv_indptr,
    last_page_len,
    sinks,  # float32 [heads]
    custom_mask,  # uint8
    mask_indptr,
    fault,  # int64 [4]
    scratch,  # float32: [2 * WORKERS * ROWS, DV] results, as many LSE, and [WORKERS, RECORD_WORDS] int32
    out,  # [tokens, heads, DV]
    lse,  # float32 [tokens, heads]
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_token, out_head, lse_token, lse_head,
    group,
    kv_heads,
    score_scale,  # of q k^T to base 2
    cap_into,
    cap_out_of,
    v_scale,
    window,
    batch,
    tokens,
    bound,  # entries of kv_indices, or keys
    num_pages,
    op,
    WORKERS: tl.constexpr, BATCH: tl.constexpr, UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, LAYOUT: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DQ: tl.constexpr, DQ1: tl.constexpr, DQ2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    CUSTOM: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each worker takes its share of the batch's units: the end of an item, whole ones, the beginning of another."""
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
        slot = 2 * (worker + piece) + (1 if piece == 0 else 0)
        place = slot * ROWS + inside
        piece_lse = tl.load(scratch + slots * DV + place, live, float("-inf"))
        lost = tl.where(piece_lse == float("inf"), 1, lost)
        result = tl.load(scratch + place[:, None] * DV + e[None, :], live[:, None] & (e < DV)[None, :], 0.0)
        new_top = tl.maximum(top, piece_lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(piece_lse - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + result * weight[:, None]
        top = new_top
    acc = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    row_lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    row_lse = tl.where(lost > 0, float("inf"), row_lse)
    to = out + (q_row * out_token + head * out_head)[:, None]
    store_rows(to, acc, lse + q_row * lse_token + head * lse_head, row_lse, live, DV, DVP)


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
