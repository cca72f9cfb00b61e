# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of all phases over pools in which whatever a phase must not read is NaN, and dense attention in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from flashinfer.core.dtypes import FP8
from flashinfer.phases import split_phases
from flashinfer.testing.generators import UNUSED_PAGE_ID

K_SCALE, V_SCALE = 0.25, 0.5


@dataclasses.dataclass(frozen=True)
class Geometry:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    window_left: int = -1
    soft_cap: float = 0.0
    shares_kv: bool = False
    sinks: bool = False
    threshold: int = 1

    @property
    def scales(self) -> tuple[float, float]:
        return (K_SCALE, V_SCALE) if self.kv_dtype in FP8 else (1.0, 1.0)


class Case:
    """Requests are (new tokens, context). The pool holds what each phase may read of it, and NaN."""

    def __init__(self, requests: Sequence[tuple[int, int]], geometry: Geometry, seed: int = 0) -> None:
        self.requests, self.g = list(requests), geometry
        g = geometry
        self.random = torch.Generator().manual_seed(seed)
        self.split = split_phases(
            [new for new, _ in requests], [sum(r) for r in requests], [c for _, c in requests], g.threshold
        )
        total = sum(new for new, _ in requests)
        self.q = self.randn(total, g.heads, g.dim)
        self.k, self.v = self.randn(total, g.kv_heads, g.dim), self.randn(total, g.kv_heads, g.dim)
        self.sinks = torch.randn(g.heads, generator=self.random) if g.sinks else None
        self.stored = [tuple(self.randn(sum(r), g.kv_heads, g.dim).to(g.kv_dtype) for _ in range(2)) for r in requests]
        self._lay_out()

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.g.dtype)

    def phase(self, b: int) -> int:
        """0, 1, 2: decode, extend, prefill."""
        d, e = self.split.num_decodes, self.split.num_decodes + self.split.num_extends
        return 0 if b < d else 1 if b < e else 2

    def reads_pages(self, b: int) -> bool:
        """Whether a request's new tokens come from its pages."""
        phase = self.phase(b)
        return phase == 0 or self.g.shares_kv or (phase == 1 and self.g.window_left >= 0)

    def _lay_out(self) -> None:
        """Page table and pool. Pages that no phase may touch have ids that no pool has."""
        g, N = self.g, self.g.page_size
        counts = [-(-sum(r) // N) for r in self.requests]
        pages = sum(counts) + 3
        order = torch.randperm(pages, generator=self.random).tolist()
        indptr, indices, tails = [0], [], []
        pool = [torch.full((pages, N, g.kv_heads, g.dim), math.nan) for _ in range(2)]
        for b, (new, context) in enumerate(self.requests):
            readable = new + context if self.reads_pages(b) else context
            # A window hides the oldest tokens.
            oldest = max(0, context - g.window_left) if g.window_left >= 0 else 0
            ids = [order.pop() for _ in range(counts[b])]
            for side in range(2):
                for token in range(readable):
                    row = self.stored[b][side][token].float()
                    # Tokens that a window hides are of the sequence: numbers, and wrong ones here.
                    pool[side][ids[token // N], token % N] = row if token >= oldest else torch.full_like(row, 100.0)
            kept = -(-readable // N)
            indices += ids[:kept] + [UNUSED_PAGE_ID] * (len(ids) - kept)
            indptr.append(len(indices))
            length = new + context
            tails.append(length - (counts[b] - 1) * N if counts[b] else 0)
        self.kv_indptr = torch.tensor(indptr, dtype=torch.int32)
        self.kv_indices = torch.tensor([*indices, UNUSED_PAGE_ID], dtype=torch.int32)
        self.last_page_len = torch.tensor(tails, dtype=torch.int32)
        self.qo_indptr = torch.tensor([0, *(new for new, _ in self.requests)], dtype=torch.int32).cumsum(0).int()
        k, v = (plane.to(g.kv_dtype) for plane in pool)
        self.cache = k, v
        if g.layout == "HND":
            # Standard pages: K and V of a token side by side.
            both = torch.cat([t.float().permute(0, 2, 1, 3) for t in (k, v)], dim=3).to(g.kv_dtype)
            self.cache = both[..., : g.dim], both[..., g.dim :]
        elif g.layout == "SHUFFLED":
            x, raw = 16 // g.kv_dtype.itemsize, {1: torch.uint8, 2: torch.int16, 4: torch.int32}[g.kv_dtype.itemsize]
            k_page = k.view(raw).permute(0, 2, 3, 1).unflatten(2, (g.dim // x, x)).transpose(3, 4)
            v_page = v.view(raw).permute(0, 2, 1, 3).unflatten(2, (N // x, x)).transpose(3, 4)
            # Not `contiguous`, which keeps odd strides of axes of length 1.
            k_page, v_page = (torch.empty(t.shape, dtype=raw).copy_(t) for t in (k_page, v_page))
            self.cache = k_page.view(g.kv_dtype), v_page.view(g.kv_dtype)

    def plan_arguments(self) -> tuple[Any, ...]:
        g = self.g
        table = self.qo_indptr, self.kv_indptr, self.kv_indices, self.last_page_len
        return (*table, g.heads, g.kv_heads, g.dim, g.page_size)

    def plan_options(self) -> dict[str, Any]:
        g = self.g
        return {
            "decode_threshold": g.threshold,
            "window_left": g.window_left,
            "logits_soft_cap": g.soft_cap,
            "q_data_type": g.dtype,
            "kv_data_type": g.kv_dtype,
        }

    def run_arguments(self, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        fresh = (None, None) if self.g.shares_kv else (self.k.to(device), self.v.to(device))
        options: dict[str, Any] = dict(zip(("k_scale", "v_scale"), self.g.scales, strict=True))
        if self.sinks is not None:
            options["sinks"] = self.sinks.to(device)
        return (self.q.to(device), *fresh, on(self.cache, device)), options

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense attention in float64, one request, one query after the other."""
        g, rows = self.g, self.qo_indptr.tolist()
        out = torch.zeros(rows[-1], g.heads, g.dim, dtype=torch.float64)
        lse = torch.full((rows[-1], g.heads), -math.inf, dtype=torch.float64)
        for b, (new, context) in enumerate(self.requests):
            k, v = (t.double() * scale for t, scale in zip(self.stored[b], g.scales, strict=True))
            if not self.reads_pages(b):
                k, v = (torch.cat([old[:context], t[rows[b] : rows[b + 1]].double()]) for old, t in
                        ((k, self.k), (v, self.v)))  # fmt: skip
            for i in range(new):
                place = context + i
                oldest = max(0, place - g.window_left) if g.window_left >= 0 else 0
                keys, values = (t[oldest : place + 1].repeat_interleave(g.heads // g.kv_heads, dim=1) for t in (k, v))
                scores = torch.einsum("hd,nhd->hn", self.q[rows[b] + i].double(), keys) * g.dim**-0.5
                if g.soft_cap:
                    scores = g.soft_cap * torch.tanh(scores / g.soft_cap)
                weights = scores.exp()
                total = weights.sum(1)
                if self.sinks is not None:
                    total = total + self.sinks.double().exp()
                out[rows[b] + i] = torch.einsum("hn,nhd->hd", weights, values) / total[:, None]
                lse[rows[b] + i] = total.log2()
        return out, lse


def on(tensors: tuple[torch.Tensor, torch.Tensor], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on a device, with their strides, as views of one memory if they were."""
    if device == "cpu":
        return tensors
    memories: dict[int, torch.Tensor] = {}
    found = []
    for t in tensors:
        raw = t.untyped_storage()
        whole = memories.setdefault(raw.data_ptr(), torch.empty(0, dtype=t.dtype).set_(raw).to(device))
        found.append(whole.as_strided(t.shape, t.stride(), t.storage_offset()))
    return found[0], found[1]
