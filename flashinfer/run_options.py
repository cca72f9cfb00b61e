# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What a run of a planned attention wrapper is told: its options, and where results go."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashinfer.core.checks import describe, fail


class Results(NamedTuple):
    """Where a run's results go, and what they are."""

    where: str
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    lse_base: str = "log2"
    lse_layout: str = "NH"

    @property
    def needs_lse(self) -> bool:
        return self.return_lse or self.lse is not None

    def allocate(self, q: torch.Tensor, dim_vo: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`out [tokens, heads, dim_vo]` and a view `[tokens, heads]` of the lse."""
        if self.lse_base not in ("log2", "ln"):
            fail(self.where, "lse_base", "'log2' or 'ln'", repr(self.lse_base))
        if self.lse_layout not in ("NH", "HN"):
            fail(self.where, "lse_layout", "'NH' or 'HN'", repr(self.lse_layout))
        out, lse = self.out, self.lse
        if out is None:
            out = q.new_empty((*q.shape[:2], dim_vo))
        if self.lse_layout == "NH":
            return out, q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
        if lse is None:
            lse = q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)
        if not isinstance(lse, torch.Tensor) or lse.dim() != 2:
            fail(self.where, "lse", "[heads, tokens] for lse_layout='HN'", describe(lse))
        return out, lse.t()

    def returned(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What the caller gets of what `allocate` gave."""
        if self.lse_base == "ln" and self.needs_lse:
            lse.mul_(math.log(2))
        if not self.return_lse:
            return out
        if self.lse is not None:
            return out, self.lse
        return out, lse.t() if self.lse_layout == "HN" else lse


class Options(NamedTuple):
    """What a run may say otherwise than its plan."""

    causal: bool
    window_left: int
    logits_soft_cap: float
    sm_scale: float | None
