# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of KV pages from one format to another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from flashinfer.core.checks import describe, fail
from flashinfer.core.dtypes import KEEP, Recode, recode
from flashinfer.kv.format import PageFormat
from flashinfer.ops import page_convert as ops


def convert_kv_pages(
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    block_ids: torch.Tensor,
    src: PageFormat,
    dst: PageFormat,
    *,
    allow_inexact: bool = False,
    backend: str = "auto",
) -> None:
    """Convert the listed pages of every layer from `src` to `dst`, in place.

    The contract of a hand-off: before the call a page holds the bytes of a `src` page, after it those of the `dst` page
    with the same keys and values. Where a layer has two planes, the K plane's block followed by the V plane's block is
    the page, whatever its halves mean in `src`.

    Formats of unlike size nest: if `src` has fewer tokens or heads to a page than `dst`, then a page holds several
    `src` pages one after the other, token block by token block and within one head piece by head piece (and the other
    way round). So remote pages of 16 tokens become local ones of 64, and the head slices of several ranks one page.
    Tokens that no source page brought are converted like the rest, whatever they hold.

    Between the two flavours of 8-bit floats bytes are re-encoded. With a `scale_mode`, values are carried exactly where
    they can be, and the scale that goes with them must be multiplied by `scale_factor(src, dst)`; without one, values
    stay what they are, saturated and rounded to nearest even. NaN stays NaN.

    Parameters
    ----------
    caches
        One entry a layer: a tensor `[pages, ...]`, or a tuple of K plane and V plane, each `[pages, ...]` with half the
        bytes. Pages may have any stride; inside a page a tensor is dense. All of one dtype and on one device; the dtype
        only gives the element size, which must be that of the formats.
    block_ids
        `[n]` int32 or int64 on the same device, distinct ids of the pages to convert; may be empty.
    src, dst
        Formats of one head size, with numbers of heads and of tokens that divide each other.
    allow_inexact
        Whether a re-encoding may change values.
    backend
        "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError
        If formats or tensors do not fit each other, or values would change without leave; on the CPU also for an id out
        of range or listed twice, in which case nothing was changed. On a GPU a page id out of range is skipped and
        reported through `flashinfer.check_device_errors()`, and an id listed twice gives a page of undefined content.
    """
    planes, per_layer, rest = call_arguments(caches, src, dst, allow_inexact)
    if planes:
        ops.convert_kv_pages(planes, per_layer, block_ids, *rest, backend=backend)


def convert_kv_pages_into(
    sources: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    source_ids: torch.Tensor,
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    block_ids: torch.Tensor,
    src: PageFormat,
    dst: PageFormat,
    *,
    allow_inexact: bool = False,
    backend: str = "auto",
) -> None:
    """Convert pages of one pool into pages of another: in every layer `source_ids[i]` becomes `block_ids[i]`.

    Pages are read and written in no order: none that is written may share memory with one that is read.

    Parameters
    ----------
    sources, source_ids
        The pool to read, as `caches` in `convert_kv_pages`, and `[n]` ids in it.
    caches, block_ids
        The pool to write, of as many layers and with planes of its own, and `[n]` distinct ids in it.
    src, dst, allow_inexact, backend
        As in `convert_kv_pages`.

    Raises
    ------
    InvalidArgumentError
        As `convert_kv_pages`.
    """
    read, written, rest = into_arguments(sources, caches, src, dst, allow_inexact)
    if read[0] or written[0]:
        ops.convert_kv_pages_into(*read, source_ids, *written, block_ids, *rest, backend=backend)


def call_arguments(
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    src: PageFormat,
    dst: PageFormat,
    allow_inexact: bool,
) -> tuple[list[torch.Tensor], int, tuple[str, int, int, str, int, int, int, int]]:
    """Arguments of the op before its `block_ids`, of which there are two, and after."""
    _check_formats(src, dst)
    recode = KEEP if src.geometry == dst.geometry else _recode(src, dst, allow_inexact)
    planes, per_layer = _planes("caches", caches)
    if planes and isinstance(planes[0], torch.Tensor) and planes[0].element_size() != src.element_size:
        fail(ops.OP, "caches", f"of {src.element_size}-byte elements as {src.dtype}", describe(planes[0]))
    return planes, per_layer, (*_layouts(src, dst), recode.code)


def into_arguments(
    sources: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    src: PageFormat,
    dst: PageFormat,
    allow_inexact: bool,
) -> tuple[
    tuple[list[torch.Tensor], int],
    tuple[list[torch.Tensor], int],
    tuple[str, int, int, str, int, int, int, int],
]:
    """Arguments of the op that reads another pool: before `source_ids`, before `block_ids`, and after."""
    _check_formats(src, dst)
    recode = KEEP if src.geometry == dst.geometry else _recode(src, dst, allow_inexact)
    read = _planes("sources", sources)
    written = _planes("caches", caches)
    for name, (planes, _) in (("sources", read), ("caches", written)):
        if planes and isinstance(planes[0], torch.Tensor) and planes[0].element_size() != src.element_size:
            fail(ops.INTO, name, f"of {src.element_size}-byte elements as {src.dtype}", describe(planes[0]))
    return read, written, (*_layouts(src, dst), recode.code)


def _layouts(src: PageFormat, dst: PageFormat) -> tuple[str, int, int, str, int, int, int]:
    return src.kind, src.num_kv_heads, src.page_size, dst.kind, dst.num_kv_heads, dst.page_size, src.head_dim


def scale_factor(src: PageFormat, dst: PageFormat) -> float:
    """What the scale of converted values must be multiplied by: `value * scale` then means the same before and after.

    Parameters
    ----------
    src, dst
        The formats given to `convert_kv_pages`.

    Raises
    ------
    InvalidArgumentError
        If pages of these formats cannot be converted.
    """
    return _recode(src, dst, allow_inexact=True).scale


def _recode(src: PageFormat, dst: PageFormat, allow_inexact: bool) -> Recode:
    """How bytes change between two formats; refuses formats that do not fit."""
    for what in ("head_dim", "scale_mode"):
        if getattr(src, what) != getattr(dst, what):
            fail(ops.OP, "dst", f"of src's {what} {getattr(src, what)}", getattr(dst, what))
    for what in ("num_kv_heads", "page_size"):
        ours, theirs = getattr(src, what), getattr(dst, what)
        if ours % theirs and theirs % ours:
            fail(ops.OP, "dst", f"of a {what} that divides src's {ours} or is a multiple of it", theirs)
    found = recode(src.dtype, dst.dtype, scaled=src.scale_mode is not None)
    if found is None:
        fail(ops.OP, "dst", f"of src's dtype {src.dtype}", dst.dtype)
    if not found.exact and not allow_inexact:
        remedy = "pass allow_inexact=True if values may be rounded and saturated"
        fail(ops.OP, "dst", f"of a dtype that holds every {src.dtype} value", dst.dtype, remedy)
    return found


def _planes(
    name: str,
    caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], int]:
    """All planes, layer after layer, and how many a layer has. What they are is the op's business."""
    if not isinstance(caches, (list, tuple)):
        fail(ops.OP, name, "a list with one entry a layer", describe(caches), "pass [cache]")
    if not caches or isinstance(caches[0], torch.Tensor):
        return list(caches), 1
    for i, layer in enumerate(caches):
        if not isinstance(layer, (list, tuple)) or len(layer) != 2:
            got = describe(layer) if not isinstance(layer, (list, tuple)) else f"{len(layer)} planes"
            fail(ops.OP, f"{name}[{i}]", "a tuple of K and V plane, as all layers or none", got)
    return list(chain.from_iterable(caches)), 2


def _check_formats(src: PageFormat, dst: PageFormat) -> None:
    for name, page in (("src", src), ("dst", dst)):
        if not isinstance(page, PageFormat):
            fail(ops.OP, name, "a PageFormat", repr(page))
