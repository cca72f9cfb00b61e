# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: append its new keys and values to the pages, then attend over them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from flashinfer.core.checks import fail
from flashinfer.integrations.vllm.attention.metadata import LayerAttention, PagedMetadata, page_lens
from flashinfer.integrations.vllm.attention.pages import SHUFFLED, STANDARD, configured_kind, split_views
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
        if alibi_slopes is not None:
            fail(_WHERE, "alibi_slopes", "None", type(alibi_slopes).__name__, remedy)
        if sliding_window is not None and sliding_window < 1:
            fail(_WHERE, "sliding_window", "None or at least 1", sliding_window)
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            fail(_WHERE, "sinks", f"None or one for each of the {num_heads} heads", list(sinks.shape))
        dtype = torch.get_default_dtype()
        if kv_cache_dtype != "auto" and STR_DTYPE_TO_TORCH_DTYPE.get(kv_cache_dtype) != dtype:
            fail(_WHERE, "kv_cache_dtype", f"auto, or that of the model, {dtype}", kv_cache_dtype)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # A parameter of the model, which is loaded after this.
        self.sinks = sinks
        self._kind = configured_kind()
        self._attention = LayerAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_size,
            sm_scale=self.scale,
            # vLLM counts a query's own place to its window.
            window_left=-1 if sliding_window is None else sliding_window - 1,
            logits_soft_cap=float(logits_soft_cap or 0),
            dtype=dtype,
            kv_layout="HND" if self._kind == STANDARD else "SHUFFLED",
        )

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
        fresh = None
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            fresh = key[tokens], value[tokens]
            append_paged_kv_cache(
                *fresh,
                step.batch_indices,
                step.positions,
                (k_cache, v_cache),
                step.kv_indices,
                step.kv_indptr,
                step.kv_last_page_len,
                kv_layout=kv_layout,
            )
        k, v = fresh or (None, None)
        wrapper = step.planned(self._attention)
        wrapper.run(query[tokens], k, v, (k_cache, v_cache), sinks=self.sinks, out=output[tokens])
        return output

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks are there now. Kernels are compiled and loaded now, and not when the first request arrives."""
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float()
        device = torch.device(current_platform.device_type)
        _warm_up(self._kind, dataclasses.replace(self._attention, dtype=act_dtype), self.sinks is not None, device)

    def do_kv_cache_update(self, *args: Any) -> None:
        """Nothing: `forward` appends, as the backend says with `forward_includes_kv_cache_update`."""


@functools.cache
def _warm_up(kind: str, layer: LayerAttention, has_sinks: bool, device: torch.device) -> None:
    """A decode, an extend and a prefill through pages of their own, once a process for each kind of layer."""
    heads, dim, size = layer.num_kv_heads, layer.head_dim, 16
    rows = 2 if kind == SHUFFLED else heads
    cache = torch.zeros(4, rows, size, 2 * heads * dim // rows, dtype=layer.dtype, device=device)
    k_cache, v_cache, kv_layout = split_views(cache, kind, heads, dim)
    starts, lens = torch.tensor([0, 1, 3, 5], dtype=torch.int32), torch.tensor([2, size + 2, 2], dtype=torch.int32)
    host_batch = (starts, *page_lens(lens, size))
    batch_indices, positions = get_batch_indices_positions(starts.to(device), lens.to(device), int(starts[-1]))
    step = PagedMetadata(
        num_tokens=int(starts[-1]),
        kv_indptr=host_batch[1].to(device),
        kv_indices=torch.arange(4, dtype=torch.int32, device=device),
        kv_last_page_len=host_batch[2].to(device),
        batch_indices=batch_indices,
        positions=positions,
        host_batch=host_batch,
        page_size=size,
        decode_threshold=1,
        context_tokens=size,
    )
    new = torch.zeros(step.num_tokens, heads, dim, dtype=layer.dtype, device=device)
    append_paged_kv_cache(
        new,
        new,
        batch_indices,
        positions,
        (k_cache, v_cache),
        step.kv_indices,
        step.kv_indptr,
        step.kv_last_page_len,
        kv_layout=kv_layout,
    )
    query = torch.zeros(step.num_tokens, layer.num_heads, dim, dtype=layer.dtype, device=device)
    sinks = torch.zeros(layer.num_heads, device=device) if has_sinks else None
    step.planned(layer).run(query, new, new, (k_cache, v_cache), sinks=sinks)
