# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of smaller pages land, against bytes that are moved one by one; needs no vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashinfer.integrations.vllm.nixl.conversion import Conversions, knob
from flashinfer.integrations.vllm.nixl.landing import (
    Half,
    Rows,
    covered,
    regions_in_halves,
    share_of_pages,
    small_page_ids,
    small_pages,
)
from flashinfer.kv import PageFormat
from rocm_tests.vllm.received import CUTS, Received

PAGES, HALF = 5, 48
STANDARD = PageFormat("standard", "bfloat16", 4, 16, 64)

# Two layers: halves that lie apart, as planes, and halves of one page.
PLANES = [Half(0, HALF, HALF, PAGES), Half(PAGES * HALF, HALF, HALF, PAGES)]
WHOLE = [Half(1000, HALF, 2 * HALF, PAGES), Half(1000 + HALF, HALF, 2 * HALF, PAGES)]


def expand(rows: Rows) -> list[tuple[int, int]]:
    """Address and length of each descriptor, in the order that NIXL numbers them."""
    return [(int(row[0] + i * row[3]), int(row[1])) for row in rows for i in range(int(row[4]))]


def run_of(halves: list[Half], page: int) -> list[int]:
    """Addresses of a page's bytes in the order in which the converter takes them."""
    first, second = (half.address + page * half.stride for half in halves)
    return [*range(first, first + HALF), *range(second, second + HALF)]


@pytest.mark.parametrize("ratio", [2, 3, 4, 8])
@pytest.mark.parametrize("halves", [PLANES, WHOLE], ids=["planes", "whole"])
def test_small_pages_lie_one_after_the_other(halves: list[Half], ratio: int) -> None:
    """Both halves of a peer's page are next to each other, wherever vLLM numbers their descriptors."""
    found = expand(small_pages(PLANES + WHOLE, ratio, 3))
    assert len(found) == 4 * ratio * PAGES
    region = 2 * (0 if halves is PLANES else 1)
    ids = small_page_ids(np.array([4, 1]), ratio, PAGES)
    assert ids.shape == (2 * ratio,)
    for turn, page in enumerate((4, 1)):
        run = run_of(halves, page)
        for small in range(ratio):
            for half in (0, 1):
                address, length = found[(region + half) * ratio * PAGES + int(ids[turn * ratio + small])]
                assert length == HALF // ratio
                at = (2 * small + half) * length
                assert list(range(address, address + length)) == run[at : at + length]


@pytest.mark.parametrize("pieces", [2, 3])
def test_small_pages_of_a_piece_stay_in_it(pieces: int) -> None:
    """A rank's heads are the same part of each half, and the two parts are one run of bytes to the converter."""
    part = HALF // pieces
    for piece in range(pieces):
        found = expand(small_pages(PLANES, 2, 0, pieces=pieces, piece=piece))
        for page in range(PAGES):
            run = run_of(PLANES, page)
            run = run[piece * part : (piece + 1) * part] + run[HALF + piece * part : HALF + (piece + 1) * part]
            taken = []
            for small in range(2):
                for half in (0, 1):
                    address, length = found[half * 2 * PAGES + int(small_page_ids(np.array([page]), 2, PAGES)[small])]
                    taken += range(address, address + length)
            assert taken == run


@pytest.mark.parametrize("shares", [2, 3, 4])
@pytest.mark.parametrize("halves", [PLANES, WHOLE], ids=["planes", "whole"])
def test_a_share_is_a_part_of_the_page_and_not_of_its_halves(halves: list[Half], shares: int) -> None:
    for share in range(shares):
        found = expand(share_of_pages(halves, shares, share, 0))
        for page in range(PAGES):
            taken = [byte for half in (0, 1) for byte in _bytes(found[half * PAGES + page])]
            size = 2 * HALF // shares
            assert taken == run_of(halves, page)[share * size : (share + 1) * size]


def _bytes(place: tuple[int, int]) -> range:
    return range(place[0], place[0] + place[1])


def test_pages_are_covered_from_the_front() -> None:
    assert list(covered([7, 2, 5], [1] * 5, 2)) == [(7, 2), (2, 2), (5, 1)]
    assert list(covered([7, 2, 5], [1] * 2, 2)) == [(7, 2), (2, 0), (5, 0)]
    assert list(covered([7], [1] * 5, 2)) == [(7, 2)]
    assert list(covered([], [1], 2)) == []


@pytest.mark.parametrize("share", [0, 1, 3])
def test_halves_of_a_share_of_a_page(share: int) -> None:
    """A peer with all 4 heads, a rank with one: after vLLM's own shift the halves are those of that head's bytes."""
    mine = PageFormat("shuffled", "bfloat16", 1, 16, 64)
    addresses, lengths = regions_in_halves([1 << 20], [STANDARD], [mine], share)
    ((start, size),) = STANDARD.head_ranges(share, 1)
    shifted = [address + share * mine.half_bytes - (1 << 20) for address in addresses]
    assert shifted == [start, start + size // 2]
    assert lengths == [STANDARD.half_bytes] * 2


def test_halves_of_a_page_that_is_a_piece() -> None:
    piece = PageFormat("standard", "bfloat16", 2, 16, 64)
    addresses, lengths = regions_in_halves([0, 1 << 20], [piece] * 2, [STANDARD] * 2, 0)
    assert addresses == [0, piece.half_bytes, 1 << 20, (1 << 20) + piece.half_bytes]
    assert lengths == [piece.half_bytes] * 4


@pytest.mark.parametrize("slots", [None, [5, 0, 2]], ids=["in place", "staged"])
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("ratio", "pieces", "missing"), CUTS)
def test_pages_of_any_cut_are_converted_and_the_rest_cleared(
    in_step: bool, ratio: int, pieces: int, missing: int, slots: list[int] | None
) -> None:
    received = Received(ratio, pieces, missing, torch.device("cpu"))
    conversions = Conversions(received.caches, 1, in_step=in_step)
    if slots is None:
        conversions.prepare(received.agreement)
    else:
        conversions.prepare_staged(received.agreement, received.staged(slots))
    ended = conversions.start(received.agreement, received.pages, slots)
    ended.wait()
    assert ended.done()
    assert ended.error() is None
    conversions.close()
    received.check()


def test_the_knob_takes_three_values() -> None:
    assert [knob(value) for value in (True, False, "sync")] == [True, False, "sync"]
    for value in (1, 0, "true", None, "async"):
        with pytest.raises(ValueError, match='"convert_kv_pages" must be true, false or "sync"'):
            knob(value)
