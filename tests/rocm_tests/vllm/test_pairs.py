# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Every pair that is accepted arrives byte for byte, and every other is refused with a reason; pull mode."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REMOTE, LOCAL = (1, 5, 2), (4, 0, 6)

# Backend of prefill and of decode, layouts, TP sizes, KV heads. None leaves the layout to vLLM's resolver.
SAME = [
    ("Standard", "Standard", None, None, 1, 1, 4),
    ("Standard", "Standard", None, None, 1, 2, 4),
    ("Standard", "Standard", None, None, 4, 2, 4),
    ("Standard", "Standard", None, None, 1, 4, 2),
    ("Standard", "Standard", "PLANES", "PLANES", 1, 1, 4),
    ("Standard", "OtherStandard", None, None, 1, 1, 4),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 1, 1, 4),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 1, 1, 4),
    ("Shuffled", "Shuffled", "WHOLE", "PLANES", 1, 1, 4),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 1, 2, 4),
    ("Shuffled", "Shuffled", "WHOLE", "WHOLE", 2, 1, 4),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 1, 4, 4),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 4, 2, 4),
    ("Shuffled", "Shuffled", "WHOLE", "PLANES", 2, 1, 4),
    ("Shuffled", "Shuffled", "PLANES", "WHOLE", 1, 2, 4),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 3, 1, 3),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 1, 3, 3),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 1, 4, 2),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 2, 4, 2),
    ("Shuffled", "Shuffled", "PLANES", "PLANES", 4, 4, 2),
    ("XPacked", "XPacked", "WHOLE", "WHOLE", 1, 2, 4),
    ("XPacked", "XPacked", "PLANES", "PLANES", 2, 1, 4),
    ("SplitByToken", "SplitByToken", "PLANES", "WHOLE", 1, 1, 4),
    # One head a rank is one run of bytes whatever the order of heads and tokens.
    ("SplitByToken", "SplitByToken", "WHOLE", "WHOLE", 4, 4, 2),
]
CONVERTED = [
    (None, "PLANES", 1, 1, 4),
    (None, "WHOLE", 1, 1, 4),
    (None, "PLANES", 2, 2, 4),
    (None, "PLANES", 1, 2, 4),
    (None, "PLANES", 1, 4, 4),
    (None, "WHOLE", 1, 2, 4),
    (None, "PLANES", 2, 1, 4),
    (None, "WHOLE", 4, 1, 4),
    (None, "PLANES", 4, 2, 4),
    (None, "PLANES", 3, 1, 3),
    (None, "PLANES", 1, 3, 3),
    (None, "PLANES", 1, 4, 2),
    (None, "PLANES", 2, 4, 2),
    (None, "WHOLE", 4, 4, 2),
    (None, "WHOLE", 1, 1, 1),
    (None, "WHOLE", 1, 2, 6),
    (None, "WHOLE", 2, 1, 6),
]


def pair(engines: Any, prefill: str, decode: str, layouts: tuple[Any, Any], tp: tuple[int, int], heads: int) -> Any:
    named = [None if name is None else getattr(engines, name) for name in layouts]
    setup = engines.Setup(kv_heads=heads)
    return (
        dataclasses.replace(setup, backend=getattr(engines, prefill), role="kv_producer", tp=tp[0], layout=named[0]),
        dataclasses.replace(setup, backend=getattr(engines, decode), tp=tp[1], layout=named[1], blocks=9),
    )


def check_arrived(engines: Any, fleet: Any, prefill: Any, decoder: Any, transfer: Any = None) -> None:
    """Transfer three blocks, and compare all pages of the decoder."""
    values = engines.values_of(prefill)
    prefill.fill(values)
    decoder.poison()
    untouched = [block for block in range(decoder.setup.blocks) if block not in LOCAL]
    outcome = (transfer or engines.pull)(prefill, decoder, fleet.request(), REMOTE, LOCAL)
    assert outcome.arrived, outcome
    assert outcome.sent == prefill.setup.tp, "the prefill must free the request on every rank"
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    assert (decoder.read(untouched) == engines.POISON).all(), "pages of other requests were written"


@pytest.mark.parametrize(("prefill", "decode", "left", "right", "p_tp", "d_tp", "heads"), SAME, ids=str)
def test_like_pages_arrive(
    engines: Any, fleet: Any, prefill: str, decode: str, left: Any, right: Any, p_tp: int, d_tp: int, heads: int
) -> None:
    setups = pair(engines, prefill, decode, (left, right), (p_tp, d_tp), heads)
    check_arrived(engines, fleet, *(fleet.get(setup) for setup in setups))


@pytest.mark.parametrize(("left", "right", "p_tp", "d_tp", "heads"), CONVERTED, ids=str)
def test_standard_pages_arrive_as_shuffled_ones(
    engines: Any, fleet: Any, left: Any, right: Any, p_tp: int, d_tp: int, heads: int
) -> None:
    prefill, decode = pair(engines, "Standard", "Shuffled", (left, right), (p_tp, d_tp), heads)
    decode = dataclasses.replace(decode, convert=True)
    check_arrived(engines, fleet, fleet.get(prefill), fleet.get(decode))


def test_conversion_in_the_step_and_across_backends(engines: Any, fleet: Any) -> None:
    prefill, decode = pair(engines, "OtherStandard", "Shuffled", (None, "PLANES"), (1, 1), 4)
    check_arrived(engines, fleet, fleet.get(prefill), fleet.get(dataclasses.replace(decode, convert="sync")))


def test_only_blocks_that_were_read_are_converted(engines: Any, fleet: Any) -> None:
    """known fault 45: with a local prefix only the rest is read, and the prefix must not be converted again."""
    prefill, decode = pair(engines, "Standard", "Shuffled", (None, "PLANES"), (1, 1), 4)
    p, d = fleet.get(prefill), fleet.get(dataclasses.replace(decode, convert=True))
    values = engines.values_of(p, seed=1)
    p.fill(values)
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), remote=(3, 1, 7, 2), local=(8, 5))
    assert outcome.arrived, outcome
    assert torch.equal(d.read((8, 5)), values[:, [7, 2]])
    assert (d.read((0, 1, 2, 3, 4, 6, 7)) == engines.POISON).all()


def test_a_full_prefix_hit_converts_nothing(engines: Any, fleet: Any) -> None:
    prefill, decode = pair(engines, "Standard", "Shuffled", (None, "PLANES"), (1, 1), 4)
    p, d = fleet.get(prefill), fleet.get(dataclasses.replace(decode, convert=True))
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), remote=(3, 1), local=())
    assert outcome.arrived, outcome
    assert outcome.sent == 1, "the prefill must be told although nothing was read"
    assert (d.read(range(9)) == engines.POISON).all()


# Prefill, decode, layouts, TP sizes, heads, the knob, and what the reason says.
REFUSED = [
    ("Standard", "Shuffled", (None, "PLANES"), (1, 1), 4, False, '"convert_kv_pages": true on this side'),
    ("Standard", "Shuffled", (None, "WHOLE"), (1, 1), 4, False, '"convert_kv_pages": true on this side'),
    ("Shuffled", "Standard", ("WHOLE", None), (1, 1), 4, True, "shuffled pages to standard pages is not in"),
    ("Shuffled", "Standard", ("WHOLE", None), (1, 1), 4, False, "use the same page format on both sides"),
    ("XPacked", "Shuffled", ("PLANES", "PLANES"), (1, 1), 4, True, "x_packed pages to shuffled pages is"),
    ("SplitByToken", "Shuffled", ("PLANES", "PLANES"), (1, 1), 4, True, "split_nhd pages to shuffled"),
    (
        "SplitByToken",
        "SplitByToken",
        ("WHOLE", "WHOLE"),
        (1, 2),
        4,
        False,
        "not one run of bytes in split_nhd",
    ),
    # Two heads in planes look like two slots in planes: the same number of regions of the same size.
    ("Standard", "Shuffled", ("PLANES", "PLANES"), (1, 1), 2, False, '"convert_kv_pages": true on this side'),
    ("Standard", "Shuffled", ("PLANES", "PLANES"), (1, 1), 2, True, "one run of bytes, got regions of"),
    ("Shuffled", "Standard", ("PLANES", "PLANES"), (1, 1), 2, True, "shuffled pages to standard pages"),
    ("Shuffled", "Shuffled", ("PLANES", "PLANES"), (4, 2), 2, False, "several copies of 2 KV heads"),
    ("Standard", "Shuffled", (None, "PLANES"), (4, 2), 2, True, "several copies of 2 KV heads"),
]


@pytest.mark.parametrize(("prefill", "decode", "layouts", "tp", "heads", "knob", "reason"), REFUSED, ids=str)
def test_other_pairs_are_refused(
    engines: Any,
    fleet: Any,
    caplog: pytest.LogCaptureFixture,
    prefill: str,
    decode: str,
    layouts: tuple[Any, Any],
    tp: tuple[int, int],
    heads: int,
    knob: bool,
    reason: str,
) -> None:
    left, right = pair(engines, prefill, decode, layouts, tp, heads)
    p, d = fleet.get(left), fleet.get(dataclasses.replace(right, convert=knob))
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), REMOTE, LOCAL)
    assert outcome.refused, outcome
    assert outcome.bad_blocks == [set(LOCAL)] * tp[1], "the scheduler must hear of the blocks"
    assert (d.read(range(9)) == engines.POISON).all()
    for worker in (connector.connector_worker for connector in d.workers):
        refusal = worker.last_refusal
        assert reason in refusal, refusal
        assert p.page.tag in refusal
        assert d.page.tag in refusal
        assert f"backend {p.setup.backend.get_name()}" in refusal
        # Nothing was built for the peer.
        assert p.id not in worker.dst_num_blocks
        assert p.id not in worker.tp_mappings
        assert p.id not in worker._remote_agents
