# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill from shuffled pages that are gathered into the workspace: when, and that nothing else becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import dense_kv
from flashinfer.host_batch import measure
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.attention.wrapper_case import Case

Q_LENS, KV_LENS = [9, 0, 5, 3, 4], [21, 8, 5, 0, 2]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row of queries is worth it."""
    monkeypatch.setattr(dense_kv, "ROWS_WORTH", 1)


def shuffled(q_lens: Sequence[int] = Q_LENS, kv_lens: Sequence[int] = KV_LENS, **options: Any) -> Case:
    return Case(q_lens, kv_lens, kv_layout="SHUFFLED", **options)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False, "logits_soft_cap": 3.0},
        {"causal": True, "window_left": 4},
        {"causal": True, "sm_scale": 0.3},
    ],
    ids=["causal", "cap", "window", "scale"],
)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_values(index_dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Tokens that pages do not have are NaN, and so is the workspace."""
    case = shuffled(index_dtype=index_dtype)
    wrapper = case.paged()
    case.plan_paged(wrapper, **options)
    assert wrapper.gathers_pages
    case.compare(wrapper.run(case.q, case.cache, return_lse=True), **options)


@pytest.mark.usefixtures("eager")
def test_masks_sinks_and_other_options_of_a_call() -> None:
    case = shuffled()
    masks, sinks = case.masks(), torch.tensor([1.0, -torch.inf, 0.0, 3.0])
    wrapper = case.paged()
    case.plan_paged(wrapper, custom_mask=torch.cat([m.flatten() for m in masks]))
    assert wrapper.gathers_pages
    case.compare(wrapper.run(case.q, case.cache, return_lse=True, sinks=sinks), masks=masks, sinks=sinks)
    case.plan_paged(wrapper, causal=True)
    out, lse = wrapper.run(case.q, case.cache, return_lse=True, lse_layout="HN", k_scale=0.5, v_scale=2.0)
    case.compare((out, lse.t()), causal=True, k_scale=0.5, v_scale=2.0)
    case.compare(wrapper.forward_return_lse(case.q, case.cache, window_left=2), window_left=2)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_pages_are_dequantised_on_the_way(flavour: torch.dtype) -> None:
    case = shuffled(kv_dtype=flavour, page_size=16)
    wrapper = case.paged()
    case.plan_paged(wrapper, causal=True)
    assert wrapper.gathers_pages
    got = wrapper.run(case.q, case.cache, return_lse=True, k_scale=0.5, v_scale=2.0)
    case.compare(got, causal=True, k_scale=0.5, v_scale=2.0)


@pytest.mark.usefixtures("eager")
def test_layers_of_fewer_heads_than_planned_and_an_empty_batch() -> None:
    case = shuffled(heads=(2, 1))
    wrapper = case.paged()
    wrapper.plan(case.qo_indptr, *case.pages, 4, 2, case.D, case.page_size, causal=True, **case.dtypes)
    assert wrapper.gathers_pages
    case.compare(wrapper.run(case.q, case.cache, return_lse=True), causal=True)
    none = shuffled([], [])
    none.plan_paged(wrapper)
    assert not wrapper.gathers_pages
    assert wrapper.run(none.q, none.cache).shape == (0, 4, none.D)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("layout", "made", "planned"),
    [
        ("NHD", {}, {}),
        ("HND", {}, {}),
        ("SHUFFLED", {"backend": "reference"}, {}),
        ("SHUFFLED", {}, {"fixed_split_size": 2}),
        ("SHUFFLED", {}, {"disable_split_kv": True}),
    ],
)
def test_what_is_read_where_it_is(layout: str, made: dict[str, Any], planned: dict[str, Any]) -> None:
    case = Case(Q_LENS, KV_LENS, kv_layout=layout)
    wrapper = case.paged(**made)
    case.plan_paged(wrapper, causal=True, **planned)
    assert not wrapper.gathers_pages
    case.compare(wrapper.run(case.q, case.cache, return_lse=True), causal=True)


@pytest.mark.usefixtures("eager")
def test_a_workspace_without_room_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    case = shuffled()
    wrapper = case.paged()
    with caplog.at_level(logging.DEBUG, "flashinfer"):
        case.plan_paged(wrapper, causal=True)
    assert "shuffled pages are gathered into the workspace, up to 36 tokens" in caplog.text
    need, row = wrapper.workspace_size(), 2 * 2 * case.D * 4
    expected = wrapper.run(case.q, case.cache)
    wrapper.reset_workspace_buffer(torch.empty(need // 4, dtype=torch.int32))
    assert_equal_bits(wrapper.run(case.q, case.cache), expected)
    wrapper.reset_workspace_buffer(torch.empty(need - row, dtype=torch.uint8))
    with pytest.raises(
        flashinfer.InvalidArgumentError, match=f"float_workspace_buffer must be of at least {need} bytes"
    ):
        wrapper.run(case.q, case.cache)
    with caplog.at_level(logging.DEBUG, "flashinfer"):
        case.plan_paged(wrapper, causal=True)
    assert f"to gather them takes a workspace of {need} bytes, got {need - row}" in caplog.text
    assert not wrapper.gathers_pages
    assert need - 36 * row - dense_kv.ALIGNMENT < wrapper.workspace_size() <= need - 36 * row
    case.compare(wrapper.run(case.q, case.cache, return_lse=True), causal=True)


@pytest.mark.usefixtures("eager")
def test_a_graphs_later_plans() -> None:
    """Room is for all pages that the buffer can name; lengths decide nothing."""
    first = shuffled([4, 4, 4], [4, 4, 4])
    wrapper = first.paged(graph_pages=40)
    first.plan_paged(wrapper, causal=True)
    size = wrapper.workspace_size()
    for q_lens, kv_lens in (([4, 4, 4], [4, 4, 4]), ([1, 9, 2], [90, 9, 2]), ([12, 0, 0], [12, 0, 0])):
        case = shuffled(q_lens, kv_lens)
        case.plan_paged(wrapper, causal=True)
        assert wrapper.gathers_pages
        assert wrapper.workspace_size() == size
        case.compare(wrapper.run(case.q, case.cache, return_lse=True), causal=True)


@pytest.mark.usefixtures("eager")
def test_a_plan_past_the_wrapper_reads_pages_where_they_are() -> None:
    """Engines call the cached module's planner, which is not told of last pages."""
    case = shuffled()
    wrapper = case.paged()
    case.plan_paged(wrapper, causal=True)
    assert wrapper.gathers_pages
    shape = len(Q_LENS), *case.heads, case.page_size, False, case.D, case.D, True, -1, -1, False, 0
    wrapper._cached_module.plan(
        *(None, None, None, case.qo_indptr, case.table.indptr, case.table.seq_lens, sum(Q_LENS), *shape)
    )
    assert not wrapper.gathers_pages
    case.compare(wrapper.run(case.q, case.cache, return_lse=True), causal=True)


def test_when_it_is_worth_it() -> None:
    def worth(q_lens: list[int], pages: list[int], group: int = 4, causal: bool = False, window_left: int = -1) -> bool:
        qo, kv = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, pages))
        batch = measure("test", qo, kv, torch.full((len(pages),), 16).int(), 16, "kv_indptr")
        return dense_kv.worth_gathering(batch, group, causal, window_left)

    assert worth([128], [100])
    assert not worth([127], [100])
    assert worth([127], [100], group=5)
    # Of 256 keys each is seen by 128.5 of 256 causal queries on average, and by 96.25 of the last 128.
    assert worth([256], [16], causal=True)
    assert not worth([128], [16], causal=True)
    # Queries before the first key see nothing.
    assert not worth([4096], [1], causal=True, group=32)
    # Decodes over long contexts outweigh a prefill.
    assert not worth([512, *[1] * 8], [32, *[256] * 8], causal=True)
    # A window leaves 128 keys to each of 2048 queries, or 127.
    assert worth([2048], [128], causal=True, window_left=127)
    assert not worth([2048], [128], causal=True, window_left=126)
    assert not worth([], [])
    assert not worth([512], [0])
    assert dense_kv.worth_in_a_graph(4, 512, 4)
    assert not dense_kv.worth_in_a_graph(4, 511, 4)
    assert not dense_kv.worth_in_a_graph(0, 512, 4)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_table(index_dtype: torch.dtype) -> None:
    indptr = torch.tensor([0, 3, 3, 4, 9, 10], dtype=index_dtype)
    last = torch.tensor([5, 0, 16, 1, 0], dtype=index_dtype)
    table = dense_kv.dense_table(indptr, last, 16)
    assert table.starts.tolist() == [0] * 5
    assert table.kv_indptr.tolist() == [0, 37, 37, 53, 118, 118]
    assert table.starts.dtype == table.kv_indptr.dtype == torch.int32
