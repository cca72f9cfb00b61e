# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Which AITER is installed, and whether it has kernels for a device, found out without importing it.

Importing AITER runs rocminfo and hipconfig, writes to the temp folder, may compile for minutes, and up to 0.1.11.post1
ends the process with `SystemExit` where that fails. What is asked here is answered by the import system and by files.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

# Those that AITER's kernels come for.
ARCHES = ("gfx942", "gfx950")
# "amd-aiter" on PyPI and AMD's indexes; builds from older checkouts call themselves "aiter".
_DISTRIBUTIONS = ("amd-aiter", "aiter")

# Major, minor, patch and post.
Version = tuple[int, int, int, int]


@dataclass(frozen=True)
class AiterInstall:
    """An AITER on the import path.

    Parameters
    ----------
    package
        The folder of the Python package `aiter`.
    meta
        The folder that holds `csrc` and `3rdparty`: `aiter_meta` beside the package, or the checkout.
    version
        As the distribution states it, else "unknown": editable installs may say "0.0" or nothing. Compare it where a
        Python signature depends on it; what can be read from a file is read from the file.
    commit
        Of an install from git, else None.
    """

    package: Path
    meta: Path
    version: str
    commit: str | None = None

    @property
    def csrc(self) -> Path:
        """AITER's C++ sources; whether they are there is another question."""
        return self.meta / "csrc"

    @property
    def release(self) -> Version | None:
        """The version as numbers, if it says anything."""
        return parse_version(self.version)

    def __str__(self) -> str:
        return f"AITER {self.version}{f' ({self.commit[:12]})' if self.commit else ''} in {self.package}"


def parse_version(text: str) -> Version | None:
    """`0.1.13.post2+anything` as numbers; None for what says nothing, as editable installs' 0.0 does."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", text)
    if found is None:
        return None
    major, minor, patch, post = (int(n or 0) for n in found.groups())
    return (major, minor, patch, post) if (major, minor, patch) > (0, 0, 0) else None


@functools.cache
def find_aiter() -> AiterInstall | None:
    """The AITER that `import aiter` would import, or None if there is none."""
    try:
        # Of a top-level name, this executes nothing.
        spec = importlib.util.find_spec("aiter")
    except ValueError:  # something without a spec was put into sys.modules
        return None
    # A module without a file is a stray folder of that name, and one without a folder is no package.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0]).resolve()
    version, commit = _distribution()
    return AiterInstall(package, _meta(package), version, commit)


def why_not_aiter() -> str | None:
    """A sentence if AITER is not installed, else None."""
    return None if find_aiter() is not None else "needs the package aiter, which is not installed"


@functools.cache
def why_not_gpu(device: torch.device) -> str | None:
    """A sentence if AITER has no kernels for the device, else None."""
    if device.type != "cuda" or torch.version.hip is None:
        return f"needs an AMD GPU, got {device}"
    arch = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    return None if arch in ARCHES else f"needs {' or '.join(ARCHES)}, got {arch}"


def why_not_here(device: torch.device) -> str | None:
    """A sentence if AITER is not for the device, where it is not looked for, or not installed; else None."""
    return why_not_gpu(device) or why_not_aiter()


def _meta(package: Path) -> Path:
    """AITER's own rule: a checkout has no such file or one that says "develop"; a left-over `aiter_meta` is no sign."""
    mode = package / "install_mode"
    try:
        installed = mode.read_text(encoding="utf-8", errors="replace").strip() != "develop"
    except OSError:  # there is none, or it cannot be read
        installed = False
    return package.parent / "aiter_meta" if installed else package.parent


def _distribution() -> tuple[str, str | None]:
    for name in _DISTRIBUTIONS:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            return found.version or "unknown", _commit(found.read_text("direct_url.json"))
        except (OSError, UnicodeDecodeError):  # metadata that cannot be read say nothing
            break
    return "unknown", None


def _commit(direct_url: str | None) -> str | None:
    try:
        commit = json.loads(direct_url or "{}").get("vcs_info", {}).get("commit_id")
    except (ValueError, AttributeError):
        return None
    return commit if isinstance(commit, str) else None
