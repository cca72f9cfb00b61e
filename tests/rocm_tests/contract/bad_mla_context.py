# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that the ops of an MLA prefill's context must refuse, as in bad.py."""

from __future__ import annotations

import torch

from rocm_tests.contract.spoil import Change, index_vectors, last_strided, meta

CONCAT, GATHER, INDICES = "concat_mla_k", "gather_kv_b_proj", "mla_context_indices"
FP8 = torch.float8_e4m3fn

# The sample: 6 tokens, 3 heads of 24 + 16 bfloat16.
BAD_CONCAT: list[tuple[str, dict[str, Change], str]] = [
    (CONCAT, {"k": lambda t: t[0]}, "k must be 3-D [tokens, heads, dim], got bfloat16[3, 40] on cpu"),
    (CONCAT, {"k_rope": lambda t: t[:, 0]}, "k_rope must be 3-D [tokens, heads, dim], got bfloat16[6, 16] on cpu"),
    (CONCAT, {"k_nope": last_strided}, "k_nope must be contiguous in its last dimension, got stride (144, 48, 2)"),
    (CONCAT, {"k": lambda t: t.float()}, "k must be bfloat16, float16 or an 8-bit float, got float32[6, 3, 40] on cpu"),
    (
        CONCAT,
        {"k_nope": lambda t: t.half()},
        "k_nope must be of k's dtype and device, torch.bfloat16 on cpu, got float16[6, 3, 24] on cpu",
    ),
    (
        CONCAT,
        {"k_rope": meta},
        "k_rope must be of k's dtype and device, torch.bfloat16 on cpu, got bfloat16[6, 1, 16] on meta",
    ),
    (
        CONCAT,
        {"k_nope": lambda t: t[..., :20]},
        "k_nope must be of a last dimension that is a multiple of 8, got [6, 3, 20]",
    ),
    (
        CONCAT,
        {"k_rope": lambda t: t[..., :0]},
        "k_rope must be of a last dimension that is a multiple of 8, got [6, 1, 0]",
    ),
    (CONCAT, {"k": lambda t: t[:, :0]}, "k must be of at least one head, got [6, 0, 40]"),
    (
        CONCAT,
        {"k": lambda t: t[..., :32]},
        "k must be of rows of 40, those of k_nope and k_rope together, got [6, 3, 32]",
    ),
    (CONCAT, {"k_nope": lambda t: t[1:]}, "k_nope must be [6, 3, 24] as k, got [5, 3, 24]"),
    (
        CONCAT,
        {"k_rope": lambda t: t.expand(-1, 3, -1)},
        "k_rope must be [6, 1, 16], one row for all heads, got [6, 3, 16]",
    ),
]

# Keys and a part in one memory: a part that begins elsewhere than it is written to, keys of other tokens, and rope
# that is some head's.
KEYS = torch.zeros(8, 3, 64, dtype=torch.bfloat16)
APART = "outside of k, which is written while it is read, got memory that both have; pass a copy"
BAD_CONCAT += [
    (CONCAT, {"k": KEYS[:6, :, :40], "k_nope": KEYS[:6, :, 16:40]}, f"k_nope must be {APART}"),
    (CONCAT, {"k": KEYS[:6, :, :40], "k_nope": KEYS[1:7, :, :24]}, f"k_nope must be {APART}"),
    (CONCAT, {"k": KEYS[:6, :, :40], "k_nope": KEYS[:6, :, 32:56]}, f"k_nope must be {APART}"),
    (CONCAT, {"k": KEYS[:6, :, :40], "k_rope": KEYS[:6, :1, 24:40]}, f"k_rope must be {APART}"),
    (CONCAT, {"k": KEYS[2:, :, 24:], "k_rope": KEYS[:6, 2:, 48:]}, f"k_rope must be {APART}"),
]

# The sample: 54 tokens, 3 heads of 16 + 8 and 24 float32, rank 64, 40 pages of 16 tokens.
BAD_GATHER: list[tuple[str, dict[str, Change], str]] = [
    (
        GATHER,
        {"kv_cache": lambda t: t.flatten(0, 1)},
        "kv_cache must be 3-D [pages, page_size, kv_lora_rank + rope_dim], got float32[640, 72] on cpu",
    ),
    (
        GATHER,
        {"k_out": lambda t: t[0]},
        "k_out must be 3-D [tokens, heads, nope_dim + rope_dim], got float32[3, 24] on cpu",
    ),
    (GATHER, {"v_out": lambda t: t[0]}, "v_out must be 3-D [tokens, heads, v_dim], got float32[3, 24] on cpu"),
    (
        GATHER,
        {"kv_b_proj_weight": lambda t: t.view(3, 40, 64)},
        "kv_b_proj_weight must be 2-D [heads * (nope_dim + v_dim), kv_lora_rank], got float32[3, 40, 64] on cpu",
    ),
    (GATHER, {"kv_b_proj_weight": meta}, "kv_b_proj_weight must be on cpu, got meta"),
    (
        GATHER,
        {"kv_cache": last_strided},
        "kv_cache must be contiguous in its last dimension, got stride (2304, 144, 2)",
    ),
    (GATHER, {"v_out": last_strided}, "v_out must be contiguous in its last dimension, got stride (144, 48, 2)"),
    (
        GATHER,
        {"k_out": lambda t: t.to(FP8)},
        "k_out must be a floating-point tensor of 16 bits or more, got float8_e4m3fn[54, 3, 24] on cpu",
    ),
    (
        GATHER,
        {"v_out": lambda t: t[1:]},
        "v_out must be of k_out's tokens, heads and dtype, float32[54, 3, 24] on cpu, got float32[53, 3, 24] on cpu",
    ),
    (
        GATHER,
        {"v_out": lambda t: t.half()},
        "v_out must be of k_out's tokens, heads and dtype, float32[54, 3, 24] on cpu, got float16[54, 3, 24] on cpu",
    ),
    (
        GATHER,
        {"kv_cache": lambda t: t.half()},
        "kv_cache must be of k_out's dtype torch.float32 or FP8 (E4M3), got torch.float16",
    ),
    (
        GATHER,
        {"kv_b_proj_weight": lambda t: t.bfloat16()},
        "kv_b_proj_weight must be of k_out's dtype torch.float32 or FP8 (E4M3), got torch.bfloat16",
    ),
    (GATHER, {"kv_cache": lambda t: t[:, :0]}, "kv_cache must be of a page_size of at least 1, got [40, 0, 72]"),
    (
        GATHER,
        {"kv_b_proj_weight": lambda t: t[:, :48]},
        "kv_b_proj_weight must be of a kv_lora_rank that is a multiple of 64, got 48",
    ),
    (
        GATHER,
        {"kv_cache": lambda t: t[..., :63]},
        "kv_cache must be of rows of at least kv_lora_rank = 64, got [40, 16, 63]",
    ),
    (
        GATHER,
        {"k_out": lambda t: t[..., :8]},
        "k_out and v_out must be of a head and of dims beside the 8 of rope, got [54, 3, 8]",
    ),
    (
        GATHER,
        {"kv_b_proj_weight": lambda t: t[1:]},
        "kv_b_proj_weight must be of 120 rows, 3 heads of 16 + 24, got [119, 64]",
    ),
    (GATHER, {"kv_scale": torch.ones(1)}, "kv_scale must be None with values of torch.float32, got float32[1] on cpu"),
    (GATHER, {"kv_cache": lambda t: t.to(FP8)}, "kv_scale must be given with values of torch.float8_e4m3fn, got None"),
    (
        GATHER,
        {"kv_cache": lambda t: t.to(FP8), "kv_scale": torch.ones(2)},
        "kv_scale must be of one element, got [2]",
    ),
    (
        GATHER,
        {"kv_cache": lambda t: t.to(FP8), "kv_scale": torch.ones(1).double()},
        "kv_scale must be contiguous float32 on cpu, got float64[1] on cpu",
    ),
    (
        GATHER,
        {"weight_scale": torch.ones(120)},
        "weight_scale must be None with values of torch.float32, got float32[120] on cpu",
    ),
    (
        GATHER,
        {"kv_b_proj_weight": lambda t: t.to(FP8)},
        "weight_scale must be given with values of torch.float8_e4m3fn, got None",
    ),
    (
        GATHER,
        {"kv_b_proj_weight": lambda t: t.to(FP8), "weight_scale": torch.ones(60)},
        "weight_scale must be [120], one a row, or [1, 1], one for each 128 x 128 block, got [60]",
    ),
    *index_vectors(GATHER, ("kv_indptr", "kv_indices", "kv_prefix_sum_context_lens")),
    (GATHER, {"kv_indptr": lambda t: t[:0]}, "kv_indptr must be of length batch_size + 1, got 0"),
    (GATHER, {"kv_indptr": lambda t: t[1:]}, "kv_prefix_sum_context_lens must be of kv_indptr's length 3, got 4"),
]

# The sample: tables of 4 x 10, 3 pieces of 5 tokens.
BAD_INDICES: list[tuple[str, dict[str, Change], str]] = [
    (
        INDICES,
        {"block_tables": lambda t: t[0]},
        "block_tables must be int32 or int64 [requests, columns], got int32[10] on cpu",
    ),
    (
        INDICES,
        {"block_tables": lambda t: t.float()},
        "block_tables must be int32 or int64 [requests, columns], got float32[4, 10] on cpu",
    ),
    (
        INDICES,
        {"block_tables": lambda t: t.T},
        "block_tables must be contiguous in its last dimension, got stride (1, 10)",
    ),
    *index_vectors(INDICES, ("piece_requests", "piece_starts", "piece_indptr", "kv_indices")),
    (INDICES, {"piece_starts": lambda t: t.long()}, "piece_starts must be int32, got torch.int64"),
    (INDICES, {"kv_indices": lambda t: t.long()}, "kv_indices must be int32, got torch.int64"),
    (INDICES, {"piece_starts": lambda t: t[1:]}, "piece_starts must be of piece_requests' length 3, got 2"),
    (
        INDICES,
        {"piece_indptr": lambda t: t[1:]},
        "piece_indptr must be of length 4, one more than piece_requests, got 3",
    ),
    (INDICES, {"page_size": True}, "page_size must be an integer, got True"),
    (INDICES, {"num_pages": False}, "num_pages must be an integer, got False"),
    (INDICES, {"page_size": 0}, "page_size must be an integer from 1 to 2147483647, got 0"),
    (INDICES, {"num_pages": -1}, "num_pages must be an integer from 0 to 2147483647, got -1"),
    (
        INDICES,
        {"num_pages": 2**28},
        "num_pages * page_size must be at most 2147483647, as rows are int32, got 4294967296",
    ),
]
BAD_MLA_CONTEXT = [*BAD_CONCAT, *BAD_GATHER, *BAD_INDICES]
