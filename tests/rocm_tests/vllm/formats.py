# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Where an element of a page lies, restated from what the backends' writers do, and not from `PageFormat`."""

from __future__ import annotations

import torch


def places(kind: str, heads: int, tokens: int, dim: int, size: int) -> torch.Tensor:
    """Element index in a page of each `[2, heads, tokens, dim]`; an element has `size` bytes."""
    kv, h, n, d = torch.meshgrid(*(torch.arange(m) for m in (2, heads, tokens, dim)), indexing="ij")
    x, half = 16 // size, heads * tokens * dim
    if kind == "standard":
        return (h * tokens + n) * 2 * dim + kv * dim + d
    if kind == "split_nhd":
        return kv * half + (n * heads + h) * dim + d
    keys = ((h * (dim // x) + d // x) * tokens + n) * x + d % x
    if kind == "shuffled":
        values = ((h * (tokens // x) + n // x) * dim + d) * x + n % x
    elif kind == "x_packed":
        values = (h * dim + d) * tokens + n
    else:
        raise ValueError(kind)
    return torch.where(kv == 0, keys, half + values)


def joined(values: torch.Tensor, ratio: int, pages: int) -> torch.Tensor:
    """`[layers, small pages, 2, heads, N, D]` as `pages` pages of `ratio` times the tokens; what is missing is zero."""
    missing = pages * ratio - values.shape[1]
    padded = torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], dim=1)
    return padded.unflatten(1, (pages, ratio)).movedim(2, 4).flatten(4, 5)
