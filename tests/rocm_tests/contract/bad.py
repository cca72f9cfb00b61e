# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that an op must refuse: (op, what to change in its sample of three requests, the sentence after "op: ")."""

from __future__ import annotations

import torch

from rocm_tests.contract.bad_attention import BAD_ATTENTION
from rocm_tests.contract.bad_gather import BAD_GATHER
from rocm_tests.contract.bad_kinds import BAD_KINDS, BAD_MEMORY
from rocm_tests.contract.bad_mla_context import BAD_MLA_CONTEXT
from rocm_tests.contract.bad_scales import BAD_SCALES
from rocm_tests.contract.spoil import Change, index_vectors, last_strided, meta

APPEND = "append_paged_kv_cache"
MLA = "append_paged_mla_kv_cache"
POSITIONS = "get_batch_indices_positions"
LENS = "get_seq_lens"
CONVERT = "convert_kv_pages"
ROW_METADATA = ("batch_indices", "positions", "kv_indices", "kv_indptr")

# The sample: 7 rows of 2 heads of 32 float32, pool of 40 pages of 16 tokens, NHD.
BAD_APPEND: list[tuple[str, dict[str, Change], str]] = [
    (APPEND, {"append_key": lambda t: t[0]}, "append_key must be 3-D, got float32[2, 32] on cpu"),
    (APPEND, {"append_value": lambda t: t.flatten(1)}, "append_value must be 3-D, got float32[7, 64] on cpu"),
    (
        APPEND,
        {"append_key": lambda t: t.double()},
        "append_key must be of 1-, 2- or 4-byte elements, got float64[7, 2, 32] on cpu",
    ),
    (APPEND, {"append_key": lambda t: t[..., :0]}, "append_key must be of rows that are not empty, got [7, 2, 0]"),
    (APPEND, {"append_value": lambda t: t[:, :0]}, "append_value must be of rows that are not empty, got [7, 0, 32]"),
    (
        APPEND,
        {"append_key": last_strided},
        "append_key must be contiguous in its last dimension, got stride (128, 64, 2); pass append_key.contiguous()",
    ),
    (
        APPEND,
        {"append_value": last_strided},
        "append_value must be contiguous in its last dimension, got stride (128, 64, 2); "
        "pass append_value.contiguous()",
    ),
    (
        APPEND,
        {"append_value": lambda t: t[:, :, :16]},
        "append_value must be of append_key's shape [7, 2, 32], got [7, 2, 16]",
    ),
    (
        APPEND,
        {"append_value": lambda t: t[:5]},
        "append_value must be of append_key's shape [7, 2, 32], got [5, 2, 32]",
    ),
    (
        APPEND,
        {"append_value": lambda t: t.int()},
        "append_value must be of append_key's dtype torch.float32, got torch.int32",
    ),
    (APPEND, {"append_value": meta}, "append_value must be on cpu, got meta"),
    *index_vectors(APPEND, ROW_METADATA),
    (APPEND, {"batch_indices": lambda t: t[:6]}, "batch_indices must be of length 7, one per appended row, got 6"),
    (APPEND, {"positions": lambda t: t[:0]}, "positions must be of length 7, one per appended row, got 0"),
    (APPEND, {"kv_indptr": lambda t: t[:0]}, "kv_indptr must be of length batch_size + 1, got 0"),
    (APPEND, {"kv_layout": "nhd"}, "kv_layout must be one of ('NHD', 'HND', 'SHUFFLED'), got 'nhd'"),
    (APPEND, {"kv_layout": ""}, "kv_layout must be one of ('NHD', 'HND', 'SHUFFLED'), got ''"),
    (
        APPEND,
        {"kv_layout": "HND"},
        "k_cache must be of shape ['pages', 2, 'page_size', 32], got [40, 16, 2, 32]",
    ),
    (
        APPEND,
        {"k_cache": lambda t: t[0]},
        "k_cache must be 4-D ['pages', 'page_size', 2, 32], got float32[16, 2, 32] on cpu",
    ),
    (
        APPEND,
        {"k_cache": lambda t: t[..., :16]},
        "k_cache must be of shape ['pages', 'page_size', 2, 32], got [40, 16, 2, 16]",
    ),
    (
        APPEND,
        {"k_cache": lambda t: t.half()},
        "k_cache must be of the rows' dtype torch.float32, or FP8 (E4M3) for floats, got torch.float16",
    ),
    (APPEND, {"k_cache": meta}, "k_cache must be on cpu, got meta"),
    (APPEND, {"k_cache": lambda t: t[:, :0]}, "k_cache must be of a page_size of at least 1, got [40, 0, 2, 32]"),
    (
        APPEND,
        {"k_cache": last_strided},
        "k_cache must be contiguous in its last dimension, got stride (2048, 128, 64, 2)",
    ),
    (APPEND, {"v_cache": lambda t: t[:39]}, "v_cache must be of shape [40, 16, 2, 32], got [39, 16, 2, 32]"),
    (APPEND, {"v_cache": lambda t: t[:, :8]}, "v_cache must be of shape [40, 16, 2, 32], got [40, 8, 2, 32]"),
    (
        APPEND,
        {"v_cache": lambda t: t.to(torch.int32)},
        "v_cache must be of the rows' dtype torch.float32, or FP8 (E4M3) for floats, got torch.int32",
    ),
    (APPEND, {"v_cache": meta}, "v_cache must be on cpu, got meta"),
    (
        APPEND,
        {"v_cache": last_strided},
        "v_cache must be contiguous in its last dimension, got stride (2048, 128, 64, 2)",
    ),
]


def shuffled(**changes: Change) -> dict[str, Change]:
    """The sample on shuffled pages, x = 4, then the changes: each gets the good tensor."""
    good = {"k_cache": torch.zeros(40, 2, 8, 16, 4), "v_cache": torch.zeros(40, 2, 4, 32, 4)}
    made = {name: changes[name](cache) if name in changes else cache for name, cache in good.items()}
    return {"kv_layout": "SHUFFLED", **changes, **made}


BAD_SHUFFLED: list[tuple[str, dict[str, Change], str]] = [
    (
        APPEND,
        shuffled(append_key=lambda t: t[..., :30], append_value=lambda t: t[..., :30]),
        "append_key must be of head dimension divisible by 4 for shuffled pages, got 30",
    ),
    (
        APPEND,
        shuffled(k_cache=lambda t: t[..., :6, :]),
        "k_cache must be of a page size divisible by 4 for shuffled pages, got 6",
    ),
    (
        APPEND,
        shuffled(k_cache=lambda t: t.flatten(3)),
        "k_cache must be 5-D ['pages', 2, 8, 'page_size', 4], got float32[40, 2, 8, 64] on cpu",
    ),
    (
        APPEND,
        shuffled(k_cache=lambda t: t.view(40, 2, 4, 16, 8)),
        "k_cache must be of shape ['pages', 2, 8, 'page_size', 4], got [40, 2, 4, 16, 8]",
    ),
    (
        APPEND,
        shuffled(v_cache=lambda t: t.view(40, 2, 8, 16, 4)),
        "v_cache must be of shape [40, 2, 4, 32, 4], got [40, 2, 8, 16, 4]",
    ),
    (
        APPEND,
        shuffled(k_cache=lambda t: torch.zeros(40, 2, 16, 8, 4).transpose(2, 3)),
        "k_cache must be dense inside a head's page, strides [..., 64, 4, 1], got (1024, 512, 4, 32, 1)",
    ),
    (
        APPEND,
        shuffled(v_cache=lambda t: torch.zeros(40, 2, 4, 33, 4)[..., :32, :]),
        "v_cache must be dense inside a head's page, strides [..., 128, 4, 1], got (1056, 528, 132, 4, 1)",
    ),
    (
        APPEND,
        shuffled(k_cache=last_strided),
        "k_cache must be contiguous in its last dimension, got stride (2048, 1024, 128, 8, 2)",
    ),
    (
        APPEND,
        shuffled(k_cache=lambda t: t[..., :0, :]),
        "k_cache must be of a page_size of at least 1, got [40, 2, 8, 0, 4]",
    ),
]
# The sample: 7 rows of 64 and 8 float32, pools of 40 pages of 16 tokens.
BAD_MLA: list[tuple[str, dict[str, Change], str]] = [
    (MLA, {"append_ckv": lambda t: t[0]}, "append_ckv must be 2-D, got float32[64] on cpu"),
    (MLA, {"append_kpe": lambda t: t.unsqueeze(1)}, "append_kpe must be 2-D, got float32[7, 1, 8] on cpu"),
    (MLA, {"append_ckv": lambda t: t[:, :63]}, "append_ckv must be rows of a multiple of 8 bytes, got 252 bytes"),
    (MLA, {"append_kpe": lambda t: t[:, :7]}, "append_kpe must be rows of a multiple of 8 bytes, got 28 bytes"),
    (MLA, {"append_kpe": lambda t: t[:, :0]}, "append_kpe must be of rows that are not empty, got [7, 0]"),
    (
        MLA,
        {"append_ckv": lambda t: t.to(torch.complex64)},
        "append_ckv must be of 1-, 2- or 4-byte elements, got complex64[7, 64] on cpu",
    ),
    (
        MLA,
        {"append_kpe": last_strided},
        "append_kpe must be contiguous in its last dimension, got stride (16, 2); pass append_kpe.contiguous()",
    ),
    (
        MLA,
        {"append_kpe": lambda t: t.half()},
        "append_kpe must be of append_ckv's dtype torch.float32, got torch.float16",
    ),
    (MLA, {"append_kpe": meta}, "append_kpe must be of append_ckv's device cpu, got meta"),
    (MLA, {"append_kpe": lambda t: t[:6]}, "append_kpe must be of append_ckv's 7 rows, got 6"),
    *index_vectors(MLA, ROW_METADATA),
    (MLA, {"batch_indices": lambda t: t[:6]}, "batch_indices must be of length 7, one per appended row, got 6"),
    (MLA, {"kv_indptr": lambda t: t[:0]}, "kv_indptr must be of length batch_size + 1, got 0"),
    (
        MLA,
        {"ckv_cache": lambda t: t.unsqueeze(2)},
        "ckv_cache must be 3-D ['pages', 'page_size', 64], got float32[40, 16, 1, 64] on cpu",
    ),
    (
        MLA,
        {"ckv_cache": lambda t: t[..., :32]},
        "ckv_cache must be of shape ['pages', 'page_size', 64], got [40, 16, 32]",
    ),
    (MLA, {"ckv_cache": lambda t: t[:, :0]}, "ckv_cache must be of a page_size of at least 1, got [40, 0, 64]"),
    (MLA, {"kpe_cache": lambda t: t[:, :8]}, "kpe_cache must be of shape [40, 16, 8], got [40, 8, 8]"),
    (MLA, {"kpe_cache": lambda t: t[:39]}, "kpe_cache must be of shape [40, 16, 8], got [39, 16, 8]"),
    (MLA, {"kpe_cache": meta}, "kpe_cache must be on cpu, got meta"),
    (
        MLA,
        {"ckv_cache": last_strided},
        "ckv_cache must be contiguous in its last dimension, got stride (2048, 128, 2)",
    ),
]
# The sample: three requests.
BAD_METADATA: list[tuple[str, dict[str, Change], str]] = [
    *index_vectors(POSITIONS, ("seq_lens", "batch_indices", "positions")),
    (POSITIONS, {"append_indptr": lambda t: t[:3]}, "append_indptr must be of length 4, one more than seq_lens, got 3"),
    (POSITIONS, {"batch_indices": lambda t: t.long()}, "batch_indices must be int32, got torch.int64"),
    (POSITIONS, {"positions": lambda t: t[:-1]}, "positions must be of batch_indices' length 9, got 8"),
    *index_vectors(LENS, ("kv_last_page_len", "seq_lens")),
    (LENS, {"kv_indptr": lambda t: t[:3]}, "kv_indptr must be of length 4, one more than kv_last_page_len, got 3"),
    (LENS, {"page_size": 0}, "page_size must be an integer from 1 to 2147483647, got 0"),
    (LENS, {"page_size": 2**31}, "page_size must be an integer from 1 to 2147483647, got 2147483648"),
    (LENS, {"page_size": 1.5}, "page_size must be an integer, got 1.5"),
    (LENS, {"page_size": True}, "page_size must be an integer, got True"),
    (LENS, {"page_size": "x"}, "page_size must be an integer, got 'x'"),
    (LENS, {"page_size": None}, "page_size must be an integer, got None"),
    (LENS, {"seq_lens": lambda t: t.long()}, "seq_lens must be int32 of length 3, got int64[3] on cpu"),
]
# The sample: two layers of one plane, 40 pages of 2 heads, 16 tokens, head size 32, float32: 8192 bytes a page.
SECOND = slice(1, None)
BAD_CONVERT: list[tuple[str, dict[str, Change], str]] = [
    *index_vectors(CONVERT, ("block_ids",)),
    (
        CONVERT,
        {"planes_per_layer": 3},
        "caches must be a non-empty list of pages, or of (K plane, V plane) pairs, got 2 planes",
    ),
    (
        CONVERT,
        {"planes_per_layer": 0},
        "caches must be a non-empty list of pages, or of (K plane, V plane) pairs, got 2 planes",
    ),
    (
        CONVERT,
        {"planes": lambda p: p[:1], "planes_per_layer": 2},
        "caches must be a non-empty list of pages, or of (K plane, V plane) pairs, got 1 planes",
    ),
    (
        CONVERT,
        {"planes": lambda p: [t.double() for t in p]},
        "caches must be of 1-, 2- or 4-byte elements, got torch.float64",
    ),
    (
        CONVERT,
        {"src": "plain"},
        "src must be one of ('standard', 'shuffled', 'x_packed', 'split_hnd', 'split_nhd'), got 'plain'",
    ),
    (
        CONVERT,
        {"dst": "SHUFFLED"},
        "dst must be one of ('standard', 'shuffled', 'x_packed', 'split_hnd', 'split_nhd'), got 'SHUFFLED'",
    ),
    (
        CONVERT,
        {"head_dim": 30},
        "dst must be a format that these pages can have, got shuffled pages of 4-byte elements need head_dim to be a "
        "multiple of 4, got 30",
    ),
    (
        CONVERT,
        {"src": "shuffled", "src_page_size": 6},
        "src must be a format that these pages can have, got shuffled pages of 4-byte elements need page_size to be a "
        "multiple of 4, got 6",
    ),
    (CONVERT, {"src_heads": 0}, "src_heads must be positive, got 0"),
    (CONVERT, {"dst_page_size": 0}, "dst_page_size must be positive, got 0"),
    (CONVERT, {"dst_heads": 3}, "dst_heads must be a multiple or a divisor of src_heads 2, got 3"),
    (CONVERT, {"src_page_size": 12}, "dst_page_size must be a multiple or a divisor of src_page_size 12, got 16"),
    (CONVERT, {"recode": 5}, "recode must be 0, or 1 to 4 for 1-byte elements, got 5"),
    (CONVERT, {"recode": 1}, "recode must be 0, or 1 to 4 for 1-byte elements, got 1"),
    (CONVERT, {"head_dim": -32}, "head_dim must be positive, got -32"),
    (
        CONVERT,
        {"dst_heads": 4},
        "planes[0] must be of 16384 bytes to a page, as the format says, got 8192 bytes, float32[40, 2048] on cpu",
    ),
    (
        CONVERT,
        {"planes": lambda p: [p[0], p[1].int()]},
        "planes[1] must be of the first plane's dtype torch.float32, got torch.int32",
    ),
    (CONVERT, {"planes": lambda p: [p[0], meta(p[1])]}, "planes[1] must be of the first plane's device cpu, got meta"),
    (CONVERT, {"planes": lambda p: [p[0], p[1][:39]]}, "planes[1] must be of the first plane's 40 pages, got 39"),
    (CONVERT, {"planes": lambda p: [p[0][0], p[1]]}, "planes[0] must be [pages, ...], got float32[2048] on cpu"),
    (
        CONVERT,
        {"planes": lambda p: [p[0], last_strided(p[1])]},
        "planes[1] must be dense inside a page; only pages may be strided, got stride (4096, 2)",
    ),
    (
        CONVERT,
        {"planes": lambda p: [p[0], p[1].as_strided((40, 2048), (2047, 1))]},
        "planes[1] must be of pages that do not overlap, got stride (2047, 1)",
    ),
]
INTO = "convert_kv_pages_into"
BAD_INTO: list[tuple[str, dict[str, Change], str]] = [
    *index_vectors(INTO, ("source_ids", "block_ids")),
    (
        INTO,
        {"sources": lambda p: p[:2]},
        "planes must be of as many layers as sources, got 2 and 1",
    ),
    (
        INTO,
        {"sources": lambda p: [t.half() for t in p]},
        "sources must be of planes' itemsize 4, got 2",
    ),
    (INTO, {"sources": lambda p: [meta(t) for t in p]}, "sources must be of planes' device cpu, got meta"),
    (INTO, {"source_ids": lambda t: t[:2]}, "source_ids must be of block_ids' length 3, got 2"),
    (
        INTO,
        {"sources": lambda p: [t[:, :1000] for t in p]},
        "sources[0] must be of 4096 bytes to a page, as the format says, got 4000 bytes, float32[40, 1000] on cpu",
    ),
    (
        INTO,
        {"planes": lambda p: []},
        "planes must be a non-empty list of pages, or of (K plane, V plane) pairs, got 0 planes",
    ),
]
MLA_ATTENTION = "mla_paged_attention"
# The sample: 6 rows of 3 heads of 64 + 16 float32, 40 pages of 16 tokens, a schedule for 6 workers.
BAD_MLA_ATTENTION: list[tuple[str, dict[str, Change], str]] = [
    *index_vectors(MLA_ATTENTION, ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")),
    (
        MLA_ATTENTION,
        {"q_nope": lambda t: t[0]},
        "q_nope must be [tokens, heads, head_dim_ckv], got float32[3, 64] on cpu",
    ),
    (
        MLA_ATTENTION,
        {"q_nope": lambda t: t.int()},
        "q_nope must be a floating-point tensor of 16 bits or more, got int32[6, 3, 64] on cpu",
    ),
    (
        MLA_ATTENTION,
        {"q_nope": last_strided},
        "q_nope must be contiguous in its last dimension, got stride (384, 128, 2); pass q_nope.contiguous()",
    ),
    (
        MLA_ATTENTION,
        {"q_pe": lambda t: t[:, :2]},
        "q_pe must be [6, 3, head_dim_kpe] as q_nope, got float32[6, 2, 16] on cpu",
    ),
    (MLA_ATTENTION, {"q_pe": lambda t: t.half()}, "q_pe must be of q_nope's dtype torch.float32, got torch.float16"),
    (
        MLA_ATTENTION,
        {"ckv_cache": lambda t: t.unsqueeze(1)},
        "ckv_cache must be 3-D [pages, page_size, dim], got float32[40, 1, 16, 64] on cpu; "
        "pass ckv_cache.squeeze() of the axis of heads",
    ),
    (
        MLA_ATTENTION,
        {"ckv_cache": lambda t: t[..., :32]},
        "ckv_cache must be [pages, page_size, 64], got float32[40, 16, 32] on cpu",
    ),
    (
        MLA_ATTENTION,
        {"ckv_cache": lambda t: t.half()},
        "ckv_cache must be of q's dtype torch.float32 or FP8 (E4M3), got torch.float16",
    ),
    (MLA_ATTENTION, {"kpe_cache": meta}, "kpe_cache must be on cpu, got meta"),
    (MLA_ATTENTION, {"kpe_cache": lambda t: t[1:]}, "kpe_cache must be of ckv_cache's pages [40, 16], got [39, 16]"),
    (
        MLA_ATTENTION,
        {"kpe_cache": lambda t: t.to(torch.float8_e4m3fn)},
        "kpe_cache must be of ckv_cache's dtype torch.float32, got torch.float8_e4m3fn",
    ),
    (
        MLA_ATTENTION,
        {"ckv_cache": lambda t: t[:, :0]},
        "ckv_cache must be of a page_size of at least 1, got [40, 0, 64]",
    ),
    (
        MLA_ATTENTION,
        {"kpe_cache": last_strided},
        "kpe_cache must be contiguous in its last dimension, got stride (512, 32, 2)",
    ),
    (
        MLA_ATTENTION,
        {"qo_indptr": lambda t: t[:3]},
        "qo_indptr must be of length 4, one more than kv_len_arr, got 3",
    ),
    (MLA_ATTENTION, {"ckv_scale": 0.0}, "ckv_scale must be positive, got 0.0"),
    (MLA_ATTENTION, {"kpe_scale": 2.0}, "kpe_scale must be 1.0 for caches that are not FP8, got 2.0"),
    (MLA_ATTENTION, {"max_q_len": -1}, "max_q_len must be 0, for not known, or more, got -1"),
    (MLA_ATTENTION, {"scratch": None}, "schedule and scratch must be given together, got one of them"),
    (
        MLA_ATTENTION,
        {"rows_per_item": 8},
        "rows_per_item and workers must be those of the schedule, got 8 and 6",
    ),
    (
        MLA_ATTENTION,
        {"schedule": lambda t: t[:36]},
        "schedule must be contiguous int32[>= 37] on cpu, got int32[36] on cpu",
    ),
    (
        MLA_ATTENTION,
        {"scratch": lambda t: t[1:]},
        "scratch must be contiguous float32[>= 12480] on cpu, got float32[12479] on cpu",
    ),
    (
        MLA_ATTENTION,
        {"out": lambda t: t[:5]},
        "out must be like q_nope, float32[6, 3, 64] on cpu, got float32[5, 3, 64] on cpu",
    ),
    (MLA_ATTENTION, {"out": last_strided}, "out must be contiguous in its last dimension, got stride (384, 128, 2)"),
    (MLA_ATTENTION, {"lse": lambda t: t.half()}, "lse must be float32[6, 3] on cpu, got float16[6, 3] on cpu"),
]
BAD = [
    *BAD_KINDS,
    *BAD_MEMORY,
    *BAD_SCALES,
    *BAD_APPEND,
    *BAD_SHUFFLED,
    *BAD_MLA,
    *BAD_METADATA,
    *BAD_CONVERT,
    *BAD_INTO,
    *BAD_ATTENTION,
    *BAD_GATHER,
    *index_vectors("gather_paged_kv", ("kv_indices", "kv_indptr", "starts", "out_indptr")),
    *BAD_MLA_ATTENTION,
    *BAD_MLA_CONTEXT,
]
