# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What to do with a peer that advertises a page-format tag: take its pages, convert them, or refuse it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from flashinfer.kv.format import DTYPES, KINDS, PageFormat, why_not_format

_LONGEST_TAG_SHOWN = 120


@dataclasses.dataclass(frozen=True)
class Scope:
    """Which conversions may be agreed on.

    Parameters
    ----------
    pairs
        Ordered `(source kind, destination kind)` pairs.
    dtypes
        Element types.
    page_sizes
        Tokens of a page; None for any.
    scales
        Whether pages that carry scales are in scope.
    """

    pairs: frozenset[tuple[str, str]]
    dtypes: frozenset[str]
    page_sizes: frozenset[int] | None = None
    scales: bool = False


# A ROCm decoder with 16- or 32-token shuffled pages that is fed by a prefill on standard pages.
DEFAULT = Scope(
    pairs=frozenset({("standard", "shuffled")}),
    dtypes=frozenset({"bfloat16", "float16"}),
    page_sizes=frozenset({16, 32}),
)

# Whatever moves bits only. Scales live outside the page, and nobody would rearrange them: they stay out.
BIT_EXACT = Scope(pairs=frozenset(itertools.permutations(KINDS, 2)), dtypes=frozenset(DTYPES))


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """Received pages are `src` and become `dst`, in place."""

    src: PageFormat
    dst: PageFormat


@dataclasses.dataclass(frozen=True)
class Same:
    """The peer's pages are read as they are."""


@dataclasses.dataclass(frozen=True)
class Convert:
    """The peer's pages are read, then converted."""

    plan: ConversionPlan


@dataclasses.dataclass(frozen=True)
class Reject:
    """The peer must be refused; `reason` names both tags and the remedy."""

    reason: str


def negotiate(
    local: PageFormat, remote_tag: str | None, *, convert: bool, scope: Scope = DEFAULT
) -> Same | Convert | Reject:
    """Decide what to do with a peer whose pages carry `remote_tag`.

    Pure: run it before the peer is registered anywhere. Tags are opaque: the tags of the formats this side
    could take are formatted, and compared with the peer's. A peer without a tag, or with an empty one, may
    write anything; it is trusted only where the local pages are `standard`.

    Parameters
    ----------
    local
        Format of the pages on this side, the receiving one.
    remote_tag
        `PageFormat.tag` of the peer, None if it sent none.
    convert
        Whether the user switched conversion on.
    scope
        The conversions that may be agreed on.

    Returns
    -------
    Same, Convert or Reject
    """
    if remote_tag is None or remote_tag == "":
        return _without_tag(local)
    if remote_tag == local.tag:
        return Same()
    for src in _other_kinds(local):
        if src.tag == remote_tag:
            return _another_kind(src, local, convert=convert, scope=scope)
    return Reject(
        f"{_both(local, remote_tag)}; they differ by more than the arrangement of a page, or the peer speaks "
        "another version: give both sides the same number of KV heads per rank, page size, head size, KV "
        "dtype and release"
    )


def _without_tag(local: PageFormat) -> Same | Reject:
    if local.kind == "standard":
        return Same()
    return Reject(
        f"the peer advertises no page format, local pages are {local.tag!r}; only standard pages may be "
        "paired with a peer that does not say what it writes: upgrade the peer, or use standard pages here"
    )


def _another_kind(src: PageFormat, local: PageFormat, *, convert: bool, scope: Scope) -> Convert | Reject:
    outside = _why_not_in_scope(src, local, scope)
    if outside is not None:
        return Reject(f"{_both(local, src.tag)}; {outside}: use the same page format on both sides")
    if not convert:
        return Reject(
            f"{_both(local, src.tag)}; they can be converted but conversion is off: set "
            '"convert_kv_pages": true on this side, or use the same page format on both sides'
        )
    return Convert(ConversionPlan(src, local))


def _why_not_in_scope(src: PageFormat, dst: PageFormat, scope: Scope) -> str | None:
    if (src.kind, dst.kind) not in scope.pairs:
        return f"converting {src.kind} pages to {dst.kind} pages is not in scope"
    if dst.dtype not in scope.dtypes:
        return f"converting {dst.dtype} pages is not in scope ({', '.join(sorted(scope.dtypes))})"
    if scope.page_sizes is not None and dst.page_size not in scope.page_sizes:
        return f"converting {dst.page_size}-token pages is not in scope ({sorted(scope.page_sizes)})"
    if dst.scale_mode is not None and not scope.scales:
        return f"converting pages with {dst.scale_mode} scales is not in scope"
    return None


def _other_kinds(local: PageFormat) -> Iterator[PageFormat]:
    for kind in KINDS:
        possible = why_not_format(kind, local.element_size, local.page_size, local.head_dim) is None
        if kind != local.kind and possible:
            yield dataclasses.replace(local, kind=kind)


def _both(local: PageFormat, remote_tag: str) -> str:
    # The peer's text goes into logs: escaped, and not longer than a log line can bear.
    shown = ascii(remote_tag)
    if len(shown) > _LONGEST_TAG_SHOWN:
        shown = f"{shown[:_LONGEST_TAG_SHOWN]}... ({len(remote_tag)} characters)"
    return f"the peer's pages are {shown}, local pages are {local.tag!r}"
