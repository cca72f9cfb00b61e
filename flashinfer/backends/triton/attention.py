# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton: keys cut evenly among programs where rows are few, else a block of rows a program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer.backends.triton import device
from flashinfer.backends.triton.attention_tuning import LAYOUTS, Tuning, tuning
from flashinfer.backends.triton.launch import launch
from flashinfer.core import faults
from flashinfer.core.attention_work import FixedPieces, Work
from flashinfer.core.checks import fail
from flashinfer.core.dtypes import FP8

PAGED, RAGGED = "paged_attention", "ragged_attention"
OP_CODES = {PAGED: 16, RAGGED: 17}
QUERY_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256
# Requests that a program sums over at once.
BATCH = 256
# Rows that a program merges.
MERGE_STEP = 4
# From here on a split size cuts nothing.
WHOLE = 1 << 30
# A window beyond every request, from which lengths can be taken without leaving int32.
WIDEST = 1 << 30


def _why_not(q: torch.Tensor, k: torch.Tensor, dim_vo: int) -> str | None:
    if reason := device.why_not(q.device):
        return reason
    if q.dtype not in QUERY_DTYPES:
        return f"needs q in float16 or bfloat16, got {q.dtype}"
    if k.dtype != q.dtype:
        if k.dtype not in FP8:
            return f"needs keys of q's dtype or FP8, got {k.dtype}"
        flavour = device.fp8(q.device)
        if flavour is not None and k.dtype != flavour:
            return f"needs the device's own FP8, {flavour}, got {k.dtype}"
    for name, dim in (("head_dim", q.size(2)), ("head_dim_vo", dim_vo)):
        if dim > LARGEST_HEAD_DIM:
            return f"needs {name} up to {LARGEST_HEAD_DIM}, got {dim}"
    return None


def why_not_paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: object) -> str | None:
    return _why_not(q, k_cache, v_cache.size(3))


def why_not_ragged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object) -> str | None:
    return _why_not(q, k, v.size(2))


@dataclass(frozen=True)
class _Call:
    """What differs between the ops, in the kernels' words."""

    op: str
    layout: int
    page_size: int
    kv_heads: int
    dim_vo: int
    num_pages: int
    bound: int
    # Page, token and head of K, then of V, in elements.
    strides: tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class _Options:
    """What both ops take; `scale` is that of the scores, with K's."""

    causal: bool
    scale: float
    window_left: int
    logits_soft_cap: float
    v_scale: float
    sinks: torch.Tensor | None
    custom_mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    max_q_len: int
    split_size: int

    @property
    def scales(self) -> tuple[float, float, float, float]:
        """Of scores to base 2; into and out of the sigmoid of a soft cap, as tanh(x) is 2 sigmoid(2 x) - 1; of V."""
        scale, cap = abs(self.scale), self.logits_soft_cap
        return scale / math.log(2), 2 * scale / cap if cap else 0.0, cap / math.log(2), self.v_scale

    @property
    def flags(self) -> tuple[bool, ...]:
        """CAUSAL, WINDOW, SOFT_CAP, CUSTOM, SINKS and NEGATE of the kernels."""
        masked = self.custom_mask is not None
        return (
            *(self.causal and not masked, self.window_left >= 0, self.logits_soft_cap > 0, masked),
            *(self.sinks is not None, self.scale < 0),
        )


def _strides(k: torch.Tensor, v: torch.Tensor, axes: tuple[int, int, int]) -> tuple[int, int, int, int, int, int]:
    page, slot, head = axes
    return k.stride(page), k.stride(slot), k.stride(head), v.stride(page), v.stride(slot), v.stride(head)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str,
    causal: bool,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    needs_lse: bool,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    heads_axis, slot_axis = {"NHD": (2, 1), "HND": (1, 2), "SHUFFLED": (1, 3)}[kv_layout]
    num_pages = k_cache.size(0)
    if num_pages == 0:
        # Something to load from, for entries that are then reported.
        k_cache, v_cache = (t.new_zeros((1, *t.shape[1:])) for t in (k_cache, v_cache))
    sizes = k_cache.size(slot_axis), k_cache.size(heads_axis), v_cache.size(3), num_pages, kv_indices.numel()
    call = _Call(PAGED, LAYOUTS[kv_layout], *sizes, _strides(k_cache, v_cache, (0, slot_axis, heads_axis)))
    scores = sm_scale * k_scale
    masks = sinks, custom_mask, mask_indptr
    options = _Options(causal, scores, window_left, logits_soft_cap, v_scale, *masks, max_q_len, split_size)
    tensors = q, k_cache, v_cache, kv_indices, qo_indptr, kv_indptr, kv_last_page_len
    _run(call, tensors, options, scratch, (out, lse))


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    causal: bool,
    sm_scale: float,
    window_left: int,
    logits_soft_cap: float,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    needs_lse: bool,
    max_q_len: int,
    max_kv_len: int,
    split_size: int,
    scratch: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    call = _Call(RAGGED, LAYOUTS["RAGGED"], 1, k.size(1), v.size(2), 0, k.size(0), _strides(k, v, (0, 0, 1)))
    scores = sm_scale * k_scale
    masks = sinks, custom_mask, mask_indptr
    options = _Options(causal, scores, window_left, logits_soft_cap, v_scale, *masks, max_q_len, split_size)
    # There are no pages: whatever stands for them is not looked at.
    _run(call, (q, k, v, kv_indptr, qo_indptr, kv_indptr, kv_indptr), options, scratch, (out, lse))


def _run(
    call: _Call,
    tensors: tuple[torch.Tensor, ...],
    options: _Options,
    scratch: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
) -> None:
    q, k, qo_indptr = tensors[0], tensors[1], tensors[4]
    tokens, batch = q.size(0), qo_indptr.size(0) - 1
    if tokens == 0 or batch == 0:
        return
    group = q.size(1) // call.kv_heads
    fixed = FixedPieces.of(group, options.max_q_len, options.split_size) if options.split_size else None
    longest = options.max_q_len or -(-tokens // batch)
    work = Work.of(fixed.rows if fixed else group * longest, q.device)
    # Each request adds a block that is not full at most.
    blocks = group * tokens // work.rows + batch
    # From four rounds of programs on, whole blocks fill the device well enough.
    whole = blocks * call.kv_heads >= 4 * work.workers and longest * group > work.rows
    fault = faults.words(q.device)
    if options.split_size >= WHOLE or (whole and not fixed):
        fixed, scratch = None, fault
    else:
        blocks = 0
        scratch = _scratch(call, q, work, fixed, scratch, (batch, group))
    optional = [fault if t is None else t for t in (options.sinks, options.custom_mask, options.mask_indptr)]
    tune = tuning(
        rows=work.rows,
        dim=max(q.size(2), call.dim_vo),
        element_size=k.element_size(),
        layout=call.layout,
        custom=options.custom_mask is not None,
        shared_bytes=device.shared_bytes(q.device),
    )
    volatile = min(max(options.window_left, 0), WIDEST), batch, tokens, call.bound, call.num_pages, OP_CODES[call.op]
    everything = (*tensors, *optional, fault, scratch, *results)
    _launch(call, everything, work, tune, (*options.scales, *volatile), options.flags, blocks, fixed)
    faults.settle(fault)


def _scratch(
    call: _Call,
    q: torch.Tensor,
    work: Work,
    fixed: FixedPieces | None,
    scratch: torch.Tensor | None,
    sizes: tuple[int, int],
) -> torch.Tensor:
    """Memory for partial results; of pieces of a fixed size there may be fewer than there is memory for."""
    if fixed is None:
        need = work.scratch_elements(call.dim_vo)
    elif scratch is not None:
        need = fixed.scratch_elements(call.dim_vo, 1)
    else:
        batch, group = sizes
        keys = call.bound * call.page_size
        pieces = fixed.bound(group, call.kv_heads, batch, q.size(0), keys)
        need = fixed.scratch_elements(call.dim_vo, pieces)
    if scratch is None:
        return q.new_empty(need, dtype=torch.float32)
    if scratch.numel() < need:
        fail(call.op, "scratch", f"of at least {need} elements", scratch.numel())
    return scratch


def _constants(call: _Call, tensors: tuple[torch.Tensor, ...], work: Work, tune: Tuning, unit: int) -> tuple[Any, ...]:
    """What the kernels are compiled for, but for the flags."""
    q, k, v = tensors[:3]
    dim, dim_vo = q.size(2), call.dim_vo
    # Keys are taken in two parts whose sizes are powers of 2: 192 is 128 and 64, 80 is 64 and 16.
    first = max(1 << (dim.bit_length() - 1), 16)
    rest = max(dim - first, 0)
    # Vectors of shuffled pages: of V, whose tokens lie side by side, as soon as they are aligned; and for few rows in
    # memory's order, if dimensions fill their tiles: decode takes 1.84 times the read floor without that, 1.06 with it.
    vectors = call.layout == LAYOUTS["SHUFFLED"] and all(
        t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) * t.element_size() % 16 == 0
        for t in (k, v)
    )
    ordered = vectors and work.rows < 128 and first == dim and device.power_of_2(dim_vo) == dim_vo
    return (
        *(work.workers, BATCH if q.is_cuda else 16, unit, call.page_size, call.layout),
        *(16 // k.element_size(), work.rows, tune.tile, dim, first, device.power_of_2(rest) if rest else 0),
        *(dim_vo, device.power_of_2(dim_vo), vectors + ordered),
    )


def _launch(
    call: _Call,
    tensors: tuple[torch.Tensor, ...],
    work: Work,
    tune: Tuning,
    numbers: tuple[float, ...],
    flags: tuple[bool, ...],
    blocks: int,
    fixed: FixedPieces | None,
) -> None:
    """A program for each of `blocks` and each KV head, or, for no blocks, the workers and the merge."""
    from flashinfer.backends.triton.kernels import attention as kernels
    from flashinfer.backends.triton.kernels import attention_fixed as fixed_kernels

    q, scratch, out, lse = tensors[0], *tensors[-3:]
    k_page, k_slot, k_head, v_page, v_slot, v_head = call.strides
    results = out.stride(0), out.stride(1), lse.stride(0), lse.stride(1)
    group = q.size(1) // call.kv_heads
    strides = q.stride(0), q.stride(1), k_page, k_slot, k_head, v_page, v_slot, v_head, *results, group, call.kv_heads
    *constants, vectors = _constants(call, tensors, work, tune, fixed.keys if fixed else max(tune.tile, 64))
    all_constants = (*constants, *flags, vectors, tune.stages)
    split, merge = kernels.attention_split, kernels.attention_merge
    room: tuple[int, ...] = ()
    if fixed:
        split, merge = fixed_kernels.attention_fixed, fixed_kernels.attention_fixed_merge
        room = (fixed.pieces_in(call.dim_vo, scratch.numel()),)
    kernel = kernels.attention_whole if blocks else split
    grid = (blocks * call.kv_heads or work.workers,)
    launch(kernel, grid, tensors, strides, (*numbers, *room), all_constants, tune.warps, tune.stages)
    if not blocks:
        pieces = work.workers, work.rows, MERGE_STEP, call.dim_vo, device.power_of_2(call.dim_vo)
        grid2 = work.workers, work.rows // MERGE_STEP
        launch(merge, grid2, (scratch, out, lse), (*results, group), room, pieces, 4, 1)
