# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Gathers on a GPU against loops on the CPU, and reports through `check_device_errors`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, random_bits
from rocm_tests.core.environment import set_variable
from rocm_tests.gather.oracle import Ranges, gather_by_loop, make_ranges
from rocm_tests.page.oracle import POOLS, Cache, bits, planes_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RAGGED = ([40, 0, 5, 16, 33, 17, 300], [(3, 30), (0, 0), (0, 5), (0, 16), (16, 17), (0, 0), (7, 290)])


@pytest.fixture(autouse=True)
def no_reports_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_variable(monkeypatch, env.check, "")
    yield
    flashinfer.check_device_errors()


def twins(pool: str, ranges: Ranges, N: int, H: int, D: int, dtype: torch.dtype) -> tuple[Cache, Cache, str]:
    """A pool of random bits on the GPU, and the same on the CPU."""
    there, kv_layout = POOLS[pool](ranges.num_pages, N, H, D, dtype, DEVICE)
    here, _ = POOLS[pool](ranges.num_pages, N, H, D, dtype, "cpu")
    for seed, (a, b) in enumerate(zip(planes_of(there, kv_layout), planes_of(here, kv_layout), strict=True)):
        data = bits(random_bits(b.shape, dtype, seed=seed))
        bits(a).copy_(data.to(DEVICE))
        bits(b).copy_(data)
    return there, here, kv_layout


def outputs(ranges: Ranges, H: int, D: int, dtype: torch.dtype, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    whole = random_bits((ranges.nnz + 2, 2 * H + 1, D + skip), dtype, seed=9)[..., skip:]
    return whole[:, :H], whole[:, H : 2 * H]


def check(pool: str, ranges: Ranges, N: int, H: int, D: int, dtype: torch.dtype, skip: int = 0) -> None:
    there, here, kv_layout = twins(pool, ranges, N, H, D, dtype)
    expected = outputs(ranges, H, D, dtype, skip)
    base = expected[0]._base
    assert base is not None
    copied = base.to(DEVICE)
    actual = tuple(copied.as_strided(t.shape, t.stride(), t.storage_offset()) for t in expected)
    flashinfer.gather_paged_kv(
        there, *ranges.metadata(DEVICE), ranges.nnz + 2, kv_layout, out=(actual[0], actual[1]), backend="native"
    )
    gather_by_loop(here, ranges, kv_layout, expected)
    assert_equal_bits(copied, base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_and_element_size(pool: str, dtype: torch.dtype) -> None:
    check(pool, make_ranges(*RAGGED, 16), 16, 3, 64, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("D", [1, 7, 20, 64, 72, 80, 96, 112, 128, 256])
def test_head_sizes(D: int, dtype: torch.dtype) -> None:
    ranges = make_ranges([40, 15], [(2, 38), (0, 15)], 16, index_dtype=torch.int64)
    for pool in ("tuple NHD", "standard", "permuted"):
        check(pool, ranges, 16, 5, D, dtype)
    if D % (16 // dtype.itemsize) == 0:
        check("shuffled", ranges, 16, 1, D, dtype)
        check("shuffled guarded", ranges, 16, 3, D, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("pool", ["single HND", "shuffled"])
@pytest.mark.parametrize("skip", [1, 2, 4])
def test_outputs_at_any_alignment(skip: int, pool: str, dtype: torch.dtype) -> None:
    check(pool, make_ranges(*RAGGED, 16), 16, 3, 16, dtype, skip)


@pytest.mark.parametrize("lens", [[5000], [37] * 300], ids=["one long", "many short"])
@pytest.mark.parametrize("pool", ["tuple NHD", "shuffled"])
def test_many_rows(pool: str, lens: list[int]) -> None:
    """More than the machine takes at once, against the reference on the GPU."""
    ranges = make_ranges(lens, [(1, n - 1) for n in lens], 16)
    there, _, kv_layout = twins(pool, ranges, 16, 4, 64, torch.bfloat16)
    results = [
        flashinfer.gather_paged_kv(there, *ranges.metadata(DEVICE), ranges.nnz, kv_layout, backend=backend)
        for backend in ("native", "reference")
    ]
    for got, want in zip(*results, strict=True):
        assert_equal_bits(got, want)


@pytest.mark.parametrize("cached", [OCP, FNUZ], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pool", ["tuple NHD", "standard", "shuffled", "shuffled guarded"])
def test_fp8_is_dequantised(pool: str, dtype: torch.dtype, cached: torch.dtype) -> None:
    ranges = make_ranges(*RAGGED, 16)
    for D in (32, 24):
        if D % 16 and pool.startswith("shuffled"):
            continue
        there, here, kv_layout = twins(pool, ranges, 16, 3, D, cached)
        raw = gather_by_loop(here, ranges, kv_layout, outputs(ranges, 3, D, cached))
        for skip in (0, 1):
            buffer = torch.empty(2, ranges.nnz, 3, D + skip, dtype=dtype, device=DEVICE)[..., skip:]
            flashinfer.gather_paged_kv(
                there,
                *ranges.metadata(DEVICE),
                ranges.nnz,
                kv_layout,
                k_scale=0.3,
                v_scale=700.0,
                out=(buffer[0], buffer[1]),
                backend="native",
            )
            for got, bytes_, scale in zip(buffer, raw, (0.3, 700.0), strict=True):
                want = (bytes_[: ranges.nnz].float() * torch.tensor(scale)).to(dtype)
                torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_bad_metadata_is_skipped_and_reported() -> None:
    ranges = make_ranges([40, 20], [(0, 40), (0, 20)], 16)
    for pool in ("tuple NHD", "shuffled"):
        there, here, kv_layout = twins(pool, ranges, 16, 2, 32, torch.bfloat16)
        expected = gather_by_loop(here, ranges, kv_layout, outputs(ranges, 2, 32, torch.bfloat16))
        for at, name, value, lost in (
            (1, "kv_indices", UNUSED_PAGE_ID, range(16, 32)),
            (1, "starts", 20, range(52, 60)),
        ):
            metadata = dict(zip(("kv_indices", "kv_indptr", "starts", "out_indptr"), ranges.metadata(), strict=True))
            metadata[name] = metadata[name].clone()
            metadata[name][at] = value
            out = torch.zeros(2, 60, 2, 32, dtype=torch.bfloat16, device=DEVICE)
            flashinfer.gather_paged_kv(
                there, *(t.to(DEVICE) for t in metadata.values()), 60, kv_layout, out=(out[0], out[1])
            )
            with pytest.raises(flashinfer.InvalidArgumentError, match=f"gather_paged_kv: {name}\\[1\\] must"):
                flashinfer.check_device_errors()
            whole = range(40) if name == "starts" else range(60)
            kept = [i for i in whole if i not in lost]
            for got, want in zip(out, expected, strict=True):
                assert_equal_bits(got[kept].cpu(), want[: ranges.nnz][kept])
                assert not bits(got[list(lost)]).any()


def test_a_captured_gather_follows_its_metadata() -> None:
    ranges = make_ranges([64, 64], [(0, 30), (10, 20)], 16)
    there, here, kv_layout = twins("shuffled", ranges, 16, 2, 64, torch.bfloat16)
    metadata = ranges.metadata(DEVICE)
    out = torch.zeros(2, 64, 2, 64, dtype=torch.bfloat16, device=DEVICE)

    def run() -> None:
        flashinfer.gather_paged_kv(there, *metadata, 64, kv_layout, out=(out[0], out[1]))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other = make_ranges([64, 64], [(20, 44), (1, 7)], 16)
    for buffer, new in zip(metadata[2:], other.metadata()[2:], strict=True):
        buffer.copy_(new)
    out.zero_()
    graph.replay()
    expected = gather_by_loop(here, other, kv_layout, outputs(other, 2, 64, torch.bfloat16))
    for got, want in zip(out, expected, strict=True):
        assert_equal_bits(got[:51].cpu(), want[:51])
        assert not bits(got[51:]).any()
