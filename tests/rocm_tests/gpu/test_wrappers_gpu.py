# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The attention wrappers on a GPU: plans wait at most once, runs for nothing, and graphs follow the plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.attention.wrapper_case import LSE, Case
from rocm_tests.gpu.test_mla_gpu import Transfers

pytestmark = pytest.mark.gpu

KINDS = ("decode", "paged", "ragged")
on_gpu = functools.partial(Case, device="cuda:0", dtype=torch.bfloat16, page_size=16, D=64)


@pytest.fixture(autouse=True)
def workspaces_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_tests.attention.wrapper_case.WORKSPACE", 64 << 20)


def inputs(kind: str, case: Case) -> tuple[Any, ...]:
    return (case.q, case.k, case.v) if kind == "ragged" else (case.q, case.cache)


def make(kind: str, case: Case, graph: bool, **options: Any) -> Any:
    if not graph:
        return getattr(case, kind)(**options)
    return case.ragged(graph=True, **options) if kind == "ragged" else getattr(case, kind)(graph_pages=600, **options)


def plan(kind: str, case: Case, wrapper: Any, **options: Any) -> None:
    getattr(case, f"plan_{kind}")(wrapper, **options)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED"])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, kv_layout: str) -> None:
    q_lens = [1] * 5 if kind == "decode" else [1, 5, 17, 2, 0]
    case = on_gpu(q_lens, [4097, 21, 17, 0, 9], kv_layout=kv_layout, heads=(6, 3))
    causal = {} if kind == "decode" else {"causal": True}
    wrapper = make(kind, case, False)
    plan(kind, case, wrapper, window_left=300, logits_soft_cap=5.0, **causal)
    wrapper.run(*inputs(kind, case))
    with no_waiting():
        got = wrapper.run(*inputs(kind, case), return_lse=True, k_scale=0.5, v_scale=2.0)
    case.compare(got, window_left=300, logits_soft_cap=5.0, k_scale=0.5, v_scale=2.0, causal=kind != "decode")


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_gathered_pages(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.dense_kv.ROWS_WORTH", 1)
    case = on_gpu([40, 5, 0, 17], [400, 5, 9, 0], kv_layout="SHUFFLED", kv_dtype=kv_dtype)
    wrapper = make("paged", case, False)
    plan("paged", case, wrapper, causal=True, window_left=300)
    assert wrapper.gathers_pages
    wrapper.run(*inputs("paged", case))
    with no_waiting():
        got = wrapper.run(*inputs("paged", case), return_lse=True)
    case.compare(got, causal=True, window_left=300)


def test_a_graph_gathers_what_its_plans_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.dense_kv.ROWS_WORTH", 1)
    first = on_gpu([8] * 3, [8] * 3, kv_layout="SHUFFLED")
    wrapper = make("paged", first, True)
    plan("paged", first, wrapper, causal=True)
    assert wrapper.gathers_pages
    store = torch.zeros(600, 2, 8, 16, 8), torch.zeros(600, 2, 2, 64, 8)
    static = (torch.empty_like(first.q), tuple(t.bfloat16().cuda() for t in store))
    follow(first, static, "paged")
    graph, results = capture(lambda: wrapper.run(*static, return_lse=True))
    for q_lens, lens in (([8] * 3, [900, 64, 8]), ([1, 20, 3], [0, 20, 70]), ([0, 0, 24], [3, 0, 400])):
        case = on_gpu(q_lens, lens, kv_layout="SHUFFLED", seed=sum(lens))
        plan("paged", case, wrapper, causal=True)
        follow(case, static, "paged")
        graph.replay()
        case.compare(results, causal=True)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_masks_and_layouts_of_the_lse(kind: str) -> None:
    case = on_gpu([3, 40, 1], [70, 40, 9])
    masks = case.masks()
    wrapper = make(kind, case, False)
    plan(kind, case, wrapper, custom_mask=torch.cat([m.flatten() for m in masks]).cuda())
    case.compare(wrapper.run(*inputs(kind, case), return_lse=True), masks=masks)
    out, lse = wrapper.run(*inputs(kind, case), return_lse=True, lse_layout="HN")
    case.compare((out, lse.t()), masks=masks)


def test_sinks() -> None:
    case = on_gpu([1, 1], [300, 0])
    sinks = torch.tensor([1.0, -torch.inf, 0.0, 3.0], device="cuda:0")
    for kind in KINDS[:2]:
        wrapper = make(kind, case, False)
        plan(kind, case, wrapper, window_left=16)
        case.compare(wrapper.run(*inputs(kind, case), return_lse=True, sinks=sinks), sinks=sinks.cpu(), window_left=16)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("where", "trips"), [("cuda:0", 1), ("cpu", 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_waits_at_most_once(kind: str, where: str, trips: int, graph: bool) -> None:
    case = on_gpu([1, 1, 1], [70, 0, 9])
    wrapper = make(kind, case, graph)
    indptr, indices, last = case.pages
    metadata = {
        "decode": (indptr.to(where), indices, last.to(where), *case.shape),
        "paged": (case.qo_indptr.to(where), indptr.to(where), indices, last.to(where), *case.shape),
        "ragged": (case.qo_indptr.to(where), case.kv_indptr.to(where), *case.heads, case.D),
    }[kind]
    with Transfers() as seen:
        wrapper.plan(*metadata, **case.dtypes)
    # What is on the host goes to the device at once, or part by part to the buffers of a graph.
    sent = (3 if kind == "paged" else 2) if graph else 1
    assert (seen.to_host, seen.to_device, seen.blocking) == (trips, 0 if trips else sent, 0)
    case.compare(wrapper.run(*inputs(kind, case), return_lse=True))


def test_a_fast_plan_waits_for_nothing() -> None:
    case = on_gpu([1, 1, 1], [70, 0, 9])
    wrapper = make("decode", case, True)
    plan("decode", case, wrapper)
    on_host = {"global_override_indptr_cpu": case.table.indptr.cpu()}
    with no_waiting(), Transfers() as seen:
        flashinfer.fast_decode_plan(wrapper, *case.pages, *case.shape, **case.dtypes, **on_host)
    assert (seen.to_host, seen.to_device) == (0, 0)


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def follow(case: Case, static: tuple[Any, ...], kind: str) -> None:
    """Put a case's tokens where the captured kernels read them."""
    for into, t in zip(static, inputs(kind, case), strict=True):
        for a, b in zip(into, t, strict=True) if isinstance(into, tuple) else ((into, t),):
            a.view(-1)[: b.numel()].copy_(b.reshape(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_follows_the_plans(kind: str) -> None:
    """Captured with short requests, replayed with long ones, padded ones, and shorter ones again."""
    first = on_gpu([1] * 4, [1, 1, 1, 1])
    wrapper = make(kind, first, True)
    plan(kind, first, wrapper)
    room = (8192, 2, 64) if kind == "ragged" else (600, 16, 2, 64)
    store = tuple(torch.zeros(room, dtype=torch.bfloat16, device="cuda:0") for _ in "kv")
    static = (torch.empty_like(first.q), *(store if kind == "ragged" else (store,)))
    follow(first, static, kind)
    graph, results = capture(lambda: wrapper.run(*static, return_lse=True))
    for lens in ([4097, 3, 0, 64], [900, 800, 0, 0], [0, 0, 0, 0], [2, 1, 5, 40]):
        case = on_gpu([1] * 4, lens, seed=sum(lens))
        plan(kind, case, wrapper)
        follow(case, static, kind)
        for t in (case.qo_indptr, case.kv_indptr, case.table.indptr, case.table.indices, case.table.last_page_len):
            t.fill_(2**30)
        graph.replay()
        case.compare(results)
        for t in results:
            t.fill_(torch.nan)


def test_a_graph_of_prefill_with_masks_and_padding() -> None:
    first = on_gpu([8, 8], [40, 40])
    buffers = {
        "custom_mask_buf": torch.zeros(4096, dtype=torch.uint8, device="cuda:0"),
        "mask_indptr_buf": first.buffer(3),
    }
    wrapper = first.paged(graph_pages=600, **buffers)
    first.plan_paged(wrapper, custom_mask=torch.cat([m.flatten() for m in first.masks()]).cuda())
    store = tuple(torch.zeros((600, 16, 2, 64), dtype=torch.bfloat16, device="cuda:0") for _ in "kv")
    static = (torch.zeros_like(first.q), store)
    follow(first, static, "paged")
    graph, results = capture(lambda: wrapper.forward_return_lse(*static))
    for q_lens, kv_lens in (([8, 8], [300, 9]), ([3, 4], [70, 4]), ([0, 16], [0, 100])):
        case = on_gpu(q_lens, kv_lens, seed=sum(kv_lens))
        masks = case.masks()
        case.plan_paged(wrapper, custom_mask=torch.cat([m.flatten() for m in masks]).cuda())
        follow(case, static, "paged")
        graph.replay()
        rows = sum(q_lens)
        case.compare(tuple(t[:rows] for t in results), masks=masks)
    flashinfer.check_device_errors()


def test_plans_that_overtake_runs() -> None:
    """sgl-project/mini-sglang#103: plans from pinned memory that the caller overwrites at once, with no waiting."""
    cases = [on_gpu([1] * 4, lens, seed=s) for s, lens in enumerate(([900, 3, 0, 64], [1, 700, 33, 2]))]
    wrappers = [make(kind, cases[0], False) for kind in ("decode", "decode")]
    wrappers[1].reset_workspace_buffer(wrappers[0]._float_workspace_buffer)
    pinned = [[t.cpu().pin_memory() for t in (c.table.indptr, c.table.last_page_len)] for c in cases]
    callers = [t.clone().pin_memory() for t in pinned[0]]
    results: list[list[torch.Tensor]] = [[], []]
    busy = torch.randn(4096, 4096, device="cuda:0")
    for step in range(40):
        busy = busy @ busy
        which = step % 2
        case, wrapper = cases[which], wrappers[step % 3 == 0]
        for t, source in zip(callers, pinned[which], strict=True):
            t.copy_(source)
        wrapper.plan(callers[0], case.table.indices, callers[1], *case.shape, **case.dtypes)
        for t in callers:
            t.fill_(2**30)
        results[which].append(wrapper.run(*inputs("decode", case)))
    for case, outs in zip(cases, results, strict=True):
        expected = case.answer()[0]
        assert_close(outs[0], expected)
        for out in outs[1:]:
            assert_equal_bits(out, outs[0])


def test_single_calls_may_be_captured() -> None:
    case = on_gpu([1], [300])
    graph, found = capture(lambda: flashinfer.single_decode_with_kv_cache(case.q[0], case.k, case.v, return_lse=True))
    case.q.mul_(0.5)
    graph.replay()
    case.compare(tuple(t.unsqueeze(0) for t in found))
    many = on_gpu([7], [50])
    graph, found = capture(
        lambda: flashinfer.single_prefill_with_kv_cache(many.q, many.k, many.v, causal=True, return_lse=True)
    )
    many.q.mul_(0.5)
    graph.replay()
    many.compare(found, causal=True)


def test_decode_equals_prefill() -> None:
    case = on_gpu([1, 1], [0, 34])
    results = []
    for kind in KINDS[:2]:
        wrapper = make(kind, case, False)
        plan(kind, case, wrapper)
        results.append(wrapper.run(*inputs(kind, case), return_lse=True))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, tolerance=LSE)
