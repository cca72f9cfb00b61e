# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Descriptors of half pages that NIXL can join to whole pages again, and to runs of pages.

NIXL joins descriptors of a transfer that follow each other in one dense row (stride equal to length) on both sides. Two
half pages that are neighbours in memory are in two rows when K halves and V halves are regions of their own, and a
transfer has twice as many pieces as with whole pages. So where halves abut, the rows of a layer's two regions become
one row of twice as many halves, K and V in turn, and a transfer lists its halves page by page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Alternating(list[int]):
    """Blocks of each region of an engine, K and V regions in turn, whose descriptors alternate.

    vLLM hands this list back wherever it names descriptors of that engine, so the list says how they are named.
    """


def abut(addresses: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether, in regions that are K and V halves in turn, each V half begins in the middle of its K half's page.

    Parameters
    ----------
    addresses
        Of the regions' first blocks.
    strides
        Bytes from block to block of each region.
    """
    if len(addresses) % 2:
        return False
    pairs = zip(addresses[::2], addresses[1::2], strides[::2], strides[1::2], strict=True)
    return all(left == right and 2 * (v - k) == left for k, v, left, right in pairs)


def alternating_rows(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One row of twice as many halves for each two rows of halves that abut.

    Parameters
    ----------
    rows
        `[regions, 5]` uint64: address, length, device, stride, count. A length may be a part of a half.
    """
    joined: np.ndarray = rows[::2].copy()
    joined[:, 3] //= 2
    joined[:, 4] *= 2
    return joined


def page_by_page(ids: npt.NDArray[np.int64], counts: Sequence[int], *, alternating: bool) -> npt.NDArray[np.int64]:
    """Descriptors of a transfer with the two halves of each page one after the other.

    Parameters
    ----------
    ids
        `[regions * blocks]`: by region, and in each region by block, named as if each region had a row of its own.
    counts
        Descriptors of each region.
    alternating
        Whether the rows are `alternating_rows`, which changes the names.

    Returns
    -------
    NDArray
        `[regions * blocks]`: by layer, then by block, then K and V.
    """
    k, v = np.moveaxis(ids.reshape(len(counts) // 2, 2, -1), 1, 0)
    if alternating:
        # A layer's first name stays; block b, which came b later, now comes 2 b later.
        k = 2 * k - np.cumsum([0, *counts])[:-1:2, None]
        v = k + 1
    return np.stack((k, v), axis=-1).ravel()
