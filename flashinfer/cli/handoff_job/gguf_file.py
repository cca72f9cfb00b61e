# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Scalars and tensors of a GGUF file.

The reader of the `gguf` package makes Python objects of every token and merge of the vocabulary, which takes
longer than dequantising the whole model. A model runner needs neither, so arrays are stepped over here; the
dequantisation itself is left to the package.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path

import torch

from flashinfer.core.errors import InvalidArgumentError

_STRING, _ARRAY = 8, 9
# GGUF value type -> struct format.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclasses.dataclass(frozen=True)
class _TensorInfo:
    shape: tuple[int, ...]
    quantization: int
    offset: int


class GGUFFile:
    """A memory-mapped GGUF file.

    Parameters
    ----------
    path
        The file; only versions 2 and 3, little-endian.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        magic, version = self._take("4s"), self._integer("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise InvalidArgumentError(f"GGUFFile: path must be a GGUF file of version 2 or 3, got {path}")
        num_tensors, num_values = self._integer("Q"), self._integer("Q")
        self._scalars = dict(self._entry() for _ in range(num_values))
        self._tensors = dict(self._tensor_info() for _ in range(num_tensors))
        alignment = int(self._scalars.get("general.alignment", 32))
        self._data = math.ceil(self._position / alignment) * alignment

    def integer(self, name: str) -> int:
        """An integer of the header."""
        return int(self._scalars[name])

    def number(self, name: str) -> float:
        """A floating-point number of the header."""
        return float(self._scalars[name])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, dequantised to float32, in a buffer of its own."""
        import gguf
        import numpy as np

        info = self._tensors[name]
        quantization = gguf.GGMLQuantizationType(info.quantization)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        row_bytes = info.shape[-1] // block_elements * block_bytes
        rows = math.prod(info.shape[:-1])
        raw = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, self._data + info.offset)
        values = gguf.dequantize(raw.reshape(*info.shape[:-1], row_bytes), quantization)
        # Unquantised tensors come back as a read-only view of the file.
        owned = values if values.flags.writeable else values.copy()
        return torch.from_numpy(owned).reshape(info.shape)

    def _take(self, form: str) -> int | float | bytes:
        (value,) = struct.unpack_from("<" + form, self._bytes, self._position)
        self._position += struct.calcsize("<" + form)
        return value  # type: ignore[no-any-return]

    def _integer(self, form: str) -> int:
        return int(self._take(form))

    def _string(self) -> str:
        length = self._integer("Q")
        self._position += length
        return self._bytes[self._position - length : self._position].decode("utf-8")

    def _entry(self) -> tuple[str, int | float | bytes]:
        name, kind = self._string(), self._integer("I")
        if kind == _ARRAY:
            self._skip_array()
            return name, b""
        return name, self._string().encode() if kind == _STRING else self._take(_FORMATS[kind])

    def _skip_array(self) -> None:
        kind, count = self._integer("I"), self._integer("Q")
        if kind != _STRING:
            self._position += count * struct.calcsize("<" + _FORMATS[kind])
            return
        for _ in range(count):
            length = self._integer("Q")
            self._position += length

    def _tensor_info(self) -> tuple[str, _TensorInfo]:
        name, rank = self._string(), self._integer("I")
        # GGUF names the fastest-varying dimension first.
        shape = tuple(self._integer("Q") for _ in range(rank))[::-1]
        return name, _TensorInfo(shape, quantization=self._integer("I"), offset=self._integer("Q"))
