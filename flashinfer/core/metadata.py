# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Metadata of a batch where plans read them: in host memory."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


class Fetch:
    """Index vectors on their way to the host: one launch on the current stream for those of a GPU.

    What needs none of their values is best done before `wait`. That must be called on the same stream, whatever happens
    in between: the device writes memory that is dropped with this.

    Parameters
    ----------
    metadata
        1-D int32 or int64, at most eight on a device. Those that are on the host already stay as they are.
    """

    def __init__(self, *metadata: torch.Tensor) -> None:
        self._found = list(metadata)
        # One, unless somebody has metadata on several devices.
        self._devices = list(dict.fromkeys(t.device for t in metadata if not t.is_cpu))
        for device in self._devices:
            where = [i for i, t in enumerate(metadata) if t.device == device]
            found = _native().to_host(device).launch([metadata[i] for i in where])
            for i, t in zip(where, found, strict=True):
                self._found[i] = t

    def wait(self) -> list[torch.Tensor]:
        """All of them on the host, contiguous, of their dtypes; waits for the stream if any was away."""
        for device in self._devices:
            _native().to_host(device).wait(device)
        return [t if t.is_contiguous() else t.contiguous() for t in self._found]


def on_host(*metadata: torch.Tensor) -> list[torch.Tensor]:
    """`Fetch` and wait."""
    return Fetch(*metadata).wait()


@functools.cache
def _native() -> Any:
    """By name, as an op loads its backends: this layer imports none."""
    return importlib.import_module("flashinfer.backends.native.to_host")
