# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Half pages are transferred in as few pieces as whole ones, where their halves are neighbours; and still arrive."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer.integrations.vllm.nixl import halves

HALF, BLOCKS = 64, 5
# Of two layers, K and V regions in turn.
ADDRESSES = [1000, 1000 + HALF, 9000, 9000 + HALF]


def places(rows: Any, ids: Any) -> list[int]:
    """Addresses of descriptors, as NIXL counts them through rows of address, length, device, stride and count."""
    flat = [int(row[0] + i * row[3]) for row in rows for i in range(int(row[4]))]
    return [flat[i] for i in ids]


def test_both_ways_to_name_halves_mean_the_same_places() -> None:
    rows = np.array([[address, HALF, 0, 2 * HALF, BLOCKS] for address in ADDRESSES], dtype=np.uint64)
    counts, blocks = [BLOCKS] * 4, [3, 0, 4]
    ids = np.array([region * BLOCKS + block for region in range(4) for block in blocks])
    expected = [base + block * 2 * HALF + half for base in (1000, 9000) for block in blocks for half in (0, HALF)]
    joined = halves.alternating_rows(rows)
    assert joined.tolist() == [[base, HALF, 0, HALF, 2 * BLOCKS] for base in (1000, 9000)]
    assert places(rows, halves.page_by_page(ids, counts, alternating=False)) == expected
    assert places(joined, halves.page_by_page(ids, counts, alternating=True)) == expected


@pytest.mark.parametrize(
    ("addresses", "strides", "abut"),
    [
        (ADDRESSES, [2 * HALF] * 4, True),
        # Two planes; a share whose V part lies elsewhere than in the middle; padded pages; whole pages of two layers.
        ([1000, 5000, 9000, 13000], [HALF] * 4, False),
        ([1000, 1000 + HALF // 2], [2 * HALF] * 2, False),
        (ADDRESSES, [3 * HALF] * 4, False),
        ([1000, 1000 + 2 * HALF * BLOCKS], [2 * HALF] * 2, False),
        (ADDRESSES[:3], [2 * HALF] * 3, False),
    ],
    ids=str,
)
def test_when_halves_abut(addresses: list[int], strides: list[int], abut: bool) -> None:
    assert halves.abut(addresses, strides) is abut


RUN, BROKEN, BACKWARDS = ((1, 2, 3), (4, 5, 6)), ((1, 2, 5), (4, 5, 6)), ((3, 2, 1), (6, 5, 4))

# Prefill, decode, layouts, TP sizes, remote and local blocks, and in how many pieces a read moves each layer.
PIECES = [
    ("Standard", "Standard", None, None, 1, 1, RUN, 1),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 1, 1, RUN, 1),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 1, 1, BROKEN, 2),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 1, 1, BACKWARDS, 3),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 1, 1, RUN, 2),
    ("Shuffled", "Shuffled", "WHOLE", "PLANES", 1, 1, RUN, 6),
    ("Shuffled", "Shuffled", "PLANES", "WHOLE", 1, 1, BROKEN, 6),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 2, 1, RUN, 6),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 1, 2, BROKEN, 6),
    ("Standard", "Shuffled", None, "WHOLE", 1, 1, RUN, 1),
    ("Standard", "Shuffled", None, "WHOLE", 1, 1, BROKEN, 2),
    ("Standard", "Shuffled", None, "WHOLE", 1, 1, BACKWARDS, 3),
    ("Standard", "Shuffled", None, "PLANES", 1, 1, RUN, 6),
    ("Standard", "Shuffled", None, "WHOLE", 2, 1, RUN, 6),
    ("Standard", "Shuffled", None, "WHOLE", 1, 2, RUN, 6),
]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "left", "right", "p_tp", "d_tp", "blocks", "pieces"), PIECES, ids=str)
def test_pieces_of_a_transfer(
    engines: Any,
    fleet: Any,
    prefill: str,
    decode: str,
    left: Any,
    right: Any,
    p_tp: int,
    d_tp: int,
    blocks: tuple[tuple[int, ...], tuple[int, ...]],
    pieces: int,
) -> None:
    layouts = [name and getattr(engines, name) for name in (left, right)]
    p = fleet.get(engines.Setup(getattr(engines, prefill), "kv_producer", tp=p_tp, layout=layouts[0]))
    # Straight into the pages; what staging joins is counted in test_staged_reads.py.
    straight = engines.Setup(convert=prefill != decode, stage=0, blocks=9)
    d = fleet.get(dataclasses.replace(straight, backend=getattr(engines, decode), tp=d_tp, layout=layouts[1]))
    remote, local = blocks
    values = engines.values_of(p)
    p.fill(values)
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), remote, local)
    assert outcome.arrived, outcome
    assert torch.equal(d.read(local), values[:, list(remote)])
    assert (d.read([block for block in range(9) if block not in local]) == engines.POISON).all()
    reads = max(1, p_tp // d_tp)
    for rank in range(d_tp):
        assert d.worker(rank).xfer_stats.data["num_descriptors"] == [pieces * engines.LAYERS] * reads
