# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Concatenation, under FlashInfer's module name. Signatures follow FlashInfer 0.7.4."""

from __future__ import annotations

import torch

from flashinfer.ops import concat_mla as ops


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Write the two parts of MLA's keys side by side: `k[t, h] = (k_nope[t, h], k_rope[t, 0])`.

    Parameters
    ----------
    k
        `[tokens, heads, nope_dim + rope_dim]`, bfloat16, float16 or an 8-bit float; written in place. Here and below,
        tokens and heads may be strided, the last dimension is contiguous. Must not share memory with the parts: they
        are read while it is written, in no order.
    k_nope
        `[tokens, heads, nope_dim]` of k's dtype; `nope_dim` is a multiple of 8. May be `k[..., :nope_dim]` itself,
        which is then left as it is.
    k_rope
        `[tokens, 1, rope_dim]` of k's dtype, shared by all heads of a token; `rope_dim` is a multiple of 8.
    backend
        "default", which is FlashInfer's word for "auto"; "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes, strides or devices that do not fit, and for a part that lies in k.
    BackendUnavailableError
        If no backend, or not the one named, takes the call.
    """
    ops.concat_mla_k(k, k_nope, k_rope, backend="auto" if backend == "default" else backend)
