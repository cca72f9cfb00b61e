# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles and warps of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

# As flashinfer/backends/triton/kernels/attention_batch.py has them.
LAYOUTS = {"NHD": 0, "HND": 0, "SHUFFLED": 1, "RAGGED": 2}


@dataclass(frozen=True)
class Tuning:
    """Keys of a tile, warps, and tiles in flight."""

    tile: int
    warps: int
    stages: int


def tuning(*, rows: int, dim: int, element_size: int, layout: int, custom: bool, shared_bytes: int) -> Tuning:
    """Tile and warps for a block of rows.

    Parameters
    ----------
    rows
        Query rows of a program.
    dim
        The larger head dimension of K and V.
    element_size
        Of keys and values.
    layout
        Of LAYOUTS. Addresses of ragged keys cost nothing, and twice the warps pay.
    custom
        Whether there is a mask, whose bits take registers.
    shared_bytes
        What a program can have. 64 KiB on gfx942 and 160 KiB on gfx950: one tile, and what is in flight waits in
        registers, of which more keys spill, or leave too few for two small programs on a compute unit. 227 KiB on
        the verification target: several tiles.
    """
    if shared_bytes <= 160 << 10:
        if dim > 128 or custom or (rows <= 32 and element_size == 1):
            return Tuning(32, 4, 1)
        return Tuning(64, 8 if rows >= 128 else 4, 1)
    if rows >= 128:
        # Measured on an H200, 8k causal: pages 386 TFLOP/s with 4 warps and 322 with 8, ragged keys 417 with 8 warps.
        return Tuning(64, 8, 2) if dim > 128 else Tuning(64, 8 if layout == LAYOUTS["RAGGED"] else 4, 3)
    if dim > 128:
        return Tuning(64, 4, 2)
    # Batch 32 of 4k keys: 1.07 times the read floor, with tiles of 64 and three stages 1.19; shuffled pages 1.06, with
    # tiles of 32 and four stages 1.09.
    return Tuning(64, 4, 3) if layout == LAYOUTS["SHUFFLED"] else Tuning(128, 4, 2)
