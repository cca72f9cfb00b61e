# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The backend as vLLM's registry knows it: what it can do, and how its pages look."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from flashinfer.integrations.vllm.attention.impl import FlashInferRocmImpl
from flashinfer.integrations.vllm.attention.metadata import PagedMetadataBuilder
from flashinfer.integrations.vllm.attention.pages import SHUFFLED, STANDARD, configured_kind

# Axes from the outermost: layer, block, head slot, state, content. The slots of a block together, or a plane for each.
_WHOLE_PAGES, _PLANES = KVCacheLayout.LBHNC, KVCacheLayout.LHBNC
_PAGE_SIZE = 16


class FlashInferRocmBackend(AttentionBackend):
    """Causal attention of decoders on `standard` or `shuffled` pages, on ROCm, NVIDIA and CPU tensors.

    With sliding windows, soft caps and sinks, where a model has them.

    Registered as `AttentionBackendEnum.CUSTOM`; `FLASHINFER_VLLM_PAGES` chooses the pages.
    """

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's registry, which looks a layer's backend up by it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        """What a layer runs."""
        return FlashInferRocmImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """What a step builds."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Tokens to a page. AITER's kernels read shuffled pages of 16 and 32, and so do those of this package."""
        return [16, 32] if configured_kind() == SHUFFLED else [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """16, which both kinds of page can have, so that a prefill and a decoder left to themselves fit."""
        return _PAGE_SIZE

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """A row is a whole number of 16-byte vectors in each dtype that is supported."""
        return head_size % 8 == 0

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes: a window goes to the kernels."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes: so do sinks, one score a head."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: which phase a request is in is decided on the host."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Both are read by stride. A whole page arrives in one piece, one in planes in two, which small pages feel."""
        return (_WHOLE_PAGES, _PLANES)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Shuffled pages have a slot for K of all heads, and one for V."""
        if configured_kind() == STANDARD or spec.state_content_bytes is not None:
            return spec
        content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return dataclasses.replace(spec, num_head_slots=2, state_content_bytes=content)

    @staticmethod
    def kv_page_kind(spec: Any) -> str:
        """What this package's NIXL connector tells peers about pages of `spec`."""
        return SHUFFLED if spec.num_head_slots == 2 else STANDARD
