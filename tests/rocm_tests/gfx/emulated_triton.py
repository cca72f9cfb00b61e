# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Launches of Triton kernels that run in the emulator: compiled for gfx942 as Triton would for the very arguments."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import WAVE, Emulator

DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class EmulatedLaunch:
    """Stands in for `flashinfer.backends.triton.launch.launch`, on tensors of the host.

    Parameters
    ----------
    emulator
        Where waves run.
    folder
        For code objects.
    arch
        What kernels are compiled for.
    near
        Whether tensors count as being within 2 GiB, as which Triton addresses them by buffer instructions.
    """

    def __init__(self, emulator: Emulator, folder: Path, arch: str = "gfx942", *, near: bool = False) -> None:
        self.emulator, self.folder, self.arch, self.near = emulator, folder, arch, near
        self.launched: list[str] = []
        self._compiled: dict[Any, tuple[CodeObject, int]] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: tuple[torch.Tensor, ...],
        specialised: tuple[int, ...],
        others: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
        stages: int,
    ) -> None:
        values = (*tensors, *specialised, *others, *constants)
        names = kernel.arg_names
        assert len(names) == len(values), (names, len(values))
        known = dict(zip(names[-len(constants) :], constants, strict=True))
        # As Triton: an integer of 1 is a constant, and so is what it is a multiple of.
        first = len(tensors)
        known |= {n: 1 for n, v in zip(names[first : first + len(specialised)], specialised, strict=True) if v == 1}
        signature, attributes = {}, {}
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            signature[name] = "constexpr" if name in known else self._type(value)
            found = []
            if isinstance(value, torch.Tensor):
                found += [["tt.divisibility", 16]] * (value.data_ptr() % 16 == 0)
                found += [["tt.pointer_range", 32]] * self.near
            elif i < first + len(specialised) and name not in known and value % 16 == 0:
                found.append(["tt.divisibility", 16])
            if found:
                attributes[(i,)] = found
        key = (kernel, repr((signature, known, attributes)), warps, stages)
        if key not in self._compiled:
            source = ASTSource(kernel, signature, constexprs=known, attrs=attributes)
            options = {"num_warps": warps, "num_stages": stages}
            made = triton.compile(source, target=GPUTarget("hip", self.arch, WAVE), options=options)
            path = self.folder / f"{len(self._compiled)}.hsaco"
            path.write_bytes(made.asm["hsaco"])
            self._compiled[key] = CodeObject(path), made.metadata.shared
        code, lds = self._compiled[key]
        entry = code.kernel()
        arguments = [self._bytes(v) for n, v in zip(names, values, strict=True) if n not in known]
        # Triton adds pointers to memory that none of these kernels uses.
        explicit = [a for a in entry.arguments if not a.kind.startswith("hidden_")]
        arguments += [bytes(8)] * (len(explicit) - len(arguments))
        size = (*grid, 1, 1)[:3]
        dynamic = max(0, lds - entry.lds_bytes)
        self.emulator.launch(code, entry, size, (warps * WAVE, 1, 1), arguments, dynamic_lds=dynamic)
        self.launched.append(kernel.__name__)

    @staticmethod
    def _type(value: torch.Tensor | float) -> str:
        if isinstance(value, torch.Tensor):
            return f"*{DTYPES[value.dtype]}"
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    @staticmethod
    def _bytes(value: torch.Tensor | float) -> bytes:
        if isinstance(value, torch.Tensor):
            return struct.pack("<Q", value.data_ptr())
        if isinstance(value, float):
            return struct.pack("<f", value)
        return struct.pack("<i" if -(2**31) <= value < 2**31 else "<q", value)
