# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""How attention is cut into equal pieces: by the device itself, from the metadata that lie there.

Rows of a request are its query tokens times the query heads of one KV head. A block of them over the keys that it
sees is an item, and the keys of all items, one after the other, are cut into one stretch for each worker. A worker
finds its stretch by summing lengths over the batch. So the host plans nothing, and a captured graph follows whatever
its metadata buffers hold.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# Rows of a block. 16 is the least that matrix instructions take.
ROWS = (16, 32, 64, 128)
# int32 words that a worker leaves for the merge.
RECORD_WORDS = 8


@dataclass(frozen=True)
class Work:
    """Rows of a block, and programs that share the items; all programs fill the device once."""

    rows: int
    workers: int

    @classmethod
    def of(cls, rows: int, device: torch.device, shuffled: bool) -> Work:
        """The work for blocks of at least `rows`, as far as there are such.

        Small programs share a compute unit: one loads while the other computes. Over shuffled pages, whose vectors
        pass through registers, three are better than two: 1.29 times the read floor on an H200, with four 1.31.
        """
        rows = next((r for r in ROWS if rows <= r), ROWS[-1])
        return cls(rows, _units(device) * ((3 if shuffled else 2) if rows <= 32 else 1))

    def scratch_elements(self, head_dim_vo: int) -> int:
        """float32 elements: two slots a worker of partial results and their LSE, and a record."""
        return self.workers * (2 * self.rows * (head_dim_vo + 1) + RECORD_WORDS)


@functools.cache
def _units(device: torch.device) -> int:
    """Compute units; in the interpreter, enough to have cuts."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def scratch_elements(head_dim_vo: int, device: torch.device) -> int:
    """Elements that suffice for every call with this head dimension of V, as `scratch` of the attention ops."""
    return max(Work.of(rows, device, True).scratch_elements(head_dim_vo) for rows in ROWS)
