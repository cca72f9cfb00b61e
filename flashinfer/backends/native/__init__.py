# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""This project's compiled kernels for the tensor's device: HIP on an AMD GPU, C++ on the CPU.

The same `.cu` sources also compile for NVIDIA, so that they can be run and measured where no AMD GPU is at hand.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flashinfer.jit.spec import JitSpec


def specs() -> list[JitSpec]:
    """Every compiled module of the package: the `SPEC` of each module in this folder."""
    families = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{family}").SPEC for family in families]


def prepare_all(device: torch.device) -> dict[str, str | None]:
    """Build and load every module that calls on the device use; raises what `load_module` raises."""
    import torch

    from flashinfer.jit.load import load_module
    from flashinfer.jit.toolchain import Toolchain

    target, host = Toolchain.for_device(device).target, torch.device("cpu")
    ready = [spec for spec in specs() if spec.is_host_code or spec.exists_for(target)]
    for spec in ready:
        load_module(spec, host if spec.is_host_code else device)
    return {spec.name: None for spec in ready}
