# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append and its metadata through csrc_rocm/shims/page.cc."""

from __future__ import annotations

import torch

from flashinfer.core import faults
from flashinfer.core.op import checks_arguments
from flashinfer.jit.load import load_module, why_not_module
from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(
    name="page",
    ops=("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    shims=("shims/page.cc",),
    kernels=("kernels/page.cu",),
    kernels_cpu=("kernels_cpu/page.cc",),
)


def why_not_append_paged_kv_cache(append_key: torch.Tensor, *args: object) -> str | None:
    return why_not_module(SPEC, append_key.device)


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
    device = append_key.device
    fault = faults.words(device)
    load_module(SPEC, device).append_paged_kv_cache(
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
    return why_not_module(SPEC, append_ckv.device)


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
    device = append_ckv.device
    fault = faults.words(device)
    load_module(SPEC, device).append_paged_mla_kv_cache(
        append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_scale, fault
    )
    faults.settle(fault)


def why_not_get_batch_indices_positions(append_indptr: torch.Tensor, *args: object) -> str | None:
    return why_not_module(SPEC, append_indptr.device)


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    device = append_indptr.device
    fault = faults.words(device)
    load_module(SPEC, device).get_batch_indices_positions(append_indptr, seq_lens, batch_indices, positions, fault)
    faults.settle(fault)


def why_not_get_seq_lens(kv_indptr: torch.Tensor, *args: object) -> str | None:
    return why_not_module(SPEC, kv_indptr.device)


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, seq_lens: torch.Tensor
) -> None:
    device = kv_indptr.device
    fault = faults.words(device)
    load_module(SPEC, device).get_seq_lens(kv_indptr, kv_last_page_len, page_size, seq_lens, fault)
    faults.settle(fault)
