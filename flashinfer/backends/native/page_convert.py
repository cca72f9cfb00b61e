# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion through csrc_rocm/shims/page_convert.cc."""

from __future__ import annotations

import torch

from flashinfer.core import faults
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

MAX_LAYERS = 128  # kMaxLayers of csrc_rocm/kernels/page_convert.h: pointers travel in the kernel argument


def why_not_convert_kv_pages(planes: list[torch.Tensor], *args: object) -> str | None:
    return why_not_device(planes[0].device)


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
    for group in _launches(planes, planes_per_layer):
        convert(group, planes_per_layer, block_ids, *kinds, num_kv_heads, page_size, head_dim, fault)
    faults.settle(fault)


def _launches(planes: list[torch.Tensor], planes_per_layer: int) -> list[list[torch.Tensor]]:
    """Layers that one launch can take: equal page strides and page counts, at most MAX_LAYERS. Usually one group."""
    groups: dict[tuple[tuple[int, int], ...], list[torch.Tensor]] = {}
    for i in range(0, len(planes), planes_per_layer):
        layer = planes[i : i + planes_per_layer]
        groups.setdefault(tuple((p.stride(0), p.size(0)) for p in layer), []).extend(layer)
    step = MAX_LAYERS * planes_per_layer
    return [group[i : i + step] for group in groups.values() for i in range(0, len(group), step)]
