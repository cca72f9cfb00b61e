# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What two engines do with each other's pages: read them, read and convert them, or refuse. Pure, no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flashinfer.core.errors import FlashInferError
from flashinfer.integrations.vllm.nixl.local_pages import LocalPages
from flashinfer.kv import DEFAULT, KINDS, Convert, PageFormat, Reject, negotiate

# The layout in which a standard page is one run of bytes: block outside of head slots.
WHOLE_PAGES = "LBHNC"

# Bits are moved and nothing is rounded. float32 is what an engine can be held against another implementation in.
_SCOPE = dataclasses.replace(DEFAULT, dtypes=DEFAULT.dtypes | {"float32"})

_UNLIKE_SIZES = (
    "Pages of unlike sizes are only possible between standard pages: set the same --block-size on both sides"
)
_WIDER_PUSH = (
    "A push into more ranks than it comes from cannot be converted: use pull mode, or a prefill TP that is at least "
    "the decode TP"
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
    """

    backend: str
    tp_size: int
    block_size: int
    layout: str
    version: int
    names: Sequence[str]
    tags: Sequence[str]
    block_lens: Sequence[int]


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
        _check_block_size(page, peer, refusal)
        expected = _at_peer(page, peer, group)
        decision = negotiate(expected, tag, convert=convert, scope=_SCOPE)
        if isinstance(decision, Reject):
            raise refusal.error("format", decision.reason)
        _check_shares(page, expected, group, peer, refusal)
        if isinstance(decision, Convert):
            _check_source(decision.plan.src, name, peer, group, refusal)
            outcomes[decision.plan.src, page] = refusal
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
    return Agreement(src=dataclasses.replace(part, kind=src.kind), dst=part, pieces=pieces)


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
        _check_block_size(page, peer, refusal)
        ours = _at_peer(page, peer, group)
        theirs = _known(ours, tag)
        if theirs is None:
            decision = negotiate(ours, tag, convert=False, scope=_SCOPE)
            raise refusal.error("format", decision.reason if isinstance(decision, Reject) else "")
        decision = negotiate(theirs, ours.tag, convert=convert, scope=_SCOPE)
        if isinstance(decision, Reject):
            raise refusal.error("format", decision.reason)
        _check_shares(page, ours, group, peer, refusal)
        if isinstance(decision, Convert):
            if peer.block_size != page.page_size:
                raise refusal.error("block_size", _UNLIKE_SIZES)
            if group.tp_size < peer.tp_size:
                raise refusal.error("tensor_parallel", _WIDER_PUSH)
        elif convert and page.kind == "standard":
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


def _check_block_size(page: PageFormat, peer: Peer, refusal: _Refusal) -> None:
    """A page of two slots is not two smaller pages one after the other."""
    if page.head_slots == 2 and peer.block_size != page.page_size:
        raise refusal.error("block_size", _UNLIKE_SIZES)


def _at_peer(page: PageFormat, peer: Peer, group: Group) -> PageFormat:
    """`page` as a rank of the peer holds it."""
    size = peer.block_size if page.kind == "standard" else page.page_size
    return dataclasses.replace(page, num_kv_heads=group.heads(peer.tp_size), page_size=size)


def _known(ours: PageFormat, tag: str) -> PageFormat | None:
    for kind in KINDS:
        # Pages too small for the vectors of a kind have no such format, and so no peer has.
        vectors = ours.page_size % ours.x == 0 and ours.head_dim % ours.x == 0
        if kind in ("standard", "split_hnd", "split_nhd") or vectors:
            theirs = dataclasses.replace(ours, kind=kind)
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
    if group.pulls:
        if peer.layout != WHOLE_PAGES or lengths != [src.page_bytes]:
            raise refusal.error(
                "layout",
                f"Pages can be converted only if each is one run of bytes, got regions of {lengths} bytes: set "
                f"VLLM_KV_CACHE_LAYOUT={WHOLE_PAGES} at the peer",
            )
    elif lengths != [src.half_bytes] * 2:
        raise refusal.error(
            "layout",
            'In push mode both sides must set "convert_kv_pages": true, so that the peer sends half pages, got regions '
            f"of {lengths} bytes",
        )
    elif peer.tp_size < group.tp_size:
        raise refusal.error("tensor_parallel", _WIDER_PUSH)


def regions_in_halves(
    bases: Sequence[int], pages: Sequence[PageFormat], own: Sequence[PageFormat], first_slice: int
) -> tuple[list[int], list[int]]:
    """Addresses and lengths that present each whole page of a peer as two regions.

    vLLM adds `first_slice` local regions to an address, to find this rank's share of a peer's region. But shares of a
    standard page lie a whole local page apart and not half of one: the other half is added here.

    Parameters
    ----------
    bases, pages
        The peer's regions and what they hold.
    own
        This rank's formats of the same layers.
    first_slice
        Where this rank's share begins, in shares.
    """
    addresses: list[int] = []
    lengths: list[int] = []
    for base, page, local in zip(bases, pages, own, strict=True):
        share = base + first_slice * local.half_bytes
        # Of the finer side: either this rank reads a part of the page, or the page is a part of this rank's.
        addresses += [share, share + min(page.half_bytes, local.half_bytes)]
        lengths += [page.half_bytes] * 2
    return addresses, lengths
