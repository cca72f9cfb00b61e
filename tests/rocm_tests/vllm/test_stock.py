# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connector: what it misreads without a word, and that ours and it understand each other.

The first half dies on the day that vLLM refuses or reads these pairs: then take them out of the documentation, and see
what of this package's connector is still needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rocm_tests.vllm.formats import joined

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REMOTE, LOCAL = (1, 5, 2), (4, 0, 6)


def run(engines: Any, fleet: Any, prefill: Any, decode: Any, local: Any = LOCAL, remote: Any = REMOTE) -> Any:
    """Outcome, what the prefill held, what the decoder sees, and both engines."""
    p, d = fleet.get(dataclasses.replace(prefill, role="kv_producer")), fleet.get(decode)
    values = engines.values_of(p)
    p.fill(values)
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), remote, local)
    return outcome, values[:, list(remote)], d.read(local), d


# Backend of prefill and of decode, layout of both, TP sizes, KV heads.
MISREAD = [
    # Seed case 1: the tag is what tells them apart, and stock has none.
    ("Shuffled", "Standard", "WHOLE", (1, 1), 4),
    ("Standard", "Shuffled", "WHOLE", (1, 1), 4),
    # Seed case 2: a page of two slots is cut into K and V, not by heads.
    ("Shuffled", "Shuffled", "WHOLE", (1, 2), 4),
    ("Shuffled", "Shuffled", "WHOLE", (2, 1), 4),
    ("XPacked", "XPacked", "WHOLE", (1, 2), 4),
    ("SplitByToken", "SplitByToken", "WHOLE", (1, 2), 4),
    # Two heads in planes look like two slots in planes.
    ("Standard", "Shuffled", "PLANES", (1, 1), 2),
]


@pytest.mark.parametrize(("prefill", "decode", "layout", "tp", "heads"), MISREAD, ids=str)
def test_stock_takes_pages_for_what_they_are_not(
    engines: Any, fleet: Any, prefill: str, decode: str, layout: str, tp: tuple[int, int], heads: int
) -> None:
    stock = engines.Setup(module=engines.STOCK, layout=getattr(engines, layout), kv_heads=heads)
    outcome, sent, seen, _ = run(
        engines,
        fleet,
        dataclasses.replace(stock, backend=getattr(engines, prefill), tp=tp[0]),
        dataclasses.replace(stock, backend=getattr(engines, decode), tp=tp[1]),
    )
    assert outcome.arrived, "stock now refuses this pair"
    assert not torch.equal(seen, sent), "stock now reads this pair right"


@pytest.mark.parametrize("layout", ["WHOLE", "PLANES"])
def test_stock_takes_two_small_pages_for_one_of_two_slots(engines: Any, fleet: Any, layout: str) -> None:
    stock = engines.Setup(module=engines.STOCK, layout=getattr(engines, layout), backend=engines.Shuffled)
    outcome, sent, seen, _ = run(
        engines, fleet, stock, dataclasses.replace(stock, block_size=32), local=(4, 0), remote=(1, 5, 2, 3)
    )
    assert outcome.arrived, "stock now refuses this pair"
    # Two pages of 16 tokens, one after the other, are what the 32-token page has to hold.
    assert not torch.equal(seen, joined(sent, 2, 2)), "stock now reads this pair right"


def test_stock_pairs_small_pages_from_the_end(engines: Any, fleet: Any) -> None:
    """The decoder holds the first of three pages, and the prefill has five half as large, as a prompt often ends.

    What is missing of the last page is not known when the rest of the prompt is paired, and moves it by one small page.
    """
    stock = engines.Setup(module=engines.STOCK)
    p, d = (
        fleet.get(dataclasses.replace(stock, role="kv_producer")),
        fleet.get(dataclasses.replace(stock, block_size=32)),
    )
    values, remote, local = engines.values_of(p), (1, 5, 2, 3, 0), (0, 6)
    p.fill(values)
    d.poison()
    assert engines.pull(p, d, fleet.request(), remote, local, held=1).arrived, "stock now refuses this"
    assert not torch.equal(d.read(local), joined(values[:, list(remote)], 2, 3)[:, 1:]), "stock now reads this right"


def test_stock_reads_standard_pages_of_unlike_sizes(engines: Any, fleet: Any) -> None:
    """The control for the case above, and that our standard engines lose nothing."""
    for module in (engines.STOCK, engines.OURS):
        base = engines.Setup(module=module)
        outcome, sent, seen, _ = run(
            engines, fleet, base, dataclasses.replace(base, block_size=32), local=(4, 0), remote=(1, 5, 2, 3)
        )
        assert outcome.arrived
        assert torch.equal(seen, joined(sent, 2, 2))


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("ours_decodes", [True, False])
def test_a_stock_peer_works_with_our_standard_engine(
    engines: Any, fleet: Any, ours_decodes: bool, tp: tuple[int, int]
) -> None:
    modules = (engines.STOCK, engines.OURS) if ours_decodes else (engines.OURS, engines.STOCK)
    outcome, sent, seen, _ = run(
        engines, fleet, engines.Setup(module=modules[0], tp=tp[0]), engines.Setup(module=modules[1], tp=tp[1])
    )
    assert outcome.arrived
    assert torch.equal(seen, sent)


@pytest.mark.parametrize("peer", ["Standard", "Shuffled"])
@pytest.mark.parametrize("layout", ["WHOLE", "PLANES"])
def test_a_stock_prefill_is_refused_by_our_shuffled_decoder(engines: Any, fleet: Any, peer: str, layout: str) -> None:
    outcome, _, _, decoder = run(
        engines,
        fleet,
        engines.Setup(module=engines.STOCK, backend=getattr(engines, peer), layout=engines.WHOLE),
        engines.Setup(backend=engines.Shuffled, layout=getattr(engines, layout), convert=True),
    )
    assert outcome.refused
    refusal = decoder.worker().last_refusal
    assert "no page format" in refusal
    assert "upgrade the peer, or use standard pages here" in refusal
    assert decoder.worker().nixl_wrapper is not None
    assert "engine-0" not in decoder.worker().dst_num_blocks


@pytest.mark.parametrize(("peer", "layout"), [("Standard", "WHOLE"), ("Shuffled", "WHOLE"), ("Shuffled", "PLANES")])
def test_a_stock_decoder_refuses_our_shuffled_prefill(engines: Any, fleet: Any, peer: str, layout: str) -> None:
    """It knows no tags: the names of our regions carry them, and names are what it compares."""
    outcome, _, seen, _ = run(
        engines,
        fleet,
        engines.Setup(backend=engines.Shuffled, layout=getattr(engines, layout)),
        engines.Setup(module=engines.STOCK, backend=getattr(engines, peer), layout=getattr(engines, layout)),
    )
    assert outcome.refused
    assert (seen == engines.POISON).all()


def test_the_handshake_says_more_to_those_who_listen(engines: Any, fleet: Any) -> None:
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

    from flashinfer.integrations.vllm.nixl.metadata import decode, plain_names

    for backend, layout, regions in (
        (engines.Standard, engines.WHOLE, 2),
        (engines.Standard, engines.PLANES, 8),
        (engines.Shuffled, engines.WHOLE, 4),
        (engines.Shuffled, engines.PLANES, 4),
    ):
        engine = fleet.get(engines.Setup(backend=backend, layout=layout))
        data = engine.worker().xfer_handshake_metadata.agent_metadata_bytes
        said = decode(data)
        assert said.page_format_version == 1
        assert said.page_formats == [engine.page.tag] * regions
        assert plain_names(said) == engine.worker().region_names
        stock = msgspec.msgpack.decode(data, type=NixlAgentMetadata)
        assert (stock.region_names == engine.worker().region_names) == (backend is engines.Standard)
        old = decode(msgspec.msgpack.encode(stock))
        assert (old.page_format_version, old.page_formats) == (0, [])
        if backend is engines.Shuffled:
            pages, half = said.block_strides[0], engine.page.half_bytes
            assert said.block_lens == [half] * regions
            gaps = [b - a for a, b in zip(said.kv_caches_base_addr[::2], said.kv_caches_base_addr[1::2], strict=True)]
            assert gaps == ([half] * 2 if layout == engines.WHOLE else [half * engine.setup.blocks] * 2)
            assert pages == (2 * half if layout == engines.WHOLE else half)
