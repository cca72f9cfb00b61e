# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the samples of all families are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

PAGES, N, H, D = 40, 16, 2, 32
INDEX = (torch.int32, torch.int64)


@dataclasses.dataclass
class Sample:
    """Arguments by name, in the order of the schema, and the arguments whose first dimension is the batch's.

    `scratch` names written arguments that a backend may leave alone: they carry nothing out.
    """

    arguments: dict[str, Any]
    dynamic: tuple[str, ...]
    scratch: tuple[str, ...] = ()

    def clone(self) -> Sample:
        """The same call on memory of its own, strides and shared storage kept."""
        storages: dict[int, torch.Tensor] = {}

        def copy(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or t.is_nested:
                return t
            raw = t.untyped_storage()
            if t.is_meta or not raw.nbytes():
                return t
            if raw.data_ptr() not in storages:
                storages[raw.data_ptr()] = torch.empty(0, dtype=t.dtype).set_(raw).clone()
            return storages[raw.data_ptr()].as_strided(t.shape, t.stride(), t.storage_offset())

        copies = {
            name: copy(a) if isinstance(a, torch.Tensor) else [copy(t) for t in a] if isinstance(a, list) else a
            for name, a in self.arguments.items()
        }
        return Sample(copies, self.dynamic, self.scratch)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(views: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Strided, unless they are empty: torch's own opcheck cannot copy empty tensors with strides."""
    return views if views[0].numel() else [v.new_empty(v.shape) for v in views]
