# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append and its metadata through csrc_rocm/shims/page.cc."""

from __future__ import annotations

import torch

from flashinfer.core import faults
from flashinfer.core.op import checks_arguments
from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import why_not_device

SPEC = JitSpec(
    name="page",
    ops=("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    shims=("shims/page.cc",),
    kernels=("kernels/page.cu",),
    kernels_cpu=("kernels_cpu/page.cc",),
)


def why_not_append_paged_kv_cache(append_key: torch.Tensor, *args: object) -> str | None:
    if args[3].dtype != append_key.dtype:  # type: ignore[attr-defined]
        return "needs rows of the cache's dtype"
    return why_not_device(append_key.device)


@checks_arguments
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
) -> None:
    fault = faults.words(append_key.device)
    load_module(SPEC, append_key.device).append_paged_kv_cache(
        append_key,
        append_value,
        batch_indices,
        positions,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        kv_layout,
        k_scale,
        v_scale,
        fault,
    )
    faults.settle(fault)


def why_not_append_paged_mla_kv_cache(append_ckv: torch.Tensor, *args: object) -> str | None:
    if args[3].dtype != append_ckv.dtype:  # type: ignore[attr-defined]
        return "needs rows of the cache's dtype"
    return why_not_device(append_ckv.device)


@checks_arguments
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_scale: float,
) -> None:
    fault = faults.words(append_ckv.device)
    load_module(SPEC, append_ckv.device).append_paged_mla_kv_cache(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_scale, fault
    )
    faults.settle(fault)


def why_not_get_batch_indices_positions(append_indptr: torch.Tensor, *args: object) -> str | None:
    return why_not_device(append_indptr.device)


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    fault = faults.words(append_indptr.device)
    load_module(SPEC, append_indptr.device).get_batch_indices_positions(
        append_indptr, seq_lens, batch_indices, positions, fault
    )
    faults.settle(fault)


def why_not_get_seq_lens(kv_indptr: torch.Tensor, *args: object) -> str | None:
    return why_not_device(kv_indptr.device)


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, seq_lens: torch.Tensor
) -> None:
    fault = faults.words(kv_indptr.device)
    load_module(SPEC, kv_indptr.device).get_seq_lens(kv_indptr, kv_last_page_len, page_size, seq_lens, fault)
    faults.settle(fault)
