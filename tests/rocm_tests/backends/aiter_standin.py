# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for AITER on the import path, in both of its interfaces; it compiles for the CPU and for NVIDIA too."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashinfer.backends.aiter import entry, page
from flashinfer.core import aiter_install
from flashinfer.core.aiter_install import find_aiter
from flashinfer.jit import aiter_lib

DATA = Path(__file__).resolve().parent / "data" / "aiter_standin"
INTERFACES = ("torch_typed", "own_typed")
VERSION = "0.0.1"


def install(interface: str, folder: Path, version: str = VERSION) -> Path:
    """Put the stand-in into a folder as pip would; return that folder, to go on the import path."""
    shutil.copytree(DATA / interface, folder, dirs_exist_ok=True)
    shutil.copytree(DATA / "shared", folder / "aiter_meta" / "csrc" / "include", dirs_exist_ok=True)
    info = folder / f"amd_aiter-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n")
    return folder


@contextlib.contextmanager
def found(folder: Path | None, *, anywhere: bool = True) -> Iterator[None]:
    """The process as if it had just started and AITER were in this folder, or nowhere.

    `anywhere` lets the backend run on every device, as the stand-in does.
    """
    with pytest.MonkeyPatch.context() as patch:
        path = [p for p in sys.path if not (Path(p or ".") / "aiter").is_dir()]
        patch.setattr(sys, "path", [*([str(folder)] if folder else []), *path])
        _forget_modules()
        if anywhere:
            patch.setattr(aiter_lib, "TARGETS", ("hip", "cpu", "cuda"))
            patch.setattr(aiter_install, "why_not_gpu", lambda device: None)
        for module, name in (
            (aiter_lib, "_modules"),
            (aiter_lib, "_answers"),
            (entry, "_functions"),
            (entry, "_failures"),
            (page, "_units"),
        ):
            patch.setattr(module, name, {})
        find_aiter.cache_clear()
        try:
            yield
        finally:
            _forget_modules()
    find_aiter.cache_clear()


def _forget_modules() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
        del sys.modules[name]
