# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the cache that hold contexts, through csrc_rocm/shims/mla_context.cc."""

from __future__ import annotations

import torch

from flashinfer.core import faults
from flashinfer.core.op import checks_arguments
from flashinfer.jit.load import load_module, why_not_module
from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(
    name="mla_context",
    ops=("mla_context_indices",),
    shims=("shims/mla_context.cc",),
    kernels=("kernels/mla_context.cu",),
    kernels_cpu=("kernels_cpu/mla_context.cc",),
)


def why_not_mla_context_indices(block_tables: torch.Tensor, *args: object) -> str | None:
    return why_not_module(SPEC, block_tables.device)


@checks_arguments
def mla_context_indices(
    block_tables: torch.Tensor,
    piece_requests: torch.Tensor,
    piece_starts: torch.Tensor,
    piece_indptr: torch.Tensor,
    num_pages: int,
    page_size: int,
    kv_indices: torch.Tensor,
) -> None:
    # What the compiled op would take for 0 and 1.
    if isinstance(num_pages, bool) or isinstance(page_size, bool):
        raise TypeError("refused")
    fault = faults.words(block_tables.device)
    load_module(SPEC, block_tables.device).mla_context_indices(
        block_tables, piece_requests, piece_starts, piece_indptr, num_pages, page_size, kv_indices, fault
    )
    faults.settle(fault)
