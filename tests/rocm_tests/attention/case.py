# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A batch of attention with every option, in poisoned memory, and its answer in float64, query by query."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

import flashinfer
from flashinfer.testing.compare import assert_close
from flashinfer.testing.generators import GuardedPool, PageTable, ragged_page_table
from flashinfer.testing.tolerances import Tolerance, tolerance_of

NAN = float("nan")
LSE = Tolerance(1e-4, 1e-4, "scores are float32 sums of hundreds of products, exact to about 1e-5 of their size")


@dataclasses.dataclass(frozen=True)
class Options:
    """Of the call; `mask` asks for a random mask with rows and whole requests hidden."""

    causal: bool = True
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: bool = False
    mask: bool = False


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    scale: float,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64: `q [q_len, Hq, D]`, `k [kv_len, H, D]`, `v [kv_len, H, E]`, `mask [q_len, kv_len]`."""
    (q_len, Hq, _), (kv_len, H), E = q.shape, k.shape[:2], v.size(2)
    q, k, v = q.double(), k.double() * options.k_scale, v.double() * options.v_scale
    out, lse = torch.zeros(q_len, Hq, E, dtype=torch.float64), torch.full((q_len, Hq), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        place = kv_len - q_len + i
        seen = [
            j
            for j in range(kv_len)
            if (bool(mask[i, j]) if mask is not None else not options.causal or j <= place)
            and (options.window_left < 0 or place - j <= options.window_left)
        ]
        for h in range(Hq):
            scores = k[seen, h // (Hq // H)] @ q[i, h] * scale
            if options.logits_soft_cap:
                scores = torch.tanh(scores / options.logits_soft_cap) * options.logits_soft_cap
            weights = scores.exp()
            total = weights.sum() + (sinks[h].double().exp() if sinks is not None else 0.0)
            if float(total):
                out[i, h] = weights @ v[seen, h // (Hq // H)] / total
                lse[i, h] = total.log2()
    return out, lse


def packed(masks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Bits, little-endian, and where each request's bytes begin."""
    data, starts = bytearray(), [0]
    for mask in masks:
        bits = mask.flatten().tolist()
        for first in range(0, len(bits), 8):
            data.append(sum(int(bit) << i for i, bit in enumerate(bits[first : first + 8])))
        starts.append(len(data))
    return torch.tensor(list(data), dtype=torch.uint8), starts


class Case:
    """A batch and its answer; `kv_layout` is one of the caches', "STANDARD", or "RAGGED" for `ragged_attention`."""

    def __init__(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        kv_layout: str = "NHD",
        page_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        D: int = 32,
        E: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype = torch.int32,
        device: str = "cpu",
        seed: int = 0,
        **options: Any,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        (Hq, H), E, kv_dtype = heads, E or D, kv_dtype or dtype
        self.options, self.kv_layout, self.kv_lens, self.device = Options(**options), kv_layout, list(kv_lens), device
        self.table: PageTable = ragged_page_table(kv_lens, page_size, seed=seed, index_dtype=index_dtype, device=device)
        self.qo_indptr = self.indptr(q_lens, index_dtype)
        self.kv_indptr = self.indptr(kv_lens, index_dtype)
        self.q = torch.randn(sum(q_lens), Hq, D, generator=rng).to(device, dtype)
        # Small enough to survive FP8, whatever its flavour.
        self.keys = [torch.randn(n, H, D, generator=rng).to(kv_dtype) for n in kv_lens]
        self.values = [torch.randn(n, H, E, generator=rng).to(kv_dtype) for n in kv_lens]
        self.sinks = torch.randn(Hq, generator=rng).to(device) if self.options.sinks else None
        self.masks: list[torch.Tensor] | None = None
        self.custom_mask = self.mask_indptr = None
        if self.options.mask:
            self.masks = [torch.rand(m, n, generator=rng) < 0.6 for m, n in zip(q_lens, kv_lens, strict=True)]
            for mask in self.masks:
                mask[:1] = False
            bits, starts = packed(self.masks)
            self.custom_mask = bits.to(device)
            self.mask_indptr = torch.tensor(starts, dtype=index_dtype, device=device)
        self.cache = self.ragged() if kv_layout == "RAGGED" else self.pool(page_size, kv_dtype)

    def indptr(self, lens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([0, *lens]).cumsum(0).to(self.device, dtype)

    def ragged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as strided halves of one poisoned buffer."""
        k, v = torch.cat(self.keys or [torch.empty(0, 1, 1)]), torch.cat(self.values or [torch.empty(0, 1, 1)])
        buffer = torch.full((k.size(0), k.size(1), k.size(2) + v.size(2) + 16), NAN, dtype=torch.float32)
        found = buffer.to(self.device, k.dtype)
        views = found[..., : k.size(2)], found[..., k.size(2) : k.size(2) + v.size(2)]
        for view, t in zip(views, (k, v), strict=True):
            bits(view).copy_(bits(t))
        return views

    def pool(self, N: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        x, P, H = 16 // dtype.itemsize, self.table.num_pages, self.keys[0].size(1) if self.keys else 2
        D, E = (t[0].size(2) if t else 32 for t in (self.keys, self.values))
        shapes = {
            "NHD": ((N, H, D), (N, H, E)),
            "HND": ((H, N, D), (H, N, E)),
            "SHUFFLED": ((H, D // x, N, x), (H, N // x, E, x)),
        }
        if self.kv_layout == "STANDARD":
            fused = torch.full((P, H, N, D + E), NAN).to(self.device, dtype)
            cache, self.kv_layout = (fused[..., :D], fused[..., D:]), "HND"
        else:
            pools = [GuardedPool(P, s, dtype, gap_bytes=512, device=self.device) for s in shapes[self.kv_layout]]
            cache = pools[0].pages, pools[1].pages
        # FP8 knows neither assignment by index on all devices nor copies between layouts: bytes do.
        k_pages, v_pages = map(bits, cache)
        for b, pairs in enumerate(zip(self.keys, self.values, strict=True)):
            pages = self.table.pages_of(b)
            k, v = (bits(t) for t in pairs)
            for position in range(len(k)):
                page, n = pages[position // N], position % N
                if self.kv_layout == "NHD":
                    k_pages[page, n], v_pages[page, n] = k[position], v[position]
                elif self.kv_layout == "SHUFFLED":
                    k_pages[page, :, :, n] = k[position].view(H, D // x, x)
                    v_pages[page, :, n // x, :, n % x] = v[position]
                else:
                    k_pages[page, :, n], v_pages[page, :, n] = k[position], v[position]
        return cache

    def run(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        options = dataclasses.asdict(self.options)
        for name in ("sinks", "mask"):
            options.pop(name)
        options |= {"sinks": self.sinks, "custom_mask": self.custom_mask, "mask_indptr": self.mask_indptr}
        options |= {"return_lse": True, **changes}
        if self.kv_layout == "RAGGED":
            return flashinfer.ragged_attention(self.q, *self.cache, self.qo_indptr, self.kv_indptr, **options)
        table = (self.table.indptr, self.table.indices, self.table.last_page_len)
        return flashinfer.paged_attention(self.q, self.cache, self.qo_indptr, *table, self.kv_layout, **options)

    def answer(self) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.options.sm_scale
        scale = self.q.size(-1) ** -0.5 if scale is None else scale
        sinks = None if self.sinks is None else self.sinks.cpu()
        rows = self.q.cpu().split(self.qo_indptr.diff().tolist())
        masks = self.masks or [None] * len(rows)
        parts = [
            dense(q, k, v, self.options, scale, sinks, mask)
            for q, k, v, mask in zip(rows, self.keys, self.values, masks, strict=True)
        ]
        if not parts:
            return self.q.double(), self.q[..., 0].double()
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def compare(self, results: tuple[torch.Tensor, torch.Tensor]) -> None:
        out, lse = results
        assert out.dtype == self.q.dtype
        assert lse.dtype == torch.float32
        expected = self.answer()
        tolerance = tolerance_of(out.dtype)
        scaled = Tolerance(tolerance.rtol, tolerance.atol * self.options.v_scale, tolerance.reason)
        assert_close(out, expected[0], name="out", tolerance=scaled)
        assert_close(lse, expected[1], name="lse", tolerance=LSE)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Bytes of FP8, else the tensor."""
    return t.view(torch.uint8) if t.element_size() == 1 else t
