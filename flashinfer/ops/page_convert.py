# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Op of the in-place page conversion."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, index_vector
from flashinfer.core.op import Op
from flashinfer.kv.format import KINDS, why_not_format

OP = "convert_kv_pages"


def _check_plane(index: int, plane: torch.Tensor, first: torch.Tensor, plane_bytes: int) -> None:
    name = f"planes[{index}]"
    if plane.dim() < 2:
        fail(OP, name, "[pages, ...]", describe(plane))
    for what in ("dtype", "device"):
        want, got = getattr(first, what), getattr(plane, what)
        if got != want:
            fail(OP, name, f"of the first plane's {what} {want}", got)
    if plane.size(0) != first.size(0):
        fail(OP, name, f"of the first plane's {first.size(0)} pages", plane.size(0))
    page = plane.shape[1:].numel() * plane.element_size()
    if page != plane_bytes:
        fail(
            OP,
            name,
            f"of {plane_bytes} bytes to a page, as the format says",
            f"{page} bytes, {describe(plane)}",
        )
    expected = 1
    for dim in range(plane.dim() - 1, 0, -1):
        if plane.size(dim) != 1 and plane.stride(dim) != expected:
            fail(OP, name, "dense inside a page; only pages may be strided", f"stride {plane.stride()}")
        expected *= plane.size(dim)
    if plane.size(0) > 1 and plane.stride(0) < expected:
        fail(OP, name, "of pages that do not overlap", f"stride {plane.stride()}")


def _check_convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    dst: str,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
) -> None:
    if planes_per_layer not in (1, 2) or not planes or len(planes) % planes_per_layer:
        fail(OP, "caches", "a non-empty list of pages, or of (K plane, V plane) pairs", f"{len(planes)} planes")
    for i, plane in enumerate(planes):
        if not isinstance(plane, torch.Tensor):
            fail(OP, f"planes[{i}]", "a tensor", describe(plane))
    for name, size in (("num_kv_heads", num_kv_heads), ("page_size", page_size), ("head_dim", head_dim)):
        if size < 1:
            fail(OP, name, "positive", size)
    first = planes[0]
    if first.element_size() not in (1, 2, 4):
        fail(OP, "caches", "of 1-, 2- or 4-byte elements", first.dtype)
    for name, kind in (("src", src), ("dst", dst)):
        if kind not in KINDS:
            fail(OP, name, f"one of {KINDS}", repr(kind))
        reason = why_not_format(kind, first.element_size(), page_size, head_dim)
        if reason is not None:
            fail(OP, name, "a format that these pages can have", reason)
    page_bytes = 2 * num_kv_heads * page_size * head_dim * first.element_size()
    for i, plane in enumerate(planes):
        _check_plane(i, plane, first, page_bytes // planes_per_layer)
    index_vector(OP, "block_ids", block_ids, first.device)
    if page_bytes >= 1 << 30:
        fail(OP, "caches", "of pages below 1 GiB", f"{page_bytes} bytes")


convert_kv_pages = Op(
    OP,
    "page_convert",
    "Tensor(a!)[] planes, int planes_per_layer, Tensor block_ids, str src, str dst, int num_kv_heads, "
    "int page_size, int head_dim -> ()",
    check=_check_convert_kv_pages,
    # Measured on an H200 (docs/measurements.md): native runs at the speed of a copy, torch ops at a twentieth of it.
    backends=("native", "reference"),
)
