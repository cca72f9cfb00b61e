# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Appends and their metadata on a GPU against loops on the CPU, and reports through `check_device_errors`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, GuardedPool, random_bits
from rocm_tests.core.environment import set_variable
from rocm_tests.page.oracle import POOLS, Batch, append_by_loop, assert_same_memory, bits, make_batch

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BACKENDS = ("native", "reference")


@pytest.fixture(autouse=True)
def no_reports_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_variable(monkeypatch, env.check, "")
    yield
    flashinfer.check_device_errors()


def on_gpu(batch: Batch) -> Batch:
    return Batch(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()})


def check(
    pool: str,
    batch: Batch,
    N: int,
    H: int,
    D: int,
    dtype: torch.dtype,
    backend: str = "native",
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Append on the GPU, and by the loop to a twin on the CPU; both must hold the same bytes everywhere."""
    cache, kv_layout = POOLS[pool](batch.num_pages, N, H, D, dtype, DEVICE)
    twin, _ = POOLS[pool](batch.num_pages, N, H, D, dtype, "cpu")
    key, value = rows or (random_bits((batch.nnz, H, D), dtype, seed=s) for s in (20, 21))
    there = on_gpu(batch)
    flashinfer.append_paged_kv_cache(
        to_gpu(key),
        to_gpu(value),
        there.batch_indices,
        there.positions,
        cache,
        there.kv_indices,
        there.kv_indptr,
        there.last_page_len,
        kv_layout,
        backend=backend,
    )
    append_by_loop(key, value, **batch.lists, cache=twin, kv_layout=kv_layout)
    assert_same_memory(cache, twin)


def to_gpu(t: torch.Tensor) -> torch.Tensor:
    """A copy that keeps strides and the offset into the storage, hence the alignment."""
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(DEVICE)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_and_width(pool: str, dtype: torch.dtype, backend: str) -> None:
    batch = make_batch([33, 0, 5, 16, 17], [7, 0, 5, 1, 2], 16, padding=3)
    check(pool, batch, N=16, H=3, D=64, dtype=dtype, backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("D", [1, 7, 20, 64, 72, 80, 96, 112, 128, 192, 256])
def test_head_sizes(D: int, dtype: torch.dtype) -> None:
    """Every width of a memory access, from one byte to sixteen."""
    batch = make_batch([40, 15], [9, 3], 16, index_dtype=torch.int64)
    for pool in ("tuple NHD", "standard", "permuted"):
        check(pool, batch, 16, 5, D, dtype)
    if D % (16 // dtype.itemsize) == 0:
        check("shuffled", batch, 16, 1, D, dtype)
        check("shuffled guarded", batch, 16, 3, D, dtype)


@pytest.mark.parametrize("pool", ["single HND", "shuffled"])
@pytest.mark.parametrize("skip", [0, 1, 2, 3, 4, 8])
def test_rows_at_any_alignment(skip: int, pool: str) -> None:
    """Slices of a fused projection that begin `skip` elements late."""
    batch = make_batch([20, 9], [11, 4], 16)
    n, H, D = batch.nnz, 3, 16
    qkv = random_bits((n * (9 + 2 * H) * D + skip,), torch.float16)[skip:].view(n, 9 + 2 * H, D)
    check(pool, batch, 16, H, D, torch.float16, rows=(qkv[:, 9 : 9 + H], qkv[:, 9 + H :]))
    wide = random_bits((n, H, D + skip), torch.float16)[..., skip:]
    check(pool, batch, 16, H, D, torch.float16, rows=(wide, wide))


@pytest.mark.parametrize("N", [1, 16, 64])
def test_many_rows(N: int) -> None:
    """More than a workgroup's, and more than the machine takes at once."""
    lens = [3000, 1, 517, 64, 129]
    batch = make_batch(lens, lens, N, padding=100)
    H, D = 8, 128
    cache, _ = POOLS["tuple NHD"](batch.num_pages, N, H, D, torch.bfloat16, DEVICE)
    expected = [t.clone() for t in cache]
    rows = [random_bits((batch.nnz, H, D), torch.bfloat16, seed=s).to(DEVICE) for s in (1, 2)]
    there = on_gpu(batch)
    table = there.kv_indices, there.kv_indptr, there.last_page_len
    flashinfer.append_paged_kv_cache(*rows, there.batch_indices, there.positions, cache, *table)
    kept = batch.batch_indices >= 0
    b, position = batch.batch_indices[kept].long(), batch.positions[kept].long()
    page = batch.kv_indices[batch.kv_indptr[b] + position // N].long()
    for got, want, data in zip(cache, expected, rows, strict=True):
        bits(want)[page.to(DEVICE), (position % N).to(DEVICE)] = bits(data)[kept.to(DEVICE)]
        assert_equal_bits(got, want)


def test_nothing_to_append() -> None:
    for lens in ([9, 4], []):
        for pool in ("tuple NHD", "shuffled"):
            check(pool, make_batch(lens, [0] * len(lens), 16), 16, 3, 16, torch.bfloat16)


@pytest.mark.parametrize("widths", [(512, 64), (4, 4), (20, 12), (72, 36), (516, 4)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mla(widths: tuple[int, int], backend: str) -> None:
    for N, split in ((1, True), (16, True), (64, False)):
        batch = make_batch([N, 2 * N + 3, 0, 9], [N, 4, 0, 9], N, padding=3)
        ckv, kpe = (random_bits((batch.nnz, w), torch.bfloat16, seed=w) for w in widths)
        pools = []
        for device in (DEVICE, "cpu"):
            whole = random_bits((batch.num_pages, N, sum(widths)), torch.bfloat16).to(device)
            halves = whole[..., : widths[0]], whole[..., widths[0] :]
            pools.append(halves if split else tuple(t.contiguous() for t in halves))
        there = on_gpu(batch)
        metadata = there.batch_indices, there.positions
        table = there.kv_indices, there.kv_indptr, there.last_page_len
        flashinfer.append_paged_mla_kv_cache(to_gpu(ckv), to_gpu(kpe), *metadata, *pools[0], *table, backend=backend)
        lists = batch.lists
        for i, (b, position) in enumerate(zip(lists["batch_indices"], lists["positions"], strict=True)):
            if b >= 0:
                page = lists["kv_indices"][lists["kv_indptr"][b] + position // N]
                bits(pools[1][0])[page, position % N] = bits(ckv)[i]
                bits(pools[1][1])[page, position % N] = bits(kpe)[i]
        assert_same_memory(*pools)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_metadata(dtype: torch.dtype, backend: str) -> None:
    appended = torch.randint(0, 9, (1000,), generator=torch.Generator().manual_seed(0))
    before = torch.randint(0, 99, (1000,), generator=torch.Generator().manual_seed(1))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), appended.cumsum(0)])
    total = int(indptr[-1])
    found = flashinfer.get_batch_indices_positions(
        indptr.to(DEVICE, dtype), (before + appended).to(DEVICE, dtype), total + 300, backend=backend
    )
    owner = torch.arange(1000).repeat_interleave(appended)
    positions = torch.arange(total) - indptr[owner] + before[owner]
    assert torch.equal(found[0].cpu(), torch.cat([owner, torch.full((300,), -1)]).int())
    assert torch.equal(found[1].cpu(), torch.cat([positions, torch.zeros(300)]).int())
    lens = flashinfer.get_seq_lens(indptr.to(DEVICE, dtype), before.to(DEVICE, dtype), 16, backend=backend)
    assert torch.equal(lens.cpu(), ((appended - 1).clamp(min=0) * 16 + before).int())


BAD = {
    "batch index past the batch": (
        ([0, 2, 1], [0, 0, 0], [2, 3, 1], [0, 2, 3]),
        "batch_indices[1] must be in [0, 2), a request of kv_indptr, got 2",
    ),
    "position past the page table": (
        ([0, 0, 1], [3, 8, 0], [2, 3, 1], [0, 2, 3]),
        "positions[1] must be in [0, 8), which its request's pages hold, got 8; extend the page table before appending",
    ),
    "kv_indices is short": (
        ([0, 1, 0], [0, 0, 5], [2, 3], [0, 2, 3]),
        "kv_indptr[2] must be at most 2, the length of kv_indices, got 3; the page table is short",
    ),
    "unused page id": (
        ([0, 0, 1], [0, 4, 0], [2, UNUSED_PAGE_ID, 1], [0, 2, 3]),
        f"kv_indices[1] must be a page id in [0, 4), got {UNUSED_PAGE_ID}",
    ),
    "negative page id": (
        ([0, 0, 1], [0, 7, 0], [2, -1, 1], [0, 2, 3]),
        "kv_indices[1] must be a page id in [0, 4), got -1",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED", "MLA"])
def test_a_bad_row_is_skipped_and_reported(kv_layout: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1 is bad: rows 0 and 2 are written, nothing else is, and the report waits to be asked for."""
    lists, sentence = BAD[case]
    metadata = [torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in lists]
    shapes = {"NHD": (4, 2, 16), "HND": (2, 4, 16), "SHUFFLED": (2 * 4 * 16,), "MLA": (4, 32)}
    pool = GuardedPool(4, shapes[kv_layout], torch.float32, planes=2, device=DEVICE)
    k, v = pool.planes
    pool.remember()

    def append() -> None:
        if kv_layout == "MLA":
            rows = torch.ones(3, 32, device=DEVICE)
            flashinfer.append_paged_mla_kv_cache(rows, rows, *metadata[:2], k, v, *metadata[2:], metadata[3])
            return
        cache = (k.unflatten(1, (2, 4, 4, 4)), v.unflatten(1, (2, 1, 16, 4))) if kv_layout == "SHUFFLED" else (k, v)
        rows = torch.ones(3, 2, 16, device=DEVICE)
        flashinfer.append_paged_kv_cache(rows, rows, *metadata[:2], cache, *metadata[2:], metadata[3], kv_layout)

    append()
    op = "append_paged_mla_kv_cache" if kv_layout == "MLA" else "append_paged_kv_cache"
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.check_device_errors(DEVICE)
    assert str(caught.value) == f"{op}: {sentence}"
    flashinfer.check_device_errors()
    b, position, indices, indptr = lists
    good = [(indices[indptr[b[i]] + position[i] // 4], position[i] % 4) for i in (0, 2)]
    pool.check_only_changed([page for page, _ in good])
    for plane in pool.planes:
        assert int((~plane.isnan()).sum()) == 2 * 32
    set_variable(monkeypatch, env.check, "1")
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        append()
    assert str(caught.value) == f"{op}: {sentence}"


def test_the_first_report_is_kept() -> None:
    pool = torch.zeros(2, 4, 1, 8, device=DEVICE)
    row, zero = torch.ones(1, 1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    for page in (7, 0, 9):
        flashinfer.append_paged_kv_cache(row, row, zero, zero, (pool, pool.clone()), zero + page, indptr, zero)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 2\), got 7"):
        flashinfer.check_device_errors()


def test_metadata_on_the_wrong_device_is_refused() -> None:
    pool, row = torch.zeros(2, 4, 1, 8, device=DEVICE), torch.ones(1, 1, 8, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(
        flashinfer.InvalidArgumentError, match=r"kv_indptr must be on cuda:0, got cpu; pass kv_indptr.to"
    ):
        flashinfer.append_paged_kv_cache(row, row, zero, zero, (pool, pool.clone()), zero, indptr, zero)
    with pytest.raises(flashinfer.InvalidArgumentError, match="k_cache must be on cuda:0, got cpu"):
        flashinfer.append_paged_kv_cache(row, row, zero, zero, (pool.cpu(), pool), zero, indptr.to(DEVICE), zero)


@pytest.mark.slow
@pytest.mark.parametrize("page", [2**32 // 512 + 3, 2**31 // 512 - 1])
def test_offsets_past_32_bits(page: int) -> None:
    """ROCm/aiter#2893: pools of more than 2^31 and of more than 2^32 elements."""
    N, H, D = 1, 4, 128
    k = torch.zeros(page + 1, N, H, D, dtype=torch.float8_e4m3fn, device=DEVICE)
    v = torch.zeros(page + 1, N, H, D, dtype=torch.float8_e4m3fn, device=DEVICE)
    rows = random_bits((2, 2, H, D), torch.float8_e4m3fn).to(DEVICE)
    index = torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([page, 5], dtype=torch.int32, device=DEVICE), torch.tensor([0, 2], device=DEVICE), index[:1]
    flashinfer.append_paged_kv_cache(*rows, index, torch.tensor([0, 1], device=DEVICE), (k, v), *table)
    for plane, data in zip((k, v), rows, strict=True):
        assert_equal_bits(bits(plane)[[page, 5], 0], bits(data))
        raw = plane.view(torch.int64)
        written = int(raw[page].count_nonzero()) + int(raw[5].count_nonzero())
        assert int(raw.count_nonzero()) == written
