# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The AMD compiler, and code objects compiled once a run for all tests that look into them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashinfer.jit.cache import csrc_root
from flashinfer.jit.spec import read_sources
from flashinfer.jit.toolchain import Toolchain
from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator, why_not

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(__file__).resolve().parent / "data"

CodeObjects = Callable[[str, str], CodeObject]


@dataclass(frozen=True)
class AmdToolchain:
    """The programs of the ROCm environment, which see the same paths as this process."""

    hipcc: str
    objdump: str
    version: str

    def compile(self, source: Path, root: Path, arch: str, output: Path) -> None:
        """Compile a kernel source for the device only, with the flags that modules are built with."""
        flags = [*Toolchain("hip", arch).kernel_flags, f"-I{root}"]
        command = [self.hipcc, *flags, "--cuda-device-only", "--no-gpu-bundle-output"]
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(output)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{source.name} does not compile for {arch}:\n{done.stderr}"


@pytest.fixture(scope="session")
def amd_toolchain() -> AmdToolchain:
    """Only for tests marked `amd_toolchain`: the marker is what skips where there is no compiler."""
    command = [str(ROOT / "scripts" / "rocm_env"), "path"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"amd_toolchain: {done.stderr.strip()}")
    hipcc, objdump = (shutil.which(p, path=done.stdout.strip()) for p in ("hipcc", "llvm-objdump"))
    assert hipcc, "hipcc must be where `rocm_env path` says"
    assert objdump, "llvm-objdump must be where `rocm_env path` says"
    version = subprocess.run([hipcc, "--version"], capture_output=True, text=True, check=True).stdout
    return AmdToolchain(hipcc, objdump, version)


@pytest.fixture(scope="session")
def code_objects(amd_toolchain: AmdToolchain, pytestconfig: pytest.Config) -> Iterator[CodeObjects]:
    """Code object of a source, "kernels/page.cu" or "toy.cu", for an architecture.

    Kept in pytest's cache under a digest of all that shapes it, so that only a changed source costs a compilation.
    The first request for a kernel starts all compilations, as many at a time as there are processors.
    """
    folder = Path(pytestconfig.cache.mkdir("code_objects"))
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    jobs: dict[tuple[str, str], Future[CodeObject]] = {}

    def build(name: str, arch: str) -> CodeObject:
        root = DATA if (DATA / name).exists() else csrc_root()
        sources = read_sources(root, (name,))
        parts = [amd_toolchain.version, arch, repr(Toolchain("hip", arch).kernel_flags)]
        digest = hashlib.sha256(repr((parts, sorted(sources.items()))).encode()).hexdigest()[:16]
        output = folder / f"{Path(name).stem}-{arch}-{digest}.co"
        if not output.exists():
            partial = output.with_suffix(f".{os.getpid()}")
            amd_toolchain.compile(root / name, root, arch, partial)
            partial.rename(output)
        return CodeObject(output)

    def get(name: str, arch: str) -> CodeObject:
        wanted = [(name, arch)]
        if name.startswith("kernels/"):
            wanted += [(source, a) for source in kernel_sources() for a in ("gfx942", "gfx950")]
        for key in wanted:
            if key not in jobs:
                jobs[key] = pool.submit(build, *key)
        return jobs[name, arch].result()

    yield get
    pool.shutdown(cancel_futures=True)


def kernel_sources() -> list[str]:
    """Every device source, relative to the source root."""
    return sorted(str(path.relative_to(csrc_root())) for path in csrc_root().rglob("*.cu"))


def triton_code(program: str, folder: Path) -> Path:
    """The folder, after a program beside this file has compiled its kernels for gfx942 into it."""
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), "gfx942", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return folder


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    source = os.environ.get("TINYGRAD_SRC")
    if reason := why_not(source):
        pytest.skip(f"emulator: {reason}")
    assert source
    return Emulator(source)
