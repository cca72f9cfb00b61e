# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`JitSpec`: what a compiled module is made of, and the files that this draws in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashinfer.core.errors import InvalidArgumentError

CONFIG_HEADER = "fi_config.h"

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_QUOTED_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


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
    """

    name: str
    ops: tuple[str, ...]
    shims: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    kernels_cpu: tuple[str, ...] = ()
    defines: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(f"JitSpec: name must be lower-case letters, digits and _, got {self.name!r}")

    def kernels_for(self, target: str) -> tuple[str, ...]:
        """Kernel sources of one target; none if the module does not exist there, or needs none anywhere."""
        return self.kernels_cpu if target == "cpu" else self.kernels

    def exists_for(self, target: str) -> bool:
        """Whether the module can be built for the target."""
        return bool(self.kernels_for(target)) or not (self.kernels or self.kernels_cpu)

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
