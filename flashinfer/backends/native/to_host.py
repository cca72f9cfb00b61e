# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Small vectors of a device to the host, in one round trip, through csrc_rocm/shims/to_host.cc."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class ToHost(NamedTuple):
    """The torch ops for vectors of a device: Python functions around them would cost as much as the launch.

    Attributes
    ----------
    launch
        Takes up to eight 1-D int32 or int64 tensors of the device and returns as many on the host, which may be read,
        or dropped, once `wait` has returned.
    wait
        Waits for the device's current stream, on which `launch` was called.
    """

    launch: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    wait: Callable[[torch.device], None]


@functools.cache
def to_host(device: torch.device) -> ToHost:
    """The ops for a device."""
    ops = getattr(torch.ops, load_module(SPEC, device).namespace)
    return ToHost(ops.to_host.default._op, ops.to_host_wait.default._op)
