# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""AITER's cache kernels, compiled together with our way into them.

AITER compiles its modules with hidden symbols, so nothing of them can be linked; it keeps its stream in a thread-local
variable that every shared object has for itself; and what it compiles on first use is named neither by its version nor
by the architecture. So its kernel source goes, from where AITER is installed, into a module of ours
(csrc_rocm/aiter/entry.cc), built in processes of the compiler's and named by a digest of AITER's files as of all else.

AITER itself is never imported, and none of its environment variables matter.
"""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import torch

from flashinfer.core import aiter_install
from flashinfer.core.aiter_install import AiterInstall
from flashinfer.core.errors import BackendUnavailableError, BuildError
from flashinfer.jit.load import Module, load_for
from flashinfer.jit.spec import Foreign, JitSpec
from flashinfer.jit.toolchain import Toolchain, why_not_device

logger = logging.getLogger("flashinfer")

# AITER has kernels for AMD GPUs only.
TARGETS = ("hip",)
NAME = "page_aiter"
ENTRY = "fi_aiter_reshape_and_cache_flash"

_KERNELS = "csrc/kernels/cache_kernels.cu"
_DECLARATION = re.compile(r"\bvoid\s+reshape_and_cache_flash\s*\(\s*([\w:]+)\s*&")
_TORCH, _OWN = "torch::Tensor", "aiter_tensor_t"
# What AITER's own build passes for this module and the kernels depend on; torch's headers ask for C++20.
_FLAGS = (
    "-std=c++20",
    "-DENABLE_FP8",
    "-DUSE_ROCM=1",
    "-D__HIP_PLATFORM_AMD__=1",
    "-U__HIP_NO_HALF_CONVERSIONS__",
    "-U__HIP_NO_HALF_OPERATORS__",
)
# From 0.1.14 on the unit needs neither torch nor composable_kernel if it is told so.
_OWN_FLAGS = ("-DENABLE_CK=0", "-DAITER_CK_FREE=1", "-DAITER_NO_TORCH_TYPES=1")

_lock = threading.RLock()
_modules: dict[torch.device, Module] = {}
_answers: dict[torch.device, str | None] = {}


def cache_spec(install: AiterInstall, *, extra_includes: tuple[Path, ...] = ()) -> JitSpec:
    """The module with the cache kernels of an AITER installation.

    Which of its interfaces an AITER has is read in its headers: version numbers of builds from a checkout say nothing.

    Parameters
    ----------
    install
        Where AITER is.
    extra_includes
        Folders to search before AITER's, for a machine without the header-only libraries of ROCm.

    Raises
    ------
    BackendUnavailableError
        If the installation has no such sources, or ones with an interface that is not known here.
    """
    declared = _DECLARATION.search(_text(install, "csrc/include/cache.h"))
    tensor = declared[1] if declared else None
    if tensor is None or tensor not in (_TORCH, _OWN):
        found = f"reshape_and_cache_flash({tensor}&, ...)" if tensor else "no reshape_and_cache_flash"
        raise BackendUnavailableError(
            f"aiter: csrc/include/cache.h must declare the function with {_TORCH} or {_OWN}, got {found} in {install}"
        )
    has_stream = (install.csrc / "include/aiter_stream.h").is_file()
    common = "csrc/include/aiter_hip_common.h"
    can_throw = (install.meta / common).is_file() and "g_aiter_can_throw" in _text(install, common)
    probed = {"TORCH": tensor == _TORCH, "STREAM": has_stream, "CAN_THROW": can_throw}
    return JitSpec(
        name=NAME,
        ops=("append_paged_kv_cache",),
        shims=("shims/page_aiter.cc",),
        kernels=("kernels/page_aiter.cu",),
        kernels_cpu=("kernels_cpu/page_aiter.cc",),
        defines=tuple((f"FI_AITER_{name}", str(int(value))) for name, value in probed.items()),
        foreign=Foreign(
            root=install.meta,
            sources=(_KERNELS,),
            includes=(*extra_includes, *_includes(install, tensor)),
            glue=("aiter/entry.cc",),
            flags=_FLAGS if tensor == _TORCH else (*_FLAGS, *_OWN_FLAGS),
            exports=(ENTRY,),
            identity=(("aiter", install.version), ("commit", install.commit or "unknown")),
            uses_torch=tensor == _TORCH,
            libraries=("c10_hip", "torch_hip") if tensor == _TORCH else (),
        ),
    )


def _includes(install: AiterInstall, tensor: str) -> tuple[Path, ...]:
    own = (install.csrc / "include", install.csrc / "include/ck_tile")
    ck = install.meta / "3rdparty"
    return (*own, ck / "ck_helper", ck / "composable_kernel/include") if tensor == _TORCH else own


def _text(install: AiterInstall, name: str) -> str:
    try:
        return (install.meta / name).read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise BackendUnavailableError(f"aiter: {name} must be a readable file of {install}, got {e}") from e


def why_not_cache_module(device: torch.device) -> str | None:
    """A sentence if AITER's cache kernels cannot serve the device or were found not to compile; builds nothing."""
    if device not in _answers:
        _answers[device] = _why_not_device(device)
    return _answers[device]


def _why_not_device(device: torch.device) -> str | None:
    return aiter_install.why_not_gpu(device) or why_not_device(device) or aiter_install.why_not_aiter()


def cache_module(device: torch.device) -> Module:
    """The module for a device; after the first call, one dictionary look-up.

    Raises
    ------
    MissingJITCacheError
        If it is not built and `FLASHINFER_DISABLE_JIT` is set.
    BuildError, BackendUnavailableError
        If it cannot be had. That is remembered until `forget()`, logged once, and answered by `why_not_cache_module`:
        a serving process does not compile at every call what did not compile at the first.
    """
    module = _modules.get(device)
    if module is not None:
        return module
    with _lock:
        reason = why_not_cache_module(device)
        if reason is not None:
            raise BackendUnavailableError(f"aiter: {reason}")
        install = aiter_install.find_aiter()
        if install is None:
            raise BackendUnavailableError(f"aiter: {aiter_install.why_not_aiter()}")
        try:
            module = load_for(cache_spec(install), Toolchain.for_device(device))
        except (BackendUnavailableError, BuildError) as e:
            _answers[device] = f"{install} could not be made ready for {device}: {_gist(e)}"
            logger.warning("AITER's cache kernels are not used on %s: %s", device, e)
            raise
        _modules[device] = module
        return module


# A compiler's, and a linker's: what ld says at its end names nothing.
_MARKS = "undefined reference", "error:"


def _gist(error: BackendUnavailableError | BuildError) -> str:
    """The line of a compiler's log that says what is wrong, or the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if any(mark in line for mark in _MARKS)), lines[0])


def forget() -> None:
    """Drop what is remembered of failures, so that the next use tries again; loaded modules stay."""
    with _lock:
        _answers.clear()
