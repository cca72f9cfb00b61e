# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that a process would otherwise do at the first call of each op, done ahead of all calls."""

from __future__ import annotations

import importlib
import pkgutil

import torch

from flashinfer.core import faults
from flashinfer.core.checks import fail


def warmup(device: torch.device | str | int | None = None) -> dict[str, str | None]:
    """Compile what is not compiled yet, and load it, so that no later call on the device has to.

    Triton's kernels are not among it: they are compiled at their first launch, for the shapes of that.

    For a serving process before it takes requests, and before it captures graphs. With modules that were built ahead of
    time (`python -m flashinfer build`) this takes as long as loading them.

    Parameters
    ----------
    device
        Where calls will run; by default the current GPU, or the CPU where torch has no GPU. Once for each GPU that is
        used.

    Returns
    -------
    dict
        Module name to None ("ready"), or for an optional one to the sentence that says why there is none: AITER is not
        installed, for example, or does not compile. What failed before is tried again.

    Raises
    ------
    InvalidArgumentError
        If `device` is neither a CPU nor a GPU of this machine.
    MissingJITCacheError
        If `FLASHINFER_DISABLE_JIT` is set and a module was not built ahead of time.
    BuildError, BackendUnavailableError
        If one of this package's own modules does not compile, or there is no compiler.
    """
    found = _device(device)
    answers: dict[str, str | None] = {}
    package = importlib.import_module("flashinfer.backends")
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        prepare = getattr(importlib.import_module(f"flashinfer.backends.{module}"), "prepare_all", None)
        if prepare is not None:
            answers |= prepare(found)
    # On a GPU these must not be born while a graph is being captured.
    faults.words(found)
    return answers


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        fail("warmup", "device", "the CPU or a GPU", repr(device))
    if found.type not in ("cpu", "cuda"):
        fail("warmup", "device", "the CPU or a GPU", repr(str(found)))
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        fail("warmup", "device", f"a GPU, of which torch finds {torch.cuda.device_count()}", repr(str(found)))
    if found.type == "cuda" and found.index is None:
        # Tensors name their GPU, and so do the memories of what is loaded for it.
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found
