# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA attention in Triton: flash decoding on ckv and kpe where they lie, in one buffer or in two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashinfer.backends.triton import device
from flashinfer.backends.triton.launch import launch
from flashinfer.core import mla_plan
from flashinfer.core.dtypes import FP8
from flashinfer.core.metadata import on_host
from flashinfer.core.mla_plan import Shape

QUERY_DTYPES = (torch.float16, torch.bfloat16)
# Columns of ckv that are loaded and multiplied at a time. Of whole rows of 512, loads take so many registers for
# addresses that the loop spills: 403 us instead of 311 for 16 heads, batch 32 of 32k keys on an H200.
CHUNK = 128
# Rows that a program merges.
MERGED_ROWS = 4


@dataclass(frozen=True)
class Tuning:
    """Keys of a tile, warps, and tiles in flight."""

    tile: int
    warps: int
    stages: int


def tuning(rows: int, shared_bytes: int) -> Tuning:
    """Tile and warps for a block of rows, by the shared memory that a program can have.

    Parameters
    ----------
    rows
        Query rows of a program.
    shared_bytes
        64 KiB on gfx942 and 160 KiB on gfx950: one tile, and what is in flight waits in registers. Without spills up
        to 32 keys fit, beside 32 and 64 rows 16. 227 KiB on the verification target: several tiles.
    """
    if shared_bytes <= 160 << 10:
        return Tuning(32 if rows == 16 else 16, 4, 1)
    return Tuning(64, 8, 2) if rows == 64 else Tuning(32, 4, 3)


def why_not_mla_paged_attention(
    q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, *args: object
) -> str | None:
    if reason := device.why_not(q_nope.device):
        return reason
    if q_nope.dtype not in QUERY_DTYPES:
        return f"needs q in float16 or bfloat16, got {q_nope.dtype}"
    if ckv_cache.dtype != q_nope.dtype:
        if ckv_cache.dtype not in FP8:
            return f"needs caches of q's dtype or FP8, got {ckv_cache.dtype}"
        flavour = device.fp8(q_nope.device)
        if flavour is not None and ckv_cache.dtype != flavour:
            return f"needs the device's own FP8, {flavour}, got {ckv_cache.dtype}"
    heads, ckv_dim, kpe_dim = q_nope.size(1), q_nope.size(2), q_pe.size(2)
    if heads > 128:
        return f"needs at most 128 heads, got {heads}"
    if ckv_dim not in (64, 128, 256, 512):
        return f"needs head_dim_ckv 64, 128, 256 or 512, got {ckv_dim}"
    if kpe_dim not in (0, 16, 32, 64):
        return f"needs head_dim_kpe 0, 16, 32 or 64, got {kpe_dim}"
    return None


def mla_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    ckv_scale: float,
    kpe_scale: float,
    needs_lse: bool,
    max_q_len: int,
    uniform_q: bool,
    schedule: torch.Tensor | None,
    rows_per_item: int,
    workers: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    device, heads, dim = q_nope.device, q_nope.size(1), q_nope.size(2)
    if schedule is None or scratch is None:
        host = on_host(qo_indptr, kv_indptr, kv_len_arr)
        shapes = mla_plan.shapes_for(heads, device)
        plan = mla_plan.plan(host, heads, ckv_cache.size(1), causal, shapes, device)
        shape = plan.shape
        mla_plan.require(plan.total_q, plan.total_pages, q_nope.size(0), kv_indices.numel())
        schedule = plan.words[plan.schedule_at :].to(device, non_blocking=True)
        scratch = q_nope.new_empty(shape.scratch_elements(dim), dtype=torch.float32)
    else:
        shape = Shape(rows_per_item, workers, -(-heads // rows_per_item))
    # Partial results, and behind them their LSE.
    partial_lse = scratch[shape.partial_rows * dim :]
    _launch(
        (q_nope, q_pe, ckv_cache, kpe_cache, kv_indices, schedule, scratch, partial_lse, out, lse),
        shape,
        causal,
        (sm_scale * ckv_scale / math.log(2), kpe_scale / ckv_scale, ckv_scale),
    )


def _launch(tensors: tuple[torch.Tensor, ...], shape: Shape, causal: bool, scales: tuple[float, float, float]) -> None:
    from flashinfer.backends.triton.kernels import mla as kernels

    q_nope, q_pe, ckv, kpe, _, schedule, partial, partial_lse, out, lse = tensors
    heads, dim, rows = q_nope.size(1), q_nope.size(2), shape.rows_per_item
    tune = tuning(rows, device.shared_bytes(q_nope.device))
    results = out.stride(0), out.stride(1), lse.stride(0), lse.stride(1)
    inputs = (t.stride(d) for t in (q_nope, q_pe, ckv, kpe) for d in (0, 1))
    launch(
        kernels.mla_split,
        (shape.workers * shape.parts,),
        tensors,
        (*inputs, *results, heads, shape.workers),
        scales,
        (
            *(shape.parts, causal, ckv.dtype != q_nope.dtype, ckv.size(1), rows, tune.tile, dim, min(dim, CHUNK)),
            q_pe.size(2),
        ),
        tune.warps,
        tune.stages,
    )
    launch(
        kernels.mla_merge,
        (shape.workers, shape.parts * rows // MERGED_ROWS),
        (schedule, partial, partial_lse, out, lse),
        (*results, heads, shape.workers),
        (),
        (shape.parts, rows, MERGED_ROWS, dim),
        4,
        1,
    )
