# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the package.

A caller's mistake is an `InvalidArgumentError` (a `ValueError`); what the machine cannot do is a
`RuntimeError`. Messages read `op: argument must be X, got Y; remedy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashinfer.jit.spec import JitSpec


class FlashInferError(Exception):
    """Base of every exception this package raises on purpose."""


class InvalidArgumentError(FlashInferError, ValueError):
    """An argument breaks the contract of the call."""


class NotPlannedError(FlashInferError, RuntimeError):
    """A wrapper was asked to run before it was given a plan."""


class BackendUnavailableError(FlashInferError, RuntimeError):
    """No backend, or not the one asked for, can take the call; the message says why for each."""


class BuildError(FlashInferError, RuntimeError):
    """A kernel module did not compile.

    Parameters
    ----------
    name
        The module.
    command
        The command that failed.
    log_tail
        The last lines it printed.
    """

    def __init__(self, name: str, command: str, log_tail: str) -> None:
        # The arguments and not the message: pickle hands them to the constructor in another process.
        super().__init__(name, command, log_tail)
        self.name = name
        self.command = command
        self.log_tail = log_tail

    def __str__(self) -> str:
        return f"build of module {self.name!r} failed\ncommand: {self.command}\n{self.log_tail}"


class MissingJITCacheError(FlashInferError, RuntimeError):
    """Compilation is disabled and the module was not built ahead of time.

    Parameters
    ----------
    spec
        The module that is missing.
    detail
        Where it was looked for.
    arch
        The target it is needed for, as `build --arch` takes it.
    """

    def __init__(self, spec: JitSpec, detail: str, arch: str = "cpu") -> None:
        super().__init__(spec, detail, arch)
        self.spec = spec
        self.detail = detail
        self.arch = arch

    def __str__(self) -> str:
        remedy = f"env -u FLASHINFER_DISABLE_JIT python -m flashinfer build --arch {self.arch} {self.spec.name}"
        return (
            f"module {self.spec.name!r} is not built and FLASHINFER_DISABLE_JIT is set; {self.detail}; "
            f"build it with: {remedy}"
        )


class LaunchError(FlashInferError, RuntimeError):
    """The runtime refused a kernel launch."""


class PoolLostError(FlashInferError, RuntimeError):
    """The memory that queued work was to run on is gone, or was closed to it."""
