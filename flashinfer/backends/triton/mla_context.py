# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA context's gather, up-projection and concatenation in Triton, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer.backends.triton import device
from flashinfer.core import faults
from flashinfer.core.dtypes import FP8
from flashinfer.core.mla_project import scale_mode
from flashinfer.core.mla_shape import is_flat

RESULT_DTYPES = (torch.float16, torch.bfloat16)
MODES = {"none": 0, "row": 1, "block": 2}


@dataclass(frozen=True)
class Tile:
    """Tokens, columns and depth of a tile, warps, loads in flight, and blocks of tokens that share a group."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int


def tile(shared_bytes: int, mode: str = "none") -> Tile:
    """The tile for a device, by the shared memory that a program can have, and for a way of scaling the weight.

    Parameters
    ----------
    shared_bytes
        64 KiB on gfx942 and 160 KiB on gfx950: one step's operands, and the next's wait in registers. 227 KiB on the
        verification target, where two programs of three steps fit side by side, so that one multiplies while the other
        stores: measured, 8192 tokens, 128 heads: 599 us, against 641 of a tile of 256 tokens and 737 of two steps.
    mode
        Scales of blocks need a second sum beside the first: twice the warps keep both in registers. For gfx950 the
        compiler takes such a loop of 128 tokens apart to the last step and spills 384 registers of a lane, also with 16
        warps, and 74 with twice the depth. Half the tokens stay a loop and take 170 registers: three waves to a SIMD.
    """
    if mode == "block" and 64 << 10 < shared_bytes <= 160 << 10:
        return Tile(64, 128, 64, 4, 2, 16)
    warps = 8 if mode == "block" else 4
    if shared_bytes <= 160 << 10:
        return Tile(128, 128, 64, warps, 2, 8)
    return Tile(128, 128, 64, warps, 3, 16)


def why_not_gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> str | None:
    if reason := device.why_not(kv_cache.device):
        return reason
    if k_out.dtype not in RESULT_DTYPES:
        return f"needs results in float16 or bfloat16, got {k_out.dtype}"
    flavour = device.fp8(kv_cache.device)
    for name, t in (("kv_cache", kv_cache), ("kv_b_proj_weight", kv_b_proj_weight)):
        if t.dtype in FP8 and flavour is not None and t.dtype != flavour:
            return f"needs {name} in the device's own FP8, {flavour}, got {t.dtype}"
    return None


def gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    from flashinfer.backends.triton.kernels import mla_context as kernels

    prefix = kv_prefix_sum_context_lens
    tokens, heads, requests = k_out.size(0), k_out.size(1), prefix.size(0) - 1
    if tokens == 0 or requests == 0:
        return
    rank, rope = kv_b_proj_weight.size(1), kv_cache.size(2) - kv_b_proj_weight.size(1)
    nope, v_dim = k_out.size(2) - rope, v_out.size(2)
    mode = scale_mode(kv_b_proj_weight, weight_scale) or "none"
    tune = tile(device.shared_bytes(kv_cache.device), mode)
    columns = heads * (-(-nope // tune.columns) + -(-v_dim // tune.columns))
    scale_row = weight_scale.stride(0) if weight_scale is not None and mode == "block" else 0
    fault = faults.words(kv_cache.device)
    with torch.cuda.device(kv_cache.device.index if kv_cache.is_cuda else -1):
        kernels.gather_kv_b_proj[(-(-tokens // tune.tokens) * columns,)](
            *(kv_cache, kv_scale, kv_indptr, kv_indices, prefix, kv_b_proj_weight, weight_scale, k_out, v_out, fault),
            *(kv_indices.size(0), kv_cache.size(0)),
            *(kv_cache.stride(0), kv_cache.stride(1), kv_b_proj_weight.stride(0), scale_row),
            *(k_out.stride(0), k_out.stride(1), v_out.stride(0), v_out.stride(1)),
            *(tokens, heads, requests, requests.bit_length()),
            FLAT=is_flat(kv_cache, kv_indptr, prefix),
            SCALED=kv_scale is not None,
            WEIGHT=MODES[mode],
            PAGE_SIZE=kv_cache.size(1),
            RANK=rank,
            NOPE=nope,
            ROPE=rope,
            DV=v_dim,
            BLOCK_M=tune.tokens,
            BLOCK_N=tune.columns,
            BLOCK_K=tune.depth,
            GROUP=tune.group,
            ROPE_BLOCK=device.power_of_2(rope) if rope else 0,
            num_warps=tune.warps,
            num_stages=tune.stages,
        )
    faults.settle(fault)
