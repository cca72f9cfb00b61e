# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Small vectors of a device to the host, in one round trip, through csrc_rocm/shims/to_host.cc."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(
    name="to_host",
    # None that only writes its arguments: this one has results.
    ops=(),
    shims=("shims/to_host.cc",),
    kernels=("kernels/to_host.cu",),
    kernels_cpu=("kernels_cpu/to_host.cc",),
)


@functools.cache
def to_host(device: torch.device) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """The torch op for vectors of a device: a Python function around it would cost as much as the launch."""
    namespace = load_module(SPEC, device).namespace
    op: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = getattr(torch.ops, namespace).to_host.default._op
    return op
