# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What is inside an AMD code object: its kernels, what they use of the machine, and their instructions.

A code object is the ELF file that hipcc writes, given
`--offload-arch=gfx942 --cuda-device-only --no-gpu-bundle-output -c`.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer.core.errors import InvalidArgumentError

# Bytes that one lane moves, by the name's end: global_load_dwordx4, buffer_store_short_d16_hi.
_WIDTHS = {
    "dwordx4": 16,
    "dwordx3": 12,
    "dwordx2": 8,
    "dword": 4,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
}
_ACCESS = re.compile(r"(?:global|flat|buffer|scratch)_(load|store)_([a-z]+(?:x[234])?)(?:_d16)?(?:_hi)?")
_NOTE_METADATA = 32  # NT_AMDGPU_METADATA


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, the compiler's hidden ones included.

    Parameters
    ----------
    kind
        "by_value", "global_buffer", "hidden_block_count_x", ...
    offset, size
        Where its bytes are in the kernel-argument segment.
    """

    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class Kernel:
    """One kernel as its metadata describe it.

    Parameters
    ----------
    name
        Mangled name.
    vgprs, agprs, sgprs
        Registers per lane, accumulation registers per lane, scalar registers per wave.
    lds_bytes, scratch_bytes
        Static LDS of a workgroup; scratch memory of a lane.
    vector_spills, scalar_spills
        Registers spilled: vector ones to scratch memory, scalar ones to the lanes of a vector register.
    max_threads
        Largest workgroup the kernel is compiled for.
    kernarg_bytes
        Size of the kernel-argument segment.
    arguments
        In the order of the signature, hidden ones last.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    vector_spills: int
    scalar_spills: int
    max_threads: int
    kernarg_bytes: int
    arguments: tuple[Argument, ...]

    def waves_per_simd(self, limit: int = 8) -> int:
        """Waves that share a SIMD by the registers: 512 per lane in steps of 8 on CDNA3 and CDNA4."""
        used = -(-self.vgprs // 8) * 8 or 8
        return min(limit, 512 // used)


@dataclass(frozen=True)
class Access:
    """A vector memory instruction: "load" or "store", the bytes per lane, and the whole mnemonic."""

    kind: str
    width: int
    mnemonic: str


class CodeObject:
    """A code object held in memory.

    Parameters
    ----------
    path
        The ELF file.

    Raises
    ------
    InvalidArgumentError
        If the file is no 64-bit ELF file for AMD GPUs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blob = path.read_bytes()
        machine = struct.unpack_from("<H", self.blob, 18)[0] if len(self.blob) >= 64 else 0
        if self.blob[:5] != b"\x7fELF\x02" or machine != 224:
            raise InvalidArgumentError(f"CodeObject: {path} must be an ELF file for AMD GPUs")
        metadata = self._metadata()
        # "amdgcn-amd-amdhsa--gfx942"; newer LLVM names the environment between the last dashes.
        self.arch = str(metadata["amdhsa.target"]).rsplit("-", 1)[-1].split(":")[0]
        self.kernels = tuple(_kernel(entry) for entry in metadata["amdhsa.kernels"])

    def kernel(self, *fragments: str) -> Kernel:
        """The kernel of this name, or the one kernel whose mangled name has all these fragments."""
        exact = [k for k in self.kernels if k.name == "".join(fragments)]
        found = exact or [k for k in self.kernels if all(f in k.name for f in fragments)]
        if len(found) != 1:
            names = "\n".join(k.name for k in found or self.kernels)
            raise InvalidArgumentError(
                f"CodeObject.kernel: {fragments} must name one kernel, got {len(found)} in\n{names}"
            )
        return found[0]

    def symbols(self) -> dict[str, int]:
        """Address of each symbol in the loaded image."""
        found: dict[str, int] = {}
        for section in self._sections():
            if section[1] not in (2, 11):  # SYMTAB, DYNSYM
                continue
            strings = self._sections()[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", self.blob, at)
                end = self.blob.index(b"\0", strings + name)
                found[self.blob[strings + name : end].decode()] = value
        found.pop("", None)
        return found

    def image(self) -> bytearray:
        """The file's segments laid out at their addresses, from address 0."""
        segments = [s for s in self._segments() if s[0] == 1]  # LOAD
        image = bytearray(max(s[3] + s[6] for s in segments))
        for _, _, offset, vaddr, _, size, *_ in segments:
            image[vaddr : vaddr + size] = self.blob[offset : offset + size]
        return image

    def instructions(self, objdump: str) -> dict[str, list[str]]:
        """Instructions of every function as text, "global_load_dwordx4 v[0:3], v4, s[2:3]".

        Parameters
        ----------
        objdump
            The program `llvm-objdump`.
        """
        command = [objdump, "-d", "--no-show-raw-insn", "--no-leading-addr", str(self.path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        functions: dict[str, list[str]] = {}
        current: list[str] = []
        for line in text.splitlines():
            if head := re.match(r"<([^>]+)>:$", line.strip()):
                current = functions.setdefault(head[1], [])
            elif line.startswith(("\t", " ")) and line.strip():
                current.append(line.split("//")[0].strip())
        return functions

    def _segments(self) -> list[tuple[int, ...]]:
        (at,) = struct.unpack_from("<Q", self.blob, 32)
        size, count = struct.unpack_from("<HH", self.blob, 54)
        return [struct.unpack_from("<IIQQQQQQ", self.blob, at + i * size) for i in range(count)]

    def _sections(self) -> list[tuple[int, ...]]:
        (at,) = struct.unpack_from("<Q", self.blob, 40)
        size, count = struct.unpack_from("<HH", self.blob, 58)
        return [struct.unpack_from("<IIQQQQIIQQ", self.blob, at + i * size) for i in range(count)]

    def _metadata(self) -> Mapping[str, Any]:
        for kind, _, offset, _, _, size, *_ in self._segments():
            at, end = offset, offset + size
            while kind == 4 and at < end:  # NOTE
                name_size, size_of, note = struct.unpack_from("<III", self.blob, at)
                start = at + 12 + -(-name_size // 4) * 4
                if note == _NOTE_METADATA:
                    value, _ = _unpack(self.blob, start)
                    if isinstance(value, dict):
                        return value
                at = start + -(-size_of // 4) * 4
        raise InvalidArgumentError(f"CodeObject: {self.path} must carry AMD GPU metadata (code object v3 or newer)")


def accesses(instructions: Sequence[str]) -> Counter[Access]:
    """Vector memory loads and stores among the instructions, without atomics and LDS."""
    found: Counter[Access] = Counter()
    for line in instructions:
        mnemonic = line.split()[0]
        if match := _ACCESS.fullmatch(mnemonic):
            found[Access(match[1], _WIDTHS[match[2]], mnemonic)] += 1
    return found


def _kernel(entry: Mapping[str, Any]) -> Kernel:
    arguments = [Argument(a[".value_kind"], a[".offset"], a[".size"]) for a in entry.get(".args", ())]
    return Kernel(
        name=entry[".name"],
        vgprs=entry[".vgpr_count"],
        agprs=entry.get(".agpr_count", 0),
        sgprs=entry[".sgpr_count"],
        lds_bytes=entry[".group_segment_fixed_size"],
        scratch_bytes=entry[".private_segment_fixed_size"],
        vector_spills=entry.get(".vgpr_spill_count", 0),
        scalar_spills=entry.get(".sgpr_spill_count", 0),
        max_threads=entry[".max_flat_workgroup_size"],
        kernarg_bytes=entry[".kernarg_segment_size"],
        arguments=tuple(arguments),
    )


_FIXED = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_SIZED = {0xD9: "B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def _unpack(blob: bytes, at: int) -> tuple[Any, int]:
    """Decode one MessagePack value, of the kinds that the metadata use; return it and where it ends."""
    tag = blob[at]
    at += 1
    if tag < 0x80 or tag >= 0xE0:
        return (tag if tag < 0x80 else tag - 256), at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in _FIXED:
        return struct.unpack_from(_FIXED[tag], blob, at)[0], at + struct.calcsize(_FIXED[tag])
    if tag in _SIZED:
        (size,) = struct.unpack_from(_SIZED[tag], blob, at)
        at += struct.calcsize(_SIZED[tag])
        kind = "text" if tag <= 0xDB else "list" if tag <= 0xDD else "map"
    elif 0x80 <= tag < 0xC0:
        kind, size = ("map", tag & 0xF) if tag < 0x90 else ("list", tag & 0xF) if tag < 0xA0 else ("text", tag & 0x1F)
    else:
        raise InvalidArgumentError(f"code object metadata: unexpected MessagePack tag {tag:#x}")
    if kind == "text":
        return blob[at : at + size].decode(), at + size
    values = []
    for _ in range(size * (2 if kind == "map" else 1)):
        value, at = _unpack(blob, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == "map" else values), at
