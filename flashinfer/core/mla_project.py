# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Up-projection of gathered MLA rows with a matrix product of torch's, scaled values widened first.

FP8 values are multiplied with their scales in float32 and rounded once. To cast a weight down to the cache's FP8
instead, as some kernels do, would cost it four of its eight bits.
"""

from __future__ import annotations

import torch

SCALE_BLOCK = 128


def scale_mode(weight: torch.Tensor, weight_scale: torch.Tensor | None) -> str | None:
    """ "none", "row" or "block"; None if the scale fits no way of scaling the weight."""
    if weight_scale is None:
        return "none"
    rows, rank = weight.shape
    if tuple(weight_scale.shape) in ((rows,), (rows, 1)):
        return "row"
    blocks = -(-rows // SCALE_BLOCK), -(-rank // SCALE_BLOCK)
    return "block" if tuple(weight_scale.shape) == blocks else None


def widened(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`values` times one scale, as `dtype`; what has no scale stays what it is."""
    if scale is None:
        return values
    work = torch.promote_types(dtype, torch.float32)
    # One element may come with any number of dimensions, which the product would have too.
    scale = scale.view(()) if scale.numel() == 1 else scale
    return (values.to(work) * scale.to(work)).to(dtype)


def widened_weight(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A weight `[rows, rank]` times its scales, one a row or one for each 128 x 128 block, as `dtype`."""
    if scale is None:
        return weight
    rows, rank = weight.shape
    if scale_mode(weight, scale) == "row":
        return widened(weight, scale.view(rows, 1), dtype)
    blocks = scale.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :rank]
    return widened(weight, blocks, dtype)


def project(latent: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`[tokens, heads, nope + v]` of gathered rows `[tokens, >= rank]` and a weight of their dtype."""
    rows, rank = weight.shape
    return (latent[:, :rank] @ weight.T).view(latent.size(0), heads, rows // heads)
