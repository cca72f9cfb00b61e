# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer show-config`: what a bug report should hold."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator

import torch

from flashinfer.core import env
from flashinfer.core.errors import FlashInferError
from flashinfer.core.op import known_backends
from flashinfer.jit import cache, ninja
from flashinfer.jit.toolchain import KNOWN_ARCHES, Toolchain
from flashinfer.version import __version__

# Distributions that install files into the same package directory as this one.
RIVALS = ("flashinfer-python", "amd-flashinfer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the configuration; warnings and errors go last, to stderr. 1 if a variable's value makes no sense."""
    for name, value in configuration():
        print(f"{name + ':':<28}{value}")
    for warning in warnings():
        print(f"warning: {warning}", file=sys.stderr)
    wrong = list(errors())
    for error in wrong:
        print(f"error: {error}", file=sys.stderr)
    return 1 if wrong else 0


def configuration() -> Iterator[tuple[str, str]]:
    """Names and values, in the order to print."""
    yield "flashinfer-rocm", __version__
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    yield "torch", f"{torch.__version__} (hip {torch.version.hip}, cuda {torch.version.cuda})"
    yield "devices", ", ".join(_devices()) or "no GPU"
    for package in ("amd-aiter", "triton", "vllm", "nixl"):
        yield package, _version(package) or "not installed"
    for target, arches in KNOWN_ARCHES.items():
        toolchain = Toolchain(target, arches[0])
        yield f"{target} compiler", _or_reason(functools.partial(_summary, toolchain))
        yield f"{target} architectures", ", ".join(arches) or "baseline"
    yield "ninja", _or_reason(ninja.executable)
    yield "sources", str(cache.csrc_root())
    yield "cache", _or_reason(cache.cache_root)
    yield "ahead-of-time modules", str(cache.aot_root())
    for variable in env.variables():
        yield variable.name, os.environ.get(variable.name) or f"unset ({variable.doc})"


def warnings() -> Iterator[str]:
    """What is likely to go wrong with this installation."""
    for name in RIVALS:
        version = _version(name)
        if version is not None:
            yield (
                f"{name} {version} is installed too and provides the same package `flashinfer`; "
                f"files of the two are mixed: pip uninstall {name}, then reinstall flashinfer-rocm"
            )


def errors() -> Iterator[str]:
    """What the calls that look at a variable will raise."""
    for variable in env.variables():
        try:
            variable()
        except FlashInferError as e:
            yield str(e)
    name, names = env.backend(), ("auto", *known_backends())
    if name not in names:
        yield f"environment: {env.backend.name} must be one of {names}, got {name!r}; correct or unset it"


def _devices() -> Iterator[str]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
        yield f"{index}: {properties.name} ({arch})"


def _summary(toolchain: Toolchain) -> str:
    compiler = toolchain.kernel_compiler()
    lines = compiler.identity.splitlines()[1:]
    likely = [line for line in lines if "version" in line.lower() or "release" in line]
    version = next(iter([*likely, *lines]), "no version text")
    return f"{' '.join(compiler.command)} ({version.strip()})"


def _or_reason(value: Callable[[], object]) -> str:
    try:
        return str(value())
    except FlashInferError as e:
        return str(e)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
