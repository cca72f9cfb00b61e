# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: append its new keys and values to the pages, then attend over them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from flashinfer.attention import paged_attention
from flashinfer.core.checks import fail
from flashinfer.integrations.vllm.attention.metadata import PagedMetadata
from flashinfer.integrations.vllm.attention.pages import SHUFFLED, configured_kind, split_views
from flashinfer.page import append_paged_kv_cache, get_batch_indices_positions

_WHERE = "vLLM backend FLASHINFER_ROCM"


class FlashInferRocmImpl(AttentionImpl[PagedMetadata]):
    """Attention of one layer over standard or shuffled pages.

    The constructor's signature is vLLM's. What the kernels cannot do is refused here, when the model is made, and not
    in the first step.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        remedy = "use another attention backend for this model"
        if attn_type != AttentionType.DECODER:
            fail(_WHERE, "attn_type", AttentionType.DECODER.value, attn_type, remedy)
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap or None),
            ("sinks", sinks),
        ):
            if value is not None:
                fail(_WHERE, name, "None", value if isinstance(value, (int, float)) else type(value).__name__, remedy)
        dtype = torch.get_default_dtype()
        if kv_cache_dtype != "auto" and STR_DTYPE_TO_TORCH_DTYPE.get(kv_cache_dtype) != dtype:
            fail(_WHERE, "kv_cache_dtype", f"auto, or that of the model, {dtype}", kv_cache_dtype)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._kind = configured_kind()

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append, attend, and return `output`, whose rows behind the last token stay as they are.

        Parameters
        ----------
        query
            `[tokens or more, num_heads, head_size]`.
        key, value
            `[tokens or more, num_kv_heads, head_size]`; not read by a layer that shares another one's pages.
        kv_cache
            As `split_views` takes it.
        attn_metadata
            None while vLLM measures memory, before there are any pages.
        """
        if output_scale is not None or output_block_scale is not None:
            fail(_WHERE, "output_scale", "None: outputs are not quantised here", "a tensor")
        if attn_metadata is None:
            return output.zero_()
        step, tokens = attn_metadata, slice(attn_metadata.num_tokens)
        k_cache, v_cache, kv_layout = split_views(kv_cache, self._kind, self.num_kv_heads, self.head_size)
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            append_paged_kv_cache(
                key[tokens],
                value[tokens],
                step.batch_indices,
                step.positions,
                (k_cache, v_cache),
                step.kv_indices,
                step.kv_indptr,
                step.kv_last_page_len,
                kv_layout=kv_layout,
            )
        paged_attention(
            query[tokens],
            (k_cache, v_cache),
            step.qo_indptr,
            step.kv_indptr,
            step.kv_indices,
            step.kv_last_page_len,
            kv_layout=kv_layout,
            causal=step.causal,
            sm_scale=self.scale,
            out=output[tokens],
        )
        return output

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Kernels are compiled and loaded now, and not when the first request arrives."""
        device = torch.device(current_platform.device_type)
        _warm_up(self._kind, self.num_heads, self.num_kv_heads, self.head_size, act_dtype, device)

    def do_kv_cache_update(self, *args: Any) -> None:
        """Nothing: `forward` appends, as the backend says with `forward_includes_kv_cache_update`."""


@functools.cache
def _warm_up(
    kind: str, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """One token through one page, once a process for each shape of layer."""
    rows = 2 if kind == SHUFFLED else num_kv_heads
    cache = torch.zeros(1, rows, 16, 2 * num_kv_heads * head_size // rows, dtype=dtype, device=device)
    k_cache, v_cache, kv_layout = split_views(cache, kind, num_kv_heads, head_size)
    indptr, one, zero = (torch.tensor(ids, dtype=torch.int32, device=device) for ids in ([0, 1], [1], [0]))
    new = torch.zeros(1, num_kv_heads, head_size, dtype=dtype, device=device)
    batch_indices, positions = get_batch_indices_positions(indptr, one, 1)
    append_paged_kv_cache(
        new, new, batch_indices, positions, (k_cache, v_cache), zero, indptr, one, kv_layout=kv_layout
    )
    query = torch.zeros(1, num_heads, head_size, dtype=dtype, device=device)
    paged_attention(query, (k_cache, v_cache), indptr, indptr, zero, one, kv_layout=kv_layout)
