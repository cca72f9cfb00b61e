# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Merging attention states in plain torch, in float32 at least."""

from __future__ import annotations

import math

import torch


def why_not_merge_state(*args: object) -> str | None:
    return None


def why_not_merge_state_in_place(*args: object) -> str | None:
    return None


def why_not_merge_states(*args: object) -> str | None:
    return None


def _merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`v [tokens, states, heads, dim]`, `s [tokens, states, heads]` to one state."""
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    # A state of +inf is one that some kernels write for "no keys".
    s = s.to(work).masked_fill(s == math.inf, -math.inf)
    top = s.amax(1, keepdim=True) if s.size(1) else s.new_full((s.size(0), 1, s.size(2)), -math.inf)
    weights = torch.exp2(s - top.masked_fill(top == -math.inf, 0))
    total = weights.sum(1)
    # A state of no weight may hold anything, NaN included.
    parts = torch.where(weights.unsqueeze(-1) > 0, v.to(work), 0) * weights.unsqueeze(-1)
    out = parts.sum(1) / total.masked_fill(total == 0, 1).unsqueeze(-1)
    return out, top.squeeze(1) + total.log2()


def merge_state(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    out: torch.Tensor,
    s_out: torch.Tensor,
) -> None:
    v, s = _merged(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    out.copy_(v)
    s_out.copy_(s)


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> None:
    merged, lse = _merged(torch.stack([v, v_other], 1), torch.stack([s, s_other], 1))
    if mask is not None:
        rows = mask.bool().unsqueeze(1)
        merged, lse = torch.where(rows.unsqueeze(2), merged, v), torch.where(rows, lse, s)
    v.copy_(merged)
    s.copy_(lse)


def merge_states(v: torch.Tensor, s: torch.Tensor, out: torch.Tensor, s_out: torch.Tensor) -> None:
    merged, lse = _merged(v, s)
    out.copy_(merged)
    s_out.copy_(lse)
