# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Metadata of a batch where plans read them: in host memory."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


def on_host(*metadata: torch.Tensor) -> list[torch.Tensor]:
    """Index vectors in host memory, contiguous; waits once, for what the current stream has queued, if any is on a GPU.

    Parameters
    ----------
    metadata
        1-D int32 or int64, at most eight on a device. Those that are on the host already are returned themselves.

    Returns
    -------
    list of torch.Tensor
        As many and of their dtypes.
    """
    away = [t for t in metadata if not t.is_cpu]
    found = {}
    # One, unless somebody has metadata on several devices.
    for device in dict.fromkeys(t.device for t in away):
        there = [t for t in away if t.device == device]
        found.update(zip(map(id, there), _native().to_host(device)(there), strict=True))
    return [t.contiguous() if t.is_cpu else found[id(t)] for t in metadata]


@functools.cache
def _native() -> Any:
    """By name, as an op loads its backends: this layer imports none."""
    return importlib.import_module("flashinfer.backends.native.to_host")
