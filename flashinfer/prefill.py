# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of many queries for each request. Signatures follow FlashInfer 0.7.4."""

from __future__ import annotations

from flashinfer.prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.single import single_prefill_with_kv_cache
from flashinfer.unsupported import unsupported

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
]

trtllm_batch_context_with_kv_cache = unsupported("trtllm_batch_context_with_kv_cache", "a kernel of NVIDIA's")
