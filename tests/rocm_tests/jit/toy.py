# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A module that sees no torch and so compiles in a moment, and scripts that stand in for tools."""

from __future__ import annotations

from pathlib import Path

from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(
    name="toy",
    ops=("toy_answer",),
    shims=("shims/toy.cc",),
    kernels=("kernels/toy.cu",),
    kernels_cpu=("kernels_cpu/toy.cc",),
    defines=(("TOY_BASE", "40"),),
)

SOURCES = {
    "kernels/toy.h": '#pragma once\n#include "common/bonus.h"\nint toy_kernel();\n',
    "kernels/common/bonus.h": "#pragma once\nconstexpr int kBonus = 2;\n",
    # The architecture is a string in the object, so that a test can tell for which one it was compiled.
    "kernels/toy.cu": '#include "kernels/toy.h"\n#include "fi_config.h"\n'
    'const char* volatile toy_arch = "arch=" TOY_ARCH ";";\n'
    "int toy_kernel() { return TOY_BASE + kBonus + (toy_arch == nullptr); }\n",
    "kernels_cpu/toy.cc": '#include "kernels/toy.h"\n#include "fi_config.h"\n'
    "int toy_kernel() { return TOY_BASE + kBonus; }\n",
    "shims/toy.cc": '#include "kernels/toy.h"\n'
    'extern "C" __attribute__((visibility("default"))) int toy_answer() { return toy_kernel(); }\n',
    "shims/unrelated.cc": "// Belongs to no module.\n",
}


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path
