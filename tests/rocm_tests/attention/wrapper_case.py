# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A batch for the attention wrappers: a poisoned pool, the same tokens as ragged tensors, and its answer in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import flashinfer
from flashinfer.testing.compare import assert_close
from flashinfer.testing.generators import GuardedPool, PageTable, ragged_page_table
from flashinfer.testing.tolerances import Tolerance

NAN = float("nan")
LSE = Tolerance(1e-4, 1e-4, "scores are float32 sums of products of 16-bit values, exact to about 1e-5 of their size")
WORKSPACE = 16 << 20


def visible(q_len: int, kv_len: int, causal: bool, window_left: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Which keys each query sees, bool `[q_len, kv_len]`; a mask takes the place of `causal`."""
    last = torch.arange(q_len).unsqueeze(1) + (kv_len - q_len)
    key = torch.arange(kv_len).unsqueeze(0)
    sees = (
        mask.clone() if mask is not None else (key <= last if causal else torch.ones(q_len, kv_len, dtype=torch.bool))
    )
    if window_left >= 0:
        sees &= key >= last - window_left
    return sees


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees: torch.Tensor,
    sm_scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64, row by row: `q [q_len, Hq, D]`, `k [kv_len, H, D]`, `v [kv_len, H, Dv]`."""
    (q_len, Hq, _), H = q.shape, k.size(1)
    out = torch.zeros(q_len, Hq, v.size(2), dtype=torch.float64)
    lse = torch.full((q_len, Hq), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        for h in range(Hq):
            keys, values = (t[sees[i], h // (Hq // H)].double() for t in (k, v))
            scores = keys @ q[i, h].double() * sm_scale
            if soft_cap > 0:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = torch.exp2(scores * math.log2(math.e))
            total = weights.sum() + (0.0 if sinks is None else math.exp(float(sinks[h])))
            if float(total):
                out[i, h] = weights @ values / total
                lse[i, h] = total.log2()
    return out, lse


class Case:
    """A batch in a pool of the layout whose unused tokens are NaN.

    `keys` and `values` of each request, and `k`, `v` of the whole batch, are what was stored, before any scale.
    """

    def __init__(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        kv_layout: str = "NHD",
        page_size: int = 4,
        heads: tuple[int, int] = (4, 2),
        D: int = 32,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype = torch.int32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.q_lens, self.kv_lens, self.page_size = tuple(q_lens), tuple(kv_lens), page_size
        self.dtype, self.kv_dtype, self.device = dtype, kv_dtype or dtype, device
        self.kv_layout, self.heads, self.D = kv_layout, heads, D
        (Hq, H), N = heads, page_size
        self.table: PageTable = ragged_page_table(kv_lens, N, seed=seed, index_dtype=index_dtype, device=device)
        self.qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).to(device, index_dtype)
        self.kv_indptr = torch.tensor([0, *kv_lens]).cumsum(0).to(device, index_dtype)
        self.q = torch.randn(sum(q_lens), Hq, D, generator=rng).to(device, dtype)
        self.k, self.v = (torch.randn(sum(kv_lens), H, D, generator=rng).to(self.kv_dtype).to(device) for _ in "kv")
        self.cache = self._pool(H)
        self._store(H)

    def _pool(self, H: int) -> tuple[torch.Tensor, torch.Tensor]:
        P, N, D, x = self.table.num_pages, self.page_size, self.D, 16 // self.kv_dtype.itemsize
        if self.kv_layout == "SHUFFLED":
            k, v = GuardedPool(P, (H * N * D,), self.kv_dtype, planes=2, gap_bytes=512, device=self.device).planes
            return k.unflatten(1, (H, D // x, N, x)), v.unflatten(1, (H, N // x, D, x))
        shape = (N, H, D) if self.kv_layout == "NHD" else (H, N, D)
        k, v = GuardedPool(P, shape, self.kv_dtype, planes=2, device=self.device).planes
        return k, v

    def _store(self, H: int) -> None:
        N, D, x = self.page_size, self.D, 16 // self.kv_dtype.itemsize
        starts = self.kv_indptr.tolist()
        for b, length in enumerate(self.kv_lens):
            pages = self.table.pages_of(b)
            for position in range(length):
                page, n, row = pages[position // N], position % N, starts[b] + position
                for cache, rows in zip(self.cache, (self.k, self.v), strict=True):
                    if self.kv_layout == "NHD":
                        cache[page, n] = rows[row]
                    elif self.kv_layout == "HND":
                        cache[page, :, n] = rows[row]
                    elif cache is self.cache[0]:
                        cache[page, :, :, n] = rows[row].view(H, D // x, x)
                    else:
                        cache[page, :, n // x, :, n % x] = rows[row]

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What decode plans begin with."""
        return self.table.indptr, self.table.indices, self.table.last_page_len

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What follows."""
        return (*self.heads, self.D, self.page_size)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.dtype, "kv_data_type": self.kv_dtype}

    def masks(self, seed: int = 0) -> list[torch.Tensor]:
        """A random mask for each request; the first row of each sees nothing."""
        rng = torch.Generator().manual_seed(seed)
        masks = [torch.rand(q, k, generator=rng) < 0.6 for q, k in zip(self.q_lens, self.kv_lens, strict=True)]
        for mask in masks:
            mask[:1] = False
        return masks

    def answer(
        self,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        sm_scale: float | None = None,
        masks: Sequence[torch.Tensor] | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.D**-0.5 if sm_scale is None else sm_scale
        rows = self.q.cpu().split(self.q_lens)
        keys, values = (t.cpu().split(self.kv_lens) for t in (self.k, self.v))
        outs, lses = [torch.zeros(0, self.heads[0], self.D)], [torch.zeros(0, self.heads[0])]
        for b, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            sees = visible(q_len, kv_len, causal, window_left, None if masks is None else masks[b])
            k, v = keys[b].double() * k_scale, values[b].double() * v_scale
            out, lse = dense(rows[b], k, v, sees, scale, logits_soft_cap, sinks)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def compare(self, results: Any, **options: Any) -> None:
        """`results` is `(out, lse)`."""
        out, lse = results
        assert out.dtype == self.dtype
        assert lse.dtype == torch.float32
        expected = self.answer(**options)
        assert_close(out, expected[0], name="out")
        assert_close(lse, expected[1], name="lse", tolerance=LSE)

    # The wrappers, without graphs and with.

    def workspace(self) -> torch.Tensor:
        # All bits set are NaN in every float: what a run leaves or finds here must not matter.
        return torch.full((WORKSPACE,), 255, dtype=torch.uint8, device=self.device)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), 2**30, dtype=torch.int32, device=self.device)

    def decode(
        self, *, graph_pages: int | None = None, **options: Any
    ) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
        if graph_pages is not None:
            batch = len(self.kv_lens)
            options.update(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self.buffer(batch + 1),
                paged_kv_indices_buffer=self.buffer(graph_pages),
                paged_kv_last_page_len_buffer=self.buffer(batch),
            )
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace(), self.kv_layout, **options)

    def paged(
        self, *, graph_pages: int | None = None, **options: Any
    ) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
        if graph_pages is not None:
            batch = len(self.kv_lens)
            options.update(
                use_cuda_graph=True,
                qo_indptr_buf=self.buffer(batch + 1),
                paged_kv_indptr_buf=self.buffer(batch + 1),
                paged_kv_indices_buf=self.buffer(graph_pages),
                paged_kv_last_page_len_buf=self.buffer(batch),
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace(), self.kv_layout, **options)

    def ragged(self, *, graph: bool = False, **options: Any) -> flashinfer.BatchPrefillWithRaggedKVCacheWrapper:
        if graph:
            batch = len(self.kv_lens)
            options.update(
                use_cuda_graph=True, qo_indptr_buf=self.buffer(batch + 1), kv_indptr_buf=self.buffer(batch + 1)
            )
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace(), "NHD", **options)

    def plan_decode(self, wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper, **options: Any) -> None:
        wrapper.plan(*self.pages, *self.shape, **{**self.dtypes, **options})

    def plan_paged(self, wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper, **options: Any) -> None:
        wrapper.plan(self.qo_indptr, *self.pages, *self.shape, **{**self.dtypes, **options})

    def plan_ragged(self, wrapper: flashinfer.BatchPrefillWithRaggedKVCacheWrapper, **options: Any) -> None:
        wrapper.plan(self.qo_indptr, self.kv_indptr, *self.heads, self.D, **{**self.dtypes, **options})
