# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Push mode: the prefill writes, both sides check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REMOTE, LOCAL = (1, 5, 2), (4, 0, 6)


def pushed(engines: Any, fleet: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> Any:
    heads = prefill.pop("kv_heads", 4)
    p = fleet.get(engines.Setup(role="kv_producer", connector="NixlPushConnector", kv_heads=heads, **prefill))
    d = fleet.get(engines.Setup(connector="NixlPushConnector", kv_heads=heads, blocks=9, **decode))
    values = engines.values_of(p)
    p.fill(values)
    d.poison()
    outcome = engines.push(p, d, fleet.request(), REMOTE, LOCAL)
    return outcome, values[:, list(REMOTE)], d.read(LOCAL), (d.read((1, 2, 3, 5, 7, 8)) == engines.POISON).all(), d


ACCEPTED = [
    ("Standard", "Standard", False, 1, 1),
    ("Standard", "Standard", False, 1, 2),
    ("Shuffled", "Shuffled", False, 1, 1),
    ("Shuffled", "Shuffled", False, 1, 2),
    ("Shuffled", "Shuffled", False, 2, 1),
    ("Standard", "Shuffled", True, 1, 1),
    ("Standard", "Shuffled", True, 2, 2),
    ("Standard", "Shuffled", True, 2, 1),
    ("Standard", "Shuffled", True, 4, 2),
    ("Standard", "Shuffled", True, 1, 2),
    ("Standard", "Shuffled", True, 2, 4),
    ("Standard", "Shuffled", "sync", 1, 4),
]


@pytest.mark.parametrize(("prefill", "decode", "convert", "p_tp", "d_tp"), ACCEPTED, ids=str)
def test_pushed_pages_arrive(
    engines: Any, fleet: Any, prefill: str, decode: str, convert: bool, p_tp: int, d_tp: int
) -> None:
    outcome, sent, seen, rest_untouched, _ = pushed(
        engines,
        fleet,
        {"backend": getattr(engines, prefill), "tp": p_tp, "convert": convert},
        {"backend": getattr(engines, decode), "tp": d_tp, "convert": convert},
    )
    assert outcome.arrived, outcome
    assert outcome.sent == p_tp
    assert torch.equal(seen, sent)
    assert rest_untouched


REFUSED = [
    # Both knobs, TP sizes, and what the decoder says.
    ("Standard", "Shuffled", False, False, 1, 1, '"convert_kv_pages": true on this side'),
    ("Standard", "Shuffled", False, True, 1, 1, "both sides must set"),
    ("Standard", "Standard", True, False, 1, 1, "sends half pages"),
    ("Shuffled", "Standard", False, True, 1, 1, "shuffled pages to standard pages is not in scope"),
]


@pytest.mark.parametrize(("prefill", "decode", "p_knob", "d_knob", "p_tp", "d_tp", "reason"), REFUSED, ids=str)
def test_a_decoder_refuses_at_once(
    engines: Any,
    fleet: Any,
    prefill: str,
    decode: str,
    p_knob: bool,
    d_knob: bool,
    p_tp: int,
    d_tp: int,
    reason: str,
) -> None:
    outcome, _, seen, _, decoder = pushed(
        engines,
        fleet,
        {"backend": getattr(engines, prefill), "tp": p_tp, "convert": p_knob},
        {"backend": getattr(engines, decode), "tp": d_tp, "convert": d_knob},
    )
    assert outcome.refused, outcome
    assert reason in decoder.worker().last_refusal
    assert (seen == engines.POISON).all()


@pytest.mark.parametrize("heads", [3, 6])
def test_pushed_shares_of_an_odd_number_of_heads(engines: Any, fleet: Any, heads: int) -> None:
    outcome, sent, seen, rest_untouched, _ = pushed(
        engines,
        fleet,
        {"backend": engines.Standard, "convert": True, "kv_heads": heads},
        {"backend": engines.Shuffled, "tp": 3, "convert": True},
    )
    assert outcome.arrived, outcome
    assert torch.equal(seen, sent)
    assert rest_untouched


@pytest.mark.parametrize("decode", ["Standard", "Shuffled"])
def test_a_push_does_not_reach_every_copy_of_a_head(engines: Any, fleet: Any, decode: str) -> None:
    """vLLM writes to one of the ranks that hold a head, and the others would wait for minutes."""
    convert = decode == "Shuffled"
    outcome, _, seen, _, decoder = pushed(
        engines,
        fleet,
        {"backend": engines.Standard, "convert": convert, "kv_heads": 2},
        {"backend": getattr(engines, decode), "tp": 4, "convert": convert},
    )
    assert outcome.refused, outcome
    assert "does not reach every copy of a KV head" in decoder.worker().last_refusal
    assert (seen == engines.POISON).all()


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("decode", ["Standard", "Shuffled"])
def test_pages_of_unlike_sizes_are_not_pushed(engines: Any, fleet: Any, decode: str, sizes: tuple[int, int]) -> None:
    """vLLM's own waits for minutes in one direction, and in the other ends the decoder's step with an assertion."""
    convert = decode == "Shuffled"
    outcome, _, seen, _, decoder = pushed(
        engines,
        fleet,
        {"backend": engines.Standard, "convert": convert, "block_size": sizes[0]},
        {"backend": getattr(engines, decode), "convert": convert, "block_size": sizes[1]},
    )
    assert outcome.refused, outcome
    assert "can only be pulled" in decoder.worker().last_refusal
    assert (seen == engines.POISON).all()
