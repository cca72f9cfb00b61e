# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What an append must do, written as loops, and pools of every shape and stride to do it in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import GuardedPool, ragged_page_table, random_bits

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# (pages, page_size, heads, head_dim, dtype, device) -> (cache, kv_layout)
Builder = Callable[..., tuple[Cache, str]]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(BITS[t.element_size()])


def memory(cache: Cache) -> list[torch.Tensor]:
    """Every byte behind a cache, those between and around its pages included."""
    planes = (cache,) if isinstance(cache, torch.Tensor) else cache
    storages = {p.untyped_storage().data_ptr(): p for p in planes}
    return [torch.empty(0, dtype=torch.uint8, device=p.device).set_(p.untyped_storage()) for p in storages.values()]


def assert_same_memory(actual: Cache, expected: Cache) -> None:
    for i, (got, want) in enumerate(zip(memory(actual), memory(expected), strict=True)):
        assert_equal_bits(got, want, name=f"memory {i} of the pool")


def planes_of(cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache
    if k.dim() == 3:
        axis = {"NHD": 1, "HND": 2}[kv_layout]
        k, v = k.unsqueeze(axis), v.unsqueeze(axis)
    return k, v


def page_size_of(cache: Cache, kv_layout: str) -> int:
    return planes_of(cache, kv_layout)[0].size({"NHD": 1, "HND": 2, "SHUFFLED": 3}[kv_layout])


def append_by_loop(
    key: torch.Tensor,
    value: torch.Tensor,
    batch_indices: Sequence[int],
    positions: Sequence[int],
    cache: Cache,
    kv_indices: Sequence[int],
    kv_indptr: Sequence[int],
    kv_layout: str,
) -> None:
    """One row, one head after the other."""
    k, v = (bits(t) for t in planes_of(cache, kv_layout))
    N, x, d = page_size_of(cache, kv_layout), 16 // key.element_size(), torch.arange(key.size(2), device=k.device)
    for i, (b, position) in enumerate(zip(batch_indices, positions, strict=True)):
        if b < 0:
            continue
        page, n = kv_indices[kv_indptr[b] + position // N], position % N
        for h in range(key.size(1)):
            if kv_layout == "NHD":
                k_at, v_at = (page, n, h, d), (page, n, h, d)
            elif kv_layout == "HND":
                k_at, v_at = (page, h, n, d), (page, h, n, d)
            else:
                k_at, v_at = (page, h, d // x, n, d % x), (page, h, n // x, d, n % x)
            k[k_at] = bits(key[i, h])
            v[v_at] = bits(value[i, h])


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of an append with their metadata, and the metadata as lists for the loop."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    num_pages: int

    @property
    def nnz(self) -> int:
        return self.batch_indices.numel()

    @property
    def lists(self) -> dict[str, list[int]]:
        names = ("batch_indices", "positions", "kv_indices", "kv_indptr")
        return {name: getattr(self, name).tolist() for name in names}


def make_batch(
    seq_lens: Sequence[int],
    appended: Sequence[int],
    page_size: int,
    *,
    padding: int = 0,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
) -> Batch:
    """The last `appended[b]` tokens of each request in no order, among `padding` rows that must be skipped."""
    table = ragged_page_table(seq_lens, page_size, seed=seed, index_dtype=index_dtype, device=device)
    rows = [
        (b, position)
        for b, (length, new) in enumerate(zip(seq_lens, appended, strict=True))
        for position in range(length - new, length)
    ]
    rows += [(-1 - i, 10**6 * i) for i in range(padding)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    columns = torch.tensor([rows[i] for i in order], dtype=index_dtype, device=device).reshape(-1, 2)
    return Batch(
        batch_indices=columns[:, 0].contiguous(),
        positions=columns[:, 1].contiguous(),
        kv_indices=table.indices,
        kv_indptr=table.indptr,
        last_page_len=table.last_page_len,
        num_pages=table.num_pages,
    )


def random_on(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return random_bits(shape, dtype, seed=seed).to(device)


def _tuple_nhd(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    return (random_on((P, N, H, D), dtype, device, 1), random_on((P, N, H, D), dtype, device, 2)), "NHD"


def _tuple_hnd(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    return (random_on((P, H, N, D), dtype, device, 1), random_on((P, H, N, D), dtype, device, 2)), "HND"


def _single_nhd(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    return random_on((P, 2, N, H, D), dtype, device, 3), "NHD"


def _single_hnd(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    return random_on((P, 2, H, N, D), dtype, device, 4), "HND"


def _permuted(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    """Heads outside tokens in memory, handed in as NHD."""
    buffer = random_on((P, 2, H, N, D), dtype, device, 5)
    return (buffer[:, 0].permute(0, 2, 1, 3), buffer[:, 1].permute(0, 2, 1, 3)), "NHD"


def _every_other_page(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    return random_on((2 * P, 2, H, N, D), dtype, device, 6)[::2], "HND"


def _interleaved(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    buffer = random_on((P, N, H, 2 * D), dtype, device, 7)
    return (buffer[..., :D], buffer[..., D:]), "NHD"


def _standard(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    """The page format `standard` through the HND writer."""
    buffer = random_on((P, H, N, 2 * D), dtype, device, 8)
    return (buffer[..., :D], buffer[..., D:]), "HND"


def _unlike_strides(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    """K dense; V in a buffer with heads outside tokens, gaps between pages and rows."""
    v = random_on((P, H + 1, N, D + 16), dtype, device, 10)[:, 1:, :, 8 : D + 8].permute(0, 2, 1, 3)
    return (random_on((P, N, H, D), dtype, device, 9), v), "NHD"


def _guarded(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    """Poisoned pages with guards before, between and after."""
    return GuardedPool(P, (H, N, D), dtype, planes=2, gap_bytes=48, device=device).planes, "HND"


def _shuffled_shapes(N: int, H: int, D: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    x = 16 // dtype.itemsize
    return (H, D // x, N, x), (H, N // x, D, x)


def _shuffled(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    k, v = _shuffled_shapes(N, H, D, dtype)
    return (random_on((P, *k), dtype, device, 11), random_on((P, *v), dtype, device, 12)), "SHUFFLED"


def _shuffled_guarded(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    """K and V planes in turn, 512 guard bytes after each: a page stride that is no page (vllm-project/vllm#39192)."""
    k, v = _shuffled_shapes(N, H, D, dtype)
    first, second = GuardedPool(P, (H * N * D,), dtype, planes=2, gap_bytes=512, device=device).planes
    return (first.unflatten(1, k), second.unflatten(1, v)), "SHUFFLED"


def _shuffled_heads_first(P: int, N: int, H: int, D: int, dtype: torch.dtype, device: str) -> tuple[Cache, str]:
    (h, *k), (_, *v) = _shuffled_shapes(N, H, D, dtype)
    planes = (random_on((h, P, *shape), dtype, device, 13).transpose(0, 1) for shape in (k, v))
    return tuple(planes), "SHUFFLED"  # type: ignore[return-value]


STRIDED: dict[str, Builder] = {
    "tuple NHD": _tuple_nhd,
    "tuple HND": _tuple_hnd,
    "single NHD": _single_nhd,
    "single HND": _single_hnd,
    "permuted": _permuted,
    "every other page": _every_other_page,
    "interleaved": _interleaved,
    "standard": _standard,
    "unlike strides": _unlike_strides,
    "guarded": _guarded,
}
SHUFFLED: dict[str, Builder] = {
    "shuffled": _shuffled,
    "shuffled guarded": _shuffled_guarded,
    "shuffled heads first": _shuffled_heads_first,
}
POOLS = {**STRIDED, **SHUFFLED}
