# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer module-status`: what is built, and whether it is what the sources now ask for."""

from __future__ import annotations

import argparse

from flashinfer.cli.build import aiter_specs, architectures, native_specs
from flashinfer.jit import aiter_lib, cache
from flashinfer.jit.toolchain import Toolchain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--arch", help="architectures to ask about; default as for build")


def run(args: argparse.Namespace) -> int:
    """Print a line for each module and architecture, then all directories there are."""
    current = set()
    for toolchain in (Toolchain.parse(arch) for arch in architectures(args.arch)):
        for spec in (*native_specs(), *(aiter_specs() if toolchain.target in aiter_lib.TARGETS else ())):
            if not spec.exists_for(toolchain.target):
                continue
            found = cache.find(spec, toolchain)
            if found:
                current.add(found[1].parent)
            print(f"{spec.name:<16} {toolchain.label:<12} {found[1] if found else 'not built'}")
    for title, root in (("built ahead of time", cache.aot_root()), ("cache", cache.cache_root())):
        entries = list(cache.entries(root))
        total = sum(entry.size for entry in entries)
        print(f"\n{title}: {root} ({len(entries)} modules, {total / 1024:.0f} KiB)")
        for entry in entries:
            state = "current" if entry.directory in current else "other version or compiler"
            print(f"  {entry.label}/{entry.directory.name}  {state if entry.whole else 'damaged'}")
    return 0
