# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Builds, links and loads every compiled module for an AMD architecture, and runs the fakes of its ops.

A program, not a test: `scripts/rocm_env python` runs it where libamdhip64 can be loaded. It prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashinfer.backends.native import specs
from flashinfer.jit.load import load_for
from flashinfer.jit.toolchain import Toolchain


def example(argument: torch.Argument) -> object:
    """A value for an argument of an op whose fake looks at none."""
    kind = str(argument.type)
    if kind.startswith("Optional["):
        return None
    values = {
        "Tensor": torch.empty(4, 4, device="cuda"),
        "List[Tensor]": [torch.empty(4, 4, device="cuda"), torch.empty(2, device="cuda")],
        "int": 1,
        "float": 1.0,
        "bool": True,
        "str": "NHD",
        "List[int]": [1],
    }
    return values[kind]


def main(arch: str) -> None:
    report = []
    for spec in specs():
        toolchain = Toolchain("hip", arch)
        if not spec.exists_for(toolchain.target):
            continue
        module = load_for(spec, toolchain)
        results = {}
        with FakeTensorMode():
            for name in spec.ops:
                op = getattr(getattr(torch.ops, module.namespace), name).default
                arguments = op._schema.arguments
                results[name] = {
                    "returned": op(*(example(a) for a in arguments if not a.kwarg_only)),
                    "mutates": [a.name for a in arguments if a.alias_info and a.alias_info.is_write],
                }
        report.append({"name": spec.name, "path": str(module.path), "ops": results})
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    runtime = {line.split()[-1] for line in mapped if "libamdhip64" in line}
    sys.stdout.write(json.dumps({"modules": report, "runtime": sorted(runtime)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
