# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Every mismatch fails closed, and says both tags and the remedy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.kv import (
    BIT_EXACT,
    EXACT,
    KINDS,
    ConversionPlan,
    Convert,
    PageFormat,
    Reject,
    Same,
    Scope,
    negotiate,
)

SHUFFLED = PageFormat("shuffled", "bfloat16", 8, 16, 128)
STANDARD = dataclasses.replace(SHUFFLED, kind="standard")


def rejected(local: PageFormat, remote_tag: str | None, *, convert: bool = True, scope: Scope | None = None) -> str:
    decision = (
        negotiate(local, remote_tag, convert=convert)
        if scope is None
        else negotiate(local, remote_tag, convert=convert, scope=scope)
    )
    assert isinstance(decision, Reject), decision
    assert local.tag in decision.reason
    return decision.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convert", [False, True])
def test_equal_tags_are_the_same_pages(kind: str, convert: bool) -> None:
    local = dataclasses.replace(SHUFFLED, kind=kind)
    assert negotiate(local, local.tag, convert=convert) == Same()


def test_the_first_pair() -> None:
    decision = negotiate(SHUFFLED, STANDARD.tag, convert=True)
    assert decision == Convert(ConversionPlan(src=STANDARD, dst=SHUFFLED))


def test_conversion_is_off_unless_asked_for() -> None:
    reason = rejected(SHUFFLED, STANDARD.tag, convert=False)
    assert STANDARD.tag in reason
    assert '"convert_kv_pages": true' in reason


@pytest.mark.parametrize("missing", [None, ""])
def test_a_peer_without_a_tag_may_only_feed_standard_pages(missing: str | None) -> None:
    """Known fault 47."""
    for kind in KINDS:
        local = dataclasses.replace(SHUFFLED, kind=kind)
        if kind == "standard":
            assert negotiate(local, missing, convert=True) == Same()
        else:
            assert "advertises no page format" in rejected(local, missing)


@pytest.mark.parametrize(
    "remote_tag",
    [
        STANDARD.tag.replace("fi-kv/1", "fi-kv/2"),
        STANDARD.tag.replace("n16", "n32"),
        STANDARD.tag.replace("h8", "h4"),
        STANDARD.tag.replace("d128", "d64"),
        STANDARD.tag.replace("bfloat16", "float16"),
        STANDARD.tag + "\0",
        STANDARD.tag + " ",
        STANDARD.tag + ";per_tensor",
        STANDARD.tag[:-1],
        STANDARD.tag.upper(),
        STANDARD.tag.replace("standard", "st\N{CYRILLIC SMALL LETTER A}ndard"),
        "\N{SNOWMAN}",
        "\n",
        "standard",
        "x" * 100_000,
    ],
    ids=ascii,
)
@pytest.mark.parametrize("local", [SHUFFLED, STANDARD], ids=["shuffled", "standard"])
@pytest.mark.parametrize("scope", [None, BIT_EXACT], ids=["default", "bit_exact"])
def test_an_unknown_tag_is_rejected(local: PageFormat, remote_tag: str, scope: Scope | None) -> None:
    """Known fault 47: anything but the very bytes of a tag this side can take."""
    reason = rejected(local, remote_tag, scope=scope)
    # The peer's tag is there, on one line of bounded length.
    assert ascii(remote_tag)[1:100].rstrip("'") in reason
    assert reason.isascii()
    assert reason.isprintable()
    assert len(reason) < 600


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [(16, 32), (32, 16), (16, 64)])
def test_unlike_block_sizes_are_rejected(kind: str, ratio: tuple[int, int]) -> None:
    """Known fault 46."""
    remote = dataclasses.replace(SHUFFLED, kind=kind, page_size=ratio[0])
    local = dataclasses.replace(SHUFFLED, page_size=ratio[1])
    assert remote.tag in rejected(local, remote.tag, scope=BIT_EXACT)


def test_the_other_fp8_flavour_is_rejected() -> None:
    """Known fault 36: same size, same kind, twice the value."""
    for kind in ("standard", "shuffled"):
        ours = PageFormat("shuffled", "float8_e4m3fnuz", 8, 16, 128)
        theirs = PageFormat(kind, "float8_e4m3fn", 8, 16, 128)
        assert theirs.tag in rejected(ours, theirs.tag, scope=BIT_EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "tokens"), [(8, 16), (4, 64), (2, 16), (1, 32)])
def test_little_pages_make_a_large_one_where_that_is_in_scope(kind: str, heads: int, tokens: int) -> None:
    local = dataclasses.replace(SHUFFLED, page_size=64)
    remote = dataclasses.replace(local, kind=kind, num_kv_heads=heads, page_size=tokens)
    assert negotiate(local, remote.tag, convert=True, scope=EXACT) == Convert(ConversionPlan(remote, local))
    if tokens < 64:
        reason = rejected(local, remote.tag, scope=dataclasses.replace(EXACT, token_blocks=False))
        assert f"converting {tokens}-token pages to 64-token pages is not in scope" in reason
    if heads < 8:
        reason = rejected(local, remote.tag, scope=dataclasses.replace(EXACT, head_pieces=False))
        assert f"converting pages of {heads} heads to pages of 8 heads is not in scope" in reason


def test_a_page_that_holds_more_than_a_local_one_is_rejected() -> None:
    """A part of a page was never read."""
    for what, size in (("page_size", 32), ("num_kv_heads", 16), ("page_size", 24), ("num_kv_heads", 3)):
        remote = dataclasses.replace(STANDARD, **{what: size})
        expected = "differ by more than the arrangement" if size in (24, 3) else "more tokens or heads than a local one"
        assert expected in rejected(SHUFFLED, remote.tag, scope=EXACT)


@pytest.mark.parametrize(
    ("scale_mode", "heads", "tokens", "agreed"),
    [
        ("per_tensor", 8, 16, True),
        ("per_tensor", 2, 64, False),
        ("per_block", 8, 16, False),
        ("per_block", 2, 64, False),
        ("per_block", 8, 64, True),
        ("per_head", 2, 16, True),
        ("per_token", 2, 16, True),
    ],
)
def test_scales_are_not_merged(scale_mode: str, heads: int, tokens: int, agreed: bool) -> None:
    local = PageFormat("shuffled", "float8_e4m3fn", 8, 64, 128, scale_mode)
    remote = PageFormat("standard", "float8_e4m3fn", heads, tokens, 128, scale_mode)
    if agreed:
        assert negotiate(local, remote.tag, convert=True, scope=EXACT) == Convert(ConversionPlan(remote, local))
    else:
        assert "making one page of" in rejected(local, remote.tag, scope=EXACT)


def test_arguments_of_another_type_are_refused() -> None:
    """A string from a configuration file is true, whatever it says."""
    good: dict[str, Any] = {"local": SHUFFLED, "remote_tag": STANDARD.tag, "convert": True, "scope": EXACT}
    for name, value, expected in (
        ("convert", "false", "convert must be a bool, got 'false'"),
        ("scope", "EXACT", "scope must be a Scope, got 'EXACT'"),
        ("local", STANDARD.tag, "local must be a PageFormat, got"),
        ("remote_tag", 10**20, "remote_tag must be a str or None, got int"),
        ("remote_tag", STANDARD.tag.encode(), "remote_tag must be a str or None, got bytes"),
    ):
        with pytest.raises(ValueError, match=f"negotiate: {expected}"):
            negotiate(**{**good, name: value})
    for changes, expected in (
        ({"dtypes": "uint8"}, "dtypes must be a set, got 'uint8'"),
        ({"dtypes": {torch.bfloat16}}, "dtypes must hold some of .*, got torch.bfloat16"),
        ({"pairs": {("standard", "shufled")}}, "pairs must hold pairs of KINDS, got"),
        ({"page_sizes": 16}, "page_sizes must be a set, got 16"),
    ):
        with pytest.raises(ValueError, match=f"Scope: {expected}"):
            dataclasses.replace(EXACT, **changes)


def test_the_other_fp8_flavour_is_converted_where_nothing_is_lost() -> None:
    ours = PageFormat("shuffled", "float8_e4m3fnuz", 8, 16, 128, "per_tensor")
    theirs = PageFormat("standard", "float8_e4m3fn", 8, 16, 128, "per_tensor")
    assert negotiate(ours, theirs.tag, convert=True, scope=EXACT) == Convert(ConversionPlan(theirs, ours))
    # The way back has a code that the other flavour lacks; without scales both have.
    for local, remote in ((theirs, ours), (without_scale(ours), without_scale(theirs))):
        reason = rejected(local, remote.tag, scope=EXACT)
        assert f"converting {remote.dtype} values to {local.dtype} values is not in scope" in reason
        lossy = dataclasses.replace(EXACT, recode="any")
        assert negotiate(local, remote.tag, convert=True, scope=lossy) == Convert(ConversionPlan(remote, local))


def without_scale(page: PageFormat) -> PageFormat:
    return dataclasses.replace(page, scale_mode=None)


def test_a_scope_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Scope: recode must be one of \('no', 'exact', 'any'\), got 'maybe'"):
        dataclasses.replace(EXACT, recode="maybe")


def test_the_reverse_direction_is_rejected_unless_in_scope() -> None:
    reason = rejected(STANDARD, SHUFFLED.tag)
    assert "converting shuffled pages to standard pages is not in scope" in reason
    assert SHUFFLED.tag in reason
    assert negotiate(STANDARD, SHUFFLED.tag, convert=True, scope=BIT_EXACT) == Convert(
        ConversionPlan(SHUFFLED, STANDARD)
    )


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (PageFormat("shuffled", "float8_e4m3fnuz", 8, 16, 128), "converting float8_e4m3fnuz pages"),
        (PageFormat("shuffled", "float32", 8, 16, 128), "converting float32 pages"),
        (PageFormat("shuffled", "bfloat16", 8, 128, 128), "converting 128-token pages"),
        (PageFormat("x_packed", "bfloat16", 8, 16, 128), "converting standard pages to x_packed pages"),
    ],
)
def test_the_first_versions_scope(local: PageFormat, message: str) -> None:
    assert f"{message} is not in scope" in rejected(local, dataclasses.replace(local, kind="standard").tag)


def test_pages_with_scales_are_not_rearranged_on_bits_alone() -> None:
    local = PageFormat("shuffled", "float8_e4m3fn", 8, 16, 128, scale_mode="per_token")
    remote = dataclasses.replace(local, kind="standard")
    assert "per_token scales is not in scope" in rejected(local, remote.tag, scope=BIT_EXACT)
    assert negotiate(local, local.tag, convert=False) == Same()
    with_scales = dataclasses.replace(BIT_EXACT, scales=True)
    assert negotiate(local, remote.tag, convert=True, scope=with_scales) == Convert(ConversionPlan(remote, local))


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(KINDS, 2)))
def test_every_pair_of_kinds_can_be_in_scope(src: str, dst: str) -> None:
    remote = PageFormat(src, "float16", 3, 32, 64)
    local = PageFormat(dst, "float16", 3, 32, 64)
    plan = ConversionPlan(remote, local)
    assert negotiate(local, remote.tag, convert=True, scope=BIT_EXACT) == Convert(plan)
    assert "conversion is off" in rejected(local, remote.tag, convert=False, scope=BIT_EXACT)


def test_a_geometry_that_only_some_kinds_have() -> None:
    """5 tokens: `shuffled` is no candidate, and asking for one must not raise."""
    local = PageFormat("split_nhd", "bfloat16", 2, 5, 128)
    remote = dataclasses.replace(local, kind="standard")
    assert negotiate(local, remote.tag, convert=True, scope=BIT_EXACT) == Convert(ConversionPlan(remote, local))
    rejected(local, local.tag.replace("split_nhd", "shuffled"), scope=BIT_EXACT)


@given(st.text(max_size=60), st.sampled_from(KINDS))
def test_no_other_text_is_taken(remote_tag: str, kind: str) -> None:
    local = dataclasses.replace(SHUFFLED, kind=kind)
    known = {dataclasses.replace(SHUFFLED, kind=other).tag for other in KINDS} | {""}
    if remote_tag not in known:
        rejected(local, remote_tag, scope=BIT_EXACT)
