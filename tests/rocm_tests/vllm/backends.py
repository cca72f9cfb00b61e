# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention backends that only say what their pages are."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

# A block's head slots together, or one plane of all blocks for each head slot. vLLM's names differ by one swap.
WHOLE, PLANES = KVCacheLayout.LBHNC.name, KVCacheLayout.LHBNC.name


class Standard(AttentionBackend):
    """Writes `[H, N, 2D]` under the name that vLLM's plain and shuffling backends share."""

    kv_page_kind = "standard"
    layouts = (KVCacheLayout[WHOLE], KVCacheLayout[PLANES])

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [16, 32, 64]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return cls.layouts


class OtherStandard(Standard):
    """The same pages from a backend of another name."""

    @staticmethod
    def get_name() -> str:
        return "ROCM_AITER_UNIFIED_ATTN"


class Shuffled(Standard):
    """Two head slots, and prefers them in planes, as AITER's shuffling backend does."""

    kv_page_kind = "shuffled"
    layouts = (KVCacheLayout[PLANES], KVCacheLayout[WHOLE])

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return dataclasses.replace(spec, num_head_slots=2, state_content_bytes=content)


class SplitByToken(Shuffled):
    """Planes of tokens of heads, as B12X writes them: no rank's share is one run of bytes."""

    kv_page_kind = "split_nhd"


class Undeclared(Shuffled):
    """Two slots, and nobody knows of what."""

    kv_page_kind = None


class XPacked(RocmAttentionBackend):
    """vLLM's own, under a class of ours so that its block sizes fit."""

    kv_page_kind = "x_packed"
