# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Metadata on the host: there as they are, and the compiled op that brings those of a device, as built for the CPU."""

from __future__ import annotations

import pytest
import torch

from flashinfer.backends.native.to_host import to_host
from flashinfer.core.metadata import on_host

CPU = torch.device("cpu")


def test_what_is_on_the_host_is_left_there() -> None:
    whole, apart = torch.arange(5), torch.arange(10, dtype=torch.int32)[::2]
    found = on_host(whole, apart, whole)
    assert found[0] is whole
    assert found[2] is whole
    assert found[1].is_contiguous()
    assert torch.equal(found[1], apart)


def test_vectors_come_whole_in_memory_of_their_own() -> None:
    vectors = [
        torch.arange(257, dtype=torch.int32),
        torch.tensor([2**40, -(2**40)]),
        torch.empty(0, dtype=torch.int32),
        torch.arange(30)[1::3],
        torch.arange(3, dtype=torch.int32),
        torch.tensor([7]).expand(4),
    ]
    wanted = [t.tolist() for t in vectors]
    found = to_host(CPU).launch(vectors)
    for t, source in zip(found, vectors, strict=True):
        assert t.dtype == source.dtype
        assert t.is_contiguous()
        assert t.data_ptr() % 16 == 0 or not t.numel()
        source[:1] = -1
    assert [t.tolist() for t in found] == wanted
    # Dropping one leaves the memory of the others.
    last = found.pop()
    del found
    to_host(CPU).launch([torch.zeros(500, dtype=torch.int32)])
    assert last.tolist() == wanted[-1]


@pytest.mark.parametrize(
    "vectors",
    [
        [],
        [torch.zeros(2, dtype=torch.int32)] * 9,
        [torch.zeros(2, dtype=torch.int16)],
        [torch.zeros(2)],
        [torch.zeros(2, 2, dtype=torch.int32)],
        [torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32, device="meta")],
    ],
    ids=["none", "nine", "int16", "float32", "2-D", "two devices"],
)
def test_others_are_refused(vectors: list[torch.Tensor]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        to_host(CPU).launch(vectors)
