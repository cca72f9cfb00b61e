# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention and KV-cache API for AMD ROCm.

Importing does nothing: no device is opened, nothing is compiled or written, and names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashinfer.version import __version__

if TYPE_CHECKING:
    from flashinfer.attention import BatchAttention as BatchAttention
    from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper
    from flashinfer.attention import paged_attention as paged_attention
    from flashinfer.attention import ragged_attention as ragged_attention
    from flashinfer.cascade import merge_state as merge_state
    from flashinfer.cascade import merge_state_in_place as merge_state_in_place
    from flashinfer.cascade import merge_states as merge_states
    from flashinfer.concat_ops import concat_mla_k as concat_mla_k
    from flashinfer.core.errors import BackendUnavailableError as BackendUnavailableError
    from flashinfer.core.errors import BuildError as BuildError
    from flashinfer.core.errors import InvalidArgumentError as InvalidArgumentError
    from flashinfer.core.errors import LaunchError as LaunchError
    from flashinfer.core.errors import MissingJITCacheError as MissingJITCacheError
    from flashinfer.core.errors import PoolLostError as PoolLostError
    from flashinfer.core.faults import check_device_errors as check_device_errors
    from flashinfer.core.op import use_backend as use_backend
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.decode import (
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    )
    from flashinfer.decode import fast_decode_plan as fast_decode_plan
    from flashinfer.decode import single_decode_with_kv_cache as single_decode_with_kv_cache
    from flashinfer.gather import gather_paged_kv as gather_paged_kv
    from flashinfer.kv.convert import convert_kv_pages as convert_kv_pages
    from flashinfer.kv.convert import convert_kv_pages_into as convert_kv_pages_into
    from flashinfer.mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
    from flashinfer.mla import mla_kv_view as mla_kv_view
    from flashinfer.mla import mla_paged_attention as mla_paged_attention
    from flashinfer.mla_context import gather_kv_b_proj as gather_kv_b_proj
    from flashinfer.mla_context import mla_context_indices as mla_context_indices
    from flashinfer.page import append_paged_kv_cache as append_paged_kv_cache
    from flashinfer.page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
    from flashinfer.page import get_batch_indices_positions as get_batch_indices_positions
    from flashinfer.page import get_seq_lens as get_seq_lens
    from flashinfer.phase_attention import BatchPhaseAttentionWrapper as BatchPhaseAttentionWrapper
    from flashinfer.phases import reorder_batch as reorder_batch
    from flashinfer.phases import split_phases as split_phases
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper
    from flashinfer.prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
    from flashinfer.preparation import warmup as warmup
    from flashinfer.selection import explain as explain
    from flashinfer.unsupported import (
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,  # noqa: E501
    )

# Public name -> module (PEP 562). A new public op is one line here and one above. No name is that of a module of the
# package: importing such a module anywhere would put it in the name's place.
_EXPORTS = {
    "BackendUnavailableError": "core.errors",
    "BatchAttention": "attention",
    "BatchAttentionWithAttentionSinkWrapper": "attention",
    "BatchDecodeWithPagedKVCacheWrapper": "decode",
    "BatchMLAPagedAttentionWrapper": "mla",
    "BatchPrefillWithPagedKVCacheWrapper": "prefill",
    "BatchPrefillWithRaggedKVCacheWrapper": "prefill",
    "BatchPhaseAttentionWrapper": "phase_attention",
    "BuildError": "core.errors",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "decode",
    "InvalidArgumentError": "core.errors",
    "LaunchError": "core.errors",
    "MissingJITCacheError": "core.errors",
    "PoolLostError": "core.errors",
    "append_paged_kv_cache": "page",
    "append_paged_mla_kv_cache": "page",
    "check_device_errors": "core.faults",
    "concat_mla_k": "concat_ops",
    "convert_kv_pages": "kv.convert",
    "convert_kv_pages_into": "kv.convert",
    "explain": "selection",
    "fast_decode_plan": "decode",
    "gather_paged_kv": "gather",
    "gather_kv_b_proj": "mla_context",
    "get_batch_indices_positions": "page",
    "get_seq_lens": "page",
    "merge_state": "cascade",
    "merge_state_in_place": "cascade",
    "merge_states": "cascade",
    "mla_context_indices": "mla_context",
    "mla_kv_view": "mla",
    "mla_paged_attention": "mla",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": "unsupported",
    "paged_attention": "attention",
    "ragged_attention": "attention",
    "single_decode_with_kv_cache": "single",
    "single_prefill_with_kv_cache": "single",
    "reorder_batch": "phases",
    "split_phases": "phases",
    "use_backend": "core.op",
    "warmup": "preparation",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'flashinfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flashinfer.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
