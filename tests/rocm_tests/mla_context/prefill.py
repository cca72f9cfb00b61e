# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A prefill with context, and its answer in float64, query by query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flashinfer.mla_context import MlaContextAttention, MlaShape
from flashinfer.testing.compare import assert_close
from flashinfer.testing.tolerances import Tolerance
from rocm_tests.mla_context.case import Case

LSE = Tolerance(2e-2, 2e-2, "of scores from 16-bit keys: each is off by about 2^-8 of its size")


class Prefill:
    """`q_lens` new tokens for each of the contexts `lens`; further arguments are those of `Case`."""

    def __init__(self, q_lens: Sequence[int], lens: Sequence[int], seed: int = 0, **arguments: Any) -> None:
        self.case = case = Case(lens, seed=seed, **arguments)
        rng = torch.Generator().manual_seed(seed + 1)
        self.shape = MlaShape(case.heads, case.rank, case.nope, case.rope, case.v_dim)
        self.q_lens, self.lens = tuple(q_lens), tuple(lens)
        self.qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).int()
        total, width = sum(q_lens), case.nope + case.rope
        self.q, self.k, self.v = (
            torch.randn(total, case.heads, dim, generator=rng).to(case.device, case.dtype)
            for dim in (width, width, case.v_dim)
        )
        # Without gaps between pages; what belongs to nobody is NaN as before.
        self.cache = case.cache.clone()

    def attention(self, chunk_tokens: int, way: str, **options: Any) -> MlaContextAttention:
        """With a workspace of just so many tokens."""
        size = chunk_tokens * self.shape.bytes_per_token(self.case.dtype, fused=way == "fused") + 3 * 256
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=self.case.device)
        return MlaContextAttention(workspace, self.shape, self.case.page_size, way=way, **options)

    @property
    def layer(self) -> dict[str, Any]:
        return {"kv_scale": self.case.kv_scale, "weight_scale": self.case.weight_scale}

    def plan(self, attention: MlaContextAttention, q_data_type: torch.dtype | None = None) -> Any:
        case = self.case
        return attention.plan(
            *(self.qo_indptr, list(self.lens), case.table.block_table, self.cache, case.weight, case.dtype),
            q_data_type,
            **self.layer,
        )

    def run(self, attention: MlaContextAttention, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attention.run(self.q, self.k, self.v, self.cache, self.case.weight, **self.layer, **options)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over context and new tokens as one sequence, in float64."""
        case = self.case
        context_k, context_v = case.expected()
        q, k, v = (t.cpu().double() for t in (self.q, self.k, self.v))
        out, lse = torch.zeros_like(v), torch.full(v.shape[:2], -math.inf, dtype=torch.float64)
        scale = (case.nope + case.rope) ** -0.5
        row = token = 0
        for q_len, length in zip(self.q_lens, self.lens, strict=True):
            for i in range(q_len):
                keys = torch.cat([context_k[token : token + length], k[row : row + i + 1]])
                values = torch.cat([context_v[token : token + length], v[row : row + i + 1]])
                scores = torch.einsum("hd,khd->hk", q[row + i], keys) * scale
                lse[row + i] = scores.logsumexp(-1) / math.log(2)
                out[row + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
            row, token = row + q_len, token + length
        return out, lse

    def compare(self, results: tuple[torch.Tensor, torch.Tensor]) -> None:
        for got, want, tolerance, name in zip(results, self.expected(), (None, LSE), ("out", "lse"), strict=True):
            assert_close(got, want, tolerance=tolerance, name=name)
