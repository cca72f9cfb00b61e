# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion in plain torch.

Views and permutes, written without `PageFormat.offset`, so that each checks the other.
"""

from __future__ import annotations

import torch

from flashinfer.core import faults
from flashinfer.core.dtypes import FNUZ, OCP

# Kind, heads and tokens of a page or of the little pages that it is made of.
Layout = tuple[str, int, int]

# Same-width integers: copies stay bit for bit, and every width has indexed copies on every device.
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def why_not_convert_kv_pages(*args: object) -> str | None:
    return None


def convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    src_heads: int,
    src_page_size: int,
    dst: str,
    dst_heads: int,
    dst_page_size: int,
    head_dim: int,
    recode: int,
) -> None:
    layouts = (src, src_heads, src_page_size), (dst, dst_heads, dst_page_size)
    ids = _checked_ids(block_ids, planes[0].size(0))
    _convert(planes, planes_per_layer, ids, planes, planes_per_layer, ids, *layouts, head_dim, recode)


def why_not_convert_kv_pages_into(*args: object) -> str | None:
    return None


def convert_kv_pages_into(
    sources: list[torch.Tensor],
    sources_per_layer: int,
    source_ids: torch.Tensor,
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    src_heads: int,
    src_page_size: int,
    dst: str,
    dst_heads: int,
    dst_page_size: int,
    head_dim: int,
    recode: int,
) -> None:
    layouts = (src, src_heads, src_page_size), (dst, dst_heads, dst_page_size)
    from_ids = _checked_ids(source_ids, sources[0].size(0), written=False)
    to_ids = _checked_ids(block_ids, planes[0].size(0))
    _convert(sources, sources_per_layer, from_ids, planes, planes_per_layer, to_ids, *layouts, head_dim, recode)


def _convert(
    sources: list[torch.Tensor],
    sources_per_layer: int,
    source_ids: torch.Tensor,
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: Layout,
    dst: Layout,
    head_dim: int,
    recode: int,
) -> None:
    """Layer by layer: gather the pages, take them apart into K and V `[M, H, N, D]`, put them together again."""
    if block_ids.numel() == 0:
        return
    H, N = max(src[1], dst[1]), max(src[2], dst[2])
    elements = 2 * H * N * head_dim
    for layer in range(len(planes) // planes_per_layer):
        rows = _layer(sources, sources_per_layer, layer, elements)
        pages = torch.cat([row.index_select(0, source_ids) for row in rows], dim=1)
        key, value = _from_pieces(pages, src, H, N, head_dim)
        converted = _recoded(_to_pieces(key, value, dst), recode)
        out = _layer(planes, planes_per_layer, layer, elements)
        for row, part in zip(out, converted.chunk(planes_per_layer, dim=1), strict=True):
            row.index_copy_(0, block_ids, part)


def _layer(planes: list[torch.Tensor], per_layer: int, layer: int, elements: int) -> list[torch.Tensor]:
    return [_rows(p, elements // per_layer) for p in planes[layer * per_layer : (layer + 1) * per_layer]]


def _checked_ids(ids: torch.Tensor, num_pages: int, *, written: bool = True) -> torch.Tensor:
    """The ids as int64. Refuses ids out of range, and in what is written ids listed twice; synchronises."""
    op, listed = "convert_kv_pages", ids.tolist()
    code = faults.BLOCK_ID_RANGE if written else faults.SOURCE_ID_RANGE
    first_at: dict[int, int] = {}
    for i, block in enumerate(listed):
        if not 0 <= block < num_pages:
            faults.refuse(op, code, i, block, num_pages)
        if first_at.setdefault(block, i) != i and written:
            faults.refuse(op, faults.BLOCK_ID_TWICE, i, block, first_at[block])
    return ids.long()


def _rows(plane: torch.Tensor, elements: int) -> torch.Tensor:
    """The plane itself as integers `[P, elements]`, so that writes land in the pool at any page stride."""
    flat = plane.as_strided((plane.shape[0], elements), (plane.stride(0), 1))
    return flat.view(_INTEGER_OF_SIZE[plane.element_size()])


def _from_pieces(pages: torch.Tensor, layout: Layout, H: int, N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[M, 2HND]` pages, each a grid of token blocks of head pieces, to K and V `[M, H, N, D]`."""
    kind, heads, tokens = layout
    blocks, pieces = N // tokens, H // heads
    little = pages.reshape(-1, 2 * heads * tokens * D)
    key, value = (
        part.unflatten(0, (-1, blocks, pieces)).permute(0, 2, 3, 1, 4, 5).reshape(-1, H, N, D)
        for part in _unpack(little, kind, heads, tokens, D)
    )
    return key, value


def _to_pieces(key: torch.Tensor, value: torch.Tensor, layout: Layout) -> torch.Tensor:
    kind, heads, tokens = layout
    M, H, N, D = key.shape
    key, value = (
        part.reshape(M, H // heads, heads, N // tokens, tokens, D)
        .permute(0, 3, 1, 2, 4, 5)
        .reshape(-1, heads, tokens, D)
        for part in (key, value)
    )
    return _pack(key, value, kind).reshape(M, -1)


def _recoded(pages: torch.Tensor, code: int) -> torch.Tensor:
    """Bytes of one 8-bit float re-encoded as the other through float32; the codes are those of core/dtypes.py."""
    if code == 0:
        return pages
    src, dst = (OCP, FNUZ) if code in (1, 3) else (FNUZ, OCP)
    values = pages.view(src).float() * {1: 0.5, 2: 2.0}.get(code, 1.0)
    most = torch.finfo(dst).max
    return values.clamp(-most, most).to(dst).view(pages.dtype)


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
