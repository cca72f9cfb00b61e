# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of the attention backend: its cache, made by vLLM's own functions, a step's metadata, and an oracle."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch

HEADS, KV_HEADS, DIM, PAGE_SIZE, BLOCKS = 6, 3, 16, 16, 9
POISON = 2**30


def cache_of(engines: Any, kv_heads: int = KV_HEADS, layout: str | None = None) -> tuple[Any, torch.Tensor]:
    """The backend's spec, and a layer's cache full of NaN, made by vLLM's own functions."""
    from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheTensor, compute_layout_strides, create_kv_cache_views

    from flashinfer.integrations.vllm.attention import FlashInferRocmBackend as Backend

    stock = engines.FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=kv_heads, head_size=DIM, dtype=torch.float32)
    spec = Backend.customize_spec(stock)
    chosen = Backend.supported_kv_cache_layouts()[0] if layout is None else KVCacheLayout[layout]
    raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    strides = compute_layout_strides(spec, BLOCKS, 1, chosen)
    tensor = KVCacheTensor(
        size=raw.numel(), layers=["layer"], offset=0, layer_stride=strides[0], block_stride=strides[1]
    )
    (view,) = create_kv_cache_views(raw, spec, BLOCKS, chosen, tensor)
    view.fill_(float("nan"))
    return spec, view


def layer(num_kv_heads: int = KV_HEADS, **options: Any) -> Any:
    from flashinfer.integrations.vllm.attention.impl import FlashInferRocmImpl

    torch.set_default_dtype(torch.float32)
    return FlashInferRocmImpl(HEADS, DIM, DIM**-0.5, num_kv_heads, **options)


def step_of(
    block_table: list[list[int]],
    seq_lens: list[int],
    new: list[int],
    *,
    max_model_len: int = 512,
    drafts: int = 0,
    causal: Any = True,
) -> Any:
    """A step's metadata, built from what vLLM hands over; table entries behind a request's end are poison.

    With drafts the host's lengths are more than there are, as vLLM's are then.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from flashinfer.integrations.vllm.attention.metadata import PagedMetadataBuilder

    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    width = max(map(len, block_table)) + 2
    table = torch.full((len(block_table), width), POISON, dtype=torch.int32)
    for row, blocks in zip(table, block_table, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(new),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(seq_lens) + 7,
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
        causal=causal,
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32) + drafts,
    )
    speculative = types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=max_model_len),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=speculative,
    )
    spec = dataclasses.make_dataclass("Spec", ["block_size"])(PAGE_SIZE)
    return PagedMetadataBuilder(spec, ["layer"], config, torch.device("cpu")).build(0, common)


def dense(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last `len(query)` tokens over all keys of a request, one query and head at a time.

    Float64. `window` counts the query's own place, as vLLM's does.
    """
    out = torch.zeros(query.shape, dtype=torch.float64)
    first = len(k) - len(query)
    for i, rows in enumerate(query.double()):
        place = first + i
        seen = slice(0 if window is None else max(0, place - window + 1), place + 1)
        for head, row in enumerate(rows):
            kv_head = head // (query.size(1) // k.size(1))
            scores = k[seen, kv_head].double() @ row * DIM**-0.5
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if sinks is not None:
                # One more key, without a value.
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.exp() / scores.exp().sum()
            values = v[seen, kv_head].double()
            out[i, head] = weights[: len(values)] @ values
    return out
