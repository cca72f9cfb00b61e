# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What one step of the engine asks of every layer, worked out once for all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from flashinfer.core.checks import fail
from flashinfer.page import get_batch_indices_positions


@dataclasses.dataclass
class PagedMetadata(AttentionMetadata):
    """One step's batch, as this package's ops take it.

    Parameters
    ----------
    num_tokens
        Rows that are tokens; vLLM may have padded its tensors beyond them.
    qo_indptr
        `[requests + 1]`, where each request's new tokens begin.
    kv_indptr, kv_indices, kv_last_page_len
        Page table, new tokens included.
    batch_indices, positions
        `[num_tokens]`, request of each new token and position in it.
    causal
        Whether a token sees only those before it.
    """

    num_tokens: int
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    causal: bool


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
    pages = (seq_lens + (page_size - 1)) // page_size
    kv_indptr = torch.zeros(requests + 1, dtype=torch.int32, device=block_table.device)
    torch.cumsum(pages, 0, dtype=torch.int32, out=kv_indptr[1:])
    kv_last_page_len = seq_lens - (pages - 1).clamp(min=0) * page_size
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

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """One step's metadata; nothing here waits for the device."""
        batch = common_attn_metadata
        if isinstance(batch.causal, torch.Tensor):
            fail("vLLM backend", "causal", "one value for all requests", "a tensor")
        num_tokens = int(batch.query_start_loc_cpu[-1])
        batch_indices, positions = get_batch_indices_positions(batch.query_start_loc, batch.seq_lens, num_tokens)
        kv_indptr, kv_indices, kv_last_page_len = page_table(
            batch.block_table_tensor, batch.seq_lens, self.page_size, batch.max_seq_len
        )
        return PagedMetadata(
            num_tokens=num_tokens,
            qo_indptr=batch.query_start_loc,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=kv_last_page_len,
            batch_indices=batch_indices,
            positions=positions,
            causal=batch.causal,
        )
