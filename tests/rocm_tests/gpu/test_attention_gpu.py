# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU: the Triton kernels, calls that wait for nothing, and graphs that follow their metadata."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.core.attention_work import scratch_elements
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.attention.case import LSE, NAN, Case
from rocm_tests.attention.triton_cases import CASES, FNUZ

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, dtype: torch.dtype) -> None:
    check, arguments = CASES[name]
    check(DEVICE, dtype, arguments)
    flashinfer.check_device_errors()


def dense(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 attention of one causal request by torch alone."""
    q, k, v = case.q.float(), case.keys[0].to(DEVICE).float(), case.values[0].to(DEVICE).float()
    group = q.size(1) // k.size(1)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.size(2) ** -0.5
    n, m = scores.shape[1:]
    scores = scores.masked_fill(torch.ones(n, m, device=DEVICE).tril(m - n) == 0, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    return out, (scores.logsumexp(-1) * 1.4426950408889634).T


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED", "RAGGED"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 20000), (8, 9001), (700, 700), (2000, 4099)])
def test_long_requests(q_len: int, kv_len: int, kv_layout: str) -> None:
    case = Case([q_len], [kv_len], kv_layout=kv_layout, heads=(8, 2), D=128, dtype=torch.bfloat16, device=DEVICE)
    out, lse = case.run(backend="triton")
    expected = dense(case)
    assert_close(out, expected[0], name="out")
    assert_close(lse, expected[1], name="lse", tolerance=LSE)


@pytest.mark.parametrize("kv_layout", ["NHD", "RAGGED"])
def test_a_call_waits_for_nothing(kv_layout: str) -> None:
    case = Case([1, 5], [70, 9], kv_layout=kv_layout, dtype=torch.bfloat16, device=DEVICE)
    case.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    case.compare(results)


def test_a_graph_follows_its_metadata() -> None:
    """Captured with short requests, replayed with long ones, empty ones and short ones again; scratch is NaN before."""
    options = {"heads": (8, 2), "D": 64, "dtype": torch.bfloat16, "device": DEVICE}
    first = Case([1, 1, 1, 1], [1, 1, 1, 1], **options)
    pool = torch.zeros(2, 400, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    indices = torch.zeros(400, dtype=torch.int32, device=DEVICE)
    scratch = torch.full((scratch_elements(64, first.q.device),), NAN, device=DEVICE)
    buffers = [t.clone() for t in (first.q, first.qo_indptr, first.table.indptr, first.table.last_page_len)]
    q, qo_indptr, kv_indptr, last = buffers
    out, lse = torch.full_like(q, NAN), torch.full((4, 8), NAN, device=DEVICE)

    def run() -> None:
        flashinfer.paged_attention(
            *(q, pool.unbind(0), qo_indptr, kv_indptr, indices, last), max_q_len=1, scratch=scratch, out=out, lse=lse
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed, lens in enumerate(([4097, 3, 0, 64], [5, 0, 0, 0], [1, 1, 1, 1], [700, 800, 900, 1000]), 1):
        case = Case([1, 1, 1, 1], lens, seed=seed, **options)
        for plane, cache in zip(pool, case.cache, strict=True):
            plane[: cache.size(0)].copy_(cache)
        indices[: case.table.indices.numel()] = case.table.indices
        sources = case.q, case.qo_indptr, case.table.indptr, case.table.last_page_len
        for buffer, source in zip(buffers, sources, strict=True):
            buffer.copy_(source)
        graph.replay()
        case.compare((out, lse))
    flashinfer.check_device_errors()


def test_a_pool_beyond_2_gib() -> None:
    """Pages whose byte and element offsets leave int32."""
    pages = (5 << 30) // (2 * 16 * 2 * 128)
    k, v = (torch.zeros(pages, 16, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    case = Case([1], [40], heads=(4, 2), D=128, dtype=torch.bfloat16, device=DEVICE)
    last = torch.tensor([pages - 1, pages // 2, pages - 3], dtype=torch.int32, device=DEVICE)
    for plane, tokens in ((k, case.keys[0]), (v, case.values[0])):
        for i, page in enumerate(last.tolist()):
            part = tokens[16 * i : 16 * i + 16]
            plane[page, : len(part)] = part.to(DEVICE)
    case.cache = k, v
    case.table.indices[:3] = last
    case.compare(case.run(backend="triton"))


def test_the_reference_runs_there_too() -> None:
    case = Case([1, 2], [70, 9], dtype=torch.bfloat16, device=DEVICE)
    case.compare(case.run(backend="reference"))
    wide = Case([1, 2], [70, 9], dtype=torch.float32, device=DEVICE)
    wide.compare(wide.run())
    table = wide.qo_indptr, wide.table.indptr, wide.table.indices, wide.table.last_page_len
    reasons = flashinfer.explain(flashinfer.paged_attention, wide.q, wide.cache, *table)
    assert reasons["triton"] == "needs q in float16 or bfloat16, got torch.float32"
    assert reasons["reference"] is None


def test_the_other_fp8_is_declined() -> None:
    """Every device has one flavour of its own."""
    case = Case([1], [9], dtype=torch.bfloat16, kv_dtype=FNUZ, device=DEVICE)
    arch = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "")
    if not arch.startswith("gfx94"):
        with pytest.raises(flashinfer.BackendUnavailableError, match="needs the device's own FP8"):
            case.run(backend="triton")
    case.compare(case.run())


def test_unaligned_values_are_read_right() -> None:
    """A shuffled pool that begins on no multiple of 16 bytes: no vectors of V, the same bits."""
    case = Case([1, 2], [70, 9], kv_layout="SHUFFLED", dtype=torch.bfloat16, device=DEVICE, D=64)
    expected = case.run(backend="triton")
    k, v = case.cache
    buffer = torch.empty(v.numel() + 8, dtype=v.dtype, device=DEVICE)
    shifted = buffer[1 : 1 + v.numel()].view(v.shape)
    shifted.copy_(v)
    case.cache = k, shifted
    for got, want in zip(case.run(backend="triton"), expected, strict=True):
        assert_equal_bits(got, want)
