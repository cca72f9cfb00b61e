# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Launches without Triton's own look-up, which costs the host tens of microseconds for kernels of many arguments."""

from __future__ import annotations

from typing import Any

import torch

_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor, ...],
    specialised: tuple[int, ...],
    others: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> None:
    """Launch on the current stream of the tensors' device; the kernel's arguments come in this order.

    Parameters
    ----------
    kernel
        Of `triton.jit`.
    grid
        Programs.
    tensors
        Pointers. Kernels are compiled for their dtypes, for whether they are aligned to 16 bytes, and on AMD for
        whether their storage is below 2 GiB.
    specialised
        Integers that kernels are compiled for: whether they are 1, and multiples of 16.
    others
        Numbers that the kernel is declared not to be compiled for (`do_not_specialize`), and floats.
    constants
        Of type `constexpr`, the last arguments.
    """
    first = tensors[0]
    on_device = first.device.index if first.is_cuda else -1
    if on_device < 0 or on_device == torch.cuda.current_device():
        _launch(kernel, grid, tensors, specialised, others, constants, warps, stages)
        return
    with torch.cuda.device(on_device):
        _launch(kernel, grid, tensors, specialised, others, constants, warps, stages)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor, ...],
    specialised: tuple[int, ...],
    others: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> None:
    # An integer of 1 is a constant to Triton, one beyond 31 bits an int64.
    classes = [0 if n == 1 else (n & 15 == 0) + (1 if -(2**31) <= n < 2**31 else 3) for n in specialised]
    addresses = [t.data_ptr() for t in tensors]
    aligned = [address & 15 == 0 for address in addresses]
    # On AMD Triton addresses what is within 2 GiB by 32 bits.
    near = [t.untyped_storage().nbytes() < 2**31 for t in tensors]
    dtypes = [t.dtype for t in tensors]
    key = (kernel, tensors[0].device, *dtypes, *aligned, *near, *classes, constants, warps, stages)
    found = _compiled.get(key)
    if found is None:
        # The interpreter returns nothing, and is asked each time.
        made = kernel[grid](*tensors, *specialised, *others, *constants, num_warps=warps, num_stages=stages)
        if made is not None:
            _compiled[key] = made
        return
    # Of a tensor Triton's launcher would ask the address again, and the driver whether it is one of the device.
    found[(*grid, 1, 1)[:3]](*addresses, *specialised, *others, *constants)
