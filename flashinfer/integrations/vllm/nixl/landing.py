# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a peer's pages land in, or are taken from, pages of another size. Pure address arithmetic.

A page's two halves are registered as regions of their own, and may live apart. The converter takes the first half
followed by the second as one run of bytes, in which smaller pages lie one after the other. vLLM, which cuts each region
for itself, would put the first half of every smaller page into the first half of the large one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flashinfer.kv import PageFormat

Rows = npt.NDArray[np.uint64]


class Half(NamedTuple):
    """A region that holds one half of every page: its address, bytes of a half, bytes between pages, and pages."""

    address: int
    length: int
    stride: int
    pages: int


def _part(first: Half, second: Half, index: int, parts: int) -> tuple[int, int]:
    """Address and length of one of `parts` equal parts of a page; there is an even number of them."""
    length = first.length // (parts // 2)
    half, place = divmod(index, parts // 2)
    return (first, second)[half].address + place * length, length


def small_pages(halves: Sequence[Half], ratio: int, device: int, *, pieces: int = 1, piece: int = 0) -> Rows:
    """Descriptors of the `ratio` smaller pages that make one local page, in the order of the regions.

    Both halves of the smaller pages have a region's worth of descriptors: all first ones, then all second ones, and so
    on. Each is a row `(address, length, device, stride, count)`, so that there are as many as smaller pages in a page.

    Parameters
    ----------
    halves
        First and second half of each layer, in turn.
    ratio
        Smaller pages in a page.
    pieces, piece
        Equal parts of each half, and which of them the pages are of: together the halves' parts are a page themselves.
    """
    rows = []
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        cut = [
            half._replace(length=half.length // pieces, address=half.address + piece * (half.length // pieces))
            for half in (first, second)
        ]
        for which in (0, 1):
            for page in range(ratio):
                address, length = _part(cut[0], cut[1], 2 * page + which, 2 * ratio)
                rows.append((address, length, device, first.stride, first.pages))
    return np.array(rows, dtype=np.uint64).reshape(-1, 5)


def small_page_ids(pages: npt.NDArray[np.int64], ratio: int, num_pages: int) -> npt.NDArray[np.int64]:
    """Where in a region of `small_pages` the smaller pages of the given pages are: in the order of their tokens."""
    return (pages[:, None] + num_pages * np.arange(ratio)).reshape(-1).astype(np.int64)


def share_of_pages(halves: Sequence[Half], shares: int, share: int, device: int) -> Rows:
    """Descriptors of one of the equal shares of whole pages that are registered in halves, each share in two halves."""
    rows = []
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        for which in (0, 1):
            address, length = _part(first, second, 2 * share + which, 2 * shares)
            rows.append((address, length, device, first.stride, first.pages))
    return np.array(rows, dtype=np.uint64).reshape(-1, 5)


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
        This rank's formats of the same layers, with the peer's page size.
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


def covered(local: Sequence[int], remote: Sequence[int], ratio: int) -> Iterator[tuple[int, int]]:
    """Each local page, and how many of its `ratio` smaller pages a peer has; it has the first ones."""
    for place, page in enumerate(local):
        yield page, min(ratio, max(0, len(remote) - place * ratio))
