# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs kernels of an AMD code object on the CPU: the real machine code, wave by wave.

The instructions are executed by tinygrad's CDNA emulator, which is part of a source checkout of tinygrad and
of no package. This module sets a launch up as the GPU's dispatcher does (kernel arguments, registers, LDS) and
runs the waves of all workgroups in turns, so that workgroups may wait for one another, and a missing barrier
shows.

Limits of the emulator: `flat_` instructions and `s_setreg` do not work; conversions to FP8 follow OCP e4m3fn on
every architecture; there are no faults: a stray address reads or writes this process's memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import mmap
import os
import random
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError, LaunchError
from flashinfer.testing.codeobject import CodeObject, Kernel
from flashinfer.testing.emulator_fp8 import FromFp8
from flashinfer.testing.emulator_steps import (
    WAVE,
    GlobalAtomic,
    LdsAccess,
    MatrixProduct,
    Step,
    Wave,
    high_registers,
    lane_move,
    row_broadcasts,
)

LDS_UNIT = 512
_EMULATOR = "test/mockgpu/amd/emu.py"
# Write a cache back or invalidate it; there are none. The emulator would take them for memory accesses.
_CACHE_CONTROL = ("BUFFER_WBL2", "BUFFER_INV", "BUFFER_GL0_INV", "BUFFER_GL1_INV")


def why_not(source: str | None) -> str | None:
    """What is missing for emulation with this tinygrad checkout, or None."""
    if not source:
        return "TINYGRAD_SRC names no checkout of tinygrad"
    if not (Path(source) / _EMULATOR).is_file():
        return f"{source} has no {_EMULATOR}: it must be a source checkout of tinygrad"
    if sys.version_info < (3, 11):
        return f"tinygrad needs Python 3.11, this is {sys.version.split()[0]}"
    if shutil.which("clang") is None:
        return "clang is not on PATH (tinygrad compiles the emulated instructions with it)"
    return None


class Emulator:
    """The emulator of one tinygrad checkout.

    Parameters
    ----------
    source
        Root of the checkout.

    Raises
    ------
    BackendUnavailableError
        If something that `why_not` names is missing, or the checkout is not as this was written for.
    """

    def __init__(self, source: str) -> None:
        if reason := why_not(source):
            raise BackendUnavailableError(f"emulator: {reason}")
        self._emu = _import_emulator(source)
        self._arch = ""
        self._steps: dict[tuple[str, bytes], Step] = {}
        needed = (
            "decode_inst",
            "_init_wave",
            "_decode_at",
            "_BARRIER_OPS",
            "_MXCSRContext",
            "ENDPGM_PC",
            "_dpp16_ctrl",
        )
        if absent := [name for name in needed if not hasattr(self._emu, name)]:
            raise BackendUnavailableError(f"emulator: {source} must have {', '.join(absent)} in {_EMULATOR}")

    def launch(
        self,
        code: CodeObject,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[bytes],
        *,
        dynamic_lds: int = 0,
        seed: int = 0,
        slice_instructions: int = 200,
        max_instructions: int = 50_000_000,
    ) -> int:
        """Run a kernel to its end; return the number of wave instructions executed.

        Parameters
        ----------
        code, kernel
            What to run.
        grid, block
            Workgroups, and threads of a workgroup.
        arguments
            Bytes of each argument in the order of the signature; pointers are addresses in this process.
        dynamic_lds
            Bytes of LDS beyond the kernel's own.
        seed
            Of the order in which waves take turns.
        slice_instructions
            Longest turn of a wave; turns of random length bring races out.
        max_instructions
            Where to give up.

        Raises
        ------
        LaunchError
            If the kernel does not end, or comes to an instruction that cannot be emulated.
        """
        if code.arch not in ("gfx942", "gfx950"):
            raise InvalidArgumentError(f"Emulator.launch: arch must be gfx942 or gfx950, got {code.arch}")
        self._arch = code.arch
        kernarg = _kernel_arguments(kernel, grid, block, arguments, dynamic_lds)
        held = (ctypes.c_char * len(kernarg)).from_buffer(kernarg)
        entry, rsrc2, registers, memory = _load(code, kernel, kernarg, ctypes.addressof(held))
        threads = block[0] * block[1] * block[2]
        lds_size = -(-(kernel.lds_bytes + dynamic_lds) // LDS_UNIT) * LDS_UNIT or LDS_UNIT
        groups = []
        storage: list[object] = [held, memory]
        for z, y, x in itertools.product(range(grid[2]), range(grid[1]), range(grid[0])):
            # LDS holds what another kernel left there, never zeros.
            lds = (ctypes.c_uint8 * lds_size).from_buffer(bytearray(b"\xa5" * lds_size))
            storage.append(lds)
            group = []
            for first in range(0, threads, WAVE):
                scratch = (ctypes.c_uint8 * max(kernel.scratch_bytes * WAVE, 1))()
                storage.append(scratch)
                state = self._emu._init_wave(
                    entry,
                    first,
                    threads,
                    *block,
                    0,
                    rsrc2,
                    kernel.scratch_bytes,
                    "cdna",
                    x,
                    y,
                    z,
                    registers,
                    WAVE,
                )
                addresses = (
                    state.sgpr_buf._buf.va_addr,
                    state.vgpr_buf._buf.va_addr,
                    0,
                    ctypes.addressof(lds),
                    ctypes.addressof(scratch),
                    state.accvgpr_buf._buf.va_addr,
                )
                group.append(Wave(state, tuple(ctypes.c_uint64(a) for a in addresses)))
            groups.append(group)
        return self._run(groups, random.Random(seed), slice_instructions, max_instructions)

    def _run(self, groups: list[list[Wave]], order: random.Random, turn: int, limit: int) -> int:
        executed = 0
        # The emulator flushes denormals as the hardware's default mode does.
        with self._emu._MXCSRContext():
            while groups:
                waves = [(wave, group) for group in groups for wave in group if not (wave.done or wave.waiting)]
                order.shuffle(waves)
                for wave, group in waves:
                    executed += self._turn(wave, order.randint(1, turn))
                    if all(w.done or w.waiting for w in group):
                        for other in group:
                            other.waiting = False
                groups = [group for group in groups if not all(wave.done for wave in group)]
                if executed > limit:
                    raise LaunchError(f"emulator: the kernel must end within {limit} instructions")
        return executed

    def _turn(self, wave: Wave, count: int) -> int:
        end = self._emu.ENDPGM_PC
        for i in range(count):
            pc = wave.state.pc
            if pc == end:
                wave.done = True
                return i
            step = self._step(pc)
            if step.special is not None:
                step.special(step, wave)
            elif step.run is None:
                wave.state.pc = pc + step.size
            else:
                step(wave)
            if step.is_barrier:
                wave.waiting = True
                return i + 1
        return count

    def _step(self, pc: int) -> Step:
        code = ctypes.string_at(pc, 16)  # an instruction, and some of what follows it
        step = self._steps.get((self._arch, code))
        if step is None:
            instruction = self._emu.decode_inst(code, "cdna")
            operation = getattr(instruction, "op", None)
            name = getattr(operation, "name", "")
            if name.startswith("FLAT_"):  # it would run, on a wrong address
                raise LaunchError(f"emulator: the kernel must have no flat instruction, got {instruction}")
            if name in _CACHE_CONTROL:
                step = Step(None, (), instruction.size(), False)
            elif name.startswith("GLOBAL_ATOMIC_"):
                step = Step(None, (), instruction.size(), False, GlobalAtomic.decode(name, code))
            elif conversion := FromFp8.decode(name, code, self._arch):
                step = Step(None, (), instruction.size(), False, conversion)
            else:
                step = self._compiled(pc, instruction.size(), operation in self._emu._BARRIER_OPS)
                if name.startswith("DS_"):
                    step = replace(step, special=LdsAccess.decode(code))
                elif name.startswith("V_MFMA_"):
                    step = replace(step, special=MatrixProduct.decode(name, code))
                elif moved := high_registers(instruction.canonical_op_bits, code, self._compiled):
                    step = replace(step, special=moved)
                elif hasattr(type(instruction), "dpp"):
                    step = replace(step, special=lane_move(code, self._compiled))
            self._steps[self._arch, code] = step
        return step

    def _compiled(self, address: int, size: int, is_barrier: bool = False) -> Step:
        """The instruction at an address of this process."""
        (program, runtime), _ = self._emu._decode_at(address, "cdna")
        return Step(runtime.fxn, tuple(program.arg.globals), size, is_barrier)


def _kernel_arguments(
    kernel: Kernel, grid: Sequence[int], block: Sequence[int], arguments: Sequence[bytes], dynamic_lds: int
) -> bytearray:
    """The kernel-argument segment: the caller's arguments and the hidden ones that describe the launch."""
    explicit = [a for a in kernel.arguments if not a.kind.startswith("hidden_")]
    sizes, given = [a.size for a in explicit], [len(a) for a in arguments]
    if sizes != given:
        raise InvalidArgumentError(f"Emulator.launch: arguments of {kernel.name} must have {sizes} bytes, got {given}")
    hidden = {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": dynamic_lds}
    for axis, count, size in zip("xyz", grid, block, strict=True):
        hidden[f"hidden_block_count_{axis}"] = count
        hidden[f"hidden_group_size_{axis}"] = size
    segment = bytearray(max(kernel.kernarg_bytes, 8))
    for argument, value in zip(explicit, arguments, strict=True):
        segment[argument.offset : argument.offset + argument.size] = value
    for argument in kernel.arguments:
        if argument.kind in hidden:
            value = hidden[argument.kind].to_bytes(argument.size, "little")
            segment[argument.offset : argument.offset + argument.size] = value
    return segment


def _load(code: CodeObject, kernel: Kernel, kernarg: bytearray, address: int) -> tuple[int, int, list[int], mmap.mmap]:
    """Put the image into memory; return entry point, second resource word, user registers, and the memory."""
    image = code.image()
    descriptor = code.symbols()[kernel.name + ".kd"]
    (entry,) = struct.unpack_from("<q", image, descriptor + 16)
    (rsrc2,) = struct.unpack_from("<I", image, descriptor + 52)
    properties, preload = struct.unpack_from("<HH", image, descriptor + 56)
    memory = mmap.mmap(-1, len(image) + 65536)
    memory[: len(image)] = bytes(image)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    # User registers in the order that the dispatcher fills them: the descriptor's bits say which are wanted.
    registers: list[int] = []
    for bit, words in enumerate((4, 2, 2, 2, 2, 2, 1)):
        if properties >> bit & 1:
            is_kernarg = bit == 3
            registers += [address & 0xFFFFFFFF, address >> 32] if is_kernarg else [0] * words
    count, first = preload & 0x7F, preload >> 7
    registers += struct.unpack_from(f"<{count}I", kernarg + bytes(4 * (count + first)), first * 4)
    # Code that expects preloaded arguments starts with 256 bytes for hardware that does not preload.
    start = base + descriptor + entry + (256 if count else 0)
    return start, rsrc2, (registers + [0] * 16)[: rsrc2 >> 1 & 0x1F], memory


@functools.cache
def _import_emulator(source: str) -> ModuleType:
    with _environment("DEV", "CPU"), _first_on_path(source):
        # The checkout's `test` package shares its name with one of the standard library.
        for name in [n for n in sys.modules if n == "test" or n.startswith("test.")]:
            del sys.modules[name]
        module = importlib.import_module("test.mockgpu.amd.emu")
    if hasattr(module, "_dpp16_ctrl"):
        module._dpp16_ctrl = row_broadcasts(module, module._dpp16_ctrl)  # type: ignore[attr-defined]
    return module


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
