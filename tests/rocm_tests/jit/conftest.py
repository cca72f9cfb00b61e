# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Private folders, the toy source tree, and stand-ins for ninja and ROCm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashinfer.core import env
from rocm_tests.jit.toy import SOURCES, script


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the caller's, and a cache and an ahead-of-time folder of the test's own."""
    for variable in env.variables():
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("FLASHINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """The toy source tree, under a name with a space in it."""
    root = tmp_path / "toy sources"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def ninja_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a ninja first on PATH that appends its arguments to this file, a line a run."""
    real, log = shutil.which("ninja"), tmp_path / "ninja-runs"
    assert real is not None, "these tests need ninja on PATH"
    log.touch()
    folder = script(tmp_path / "bin" / "ninja", f'echo "run $@" >> "{log}"\nexec "{real}" "$@"').parent
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return log


@pytest.fixture
def stand_in_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ROCm root whose hipcc is g++ and writes the architecture into the object; the runtime is empty."""
    root = tmp_path / "rocm"
    script(
        root / "bin" / "hipcc",
        """arch=none
for a in "$@"; do
  shift
  case "$a" in
    --version) echo "HIP version: 0.0 (stand-in)"; exit 0 ;;
    --offload-arch=*) arch=${a#*=} ;;
    hip) set -- "$@" c++ ;;
    *) set -- "$@" "$a" ;;
  esac
done
exec g++ "-DTOY_ARCH=\\"$arch\\"" "$@" """,
    )
    (root / "lib").mkdir()
    runtime = root / "lib" / "libamdhip64.so"
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", runtime], check=True)
    monkeypatch.setenv("ROCM_HOME", str(root))
    return root
