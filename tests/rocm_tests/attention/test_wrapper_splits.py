# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Fixed split sizes of plans: what reaches the op, memory for the pieces, and graphs that are compiled for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.attention_work import NO_SPLIT, PIECE_STEP, FixedPieces, scratch_elements
from flashinfer.ops import attention as ops
from rocm_tests.attention.wrapper_case import WORKSPACE, Case

KINDS = ("decode", "paged", "ragged")


def inputs(kind: str, case: Case) -> tuple[Any, ...]:
    return (case.q, case.k, case.v) if kind == "ragged" else (case.q, case.cache)


def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """max_q_len, split_size and elements of scratch of the calls to come."""
    calls = []

    def keep(op: Any) -> Any:
        names = [name for name, _ in op.parameters]
        at = [names.index(n) for n in ("max_q_len", "split_size", "scratch")]

        def call(*args: Any, backend: str) -> None:
            longest, split, scratch = (args[i] for i in at)
            calls.append((longest, split, scratch.numel()))
            op(*args, backend=backend)

        return call

    for name in ("paged_attention", "ragged_attention"):
        monkeypatch.setattr(ops, name, keep(getattr(ops, name)))
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"fixed_split_size": 3}, 3),
        ({"disable_split_kv": True}, NO_SPLIT),
        ({"fixed_split_size": 3, "disable_split_kv": True}, NO_SPLIT),
        ({"fixed_split_size": 2**31 - 1}, NO_SPLIT),
        ({"fixed_split_size": -1}, 0),
        ({"fixed_split_size": 0}, 0),
        ({"fixed_split_size": None}, 0),
    ],
)
def test_sizes_in_pages_become_keys(
    options: dict[str, Any], tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them nothing that a kernel is chosen by depends on the batch: of prefill not the longest query."""
    calls, case = passed_on(monkeypatch), Case([2, 2], [9, 20])
    wrapper = getattr(case, kind)()
    more = {"q_len_per_req": 2} if kind == "decode" else {"causal": True}
    getattr(case, f"plan_{kind}")(wrapper, **options, **more)
    case.compare(wrapper.run(*inputs(kind, case), return_lse=True), causal=True)
    ((longest, split, elements),) = calls
    page = 1 if kind == "ragged" else case.page_size
    assert split == (tokens * page if tokens < NO_SPLIT else tokens)
    assert longest == (2 if kind == "decode" or not tokens else 0)
    assert elements == (WORKSPACE // 4 if tokens else scratch_elements(case.D, case.q.device))


def test_pieces_must_fit_the_workspace() -> None:
    """1000 keys in tiles of 128 are 8 pieces, of 16 rows, for each KV head."""
    case = Case([1, 1], [1000, 5])
    wrapper = case.decode()
    case.plan_decode(wrapper, fixed_split_size=1)
    need = wrapper.workspace_size()
    assert need == 4 * (2 * (8 + 1) * (16 * (case.D + 1) + 8) + 8)
    case.compare(wrapper.run(case.q, case.cache, return_lse=True))
    for size, enough in ((need, True), (need - 1, False)):
        other = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(size, dtype=torch.uint8))
        if enough:
            case.plan_decode(other, fixed_split_size=1)
            continue
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"of at least {need} bytes for this plan, got"):
            case.plan_decode(other, fixed_split_size=1)


def test_a_plan_without_splits_needs_no_more_than_before() -> None:
    case = Case([1, 1], [1000, 5])
    wrapper = case.decode()
    for options in ({"fixed_split_size": 1}, {}, {"disable_split_kv": True}):
        case.plan_decode(wrapper, **options)
        if "fixed_split_size" not in options:
            assert wrapper.workspace_size() == 4 * scratch_elements(case.D, case.q.device)
        case.compare(wrapper.run(case.q, case.cache, return_lse=True))


@pytest.mark.parametrize("fast", [False, True])
def test_a_graph_keeps_its_splits(fast: bool) -> None:
    case = Case([1, 1], [9, 5])
    wrapper = case.decode(graph_pages=40)
    case.plan_decode(wrapper, fixed_split_size=2)
    plan = (lambda **o: flashinfer.fast_decode_plan(wrapper, *case.pages, *case.shape, data_type="float32", **o)) if (
        fast
    ) else (lambda **o: case.plan_decode(wrapper, **o))  # fmt: skip
    plan(fixed_split_size=2)
    for other in ({}, {"fixed_split_size": 3}, {"fixed_split_size": 2, "disable_split_kv": True}):
        with pytest.raises(flashinfer.InvalidArgumentError, match="must be those of the graph's first plan, got"):
            plan(**other)
    spaces = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
    indptr = case.table.indptr
    args = (*spaces, case.qo_indptr, indptr, case.table.seq_lens, 2, 2, 4, 2, case.page_size, True, 32, 32, False, -1)
    wrapper._cached_module.plan(*args, 2, False, 0, 1)
    case.compare(wrapper.run(case.q, case.cache, return_lse=True))
    with pytest.raises(flashinfer.InvalidArgumentError, match="must be those of the graph's first plan, got -1 and"):
        wrapper._cached_module.plan(*args, -1, False, 0, 1)


def test_how_many_pieces_there_are() -> None:
    """Against counting; a bound that knows sums only is never below it."""
    for group, longest, split, rows in ((8, 1, 1, 16), (8, 3, 300, 32), (1, 0, 128, 128), (5, 200, 129, 128)):
        fixed = FixedPieces.of(group, longest, split)
        assert fixed == FixedPieces(rows, -(-split // PIECE_STEP) * PIECE_STEP)
        q_lens, kv_lens = [1, 0, 70, 3], [0, 500, 129, 384]
        counted = sum(
            1
            for q, kv in zip(q_lens, kv_lens, strict=True)
            for _ in range(0, q * group, rows)
            for _ in range(0, max(kv, 1), fixed.keys)
        )
        assert fixed.count(group, 2, q_lens, kv_lens) == 2 * counted
        assert fixed.bound(group, 2, 4, sum(q_lens), sum(kv_lens)) >= 2 * counted
        elements = fixed.scratch_elements(72, 2 * counted)
        assert fixed.pieces_in(72, elements) == 2 * counted
        assert fixed.pieces_in(72, elements - 1) == 2 * counted - 1
