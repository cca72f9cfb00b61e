# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What kernels in Triton must know of a device."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from flashinfer.core.dtypes import fp8_of


@functools.cache
def why_not(device: torch.device) -> str | None:
    """None, or why Triton cannot run there."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton"
    if device.type == "cuda":
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"needs a GPU, got {device}"


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory (LDS) that one program can have."""
    if device.type != "cuda":
        return 64 << 10
    properties = torch.cuda.get_device_properties(device)
    # ROCm's torch has no "opt-in" size: there is one.
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


@functools.cache
def fp8(device: torch.device) -> torch.dtype | None:
    """The FP8 flavour of the device; None where all work."""
    if device.type != "cuda":
        return None
    return fp8_of(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))


def power_of_2(n: int) -> int:
    """The least power of 2 that is not below `n`, at least 16: what a tile can be wide."""
    return max(16, 1 << (n - 1).bit_length())
