# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion in plain torch.

Views and permutes, written without `PageFormat.offset`, so that each checks the other.
"""

from __future__ import annotations

import torch

from flashinfer.core import faults

# Same-width integers: copies stay bit for bit, and every width has indexed copies on every device.
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def why_not_convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    dst: str,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
) -> str | None:
    """None: takes every call."""
    return None


def convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    dst: str,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
) -> None:
    """Rewrite pages `block_ids` of every layer from kind `src` to kind `dst`, in place.

    Parameters
    ----------
    planes
        `planes_per_layer` tensors per layer, layer by layer; dimension 0 is the page and may have any stride,
        the rest is dense. Two planes hold the page's first and second half.
    planes_per_layer
        1 or 2.
    block_ids
        `[num_blocks]`, int32 or int64.
    src, dst
        Page kinds.
    num_kv_heads, page_size, head_dim
        `H`, `N`, `D`.
    """
    ids = block_ids.to(device=planes[0].device, dtype=torch.int64)
    _check_ids(ids, planes[0].size(0))
    if src == dst or ids.numel() == 0:
        return
    geometry = (num_kv_heads, page_size, head_dim)
    elements = 2 * num_kv_heads * page_size * head_dim // planes_per_layer
    for first in range(0, len(planes), planes_per_layer):
        rows = [_rows(plane, elements) for plane in planes[first : first + planes_per_layer]]
        pages = torch.cat([row.index_select(0, ids) for row in rows], dim=1)
        key, value = _unpack(pages, src, *geometry)
        converted = _pack(key, value, dst)
        for row, part in zip(rows, converted.chunk(planes_per_layer, dim=1), strict=True):
            row.index_copy_(0, ids, part)


def _check_ids(ids: torch.Tensor, num_pages: int) -> None:
    """Refuse ids out of range and ids listed twice, in the words of the compiled kernels; synchronises."""
    op, listed = "convert_kv_pages", ids.tolist()
    first_at: dict[int, int] = {}
    for i, block in enumerate(listed):
        if not 0 <= block < num_pages:
            faults.refuse(op, faults.BLOCK_ID_RANGE, i, block, num_pages)
        if first_at.setdefault(block, i) != i:
            faults.refuse(op, faults.BLOCK_ID_TWICE, i, block, first_at[block])


def _rows(plane: torch.Tensor, elements: int) -> torch.Tensor:
    """The plane itself as integers `[P, elements]`, so that writes land in the pool at any page stride."""
    flat = plane.as_strided((plane.shape[0], elements), (plane.stride(0), 1))
    return flat.view(_INTEGER_OF_SIZE[plane.element_size()])


def _unpack(pages: torch.Tensor, kind: str, H: int, N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[M, 2HND]` pages of `kind` to K and V `[M, H, N, D]`."""
    M, x = pages.shape[0], 16 // pages.element_size()
    if kind == "standard":
        tokens = pages.view(M, H, N, 2, D)
        return tokens[:, :, :, 0], tokens[:, :, :, 1]
    k, v = pages.chunk(2, dim=1)
    if kind == "split_hnd":
        return k.view(M, H, N, D), v.view(M, H, N, D)
    if kind == "split_nhd":
        return k.view(M, N, H, D).transpose(1, 2), v.view(M, N, H, D).transpose(1, 2)
    key = k.view(M, H, D // x, N, x).transpose(2, 3).reshape(M, H, N, D)
    if kind == "shuffled":
        return key, v.view(M, H, N // x, D, x).transpose(3, 4).reshape(M, H, N, D)
    # x_packed
    return key, v.view(M, H, D, N).transpose(2, 3)


def _pack(key: torch.Tensor, value: torch.Tensor, kind: str) -> torch.Tensor:
    """K and V `[M, H, N, D]` to `[M, 2HND]` pages of `kind`."""
    M, H, N, D = key.shape
    x = 16 // key.element_size()
    if kind == "standard":
        return torch.stack([key, value], dim=3).view(M, -1)
    if kind == "split_nhd":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    elif kind != "split_hnd":
        key = key.reshape(M, H, N, D // x, x).transpose(2, 3)
        # x_packed is one group of all tokens.
        group = x if kind == "shuffled" else N
        value = value.reshape(M, H, N // group, group, D).transpose(3, 4)
    return torch.cat([key.reshape(M, -1), value.reshape(M, -1)], dim=1)
