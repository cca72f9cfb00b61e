# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that the attention and merge ops must refuse, as in bad.py."""

from __future__ import annotations

import torch

from rocm_tests.contract.spoil import Change, index_vectors, last_strided, meta

PAGED, RAGGED = "paged_attention", "ragged_attention"
STATE, IN_PLACE, STATES = "merge_state", "merge_state_in_place", "merge_states"
SIX = torch.zeros(6)
MASK = {"custom_mask": torch.zeros(8, dtype=torch.uint8), "mask_indptr": torch.zeros(4, dtype=torch.int32)}


def options(op: str) -> list[tuple[str, dict[str, Change], str]]:
    """What both ops end with. The sample: 6 rows of 6 heads of 32 float32 over 2 KV heads, 3 requests."""
    return [
        (op, {"q": lambda t: t[0]}, "q must be [tokens, heads, head_dim], got float32[6, 32] on cpu"),
        (op, {"q": lambda t: t[..., :0]}, "q must be of at least one head, and rows that are not empty, got [6, 6, 0]"),
        (
            op,
            {"q": lambda t: t.int()},
            "q must be a floating-point tensor of 16 bits or more, got int32[6, 6, 32] on cpu",
        ),
        (
            op,
            {"q": last_strided},
            "q must be contiguous in its last dimension, got stride (384, 64, 2); pass q.contiguous()",
        ),
        (op, {"causal": "no"}, "causal must be True or False, got 'no'"),
        (op, {"sm_scale": "x"}, "sm_scale must be a number, got 'x'"),
        (op, {"sm_scale": float("nan")}, "sm_scale must be finite, got nan"),
        (op, {"window_left": -2}, "window_left must be an integer from -1 to 2147483647, got -2"),
        (op, {"window_left": 2**31}, "window_left must be an integer from -1 to 2147483647, got 2147483648"),
        (op, {"logits_soft_cap": -1.0}, "logits_soft_cap must be positive, or 0 for none, got -1.0"),
        (op, {"k_scale": 0.0}, "k_scale must be positive, got 0.0"),
        (op, {"v_scale": -1.0}, "v_scale must be positive, got -1.0"),
        (op, {"max_q_len": -1}, "max_q_len must be an integer from 0 to 2147483647, got -1"),
        (op, {"max_kv_len": 2**40}, "max_kv_len must be an integer from 0 to 2147483647, got 1099511627776"),
        (op, {"split_size": -1}, "split_size must be an integer from 0 to 2147483647, got -1"),
        (op, {"sinks": SIX[:5]}, "sinks must be contiguous float32[6] on cpu, got float32[5] on cpu"),
        (op, {"sinks": SIX.half()}, "sinks must be contiguous float32[6] on cpu, got float16[6] on cpu"),
        (op, {"sinks": meta(SIX)}, "sinks must be contiguous float32[6] on cpu, got float32[6] on meta"),
        (
            op,
            {"mask_indptr": MASK["mask_indptr"]},
            "custom_mask and mask_indptr must be given together, got one of them",
        ),
        (
            op,
            {"custom_mask": MASK["custom_mask"]},
            "custom_mask and mask_indptr must be given together, got one of them",
        ),
        (
            op,
            {**MASK, "custom_mask": torch.zeros(8, dtype=torch.bool)},
            "custom_mask must be uint8[bytes] on cpu, 8 keys to a byte, got bool[8] on cpu",
        ),
        (
            op,
            {**MASK, "custom_mask": torch.zeros(8, dtype=torch.uint8)[::2]},
            "custom_mask must be contiguous, got stride (2,)",
        ),
        (
            op,
            {**MASK, "mask_indptr": torch.zeros(3, dtype=torch.int32)},
            "mask_indptr must be of length 4, one more than there are requests, got 3",
        ),
        (
            op,
            {**MASK, "mask_indptr": torch.zeros(4)},
            "mask_indptr must be int32 or int64, got float32[4] on cpu; pass mask_indptr.int()",
        ),
        (op, {"scratch": SIX.half()}, "scratch must be contiguous float32[elements] on cpu, got float16[6] on cpu"),
        (
            op,
            {"scratch": torch.zeros(2, 3)},
            "scratch must be contiguous float32[elements] on cpu, got float32[2, 3] on cpu",
        ),
        (op, {"out": last_strided}, f"out must be contiguous in its last dimension, got stride {STRIDES[op]}"),
        (op, {"lse": lambda t: t.half()}, "lse must be float32[6, 6] on cpu, got float16[6, 6] on cpu"),
        (op, {"lse": lambda t: t[:5]}, "lse must be float32[6, 6] on cpu, got float32[5, 6] on cpu"),
    ]


STRIDES = {PAGED: (384, 64, 2), RAGGED: (288, 48, 2)}
# The sample: 40 pages of 16 tokens of 2 heads of 32 float32, NHD.
BAD_PAGED: list[tuple[str, dict[str, Change], str]] = [
    *index_vectors(PAGED, ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")),
    *options(PAGED),
    (PAGED, {"q": lambda t: t[:, :5]}, "q must be of heads divisible by the cache's 2, got 5"),
    (PAGED, {"kv_layout": "DNH"}, "kv_layout must be one of ('NHD', 'HND', 'SHUFFLED'), got 'DNH'"),
    (PAGED, {"kv_layout": "SHUFFLED"}, "k_cache must be 5-D for SHUFFLED, got float32[40, 16, 2, 32] on cpu"),
    (PAGED, {"k_cache": lambda t: t[..., :16]}, "k_cache must be of q's head dimension 32, got 16"),
    (PAGED, {"v_cache": lambda t: t[:39]}, "v_cache must be [40, 16, 2, head_dim_vo], got [39, 16, 2, 32]"),
    (
        PAGED,
        {"k_cache": lambda t: t.half()},
        "k_cache must be of q's dtype torch.float32 or FP8 (E4M3), got torch.float16",
    ),
    (
        PAGED,
        {"v_cache": lambda t: t.to(torch.float8_e4m3fn)},
        "v_cache must be of k_cache's dtype torch.float32, got torch.float8_e4m3fn",
    ),
    (PAGED, {"k_cache": meta}, "k_cache must be of q's device cpu, got meta"),
    (
        PAGED,
        {"k_cache": last_strided},
        "k_cache must be contiguous in its last dimension, got stride (2048, 128, 64, 2)",
    ),
    (PAGED, {"qo_indptr": lambda t: t[:3]}, "qo_indptr must be of length 4, one more than kv_last_page_len, got 3"),
    (PAGED, {"out": lambda t: t[:5]}, "out must be float32[6, 6, 32] on cpu, got float32[5, 6, 32] on cpu"),
    (
        PAGED,
        {"k_cache": lambda t: t[:, :0], "v_cache": lambda t: t[:, :0]},
        "k_cache must be of a page_size of at least 1, got [40, 0, 2, 32]",
    ),
    (PAGED, {"v_cache": lambda t: t[..., :0]}, "v_cache must be of rows that are not empty, got [40, 16, 2, 0]"),
]
# The sample: 18 keys of 2 heads of 32 float32, values of 24.
BAD_RAGGED: list[tuple[str, dict[str, Change], str]] = [
    *index_vectors(RAGGED, ("qo_indptr", "kv_indptr")),
    *options(RAGGED),
    (RAGGED, {"q": lambda t: t[:, :5]}, "q must be of heads divisible by k's 2, got 5"),
    (RAGGED, {"k": lambda t: t[0]}, "k must be 3-D [tokens, num_kv_heads, head_dim], got float32[2, 32] on cpu"),
    (RAGGED, {"k": lambda t: t[..., :16]}, "k must be of q's head dimension 32, got 16"),
    (RAGGED, {"v": lambda t: t[1:]}, "v must be [18, 2, head_dim_vo] as k, got [17, 2, 24]"),
    (RAGGED, {"v": lambda t: t[..., :0]}, "v must be [18, 2, head_dim_vo] as k, got [18, 2, 0]"),
    (RAGGED, {"v": lambda t: t.half()}, "v must be of q's dtype torch.float32 or FP8 (E4M3), got torch.float16"),
    (RAGGED, {"k": meta}, "k must be of q's device cpu, got meta"),
    (RAGGED, {"kv_indptr": lambda t: t[:3]}, "kv_indptr must be of qo_indptr's length 4, got 3"),
    (RAGGED, {"out": lambda t: t[:5]}, "out must be float32[6, 6, 24] on cpu, got float32[5, 6, 24] on cpu"),
]
# The samples: 3 tokens, 2 heads of 32 float32; 3 states of each.
BAD_MERGE: list[tuple[str, dict[str, Change], str]] = [
    (STATE, {"v_a": lambda t: t[0]}, "v_a must be [tokens, heads, head_dim], got float32[2, 32] on cpu"),
    (
        STATE,
        {"v_a": lambda t: t.int()},
        "v_a must be a floating-point tensor of 16 bits or more, got int32[3, 2, 32] on cpu",
    ),
    (
        STATE,
        {"v_a": last_strided},
        "v_a must be contiguous in its last dimension, got stride (128, 64, 2); pass v_a.contiguous()",
    ),
    (STATE, {"v_b": lambda t: t[1:]}, "v_b must be float32[3, 2, 32] on cpu, got float32[2, 2, 32] on cpu"),
    (STATE, {"v_b": lambda t: t.half()}, "v_b must be float32[3, 2, 32] on cpu, got float16[3, 2, 32] on cpu"),
    (
        STATE,
        {"v_b": last_strided},
        "v_b must be contiguous in its last dimension, got stride (128, 64, 2); pass v_b.contiguous()",
    ),
    (STATE, {"s_a": lambda t: t.T}, "s_a must be float32[3, 2] on cpu, got float32[2, 3] on cpu"),
    (STATE, {"s_b": lambda t: t.double()}, "s_b must be float32[3, 2] on cpu, got float64[3, 2] on cpu"),
    (STATE, {"s_b": meta}, "s_b must be float32[3, 2] on cpu, got float32[3, 2] on meta"),
    (STATE, {"out": lambda t: t[..., :16]}, "out must be float32[3, 2, 32] on cpu, got float32[3, 2, 16] on cpu"),
    (STATE, {"s_out": lambda t: t.half()}, "s_out must be float32[3, 2] on cpu, got float16[3, 2] on cpu"),
    (IN_PLACE, {"v": lambda t: t[0]}, "v must be [tokens, heads, head_dim], got float32[2, 32] on cpu"),
    (IN_PLACE, {"s": lambda t: t.half()}, "s must be float32[3, 2] on cpu, got float16[3, 2] on cpu"),
    (IN_PLACE, {"v_other": lambda t: t[1:]}, "v_other must be float32[3, 2, 32] on cpu, got float32[2, 2, 32] on cpu"),
    (IN_PLACE, {"s_other": lambda t: t[1:]}, "s_other must be float32[3, 2] on cpu, got float32[2, 2] on cpu"),
    (IN_PLACE, {"mask": torch.zeros(2)}, "mask must be bool or uint8 [3] on cpu, got float32[2] on cpu"),
    (STATES, {"v": lambda t: t[0]}, "v must be [tokens, states, heads, head_dim], got float32[3, 2, 32] on cpu"),
    (STATES, {"s": lambda t: t[1:]}, "s must be float32[3, 3, 2] on cpu, got float32[2, 3, 2] on cpu"),
    (STATES, {"out": lambda t: t.half()}, "out must be float32[3, 2, 32] on cpu, got float16[3, 2, 32] on cpu"),
    (STATES, {"s_out": lambda t: t[1:]}, "s_out must be float32[3, 2] on cpu, got float32[2, 2] on cpu"),
]
BAD_ATTENTION = [*BAD_PAGED, *BAD_RAGGED, *BAD_MERGE]
