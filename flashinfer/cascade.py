# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Merging of attention states. Signatures follow FlashInfer 0.7.4.

A state is what attention over a part of the keys gives: the output and the log-sum-exp, in base 2.
"""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, require_tensor
from flashinfer.ops import merge as ops


def _lse(op: str, name: str, s: torch.Tensor) -> torch.Tensor:
    """A log-sum-exp as float32."""
    require_tensor(op, name, s)
    return s if s.dtype == torch.float32 or not s.is_floating_point() else s.float()


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys.

    `v = (v_a 2^s_a + v_b 2^s_b) / (2^s_a + 2^s_b)`, `s = log2(2^s_a + 2^s_b)`.

    Parameters
    ----------
    v_a, v_b
        `[tokens, heads, head_dim]`, outputs of the parts.
    s_a, s_b
        `[tokens, heads]`, their log-sum-exp in base 2. -inf, and +inf too, is a part without keys, of which `v` is
        not looked at.
    backend
        "auto", or the name of one.

    Returns
    -------
    tuple
        `v` like `v_a` and `s` float32 `[tokens, heads]`; 0 and -inf where neither part has keys.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit.
    """
    require_tensor(ops.STATE, "v_a", v_a)
    s_a, s_b = _lse(ops.STATE, "s_a", s_a), _lse(ops.STATE, "s_b", s_b)
    v = torch.empty_like(v_a, memory_format=torch.contiguous_format)
    s = s_a.new_empty(s_a.shape, dtype=torch.float32)
    ops.merge_state(v_a, s_a, v_b, s_b, v, s, backend=backend)
    return v, s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    """Merge another state into this one, as `merge_state` does.

    Parameters
    ----------
    v, s
        The state to write, `[tokens, heads, head_dim]` and float32 `[tokens, heads]`.
    v_other, s_other
        The other state, shaped alike.
    mask
        bool or uint8 `[tokens]`: a token whose entry is 0 keeps its state.
    backend
        "auto", or the name of one.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit; a `s` other than float32 included, as it is written.
    """
    ops.merge_state_in_place(v, s, v_other, _lse(ops.IN_PLACE, "s_other", s_other), mask, backend=backend)


def merge_states(v: torch.Tensor, s: torch.Tensor, *, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over several disjoint sets of keys.

    Parameters
    ----------
    v
        `[tokens, states, heads, head_dim]`.
    s
        `[tokens, states, heads]`, log-sum-exp in base 2.
    backend
        "auto", or the name of one.

    Returns
    -------
    tuple
        `v [tokens, heads, head_dim]` of v's dtype and `s` float32 `[tokens, heads]`, as of `merge_state`.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit.
    """
    require_tensor(ops.STATES, "v", v)
    if v.dim() != 4:
        fail(ops.STATES, "v", "[tokens, states, heads, head_dim]", describe(v))
    shape = (v.size(0), v.size(2), v.size(3))
    merged, lse = v.new_empty(shape), v.new_empty(shape[:2], dtype=torch.float32)
    ops.merge_states(v, _lse(ops.STATES, "s", s), merged, lse, backend=backend)
    return merged, lse
