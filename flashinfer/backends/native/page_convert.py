# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion through csrc_rocm/shims/page_convert.cc."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashinfer.core import faults
from flashinfer.core.op import checks_arguments
from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import why_not_device
from flashinfer.kv.format import KINDS

SPEC = JitSpec(
    name="page_convert",
    ops=("convert_kv_pages", "convert_kv_pages_into", "freeze_kv_pages", "convert_frozen_kv_pages"),
    shims=("shims/page_convert.cc",),
    kernels=("kernels/page_convert.cu",),
    kernels_cpu=("kernels_cpu/page_convert.cc",),
)

# Position in KINDS is PageKind of csrc_rocm/kernels/page_convert.h.
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def why_not_convert_kv_pages(planes: list[torch.Tensor], *args: object) -> str | None:
    return why_not_device(planes[0].device)


@checks_arguments
def convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    src_heads: int,
    src_page_size: int,
    dst: str,
    dst_heads: int,
    dst_page_size: int,
    head_dim: int,
    recode: int,
) -> None:
    device = planes[0].device
    fault = faults.words(device)
    load_module(SPEC, device).convert_kv_pages(
        planes,
        planes_per_layer,
        block_ids,
        (_NUMBERS[src], src_heads, src_page_size),
        (_NUMBERS[dst], dst_heads, dst_page_size),
        head_dim,
        recode,
        fault,
    )
    faults.settle(fault)


def bind_convert_kv_pages(
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    src_heads: int,
    src_page_size: int,
    dst: str,
    dst_heads: int,
    dst_page_size: int,
    head_dim: int,
    recode: int,
) -> Callable[[torch.Tensor], None]:
    """The same conversion of other `block_ids`: kernel arguments are kept, and the planes not looked at again.

    What is returned raises ValueError for ids that are no `[n]` int32 or int64 on the planes' device.
    """
    device = planes[0].device
    module = load_module(SPEC, device)
    frozen = torch.empty(0, dtype=torch.uint8)
    module.freeze_kv_pages(
        planes,
        planes_per_layer,
        block_ids,
        (_NUMBERS[src], src_heads, src_page_size),
        (_NUMBERS[dst], dst_heads, dst_page_size),
        head_dim,
        recode,
        faults.words(device),
        frozen,
    )
    convert = module.convert_frozen_kv_pages

    def run(block_ids: torch.Tensor) -> None:
        fault = faults.words(device)
        convert(frozen, block_ids, fault)
        faults.settle(fault)

    return run


def why_not_convert_kv_pages_into(sources: list[torch.Tensor], *args: object) -> str | None:
    return why_not_device(sources[0].device)


@checks_arguments
def convert_kv_pages_into(
    sources: list[torch.Tensor],
    sources_per_layer: int,
    source_ids: torch.Tensor,
    planes: list[torch.Tensor],
    planes_per_layer: int,
    block_ids: torch.Tensor,
    src: str,
    src_heads: int,
    src_page_size: int,
    dst: str,
    dst_heads: int,
    dst_page_size: int,
    head_dim: int,
    recode: int,
) -> None:
    device = planes[0].device
    fault = faults.words(device)
    load_module(SPEC, device).convert_kv_pages_into(
        sources,
        sources_per_layer,
        source_ids,
        planes,
        planes_per_layer,
        block_ids,
        (_NUMBERS[src], src_heads, src_page_size),
        (_NUMBERS[dst], dst_heads, dst_page_size),
        head_dim,
        recode,
        fault,
    )
    faults.settle(fault)
