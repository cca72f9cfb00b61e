# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of KV pages from one format to another, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from flashinfer.core.checks import describe, fail
from flashinfer.kv.format import PageFormat
from flashinfer.ops import page_convert as ops


def convert_kv_pages(
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    block_ids: torch.Tensor,
    src: PageFormat,
    dst: PageFormat,
    *,
    backend: str = "auto",
) -> None:
    """Convert the listed pages of every layer from `src` to `dst`, in place and bit for bit.

    The contract of a hand-off: before the call a page holds the bytes of a `src` page, after it those of the `dst` page
    with the same keys and values. Where a layer has two planes, the K plane's block followed by the V plane's block is
    the page, whatever its halves mean in `src`.

    Parameters
    ----------
    caches
        One entry a layer: a tensor `[pages, ...]`, or a tuple of K plane and V plane, each `[pages, ...]` with half the
        bytes. Pages may have any stride; inside a page a tensor is dense. All of one dtype and on one device; the dtype
        only gives the element size, which must be that of the formats.
    block_ids
        `[n]` int32 or int64 on the same device, distinct ids of the pages to convert; may be empty.
    src, dst
        Formats of one geometry and dtype.
    backend
        "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError
        If formats or tensors do not fit each other; on the CPU also for an id out of range or listed twice, in which
        case nothing was changed. On a GPU a page id out of range is skipped and reported through
        `flashinfer.check_device_errors()`, and an id listed twice gives a page of undefined content.
    """
    name = ops.OP
    if src.geometry != dst.geometry:
        for what in ("dtype", "num_kv_heads", "page_size", "head_dim", "scale_mode"):
            if getattr(src, what) != getattr(dst, what):
                fail(name, "dst", f"of src's {what} {getattr(src, what)}", getattr(dst, what))
    planes, per_layer = _planes(caches)
    if not planes:
        return
    if planes[0].element_size() != src.element_size:
        fail(name, "caches", f"of {src.element_size}-byte elements as {src.dtype}", describe(planes[0]))
    ops.convert_kv_pages(
        planes,
        per_layer,
        block_ids,
        src.kind,
        dst.kind,
        src.num_kv_heads,
        src.page_size,
        src.head_dim,
        backend=backend,
    )


def _planes(
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], int]:
    """All planes, layer after layer, and how many a layer has. What they are is the op's business."""
    if isinstance(caches, torch.Tensor):
        fail(ops.OP, "caches", "a sequence with one entry a layer", describe(caches), "pass [cache]")
    if not caches or isinstance(caches[0], torch.Tensor):
        return list(caches), 1  # type: ignore[arg-type]
    planes = list(chain.from_iterable(caches))
    if len(planes) != 2 * len(caches) or len(caches[0]) != 2:
        got = [describe(c) if isinstance(c, torch.Tensor) else f"{len(c)} planes" for c in caches]
        fail(ops.OP, "caches", "tensors, or tuples of K and V plane, alike for all layers", got)
    return planes, 2
