# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of MLA put together by two copies."""

from __future__ import annotations

import torch


def why_not_concat_mla_k(*args: object) -> str | None:
    return None


# As in the compiled backend, nothing is recorded for autograd.
@torch.no_grad()
def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    nope = k_nope.size(2)
    k[..., :nope] = k_nope
    k[..., nope:] = k_rope
