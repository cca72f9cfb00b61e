# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Kind of the pages, and this package's view of vLLM's cache tensors. No vLLM class is needed for either."""

from __future__ import annotations

import torch

from flashinfer.core import env

STANDARD, SHUFFLED = "standard", "shuffled"


def configured_kind() -> str:
    """The kind of page that engines of this process keep.

    `FLASHINFER_VLLM_PAGES` goes first. Without it vLLM's own `VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT` decides, so that a
    command line for ROCM_AITER_FA means the same pages here.

    From the environment and not from vLLM's configuration: the answer is wanted in each process of an engine, also
    where vLLM has no configuration at hand.
    """
    kind = env.vllm_pages()
    if kind:
        return kind
    import vllm.envs as envs

    return SHUFFLED if envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT else STANDARD


def split_views(
    kv_cache: torch.Tensor, kind: str, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """K, V and the name of their layout, as this package's ops take them.

    Parameters
    ----------
    kv_cache
        A layer's cache as vLLM hands it out, whatever the strides of its blocks. Standard pages: `[blocks,
        num_kv_heads, page_size, 2 * head_dim]`. Shuffled ones, in dense slots for K and V: `[blocks, 2, page_size,
        num_kv_heads * head_dim]`.
    kind
        Which of the two it is: with two heads a rank the shapes are equal.
    num_kv_heads, head_dim
        Of this rank's layer.

    Returns
    -------
    tuple
        `(k, v, kv_layout)`: views, nothing is copied.
    """
    if kind == STANDARD:
        return kv_cache[..., :head_dim], kv_cache[..., head_dim:], "HND"
    blocks, _, page_size, _ = kv_cache.shape
    x = 16 // kv_cache.element_size()
    k, v = kv_cache.unbind(1)
    return (
        k.view(blocks, num_kv_heads, head_dim // x, page_size, x),
        v.view(blocks, num_kv_heads, page_size // x, head_dim, x),
        "SHUFFLED",
    )
