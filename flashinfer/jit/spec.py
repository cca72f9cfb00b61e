# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`JitSpec`: what a compiled module is made of, and the files that this draws in."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError

CONFIG_HEADER = "fi_config.h"

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ANY_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_QUOTED_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Foreign:
    """Sources of another project that are compiled into a module, from where that project is installed.

    Parameters
    ----------
    root
        The project's folder.
    sources
        Device code of the project, relative to `root`.
    includes
        Folders of its headers, in the order to search.
    glue
        Sources of ours that include its headers, relative to our source root. They are compiled with its flags.
    flags
        Its compiler flags.
    exports
        The symbols that the module shows. All others are hidden, also those that a compiler flag cannot hide: weak
        handles of kernels, which a second copy of the project in the process would otherwise share.
    identity
        What else tells one installation from another, for the manifest: names and texts.
    uses_torch
        Whether its sources include torch's headers.
    libraries
        Libraries of torch that they need, as far as this torch has them.
    """

    # Where things lie does not tell two of them apart.
    root: Path = field(compare=False)
    sources: tuple[str, ...]
    includes: tuple[Path, ...] = field(compare=False)
    glue: tuple[str, ...]
    flags: tuple[str, ...]
    exports: tuple[str, ...]
    identity: tuple[tuple[str, str], ...] = ()
    uses_torch: bool = False
    libraries: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the files as they were when first asked: names the module's ops in this process."""
        return hashlib.sha256(repr(sorted(self.file_digests().items())).encode()).hexdigest()

    def file_digests(self) -> dict[str, str]:
        """Digests of the sources and of all files that they include, by names that hold no path of this machine."""
        found: dict[Path, str] = {}
        todo = [(f"source/{name}", self.root / name) for name in self.sources]
        while todo:
            name, path = todo.pop()
            if path in found:
                continue
            found[path] = name
            for include in _ANY_INCLUDE.findall(_read(path)):
                todo += list(self._meanings(name, path, os.fsdecode(include)))[:1]
        return {name: hashlib.sha256(_read(path)).hexdigest() for path, name in sorted(found.items())}

    def _meanings(self, name: str, path: Path, include: str) -> Iterator[tuple[str, Path]]:
        """Names and files that an include may mean, as the compiler looks it up; none for a system header."""
        beside = (os.path.dirname(name), path.parent)
        for label, folder in (beside, *((f"include{i}", folder) for i, folder in enumerate(self.includes))):
            file = Path(os.path.normpath(folder / include))
            if file.is_file():
                yield os.path.normpath(f"{label}/{include}"), file


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise BackendUnavailableError(f"jit: {path} must be a readable file, got {e}; reinstall its package") from e


@dataclass(frozen=True)
class JitSpec:
    """A module to compile: the shims that register its ops, and their kernels.

    Parameters
    ----------
    name
        Family, for example "page". Two specs in one process have two names, also when only `defines` differ.
    ops
        Names of the ops the shims register. Each mutates its arguments and returns nothing.
    shims
        Host C++ that sees torch, relative to the source root, for example "shims/page.cc". It registers its
        ops in the namespace `FI_NAMESPACE`.
    kernels
        Device code for the targets hip and cuda, for example "kernels/page.cu". Never sees torch.
    kernels_cpu
        Its counterpart for the target cpu, for example "kernels_cpu/page.cc".
    defines
        Names and values of the generated header `fi_config.h`, which every source may include.
    foreign
        Sources of another project that go into the module.
    """

    name: str
    ops: tuple[str, ...]
    shims: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    kernels_cpu: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()
    foreign: Foreign | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(f"JitSpec: name must be lower-case letters, digits and _, got {self.name!r}")

    def kernels_for(self, target: str) -> tuple[str, ...]:
        """Kernel sources of one target; none if the module does not exist there, or needs none anywhere."""
        return self.kernels_cpu if target == "cpu" else self.kernels

    def exists_for(self, target: str) -> bool:
        """Whether the module can be built for the target."""
        return bool(self.kernels_for(target)) or not (self.kernels or self.kernels_cpu)

    @property
    def is_host_code(self) -> bool:
        """Whether devices of every kind use the module that is built for the CPU."""
        return bool(self.kernels_cpu) and not self.kernels and self.foreign is None

    def config_header(self) -> str:
        """Text of the generated header."""
        lines = [f"#define {name} {value}" for name, value in self.defines]
        return "\n".join(["// Generated from JitSpec.defines.", "#pragma once", *lines, ""])


def read_sources(root: Path, sources: Iterable[str]) -> dict[str, bytes]:
    """Contents, by path from `root`, of the sources and of all headers they include with quotes,
    transitively.

    An include that resolves to no file (the generated header, a system header in quotes) is left to the
    compiler. What an include means is looked up as the compiler does: beside the including file, then from
    `root`. Includes inside comments or `#if` count too: a needless rebuild is harmless, a missed one is not.
    """
    found: dict[str, bytes] = {}
    todo = [os.path.normpath(s) for s in sources]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        try:
            found[path] = (root / path).read_bytes()
        except OSError as e:
            raise InvalidArgumentError(f"JitSpec: source {path} must be a readable file under {root}, got {e}") from e
        for include in _QUOTED_INCLUDE.findall(found[path]):
            name = os.fsdecode(include)
            candidates = (os.path.normpath(os.path.join(os.path.dirname(path), name)), os.path.normpath(name))
            todo += [c for c in candidates if (root / c).is_file()][:1]
    return dict(sorted(found.items()))
