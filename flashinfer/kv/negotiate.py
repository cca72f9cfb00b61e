# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What to do with a peer that advertises a page-format tag: take its pages, convert them, or refuse it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from flashinfer.core.dtypes import FP8, recode
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv.format import DTYPES, KINDS, MAX_PAGE_BYTES, PageFormat, why_not_format

RECODES = ("no", "exact", "any")
FP8_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in FP8)

_LONGEST_TAG_SHOWN = 120


@dataclasses.dataclass(frozen=True)
class Scope:
    """Which conversions may be agreed on.

    Parameters
    ----------
    pairs
        Ordered `(source kind, destination kind)` pairs. Pages of one kind that differ otherwise need no pair.
    dtypes
        Element types of the local pages.
    page_sizes
        Tokens of a local page; None for any.
    scales
        Whether pages that carry scales are in scope.
    token_blocks
        Whether several of the peer's pages may make one local page, of a multiple of their tokens.
    head_pieces
        Whether head slices of several ranks may make one local page, each slice a whole little page.
    recode
        Whether bytes may be re-encoded between the two flavours of 8-bit floats: "no", "exact" (every value survives,
        the scale included) or "any".
    """

    pairs: frozenset[tuple[str, str]]
    dtypes: frozenset[str]
    page_sizes: frozenset[int] | None = None
    scales: bool = False
    token_blocks: bool = False
    head_pieces: bool = False
    recode: str = "no"

    def __post_init__(self) -> None:
        if self.recode not in RECODES:
            raise InvalidArgumentError(f"Scope: recode must be one of {RECODES}, got {self.recode!r}")
        kinds = set(itertools.product(KINDS, repeat=2))
        for name, known in (("pairs", kinds), ("dtypes", set(DTYPES)), ("page_sizes", None)):
            value = getattr(self, name)
            if value is None and known is None:
                continue
            if not isinstance(value, (frozenset, set)):
                raise InvalidArgumentError(f"Scope: {name} must be a set, got {value!r}")
            for one in value:
                fits = one in known if known is not None else isinstance(one, int)
                if not fits:
                    what = {"pairs": "pairs of KINDS", "dtypes": f"some of {DTYPES}", "page_sizes": "integers"}[name]
                    raise InvalidArgumentError(f"Scope: {name} must hold {what}, got {one!r}")


# A ROCm decoder with 16- or 32-token shuffled pages that is fed by a prefill on standard pages.
DEFAULT = Scope(
    pairs=frozenset({("standard", "shuffled")}),
    dtypes=frozenset({"bfloat16", "float16"}),
    page_sizes=frozenset({16, 32}),
)

# Whatever moves bits only. Scales live outside the page, and nobody would rearrange them: they stay out.
BIT_EXACT = Scope(pairs=frozenset(itertools.permutations(KINDS, 2)), dtypes=frozenset(DTYPES))


# Whatever `convert_kv_pages` can do without loss.
EXACT = dataclasses.replace(BIT_EXACT, scales=True, token_blocks=True, head_pieces=True, recode="exact")


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """Received pages are `src` and become `dst`, in place.

    Where `src` has fewer tokens or heads than `dst`, a local page receives several, one after the other, as
    `convert_kv_pages` says. Where the dtype changes, the scale changes by `scale_factor(src, dst)`.
    """

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

    Raises
    ------
    InvalidArgumentError
        If an argument is of another type than it must be.
    """
    for name, value, type_ in (("local", local, PageFormat), ("convert", convert, bool), ("scope", scope, Scope)):
        if not isinstance(value, type_):
            raise InvalidArgumentError(f"negotiate: {name} must be a {type_.__name__}, got {value!r:.80}")
    if remote_tag is not None and not isinstance(remote_tag, str):
        raise InvalidArgumentError(f"negotiate: remote_tag must be a str or None, got {type(remote_tag).__name__}")
    if remote_tag is None or remote_tag == "":
        return _without_tag(local)
    if remote_tag == local.tag:
        return Same()
    for src in _others(local):
        if src.tag == remote_tag:
            return _another_format(src, local, convert=convert, scope=scope)
    if any(src.tag == remote_tag for src in _larger(local)):
        return Reject(
            f"{_both(local, remote_tag)}; the peer's page has more tokens or heads than a local one, and a part of a "
            "page is not read: give this side pages as large, or the peer smaller ones"
        )
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


def _another_format(src: PageFormat, local: PageFormat, *, convert: bool, scope: Scope) -> Convert | Reject:
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
    if src.kind != dst.kind and (src.kind, dst.kind) not in scope.pairs:
        return f"converting {src.kind} pages to {dst.kind} pages is not in scope"
    if dst.dtype not in scope.dtypes:
        return f"converting {dst.dtype} pages is not in scope ({', '.join(sorted(scope.dtypes))})"
    if scope.page_sizes is not None and dst.page_size not in scope.page_sizes:
        return f"converting {dst.page_size}-token pages is not in scope ({sorted(scope.page_sizes)})"
    if dst.scale_mode is not None and not scope.scales:
        return f"converting pages with {dst.scale_mode} scales is not in scope"
    if src.page_size != dst.page_size and not scope.token_blocks:
        return f"converting {src.page_size}-token pages to {dst.page_size}-token pages is not in scope"
    if src.num_kv_heads != dst.num_kv_heads and not scope.head_pieces:
        return f"converting pages of {src.num_kv_heads} heads to pages of {dst.num_kv_heads} heads is not in scope"
    if dst.scale_mode is not None:
        unmerged = _why_not_merged(src, dst, dst.scale_mode)
        if unmerged is not None:
            return unmerged
    if src.dtype != dst.dtype:
        found = recode(src.dtype, dst.dtype, scaled=dst.scale_mode is not None)
        if found is None or scope.recode == "no" or (scope.recode == "exact" and not found.exact):
            return f"converting {src.dtype} values to {dst.dtype} values is not in scope"
    return None


def _why_not_merged(src: PageFormat, dst: PageFormat, scale_mode: str) -> str | None:
    """Scales lie outside of pages and nobody merges them: where pages make one, theirs must be one or stay apart."""
    if scale_mode == "per_block" and (src.page_size, src.num_kv_heads) != (dst.page_size, dst.num_kv_heads):
        return "making one page of several, each with a scale, is not in scope"
    if scale_mode == "per_tensor" and src.num_kv_heads != dst.num_kv_heads:
        return "making one page of head slices of several ranks, each with a scale, is not in scope"
    return None


def _larger(local: PageFormat) -> Iterator[PageFormat]:
    """Formats of which a local page would be a part, up to sixteen times as large: to say so."""
    for kind, heads, tokens in itertools.product(KINDS, (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        H, N = local.num_kv_heads * heads, local.page_size * tokens
        bytes_ = 2 * H * N * local.head_dim * local.element_size
        if bytes_ < MAX_PAGE_BYTES and why_not_format(kind, local.element_size, N, local.head_dim) is None:
            yield dataclasses.replace(local, kind=kind, num_kv_heads=H, page_size=N)


def _others(local: PageFormat) -> Iterator[PageFormat]:
    """Every format of which one page, or a row of several, can become a local page."""
    dtypes = FP8_NAMES if local.dtype in FP8_NAMES else (local.dtype,)
    sizes = itertools.product(KINDS, dtypes, _divisors(local.num_kv_heads), _divisors(local.page_size))
    for kind, dtype, heads, tokens in sizes:
        if why_not_format(kind, local.element_size, tokens, local.head_dim) is None:
            yield PageFormat(kind, dtype, heads, tokens, local.head_dim, local.scale_mode)


def _divisors(number: int) -> list[int]:
    """The number itself first: the likeliest."""
    return [d for d in range(number, 0, -1) if number % d == 0]


def _both(local: PageFormat, remote_tag: str) -> str:
    # The peer's text goes into logs: escaped, and not longer than a log line can bear.
    shown = ascii(remote_tag)
    if len(shown) > _LONGEST_TAG_SHOWN:
        shown = f"{shown[:_LONGEST_TAG_SHOWN]}... ({len(remote_tag)} characters)"
    return f"the peer's pages are {shown}, local pages are {local.tag!r}"
