# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Every supported Python reads every file. mypy, set to 3.10, sees to names that 3.10's library lacks."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from rocm_tests.conventions.tree import ROOT, python_files, read


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_the_grammar_is_that_of_the_oldest_python(path: Path) -> None:
    ast.parse(read(path), filename=str(path), feature_version=(3, 10))


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: a version manager's stand-in on PATH may not."""
    managed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, managed)):
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_file_compiles(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH")
    # Warnings as errors: a newer Python first warns of what a later one refuses, such as a stray backslash.
    done = subprocess.run(
        [python, "-W", "error", "-m", "compileall", "-q", "-f", *map(str, python_files())],
        cwd=ROOT,
        env={"PYTHONPYCACHEPREFIX": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
