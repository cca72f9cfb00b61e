# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Loads modules into the process and hands out their ops."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError
from flashinfer.jit.build import namespace_of, obtain
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import Toolchain, why_not_device


class Module:
    """A loaded module. Its ops are attributes: what calls the default overload of a torch op.

    Parameters
    ----------
    spec
        What it was made from.
    toolchain
        What it was made for.
    path
        The shared object.
    """

    def __init__(self, spec: JitSpec, toolchain: Toolchain, path: Path) -> None:
        self.spec = spec
        self.toolchain = toolchain
        self.path = path
        self.namespace = namespace_of(spec, toolchain)
        try:
            # Loading runs the registrations in it; nothing is looked up by symbol.
            ctypes.CDLL(str(path))
        except OSError as e:
            raise BackendUnavailableError(f"jit: module {spec.name!r} at {path} must load, got {e}") from e
        for op in spec.ops:
            torch.library.register_fake(f"{self.namespace}::{op}", _write_only)
            # Without the overload's own __call__, which passes every argument on once more: 0.3 us of an append's 10.
            setattr(self, op, getattr(getattr(torch.ops, self.namespace), op).default._op)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def _write_only(*args: object) -> None:
    """Fake of every shim op: it writes its arguments, which changes no metadata, and returns nothing."""
    # torch also sends a real call here if one of its tensors is on the meta device: that must not pass for done.
    for t in pytree.tree_leaves(args):
        if isinstance(t, torch.Tensor) and t.is_meta and not isinstance(t, FakeTensor):
            raise InvalidArgumentError(f"jit: an op's tensors must be on its device, got one on {t.device}")


_lock = threading.RLock()
# By name, then by device: a key of both would have to be made at every call.
_by_device: defaultdict[str, dict[torch.device, Module]] = defaultdict(dict)
_by_namespace: dict[str, Module] = {}


def load_module(spec: JitSpec, device: torch.device, *, csrc: Path | None = None) -> Module:
    """The module for the device: found or compiled on first use, afterwards one dictionary look-up.

    Parameters
    ----------
    spec
        What to load. After the first call only its name is looked at.
    device
        Where its ops will run.
    csrc
        Source root; the package's own by default.

    Raises
    ------
    MissingJITCacheError, BuildError, BackendUnavailableError
        As `flashinfer.jit.build.obtain`.
    """
    module = _by_device[spec.name].get(device)
    if module is None:
        module = load_for(spec, Toolchain.for_device(device), csrc=csrc)
        _by_device[spec.name][device] = module
    return module


def why_not_module(spec: JitSpec, device: torch.device) -> str | None:
    """A sentence if no module of `spec` can run on the device, else None.

    Asking torch about a GPU takes microseconds, so a module that is loaded for the device is answer enough.
    """
    return None if device in _by_device[spec.name] else why_not_device(device)


def load_for(spec: JitSpec, toolchain: Toolchain, *, csrc: Path | None = None) -> Module:
    """The module for a toolchain, whether or not a device is there to run it.

    Devices of one architecture share a module. Raises as `load_module`.
    """
    with _lock:
        # A loaded module that was built without feature flags serves this toolchain too.
        for candidate in toolchain.candidates():
            module = _by_namespace.get(namespace_of(spec, candidate))
            if module is not None:
                if module.spec != spec:
                    raise InvalidArgumentError(f"load_module: spec {spec.name!r} must be the one loaded before this")
                return module
        found, path = obtain(spec, toolchain, csrc=csrc)
        module = Module(spec, found, path)
        _by_namespace[module.namespace] = module
        return module
