# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Host code of MLA in C++: the cutting of work into pieces, and the check whether two caches are one buffer.

All look at host memory and tensor metadata only, so there is one module, that of the CPU, for all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashinfer.jit.load import Module, load_module
from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(
    name="mla",
    # None that only writes its arguments: these have results.
    ops=(),
    shims=("shims/mla_plan.cc", "shims/mla_view.cc"),
    kernels_cpu=("kernels_cpu/mla_plan.cc",),
)
_HOST = torch.device("cpu")


def _module() -> Module:
    return load_module(SPEC, _HOST)


@functools.cache
def planner() -> Callable[..., tuple[list[int], torch.Tensor]]:
    """The torch op itself: a Python function around it would cost as much as it does."""
    found: Any = getattr(torch.ops, _module().namespace).mla_plan.default._op
    op: Callable[..., tuple[list[int], torch.Tensor]] = found
    return op


@functools.cache
def mla_kv_view_op() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """The torch op itself: a Python function around it would cost as much as it does."""
    namespace = _module().namespace
    torch.library.register_fake(f"{namespace}::mla_kv_view", _mla_kv_view_fake)
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] = getattr(torch.ops, namespace).mla_kv_view.default
    return op


def _mla_kv_view_fake(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor | None:
    """The rules of csrc_rocm/shims/mla_view.cc."""
    if ckv.dim() != 3 or kpe.dim() != 3 or ckv.dtype != kpe.dtype or ckv.device != kpe.device:
        return None
    pages, page_size, dim = ckv.shape
    if ckv.numel() == 0 or kpe.numel() == 0 or kpe.shape[:2] != ckv.shape[:2]:
        return None
    if any(t.size(2) > 1 and t.stride(2) != 1 for t in (ckv, kpe)):
        return None
    if ckv.untyped_storage()._cdata != kpe.untyped_storage()._cdata:
        return None
    if kpe.storage_offset() != ckv.storage_offset() + dim:
        return None
    width = dim + kpe.size(2)
    rows = ((1, width), (0, width * page_size))
    if any(ckv.size(d) > 1 and (ckv.stride(d) != want or kpe.stride(d) != want) for d, want in rows):
        return None
    return ckv.as_strided((pages, page_size, width), (page_size * width, width, 1))
