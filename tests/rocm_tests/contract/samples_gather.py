# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A good call of the paged gather, for samples.py."""

from __future__ import annotations

import torch

from rocm_tests.contract.sample import INDEX, PAGES, D, H, N, Sample, randn
from rocm_tests.gather.oracle import make_ranges

DYNAMIC = ("kv_indices", "kv_indptr", "starts", "out_indptr", "k_out", "v_out")


def gather(n: int, variant: int) -> Sample:
    ranges = make_ranges([17 + b for b in range(n)], [(3, 5)] * n, N, index_dtype=INDEX[variant % 2])
    pool = randn(PAGES, H, N, 2 * D, seed=1)
    # FP8 is left to other tests: torch's opcheck cannot compare it.
    kv_layout, k_cache, v_cache = (
        ("NHD", pool[..., :D].transpose(1, 2), randn(PAGES, N, H, D, seed=2)),
        ("HND", pool[..., :D], pool[..., D:]),
        ("SHUFFLED", randn(PAGES, H, D // 4, N, 4, seed=3), randn(PAGES, H, N // 4, D, 4, seed=4)),
    )[variant]
    indices, indptr, starts, out_indptr = ranges.metadata()
    arguments = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "kv_indices": indices,
        "kv_indptr": indptr,
        "starts": starts,
        "out_indptr": out_indptr,
        "kv_layout": kv_layout,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "k_out": torch.full((5 * n, H, D), 7.0),
        "v_out": torch.full((5 * n, H, D), 7.0),
    }
    return Sample(arguments, DYNAMIC)


GATHER_SAMPLES = {"gather_paged_kv": (gather, 3)}
