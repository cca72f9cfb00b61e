# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ops of page conversion: in place, and from one pool to another."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flashinfer.core.checks import describe, fail, index_vector
from flashinfer.core.op import Op
from flashinfer.kv.format import KINDS, MAX_PAGE_BYTES, why_not_format

OP = "convert_kv_pages"
INTO = "convert_kv_pages_into"
RECODES = range(5)


def _check_plane(op: str, name: str, plane: torch.Tensor, first: torch.Tensor, plane_bytes: int) -> None:
    if plane.dim() < 2:
        fail(op, name, "[pages, ...]", describe(plane))
    for what in ("dtype", "device"):
        want, got = getattr(first, what), getattr(plane, what)
        if got != want:
            fail(op, name, f"of the first plane's {what} {want}", got)
    if plane.size(0) != first.size(0):
        fail(op, name, f"of the first plane's {first.size(0)} pages", plane.size(0))
    page = plane.shape[1:].numel() * plane.element_size()
    if page != plane_bytes:
        got = f"{page} bytes, {describe(plane)}"
        fail(op, name, f"of {plane_bytes} bytes to a page, as the format says", got)
    expected = 1
    for dim in range(plane.dim() - 1, 0, -1):
        if plane.size(dim) != 1 and plane.stride(dim) != expected:
            fail(op, name, "dense inside a page; only pages may be strided", f"stride {plane.stride()}")
        expected *= plane.size(dim)
    if plane.size(0) > 1 and plane.stride(0) < expected:
        fail(op, name, "of pages that do not overlap", f"stride {plane.stride()}")


def _check_list(op: str, name: str, planes: list[torch.Tensor], per_layer: int) -> None:
    if per_layer not in (1, 2) or not planes or len(planes) % per_layer:
        fail(op, name, "a non-empty list of pages, or of (K plane, V plane) pairs", f"{len(planes)} planes")
    for i, plane in enumerate(planes):
        if not isinstance(plane, torch.Tensor):
            fail(op, f"{name}[{i}]", "a tensor", describe(plane))
    if planes[0].element_size() not in (1, 2, 4):
        fail(op, name, "of 1-, 2- or 4-byte elements", planes[0].dtype)


def _check_distinct(op: str, name: str, planes: list[torch.Tensor]) -> None:
    """Bytes that two planes share would be converted twice. Pages of several planes may take turns in memory."""
    if any(p.is_meta or isinstance(p, FakeTensor) or not p.numel() for p in planes):
        return
    size = planes[0].shape[1:].numel() * planes[0].element_size()
    order = sorted(range(len(planes)), key=lambda i: planes[i].data_ptr())
    for at, i in enumerate(order):
        stride = planes[i].stride(0) * planes[i].element_size()
        end = planes[i].data_ptr() + (planes[i].size(0) - 1) * stride + size
        for j in order[at + 1 :]:
            apart = planes[j].data_ptr() - planes[i].data_ptr()
            if planes[j].data_ptr() >= end:
                break
            alike = planes[j].stride(0) * planes[j].element_size() == stride and planes[i].size(0) > 1
            if not alike or apart % stride < size or stride - apart % stride < size:
                first, second = sorted((i, j))
                fail(op, f"{name}[{second}]", "a plane of its own", f"the memory of {name}[{first}]")


def _check_layouts(
    op: str, element_size: int, src: tuple[str, int, int], dst: tuple[str, int, int], head_dim: int, recode: int
) -> int:
    """Bytes of a page."""
    for name, (kind, heads, page_size) in (("src", src), ("dst", dst)):
        if kind not in KINDS:
            fail(op, name, f"one of {KINDS}", repr(kind))
        for what, size in ((f"{name}_heads", heads), (f"{name}_page_size", page_size), ("head_dim", head_dim)):
            if size < 1:
                fail(op, what, "positive", size)
        reason = why_not_format(kind, element_size, page_size, head_dim)
        if reason is not None:
            fail(op, name, "a format that these pages can have", reason)
    for what, a, b in (("heads", src[1], dst[1]), ("page_size", src[2], dst[2])):
        if a % b and b % a:
            fail(op, f"dst_{what}", f"a multiple or a divisor of src_{what} {a}", b)
    if recode not in RECODES or (recode and element_size != 1):
        fail(op, "recode", "0, or 1 to 4 for 1-byte elements", recode)
    page_bytes = 2 * max(src[1], dst[1]) * max(src[2], dst[2]) * head_dim * element_size
    if page_bytes >= MAX_PAGE_BYTES:
        fail(op, "pages", "below 1 GiB", f"{page_bytes} bytes")
    return page_bytes


def _check_convert_kv_pages(
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
    _check_list(OP, "caches", planes, planes_per_layer)
    first = planes[0]
    layouts = (src, src_heads, src_page_size), (dst, dst_heads, dst_page_size)
    page_bytes = _check_layouts(OP, first.element_size(), *layouts, head_dim, recode)
    for i, plane in enumerate(planes):
        _check_plane(OP, f"planes[{i}]", plane, first, page_bytes // planes_per_layer)
    _check_distinct(OP, "planes", planes)
    index_vector(OP, "block_ids", block_ids, first.device)


convert_kv_pages = Op(
    OP,
    "page_convert",
    "Tensor(a!)[] planes, int planes_per_layer, Tensor block_ids, str src, int src_heads, int src_page_size, "
    "str dst, int dst_heads, int dst_page_size, int head_dim, int recode -> ()",
    check=_check_convert_kv_pages,
    # Measured on an H200 (docs/measurements.md): native at 91% of a copy's rate, torch operations at 11% and less.
    backends=("native", "reference"),
)


def _check_convert_kv_pages_into(
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
    _check_list(INTO, "sources", sources, sources_per_layer)
    _check_list(INTO, "planes", planes, planes_per_layer)
    first = planes[0]
    if len(sources) * planes_per_layer != len(planes) * sources_per_layer:
        got = f"{len(planes) // planes_per_layer} and {len(sources) // sources_per_layer}"
        fail(INTO, "planes", "of as many layers as sources", got)
    for what in ("device", "itemsize"):
        want, got_size = getattr(first, what), getattr(sources[0], what)
        if got_size != want:
            fail(INTO, "sources", f"of planes' {what} {want}", got_size)
    layouts = (src, src_heads, src_page_size), (dst, dst_heads, dst_page_size)
    page_bytes = _check_layouts(INTO, first.element_size(), *layouts, head_dim, recode)
    for name, pool, per_layer in (("sources", sources, sources_per_layer), ("planes", planes, planes_per_layer)):
        for i, plane in enumerate(pool):
            _check_plane(INTO, f"{name}[{i}]", plane, pool[0], page_bytes // per_layer)
        _check_distinct(INTO, name, pool)
    index_vector(INTO, "source_ids", source_ids, first.device)
    index_vector(INTO, "block_ids", block_ids, first.device)
    if source_ids.size(0) != block_ids.size(0):
        fail(INTO, "source_ids", f"of block_ids' length {block_ids.size(0)}", source_ids.size(0))


convert_kv_pages_into = Op(
    INTO,
    "page_convert",
    "Tensor[] sources, int sources_per_layer, Tensor source_ids, Tensor(a!)[] planes, int planes_per_layer, "
    "Tensor block_ids, str src, int src_heads, int src_page_size, str dst, int dst_heads, int dst_page_size, "
    "int head_dim, int recode -> ()",
    check=_check_convert_kv_pages_into,
    backends=("native", "reference"),
)
