# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Good calls of the ops of an MLA prefill's context."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocm_tests.contract.sample import INDEX, PAGES, N, Sample, randn, rows
from rocm_tests.page.oracle import make_batch

RANK, ROPE, NOPE, V_DIM, HEADS = 64, 8, 16, 24, 3


def gather(n: int, variant: int) -> Sample:
    """In float32 and bfloat16; torch's own opcheck compares no FP8."""
    dtype = (torch.float32, torch.bfloat16)[variant]
    lens = [17 + b for b in range(n)]
    batch = make_batch(lens, [2] * n, N, index_dtype=INDEX[variant])
    shape = HEADS * (NOPE + V_DIM), RANK
    weight, pool = randn(*shape, seed=1), randn(PAGES, N, RANK + ROPE, seed=2)
    total = sum(lens)
    k_out, v_out = rows(
        (torch.full((total, HEADS + 1, NOPE + ROPE), 7.0, dtype=dtype)[:, 1:], torch.full((total, HEADS, V_DIM), 7.0))
    )
    arguments = {
        "kv_cache": pool.to(dtype),
        "kv_scale": None,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_prefix_sum_context_lens": torch.tensor([0, *lens]).cumsum(0).to(INDEX[variant]),
        "kv_b_proj_weight": weight.to(dtype),
        "weight_scale": None,
        "k_out": k_out,
        "v_out": v_out.to(dtype),
    }
    dynamic = ("kv_indptr", "kv_indices", "kv_prefix_sum_context_lens", "k_out", "v_out")
    return Sample(arguments, dynamic)


def indices(n: int, variant: int) -> Sample:
    arguments = {
        "block_tables": torch.arange(40, dtype=INDEX[variant]).view(4, 10)[:, variant:],
        "piece_requests": torch.arange(n, dtype=torch.int32) % 4,
        "piece_starts": torch.arange(n, dtype=torch.int32),
        "piece_indptr": torch.arange(n + 1, dtype=torch.int32) * 5,
        "num_pages": 40,
        "page_size": N,
        "kv_indices": torch.full((5 * n + 2 * (n > 0),), 7, dtype=torch.int32),
    }
    return Sample(arguments, ("piece_requests", "piece_starts", "piece_indptr", "kv_indices"))


def concat(n: int, variant: int) -> Sample:
    dtype = (torch.bfloat16, torch.float16)[variant]
    k, nope, rope = rows(
        tuple(
            randn(2 * n, heads, width, seed=width, dtype=dtype)[:, 1:]
            for heads, width in ((HEADS + 1, 40), (HEADS + 1, 24), (2, 16))
        )
    )
    return Sample({"k": k, "k_nope": nope, "k_rope": rope}, ("k", "k_nope", "k_rope"))


MLA_CONTEXT_SAMPLES: dict[str, tuple[Callable[[int, int], Sample], int]] = {
    "concat_mla_k": (concat, 2),
    "gather_kv_b_proj": (gather, 2),
    "mla_context_indices": (indices, 2),
}
