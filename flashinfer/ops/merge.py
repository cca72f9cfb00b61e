# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ops that merge attention over parts of the keys, by the parts' log-sum-exp in base 2."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail
from flashinfer.core.op import Op

STATE, IN_PLACE, STATES = "merge_state", "merge_state_in_place", "merge_states"
VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_values(op: str, name: str, v: torch.Tensor, rank: int, shape: str) -> None:
    if v.dim() != rank:
        fail(op, name, shape, describe(v))
    if v.dtype not in VALUE_DTYPES:
        fail(op, name, "a floating-point tensor of 16 bits or more", describe(v))
    if v.size(-1) > 1 and v.stride(-1) != 1:
        fail(op, name, "contiguous in its last dimension", f"stride {v.stride()}", f"pass {name}.contiguous()")


def _check_like(op: str, name: str, t: torch.Tensor, like: torch.Tensor, shape: torch.Size) -> None:
    if t.shape != shape or t.dtype != like.dtype or t.device != like.device:
        word = str(like.dtype).removeprefix("torch.")
        fail(op, name, f"{word}{list(shape)} on {like.device}", describe(t))
    if t.dim() > 2 and t.size(-1) > 1 and t.stride(-1) != 1:
        fail(op, name, "contiguous in its last dimension", f"stride {t.stride()}", f"pass {name}.contiguous()")


def _check_lse(op: str, name: str, s: torch.Tensor, v: torch.Tensor, shape: torch.Size) -> None:
    if s.shape != shape or s.dtype != torch.float32 or s.device != v.device:
        fail(op, name, f"float32{list(shape)} on {v.device}", describe(s))


def _check_merge_state(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    out: torch.Tensor,
    s_out: torch.Tensor,
) -> None:
    _check_values(STATE, "v_a", v_a, 3, "[tokens, heads, head_dim]")
    _check_like(STATE, "v_b", v_b, v_a, v_a.shape)
    _check_like(STATE, "out", out, v_a, v_a.shape)
    for name, s in (("s_a", s_a), ("s_b", s_b), ("s_out", s_out)):
        _check_lse(STATE, name, s, v_a, v_a.shape[:2])


def _check_merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> None:
    _check_values(IN_PLACE, "v", v, 3, "[tokens, heads, head_dim]")
    _check_like(IN_PLACE, "v_other", v_other, v, v.shape)
    for name, t in (("s", s), ("s_other", s_other)):
        _check_lse(IN_PLACE, name, t, v, v.shape[:2])
    if mask is not None and (
        mask.shape != v.shape[:1] or mask.dtype not in (torch.bool, torch.uint8) or mask.device != v.device
    ):
        fail(IN_PLACE, "mask", f"bool or uint8 [{v.size(0)}] on {v.device}", describe(mask))


def _check_merge_states(v: torch.Tensor, s: torch.Tensor, out: torch.Tensor, s_out: torch.Tensor) -> None:
    _check_values(STATES, "v", v, 4, "[tokens, states, heads, head_dim]")
    _check_lse(STATES, "s", s, v, v.shape[:3])
    shape = torch.Size((v.size(0), v.size(2), v.size(3)))
    _check_like(STATES, "out", out, v, shape)
    _check_lse(STATES, "s_out", s_out, v, shape[:2])


merge_state = Op(
    STATE,
    "merge",
    "Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor(a!) out, Tensor(b!) s_out -> ()",
    check=_check_merge_state,
    backends=("triton", "reference"),
)

merge_state_in_place = Op(
    IN_PLACE,
    "merge",
    "Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask -> ()",
    check=_check_merge_state_in_place,
    backends=("triton", "reference"),
)

merge_states = Op(
    STATES,
    "merge",
    "Tensor v, Tensor s, Tensor(a!) out, Tensor(b!) s_out -> ()",
    check=_check_merge_states,
    backends=("triton", "reference"),
)
