# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer build`: compile modules without a GPU, for one or more architectures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from flashinfer.core import env
from flashinfer.core.aiter_install import find_aiter, why_not_aiter
from flashinfer.core.checks import fail
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.jit import aiter_lib
from flashinfer.jit.build import build
from flashinfer.jit.spec import JitSpec
from flashinfer.jit.toolchain import Toolchain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("names", nargs="*", help="modules; all by default, page_aiter if AITER is installed")
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
    """Build each module for each architecture, host code once for all, and print its path."""
    toolchains = [Toolchain.parse(arch) for arch in architectures(args.arch)]
    specs = chosen(native_specs(), args.names)
    root = args.out.absolute() if args.out else None
    host = Toolchain("cpu")
    wanted = [(spec, host if spec.is_host_code else toolchain) for toolchain in toolchains for spec in specs]
    # What GPUs need of host code would else be missing where nothing may be compiled.
    for spec, toolchain in dict.fromkeys(wanted):
        if spec.exists_for(toolchain.target):
            print(build(spec, toolchain, root=root), flush=True)
    # Last, as they may fail by no fault of this package's.
    for toolchain in toolchains:
        if toolchain.target in aiter_lib.TARGETS and (not args.names or aiter_lib.NAME in args.names):
            for spec in aiter_specs():
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
    """The named specs, all if no name is given; the names of modules with AITER's kernels are let pass."""
    optional = [aiter_lib.NAME] if find_aiter() is not None else []
    known = [spec.name for spec in specs] + optional
    for name in names:
        if name == aiter_lib.NAME and not optional:
            raise InvalidArgumentError(f"build: module {name!r} {why_not_aiter()}")
        if name not in known:
            raise InvalidArgumentError(f"build: module must be one of {known}, got {name!r}")
    return [spec for spec in specs if not names or spec.name in names]


def native_specs() -> list[JitSpec]:
    """Every module of the package."""
    from flashinfer.backends import native

    return list(native.specs())


def aiter_specs() -> list[JitSpec]:
    """The modules with kernels of the AITER that is installed, if one is."""
    install = find_aiter()
    return [] if install is None else [aiter_lib.cache_spec(install)]
