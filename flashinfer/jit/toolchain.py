# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`Toolchain`: a target with its architecture, and the compilers and flags that make code for it.

Flags are split by what they may depend on. `kernel_flags`, `shim_flags` and `link_flags` are the same on
every machine and enter the digest as text; include and library paths differ from machine to machine and enter
it as the versions of torch and of the compilers.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from flashinfer.core import env
from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError

# "" stands for the one CPU target: modules use no instruction beyond the compiler's baseline.
KNOWN_ARCHES: dict[str, tuple[str, ...]] = {"cpu": ("",), "hip": ("gfx942", "gfx950"), "cuda": ("sm_90",)}

_COMMON = ("-O3", "-std=c++17")
_HIDDEN = ("-fPIC", "-fvisibility=hidden")
_KERNEL_FLAGS = {
    "cpu": (*_COMMON, *_HIDDEN, "-fopenmp", "-Wall"),
    "hip": ("-x", "hip", *_COMMON, *_HIDDEN, "-D__HIP_PLATFORM_AMD__"),
    "cuda": (*_COMMON, "-Xcompiler", ",".join(_HIDDEN)),
}
# torch's headers ask for C++20 from 2.13 on, and compile as such in the versions before.
_SHIM_FLAGS = ("-O2", "-std=c++20", *_HIDDEN, "-Wall")
# No run path: torch has loaded every library named here, its own build of them, before a module is opened.
# "defs" turns a launcher that nobody defines into a build error; otherwise the first to notice would be
# dlopen.
_LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-ltorch", "-ltorch_cpu", "-lc10")


@dataclass(frozen=True)
class Compiler:
    """A compiler's command line, without flags."""

    command: tuple[str, ...]

    @property
    def root(self) -> Path:
        """The installation it belongs to: the folder above its `bin`."""
        return Path(os.path.realpath(self.command[0])).parent.parent

    @property
    def identity(self) -> str:
        """Path and version text. Asks the compiler once a process, unless the file is replaced meanwhile."""
        stat = os.stat(self.command[0])
        return _identity(self.command, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _identity(command: tuple[str, ...], mtime_ns: int, size: int) -> str:
    line = (*command, "--version")
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise BackendUnavailableError(f"jit: {' '.join(line)} must print a version, got {e}") from e
    return f"{os.path.realpath(command[0])} {' '.join(command[1:])}\n{done.stdout.strip()}"


@dataclass(frozen=True)
class Toolchain:
    """What to compile for.

    Parameters
    ----------
    target
        "cpu", "hip" or "cuda".
    arch
        "" for cpu, else a known architecture. On hip it may carry feature flags as `gcnArchName` does:
        "gfx942:sramecc+:xnack-".

    Raises
    ------
    InvalidArgumentError
        If the target or the architecture is not a known one.
    """

    target: str
    arch: str = ""

    def __post_init__(self) -> None:
        if self.target not in KNOWN_ARCHES:
            raise InvalidArgumentError(f"Toolchain: target must be one of {sorted(KNOWN_ARCHES)}, got {self.target!r}")
        base, *features = self.arch.split(":")
        wrong = [f for f in features if self.target != "hip" or not re.fullmatch(r"(sramecc|xnack)[+-]", f)]
        if base not in KNOWN_ARCHES[self.target] or wrong:
            known = ", ".join(KNOWN_ARCHES[self.target])
            raise InvalidArgumentError(f"Toolchain: {self.target} arch must be one of [{known}], got {self.arch!r}")

    @classmethod
    def parse(cls, text: str) -> Toolchain:
        """Toolchain for one word as users write it: "cpu", "gfx942", "gfx942:xnack-", "sm_90"."""
        for target, arches in KNOWN_ARCHES.items():
            if text.split(":")[0] in arches and text:
                return cls(target, text)
        if text == "cpu":
            return cls("cpu")
        known = ", ".join(["cpu", *KNOWN_ARCHES["hip"], *KNOWN_ARCHES["cuda"]])
        raise InvalidArgumentError(f"Toolchain: architecture must be one of [{known}], got {text!r}")

    @classmethod
    def for_device(cls, device: torch.device) -> Toolchain:
        """Toolchain whose code runs on the device."""
        if device.type == "cpu":
            return cls("cpu")
        if device.type != "cuda":
            raise InvalidArgumentError(f"Toolchain: device type must be cpu or cuda, got {device}")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise BackendUnavailableError(f"jit: {device} must be a GPU of this machine, on which torch finds {count}")
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return cls("hip", properties.gcnArchName)
        return cls("cuda", f"sm_{properties.major}{properties.minor}")

    @property
    def label(self) -> str:
        """The target as one identifier, for directories and namespaces: "hip_gfx942_sramecc_on_xnack_off"."""
        arch = self.arch.replace(":", "_").replace("+", "_on").replace("-", "_off")
        return f"{self.target}_{arch}" if arch else self.target

    def candidates(self) -> tuple[Toolchain, ...]:
        """Toolchains whose code runs here, best first: code made without feature flags runs with any."""
        base = Toolchain(self.target, self.arch.split(":")[0])
        return (self,) if base == self else (self, base)

    @property
    def kernel_flags(self) -> tuple[str, ...]:
        """Flags for kernel sources."""
        arch = {
            "cpu": (),
            "hip": (f"--offload-arch={self.arch}",),
            "cuda": (f"-gencode=arch={self.arch.replace('sm', 'compute')},code={self.arch}",),
        }
        return (*_KERNEL_FLAGS[self.target], *arch[self.target])

    @property
    def shim_flags(self) -> tuple[str, ...]:
        """Flags for shims, without the namespace."""
        return (*_SHIM_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Flags of the link, without paths and without the GPU's runtime."""
        return (*_LINK_FLAGS, *(("-fopenmp",) if self.target == "cpu" else ()))

    @property
    def torch_identity(self) -> str:
        """Version and C++ ABI of torch, which shims are bound to."""
        return f"{torch.__version__} cxx11_abi={int(torch.compiled_with_cxx11_abi())}"

    def host_compiler(self) -> Compiler:
        """Compiler of shims and CPU kernels, and the linker."""
        return _compiler("C++ compiler", "CXX", env.cxx(), ("g++", "c++"))

    def kernel_compiler(self) -> Compiler:
        """Compiler of kernel sources."""
        if self.target == "cpu":
            return self.host_compiler()
        if self.target == "hip":
            root = env.rocm_home() or env.rocm_path()
            places = (f"{root}/bin/hipcc",) if root else ("hipcc", "/opt/rocm/bin/hipcc")
            return _compiler("HIP compiler", "HIPCC or ROCM_HOME", env.hipcc(), places)
        root = env.cuda_home()
        places = (f"{root}/bin/nvcc",) if root else ("nvcc", "/usr/local/cuda/bin/nvcc")
        return _compiler("CUDA compiler", "CUDA_HOME", (), places)

    def compiler_identity(self) -> str:
        """Paths and version texts of the compilers; raises `BackendUnavailableError` where one is missing."""
        return "\n".join(dict.fromkeys((self.host_compiler().identity, self.kernel_compiler().identity)))

    def shim_includes(self) -> tuple[str, ...]:
        """Include paths of torch, as system headers: their warnings are not ours to mend."""
        root = Path(torch.__file__).parent / "include"
        return ("-isystem", str(root), "-isystem", str(root / "torch/csrc/api/include"))

    def link_paths(self) -> tuple[str, ...]:
        """Paths of the link, and the GPU's runtime."""
        torch_lib = f"-L{Path(torch.__file__).parent / 'lib'}"
        if self.target == "cpu":
            return (torch_lib,)
        if self.target == "hip":
            # torch's folder goes first: its wheels bring the ROCm runtime that the process will have loaded.
            root = env.rocm_home() or env.rocm_path() or self.kernel_compiler().root
            return (
                torch_lib,
                *(f"-L{root / lib}" for lib in ("lib", "lib64") if (root / lib).is_dir()),
                "-lamdhip64",
            )
        return (torch_lib, str(_cudart(env.cuda_home() or _toolkit_root(self.kernel_compiler()))))


def _compiler(what: str, variable: str, wanted: tuple[str, ...], defaults: tuple[str, ...]) -> Compiler:
    for name in wanted[:1] or defaults:
        path = shutil.which(name)
        if path:
            return Compiler((os.path.abspath(path), *wanted[1:]))
    tried = " ".join(wanted) or ", ".join(defaults)
    raise BackendUnavailableError(f"jit: a {what} must be installed, tried {tried}; install one or set {variable}")


@functools.cache
def _toolkit_root(nvcc: Compiler) -> Path:
    """Root of the toolkit as nvcc itself states it: what is on PATH may be a wrapper that lies elsewhere."""
    done = subprocess.run(
        (*nvcc.command, "--dryrun", "-c", "-x", "cu", "/dev/null"),
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return Path(os.path.realpath(top.group(1))) if top else nvcc.root


def _cudart(root: Path) -> Path:
    """The CUDA runtime: the toolkit's, or that of torch's wheels, which has no unversioned name."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = [root / "lib64", root / "lib", *(lib for w in wheels for lib in sorted(w.glob("*/lib")))]
    for library in (found for folder in folders for found in sorted(folder.glob("libcudart.so*"))):
        return library
    raise BackendUnavailableError(f"jit: libcudart.so must be under {root} or in a wheel; install it or set CUDA_HOME")


@functools.cache
def why_not_device(device: torch.device) -> str | None:
    """A sentence if no module can run on the device, else None. Whether one compiles is another question."""
    try:
        Toolchain.for_device(device)
    except (BackendUnavailableError, InvalidArgumentError) as e:
        return str(e)
    return None
