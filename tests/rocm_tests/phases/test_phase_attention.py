# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`BatchPhaseAttentionWrapper` against dense attention, over pools that are NaN wherever a phase must not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.ops import attention as attention_ops
from flashinfer.ops import gather as gather_ops
from rocm_tests.phases.case import Case, Geometry

WRAPPER = flashinfer.BatchPhaseAttentionWrapper
MIXED = ((1, 33), (1, 1), (7, 40), (20, 16), (5, 0), (1, 0))


def workspace(geometry: Geometry, pages: int) -> torch.Tensor:
    """Room for so many pages of context, poisoned: what a chunk did not fetch must not be seen."""
    tokens = pages * geometry.page_size
    poison = torch.full((2 * tokens * geometry.kv_heads * geometry.dim,), float("nan"), dtype=geometry.dtype)
    return poison.view(torch.uint8)


def run(case: Case, pages: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wrapper = WRAPPER(workspace(case.g, pages), case.g.layout)
    wrapper.plan(*case.plan_arguments(), **case.plan_options())
    arguments, more = case.run_arguments()
    return wrapper.run(*arguments, **more, return_lse=True, **options)


def check(requests: Sequence[tuple[int, int]], geometry: Geometry, pages: int = 2, seed: int = 0) -> None:
    case = Case(requests, geometry, seed)
    out, lse = run(case, pages)
    want, want_lse = case.expected()
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-5)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kv_dtype = draw(st.sampled_from([torch.float32, OCP, FNUZ]))
    layout = draw(st.sampled_from(["NHD", "HND", "SHUFFLED"]))
    least = 16 // kv_dtype.itemsize if layout == "SHUFFLED" else 1
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Geometry(
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        dim=16,
        page_size=least * draw(st.sampled_from([1, 2])),
        layout=layout,
        kv_dtype=kv_dtype,
        window_left=draw(st.sampled_from([-1, -1, 0, 5, 16])),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        shares_kv=draw(st.booleans()),
        sinks=draw(st.booleans()),
        threshold=draw(st.sampled_from([1, 2, 4])),
    )


REQUEST = st.one_of(
    st.tuples(st.integers(0, 4), st.integers(0, 40)),
    st.tuples(st.integers(1, 24), st.integers(0, 70)),
    st.tuples(st.integers(1, 24), st.just(0)),
)


@given(st.lists(REQUEST, max_size=7), geometries(), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=120, deadline=None)
def test_any_batch(requests: list[tuple[int, int]], geometry: Geometry, pages: int, seed: int) -> None:
    """All phases in any order, layouts, flavours, windows, sinks, shared keys, and workspaces of a few pages."""
    check(requests, geometry, pages, seed)


@pytest.mark.parametrize("layout", ["NHD", "HND", "SHUFFLED"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, OCP, FNUZ], ids=str)
@pytest.mark.parametrize("window_left", [-1, 16])
@pytest.mark.parametrize("shares_kv", [False, True])
def test_every_phase_on_every_pool(layout: str, kv_dtype: torch.dtype, window_left: int, shares_kv: bool) -> None:
    """Queries longer than the window, K and V scales that differ, sinks with several chunks."""
    geometry = Geometry(layout=layout, kv_dtype=kv_dtype, window_left=window_left, shares_kv=shares_kv, sinks=True)
    check(MIXED, geometry)


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [(1, 0)],
        [(1, 5)],
        [(9, 5)],
        [(9, 0)],
        # Extends without context: alone, and among others.
        [(3, 0), (1, 9)],
        [(5, 32), (4, 0), (6, 7), (4, 0)],
        # Context at the edge of a page, of the workspace, and beside them.
        *([(5, context)] for context in (15, 16, 17, 31, 32, 33, 64, 65)),
        [(5, 32), (5, 32)],
        [(5, 31), (5, 33), (5, 1)],
        # More extends than the workspace has rows.
        [(2, 1)] * 40,
        # Padded rows.
        [(1, 5), (0, 0), (0, 0)],
        [(1, 5), (0, 0), (4, 9), (0, 0), (4, 0), (0, 0)],
    ],
    ids=str,
)
def test_edges(requests: list[tuple[int, int]]) -> None:
    check(requests, Geometry())
    check(requests, Geometry(layout="SHUFFLED", window_left=3))


def test_speculative_tokens_and_a_short_prompt_chunk() -> None:
    check([(4, 100), (1, 16), (4, 80), (9, 32), (1, 0)], Geometry(threshold=4))


@pytest.mark.parametrize("context", [0, 1, 33, 100])
def test_the_number_of_chunks_does_not_matter(context: int) -> None:
    """A sink counts once in one chunk and in seven."""
    case = Case([(6, context), (3, 20)], Geometry(sinks=True))
    whole = run(case, 20)
    for pages in (1, 2, 3):
        for got, want in zip(run(case, pages), whole, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_lse_of_equal_scores_is_the_number_of_keys() -> None:
    """Base 2 across phases and merges: q = 0 makes lse log2(keys), and the result their mean."""
    case = Case([(1, 7), (2, 62), (1, 0), (4, 0)], Geometry())
    case.q.zero_()
    _, lse = run(case, 1)
    want = torch.tensor([8.0, 63.0, 64.0, 1.0, 1.0, 2.0, 3.0, 4.0]).log2()
    torch.testing.assert_close(lse[:, 0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 17])
def test_a_window_holds_one_key_more_than_it_says(window_left: int) -> None:
    """Equal scores: lse counts the keys, in each phase."""
    for context in (0, 1, 16, 17, 33):
        case = Case([(1, context + 1), (5, context), (20, 0)], Geometry(window_left=window_left))
        case.q.zero_()
        _, lse = run(case, 1)
        places = [context + 1, *range(context, context + 5), *range(20)]
        want = torch.tensor([float(min(place + 1, window_left + 1)) for place in places])
        torch.testing.assert_close(lse[:, 0].exp2(), want, rtol=1e-5, atol=1e-5)


class Counter:
    """Calls of an op, passed on."""

    def __init__(self, op: Any) -> None:
        self.op, self.backends, self.calls = op, op.backends, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(args)
        return self.op(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "launches"),
    [
        # Paged, ragged, fetches: one paged call for decodes; extends and prefills on their own keys; 2 + 1 pages of
        # 48 and 16 tokens in chunks of two pages.
        ({}, (1, 4, 2)),
        ({"window_left": 8}, (2, 1, 0)),
        ({"shares_kv": True}, (3, 0, 0)),
    ],
)
def test_each_phase_takes_its_path(
    change: dict[str, Any], launches: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ((attention_ops, "paged_attention"), (attention_ops, "ragged_attention"), (gather_ops, "gather_paged_kv"))
    counters = [Counter(getattr(module, name)) for module, name in names]
    for (module, name), counter in zip(names, counters, strict=True):
        monkeypatch.setattr(module, name, counter)
    case = Case([(1, 9), (4, 48), (6, 16), (5, 0)], dataclasses.replace(Geometry(), **change))
    run(case, 2)
    assert tuple(len(counter.calls) for counter in counters) == launches
    run(Case([(1, 9), (1, 70)], Geometry()), 1)
    assert len(counters[2].calls) == launches[2], "decodes fetch nothing"


def test_results_go_into_given_tensors() -> None:
    case = Case(MIXED, Geometry())
    whole = torch.full((case.q.size(0), 9, 16), 7.0)
    out, lse = whole[:, 3:7], torch.full((case.q.size(0), 4), 7.0)
    assert run(case, 2, out=out, lse=lse)[0] is out
    want, want_lse = case.expected()
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-5)
    assert (whole[:, :3] == 7).all()
    assert (whole[:, 7:] == 7).all()


def test_strided_inputs_and_wide_metadata() -> None:
    case = Case(MIXED, Geometry())
    qkv = torch.cat([case.q, case.k, case.v], dim=1)
    wrapper = WRAPPER(workspace(case.g, 2))
    table = [torch.stack([t.long(), t.new_full(t.shape, -1).long()], 1)[:, 0] for t in case.plan_arguments()[:4]]
    wrapper.plan(*table, *case.plan_arguments()[4:], **case.plan_options())
    out = wrapper.run(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], case.cache)
    torch.testing.assert_close(out.double(), case.expected()[0], rtol=2e-5, atol=2e-5)


def test_a_plan_leaves_nothing_behind() -> None:
    """One wrapper for batch after batch gives what a new one gives."""
    wrapper = WRAPPER(workspace(Geometry(), 2))
    for seed, requests in enumerate((MIXED, [(1, 5)], [(30, 0)], [(9, 70), (2, 0)], [], MIXED[::-1])):
        case = Case(requests, Geometry(), seed)
        wrapper.plan(*case.plan_arguments(), **case.plan_options())
        arguments, more = case.run_arguments()
        torch.testing.assert_close(wrapper.run(*arguments, **more).double(), case.expected()[0], rtol=2e-5, atol=2e-5)
        assert wrapper.phases == case.split


def test_what_is_appended_between_runs_is_seen() -> None:
    """Nothing of the pool is kept from one run to the next."""
    case = Case([(1, 20), (4, 20)], Geometry())
    wrapper = WRAPPER(workspace(case.g, 1))
    wrapper.plan(*case.plan_arguments(), **case.plan_options())
    arguments, more = case.run_arguments()
    first = wrapper.run(*arguments, **more)
    for plane in case.cache:
        plane.mul_(-1)
    assert not torch.allclose(first, wrapper.run(*arguments, **more))
