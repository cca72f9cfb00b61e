# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Merging of attention states: rows are tokens times heads, STEP of them a program."""

import triton
import triton.language as tl


@triton.jit
def known(s):
    """A log-sum-exp; some kernels write +inf for "no keys"."""
    return tl.where(s == float("inf"), float("-inf"), s)


@triton.jit
def rows_of(tokens, heads, STEP: tl.constexpr):
    """Token and head of a program's rows, and whether there are such."""
    # Token times stride may pass 2^31, and so may tokens times heads.
    row = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    token = row // heads
    return token, row % heads, token < tokens


@triton.jit(do_not_specialize=["tokens", "heads", "mask_stride"])
def merge_two(
    v_a, s_a, v_b, s_b, mask, out, s_out,
    v_a_token, v_a_head, v_b_token, v_b_head, out_token, out_head,
    s_a_token, s_a_head, s_b_token, s_b_head, s_out_token, s_out_head,
    tokens, heads, mask_stride, D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`out` and `s_out` may be `v_a` and `s_a`: a row is read before it is written, and by one program."""
    token, head, live = rows_of(tokens, heads, STEP)
    if MASKED:
        live = live & (tl.load(mask + token * mask_stride, live, 0) != 0)
    a = known(tl.load(s_a + token * s_a_token + head * s_a_head, live, float("-inf")))
    b = known(tl.load(s_b + token * s_b_token + head * s_b_head, live, float("-inf")))
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp2(a - base), tl.exp2(b - base)
    total = weight_a + weight_b
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    d = tl.arange(0, DP)
    # A state without weight may hold anything, NaN included.
    in_a = (live & (weight_a > 0))[:, None] & (d < D)[None, :]
    in_b = (live & (weight_b > 0))[:, None] & (d < D)[None, :]
    of_a = tl.load(v_a + (token * v_a_token + head * v_a_head)[:, None] + d[None, :], in_a, 0.0).to(tl.float32)
    of_b = tl.load(v_b + (token * v_b_token + head * v_b_head)[:, None] + d[None, :], in_b, 0.0).to(tl.float32)
    merged = of_a * (weight_a * scale)[:, None] + of_b * (weight_b * scale)[:, None]
    to = out + (token * out_token + head * out_head)[:, None] + d[None, :]
    tl.store(to, merged.to(out.dtype.element_ty), live[:, None] & (d < D)[None, :])
    lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    tl.store(s_out + token * s_out_token + head * s_out_head, lse, live)


@triton.jit(do_not_specialize=["tokens", "heads", "states"])
def merge_many(
    v, s, out, s_out, v_token, v_state, v_head, s_token, s_state, s_head, out_token, out_head, s_out_token, s_out_head,
    tokens, heads, states, D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One state of `states`."""
    token, head, live = rows_of(tokens, heads, STEP)
    d = tl.arange(0, DP)
    top = tl.full([STEP], float("-inf"), tl.float32)
    total = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, DP], tl.float32)
    for state in range(states):
        lse = known(tl.load(s + token * s_token + state * s_state + head * s_head, live, float("-inf")))
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - base), tl.exp2(lse - base)
        inside = (live & (weight > 0))[:, None] & (d < D)[None, :]
        to = v + (token * v_token + state * v_state + head * v_head)[:, None] + d[None, :]
        acc = acc * shrink[:, None] + tl.load(to, inside, 0.0).to(tl.float32) * weight[:, None]
        total = total * shrink + weight
        top = new_top
    acc = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    to_out = out + (token * out_token + head * out_head)[:, None] + d[None, :]
    tl.store(to_out, acc.to(out.dtype.element_ty), live[:, None] & (d < D)[None, :])
    row_lse = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    tl.store(s_out + token * s_out_token + head * s_out_head, row_lse, live)
