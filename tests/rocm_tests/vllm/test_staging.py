# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Staging memory by itself: which slots are free, and where a peer's pages land in them; needs no vLLM."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from flashinfer.integrations.vllm.nixl.landing import Rows
from flashinfer.integrations.vllm.nixl.staging import Slots, Staging, knob, whole_pages

PAGE, LAYERS, SLOTS = 96, 2, 7


def expand(rows: Rows) -> list[tuple[int, int]]:
    """Address and length of each descriptor, in the order that NIXL numbers them."""
    return [(int(row[0] + i * row[3]), int(row[1])) for row in rows for i in range(int(row[4]))]


def test_slots_are_taken_once_and_in_one_run_where_there_is_one() -> None:
    slots = Slots(10)
    first, second, third = slots.take(3), slots.take(2), slots.take(4)
    assert (first, second, third) == ([0, 1, 2], [3, 4], [5, 6, 7, 8])
    assert slots.take(2) is None
    assert slots.free == 1
    slots.give_back([3, 4])
    assert slots.take(1) == [9], "the smallest run that fits"
    slots.give_back([2, 1, 0])
    assert slots.take(5) == [0, 1, 2, 3, 4]
    slots.give_back([5, 7])
    assert slots.take(2) == [5, 7], "none is left of several runs"
    assert slots.take(1) is None
    assert slots.take(0) == []


def test_slots_are_never_shared_and_never_lost() -> None:
    draw, slots, held = random.Random(0), Slots(50), []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            slots.give_back(held.pop(draw.randrange(len(held))))
        else:
            count = draw.randrange(20)
            taken = slots.take(count)
            free = 50 - sum(map(len, held))
            assert (taken is None) == (count > free)
            if taken is not None:
                assert len(taken) == count
                held.append(taken)
        flat = [slot for taken in held for slot in taken]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(50))
        assert slots.free == 50 - len(flat)
    for taken in held:
        slots.give_back(taken)
    assert slots.take(50) == list(range(50)), "the runs must have grown together again"


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_slot_holds_its_pieces_and_they_their_smaller_pages(ratio: int, pieces: int) -> None:
    """No byte of a slot is in another, whatever two peers' ranks and page sizes are."""
    staging = Staging(torch.empty(0, dtype=torch.int16), LAYERS, PAGE, SLOTS)
    length = PAGE // pieces // ratio
    slots = np.array([5, 0, 3])
    for piece in range(pieces):
        found = expand(staging.rows(ratio, pieces, piece, 3))
        assert len(found) == LAYERS * SLOTS * ratio
        ids = staging.small_ids(slots, ratio, pieces)
        sources = staging.sources(pieces)
        for layer in range(LAYERS):
            source = sources[layer * pieces + piece]
            for turn, slot in enumerate(slots.tolist()):
                start = source.data_ptr() + slot * source.stride(0) * 2
                assert staging.memory[layer, slot].data_ptr() == start - piece * PAGE // pieces
                for small in range(ratio):
                    where = layer * SLOTS * ratio + int(ids[turn * ratio + small])
                    assert found[where] == (start + small * length, length)


def test_runs_of_pages_land_in_dense_rows() -> None:
    """Which is what NIXL joins: stride equal to length."""
    for ratio in (1, 2):
        rows = Staging(torch.empty(0, dtype=torch.int16), LAYERS, PAGE, SLOTS).rows(ratio, 1, 0, 0)
        assert len(rows) == LAYERS
        assert (rows[:, 1] == rows[:, 3]).all()


def test_halves_that_lie_apart_are_no_page() -> None:
    halves = np.array([[100, 8, 0, 16, 5], [108, 8, 0, 16, 5], [500, 8, 0, 16, 5], [508, 8, 0, 16, 5]], dtype=np.uint64)
    found = whole_pages(halves)
    assert found is not None
    assert found.tolist() == [[100, 16, 0, 16, 5], [500, 16, 0, 16, 5]]
    for row, column, value in ((1, 0, 116), (3, 0, 500), (3, 3, 8), (3, 1, 4), (1, 4, 6)):
        apart = halves.copy()
        apart[row, column] = value
        assert whole_pages(apart) is None
    assert whole_pages(halves[:3]) is None


def test_the_knob_is_a_number_of_mib() -> None:
    assert knob(None, convert=False) == 0
    assert knob(None, convert=True) == 1 << 30
    assert knob(0, convert=True) == 0
    assert knob(3, convert=False) == 3 << 20
    for value in (True, -1, "1", 1.5):
        with pytest.raises(ValueError, match='"stage_kv_pages" must be a number of MiB'):
            knob(value, convert=True)
