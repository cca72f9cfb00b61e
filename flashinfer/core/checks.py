# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Validation vocabulary: one place for the wording of a refusal."""

from __future__ import annotations

from typing import NoReturn

import torch

from flashinfer.core.errors import InvalidArgumentError

INDEX_DTYPES = (torch.int32, torch.int64)


def fail(op: str, argument: str, expected: str, got: object, remedy: str = "") -> NoReturn:
    """Raise `op: argument must be expected, got got; remedy`."""
    tail = f"; {remedy}" if remedy else ""
    raise InvalidArgumentError(f"{op}: {argument} must be {expected}, got {got}{tail}")


def describe(t: object) -> str:
    """Shape, dtype and device of a tensor, or the type of anything else."""
    if not isinstance(t, torch.Tensor):
        return type(t).__name__
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"


def index_vector(op: str, name: str, t: torch.Tensor, device: torch.device) -> None:
    """Refuse anything but a contiguous 1-D int32 or int64 tensor on `device`."""
    if t.dim() != 1:
        fail(op, name, "1-D", describe(t))
    if t.dtype not in INDEX_DTYPES:
        fail(op, name, "int32 or int64", describe(t), f"pass {name}.int()")
    if t.device != device:
        fail(op, name, f"on {device}", t.device, f"pass {name}.to({str(device)!r})")
    if not t.is_contiguous():
        fail(op, name, "contiguous", f"stride {t.stride()}", f"pass {name}.contiguous()")
