# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged gather on the CPU against loops: every pool, element size and edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, GuardedPool, random_bits
from rocm_tests.gather.oracle import Ranges, gather_by_loop, make_ranges
from rocm_tests.page.oracle import POOLS, Cache, bits, planes_of

BACKENDS = ("native", "reference")
H, D = 3, 32


def outputs(ranges: Ranges, dtype: torch.dtype, heads: int = H, dim: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows between guards: a buffer of other heads, and two rows more than are filled."""
    whole = random_bits((ranges.nnz + 2, 2 * heads + 1, dim), dtype, seed=9)
    return whole[:, :heads], whole[:, heads : 2 * heads]


def filled(pool: str, ranges: Ranges, N: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Cache, str]:
    """A pool of random bits, those that come as NaN between guards included."""
    cache, kv_layout = POOLS[pool](ranges.num_pages, N, heads, dim, dtype, "cpu")
    for seed, plane in enumerate(planes_of(cache, kv_layout)):
        bits(plane).copy_(bits(random_bits(plane.shape, dtype, seed=seed)))
    return cache, kv_layout


def check(pool: str, ranges: Ranges, N: int, dtype: torch.dtype, backend: str, heads: int = H, dim: int = D) -> None:
    cache, kv_layout = filled(pool, ranges, N, heads, dim, dtype)
    actual, expected = outputs(ranges, dtype, heads, dim), outputs(ranges, dtype, heads, dim)
    flashinfer.gather_paged_kv(cache, *ranges.metadata(), ranges.nnz + 2, kv_layout, out=actual, backend=backend)
    gather_by_loop(cache, ranges, kv_layout, expected)
    for got, want in zip(actual, expected, strict=True):
        # The whole buffer: nothing beside the rows changed.
        assert_equal_bits(got._base, want._base)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_and_element_size(pool: str, dtype: torch.dtype, backend: str) -> None:
    ranges = make_ranges([40, 0, 5, 16, 33, 17], [(3, 30), (0, 0), (0, 5), (0, 16), (16, 17), (0, 0)], 16)
    check(pool, ranges, 16, dtype, backend)


@given(data=st.data(), N=st.sampled_from([1, 8, 16]), wide=st.booleans(), backend=st.sampled_from(BACKENDS))
@settings(max_examples=40)
def test_any_ranges(data: st.DataObject, N: int, wide: bool, backend: str) -> None:
    """Pieces that begin and end anywhere, among them at page edges and one beside them."""
    lens = data.draw(st.lists(st.integers(0, 50), max_size=6))
    pairs = []
    for length in lens:
        start = data.draw(st.integers(0, length))
        pairs.append((start, data.draw(st.integers(0, length - start))))
    ranges = make_ranges(lens, pairs, N, index_dtype=torch.int64 if wide else torch.int32)
    pool = data.draw(st.sampled_from(["single NHD", "standard"] + ["shuffled"] * (N > 1)))
    check(pool, ranges, N, torch.bfloat16, backend, heads=2, dim=16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cached", [OCP, FNUZ], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pool", ["tuple NHD", "standard", "shuffled", "shuffled guarded"])
def test_fp8_is_dequantised(pool: str, dtype: torch.dtype, cached: torch.dtype, backend: str) -> None:
    """Every code of the flavour, NaN included, times unlike scales, rounded once."""
    ranges = make_ranges([40, 19], [(0, 40), (5, 14)], 16)
    cache, kv_layout = filled(pool, ranges, 16, H, D, cached)
    raw = gather_by_loop(cache, ranges, kv_layout, outputs(ranges, cached))
    assert len(raw[0][: ranges.nnz].view(torch.uint8).unique()) == 256
    k, v = flashinfer.gather_paged_kv(
        cache, *ranges.metadata(), ranges.nnz, kv_layout, k_scale=0.3, v_scale=700.0, dtype=dtype, backend=backend
    )
    for got, bytes_, scale in ((k, raw[0], 0.3), (v, raw[1], 700.0)):
        want = (bytes_[: ranges.nnz].float() * torch.tensor(scale)).to(dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_values_by_hand() -> None:
    """FP8 bytes 0x38 and 0x40 are 1 and 2 in OCP, half as much in FNUZ."""
    pool = torch.tensor([0x38, 0x40, 0x01, 0x80], dtype=torch.uint8).view(1, 1, 1, 4)
    zero, one = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for flavour, want in ((OCP, [2.0, 4.0, 2**-8, -0.0]), (FNUZ, [1.0, 2.0, 2**-9, float("nan")])):
        cache = (pool.view(flavour), pool.clone().view(flavour))
        k, _ = flashinfer.gather_paged_kv(cache, zero, one, zero, one, 1, k_scale=2.0, dtype=torch.float32)
        torch.testing.assert_close(k.flatten(), torch.tensor(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_named_tokens_are_read(backend: str) -> None:
    """Everything but the ranges is NaN, and shuffled pages share vectors between tokens."""
    ranges = make_ranges([29, 21], [(9, 12), (16, 5)], 16)
    for kv_layout in ("HND", "SHUFFLED"):
        x = 4
        shapes = ((H, D // x, 16, x), (H, 16 // x, D, x)) if kv_layout == "SHUFFLED" else ((H, 16, D),) * 2
        cache = tuple(
            GuardedPool(ranges.num_pages, shape, torch.float32, gap_bytes=64).pages.clone() for shape in shapes
        )
        indices, indptr, starts, rows = (t.tolist() for t in ranges.metadata())
        for b, start in enumerate(starts):
            for token in range(start, start + rows[b + 1] - rows[b]):
                page, n = indices[indptr[b] + token // 16], token % 16
                if kv_layout == "HND":
                    cache[0][page, :, n], cache[1][page, :, n] = 1.0, 2.0
                else:
                    cache[0][page, :, :, n], cache[1][page, :, n // x, :, n % x] = 1.0, 2.0
        k, v = flashinfer.gather_paged_kv(cache, *ranges.metadata(), ranges.nnz, kv_layout, backend=backend)
        assert (k == 1).all()
        assert (v == 2).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_a_table(backend: str) -> None:
    """Slices of a larger batch's metadata, which begin inside of `kv_indices`."""
    ranges = make_ranges([20, 35, 9], [(0, 20), (16, 19), (0, 9)], 16)
    cache, kv_layout = POOLS["tuple HND"](ranges.num_pages, 16, H, D, torch.float16, "cpu")
    whole = gather_by_loop(cache, ranges, kv_layout, outputs(ranges, torch.float16))
    k, v = flashinfer.gather_paged_kv(
        cache,
        ranges.kv_indices,
        ranges.kv_indptr[1:],
        ranges.starts[1:],
        torch.tensor([0, 19, 28]),
        28,
        kv_layout,
        backend=backend,
    )
    assert_equal_bits(k, whole[0][20:48])
    assert_equal_bits(v, whole[1][20:48])


HELD = "those that the request's pages hold, got"
SHORT = "the page table is short"


def change(t: torch.Tensor, at: int, value: int) -> torch.Tensor:
    t = t.clone()
    t[at] = value
    return t


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("field", "at", "value", "sentence"),
    [
        ("starts", 0, 3, "starts[0] must leave every token below 32, {held} token 32"),
        ("starts", 1, -1, "starts[1] must leave every token below 16, {held} token -1"),
        ("kv_indices", 1, UNUSED_PAGE_ID, "kv_indices[1] must be a page id in [0, {P}), got 1073741824"),
        ("kv_indices", 2, -1, "kv_indices[2] must be a page id in [0, {P}), got -1"),
        ("kv_indptr", 2, 99, "kv_indptr[2] must be at most {L}, the length of kv_indices, got 99; {short}"),
        ("kv_indptr", 1, -2, "kv_indptr must start at 0 or above and not decrease, got 0 at [0] and then -2"),
        ("out_indptr", 1, 40, "out_indptr[1] must be at most 34, the rows of the output, got 40"),
        ("out_indptr", 1, 34, "out_indptr must start at 0 or above and not decrease, got 34 at [1] and then 33"),
        ("out_indptr", 0, -1, "out_indptr must start at 0 or above and not decrease, got -1 at [0] and then 30"),
        ("out_indptr", 2, 35, "out_indptr[2] must be at most 34, the rows of the output, got 35"),
    ],
)  # fmt: skip
def test_bad_metadata_is_refused_and_nothing_written(
    field: str, at: int, value: int, sentence: str, backend: str
) -> None:
    ranges = make_ranges([32, 4], [(0, 30), (0, 4)], 16, index_dtype=torch.int64)
    metadata = dict(zip(("kv_indices", "kv_indptr", "starts", "out_indptr"), ranges.metadata(), strict=True))
    if value == 34:
        metadata[field] = change(metadata[field], 2, 33)
    metadata[field] = change(metadata[field], at, value)
    cache, _ = POOLS["tuple NHD"](ranges.num_pages, 16, H, D, torch.float32, "cpu")
    out = torch.zeros(34, H, D), torch.zeros(34, H, D)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.gather_paged_kv(cache, *metadata.values(), 34, out=out, backend=backend)
    words = sentence.format(P=ranges.num_pages, L=len(ranges.kv_indices), held=HELD, short=SHORT)
    assert str(caught.value) == f"gather_paged_kv: {words}"
    assert not out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_gather(backend: str) -> None:
    for lens in ([], [9, 4]):
        check("tuple NHD", make_ranges(lens, [(0, 0)] * len(lens), 16), 16, torch.bfloat16, backend)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"nnz": -1}, "nnz must be an integer from 0 to 2147483647, got -1"),
        ({"k_scale": float("nan")}, "k_scale must be finite, got nan"),
        ({"out": [1]}, "out must be a tuple of K and V, got list"),
        ({"out": (torch.zeros(3, 1, 8),) * 2}, "out must be of nnz = 2 rows of heads, got [3, 1, 8]"),
        ({"dtype": torch.float16}, "k_out must be of the cache's dtype torch.float32, got torch.float16"),
        (
            {"dtype": torch.float16, "out": (torch.zeros(2, 1, 8),) * 2},
            "out must be of dtype torch.float16, got torch.float32",
        ),
        ({"paged_kv_cache": (torch.zeros(2, 2),) * 2}, "paged_kv_cache must be of pages for NHD, got [2, 2]"),
    ],
)
def test_calls_that_make_no_sense(arguments: dict[str, Any], sentence: str) -> None:
    zero, one = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    call: dict[str, Any] = {
        "paged_kv_cache": torch.zeros(2, 2, 4, 1, 8),
        "kv_indices": zero,
        "kv_indptr": one,
        "starts": zero,
        "out_indptr": one,
        "nnz": 2,
    }
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.gather_paged_kv(**{**call, **arguments})
    assert str(caught.value) == f"gather_paged_kv: {sentence}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_beyond_2_31_elements(backend: str) -> None:
    """Only the touched pages of the pool get memory."""
    N, heads, dim = 1, 8, 64
    page = 2**31 // (heads * dim) + 5
    pool = torch.empty(page + 1, N, heads, dim, dtype=torch.float8_e4m3fn)
    pool[page] = 1.5
    indices, one = torch.tensor([page]), torch.tensor([0, 1])
    k, v = flashinfer.gather_paged_kv((pool, pool), indices, one, one[:1], one, 1, backend=backend)
    assert (k.float() == 1.5).all()
    assert (v.float() == 1.5).all()
