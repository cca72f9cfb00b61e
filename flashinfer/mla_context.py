# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The context of an MLA prefill: cached latents made into keys and values that attention reads.

A prefill of MLA attends to its new tokens and to what the cache holds of earlier ones. The cache holds latents, so that
the context is multiplied up first, in chunks that fit a workspace.
"""

from __future__ import annotations

import torch

from flashinfer.core.mla_shape import MlaShape
from flashinfer.mla_context_attention import MlaContextAttention
from flashinfer.mla_context_planner import MlaContextChunk, MlaContextPlan, MlaContextPlanner, MlaContextStep
from flashinfer.ops import mla_context as ops

__all__ = [
    "MlaContextAttention",
    "MlaContextChunk",
    "MlaContextPlan",
    "MlaContextPlanner",
    "MlaContextStep",
    "MlaShape",
    "gather_kv_b_proj",
    "mla_context_indices",
]


def gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Keys and values of cached context: `(k_nope, v) = latent kv_b_proj^T` for each head, beside it the rope part.

    With `(c, r)` the cached row of context token `t`, times `kv_scale`: `k_out[t, h] = (W_k[h] c, r)` and
    `v_out[t, h] = W_v[h] c`. One launch with the backends `aiter` and `triton`.

    Parameters
    ----------
    kv_cache
        `[pages, page_size, kv_lora_rank + rope_dim]` of k_out's dtype or FP8 (E4M3); pages and rows may be strided.
        `kv_lora_rank` is a multiple of 64.
    kv_scale
        float32, one element: what FP8 values of the cache are to be multiplied with. None otherwise.
    kv_indptr
        `[batch_size + 1]` int32 or int64, where each request's pages begin in `kv_indices`.
    kv_indices
        `[>= kv_indptr[-1]]` int32 or int64, page ids.
    kv_prefix_sum_context_lens
        `[batch_size + 1]` int32 or int64, where each request's tokens begin in the results. With pages of one token
        this is `kv_indptr`: given the same tensor for both, kernels look nothing up.
    kv_b_proj_weight
        `[heads * (nope_dim + v_dim), kv_lora_rank]` of k_out's dtype or FP8; of each head first the rows of its keys.
    weight_scale
        float32, for an FP8 weight: `[heads * (nope_dim + v_dim)]`, one a row, or `[rows / 128, kv_lora_rank / 128]`
        (both rounded up), one for each block of 128 x 128. None otherwise.
    k_out
        `[tokens, heads, nope_dim + rope_dim]`, written. Rows from `kv_prefix_sum_context_lens[-1]` on are not
        specified.
    v_out
        `[tokens, heads, v_dim]` of k_out's dtype, written.
    backend
        "auto", or the name of one. `reference` waits for the device.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes, strides or devices that do not fit; with `reference` also for a token without a page, or a
        page id out of range. `triton` skips such a token and reports it through `flashinfer.check_device_errors()`.
    BackendUnavailableError
        If no backend, or not the one named, takes the call.
    """
    ops.gather_kv_b_proj(
        kv_cache,
        kv_scale,
        kv_indptr,
        kv_indices,
        kv_prefix_sum_context_lens,
        kv_b_proj_weight,
        weight_scale,
        k_out,
        v_out,
        backend=backend,
    )


def mla_context_indices(
    block_tables: torch.Tensor,
    piece_requests: torch.Tensor,
    piece_starts: torch.Tensor,
    piece_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
    kv_indices: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Rows of a paged cache that hold pieces of contexts: `page * page_size + place` of each token.

    For a cache viewed as pages of one token these are page ids. `MlaContextPlanner` calls this once a step.

    Parameters
    ----------
    block_tables
        `[requests, columns]` int32 or int64, page ids; rows may be strided.
    piece_requests, piece_starts
        int32 `[pieces]`: row of `block_tables`, and the first token in its request, of each piece.
    piece_indptr
        int32 `[pieces + 1]`: where each piece begins in the result.
    num_pages, page_size
        Of the cache; their product is an int32.
    kv_indices
        int32 `[tokens]`, written; -1 from `piece_indptr[-1]` on.
    backend
        "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit; on the CPU also for a page id out of range, a request without a
        row or a token without a column. On a GPU such a token gets -1 and is reported through
        `flashinfer.check_device_errors()`.
    """
    ops.mla_context_indices(
        block_tables,
        piece_requests,
        piece_starts,
        piece_indptr,
        num_pages,
        page_size,
        kv_indices,
        backend=backend,
    )
