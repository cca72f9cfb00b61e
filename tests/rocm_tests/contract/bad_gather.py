# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the paged gather that must be refused. As in bad.py."""

from __future__ import annotations

from typing import Any

import torch

GATHER = "gather_paged_kv"
# The sample: 15 rows of 2 heads of 32 float32, pool of 40 pages of 16 tokens, NHD.
BAD_GATHER: list[tuple[str, dict[str, Any], str]] = [
    (GATHER, {"k_cache": [1]}, "k_cache must be a tensor, got list"),
    (GATHER, {"k_scale": None}, "k_scale must be a number, got None"),
    (GATHER, {"kv_layout": "NDH"}, "kv_layout must be one of ('NHD', 'HND', 'SHUFFLED'), got 'NDH'"),
    (GATHER, {"k_cache": lambda t: t[0]}, "k_cache must be 4-D for NHD, got float32[16, 2, 32] on cpu"),
    (
        GATHER,
        {"k_out": lambda t: t[0]},
        "k_out must be [rows, num_kv_heads, head_dim], got float32[2, 32] on cpu",
    ),
    (GATHER, {"k_out": lambda t: t[:, :0]}, "k_out must be of rows that are not empty, got [15, 0, 32]"),
    (GATHER, {"v_out": lambda t: t.to("meta")}, "v_out must be on cpu, got meta"),
    (
        GATHER,
        {"v_out": lambda t: torch.zeros(15, 2, 64)[..., ::2]},
        "v_out must be contiguous in its last dimension, got stride (128, 64, 2)",
    ),
    (GATHER, {"v_out": lambda t: t[:4]}, "v_out must be of k_out's shape [15, 2, 32], got [4, 2, 32]"),
    (GATHER, {"v_out": lambda t: t.half()}, "v_out must be of k_out's dtype torch.float32, got torch.float16"),
    (GATHER, {"v_cache": lambda t: t.half()}, "v_cache must be of k_cache's dtype torch.float32, got torch.float16"),
    (GATHER, {"v_cache": lambda t: t.to("meta")}, "v_cache must be of k_cache's device cpu, got meta"),
    (
        GATHER,
        dict.fromkeys(("k_cache", "v_cache", "k_out", "v_out"), lambda t: t.double()),
        "k_cache must be of 1-, 2- or 4-byte elements, got float64[40, 16, 2, 32] on cpu",
    ),
    (
        GATHER,
        dict.fromkeys(("k_out", "v_out"), lambda t: t.half()),
        "k_out must be of the cache's dtype torch.float32, got torch.float16",
    ),
    (
        GATHER,
        dict.fromkeys(("k_cache", "v_cache"), lambda t: t.to(torch.float8_e4m3fn))
        | dict.fromkeys(("k_out", "v_out"), lambda t: t.double()),
        "k_out must be of the cache's dtype or one of (torch.bfloat16, torch.float16, torch.float32), "
        "got torch.float64",
    ),
    (
        GATHER,
        {"v_scale": 2.0},
        "k_scale and v_scale must be 1 where torch.float32 is copied as it is, got 1.0 and 2.0",
    ),
    (GATHER, {"k_cache": lambda t: t[:, :0]}, "k_cache must be of a page_size of at least 1, got [40, 0, 2, 32]"),
    (
        GATHER,
        {"k_cache": lambda t: t[..., :16]},
        "k_cache must be of shape ['pages', 16, 2, 32], got [40, 16, 2, 16]",
    ),
    (GATHER, {"v_cache": lambda t: t[:, :8]}, "v_cache must be of shape ['pages', 16, 2, 32], got [40, 8, 2, 32]"),
    (GATHER, {"v_cache": lambda t: t[:8]}, "v_cache must be of k_cache's 40 pages, got 8"),
    (
        GATHER,
        {"v_cache": lambda t: torch.zeros(40, 16, 2, 64)[..., ::2]},
        "v_cache must be contiguous in its last dimension, got stride (2048, 128, 64, 2)",
    ),
    (
        GATHER,
        {"kv_layout": "SHUFFLED", **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(40, 2, 8, 6, 4))},
        "k_cache must be of a head dimension and a page size divisible by 4 for SHUFFLED, got 32, 6",
    ),
    (
        GATHER,
        {"kv_layout": "SHUFFLED", **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(40, 2, 8, 16, 4))},
        "v_cache must be of shape ['pages', 2, 4, 32, 4], got [40, 2, 8, 16, 4]",
    ),
    (
        GATHER,
        {
            "kv_layout": "SHUFFLED",
            "k_cache": torch.zeros(40, 2, 8, 32, 4)[:, :, :, ::2],
            "v_cache": torch.zeros(40, 2, 4, 32, 4),
        },
        "k_cache must be dense inside a head's page, strides [..., 64, 4, 1], got (2048, 1024, 128, 8, 1)",
    ),
    (GATHER, {"starts": lambda t: t[:2]}, "kv_indptr must be of length 3, one more than starts, got 4"),
    (GATHER, {"out_indptr": lambda t: t[:3]}, "out_indptr must be of length 4, one more than starts, got 3"),
    (
        GATHER,
        {"k_out": lambda t: t.requires_grad_()},
        "k_out must be without requires_grad, as it is written behind autograd's back, got requires_grad=True; "
        "pass k_out.detach() or call under torch.no_grad()",
    ),
    (
        GATHER,
        {"v_out": lambda t: t[:1].expand(15, 2, 32)},
        "v_out must be of elements that each have memory of their own, got float32[15, 2, 32] on cpu of stride "
        "(0, 32, 1)",
    ),
    (
        GATHER,
        dict.fromkeys(("k_out", "v_out"), torch.zeros(15, 2, 32)),
        "v_out must be of memory of its own, not that of k_out, got v_out.data_ptr() == k_out.data_ptr()",
    ),
]  # fmt: skip
