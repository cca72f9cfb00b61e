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
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flashinfer.core.checks import INT32_MAX

# Rows of a block. 16 is the least that matrix instructions take.
ROWS = (16, 32, 64, 128)
# int32 words that a worker leaves for the merge.
RECORD_WORDS = 8
# Pieces of a fixed size are whole tiles of every kernel.
PIECE_STEP = 128
# The split size that makes one piece of all keys.
NO_SPLIT = INT32_MAX


@dataclass(frozen=True)
class Work:
    """Rows of a block, and programs that share the items; all programs fill the device once."""

    rows: int
    workers: int

    @classmethod
    def of(cls, rows: int, device: torch.device) -> Work:
        """The work for blocks of at least `rows`, as far as there are such.

        Small programs share a compute unit: one loads while the other computes.
        """
        rows = next((r for r in ROWS if rows <= r), ROWS[-1])
        return cls(rows, _units(device) * (2 if rows <= 32 else 1))

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
    return max(Work.of(rows, device).scratch_elements(head_dim_vo) for rows in ROWS)


@dataclass(frozen=True)
class FixedPieces:
    """Work whose sums do not depend on the batch: blocks and pieces of keys of sizes that the caller chose.

    Attributes
    ----------
    rows
        Rows of a block.
    keys
        Keys of a piece.
    """

    rows: int
    keys: int

    @classmethod
    def of(cls, group: int, max_q_len: int, split_size: int) -> FixedPieces:
        """Pieces of `split_size` keys, rounded up to whole tiles; the largest blocks if `max_q_len` is 0."""
        rows = next((r for r in ROWS if max_q_len and group * max_q_len <= r), ROWS[-1])
        return cls(rows, -(-split_size // PIECE_STEP) * PIECE_STEP)

    def count(self, group: int, kv_heads: int, q_lens: Iterable[int], kv_lens: Iterable[int]) -> int:
        """Pieces of a batch at most: a sliding window leaves fewer."""
        lens = zip(q_lens, kv_lens, strict=True)
        return kv_heads * sum(-(-q * group // self.rows) * max(-(-kv // self.keys), 1) for q, kv in lens)

    def bound(self, group: int, kv_heads: int, batch: int, tokens: int, keys: int) -> int:
        """Pieces of any batch of so many requests, queries and keys at most."""
        rows = group * tokens
        return kv_heads * (rows // self.rows + batch + -(-rows // self.rows) * (keys // self.keys))

    def scratch_elements(self, head_dim_vo: int, pieces: int) -> int:
        """float32 elements: each piece's partial results, their LSE and a record, and a record of the whole."""
        return pieces * (self.rows * (head_dim_vo + 1) + RECORD_WORDS) + RECORD_WORDS

    def pieces_in(self, head_dim_vo: int, elements: int) -> int:
        """Pieces that memory is enough for, as far as kernels count in int32."""
        fit = (elements - RECORD_WORDS) // (self.rows * (head_dim_vo + 1) + RECORD_WORDS)
        return max(0, min(fit, INT32_MAX // (self.rows * (head_dim_vo + 1))))
