# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA context in a poisoned pool, and its keys and values in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flashinfer
from flashinfer.testing.compare import assert_close
from flashinfer.testing.generators import PageTable, ragged_page_table

NAN = float("nan")
FULL = {"rank": 512, "nope": 128, "rope": 64, "v_dim": 128}
DIMS = {"rank": 128, "nope": 32, "rope": 16, "v_dim": 32}
SCALE_BLOCK = 128


class Case:
    """Contexts of `lens` tokens and a weight.

    Rows of the pool that no context owns are NaN, pages and rows of the weight have NaN between them, and page ids
    behind the table's end are out of range. `weight_scale` is "none", "row" or "block"; the last two have FP8 weights.
    `flat` hands one tensor for both indptrs.
    """

    def __init__(
        self,
        lens: Sequence[int],
        *,
        heads: int = 3,
        page_size: int = 4,
        rank: int = 128,
        nope: int = 32,
        rope: int = 16,
        v_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        weight_scale: str = "none",
        fp8: torch.dtype = torch.float8_e4m3fn,
        index_dtype: torch.dtype = torch.int32,
        flat: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.lens, self.page_size, self.dtype, self.device = tuple(lens), page_size, dtype, device
        self.heads, self.rank, self.nope, self.rope, self.v_dim = heads, rank, nope, rope, v_dim
        self.table: PageTable = ragged_page_table(lens, page_size, seed=seed, index_dtype=index_dtype, device=device)
        self.prefix = self.table.indptr if flat else _prefix(lens).to(device, index_dtype)
        self.kv_scale = None if kv_dtype in (None, dtype) else torch.tensor([0.5], device=device)
        width = rank + rope
        pool = torch.full((self.table.num_pages, page_size + 1, width), NAN, device=device).to(kv_dtype or dtype)
        self.cache = pool[:, :page_size]
        self.rows = [torch.randn(n, width, generator=rng).to(pool.dtype) for n in lens]
        for b, values in enumerate(self.rows):
            for t, row in enumerate(values):
                self.cache[self.table.pages_of(b)[t // page_size], t % page_size] = row.to(device)
        self._make_weight(weight_scale, fp8, rng)

    def _make_weight(self, mode: str, fp8: torch.dtype, rng: torch.Generator) -> None:
        shape = self.heads * (self.nope + self.v_dim), self.rank
        values = torch.randn(*shape, generator=rng) / self.rank**0.5
        self.weight_scale = None
        if mode != "none":
            blocks = tuple(-(-n // SCALE_BLOCK) for n in shape)
            size = (shape[0],) if mode == "row" else blocks
            # Far enough apart that a scale of the wrong row or block is seen.
            scale = torch.rand(size, generator=rng) + 0.25
            self.weight_scale = scale.to(self.device)
        stored = values.to(self.dtype if mode == "none" else fp8)
        buffer = torch.full((shape[0], shape[1] + 16), NAN, device=self.device).to(stored.dtype)
        self.weight = buffer[:, :-16]
        self.weight.copy_(stored.to(self.device))
        self.exact_weight = stored.double()
        if mode == "row":
            self.exact_weight *= scale.double()[:, None]
        elif mode == "block":
            n, k = (torch.arange(size) // SCALE_BLOCK for size in shape)
            self.exact_weight *= scale.double()[n[:, None], k[None, :]]

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    def expected(self, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, by the formula."""
        weight = self.exact_weight if weight is None else weight
        scale = 1.0 if self.kv_scale is None else self.kv_scale.item()
        rows = torch.cat([torch.zeros(0, self.rank + self.rope), *(r.float() for r in self.rows)]).double() * scale
        latent, rope = rows[:, : self.rank], rows[:, self.rank :]
        k = torch.empty(len(rows), self.heads, self.nope + self.rope, dtype=torch.float64)
        v = torch.empty(len(rows), self.heads, self.v_dim, dtype=torch.float64)
        for h in range(self.heads):
            first = h * (self.nope + self.v_dim)
            k[:, h, : self.nope] = latent @ weight[first : first + self.nope].T
            k[:, h, self.nope :] = rope
            v[:, h] = latent @ weight[first + self.nope : first + self.nope + self.v_dim].T
        return k, v

    def results(self, spare: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Slices of poisoned buffers to write into, `spare` rows longer than the contexts."""
        shape = self.tokens + spare, self.heads + 1
        k, v = (
            torch.full((*shape, dim + 8), NAN, dtype=self.dtype, device=self.device)
            for dim in (self.nope + self.rope, self.v_dim)
        )
        return k[:, :-1, :-8], v[:, :-1, :-8]

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        table = self.table
        return (*(self.cache, self.kv_scale, table.indptr, table.indices, self.prefix, self.weight, self.weight_scale),)

    def check(self, backend: str, spare: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Run, compare, and see that nothing beside the results was written."""
        results = self.results(spare)
        flashinfer.gather_kv_b_proj(*self.arguments, *results, backend=backend)  # type: ignore[arg-type]
        for got, want, name in zip(results, self.expected(), ("k_out", "v_out"), strict=True):
            assert_close(got[: self.tokens], want, name=name)
            base = got._base
            assert base is not None
            assert bool(base[:, -1].isnan().all()), f"{name}: written behind the last head"
            assert bool(base[..., -8:].isnan().all()), f"{name}: written behind a row"
        return results


def _prefix(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0)
