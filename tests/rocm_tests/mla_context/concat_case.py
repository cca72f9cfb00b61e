# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Keys to put together out of strided parts, and what they must be."""

from __future__ import annotations

import torch

import flashinfer
from flashinfer.ops.concat_mla import DTYPES as DTYPES
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import random_bits


class ConcatCase:
    """Every bit pattern in slices of wider buffers, from element `offset` on and with `pad` more to a row."""

    def __init__(
        self,
        tokens: int,
        heads: int,
        nope: int,
        rope: int,
        dtype: torch.dtype,
        *,
        offset: int = 16,
        pad: int = 32,
        device: str = "cpu",
    ) -> None:
        def rows(count: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            buffer = random_bits((tokens, count + 1, offset + dim + pad), dtype, seed=seed).to(device)
            return buffer, buffer[:, :count, offset : offset + dim]

        self.offset = offset
        self.base, self.k = rows(heads, nope + rope, 1)
        (_, self.nope), (_, self.rope) = rows(heads, nope, 2), rows(1, rope, 3)
        self.before = self.base.clone()

    def compare(self) -> None:
        """The result, and that nothing beside it has changed; in bits, as torch cannot join all of these dtypes."""
        base, before = _bits(self.base), _bits(self.before)
        (nope, rope), (_, heads, width) = (_bits(self.nope), _bits(self.rope)), self.k.shape
        for head in range(heads):
            before[:, head, self.offset : self.offset + width] = torch.cat([nope[:, head], rope[:, 0]], dim=-1)
        assert_equal_bits(base, before)

    def check(self, backend: str) -> None:
        flashinfer.concat_mla_k(self.k, self.nope, self.rope, backend=backend)
        self.compare()


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int16).cpu()
