# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA prefill's context on a GPU: the fused kernel, keys put together, plans that wait for nothing, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core import faults
from flashinfer.core.dtypes import OCP
from flashinfer.mla_context import MlaContextPlanner
from flashinfer.testing.compare import assert_close, assert_equal_bits
from flashinfer.testing.generators import ragged_page_table
from rocm_tests.mla_context.case import FULL, NAN, Case
from rocm_tests.mla_context.concat_case import DTYPES, ConcatCase
from rocm_tests.mla_context.prefill import Prefill
from rocm_tests.mla_context.triton_cases import CASES

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, dtype: torch.dtype) -> None:
    check, arguments = CASES[name]
    check(DEVICE, dtype, arguments)


def test_many_tiles() -> None:
    """Groups of tiles, the last of them short: 16 heads and 2,500 tokens."""
    Case([2000, 0, 499, 1], heads=16, page_size=16, dtype=BF16, device=DEVICE, **FULL).check("triton")


def test_the_reference_runs_there_too() -> None:
    case = Case([5, 130], dtype=BF16, device=DEVICE, kv_dtype=OCP)
    fused, unfused = case.check("triton"), case.check("reference")
    for got, want in zip(fused, unfused, strict=True):
        assert_close(got, want)


def test_a_captured_launch_follows_its_metadata() -> None:
    """Captured for 300 rows; replayed with fewer and other tokens of other requests."""
    cases = [Case(lens, page_size=1, dtype=BF16, device=DEVICE, seed=5) for lens in ([300, 0], [7, 100], [0, 0])]
    first = cases[0]
    k, v = (torch.full((300, 3, dim), NAN, dtype=BF16, device=DEVICE) for dim in (48, 32))
    cache = torch.zeros(400, 1, 144, dtype=BF16, device=DEVICE)
    indptr, indices = (
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        torch.zeros(400, dtype=torch.int32, device=DEVICE),
    )

    def run() -> None:
        flashinfer.gather_kv_b_proj(cache, None, indptr, indices, indptr, first.weight, None, k, v, backend="triton")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        cache[: case.cache.size(0)].copy_(case.cache)
        indptr.copy_(case.prefix)
        indices[: case.table.indices.numel()] = case.table.indices
        k.fill_(NAN)
        v.fill_(NAN)
        graph.replay()
        weight = first.exact_weight
        for got, want in zip((k, v), case.expected(weight), strict=True):
            assert_close(got[: case.tokens], want)
            assert bool(got[case.tokens :].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 128, 128, 64), (700, 16, 128, 64), (7, 2, 24, 40), (0, 4, 128, 64)], ids=str)
def test_concat(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    ConcatCase(*shape, dtype, device=DEVICE).check("native")


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_concat_at_addresses_that_allow_no_wide_access(offset: int) -> None:
    ConcatCase(4, 3, 16, 8, BF16, offset=offset, pad=offset + 1, device=DEVICE).check("native")


def test_concat_in_a_graph() -> None:
    case = ConcatCase(33, 16, 128, 64, BF16, device=DEVICE)
    flashinfer.concat_mla_k(case.k, case.nope, case.rope)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.concat_mla_k(case.k, case.nope, case.rope)
    case.nope.view(torch.int16).add_(1)
    graph.replay()
    case.compare()


KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "full": {"heads": 4, **FULL},
    "fp8 cache": {"kv_dtype": OCP},
    "block scales": {"weight_scale": "block"},
}


@pytest.mark.parametrize("way", ["fused", "unfused"])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill(kind: str, way: str) -> None:
    prefill = Prefill([3, 0, 2, 5, 1], [9, 4, 0, 300, 1], dtype=BF16, device=DEVICE, page_size=16, **KINDS[kind])
    attention = prefill.attention(64, way)
    assert len(prefill.plan(attention).chunks) > 3
    prefill.compare(prefill.run(attention))


@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_run_waits_for_nothing(way: str) -> None:
    prefill = Prefill([3, 5], [9, 100], dtype=BF16, device=DEVICE)
    attention = prefill.attention(64, way)
    prefill.plan(attention)
    prefill.run(attention)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = prefill.run(attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    prefill.compare(results)


@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_a_captured_run_follows_its_tensors(way: str) -> None:
    """Other queries, keys and latents of the same step, the chunks included."""
    prefill = Prefill([3, 5], [9, 100], dtype=BF16, device=DEVICE)
    attention = prefill.attention(64, way)
    prefill.plan(attention)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        prefill.run(attention)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = prefill.run(attention)
    for t in (prefill.q, prefill.k, prefill.v, prefill.cache):
        t.mul_(-0.5)
    prefill.case.rows = [rows * -0.5 for rows in prefill.case.rows]
    graph.replay()
    prefill.compare(results)


def test_auto_goes_the_fused_way() -> None:
    prefill = Prefill([3], [9], dtype=BF16, device=DEVICE)
    attention = prefill.attention(64, "auto")
    prefill.plan(attention)
    assert attention.fused
    prefill.plan(attention, torch.float16)
    assert not attention.fused


def test_a_plan_waits_for_nothing() -> None:
    lens = [100, 0, 7]
    table = ragged_page_table(lens, 16, device=DEVICE)
    planner = MlaContextPlanner(64, 16, DEVICE)
    planner.plan([0, 1, 2, 3], lens, table.block_table, table.num_pages)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = planner.plan([0, 1, 2, 3], lens, table.block_table, table.num_pages)
        steps = plan.steps
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = [table.pages_of(b)[t // 16] * 16 + t % 16 for b, n in enumerate(lens) for t in range(n)]
    assert torch.cat([step.kv_indices for step in steps]).tolist() == rows
    assert [step.kv_indptr.tolist() for step in steps] == [[0, 64], [0, 36, 36, 43]]


def test_plans_in_quick_succession() -> None:
    """A plan does not change memory that an earlier one is still being copied from."""
    tables = [ragged_page_table([100 + i, 3], 16, seed=i, device=DEVICE) for i in range(6)]
    planner = MlaContextPlanner(1000, 16, DEVICE)
    torch.cuda._sleep(100_000_000)
    plans = [planner.plan([0, 1, 2], [100 + i, 3], t.block_table, t.num_pages) for i, t in enumerate(tables)]
    for i, plan in enumerate(plans):
        (step,) = plan.steps
        assert step.kv_indptr.tolist() == [0, 100 + i, 103 + i]
        assert step.kv_indices[100 + i].item() == tables[i].pages_of(1)[0] * 16


def test_a_page_that_is_not_there_is_reported() -> None:
    table = ragged_page_table([40], 16, device=DEVICE)
    table.block_table[0, 1] = -5
    fault = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with faults.reported_to(fault):
        plan = MlaContextPlanner(64, 16, DEVICE).plan([0, 1], [40], table.block_table, table.num_pages)
    sentence = (
        f"mla_context_indices: block_tables, entry 1 row by row, must be a page id in [0, {table.num_pages}), got -5"
    )
    assert str(faults.error_in(fault)) == sentence
    assert plan.steps[0].kv_indices[16:32].tolist() == [-1] * 16


def test_on_the_current_stream() -> None:
    case = Case([130], dtype=BF16, device=DEVICE)
    expected = case.check("triton")
    kept = case.cache.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    case.cache.zero_()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        case.cache.copy_(kept)
        got = case.results()
        flashinfer.gather_kv_b_proj(*case.arguments, *got, backend="triton")  # type: ignore[arg-type]
    side.synchronize()
    for g, want in zip(got, expected, strict=True):
        assert_equal_bits(g, want)


@pytest.mark.slow
def test_offsets_past_32_bits() -> None:
    """Rows of the cache, of keys and of values past 2^31 elements."""
    rows, heads, tokens = 4_000_000, 128, 90_000
    cache = torch.zeros(rows, 1, 576, dtype=BF16, device=DEVICE)
    cache[-3:] = torch.randn(3, 1, 576, device=DEVICE).bfloat16()
    weight = torch.randn(heads * 256, 512, device=DEVICE).bfloat16() / 22
    k = torch.empty(tokens, heads, 192, dtype=BF16, device=DEVICE)
    v = torch.empty(tokens, heads, 128, dtype=BF16, device=DEVICE)
    assert k.numel() > 2**31
    assert cache.numel() > 2**31
    indices = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    indices[-3:] = torch.arange(rows - 3, rows, device=DEVICE)
    indptr = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    flashinfer.gather_kv_b_proj(cache, None, indptr, indices, indptr, weight, None, k, v, backend="triton")
    small = torch.empty(3, heads, 192, dtype=BF16, device=DEVICE), torch.empty(3, heads, 128, dtype=BF16, device=DEVICE)
    three = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    last = indices[-3:].clone()
    flashinfer.gather_kv_b_proj(cache, None, three, last, three, weight, None, *small, backend="triton")
    for big, want in zip((k, v), small, strict=True):
        assert_equal_bits(big[-3:], want)
        assert int(big[:-3].count_nonzero()) == 0
    del cache, v
    nope, rope = k[..., :128].clone(), k[:, :1, 128:].clone()
    k.zero_()
    flashinfer.concat_mla_k(k, nope, rope, backend="native")
    assert_equal_bits(k[-3:], small[0])
