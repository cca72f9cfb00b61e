# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The one way to AITER's Python functions.

Importing AITER runs programs and may compile for minutes, so it happens when a function is first wanted. What cannot be
imported is not tried again: the next try would take as long.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import torch

from flashinfer.core import aiter_install
from flashinfer.core.errors import BuildError

logger = logging.getLogger("flashinfer")

_PACKAGE = "aiter"
# What code of others may end in while it is imported. AITER up to 0.1.11.post1 exits where one of its modules does not
# compile; later ones raise RuntimeError, or go on with names missing.
_ODD = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
    subprocess.SubprocessError,
)

_lock = threading.RLock()
_functions: dict[tuple[str, str], Callable[..., Any]] = {}
# By module, or by module and function where only that is missing.
_failures: dict[str, str] = {}


def why_not(device: torch.device, module: str, *names: str) -> str | None:
    """A sentence if AITER is not for the device, is not installed, or lacks what is named as far as is known by now."""
    reason = aiter_install.why_not_here(device)
    if reason is None and _failures:
        reason = _why_not_imported(module, *names)
    return reason


def _why_not_imported(module: str, *names: str) -> str | None:
    known = (_PACKAGE, module, *(f"{module}.{name}" for name in names))
    return next((_failures[what] for what in known if what in _failures), None)


def entry_point(module: str, name: str) -> Callable[..., Any]:
    """A function of AITER's; after the first time, one dictionary look-up.

    Raises
    ------
    BuildError
        If it cannot be had. That is remembered, logged once, and answered by `why_not`.
    """
    found = _functions.get((module, name))
    if found is not None:
        return found
    with _lock:
        if _why_not_imported(module, name) is None:
            _load(module, name)
        reason = _why_not_imported(module, name)
        if reason is not None:
            raise BuildError(module, f"from {module} import {name}", reason)
        return _functions[module, name]


def _load(module: str, name: str) -> None:
    # The package first: where that fails, no module of it is tried.
    for what in (_PACKAGE, module):
        try:
            loaded = importlib.import_module(what)
        except _ODD as e:
            return _remember(what, f"{what} cannot be imported: {type(e).__name__}: {e}".rstrip(": "))
    function = getattr(loaded, name, None)
    if function is None:
        return _remember(f"{module}.{name}", f"{aiter_install.find_aiter()} has no {name} in {module}")
    _functions[module, name] = function


def _remember(what: str, reason: str) -> None:
    _failures[what] = reason
    logger.warning("AITER is not used: %s", reason)


def forget() -> None:
    """Drop what is remembered of failures, so that the next use tries again."""
    with _lock:
        _failures.clear()
