# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Instructions as the emulator of kernels runs them, and what tinygrad's emulator gets wrong, put right."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashinfer.core.errors import LaunchError

WAVE = 64


@dataclass
class Wave:
    """A wave, and the memories that its instructions are given."""

    state: Any
    buffers: tuple[ctypes.c_uint64, ...]
    done: bool = False
    waiting: bool = False


@dataclass(frozen=True)
class Step:
    """One instruction: its compiled function, or None where there is nothing to do.

    `special` runs it in the function's place, the program counter included.
    """

    run: Callable[..., object] | None
    buffers: tuple[int, ...]
    size: int
    is_barrier: bool
    special: Callable[[Step, Wave], None] | None = None

    def __call__(self, wave: Wave) -> None:
        """Run the compiled function."""
        assert self.run is not None
        self.run(*[wave.buffers[n] for n in self.buffers])


def running_lanes(state: Any, running: bool = True) -> list[int]:
    """Lanes that an instruction is for, or the others."""
    execute = state._read_sgpr(126) | state._read_sgpr(127) << 32
    return [lane for lane in range(WAVE) if bool(execute >> lane & 1) is running]


def _row(state: Any, register: int) -> list[int]:
    return [state._read_vgpr(register, lane) for lane in range(WAVE)]


def _set_row(state: Any, register: int, values: list[int]) -> None:
    for lane, value in enumerate(values):
        state._write_vgpr(register, lane, value)


_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "SWAP": lambda old, new: new,
    "ADD": lambda old, new: old + new,
    "SUB": lambda old, new: old - new,
    "AND": lambda old, new: old & new,
    "OR": lambda old, new: old | new,
    "XOR": lambda old, new: old ^ new,
    "UMIN": min,
    "UMAX": max,
}


@dataclass(frozen=True)
class GlobalAtomic:
    """A global atomic on integers. Done here: tinygrad's does not return the old value on CDNA, and compares wrong.

    The fields are those of the instruction's 64 bits (CDNA3 ISA, "FLAT").
    """

    name: str
    words: int
    offset: int
    returns: bool
    address: int
    data: int
    scalar: int
    result: int

    @classmethod
    def decode(cls, name: str, code: bytes) -> GlobalAtomic:
        short = name.removeprefix("GLOBAL_ATOMIC_")
        words = 2 if short.endswith("_X2") else 1
        short = short.removesuffix("_X2")
        if short != "CMPSWAP" and short not in _ATOMICS:
            raise LaunchError(f"emulator: {name} cannot be emulated")
        low, high = struct.unpack_from("<II", code)
        offset = (low & 0x1FFF) - (low << 1 & 0x2000)
        scalar = high >> 16 & 0x7F
        return cls(short, words, offset, bool(low >> 16 & 1), high & 0xFF, high >> 8 & 0xFF, scalar, high >> 24)

    def __call__(self, step: Step, wave: Wave) -> None:
        state, kind = wave.state, ctypes.c_uint64 if self.words == 2 else ctypes.c_uint32

        def vector(register: int, lane: int, words: int) -> int:
            return sum(int(state._read_vgpr(register + i, lane)) << 32 * i for i in range(words))

        for lane in running_lanes(state):
            if self.scalar == 0x7F:
                address = vector(self.address, lane, 2)
            else:
                address = state._read_sgpr(self.scalar) | state._read_sgpr(self.scalar + 1) << 32
                address += vector(self.address, lane, 1)
            cell = kind.from_address(address + self.offset)
            old, new = cell.value, vector(self.data, lane, self.words)
            if self.name != "CMPSWAP":
                cell.value = _ATOMICS[self.name](old, new)
            elif old == vector(self.data + self.words, lane, self.words):
                cell.value = new
            for i in range(self.words if self.returns else 0):
                state._write_vgpr(self.result + i, lane, old >> 32 * i)
        state.pc += step.size


@dataclass(frozen=True)
class LdsAccess:
    """An access to LDS whose addresses are in the vector register `address`.

    tinygrad's also reads for lanes that do not run, and writes back what it read: at address 0 that is harmless, at
    what their registers happen to hold it is not.
    """

    address: int

    @classmethod
    def decode(cls, code: bytes) -> LdsAccess:
        # The lowest byte of the second word (CDNA3 ISA, "DS").
        return cls(code[4])

    def __call__(self, step: Step, wave: Wave) -> None:
        state, idle = wave.state, running_lanes(wave.state, False)
        kept = [state._read_vgpr(self.address, lane) for lane in idle]
        for lane in idle:
            state._write_vgpr(self.address, lane, 0)
        step(wave)
        for lane, value in zip(idle, kept, strict=True):
            state._write_vgpr(self.address, lane, value)


@dataclass(frozen=True)
class _LaneMove:
    """A DPP instruction, run with a register to write to that it does not use otherwise, by a copy in `memory`."""

    step: Step
    memory: ctypes.Array[ctypes.c_char]
    spare: int
    result: int
    written: tuple[int, ...]

    def __call__(self, step: Step, wave: Wave) -> None:
        state, next_pc = wave.state, wave.state.pc + step.size
        kept = _row(state, self.spare)
        _set_row(state, self.spare, _row(state, self.result))
        state.pc = ctypes.addressof(self.memory)
        self.step(wave)
        for lane in self.written:
            state._write_vgpr(self.result, lane, state._read_vgpr(self.spare, lane))
        _set_row(state, self.spare, kept)
        state.pc = next_pc


def lane_move(code: bytes, compiled: Callable[[int, int], Step]) -> _LaneMove | None:
    """What runs a DPP instruction that tinygrad's emulator runs wrongly; None for others.

    Those are: writes to the register whose lanes are moved, as tinygrad's goes from lane to lane and reads what it has
    written; and lanes that must keep what they have, as tinygrad's takes that for their operand. The fields are those
    of CDNA3 ISA, "DPP". `compiled` is given an address and a size.
    """
    word, control = struct.unpack_from("<II", code)
    if word >> 25 == 0b0111110:
        return None  # comparisons write to no vector register
    result, second, source = word >> 17 & 0xFF, word >> 9 & 0xFF, control & 0xFF
    written = tuple(lane for lane in range(WAVE) if _writes(lane, control))
    if source != result and len(written) == WAVE:
        return None
    spare = next(register for register in range(4) if register not in (result, second, source))
    memory = ctypes.create_string_buffer(code, 32)
    struct.pack_into("<I", memory, 0, word & ~(0xFF << 17) | spare << 17)
    return _LaneMove(compiled(ctypes.addressof(memory), 8), memory, spare, result, written)


def _writes(lane: int, control: int) -> bool:
    """Whether a lane's row and bank take part, and it has a source or takes 0 for one."""
    move, in_row = control >> 8 & 0x1FF, lane % 16
    if not (control >> 28 >> lane // 16 & 1 and control >> 24 >> in_row // 4 & 1):
        return False
    if control >> 19 & 1:
        return True
    if 0x101 <= move <= 0x10F:
        return in_row + (move & 15) <= 15
    if 0x111 <= move <= 0x11F:
        return in_row >= move & 15
    return lane >= {0x138: 1, 0x142: 16, 0x143: 32}.get(move, 0) and (move != 0x130 or lane < WAVE - 1)


@dataclass(frozen=True)
class _StandIns:
    """An instruction run by a copy in `memory`, with other registers for some of its own: `moved` maps these to those.

    Of its registers it may write to `result`.
    """

    step: Step
    memory: ctypes.Array[ctypes.c_char]
    moved: dict[int, int]
    result: int | None

    def __call__(self, step: Step, wave: Wave) -> None:
        state, next_pc = wave.state, wave.state.pc + step.size
        kept = {spare: _row(state, spare) for spare in self.moved.values()}
        for register, spare in self.moved.items():
            _set_row(state, spare, _row(state, register))
        state.pc = ctypes.addressof(self.memory)
        self.step(wave)
        state.pc = next_pc
        if self.result is not None:
            _set_row(state, self.result, _row(state, self.moved[self.result]))
        for spare, values in kept.items():
            _set_row(state, spare, values)


def high_registers(bits: Mapping[str, int], code: bytes, compiled: Callable[[int, int], Step]) -> _StandIns | None:
    """What runs an instruction on 16 bits whose registers are v128 or higher; None for others.

    tinygrad's takes v128 for the upper half of v0, as RDNA 3 writes halves: CDNA's short encodings have 256 registers
    and know no halves (CDNA3 ISA, "VOP1", "VOP2", "VOPC"). `bits` are the sizes of operands; `compiled` is given an
    address and a size.
    """
    (word,) = struct.unpack_from("<I", code)
    source, second, result = word & 0x1FF, word >> 9 & 0xFF, word >> 17 & 0xFF
    if word >> 31 or source == 0xF9:
        return None  # long encodings, and SDWA
    is_move, is_comparison = word >> 25 == 0x3F, word >> 25 == 0x3E
    halves = bits.get("s0") == 16
    of_source = source - 256 if halves and source >= 256 + 128 else None
    of_second = second if halves and second >= 128 and not is_move else None
    of_result = result if bits.get("d") == 16 and result >= 128 and not is_comparison else None
    high = {register for register in (of_source, of_second, of_result) if register is not None}
    if not high:
        return None
    if source == 0xFA:
        raise LaunchError("emulator: an instruction on 16 bits that moves lanes must have registers below v128")
    taken = source - 256, second, result, result + 1
    moved = dict(zip(sorted(high), (n for n in range(8) if n not in taken), strict=False))
    for register, place in ((of_source, 0), (of_second, 9), (of_result, 17)):
        if register is not None:
            word = word & ~(0xFF << place) | moved[register] << place
    memory = ctypes.create_string_buffer(code, 32)
    struct.pack_into("<I", memory, 0, word)
    return _StandIns(compiled(ctypes.addressof(memory), 8), memory, moved, of_result)


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix instruction of 32 rows. tinygrad's puts the rows of its result elsewhere (CDNA3 ISA, "MFMA").

    Register r of lanes 0 to 31 is of row `8 (r // 4) + r % 4`, of the other lanes four rows behind; tinygrad's takes 16
    rows after one another. So the rows of the first operand are given in the order that makes up for it.
    """

    operand: int
    registers: int
    results: range

    @classmethod
    def decode(cls, name: str, code: bytes) -> MatrixProduct | None:
        """None for other shapes."""
        shape = re.match(r"V_MFMA_F32_32X32X(\d+)_(BF16|F16)", name)
        if shape is None:
            return None
        low, high = struct.unpack_from("<II", code)
        first, second = high & 0x1FF, high >> 9 & 0x1FF
        if first == second:
            raise LaunchError(f"emulator: {name} must multiply two different matrices")
        result = low & 0xFF
        # Half of the depth for each half of the lanes, two numbers to a register.
        return cls(first - 256, int(shape[1]) // 4, range(0) if low >> 15 & 1 else range(result, result + 16))

    def __call__(self, step: Step, wave: Wave) -> None:
        state, kept = wave.state, {}
        for register in range(self.operand, self.operand + self.registers):
            row = kept[register] = _row(state, register)
            _set_row(state, register, [row[source] for source in _ROWS_OF_32])
        step(wave)
        for register, row in kept.items():
            if register not in self.results:
                _set_row(state, register, row)


_ROWS_OF_32 = [half * 32 + 8 * (row % 16 // 4) + 4 * (row // 16) + row % 4 for half in range(2) for row in range(32)]


def row_broadcasts(emu: Any, of_tinygrad: Callable[..., Any]) -> Callable[..., tuple[Any, Any, Any]]:
    """In place of tinygrad's function for a DPP move: source lane, whether the lane takes part, whether there is one.

    tinygrad takes both broadcasts between rows of 16 lanes for one inside of a row; reductions end with them (CDNA3
    ISA, "DPP").
    """

    def found(lane: Any, control: int, *rest: int) -> tuple[Any, Any, Any]:
        source, enabled, valid = of_tinygrad(lane, control, *rest)
        signed = emu.dtypes.int
        at = lane.cast(signed)
        if control == 0x142:  # the last lane of a row to the next row
            source, valid = (at & emu._c(~15, signed)) - emu._c(1, signed), at >= emu._c(16, signed)
        elif control == 0x143:  # lane 31 to the rows behind it
            source, valid = emu._c(31, signed), at >= emu._c(32, signed)
        return source, enabled, valid

    return found
