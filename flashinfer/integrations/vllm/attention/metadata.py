# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What one step of the engine asks of every layer, worked out once for all of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from flashinfer.core.checks import fail
from flashinfer.page import get_batch_indices_positions
from flashinfer.phase_attention import BatchPhaseAttentionWrapper

# Tokens of context that an extend fetches at once, at most.
_CONTEXT_TOKENS = 16384


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """What layers of a model may differ in; layers that are alike share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int
    logits_soft_cap: float
    dtype: torch.dtype
    kv_layout: str


@dataclasses.dataclass
class PagedMetadata(AttentionMetadata):
    """One step's batch, as this package's ops take it.

    Parameters
    ----------
    num_tokens
        Rows that are tokens; vLLM may have padded its tensors beyond them.
    kv_indptr, kv_indices, kv_last_page_len
        Page table, new tokens included, on the device.
    batch_indices, positions
        `[num_tokens]`, request of each new token and position in it.
    host_batch
        `(qo_indptr, kv_indptr, kv_last_page_len)` that plans are made from: on the host if their values are known
        there, so that no plan waits for the device.
    page_size
        Tokens to a page.
    decode_threshold
        New tokens that a decode may have.
    context_tokens
        Tokens of context that an extend fetches at once.
    """

    num_tokens: int
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    host_batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    page_size: int
    decode_threshold: int
    context_tokens: int
    _planned: dict[LayerAttention, BatchPhaseAttentionWrapper] = dataclasses.field(default_factory=dict)

    def planned(self, layer: LayerAttention) -> BatchPhaseAttentionWrapper:
        """The step's plan for a layer; the first layer of a kind makes it."""
        found = self._planned.get(layer)
        if found is not None:
            return found
        row = 2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize
        workspace = _workspace(self.context_tokens * row, self.kv_indices.device)
        wrapper = BatchPhaseAttentionWrapper(workspace, layer.kv_layout)
        qo_indptr, kv_indptr, kv_last_page_len = self.host_batch
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            self.kv_indices,
            kv_last_page_len,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            self.page_size,
            decode_threshold=self.decode_threshold,
            sm_scale=layer.sm_scale,
            window_left=layer.window_left,
            logits_soft_cap=layer.logits_soft_cap,
            q_data_type=layer.dtype,
        )
        self._planned[layer] = wrapper
        return wrapper


@functools.cache
def _workspace(size: int, device: torch.device) -> torch.Tensor:
    """Shared by all layers and steps, which use it one after the other."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def page_lens(seq_lens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(kv_indptr, kv_last_page_len)` of requests of these lengths, `[requests]`, where the lengths are."""
    pages = (seq_lens + (page_size - 1)) // page_size
    kv_indptr = torch.zeros(seq_lens.numel() + 1, dtype=torch.int32, device=seq_lens.device)
    torch.cumsum(pages, 0, dtype=torch.int32, out=kv_indptr[1:])
    return kv_indptr, seq_lens - (pages - 1).clamp(min=0) * page_size


def page_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(kv_indptr, kv_indices, kv_last_page_len)` of vLLM's padded block table.

    Parameters
    ----------
    block_table
        `[requests, most blocks of a request]`; entries beyond a request's length may hold anything.
    seq_lens
        `[requests]`, tokens of each request.
    page_size
        Tokens to a page.
    longest
        No request has more tokens. The host must know it, or a step would wait for the device to say it.
    """
    requests, width = block_table.shape
    kv_indptr, kv_last_page_len = page_lens(seq_lens, page_size)
    if requests == 0 or width == 0:
        return kv_indptr, block_table.new_empty(0), kv_last_page_len
    # As many entries as there can be; those that no request owns repeat one that a request does, or the first.
    entries = torch.arange(requests * min(width, -(-longest // page_size)), dtype=torch.int32, device=seq_lens.device)
    row = torch.searchsorted(kv_indptr[1:], entries, right=True).clamp(max=requests - 1)
    column = (entries - kv_indptr[row]).clamp(0, width - 1)
    return kv_indptr, block_table[row, column], kv_last_page_len


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Builds `PagedMetadata` from what vLLM says about a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM hands over the spec of kernel blocks here, not of its manager's, which may be larger.
        self.page_size = int(kv_cache_spec.block_size)
        # vLLM then brings batches into the order decodes, extends, prefills. Drafts are verified as decodes.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        longest = min(int(vllm_config.model_config.max_model_len), _CONTEXT_TOKENS)
        self._context_tokens = -(-longest // self.page_size) * self.page_size
        # With drafts in flight, vLLM's host knows only an upper bound of the lengths.
        self._host_knows_lengths = vllm_config.speculative_config is None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """One step's metadata; waits for the device only where the host does not know the lengths."""
        batch = common_attn_metadata
        if batch.causal is not True:
            fail("vLLM backend", "causal", "True", batch.causal if isinstance(batch.causal, bool) else "a tensor")
        num_tokens = int(batch.query_start_loc_cpu[-1])
        batch_indices, positions = get_batch_indices_positions(batch.query_start_loc, batch.seq_lens, num_tokens)
        kv_indptr, kv_indices, kv_last_page_len = page_table(
            batch.block_table_tensor, batch.seq_lens, self.page_size, batch.max_seq_len
        )
        lens = batch.seq_lens_cpu_upper_bound
        if lens is not None and self._host_knows_lengths:
            host_batch = (batch.query_start_loc_cpu, *page_lens(lens[: batch.num_reqs], self.page_size))
        else:
            host_batch = (batch.query_start_loc, kv_indptr, kv_last_page_len)
        return PagedMetadata(
            num_tokens=num_tokens,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=kv_last_page_len,
            batch_indices=batch_indices,
            positions=positions,
            host_batch=host_batch,
            page_size=self.page_size,
            decode_threshold=self.reorder_batch_threshold or 1,
            context_tokens=self._context_tokens,
        )
