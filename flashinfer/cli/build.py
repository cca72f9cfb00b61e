# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer build`: compile modules without a GPU, for one or more architectures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flashinfer.core import env
from flashinfer.core.checks import fail
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.jit.build import build
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import Toolchain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("names", nargs="*", help="modules; all by default")
    parser.add_argument(
        "--arch",
        help="comma-separated: cpu, gfx942, gfx950, sm_90; default FLASHINFER_ROCM_ARCH_LIST, else cpu",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the modules go, for FLASHINFER_AOT_DIR or a wheel; default the cache of this machine",
    )


def run(args: argparse.Namespace) -> int:
    """Build each module for each architecture and print its path."""
    toolchains = [Toolchain.parse(arch) for arch in architectures(args.arch)]
    specs = chosen(native_specs(), args.names)
    root = args.out.absolute() if args.out else None
    for toolchain in toolchains:
        for spec in specs:
            if spec.exists_for(toolchain.target):
                print(build(spec, toolchain, root=root), flush=True)
    return 0


def architectures(argument: str | None) -> tuple[str, ...]:
    """Words of `--arch`, else of the variable, else the one target that every machine has."""
    if argument is not None:
        words = tuple(argument.replace(",", " ").split())
        if not words:
            fail("build", "--arch", "a list such as gfx942,gfx950", repr(argument))
        return words
    return env.rocm_arch_list() or ("cpu",)


def chosen(specs: Sequence[JitSpec], names: Sequence[str]) -> list[JitSpec]:
    """The named specs, all if no name is given."""
    known = [spec.name for spec in specs]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"build: module must be one of {known}, got {name!r}")
    return [spec for spec in specs if not names or spec.name in names]


def native_specs() -> list[JitSpec]:
    """Every module of the package."""
    from flashinfer.backends import native

    return list(native.specs())
