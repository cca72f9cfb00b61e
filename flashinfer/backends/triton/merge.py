# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Merging of attention states in Triton, read once and written once."""

from __future__ import annotations

import torch

from flashinfer.backends.triton import device
from flashinfer.backends.triton.launch import launch

WARPS = 4


def _why_not(v: torch.Tensor) -> str | None:
    if reason := device.why_not(v.device):
        return reason
    if v.dtype == torch.float64:
        return f"needs v in float32, float16 or bfloat16, got {v.dtype}"
    return None


def why_not_merge_state(v_a: torch.Tensor, *args: object) -> str | None:
    return _why_not(v_a)


def why_not_merge_state_in_place(v: torch.Tensor, *args: object) -> str | None:
    return _why_not(v)


def why_not_merge_states(v: torch.Tensor, *args: object) -> str | None:
    return _why_not(v)


def _step(dim: int) -> int:
    """Rows of a program: about 16 elements of each state for a thread."""
    return max(1, 2048 // device.power_of_2(dim))


def _two(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    to: tuple[torch.Tensor, torch.Tensor],
) -> None:
    from flashinfer.backends.triton.kernels import merge as kernels

    (v_a, s_a), (v_b, s_b), (out, s_out) = a, b, to
    tokens, heads, dim = v_a.shape
    if v_a.numel() == 0:
        return
    step = _step(dim)
    values = [stride for t in (v_a, v_b, out) for stride in t.stride()[:2]]
    sums = [stride for t in (s_a, s_b, s_out) for stride in t.stride()]
    # Triton knows no bool in memory; a byte is one.
    bytes_ = s_a if mask is None else mask.view(torch.uint8)
    grid, tensors = (-(-tokens * heads // step),), (v_a, s_a, v_b, s_b, bytes_, out, s_out)
    sizes = tokens, heads, 0 if mask is None else mask.stride(0)
    constants = dim, device.power_of_2(dim), step, mask is not None
    launch(kernels.merge_two, grid, tensors, (*values, *sums), sizes, constants, WARPS, 1)


def merge_state(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    out: torch.Tensor,
    s_out: torch.Tensor,
) -> None:
    _two((v_a, s_a), (v_b, s_b), None, (out, s_out))


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> None:
    _two((v, s), (v_other, s_other), mask, (v, s))


def merge_states(v: torch.Tensor, s: torch.Tensor, out: torch.Tensor, s_out: torch.Tensor) -> None:
    from flashinfer.backends.triton.kernels import merge as kernels

    tokens, states, heads, dim = v.shape
    if out.numel() == 0:
        return
    step = _step(dim)
    strides = *v.stride()[:3], *s.stride(), *out.stride()[:2], *s_out.stride()
    grid, constants = (-(-tokens * heads // step),), (dim, device.power_of_2(dim), step)
    launch(kernels.merge_many, grid, (v, s, out, s_out), strides, (tokens, heads, states), constants, WARPS, 1)
