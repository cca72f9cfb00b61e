# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What is agreed with a peer, without a peer."""

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
)
from flashinfer.integrations.vllm.nixl.local_pages import LocalPages
from flashinfer.kv import PageFormat

STANDARD = PageFormat("standard", "bfloat16", 4, 16, 64)
SHUFFLED = dataclasses.replace(STANDARD, kind="shuffled")


def local(page: PageFormat, layers: int = 2, scales: tuple[float, float] | None = None) -> LocalPages:
    names = [f"layer{i}" for i in range(layers)]
    return LocalPages(dict.fromkeys(names, page), "FLASH_ATTN", dict.fromkeys(names, scales) if scales else {})


def peer(
    page: PageFormat, tp_size: int = 1, *, halves: bool = False, layers: int = 2, scales: tuple[float, ...] = ()
) -> Peer:
    regions = 2 if halves or page.head_slots == 2 else 1
    names = [f"layer{i}" for i in range(layers) for _ in range(regions)]
    lengths = [page.page_bytes // regions] * len(names)
    return Peer(
        "UNIFIED", tp_size, page.page_size, "LBHNC", 1, names, [page.tag] * len(names), lengths, [scales] * len(names)
    )


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
    assert code(SHUFFLED, peer(dataclasses.replace(STANDARD, page_size=32)), one) == "block_size"
    assert code(STANDARD, peer(dataclasses.replace(STANDARD, page_size=48)), one) == "block_size"
    assert code(SHUFFLED, dataclasses.replace(peer(STANDARD), layout="LHBNC"), one) == "layout"
    by_token = dataclasses.replace(SHUFFLED, kind="split_nhd")
    half = dataclasses.replace(by_token, num_kv_heads=2)
    assert code(half, peer(by_token), Group(2, 4)) == "tensor_parallel"
    one_head = dataclasses.replace(SHUFFLED, num_kv_heads=1)
    assert code(one_head, peer(one_head, 8), Group(4, 4)) == "tensor_parallel"


def test_a_page_of_several_small_ones() -> None:
    large = dataclasses.replace(SHUFFLED, page_size=64)
    for small in (STANDARD, SHUFFLED):
        agreement = agree_to_receive(local(large), peer(small), Group(1, 4), convert=True)
        assert agreement == Agreement(small, large)
        assert agreement.ratio == 4
    piece = dataclasses.replace(STANDARD, num_kv_heads=1)
    agreement = agree_to_receive(local(large), peer(piece, 4), Group(1, 4), convert=True)
    assert agreement == Agreement(piece, dataclasses.replace(large, num_kv_heads=1), 4)
    share = dataclasses.replace(large, num_kv_heads=1)
    agreement = agree_to_receive(local(share), peer(STANDARD), Group(4, 4), convert=True)
    assert agreement == Agreement(piece, share)
    # A page that is its peer's, but for the flavour of its numbers, is converted where it is.
    assert agree_to_receive(local(large), peer(large), Group(1, 4), convert=True).ratio == 1


def test_small_pages_are_refused_where_they_cannot_be_paired() -> None:
    large = dataclasses.replace(SHUFFLED, page_size=32)
    one = Group(1, 4)
    assert code(large, peer(STANDARD), one, convert=False) == "format"
    assert code(large, dataclasses.replace(peer(STANDARD), block_size=8), one) == "format", "the tag says 16"
    assert code(large, dataclasses.replace(peer(STANDARD), kernel_pages=2), one) == "block_size"
    assert code(large, peer(STANDARD, halves=True), one) == "layout", "halves are what a push sends"
    pushed = Group(1, 4, pulls=False)
    for page in (large, dataclasses.replace(STANDARD, page_size=32)):
        assert code(page, peer(STANDARD, halves=True), pushed) == "block_size"
        assert code(page, peer(STANDARD), pushed, send=True) == "block_size"


OCP = dataclasses.replace(SHUFFLED, dtype="float8_e4m3fn", scale_mode="per_tensor")
FNUZ = dataclasses.replace(OCP, dtype="float8_e4m3fnuz")


def test_scales_must_mean_the_same() -> None:
    one, scales, twice = Group(1, 4), (0.25, 3.0), (0.5, 6.0)
    standard = dataclasses.replace(OCP, kind="standard")
    for ours, theirs, here in ((OCP, standard, scales), (FNUZ, standard, twice), (FNUZ, OCP, twice)):
        agreement = agree_to_receive(local(ours, scales=here), peer(theirs, scales=scales), one, convert=True)
        assert agreement == Agreement(theirs, ours)
        sends = agree_to_send(local(theirs, scales=scales), peer(ours, scales=here), one, convert=True)
        assert sends == Agreement()
    assert agree_to_receive(local(OCP, scales=scales), peer(OCP, scales=scales), one, convert=False) == Agreement()
    for ours, here, theirs, there in (
        (OCP, scales, OCP, twice),
        (OCP, scales, standard, (0.25, 3.5)),
        (FNUZ, scales, standard, scales),
        (OCP, scales, standard, ()),
        (OCP, None, standard, ()),
    ):
        mine, other = local(ours, scales=here), peer(theirs, scales=there)
        with pytest.raises(PageFormatError) as caught:
            agree_to_receive(mine, other, one, convert=True)
        assert caught.value.code == "scales"
    with pytest.raises(PageFormatError, match="values is not in scope"):
        agree_to_receive(
            local(OCP, scales=scales), peer(dataclasses.replace(FNUZ, kind="standard"), scales=twice), one, convert=True
        )
    with pytest.raises(PageFormatError) as caught:
        agree_to_send(local(standard, scales=scales), peer(FNUZ, scales=scales), one, convert=True)
    assert caught.value.code == "scales"


def test_a_push_reaches_every_copy_of_a_head_or_none() -> None:
    heads = dataclasses.replace(SHUFFLED, num_kv_heads=1)
    one_rank = peer(dataclasses.replace(STANDARD, num_kv_heads=2), halves=True)
    assert code(heads, one_rank, Group(4, 2, pulls=False)) == "tensor_parallel"
    assert agree_to_receive(local(heads), one_rank, Group(2, 2, pulls=False), convert=True).pieces == 1


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
    assert agree_to_send(local(STANDARD), ranks, one, convert=True) == Agreement()
    assert code(STANDARD, peer(dataclasses.replace(SHUFFLED, num_kv_heads=1), 8), one, send=True) == "tensor_parallel"
    larger = dataclasses.replace(SHUFFLED, page_size=32)
    assert code(dataclasses.replace(larger, kind="standard"), peer(SHUFFLED), one, send=True) == "block_size"
