# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory that is sent again and again: never written while a copy may still read it, and no more of it than that
takes."""

from __future__ import annotations

import pytest
import torch

from flashinfer.core import staging
from flashinfer.core.staging import Staging

CPU = torch.device("cpu")


def sent(memory: Staging, value: int, size: int, buffer: torch.Tensor) -> int:
    """Fill and send; returns where the memory is."""
    words = memory.take(size)
    words[:size] = value
    memory.send(size, buffer)
    return words.data_ptr()


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of memory that a copy still reads."""
    addresses: set[int] = set()
    monkeypatch.setattr(staging._Piece, "is_over", lambda piece: piece.words.data_ptr() not in addresses)
    return addresses


def test_memory_in_flight_is_not_taken(in_flight: set[int]) -> None:
    memory, buffer = Staging(CPU), torch.zeros(4096, dtype=torch.uint8)
    first = sent(memory, 1, 9, buffer)
    in_flight.add(first)
    second = sent(memory, 2, 9, buffer)
    assert second != first
    in_flight.add(second)
    third = memory.take(9).data_ptr()
    assert third not in (first, second)
    memory.send(9, buffer)
    # In the order of sending, and again and again.
    in_flight.clear()
    assert [sent(memory, 3, 9, buffer) for _ in range(6)] == [first, second, third] * 2


def test_one_piece_will_do_where_copies_are_over() -> None:
    memory, buffer = Staging(CPU), torch.zeros(4096, dtype=torch.uint8)
    assert len({sent(memory, i, 9, buffer) for i in range(5)}) == 1


def test_what_was_not_sent_is_taken_again(in_flight: set[int]) -> None:
    """A plan that was refused leaves nothing behind, and one that needs more gets it."""
    memory = Staging(CPU)
    first = memory.take(9)
    assert memory.take(9).data_ptr() == first.data_ptr()
    assert memory.take(first.numel() + 1).numel() > first.numel()
    buffer = torch.zeros(8192, dtype=torch.uint8)
    assert sent(memory, 5, 300, buffer) == memory.take(300).data_ptr()
    assert buffer.view(torch.int32)[:300].tolist() == [5] * 300


@pytest.mark.parametrize("size", [1, 255, 256, 257, 299, 300])
def test_all_words_arrive_and_none_beyond_the_buffer(size: int) -> None:
    memory, around = Staging(CPU), torch.full((2000,), 7, dtype=torch.uint8)
    sent(memory, 9, size, around[400:1600])
    assert around[400:1600].view(torch.int32)[:size].tolist() == [9] * size
    assert bool((around[:400] == 7).all())
    assert bool((around[1600:] == 7).all())


def test_another_buffer_or_size_is_noticed() -> None:
    memory, buffers = Staging(CPU), [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
    for value, size, buffer in ((1, 9, buffers[0]), (2, 9, buffers[1]), (3, 700, buffers[1]), (4, 9, buffers[0])):
        sent(memory, value, size, buffer)
        assert buffer.view(torch.int32)[:size].tolist() == [value] * size
    # Memory that had to grow is the one that is sent.
    sent(memory, 5, 1000, buffers[0])
    assert buffers[0].view(torch.int32)[:1000].tolist() == [5] * 1000


def test_nothing_is_sent_that_was_not_taken() -> None:
    with pytest.raises(RuntimeError, match="take"):
        Staging(CPU).send(1, torch.zeros(4, dtype=torch.uint8))
