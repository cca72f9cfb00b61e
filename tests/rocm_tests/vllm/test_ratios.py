# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of a peer that are smaller than local ones: converted, every byte compared; or refused with a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rocm_tests.vllm.formats import joined

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LOCAL = (4, 0, 6)

# Backends, layouts, TP sizes, KV heads, page sizes, how many pages the peer has.
CONVERTED = [
    ("Standard", "Shuffled", None, "PLANES", 1, 1, 4, 16, 32, 6),
    ("Standard", "Shuffled", None, "WHOLE", 1, 1, 4, 16, 32, 5),
    ("Standard", "Shuffled", None, "PLANES", 1, 1, 1, 16, 64, 9),
    ("Standard", "Shuffled", None, "PLANES", 2, 2, 4, 16, 32, 5),
    ("Standard", "Shuffled", None, "PLANES", 1, 2, 4, 16, 32, 5),
    ("Standard", "Shuffled", None, "WHOLE", 1, 4, 4, 16, 64, 10),
    ("Standard", "Shuffled", None, "PLANES", 2, 1, 4, 16, 32, 5),
    ("Standard", "Shuffled", None, "WHOLE", 4, 2, 4, 16, 64, 11),
    ("Standard", "Shuffled", None, "PLANES", 3, 1, 3, 16, 32, 5),
    ("Standard", "Shuffled", None, "PLANES", 1, 3, 3, 16, 32, 5),
    ("Standard", "Shuffled", None, "PLANES", 1, 4, 2, 16, 32, 5),
    ("Shuffled", "Shuffled", "WHOLE", "PLANES", 1, 1, 4, 16, 32, 5),
    ("Shuffled", "Shuffled", "PLANES", "WHOLE", 1, 2, 4, 16, 32, 5),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 4, 2, 4, 16, 64, 9),
]


def setups(
    engines: Any, prefill: str, decode: str, layouts: tuple[Any, Any], tp: tuple[int, int], heads: int, sizes: Any
) -> tuple[Any, Any]:
    left, right = (None if name is None else getattr(engines, name) for name in layouts)
    base = engines.Setup(kv_heads=heads)
    return (
        dataclasses.replace(
            base,
            backend=getattr(engines, prefill),
            role="kv_producer",
            tp=tp[0],
            layout=left,
            block_size=sizes[0],
            blocks=14,
        ),
        dataclasses.replace(
            base, backend=getattr(engines, decode), tp=tp[1], layout=right, block_size=sizes[1], convert=True, blocks=9
        ),
    )


def small_pages(count: int) -> tuple[int, ...]:
    return tuple((7 * i + 3) % 14 for i in range(count))


@pytest.mark.parametrize(
    ("prefill", "decode", "left", "right", "p_tp", "d_tp", "heads", "p_size", "d_size", "count"), CONVERTED, ids=str
)
def test_smaller_pages_become_larger_ones(
    engines: Any,
    fleet: Any,
    prefill: str,
    decode: str,
    left: Any,
    right: Any,
    p_tp: int,
    d_tp: int,
    heads: int,
    p_size: int,
    d_size: int,
    count: int,
) -> None:
    """Where the last local page is not filled, what is left of it is zero: decoding goes on there."""
    pair = setups(engines, prefill, decode, (left, right), (p_tp, d_tp), heads, (p_size, d_size))
    p, d = (fleet.get(setup) for setup in pair)
    values = engines.values_of(p)
    p.fill(values)
    d.poison()
    remote = small_pages(count)
    outcome = engines.pull(p, d, fleet.request(), remote, LOCAL)
    assert outcome.arrived, (outcome, d.worker().last_refusal)
    assert outcome.sent == p_tp, "the prefill must free the request on every rank"
    assert torch.equal(d.read(LOCAL), joined(values[:, list(remote)], d_size // p_size, len(LOCAL)))
    assert (d.read((1, 2, 3, 5, 7, 8)) == engines.POISON).all(), "pages of other requests were written"


@pytest.mark.parametrize("convert", [True, "sync"])
@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_local_prefix_is_not_read_again(engines: Any, fleet: Any, convert: bool | str, held: int) -> None:
    """Pages are paired by their tokens. From the end, the odd page would shift all of them by one."""
    prefill, decode = setups(engines, "Standard", "Shuffled", (None, "PLANES"), (1, 1), 4, (16, 32))
    p, d = fleet.get(prefill), fleet.get(dataclasses.replace(decode, convert=convert))
    values = engines.values_of(p, seed=1)
    p.fill(values)
    d.poison()
    remote, local = small_pages(7), (4, 0, 6, 2)[held:]
    assert engines.pull(p, d, fleet.request(), remote, local, held=held).arrived
    assert torch.equal(d.read(local), joined(values[:, list(remote)], 2, 4)[:, held:])
    untouched = [block for block in range(9) if block not in local]
    assert (d.read(untouched) == engines.POISON).all()


def test_pages_that_nobody_fills_are_cleared(engines: Any, fleet: Any) -> None:
    """A decoder may have made room for more than was sent; vLLM does not clear it before a read."""
    prefill, decode = setups(engines, "Standard", "Shuffled", (None, "WHOLE"), (1, 1), 4, (16, 32))
    p, d = fleet.get(prefill), fleet.get(decode)
    values = engines.values_of(p, seed=2)
    p.fill(values)
    d.poison()
    assert engines.pull(p, d, fleet.request(), (9, 2, 5), LOCAL).arrived
    assert torch.equal(d.read(LOCAL), joined(values[:, [9, 2, 5]], 2, 3))


def test_a_prefill_with_more_pages_than_are_wanted(engines: Any, fleet: Any) -> None:
    prefill, decode = setups(engines, "Standard", "Shuffled", (None, "WHOLE"), (1, 1), 4, (16, 32))
    p, d = fleet.get(prefill), fleet.get(decode)
    values = engines.values_of(p, seed=3)
    p.fill(values)
    d.poison()
    assert engines.pull(p, d, fleet.request(), (9, 2, 5, 1, 0), (4, 6)).arrived
    assert torch.equal(d.read((4, 6)), joined(values[:, [9, 2, 5, 1]], 2, 2))


@pytest.mark.parametrize("held", [0, 1])
def test_standard_pages_are_paired_by_their_tokens_too(engines: Any, fleet: Any, held: int) -> None:
    """Without a conversion, as vLLM does without a prefix: with one, and an odd last page, it misreads."""
    base = engines.Setup(blocks=14)
    p = fleet.get(dataclasses.replace(base, role="kv_producer"))
    values = engines.values_of(p, seed=4)
    p.fill(values)
    remote, local = small_pages(5), LOCAL[held:]
    whole = joined(values[:, list(remote)], 2, 3)[:, held:]
    d = fleet.get(dataclasses.replace(base, block_size=32))
    d.poison()
    assert engines.pull(p, d, fleet.request(), remote, local, held=held).arrived
    assert torch.equal(d.read(local), whole)


# Backends, TP sizes, page sizes, the knob, and what the reason says.
REFUSED = [
    ("Standard", "Shuffled", (16, 32), False, '"convert_kv_pages": true on this side'),
    ("Shuffled", "Shuffled", (16, 32), False, '"convert_kv_pages": true on this side'),
    ("Standard", "Shuffled", (32, 16), True, "hold a whole number of the peer's"),
    ("Standard", "Standard", (32, 16), True, "hold a whole number of the peer's"),
    ("Shuffled", "Shuffled", (32, 16), True, "hold a whole number of the peer's"),
    ("XPacked", "Shuffled", (16, 32), True, "x_packed pages to shuffled pages is not in scope"),
    ("Shuffled", "Standard", (16, 32), True, "shuffled pages to standard pages is not in scope"),
]


@pytest.mark.parametrize(("prefill", "decode", "sizes", "knob", "reason"), REFUSED, ids=str)
def test_other_sizes_are_refused(
    engines: Any, fleet: Any, prefill: str, decode: str, sizes: tuple[int, int], knob: bool, reason: str
) -> None:
    left, right = setups(engines, prefill, decode, (None, None), (1, 1), 4, sizes)
    p, d = fleet.get(left), fleet.get(dataclasses.replace(right, convert=knob))
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), (1, 5), (4,))
    assert outcome.refused, outcome
    assert outcome.bad_blocks == [{4}]
    assert (d.read(range(9)) == engines.POISON).all()
    assert reason in d.worker().last_refusal
    assert p.id not in d.worker().dst_num_blocks
