# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of an MLA layer, and its cache seen row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer.core.checks import INT32_MAX, describe, integer


@dataclass(frozen=True)
class MlaShape:
    """Sizes of an MLA layer on one rank.

    Parameters
    ----------
    num_heads
        Query heads; keys and values have as many.
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        Of a cached latent, of the two parts of a head's queries and keys, and of its values.

    Raises
    ------
    InvalidArgumentError
        For sizes that are not positive integers; only `qk_rope_head_dim` may be 0.
    """

    num_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            integer("MlaShape", name, size, 0 if name == "qk_rope_head_dim" else 1, INT32_MAX)

    @property
    def qk_head_dim(self) -> int:
        """Both parts of a head's queries."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def bytes_per_token(self, dtype: torch.dtype, *, fused: bool) -> int:
        """Bytes of workspace that a context token takes.

        Fused these are its keys and values. Unfused they are its latent, the product of keys' and values' parts, of
        which the values stay where they are, and the keys.
        """
        keys, values = self.num_heads * self.qk_head_dim, self.num_heads * self.v_head_dim
        if fused:
            return (keys + values) * dtype.itemsize
        latent = self.kv_lora_rank + self.qk_rope_head_dim
        product = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return (latent + product + keys) * dtype.itemsize


def why_not_rows(kv_cache: torch.Tensor) -> str | None:
    """A sentence if a cache is not rows all at one distance, each in one piece."""
    if kv_cache.dim() != 3:
        return f"needs a cache [pages, page_size, dim], got {describe(kv_cache)}"
    pages, page_size, dim = kv_cache.shape
    if dim > 1 and kv_cache.stride(2) != 1:
        return f"needs a cache contiguous in its last dimension, got stride {kv_cache.stride()}"
    if pages > 1 and page_size > 1 and kv_cache.stride(0) != page_size * kv_cache.stride(1):
        return f"needs a cache without gaps between pages, got stride {kv_cache.stride()} of {list(kv_cache.shape)}"
    return None


def is_flat(kv_cache: torch.Tensor, kv_indptr: torch.Tensor, prefix: torch.Tensor) -> bool:
    """Whether a token's place is its entry in the page table: pages of one token, and one tensor for both indptrs."""
    same = kv_indptr is prefix or (kv_indptr.data_ptr() == prefix.data_ptr() and kv_indptr.dtype == prefix.dtype)
    return kv_cache.size(1) == 1 and same


def cache_rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """A cache as pages of one token, `[pages * page_size, 1, dim]`, on the same memory."""
    pages, page_size, dim = kv_cache.shape
    row = kv_cache.stride(1) if page_size > 1 else kv_cache.stride(0)
    return kv_cache.as_strided((pages * page_size, 1, dim), (row, row, 1))
