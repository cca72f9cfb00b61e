# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of 8-bit floats: taken where formats and scales of both sides say the same values, refused elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rocm_tests.vllm.formats import joined

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REMOTE, LOCAL = (1, 5, 2), (4, 0, 6)
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# As vLLM reads one checkpoint: a platform with FNUZ doubles the scales, for its bytes mean half as much.
SCALES = (0.25, 0.75)
DOUBLED = (0.5, 1.5)


def pair(engines: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[Any, Any]:
    left = {"backend": engines.Standard, "fp8": OCP, "scales": SCALES, **prefill}
    right = {"backend": engines.Shuffled, "fp8": OCP, "scales": SCALES, "convert": True, **decode}
    return engines.Setup(role="kv_producer", **left), engines.Setup(blocks=9, **right)


def numbers(bits: torch.Tensor, setup: Any) -> torch.Tensor:
    """What the bytes mean: value times scale, `[layers, blocks, 2, heads, N, D]`."""
    scale = torch.tensor(setup.scales, dtype=torch.float64).view(2, 1, 1, 1)
    return bits.view(setup.fp8).to(torch.float64) * scale


def check(engines: Any, fleet: Any, left: Any, right: Any, remote: tuple[int, ...] = REMOTE) -> torch.Tensor:
    """Transfer, compare what every byte means, and give back the bytes of the decoder."""
    p, d = fleet.get(left), fleet.get(right)
    values = engines.values_of(p)
    p.fill(values)
    d.poison()
    outcome = engines.pull(p, d, fleet.request(), remote, LOCAL)
    assert outcome.arrived, (outcome, d.worker().last_refusal)
    seen, sent = d.read(LOCAL), joined(values[:, list(remote)], right.block_size // left.block_size, len(LOCAL))
    assert torch.equal(numbers(seen, right).nan_to_num(9e9), numbers(sent, left).nan_to_num(9e9))
    assert (d.read((1, 2, 3, 5, 7, 8)) == engines.POISON_BYTE).all()
    return torch.stack([seen, sent])


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "p_size", "d_size", "count"),
    [(1, 1, 16, 16, 3), (1, 2, 16, 16, 3), (4, 2, 16, 16, 3), (1, 1, 16, 32, 5), (2, 1, 16, 32, 5)],
    ids=str,
)
@pytest.mark.parametrize("fnuz_decodes", [False, True])
def test_standard_pages_arrive_as_shuffled_ones(
    engines: Any, fleet: Any, p_tp: int, d_tp: int, p_size: int, d_size: int, count: int, fnuz_decodes: bool
) -> None:
    flavour = {"fp8": FNUZ, "scales": DOUBLED} if fnuz_decodes else {}
    left, right = pair(engines, {"tp": p_tp, "block_size": p_size}, {"tp": d_tp, "block_size": d_size, **flavour})
    seen, sent = check(engines, fleet, left, right, (1, 5, 2, 0, 7)[:count])
    assert torch.equal(seen, sent) != fnuz_decodes, "in one flavour no bit may change, between two -0 and NaN must"


def test_pages_of_one_kind_and_of_two_flavours(engines: Any, fleet: Any) -> None:
    left, right = pair(engines, {"backend": engines.Shuffled}, {"fp8": FNUZ, "scales": DOUBLED})
    check(engines, fleet, left, right)


@pytest.mark.parametrize("backend", ["Standard", "Shuffled"])
def test_like_pages_need_like_scales_only(engines: Any, fleet: Any, backend: str) -> None:
    same = {"backend": getattr(engines, backend)}
    left, right = pair(engines, same, {**same, "convert": False})
    seen, sent = check(engines, fleet, left, right)
    assert torch.equal(seen, sent)


# What differs in the prefill and in the decoder, and what the reason says.
REFUSED = [
    ({"scales": (0.25, 0.5)}, {}, r"are \[0.25, 0.5\] at the peer and \[0.25, 0.75\] here"),
    ({"scales": (1.0, 1.0)}, {"fp8": FNUZ, "scales": (1.0, 1.0)}, "needs 2.0 times the sender's"),
    ({}, {"fp8": FNUZ, "scales": SCALES}, "needs 2.0 times the sender's"),
    ({"fp8": FNUZ, "scales": DOUBLED}, {}, "converting float8_e4m3fnuz values to float8_e4m3fn values is not in"),
    ({}, {"convert": False}, '"convert_kv_pages": true on this side'),
    ({}, {"fp8": FNUZ, "scales": DOUBLED, "convert": False}, '"convert_kv_pages": true on this side'),
    ({}, {"backend": "Standard", "fp8": FNUZ, "scales": DOUBLED}, "pages of two slots only"),
]


@pytest.mark.parametrize(("left", "right", "reason"), REFUSED, ids=str)
def test_other_pairs_are_refused(
    engines: Any, fleet: Any, left: dict[str, Any], right: dict[str, Any], reason: str
) -> None:
    named = {**right, "backend": getattr(engines, right.get("backend", "Shuffled"))}
    prefill, decode = pair(engines, left, named)
    p, d = fleet.get(prefill), fleet.get(decode)
    d.poison()
    assert engines.pull(p, d, fleet.request(), REMOTE, LOCAL).refused
    assert re.search(reason, d.worker().last_refusal), d.worker().last_refusal
    assert (d.read(range(9)) == engines.POISON_BYTE).all()
    assert p.id not in d.worker().dst_num_blocks


def test_like_standard_pages_of_unlike_scales_are_refused(engines: Any, fleet: Any) -> None:
    """vLLM compares no scales: this pair is misread without a word."""
    left, right = pair(engines, {"scales": (1.0, 1.0)}, {"backend": engines.Standard})
    p, d = fleet.get(left), fleet.get(right)
    assert engines.pull(p, d, fleet.request(), REMOTE, LOCAL).refused
    assert d.worker().xfer_stats.data["peers_refused"] == ["scales"]


def test_an_engine_without_scales_does_not_start(engines: Any, fleet: Any) -> None:
    left, _ = pair(engines, {"scales": None}, {})
    with pytest.raises(ValueError, match="one scale for K and one for V in a layer, got _k_scale of"):
        fleet.get(left)
