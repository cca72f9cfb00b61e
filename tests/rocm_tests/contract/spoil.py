# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to spoil an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Change = Any | Callable[[Any], Any]


def meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def last_strided(t: torch.Tensor) -> torch.Tensor:
    """The same shape, with every other element of a buffer twice as wide."""
    return torch.zeros(*t.shape[:-1], 2 * t.size(-1), dtype=t.dtype)[..., ::2]


def index_vectors(op: str, names: tuple[str, ...]) -> list[tuple[str, dict[str, Change], str]]:
    found: list[tuple[str, dict[str, Change], str]] = []
    for name in names:
        found += [
            (op, {name: lambda t: t.tolist()}, f"{name} must be a tensor, got list"),
            (op, {name: lambda t: torch.zeros(2, 2, dtype=torch.int32)}, f"{name} must be 1-D, got int32[2, 2] on cpu"),
            (
                op,
                {name: lambda t: torch.zeros(4)},
                f"{name} must be int32 or int64, got float32[4] on cpu; pass {name}.int()",
            ),
            (op, {name: meta}, f"{name} must be on cpu, got meta; pass {name}.to('cpu')"),
            (
                op,
                {name: lambda t: torch.zeros(2 * t.numel(), dtype=torch.int32)[::2]},
                f"{name} must be contiguous, got stride (2,); pass {name}.contiguous()",
            ),
        ]
    return found
