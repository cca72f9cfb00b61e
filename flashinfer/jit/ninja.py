# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a ninja file, runs ninja, and finds the command that failed."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashinfer.core import env
from flashinfer.core.errors import BackendUnavailableError

_STATUS = "[%f/%t] "
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")


@dataclass(frozen=True)
class Step:
    """One command that makes `output`, a name in the build directory, from `inputs`."""

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A command that failed, and what ninja printed from there on."""

    command: str
    output: str


def render(steps: Sequence[Step]) -> str:
    """Text of a ninja file that runs the steps."""
    lines = ["ninja_required_version = 1.3", "rule run", "  command = $line", "  description = $out"]
    for step in steps:
        lines += [
            f"build {_path(step.output)}: run {' '.join(map(_path, step.inputs))}",
            f"  line = {shlex.join(step.command).replace('$', '$$')}",
        ]
    return "\n".join([*lines, ""])


def _path(text: str) -> str:
    return re.sub(r"([$ :])", r"$\1", text)


def executable() -> str:
    """Path of ninja: that of PATH, else of the Python package `ninja`, whose script is often off PATH."""
    path = shutil.which("ninja")
    if path is not None:
        return path
    try:
        package = importlib.import_module("ninja")
    except ImportError as e:
        raise BackendUnavailableError("jit: ninja must be installed; run: pip install ninja") from e
    return os.path.join(package.BIN_DIR, "ninja")


def run(build_dir: Path, log: Path, progress: Callable[[int, int], None]) -> Failure | None:
    """Run ninja in `build_dir`, writing its output to `log`.

    Parameters
    ----------
    progress
        Called with the numbers of finished and of all steps.

    Returns
    -------
    Failure or None
        The first failure, or None after success.
    """
    jobs = env.max_jobs()
    command = [executable(), *(["-j", str(jobs)] if jobs else [])]
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        cwd=build_dir,
        env={**os.environ, "NINJA_STATUS": _STATUS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        with log.open("w") as file:
            for line in process.stdout or ():
                file.write(line)
                lines.append(line.rstrip("\n"))
                step = _STEP.match(line)
                if step:
                    progress(int(step.group(1)), int(step.group(2)))
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status == 0:
        return None
    return _failure(lines) or Failure(f"{shlex.join(command)} (exit status {status})", "\n".join(lines))


def _failure(lines: list[str]) -> Failure | None:
    for i, line in enumerate(lines):
        if line.startswith("FAILED: ") and i + 1 < len(lines):
            return Failure(lines[i + 1], "\n".join(lines[i + 2 :]))
    return None
