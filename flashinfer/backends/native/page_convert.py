# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion through csrc_rocm/shims/page_convert.cc."""

from __future__ import annotations

import torch

from flashinfer.core import faults
from flashinfer.core.op import checks_arguments
from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import why_not_device
from flashinfer.kv.format import KINDS

SPEC = JitSpec(
    name="page_convert",
    ops=("convert_kv_pages",),
    shims=("shims/page_convert.cc",),
    kernels=("kernels/page_convert.cu",),
    kernels_cpu=("kernels_cpu/page_convert.cc",),
)


def why_not_convert_kv_pages(planes: list[torch.Tensor], *args: object) -> str | None:
    return why_not_device(planes[0].device)


@checks_arguments
def convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    dst: str,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
) -> None:
    device = planes[0].device
    fault = faults.words(device)
    convert = load_module(SPEC, device).convert_kv_pages
    kinds = KINDS.index(src), KINDS.index(dst)
    convert(planes, planes_per_layer, block_ids, *kinds, num_kv_heads, page_size, head_dim, fault)
    faults.settle(fault)
