# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Custom masks of a batch as bits: little-endian inside a byte, each request from a byte of its own on."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail


def mask_indptr(bits: torch.Tensor) -> torch.Tensor:
    """Where each request's bytes begin, int64 `[batch_size + 1]`, from each request's `q_len * kv_len` bits."""
    starts = torch.zeros(bits.numel() + 1, dtype=torch.int64)
    torch.cumsum((bits + 7) // 8, 0, out=starts[1:])
    return starts


def pack_mask(where: str, mask: torch.Tensor, bits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bits of masks that follow one another, row by row.

    Parameters
    ----------
    where
        Who is speaking in an error.
    mask
        `[>= bits.sum()]` bool, of any shape; what follows is not looked at.
    bits
        `[batch_size]` int64 on the host, `q_len * kv_len` of each request.
    device
        Where the result shall be.

    Returns
    -------
    torch.Tensor
        uint8, `mask_indptr(bits)[-1]` bytes.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        fail(where, "custom_mask", "a bool tensor", describe(mask))
    total = int(bits.sum())
    if mask.numel() < total:
        fail(where, "custom_mask", f"of {total} elements, the sum of q_len * kv_len", mask.numel())
    starts = mask_indptr(bits)
    flat = mask.reshape(-1)[:total].to(device)
    if not bool((bits % 8).any()):
        return _bytes(flat)
    # How much further each request begins when all before it are padded to bytes.
    shift = 8 * starts[:-1] - (bits.cumsum(0) - bits)
    place = torch.arange(total, device=device) + torch.repeat_interleave(
        shift.to(device), bits.to(device), output_size=total
    )
    padded = torch.zeros(8 * int(starts[-1]), dtype=torch.uint8, device=device)
    padded[place] = flat.to(torch.uint8)
    return _bytes(padded)


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
