# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA batch in a poisoned pool, and its answer in float64, key by key."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

import flashinfer
from flashinfer.testing.compare import assert_close
from flashinfer.testing.generators import PageTable, ragged_page_table
from flashinfer.testing.tolerances import Tolerance

NAN = float("nan")
SCALE = 192**-0.5
LSE = Tolerance(1e-4, 1e-4, "scores are float32 sums of hundreds of products, exact to about 1e-5 of their size")


def dense(q: torch.Tensor, keys: torch.Tensor, dim: int, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """One request in float64: `q [q_len, H, dim + rope]`, `keys [kv_len, dim + rope]`, whose values are `[:dim]`."""
    (q_len, H, _), kv_len = q.shape, keys.size(0)
    q, keys = q.double(), keys.double()
    out, lse = torch.zeros(q_len, H, dim, dtype=torch.float64), torch.full((q_len, H), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        seen = max(0, min(kv_len, kv_len - q_len + i + 1)) if causal else kv_len
        if seen:
            scores = q[i] @ keys[:seen].T * scale
            lse[i] = scores.logsumexp(-1) / math.log(2)
            out[i] = scores.softmax(-1) @ keys[:seen, :dim]
    return out, lse


class Case:
    """A batch; `layout` is "combined" (two views of one pool) or "separate".

    Rows of the pool that no request owns are NaN, and page ids behind the table's end are out of range.
    """

    def __init__(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        heads: int = 4,
        page_size: int = 4,
        dims: tuple[int, int] = (64, 16),
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype = torch.int32,
        layout: str = "combined",
        causal: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.dims, self.causal, self.heads, self.page_size = dims, causal, heads, page_size
        self.q_lens, self.kv_lens, self.device, self.dtype = tuple(q_lens), tuple(kv_lens), device, dtype
        self.kv_dtype = kv_dtype or dtype
        self.scales = (1.0, 1.0) if kv_dtype in (None, dtype) else (0.5, 0.25)
        self.table: PageTable = ragged_page_table(kv_lens, page_size, seed=seed, index_dtype=index_dtype, device=device)
        self.qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).to(device, index_dtype)
        width = sum(dims)
        self.q = torch.randn(sum(q_lens), heads, width, generator=rng).to(device, dtype)
        self.pool = torch.full((self.table.num_pages, page_size, width), NAN, device=device).to(self.kv_dtype)
        self.keys = []
        for b, length in enumerate(kv_lens):
            rows = torch.randn(length, width, generator=rng).to(self.kv_dtype)
            pages = torch.tensor(self.table.pages_of(b), dtype=torch.long)
            place = torch.arange(length)
            self.pool[pages[place // page_size].to(device), (place % page_size).to(device)] = rows.to(device)
            scale = torch.tensor([self.scales[0]] * dims[0] + [self.scales[1]] * dims[1], dtype=torch.float64)
            self.keys.append(rows.double() * scale)
        split = dims[0]
        caches = self.pool[..., :split], self.pool[..., split:]
        self.caches = caches if layout == "combined" else (caches[0].clone(), caches[1].clone())
        self.queries = self.q[..., :split], self.q[..., split:]

    @property
    def metadata(self) -> tuple[torch.Tensor, ...]:
        return self.qo_indptr, self.table.indptr, self.table.indices, self.table.seq_lens

    def answer(self, scale: float = SCALE) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.q.cpu().split(self.q_lens)
        parts = [dense(q, k, self.dims[0], self.causal, scale) for q, k in zip(rows, self.keys, strict=True)]
        empty = torch.zeros(0, self.heads, self.dims[0]), torch.zeros(0, self.heads)
        return torch.cat([empty[0], *(p[0] for p in parts)]), torch.cat([empty[1], *(p[1] for p in parts)])

    def call(self, backend: str = "auto", **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The functional form."""
        arguments = {"causal": self.causal, "sm_scale": SCALE, "return_lse": True, "backend": backend}
        if self.scales != (1.0, 1.0):
            arguments.update(ckv_scale=self.scales[0], kpe_scale=self.scales[1])
        return flashinfer.mla_paged_attention(*self.queries, *self.caches, *self.metadata, **{**arguments, **options})

    def wrapper(self, backend: str = "auto", workspace: int = 64 << 20) -> flashinfer.BatchMLAPagedAttentionWrapper:
        workspace_buffer = torch.empty(workspace, dtype=torch.uint8, device=self.device)
        return flashinfer.BatchMLAPagedAttentionWrapper(workspace_buffer, backend=backend)

    def plan(self, wrapper: flashinfer.BatchMLAPagedAttentionWrapper, sm_scale: float = SCALE) -> None:
        shape = self.heads, *self.dims, self.page_size
        wrapper.plan(*self.metadata, *shape, self.causal, sm_scale, self.dtype, self.kv_dtype)

    def run(self, wrapper: flashinfer.BatchMLAPagedAttentionWrapper, **options: object) -> tuple[torch.Tensor, ...]:
        if self.scales != (1.0, 1.0):
            options.update(ckv_scale=self.scales[0], kpe_scale=self.scales[1])
        return wrapper.run(*self.queries, *self.caches, **{"return_lse": True, **options})

    def compare(self, results: tuple[torch.Tensor, ...], scale: float = SCALE) -> None:
        out, lse = results
        assert out.dtype == self.dtype
        assert out.shape == self.queries[0].shape
        assert lse.dtype == torch.float32
        expected = self.answer(scale)
        assert_close(out, expected[0], name="out")
        # Scores are sums over hundreds of products of 16-bit values, exact to about 1e-5 of their size.
        assert_close(
            lse, expected[1], name="lse", tolerance=Tolerance(1e-4, 1e-4, "a sum in float32 of 16-bit products")
        )
