# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the module with AITER's cache kernels for an AMD architecture, and loads it.

A program, not a test: `scripts/rocm_env python` runs it where libamdhip64 can be loaded. It prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashinfer.core.aiter_install import find_aiter
from flashinfer.jit import aiter_lib
from flashinfer.jit.load import load_for
from flashinfer.jit.toolchain import Toolchain

# Stand-ins for headers of ROCm and of a torch that was built for it.
HEADERS = Path(__file__).resolve().parent / "data" / "rocm_headers"


def main(site: str, arch: str) -> None:
    sys.path.insert(0, site)
    install = find_aiter()
    if install is None:
        raise SystemExit(f"no AITER in {site}")
    spec = aiter_lib.cache_spec(install, extra_includes=(HEADERS,))
    module = load_for(spec, Toolchain("hip", arch))
    with FakeTensorMode():
        tensors = [torch.empty(4, device="cuda") for _ in range(10)]
        returned = module.append_paged_kv_cache(*tensors[:8], 1.0, 1.0, *tensors[8:])
    report = {
        "path": str(module.path),
        "version": install.version,
        "package": str(install.package),
        "defines": dict(spec.defines),
        "returned": returned,
        "imported": "aiter" in sys.modules,
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
