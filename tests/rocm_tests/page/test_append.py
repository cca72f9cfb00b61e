# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`append_paged_kv_cache` against a loop, on every byte of the pool's memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, GuardedPool, random_bits
from rocm_tests.page.oracle import (
    POOLS,
    SHUFFLED,
    Batch,
    Cache,
    append_by_loop,
    assert_same_memory,
    bits,
    make_batch,
    page_size_of,
    planes_of,
)

BACKENDS = ("native", "reference")
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def run(key: torch.Tensor, value: torch.Tensor, cache: Cache, kv_layout: str, batch: Batch, backend: str) -> None:
    flashinfer.append_paged_kv_cache(
        key,
        value,
        batch.batch_indices,
        batch.positions,
        cache,
        batch.kv_indices,
        batch.kv_indptr,
        batch.last_page_len,
        kv_layout,
        backend=backend,
    )


def check(
    pool: str,
    batch: Batch,
    N: int,
    H: int,
    D: int,
    dtype: torch.dtype,
    backend: str,
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Append to a pool and to its twin by the loop; both must hold the same bytes everywhere."""
    (cache, kv_layout), (twin, _) = (POOLS[pool](batch.num_pages, N, H, D, dtype, "cpu") for _ in range(2))
    key, value = rows or (random_bits((batch.nnz, H, D), dtype, seed=s) for s in (20, 21))
    run(key, value, cache, kv_layout, batch, backend)
    append_by_loop(key, value, **batch.lists, cache=twin, kv_layout=kv_layout)
    assert_same_memory(cache, twin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, *FP8], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_and_width(pool: str, dtype: torch.dtype, backend: str) -> None:
    batch = make_batch([33, 0, 5, 16, 17], [7, 0, 5, 1, 2], 16, padding=3)
    check(pool, batch, N=16, H=3, D=64, dtype=dtype, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", [1, 7, 64, 72, 80, 96, 112, 128, 192, 256])
def test_head_sizes(D: int, backend: str) -> None:
    """flashinfer-ai/flashinfer#4299: sizes that fit no tile."""
    batch = make_batch([49, 15], [8, 3], 16)
    check("tuple NHD", batch, 16, 5, D, torch.float16, backend)
    check("standard", batch, 16, 1, D, torch.int8, backend)
    if D % 8 == 0:
        check("shuffled", batch, 16, 5, D, torch.bfloat16, backend)
    if D % 16 == 0:
        check("shuffled guarded", batch, 16, 1, D, torch.float8_e4m3fn, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shuffled_pages_are_the_flat_formula(backend: str) -> None:
    """The addresses that AITER's writer uses, spelled out."""
    H, N, D, x = 3, 32, 64, 8
    batch = make_batch([70], [70], N)
    (k_cache, v_cache), kv_layout = SHUFFLED["shuffled"](batch.num_pages, N, H, D, torch.bfloat16, "cpu")
    key, value = (random_bits((70, H, D), torch.bfloat16, seed=s) for s in (1, 2))
    run(key, value, (k_cache, v_cache), kv_layout, batch, backend)
    k, v, pages = bits(k_cache).flatten(), bits(v_cache).flatten(), batch.kv_indices.tolist()
    for i, position in enumerate(batch.positions.tolist()):
        b, n = pages[position // N], position % N
        for h in range(H):
            for d in (0, 1, 7, 8, 9, 31, 63):
                k_at = b * H * D * N + h * D * N + d // x * N * x + n * x + d % x
                v_at = b * H * D * N + h * D * N + n // x * D * x + d * x + n % x
                assert k[k_at] == bits(key)[i, h, d]
                assert v[v_at] == bits(value)[i, h, d]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_page_size_one_without_its_axis(kv_layout: str, backend: str) -> None:
    batch = make_batch([4, 1, 0], [2, 1, 0], 1, padding=1)
    key, value = (random_bits((batch.nnz, 5, 24), torch.float16, seed=s) for s in (1, 2))
    for make in (
        lambda: random_bits((batch.num_pages, 2, 5, 24), torch.float16),
        lambda: tuple(random_bits((batch.num_pages, 5, 24), torch.float16, seed=s) for s in (3, 4)),
    ):
        cache, twin = make(), make()
        run(key, value, cache, kv_layout, batch, backend)
        append_by_loop(key, value, **batch.lists, cache=twin, kv_layout=kv_layout)
        assert_same_memory(cache, twin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", ["tuple NHD", "standard", "shuffled guarded"])
@pytest.mark.parametrize("N", [16, 32])
def test_page_edges(pool: str, N: int, backend: str) -> None:
    """Lengths around the page border, with a table that ends exactly there (ROCm/rocm-libraries#6932)."""
    lens = [1, N - 1, N, N + 1, 2 * N - 1, 2 * N, 2 * N + 1, 4 * N]
    check(pool, make_batch(lens, lens, N, seed=3), N, 2, 16, torch.bfloat16, backend)
    one = make_batch(lens, [1] * len(lens), N, seed=4)
    check(pool, one, N, 2, 16, torch.bfloat16, backend)
    tight = one.kv_indices[: one.kv_indptr[-1]]
    check(pool, Batch(**{**vars(one), "kv_indices": tight}), N, 2, 16, torch.bfloat16, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wide", [(), (0, 1, 2, 3), (0, 2), (1, 3)], ids=str)
def test_index_widths(wide: tuple[int, ...], backend: str) -> None:
    """Each of the four index tensors may be int32 or int64."""
    batch = make_batch([9, 3], [5, 3], 4, padding=2)
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr")
    changed = {names[i]: getattr(batch, names[i]).long() for i in wide}
    check("interleaved", Batch(**{**vars(batch), **changed}), 4, 3, 8, torch.bfloat16, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", ["single HND", "shuffled"])
def test_strided_rows(pool: str, backend: str) -> None:
    """flashinfer-ai/flashinfer#527: rows that are slices of a fused projection, and rows with a stride of two."""
    batch = make_batch([20, 9], [11, 4], 16)
    n, H, D = batch.nnz, 3, 16
    qkv = random_bits((n, 9 + 2 * H, D), torch.float16)
    check(pool, batch, 16, H, D, torch.float16, backend, (qkv[:, 9 : 9 + H], qkv[:, 9 + H :]))
    both = random_bits((2 * n, H, 2 * D), torch.float16)
    check(pool, batch, 16, H, D, torch.float16, backend, (both[::2, :, :D], both[1::2, :, D:]))
    heads_first = random_bits((H, n, D), torch.float16).transpose(0, 1)
    dense = random_bits((n, H, D), torch.float16, seed=1)
    check(pool, batch, 16, H, D, torch.float16, backend, (heads_first, dense))
    check(pool, batch, 16, H, D, torch.float16, backend, (dense[:1].expand(n, H, D), heads_first))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [[(0, 3), (1, 0), (-1, 0), (-1, 0), (-1, 0)], [(-1, 0)] * 5], ids=["two", "none"])
@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED"])
def test_padding_is_never_written(
    rows: list[tuple[int, int]], kv_layout: str, index_dtype: torch.dtype, backend: str
) -> None:
    """NVIDIA/TensorRT-LLM#18673, ROCm/ATOM#2008: slot -1 is neither the row below the pool nor page 0."""
    H, N, D = 2, 8, 16
    shape = (N, H, D) if kv_layout == "NHD" else (H * N * D,)
    pool = GuardedPool(8, shape, torch.bfloat16, planes=2, guard_pages=2)
    cache = pool.planes
    if kv_layout == "SHUFFLED":
        cache = (cache[0].unflatten(1, (H, D // 8, N, 8)), cache[1].unflatten(1, (H, N // 8, D, 8)))
    pool.remember()
    metadata = [torch.tensor(column, dtype=index_dtype) for column in zip(*rows, strict=True)]
    table = [torch.tensor(t, dtype=index_dtype) for t in ([5, 2], [0, 1, 2], [4, 1])]
    data = torch.ones(5, H, D, dtype=torch.bfloat16)
    flashinfer.append_paged_kv_cache(data, data, *metadata, cache, *table, kv_layout, backend=backend)
    pool.check_only_changed([page for (b, _), page in zip(rows, [5, 2], strict=False) if b >= 0])
    pool.check_guards()
    # Of the two pages, one token each: everything else is still NaN.
    for plane in pool.planes:
        assert int((~plane.isnan()).sum()) == sum(b >= 0 for b, _ in rows) * H * D


@pytest.mark.parametrize("backend", BACKENDS)
def test_our_padding_is_skipped_by_our_append(backend: str) -> None:
    """The helper and the append, end to end, with fewer rows than the graph was captured for."""
    indptr, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32)
    b, positions = flashinfer.get_batch_indices_positions(indptr, lens, 5, backend=backend)
    batch = Batch(b, positions, torch.tensor([3, 1]), torch.tensor([0, 1, 2]), torch.tensor([4, 1]), num_pages=4)
    check("tuple NHD", batch, 4, 2, 64, torch.bfloat16, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", ["tuple NHD", "single HND", "shuffled"])
def test_nothing_to_append(pool: str, backend: str) -> None:
    check(pool, make_batch([9, 4], [0, 0], 16), 16, 3, 16, torch.bfloat16, backend)
    check(pool, make_batch([], [], 16), 16, 3, 16, torch.bfloat16, backend)
    empty = make_batch([], [], 16)
    none = Batch(**{**vars(empty), "kv_indices": empty.kv_indices[:0], "num_pages": 0})
    check(pool, none, 16, 3, 16, torch.bfloat16, backend)


BAD_METADATA = {
    # name: (batch_indices, positions, kv_indices, kv_indptr, what either backend says)
    "batch index past the batch": (
        [0, 2, 1],
        [0, 0, 0],
        [2, 3, 1],
        [0, 2, 3],
        "batch_indices[1] must be in [0, 2), a request of kv_indptr, got 2",
    ),
    "kv_indptr is short": (
        [0, 1, 0],
        [0, 0, 1],
        [2, 3, 1],
        [0, 2],
        "batch_indices[1] must be in [0, 1), a request of kv_indptr, got 1",
    ),
    "no requests": (
        [0, 0, 0],
        [0, 1, 2],
        [],
        [0],
        "batch_indices[0] must be in [0, 0), a request of kv_indptr, got 0",
    ),
    # vllm-project/vllm#54296: request 1's first page follows in kv_indices.
    "position past the page table": (
        [0, 0, 1],
        [3, 8, 0],
        [2, 3, 1],
        [0, 2, 3],
        "positions[1] must be in [0, 8), which its request's pages hold, got 8; extend the page table before appending",
    ),
    "a request without pages": (
        [1, 0, 1],
        [0, 0, 0],
        [2, 3, 1],
        [0, 3, 3],
        "positions[0] must be in [0, 0), which its request's pages hold, got 0; extend the page table before appending",
    ),
    "negative position": (
        [0, 1, 1],
        [0, 0, -1],
        [2, 3, 1],
        [0, 2, 3],
        "positions[2] must be in [0, 4), which its request's pages hold, got -1; "
        "extend the page table before appending",
    ),
    "kv_indices is short": (
        [0, 0, 1],
        [0, 4, 3],
        [2, 3],
        [0, 2, 3],
        "kv_indptr[2] must be at most 2, the length of kv_indices, got 3; the page table is short",
    ),
    "page id past the pool": (
        [0, 0, 1],
        [0, 4, 0],
        [2, 3, 4],
        [0, 2, 3],
        "kv_indices[2] must be a page id in [0, 4), got 4",
    ),
    "unused page id": (
        [0, 0, 1],
        [0, 4, 0],
        [2, UNUSED_PAGE_ID, 1],
        [0, 2, 3],
        f"kv_indices[1] must be a page id in [0, 4), got {UNUSED_PAGE_ID}",
    ),
    "negative page id": (
        [0, 0, 1],
        [0, 7, 0],
        [2, -1, 1],
        [0, 2, 3],
        "kv_indices[1] must be a page id in [0, 4), got -1",
    ),
    "kv_indptr begins below zero": (
        [0, 1, 1],
        [0, 0, 0],
        [2, 3, 1],
        [-1, 2, 3],
        "kv_indptr must start at 0 or above and not decrease, got -1 at [0] and then 2",
    ),
    "kv_indptr decreases": (
        [0, 1, 1],
        [0, 0, 0],
        [2, 3, 1],
        [0, 2, 1],
        "kv_indptr must start at 0 or above and not decrease, got 2 at [1] and then 1",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_named_and_nothing_is_written(case: str, backend: str) -> None:
    """Good rows stand before and after the bad one: not even they are written."""
    *lists, sentence = BAD_METADATA[case]
    for wide in (False, True):
        batch_indices, positions, kv_indices, kv_indptr = (
            torch.tensor(values, dtype=torch.int64 if wide else torch.int32) for values in lists
        )
        for kv_layout, shape in (("NHD", (4, 2, 16)), ("HND", (2, 4, 16))):
            pool = GuardedPool(4, shape, torch.float32, planes=2)
            pool.remember()
            batch = Batch(batch_indices, positions, kv_indices, kv_indptr, kv_indptr[1:], num_pages=4)
            rows = torch.ones(3, 2, 16)
            with pytest.raises(flashinfer.InvalidArgumentError) as caught:
                run(rows, rows, pool.planes, kv_layout, batch, backend)
            assert str(caught.value) == f"append_paged_kv_cache: {sentence}"
            pool.check_only_changed([])
    # The report was cleared: the next call is not blamed for it.
    check("tuple NHD", make_batch([3], [2], 4), 4, 2, 16, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_page_is_refused_and_not_divided_by(backend: str) -> None:
    batch = make_batch([3], [1], 4)
    rows = torch.ones(1, 2, 16)
    for kv_layout, shape in (("NHD", (4, 0, 2, 16)), ("HND", (4, 2, 0, 16)), ("SHUFFLED", (4, 2, 4, 0, 4))):
        with pytest.raises(flashinfer.InvalidArgumentError, match="k_cache must be of a page_size of at least 1, got"):
            run(rows, rows, (torch.zeros(shape), torch.zeros(shape)), kv_layout, batch, backend)
    with pytest.raises(flashinfer.InvalidArgumentError, match="append_key must be of rows that are not empty"):
        run(rows[..., :0], rows[..., :0], (torch.zeros(4, 4, 2, 0),) * 2, "NHD", batch, backend)


@st.composite
def appends(draw: st.DrawFn) -> dict[str, object]:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]))
    pool = draw(st.sampled_from(sorted(POOLS)))
    x = 16 // dtype.itemsize if pool in SHUFFLED else 1
    N = x * draw(st.integers(1, 20 // x))
    lens = draw(st.lists(st.integers(0, 3 * N + 1), max_size=5))
    new = [draw(st.integers(0, length)) for length in lens]
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    padding, seed = draw(st.integers(0, 3)), draw(st.integers(0, 99))
    batch = make_batch(lens, new, N, padding=padding, seed=seed, index_dtype=index_dtype)
    geometry = {"N": N, "H": draw(st.integers(1, 4)), "D": x * draw(st.integers(1, 20 // x))}
    return {"pool": pool, "dtype": dtype, "batch": batch, "backend": draw(st.sampled_from(BACKENDS)), **geometry}


@given(appends())
@settings(deadline=None, max_examples=80)
def test_any_ragged_batch(call: dict[str, object]) -> None:
    check(**call)  # type: ignore[arg-type]


def sparse_pools(page_bytes: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of two pools that reach past `page`; the kernel gives memory only for the pages that are touched."""
    buffer = torch.empty(2 * (page + 1) * page_bytes, dtype=torch.uint8)
    first, second = buffer.chunk(2)
    return first, second


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("page_bytes", "page", "kv_layout"),
    [(1024, 4_300_000, "NHD"), (1 << 20, 3000, "HND"), (1 << 20, 2100, "SHUFFLED"), (1 << 20, 4200, "SHUFFLED")],
)
def test_offsets_past_32_bits(page_bytes: int, page: int, kv_layout: str, backend: str) -> None:
    """ROCm/aiter#2893: page id times stride beyond 2^31 and 2^32 bytes, at a large id and at a large stride."""
    H, D, N = 8, 64, 1 if kv_layout == "NHD" else 8
    shapes = {"NHD": ((N, H, D),) * 2, "HND": ((H, N, D),) * 2, "SHUFFLED": ((H, D // 8, N, 8), (H, N // 8, D, 8))}
    planes = []
    for raw, shape in zip(sparse_pools(page_bytes, page), shapes[kv_layout], strict=True):
        strides = list(torch.empty(shape, device="meta").stride())
        planes.append(raw.view(torch.bfloat16).as_strided((page + 1, *shape), (page_bytes // 2, *strides)))
    cache = tuple(planes)
    assert page_size_of(cache, kv_layout) == N
    # Where an address that lost its upper bits would land.
    wrapped = [page * page_bytes % (1 << width) // page_bytes for width in (31, 32)]
    strays = [(plane, p, plane[p : p + 2].clone()) for plane in planes for p in wrapped if p != page]
    key, value = (random_bits((1, H, D), torch.bfloat16, seed=s) for s in (1, 2))
    indices = torch.tensor([page], dtype=torch.int32)
    batch = Batch(indices * 0, indices * 0 + N - 1, indices, torch.tensor([0, 1]), indices, num_pages=page + 1)
    run(key, value, cache, kv_layout, batch, backend)  # type: ignore[arg-type]
    twin = tuple(torch.zeros(1, *shape, dtype=torch.bfloat16) for shape in shapes[kv_layout])
    append_by_loop(key, value, [0], [N - 1], twin, [0], [0, 1], kv_layout)  # type: ignore[arg-type]
    for got, want in zip(planes_of(cache, kv_layout), planes_of(twin, kv_layout), strict=True):  # type: ignore[arg-type]
        written = bits(want) != 0
        assert_equal_bits(bits(got[page : page + 1])[written], bits(want)[written])
    for plane, p, before in strays:
        assert_equal_bits(plane[p : p + 2], before)
