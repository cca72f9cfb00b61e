# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Op that puts keys of MLA together."""

from __future__ import annotations

import torch

from flashinfer.core.checks import apart, describe, fail, is_same_view
from flashinfer.core.dtypes import FLOATS_OF_8_BITS
from flashinfer.core.op import Op

OP = "concat_mla_k"
# Nothing is computed, so that any 8-bit float will do.
DTYPES = (torch.bfloat16, torch.float16, *FLOATS_OF_8_BITS)
MULTIPLE = 8


def _check_concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    for name, t in (("k", k), ("k_nope", k_nope), ("k_rope", k_rope)):
        if t.dim() != 3:
            fail(OP, name, "3-D [tokens, heads, dim]", describe(t))
        if t.size(2) > 1 and t.stride(2) != 1:
            fail(OP, name, "contiguous in its last dimension", f"stride {t.stride()}")
    if k.dtype not in DTYPES:
        fail(OP, "k", "bfloat16, float16 or an 8-bit float", describe(k))
    nope, rope = k_nope.size(2), k_rope.size(2)
    for name, t in (("k_nope", k_nope), ("k_rope", k_rope)):
        if t.dtype != k.dtype or t.device != k.device:
            fail(OP, name, f"of k's dtype and device, {k.dtype} on {k.device}", describe(t))
        if t.size(2) == 0 or t.size(2) % MULTIPLE:
            fail(OP, name, f"of a last dimension that is a multiple of {MULTIPLE}", list(t.shape))
    if k.size(1) < 1:
        fail(OP, "k", "of at least one head", list(k.shape))
    if k.size(2) != nope + rope:
        fail(OP, "k", f"of rows of {nope + rope}, those of k_nope and k_rope together", list(k.shape))
    if k_nope.shape[:2] != k.shape[:2]:
        fail(OP, "k_nope", f"[{k.size(0)}, {k.size(1)}, {nope}] as k", list(k_nope.shape))
    if k_rope.shape[:2] != (k.size(0), 1):
        fail(OP, "k_rope", f"[{k.size(0)}, 1, {rope}], one row for all heads", list(k_rope.shape))
    place = k[..., :nope]
    # Written where it is read, by the thread that reads it.
    if not is_same_view(k_nope, place):
        apart(OP, "k_nope", k_nope, "k", k)
    apart(OP, "k_rope", k_rope, "k", k)


concat_mla_k = Op(
    OP,
    "concat_mla",
    "Tensor(a!) k, Tensor k_nope, Tensor k_rope -> ()",
    check=_check_concat_mla_k,
    # The second is for devices that no compiler is at hand for: two copies by torch.
    backends=("native", "reference"),
)
