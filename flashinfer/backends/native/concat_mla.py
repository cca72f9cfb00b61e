# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of MLA put together through csrc_rocm/shims/concat_mla.cc."""

from __future__ import annotations

import torch

from flashinfer.core.op import checks_arguments
from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import why_not_device

SPEC = JitSpec(
    name="concat_mla",
    ops=("concat_mla_k",),
    shims=("shims/concat_mla.cc",),
    kernels=("kernels/concat_mla.cu",),
    kernels_cpu=("kernels_cpu/concat_mla.cc",),
)


def why_not_concat_mla_k(k: torch.Tensor, *args: object) -> str | None:
    return why_not_device(k.device)


@checks_arguments
def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    load_module(SPEC, k.device).concat_mla_k(k, k_nope, k_rope)
