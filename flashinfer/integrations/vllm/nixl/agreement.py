# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What two engines do with each other's pages: read them, read and convert them, or refuse. Pure, no vLLM."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from flashinfer.core.errors import FlashInferError
from flashinfer.integrations.vllm.nixl.local_pages import LocalPages
from flashinfer.kv import DEFAULT, EXACT, KINDS, Convert, PageFormat, Reject, negotiate
from flashinfer.kv.format import why_not_format
from flashinfer.kv.negotiate import FP8_NAMES

# The layout in which a standard page is one run of bytes: block outside of head slots.
WHOLE_PAGES = "LBHNC"

# Nothing is rounded. float32 is what an engine can be held against another implementation in. Head slices are left out:
# how many heads a rank of a peer has is known from its TP size, and its pages must say the same.
_SCOPE = dataclasses.replace(
    EXACT, pairs=DEFAULT.pairs, dtypes=DEFAULT.dtypes | {"float32", *FP8_NAMES}, head_pieces=False
)

_SMALLER_HERE = (
    "A local page must hold a whole number of the peer's: set a --block-size here that is a multiple of the peer's"
)
_UNLIKE_PUSH = (
    "Pages of unlike sizes can only be pulled, for a writer pairs its own pages with smaller ones and does not say how "
    "many it wrote: use pull mode, or the same --block-size on both sides"
)
_SPLIT_BLOCKS = (
    "The peer's blocks are several pages each, and a prefix held here may end within one: set --block-size there to "
    "the page size of its kernels, or the same page size on both sides"
)
_REPLICAS_PUSH = (
    "A push does not reach every copy of a KV head: use pull mode, or a decode TP of at most the number of KV heads"
)
_HALVES_SENT = (
    'The prefill sends half pages, for decoders that convert: unset "convert_kv_pages" there, or use shuffled pages in '
    "the decoder"
)


class PageFormatError(FlashInferError, RuntimeError):
    """A peer's pages cannot be taken; `code` is the reason for counters, the message the one for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


@dataclasses.dataclass(frozen=True)
class Peer:
    """What one rank of a peer says about itself.

    Parameters
    ----------
    backend
        Name of its attention backend.
    tp_size
        Its tensor-parallel size.
    block_size
        Tokens of its pages.
    layout
        vLLM's name of its KV cache layout.
    version
        `PageAgentMetadata.page_format_version`; 0 for a stock peer.
    names, tags, block_lens
        Layer, page format and bytes of each of its regions.
    scales
        Scales of K and V of each region; empty if the peer states none.
    kernel_pages
        Pages that make one of its scheduler's blocks.
    """

    backend: str
    tp_size: int
    block_size: int
    layout: str
    version: int
    names: Sequence[str]
    tags: Sequence[str]
    block_lens: Sequence[int]
    scales: Sequence[Sequence[float]] = ()
    kernel_pages: int = 1


@dataclasses.dataclass(frozen=True)
class Group:
    """This side's tensor parallelism."""

    tp_size: int
    total_kv_heads: int
    pulls: bool = True

    def heads(self, tp_size: int) -> int:
        """KV heads of a rank; where there are more ranks than heads, a head has several homes."""
        return max(1, self.total_kv_heads // tp_size)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What was agreed on with a peer.

    Parameters
    ----------
    src, dst
        What a piece of a received page holds, and what it is converted to; None if pages are read as they are.
    pieces
        Pieces of a local page, each from another rank of the peer.
    """

    src: PageFormat | None = None
    dst: PageFormat | None = None
    pieces: int = 1

    @property
    def ratio(self) -> int:
        """Pages of the peer that make one of this side."""
        return 1 if self.src is None or self.dst is None else self.dst.page_size // self.src.page_size


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Puts together the message of a refusal: both sides, the reason, and what to do."""

    local: LocalPages
    peer: Peer
    group: Group
    page: PageFormat
    tag: str | None

    def error(self, code: str, reason: str) -> PageFormatError:
        theirs = "no page format" if self.tag is None else f"page format {ascii(self.tag)[:120]}"
        return PageFormatError(
            code,
            f"KV page formats do not fit. Local: {self.page.tag!r}, backend {self.local.backend}, TP "
            f"{self.group.tp_size}. Peer: {theirs}, backend {self.peer.backend}, TP {self.peer.tp_size}, "
            f"{self.peer.block_size}-token pages, layout {self.peer.layout}. {reason}",
        )


def agree_to_receive(local: LocalPages, peer: Peer, group: Group, *, convert: bool) -> Agreement:
    """What this side does with pages that it gets from `peer`.

    Run it before anything is built for the peer.

    Raises
    ------
    PageFormatError
        If the peer must be refused.
    """
    tags = _tags_by_layer(local, peer, group)
    # What becomes of each layer: converted from the first to the second, or read as it is.
    outcomes: dict[tuple[PageFormat, PageFormat] | None, _Refusal] = {}
    for name, page in local.formats.items():
        tag = tags.get(name) if peer.version else None
        refusal = _Refusal(local, peer, group, page, tag)
        if tag is None:
            _check_untagged(page, refusal)
            outcomes[None] = refusal
            continue
        _check_block_size(page, peer, group, refusal)
        expected = _at_peer(page, peer, group)
        decision = negotiate(expected, tag, convert=convert, scope=_SCOPE)
        if isinstance(decision, Reject):
            raise refusal.error("format", decision.reason)
        src = decision.plan.src if isinstance(decision, Convert) else expected
        if src.page_size != peer.block_size:
            raise refusal.error("format", f"The peer has {peer.block_size}-token pages, and states others")
        _check_scales(name, src, page, peer, local, refusal)
        _check_shares(page, src, group, peer, refusal)
        if not group.pulls and group.tp_size > max(peer.tp_size, group.total_kv_heads):
            raise refusal.error("tensor_parallel", _REPLICAS_PUSH)
        if isinstance(decision, Convert):
            if page.head_slots == 1:
                raise refusal.error("format", "Pages are converted into pages of two slots only")
            _check_source(src, name, peer, group, refusal)
            outcomes[src, page] = refusal
        else:
            if page.kind == "standard" and _sends_halves(expected, name, peer):
                raise refusal.error("layout", _HALVES_SENT)
            outcomes[None] = refusal
    if len(outcomes) > 1:
        refusal = list(outcomes.values())[-1]
        raise refusal.error("format", "Only layers of one format can be converted: use the same format on both sides")
    outcome = next(iter(outcomes))
    if outcome is None:
        return Agreement()
    src, page = outcome
    pieces = max(1, peer.tp_size // group.tp_size)
    part = dataclasses.replace(page, num_kv_heads=page.num_kv_heads // pieces)
    return Agreement(src=dataclasses.replace(src, num_kv_heads=part.num_kv_heads), dst=part, pieces=pieces)


def agree_to_send(local: LocalPages, peer: Peer, group: Group, *, convert: bool) -> Agreement:
    """Check, on the side that writes, that `peer` takes these pages; nothing is ever converted here.

    Raises
    ------
    PageFormatError
        If the peer must be refused.
    """
    tags = _tags_by_layer(local, peer, group)
    for name, page in local.formats.items():
        tag = tags.get(name) if peer.version else None
        refusal = _Refusal(local, peer, group, page, tag)
        if tag is None:
            _check_untagged(page, refusal)
            continue
        _check_block_size(page, peer, group, refusal)
        ours = _at_peer(page, peer, group)
        theirs = _known(ours, tag)
        if theirs is None:
            decision = negotiate(ours, tag, convert=False, scope=_SCOPE)
            raise refusal.error("format", decision.reason if isinstance(decision, Reject) else "")
        decision = negotiate(theirs, ours.tag, convert=convert, scope=_SCOPE)
        if isinstance(decision, Reject):
            raise refusal.error("format", decision.reason)
        _check_scales(name, ours, theirs, peer, local, refusal, sends=True)
        _check_shares(page, ours, group, peer, refusal)
        if not isinstance(decision, Convert) and convert and page.kind == "standard":
            raise refusal.error("layout", _HALVES_SENT)
    return Agreement()


def _tags_by_layer(local: LocalPages, peer: Peer, group: Group) -> dict[str, str]:
    """One tag a layer; regions of one layer that disagree, or a message that is not whole, are refused."""
    if peer.version == 0:
        return {}
    page = next(iter(local.formats.values()))
    refusal = _Refusal(local, peer, group, page, peer.tags[0] if peer.tags else None)
    if peer.version != 1:
        raise refusal.error(
            "version", f"The peer speaks version {peer.version} of page metadata, this side 1: use one release"
        )
    if not len(peer.names) == len(peer.tags) == len(peer.block_lens):
        raise refusal.error("format", "The peer does not state one page format for each of its regions")
    tags: dict[str, str] = {}
    for name, tag in zip(peer.names, peer.tags, strict=True):
        if tags.setdefault(name, tag) != tag:
            raise refusal.error("format", f"Regions of layer {name} state unlike page formats")
    missing = [name for name in local.formats if name not in tags]
    if missing:
        raise refusal.error("format", f"The peer has no pages of layer {missing[0]}: serve one model on both sides")
    return tags


def _check_untagged(page: PageFormat, refusal: _Refusal) -> None:
    decision = negotiate(page, None, convert=False)
    if isinstance(decision, Reject):
        raise refusal.error("no_tag", decision.reason)


def _check_block_size(page: PageFormat, peer: Peer, group: Group, refusal: _Refusal) -> None:
    if peer.block_size == page.page_size:
        return
    if not group.pulls:
        raise refusal.error("block_size", _UNLIKE_PUSH)
    if page.page_size % peer.block_size:
        raise refusal.error("block_size", _SMALLER_HERE)
    if page.head_slots == 2 and peer.kernel_pages != 1:
        raise refusal.error("block_size", _SPLIT_BLOCKS)


def _check_scales(
    name: str, src: PageFormat, dst: PageFormat, peer: Peer, local: LocalPages, refusal: _Refusal, sends: bool = False
) -> None:
    """Scales are no part of a page, and nobody sends them: both sides must have read the same ones."""
    if dst.scale_mode is None:
        return
    # Loads the ops, which a pair of unquantised engines needs not before it converts.
    from flashinfer.kv import scale_factor

    factor = scale_factor(src, dst)
    ours = tuple(local.scales.get(name, ()))
    for other, scales in zip(peer.names, peer.scales, strict=False):
        if other != name:
            continue
        sent, received = (ours, tuple(scales)) if sends else (tuple(scales), ours)
        if ours and tuple(factor * scale for scale in sent) == received:
            return
        raise refusal.error(
            "scales",
            f"Scales of K and V in layer {name} are {list(scales)} at the peer and {list(ours)} here, and a received "
            f"page needs {factor} times the sender's: serve a checkpoint that brings KV scales on both sides",
        )
    raise refusal.error("scales", f"The peer states no scales of K and V for layer {name}: use one release")


def _at_peer(page: PageFormat, peer: Peer, group: Group) -> PageFormat:
    """`page` as a rank of the peer holds it."""
    size = peer.block_size if page.kind == "standard" else page.page_size
    return dataclasses.replace(page, num_kv_heads=group.heads(peer.tp_size), page_size=size)


def _known(ours: PageFormat, tag: str) -> PageFormat | None:
    for kind, dtype in itertools.product(KINDS, FP8_NAMES if ours.dtype in FP8_NAMES else (ours.dtype,)):
        # Pages too small for the vectors of a kind have no such format, and so no peer has.
        if why_not_format(kind, ours.element_size, ours.page_size, ours.head_dim) is None:
            theirs = dataclasses.replace(ours, kind=kind, dtype=dtype)
            if theirs.tag == tag:
                return theirs
    return None


def _check_shares(page: PageFormat, theirs: PageFormat, group: Group, peer: Peer, refusal: _Refusal) -> None:
    """Whether a rank's share of a peer's page is one run of bytes in each slot, which is all that a region can say."""
    if group.tp_size == peer.tp_size:
        return
    if max(group.tp_size, peer.tp_size) % min(group.tp_size, peer.tp_size):
        raise refusal.error("tensor_parallel", "One TP size must be a multiple of the other")
    for tp_size in (group.tp_size, peer.tp_size):
        if tp_size < group.total_kv_heads and group.total_kv_heads % tp_size:
            raise refusal.error(
                "tensor_parallel", f"{group.total_kv_heads} KV heads cannot be split over {tp_size} ranks"
            )
        if tp_size > group.total_kv_heads and tp_size % group.total_kv_heads:
            raise refusal.error(
                "tensor_parallel", f"{group.total_kv_heads} KV heads cannot be shared evenly by {tp_size} ranks"
            )
    if peer.tp_size > group.tp_size and peer.tp_size > group.total_kv_heads:
        raise refusal.error(
            "tensor_parallel",
            f"The peer keeps several copies of {group.total_kv_heads} KV heads on its {peer.tp_size} ranks, and this "
            "side has fewer ranks: use a TP of at most the number of KV heads there, or equal TP sizes",
        )
    if page.num_kv_heads == theirs.num_kv_heads:
        return
    whole = page if page.num_kv_heads > theirs.num_kv_heads else theirs
    if len(whole.head_ranges(0, min(page.num_kv_heads, theirs.num_kv_heads))) != len(whole.planes):
        raise refusal.error(
            "tensor_parallel",
            f"A rank's heads are not one run of bytes in {whole.kind} pages: use the same TP size on both sides",
        )


def _sends_halves(page: PageFormat, name: str, peer: Peer) -> bool:
    return peer.layout == WHOLE_PAGES and _lengths(name, peer) == [page.half_bytes] * 2


def _lengths(name: str, peer: Peer) -> list[int]:
    return [size for other, size in zip(peer.names, peer.block_lens, strict=True) if other == name]


def _check_source(src: PageFormat, name: str, peer: Peer, group: Group, refusal: _Refusal) -> None:
    """A page to convert is read in two halves: it is one run of bytes, or where it is sent two halves already."""
    lengths = _lengths(name, peer)
    if lengths == [src.half_bytes] * 2 and (src.head_slots == 2 or not group.pulls):
        return
    if not group.pulls:
        raise refusal.error(
            "layout",
            'In push mode both sides must set "convert_kv_pages": true, so that the peer sends half pages, got regions '
            f"of {lengths} bytes",
        )
    if peer.layout != WHOLE_PAGES or lengths != [src.page_bytes]:
        raise refusal.error(
            "layout",
            f"Pages can be converted only if each is one run of bytes, got regions of {lengths} bytes: set "
            f"VLLM_KV_CACHE_LAYOUT={WHOLE_PAGES} at the peer",
        )
