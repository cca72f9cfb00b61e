# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA on a GPU: the Triton kernels, plans that wait at most once, and graphs that follow their plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.mla.case import NAN, SCALE, Case
from rocm_tests.mla.triton_cases import CASES

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
Wrapper = flashinfer.BatchMLAPagedAttentionWrapper


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, dtype: torch.dtype) -> None:
    check, arguments = CASES[name]
    check(DEVICE, dtype, arguments)


@pytest.mark.parametrize("heads", [16, 128])
def test_long_requests(heads: int) -> None:
    case = Case(
        [1] * 5, [4097, 3, 0, 64, 2000], heads=heads, dims=(512, 64), page_size=1, dtype=torch.bfloat16, device=DEVICE
    )
    case.compare(case.call("triton"))


def test_the_reference_runs_there_too() -> None:
    case = Case([1, 2], [70, 9], heads=3, dtype=torch.bfloat16, device=DEVICE)
    case.compare(case.call("reference"))
    reasons = flashinfer.explain(
        flashinfer.mla_paged_attention, *case.queries, *case.caches, *case.metadata, causal=False, sm_scale=1.0
    )
    assert reasons["triton"] is None
    assert reasons["reference"] is None


class Transfers(TorchDispatchMode):
    """Counts copies between the host and the device, and what waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host = self.to_device = self.blocking = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name.startswith(("_to_copy", "copy_")):
            source, target = (args[1], args[0]) if name.startswith("copy_") else (args[0], result)
            there, here = source.device.type, target.device.type
            self.to_host += (there, here) == ("cuda", "cpu")
            down = (there, here) == ("cpu", "cuda")
            self.to_device += down
            waits = not (kwargs or {}).get("non_blocking", args[2] if len(args) > 2 else False)
            self.blocking += down and (waits or not source.is_pinned())
        self.to_host += name.startswith("_local_scalar_dense") and args[0].is_cuda
        # Of what our own ops do inside no copy is seen: one waits for what a launch has brought, one may send metadata.
        self.to_host += name.startswith("to_host_wait") and args[0].type == "cuda"
        if name.startswith("attention_batch") and args[-1] is not None and args[-1].type == "cuda":
            self.to_device += 1
            self.blocking += not all(part.is_pinned() for part in result[1])
        return result


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("where", "trips"), [(DEVICE, 1), ("cpu", 0)])
def test_plan_waits_at_most_once(where: str, trips: int, graph: bool) -> None:
    case = Case([1, 1, 1], [70, 0, 9], device=DEVICE, dtype=torch.bfloat16)
    qo, kv, indices, lens = case.metadata
    metadata = qo.to(where), kv.to(where), indices, lens.to(where)
    wrapper = graph_wrapper(3, 99) if graph else case.wrapper()
    with Transfers() as seen:
        wrapper.plan(*metadata, 4, *case.dims, 4, False, SCALE, case.dtype, case.dtype)
    assert (seen.to_host, seen.to_device, seen.blocking) == (trips, 1, 0)
    case.compare(case.run(wrapper))


def test_run_waits_for_nothing() -> None:
    case = Case([1, 1], [70, 9], device=DEVICE, dtype=torch.bfloat16)
    wrapper = case.wrapper()
    case.plan(wrapper)
    case.run(wrapper)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = case.run(wrapper)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    case.compare(results)


def graph_wrapper(batch: int, pages: int) -> Wrapper:
    sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_indices": pages, "kv_len_arr": batch}
    buffers = {name: torch.zeros(size, dtype=torch.int32, device=DEVICE) for name, size in sizes.items()}
    return Wrapper(torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE), use_cuda_graph=True, **buffers)


def graph_case(lens: list[int], seed: int, pool: torch.Tensor | None = None) -> Case:
    return Case(
        [1] * len(lens), lens, heads=16, page_size=16, dims=(512, 64), dtype=torch.bfloat16, device=DEVICE, seed=seed
    )


@pytest.mark.parametrize("fast", [False, True], ids=["plan", "module's planner"])
def test_a_graph_follows_its_plan(fast: bool) -> None:
    """alibaba/rtp-llm#1084: captured with short requests, replayed with long ones, empty ones and short ones again."""
    wrapper = graph_wrapper(4, 400)
    first = graph_case([1, 1, 1, 1], 0)
    pool = torch.zeros(400, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    q = torch.zeros(4, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full((4, 16, 512), NAN, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((4, 16), NAN, device=DEVICE)

    def run() -> None:
        wrapper.run(q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:], out=out, lse=lse)

    first.plan(wrapper)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed, lens in enumerate(([4097, 3, 0, 64], [5, 0, 0, 0], [1, 1, 1, 1], [700, 800, 900, 1000]), 1):
        case = graph_case(list(lens), seed)
        pool[: case.pool.size(0)].copy_(case.pool)
        q.copy_(case.q)
        if fast:
            used = int(case.table.indptr[-1])
            wrapper._kv_indices_buf[:used] = case.table.indices[:used]
            host = (t.cpu() for t in (case.qo_indptr, case.table.indptr, case.table.seq_lens))
            workspaces = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer
            wrapper._cached_module.plan(*workspaces, wrapper._pin_memory_int_workspace_buffer, *host, 16, 512, False)
        else:
            case.plan(wrapper)
        graph.replay()
        case.compare((out, lse))


def test_plans_in_quick_succession() -> None:
    """flashinfer-ai/flashinfer#564: a plan does not change memory that an earlier one is still being copied from."""
    cases = [Case([1, 1], [70 * i + 1, 9], dtype=torch.bfloat16, device=DEVICE, seed=i) for i in range(8)]
    wrappers = [cases[0].wrapper(), cases[0].wrapper()]
    host = [[t.cpu().pin_memory() for t in c.metadata] for c in cases]
    expected = [c.call("triton") for c in cases]
    torch.cuda._sleep(100_000_000)
    results = []
    for _ in range(5):
        for i, case in enumerate(cases):
            metadata = [t.clone().pin_memory() for t in host[i]]
            wrapper = wrappers[i % 2]
            wrapper.plan(*metadata, 4, *case.dims, 4, False, SCALE, case.dtype, case.dtype)
            for t in metadata[:2]:
                t.fill_(2**30)
            metadata[3].fill_(2**30)
            results.append((i, case.run(wrapper)))
    for i, result in results:
        for got, want in zip(result, expected[i], strict=True):
            assert_equal_bits(got, want)


def test_on_the_current_stream() -> None:
    case = Case([1, 1], [70, 9], dtype=torch.bfloat16, device=DEVICE)
    expected = case.call("triton")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kept = case.caches[0].clone()
    case.caches[0].zero_()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        case.caches[0].copy_(kept)
        got = case.call("triton")
    side.synchronize()
    for g, want in zip(got, expected, strict=True):
        assert_equal_bits(g, want)


@pytest.mark.slow
def test_offsets_past_32_bits() -> None:
    """ROCm/aiter#2893: page id 4,000,000 of page size 1 is past 2^31 elements and 2^32 bytes."""
    page = 4_000_000
    pool = torch.zeros(page + 4, 1, 576, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.randn(3, 1, 576, device=DEVICE).bfloat16()
    pool[page : page + 3] = rows
    q = torch.randn(1, 16, 576, device=DEVICE).bfloat16()
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([3], dtype=torch.int32, device=DEVICE)

    def attend(cache: torch.Tensor, first: int) -> torch.Tensor:
        pages = torch.arange(first, first + 3, dtype=torch.int32, device=DEVICE)
        halves = cache[..., :512], cache[..., 512:]
        return flashinfer.mla_paged_attention(
            q[..., :512], q[..., 512:], *halves, indptr, indptr * 3, pages, lens, causal=False, sm_scale=SCALE
        )

    assert_equal_bits(attend(pool, page), attend(rows, 0))
