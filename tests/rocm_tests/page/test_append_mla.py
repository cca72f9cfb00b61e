# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`append_paged_mla_kv_cache` against a loop, on every byte of the pools' memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import GuardedPool, random_bits
from rocm_tests.page.oracle import Batch, assert_same_memory, bits, make_batch

BACKENDS = ("native", "reference")
Pools = tuple[torch.Tensor, torch.Tensor]


def two_pools(P: int, N: int, ckv: int, kpe: int, dtype: torch.dtype) -> Pools:
    return random_bits((P, N, ckv), dtype, seed=1), random_bits((P, N, kpe), dtype, seed=2)


def halves_of_one(P: int, N: int, ckv: int, kpe: int, dtype: torch.dtype) -> Pools:
    """The usual 576-wide pool: neighbours in one row."""
    pool = random_bits((P, N, ckv + kpe), dtype, seed=3)
    return pool[..., :ckv], pool[..., ckv:]


def unlike_strides(P: int, N: int, ckv: int, kpe: int, dtype: torch.dtype) -> Pools:
    """ckv pages inside a larger buffer, kpe with tokens outside pages."""
    first = random_bits((2 * P, N, ckv + 8), dtype, seed=4)[::2, :, 8:]
    return first, random_bits((N, P, kpe), dtype, seed=5).transpose(0, 1)


POOLS = {f.__name__: f for f in (two_pools, halves_of_one, unlike_strides)}


def by_loop(ckv: torch.Tensor, kpe: torch.Tensor, pools: Pools, batch: Batch) -> None:
    lists, N = batch.lists, pools[0].size(1)
    for i, (b, position) in enumerate(zip(lists["batch_indices"], lists["positions"], strict=True)):
        if b >= 0:
            page = lists["kv_indices"][lists["kv_indptr"][b] + position // N]
            for pool, rows in zip(pools, (ckv, kpe), strict=True):
                bits(pool)[page, position % N] = bits(rows)[i]


def run(ckv: torch.Tensor, kpe: torch.Tensor, pools: Pools, batch: Batch, backend: str) -> None:
    flashinfer.append_paged_mla_kv_cache(
        ckv,
        kpe,
        batch.batch_indices,
        batch.positions,
        *pools,
        batch.kv_indices,
        batch.kv_indptr,
        batch.last_page_len,
        backend=backend,
    )


def check(
    pool: str,
    batch: Batch,
    N: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    backend: str,
    rows: Pools | None = None,
) -> None:
    pools, twin = (POOLS[pool](batch.num_pages, N, *widths, dtype) for _ in range(2))
    if rows is None:
        ckv, kpe = (random_bits((batch.nnz, w), dtype, seed=6 + w) for w in widths)
    else:
        ckv, kpe = rows
    run(ckv, kpe, pools, batch, backend)
    by_loop(ckv, kpe, twin, batch)
    assert_same_memory(pools, twin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("N", [1, 16, 64])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_the_usual_widths(dtype: torch.dtype, pool: str, N: int, backend: str) -> None:
    lens = [N - 1, 0, N, N + 1, 2 * N + 3]
    check(pool, make_batch(lens, [n // 2 + n % 2 for n in lens], N, padding=2), N, (512, 64), dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(4, 4), (4, 64), (20, 12), (72, 36), (448, 64), (516, 4)], ids=str)
def test_any_multiple_of_eight_bytes(widths: tuple[int, int], backend: str) -> None:
    batch = make_batch([9, 4], [7, 1], 4, padding=1)
    for pool in POOLS:
        check(pool, batch, 4, widths, torch.float16, backend)
        check(pool, batch, 4, (2 * widths[0], 2 * widths[1]), torch.uint8, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows_and_wide_metadata(backend: str) -> None:
    batch = make_batch([30, 9], [11, 4], 16, padding=2, index_dtype=torch.int64)
    fused = random_bits((2 * batch.nnz, 40 + 512 + 64), torch.bfloat16)
    rows = fused[::2, 40:552], fused[1::2, 552:]
    check("halves_of_one", batch, 16, (512, 64), torch.bfloat16, backend, rows)
    check("two_pools", batch, 16, (512, 64), torch.bfloat16, backend, (rows[0], rows[1][:1].expand(batch.nnz, 64)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_padding_is_never_written(index_dtype: torch.dtype, backend: str) -> None:
    """NVIDIA/TensorRT-LLM#18673: -1 is neither the row below the pool nor page 0."""
    pool = GuardedPool(8, (4, 24), torch.bfloat16, guard_pages=2)
    pools = pool.pages[..., :16], pool.pages[..., 16:]
    for batch_indices, written in (([0, 1, -1, -1, -1], 2), ([-1] * 5, 0)):
        pool.pages.fill_(float("nan"))
        pool.remember()
        metadata = [torch.tensor(t, dtype=index_dtype) for t in (batch_indices, [3, 0, 0, 0, 0], [5, 2], [0, 1, 2])]
        batch = Batch(*metadata, metadata[0], num_pages=8)
        run(torch.ones(5, 16).bfloat16(), torch.ones(5, 8).bfloat16(), pools, batch, backend)
        pool.check_only_changed([5, 2] if written else [])
        pool.check_guards()
        assert int((~pool.pages.isnan()).sum()) == written * 24


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_append(backend: str) -> None:
    for lens in ([3, 9], []):
        check("halves_of_one", make_batch(lens, [0] * len(lens), 4), 4, (16, 8), torch.bfloat16, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch_indices", "positions", "kv_indices", "sentence"),
    [
        ([0, 5, 0], [0, 0, 1], [2, 3, 1], "batch_indices[1] must be in [0, 2), a request of kv_indptr, got 5"),
        # vllm-project/vllm#54296: the next request's page follows in kv_indices.
        ([0, 0, 1], [3, 8, 0], [2, 3, 1], "positions[1] must be in [0, 8), "),
        ([0, 0, 1], [3, 4, 0], [2, 3], "kv_indptr[2] must be at most 2, the length of kv_indices, got 3"),
        ([0, 1, 0], [3, 0, 4], [2, 4, 1], "kv_indices[1] must be a page id in [0, 4), got 4"),
        ([0, 1, 0], [3, 0, 0], [2, 3, -7], "kv_indices[2] must be a page id in [0, 4), got -7"),
    ],
)
def test_bad_metadata_is_named_and_nothing_is_written(
    batch_indices: list[int], positions: list[int], kv_indices: list[int], sentence: str, backend: str
) -> None:
    pool = GuardedPool(4, (4, 24), torch.float32)
    pool.remember()
    metadata = [torch.tensor(t, dtype=torch.int32) for t in (batch_indices, positions, kv_indices, [0, 2, 3])]
    batch = Batch(*metadata, metadata[0], num_pages=4)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        run(torch.ones(3, 16), torch.ones(3, 8), (pool.pages[..., :16], pool.pages[..., 16:]), batch, backend)
    assert str(caught.value).startswith(f"append_paged_mla_kv_cache: {sentence}")
    pool.check_only_changed([])


@st.composite
def appends(draw: st.DrawFn) -> dict[str, object]:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]))
    N = draw(st.integers(1, 20))
    lens = draw(st.lists(st.integers(0, 3 * N + 1), max_size=5))
    new = [draw(st.integers(0, length)) for length in lens]
    batch = make_batch(lens, new, N, padding=draw(st.integers(0, 3)), seed=draw(st.integers(0, 99)))
    step = 8 // dtype.itemsize
    return {
        "pool": draw(st.sampled_from(sorted(POOLS))),
        "batch": batch,
        "N": N,
        "widths": (step * draw(st.integers(1, 40)), step * draw(st.integers(1, 20))),
        "dtype": dtype,
        "backend": draw(st.sampled_from(BACKENDS)),
    }


@given(appends())
@settings(deadline=None, max_examples=60)
def test_any_ragged_batch(call: dict[str, object]) -> None:
    check(**call)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_past_32_bits(backend: str) -> None:
    """ROCm/aiter#2893: token id 4,000,000 of a 576-wide pool of page size 1, past 2^31 elements and 2^32 bytes."""
    page = 4_000_000
    pool = torch.empty((page + 1) * 576, dtype=torch.bfloat16).view(page + 1, 1, 576)
    strays = [page * 1152 % 2**width // 1152 for width in (31, 32)]
    before = [pool[p : p + 2].clone() for p in strays]
    rows = random_bits((1, 576), torch.bfloat16)
    one = torch.tensor([page])
    batch = Batch(one * 0, one * 0, one, torch.tensor([0, 1]), one, num_pages=page + 1)
    run(rows[:, :512], rows[:, 512:], (pool[..., :512], pool[..., 512:]), batch, backend)
    assert_equal_bits(pool[page], rows)
    for p, old in zip(strays, before, strict=True):
        assert_equal_bits(pool[p : p + 2], old)
