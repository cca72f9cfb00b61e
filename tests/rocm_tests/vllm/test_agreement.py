# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What is agreed with a peer, without a peer; and where the halves of its pages lie."""

from __future__ import annotations

import dataclasses

import pytest

from flashinfer.integrations.vllm.nixl.agreement import (
    Agreement,
    Group,
    PageFormatError,
    Peer,
    agree_to_receive,
    agree_to_send,
    regions_in_halves,
)
from flashinfer.integrations.vllm.nixl.conversion import knob
from flashinfer.integrations.vllm.nixl.local_pages import LocalPages
from flashinfer.kv import PageFormat

STANDARD = PageFormat("standard", "bfloat16", 4, 16, 64)
SHUFFLED = dataclasses.replace(STANDARD, kind="shuffled")


def local(page: PageFormat, layers: int = 2) -> LocalPages:
    return LocalPages({f"layer{i}": page for i in range(layers)}, "FLASH_ATTN")


def peer(page: PageFormat, tp_size: int = 1, *, halves: bool = False, layers: int = 2) -> Peer:
    regions = 2 if halves or page.head_slots == 2 else 1
    names = [f"layer{i}" for i in range(layers) for _ in range(regions)]
    lengths = [page.page_bytes // regions] * len(names)
    return Peer("UNIFIED", tp_size, page.page_size, "LBHNC", 1, names, [page.tag] * len(names), lengths)


def test_equal_pages_are_read_as_they_are() -> None:
    for page in (STANDARD, SHUFFLED):
        assert agree_to_receive(local(page), peer(page), Group(1, 4), convert=False) == Agreement()


@pytest.mark.parametrize(
    ("ours", "theirs", "heads", "pieces"), [(1, 1, 4, 1), (2, 1, 2, 1), (1, 4, 1, 4), (8, 2, 1, 1)]
)
def test_a_conversion_is_of_pieces(ours: int, theirs: int, heads: int, pieces: int) -> None:
    group = Group(ours, 4)
    mine = dataclasses.replace(SHUFFLED, num_kv_heads=group.heads(ours))
    other = dataclasses.replace(STANDARD, num_kv_heads=group.heads(theirs))
    agreement = agree_to_receive(local(mine), peer(other, theirs), group, convert=True)
    assert agreement.pieces == pieces
    assert agreement.src == dataclasses.replace(STANDARD, num_kv_heads=heads)
    assert agreement.dst == dataclasses.replace(SHUFFLED, num_kv_heads=heads)


def code(page: PageFormat, other: Peer, group: Group, *, convert: bool = True, send: bool = False) -> str:
    with pytest.raises(PageFormatError) as caught:
        (agree_to_send if send else agree_to_receive)(local(page), other, group, convert=convert)
    assert page.tag in str(caught.value)
    assert "backend FLASH_ATTN" in str(caught.value)
    assert f"backend {other.backend}" in str(caught.value)
    return caught.value.code


def test_refusals_have_a_code() -> None:
    one = Group(1, 4)
    assert code(SHUFFLED, dataclasses.replace(peer(STANDARD), version=0), one) == "no_tag"
    assert code(SHUFFLED, dataclasses.replace(peer(STANDARD), version=3), one) == "version"
    assert code(SHUFFLED, peer(STANDARD), one, convert=False) == "format"
    assert code(STANDARD, peer(SHUFFLED), one) == "format"
    assert code(SHUFFLED, peer(dataclasses.replace(SHUFFLED, page_size=32)), one) == "block_size"
    assert code(SHUFFLED, dataclasses.replace(peer(STANDARD), layout="LHBNC"), one) == "layout"
    fp8 = dataclasses.replace(SHUFFLED, dtype="float8_e4m3fnuz", scale_mode="per_tensor")
    assert code(fp8, peer(dataclasses.replace(fp8, dtype="float8_e4m3fn")), one) == "format"
    assert code(fp8, peer(dataclasses.replace(fp8, kind="standard")), one) == "format", "fp8 is not in scope"
    wide = dataclasses.replace(SHUFFLED, page_size=64)
    assert code(wide, peer(dataclasses.replace(wide, kind="standard")), one) == "format", "64 tokens are not in scope"
    by_token = dataclasses.replace(SHUFFLED, kind="split_nhd")
    half = dataclasses.replace(by_token, num_kv_heads=2)
    assert code(half, peer(by_token), Group(2, 4)) == "tensor_parallel"
    one_head = dataclasses.replace(SHUFFLED, num_kv_heads=1)
    assert code(one_head, peer(one_head, 8), Group(4, 4)) == "tensor_parallel"


def test_layers_must_have_one_outcome() -> None:
    mixed = LocalPages({"layer0": SHUFFLED, "layer1": STANDARD}, "FLASH_ATTN")
    with pytest.raises(PageFormatError, match="Only layers of one format"):
        agree_to_receive(mixed, peer(STANDARD), Group(1, 4), convert=True)


def test_a_sender_checks_what_the_receiver_will_do() -> None:
    one = Group(1, 4, pulls=False)
    assert agree_to_send(local(STANDARD), peer(SHUFFLED), one, convert=True) == Agreement()
    assert agree_to_send(local(STANDARD), peer(STANDARD), one, convert=False) == Agreement()
    assert agree_to_send(local(SHUFFLED), peer(SHUFFLED), one, convert=False) == Agreement()
    assert code(STANDARD, peer(SHUFFLED), one, convert=False, send=True) == "format"
    assert code(SHUFFLED, peer(STANDARD), one, send=True) == "format"
    assert code(STANDARD, peer(STANDARD), one, send=True) == "layout"
    assert code(SHUFFLED, dataclasses.replace(peer(SHUFFLED), version=0), one, send=True) == "no_tag"
    ranks = peer(dataclasses.replace(SHUFFLED, num_kv_heads=2), 2)
    assert code(STANDARD, ranks, one, send=True) == "tensor_parallel"
    larger = dataclasses.replace(SHUFFLED, page_size=32)
    assert code(dataclasses.replace(larger, kind="standard"), peer(SHUFFLED), one, send=True) == "block_size"


@pytest.mark.parametrize("share", [0, 1, 3])
def test_halves_of_a_share_of_a_page(share: int) -> None:
    """A peer with all 4 heads, a rank with one: after vLLM's own shift the halves are those of that head's bytes."""
    mine = dataclasses.replace(SHUFFLED, num_kv_heads=1)
    addresses, lengths = regions_in_halves([1 << 20], [STANDARD], [mine], share)
    ((start, size),) = STANDARD.head_ranges(share, 1)
    shifted = [address + share * mine.half_bytes - (1 << 20) for address in addresses]
    assert shifted == [start, start + size // 2]
    assert lengths == [STANDARD.half_bytes] * 2


def test_halves_of_a_page_that_is_a_piece() -> None:
    piece = dataclasses.replace(STANDARD, num_kv_heads=2)
    addresses, lengths = regions_in_halves([0, 1 << 20], [piece] * 2, [SHUFFLED] * 2, 0)
    assert addresses == [0, piece.half_bytes, 1 << 20, (1 << 20) + piece.half_bytes]
    assert lengths == [piece.half_bytes] * 4


def test_the_knob_takes_three_values() -> None:
    assert [knob(value) for value in (True, False, "sync")] == [True, False, "sync"]
    for value in (1, 0, "true", None, "async"):
        with pytest.raises(ValueError, match='"convert_kv_pages" must be true, false or "sync"'):
            knob(value)
