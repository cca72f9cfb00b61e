# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged gather through csrc_rocm/shims/gather.cc."""

from __future__ import annotations

import torch

from flashinfer.core import faults
from flashinfer.core.dtypes import FNUZ
from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import why_not_device

SPEC = JitSpec(
    name="gather",
    ops=("gather_paged_kv",),
    shims=("shims/gather.cc",),
    kernels=("kernels/gather.cu",),
    kernels_cpu=("kernels_cpu/gather.cc",),
)


def why_not_gather_paged_kv(k_cache: torch.Tensor, *args: object) -> str | None:
    return why_not_device(k_cache.device)


def gather_paged_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    starts: torch.Tensor,
    out_indptr: torch.Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    fault = faults.words(k_cache.device)
    fnuz = k_cache.dtype == FNUZ
    load_module(SPEC, k_cache.device).gather_paged_kv(
        *(k_cache, v_cache, kv_indices, kv_indptr, starts, out_indptr, kv_layout, fnuz, k_scale, v_scale),
        *(k_out, v_out, fault),
    )
    faults.settle(fault)
