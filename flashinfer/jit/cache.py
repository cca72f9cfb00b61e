# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Where modules are kept, what names them, and which of them can be trusted.

A module is the directory `<root>/<target>/<name>-<digest>/` with the shared object and a manifest. The digest
covers everything that shapes the code, so a directory that exists and is whole is right: nobody ever has to
clear the cache.

Modules built ahead of time are matched by their *portable* key, which is the digest without the compiler: the
machine that runs them may have another compiler, or none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashinfer.core import env
from flashinfer.core.errors import BackendUnavailableError
from flashinfer.jit.spec import Foreign, JitSpec, read_sources
from flashinfer.jit.toolchain import KNOWN_ARCHES, Toolchain

MANIFEST = "manifest.json"
# Part of every key: raise it when the build itself changes in a way that nothing else in the key shows.
FORMAT = 1

_PACKAGE = Path(__file__).resolve().parent.parent
_ENTRY = re.compile(r"(?P<name>[a-z][a-z0-9_]*)-(?P<digest>[0-9a-f]{16})")
_LEFTOVER = re.compile(r"(\.tmp-[a-z].*|[a-z][a-z0-9_]*-[0-9a-f]{16}\.(lock|log))")


def csrc_root() -> Path:
    """Folder of the C++ sources: the checkout's, or the one inside an installed package."""
    checkout = _PACKAGE.parent / "csrc_rocm"
    return checkout if checkout.is_dir() else _PACKAGE / "data" / "csrc_rocm"


def cache_root() -> Path:
    """Folder that compiled modules go to. Not created here."""
    root = env.cache_dir()
    if root is not None:
        return root
    base = env.xdg_cache_home()
    if base is None:
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise BackendUnavailableError("jit: there is no home directory for the cache; set FLASHINFER_CACHE_DIR")
        base = Path(home) / ".cache"
    return base / "flashinfer"


def aot_root() -> Path:
    """Folder of modules built ahead of time; it need not exist."""
    return env.aot_dir() or _PACKAGE / "data" / "aot"


@dataclass(frozen=True)
class ModuleKey:
    """Everything that shapes a module, except for the compiler.

    Parameters
    ----------
    name
        The spec's name.
    label
        The toolchain's label.
    inputs
        Canonical JSON text of the rest, kept in the manifest for people to compare.
    """

    name: str
    label: str
    inputs: str

    @functools.cached_property
    def portable(self) -> str:
        """Digest of the inputs."""
        return hashlib.sha256(self.inputs.encode()).hexdigest()

    def directory(self, root: Path, compiler_identity: str) -> Path:
        """Where this module belongs under `root` when built by that compiler."""
        digest = hashlib.sha256(f"{self.portable}\n{compiler_identity}".encode()).hexdigest()
        return root / self.label / f"{self.name}-{digest[:16]}"


def module_key(spec: JitSpec, toolchain: Toolchain, csrc: Path) -> ModuleKey:
    """Key of the module that the spec and the sources as they are now make for the toolchain."""
    if not spec.exists_for(toolchain.target):
        raise BackendUnavailableError(f"jit: module {spec.name!r} has no kernels for the target {toolchain.target}")
    glue = spec.foreign.glue if spec.foreign else ()
    sources = read_sources(csrc, (*spec.shims, *spec.kernels_for(toolchain.target), *glue))
    inputs: dict[str, object] = {
        "format": FORMAT,
        "name": spec.name,
        "ops": spec.ops,
        "target": toolchain.target,
        "arch": toolchain.arch,
        "shims": spec.shims,
        "kernels": spec.kernels_for(toolchain.target),
        "sources": {path: hashlib.sha256(content).hexdigest() for path, content in sources.items()},
        "config": spec.config_header(),
        "kernel_flags": toolchain.kernel_flags,
        "shim_flags": toolchain.shim_flags,
        "link_flags": toolchain.link_flags,
        "torch": toolchain.torch_identity,
    }
    if spec.foreign is not None:
        inputs["foreign"] = _foreign_inputs(spec.foreign)
    return ModuleKey(spec.name, toolchain.label, json.dumps(inputs, sort_keys=True))


def _foreign_inputs(foreign: Foreign) -> dict[str, object]:
    return {
        "identity": dict(foreign.identity),
        "sources": foreign.sources,
        "glue": foreign.glue,
        "flags": foreign.flags,
        "exports": foreign.exports,
        "files": foreign.file_digests(),
        # Compiled against torch's internals, which may change between builds of one version, and Python's.
        "torch": torch.version.git_version if foreign.uses_torch else None,
        "python": sysconfig.get_config_var("SOABI") if foreign.uses_torch else None,
    }


def write_manifest(directory: Path, key: ModuleKey, compiler_identity: str) -> None:
    """Describe the module in `directory`; the last thing to be written there."""
    library = directory / f"{key.name}.so"
    manifest = {
        "name": key.name,
        "label": key.label,
        "portable": key.portable,
        "size": library.stat().st_size,
        "sha256": _sha256(library),
        "compiler": compiler_identity.splitlines(),
        "inputs": json.loads(key.inputs),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def whole_module(directory: Path) -> Path | None:
    """The shared object in `directory` if it is there and is what the manifest says, else None."""
    manifest = _read_manifest(directory)
    library = directory / f"{manifest.get('name')}.so"
    try:
        whole = library.stat().st_size == manifest.get("size") and _sha256(library) == manifest.get("sha256")
    except OSError:
        return None
    return library if whole else None


def find_portable(root: Path, key: ModuleKey) -> Path | None:
    """A module under `root` with this key, whichever compiler made it."""
    for directory in sorted((root / key.label).glob(f"{key.name}-*")):
        if _read_manifest(directory).get("portable") == key.portable:
            library = whole_module(directory)
            if library is not None:
                return library
    return None


def find(spec: JitSpec, toolchain: Toolchain, csrc: Path | None = None) -> tuple[Toolchain, Path] | None:
    """An existing module that runs on the toolchain's device, with the toolchain it was built for.

    Ahead-of-time modules come first, and need no compiler. In the cache, a module of the present compiler is
    asked for; where compiling is disabled or there is no compiler, one of any compiler will do.
    """
    keys = [(t, module_key(spec, t, csrc or csrc_root())) for t in toolchain.candidates()]
    for candidate, key in keys:
        library = find_portable(aot_root(), key)
        if library is not None:
            return candidate, library
    identity = None if env.disable_jit() else _identity_or_none(toolchain)
    for candidate, key in keys:
        root = cache_root()
        library = find_portable(root, key) if identity is None else whole_module(key.directory(root, identity))
        if library is not None:
            return candidate, library
    return None


def _identity_or_none(toolchain: Toolchain) -> str | None:
    try:
        return toolchain.compiler_identity()
    except BackendUnavailableError:
        return None


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A module's directory, as `module-status` lists it."""

    label: str
    name: str
    directory: Path
    size: int
    whole: bool


def entries(root: Path) -> Iterator[Entry]:
    """All module directories under `root`, whole or not."""
    for directory in _ours(root):
        match = _ENTRY.fullmatch(directory.name)
        if match:
            library = directory / f"{match['name']}.so"
            size = library.stat().st_size if library.is_file() else 0
            yield Entry(directory.parent.name, match["name"], directory, size, whole_module(directory) is not None)


def clear(root: Path) -> int:
    """Delete all modules under `root` and what killed builds left; return how many modules went.

    Touches only names that the cache itself gives: a variable that points at the wrong folder costs nothing.
    """
    count = 0
    for path in list(_ours(root)):
        count += bool(_ENTRY.fullmatch(path.name))
        remove(path)
    return count


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as that is possible: what stays is never taken for a module."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _ours(root: Path) -> Iterator[Path]:
    for target in KNOWN_ARCHES:
        for folder in sorted((*root.glob(target), *root.glob(f"{target}_*"))):
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if _ENTRY.fullmatch(path.name) or _LEFTOVER.fullmatch(path.name):
                    yield path
