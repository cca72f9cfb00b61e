# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Every environment variable the package reads, with its type and its default.

Each is an object to call, `env.disable_jit()`, so that the value is that of the moment and not that of the
import. Two that every call looks at, `FLASHINFER_BACKEND` and `FLASHINFER_CHECK`, are read at their first use and kept
(`at_first_use`).
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from flashinfer.core.errors import InvalidArgumentError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A typed environment variable; calling it reads it. Set but empty counts as unset.

    Parameters
    ----------
    name
        The variable's name.
    parse
        Turns text into a value; `ValueError` means that the text is not acceptable.
    default
        The value when unset.
    expects
        Completes the sentence "must be ...".
    doc
        What it does, for `show-config`.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    expects: str
    doc: str

    def __call__(self) -> T:
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as e:
            message = f"environment: {self.name} must be {self.expects}, got {text!r}; correct or unset it"
            raise InvalidArgumentError(message) from e

    @functools.cached_property
    def at_first_use(self) -> T:
        """The value when this was first asked for, kept for the life of the process.

        For what every call looks at: reading the environment takes 2 us, as long as the launch of a kernel.
        """
        return self()


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _path(text: str) -> Path | None:
    return Path(os.path.abspath(os.path.expanduser(text)))


def _words(text: str) -> tuple[str, ...]:
    words = tuple(w for w in re.split(r"[,;\s]+", text) if w)
    if not words:
        raise ValueError(text)
    return words


def _command(text: str) -> tuple[str, ...]:
    words = tuple(shlex.split(text))
    if not words:
        raise ValueError(text)
    return words


def _page_kind(text: str) -> str:
    kind = text.strip().lower()
    if kind not in ("standard", "shuffled"):
        raise ValueError(text)
    return kind


def _flag(name: str, doc: str) -> Variable[bool]:
    return Variable(name, _boolean, False, "one of 1/0, true/false, yes/no, on/off", doc)


def _folder(name: str, doc: str) -> Variable[Path | None]:
    return Variable(name, _path, None, "a path", doc)


def _compiler(name: str, doc: str) -> Variable[tuple[str, ...]]:
    return Variable(name, _command, (), "a command", doc)


backend = Variable("FLASHINFER_BACKEND", str.strip, "auto", "a backend's name", "backend of calls that name none")
check = _flag("FLASHINFER_CHECK", "after each call, wait for the device and raise what its kernels reported")
disable_jit = _flag("FLASHINFER_DISABLE_JIT", "never compile; use modules that were built ahead of time")
cache_dir = _folder("FLASHINFER_CACHE_DIR", "where compiled modules go; default ~/.cache/flashinfer")
aot_dir = _folder("FLASHINFER_AOT_DIR", "modules built ahead of time; default is inside the package")
rocm_arch_list: Variable[tuple[str, ...]] = Variable(
    "FLASHINFER_ROCM_ARCH_LIST",
    _words,
    (),
    "a list such as gfx942,gfx950",
    "targets of `python -m flashinfer build` when --arch is not given",
)
max_jobs = Variable("MAX_JOBS", _positive, 0, "a positive integer", "compile jobs at once; default is ninja's choice")
cxx = _compiler("CXX", "host C++ compiler; default g++, then c++")
hipcc = _compiler("HIPCC", "HIP compiler; default that of ROCM_HOME, then of PATH, then of /opt/rocm")
rocm_home = _folder("ROCM_HOME", "root of the ROCm installation")
rocm_path = _folder("ROCM_PATH", "the same, as ROCm's own tools call it; ROCM_HOME goes first")
cuda_home = _folder("CUDA_HOME", "root of the CUDA toolkit (verification target only); default that of nvcc on PATH")
vllm_pages = Variable(
    "FLASHINFER_VLLM_PAGES",
    _page_kind,
    "",
    "standard or shuffled",
    "pages of the vLLM backend; default is what VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT says",
)
vllm_cpu = _flag("FLASHINFER_VLLM_CPU", "run vLLM on the CPU without its compiled CPU kernels, where no GPU is")
xdg_cache_home = _folder("XDG_CACHE_HOME", "base of the default cache directory; default ~/.cache")


def variables() -> list[Variable[Any]]:
    """All variables, in the order of this file."""
    return [v for v in globals().values() if isinstance(v, Variable)]
