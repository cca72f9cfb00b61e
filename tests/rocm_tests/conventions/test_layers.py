# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Arrows point one way, and device code knows no framework."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocm_tests.conventions.tree import cpp_files, imports, module_name, python_files, read

# Layer of a module by the longest prefix that fits; whatever is not named is the public interface.
LAYER_OF = {
    "flashinfer": "public",
    "flashinfer.__main__": "cli",
    "flashinfer.backends": "backends",
    "flashinfer.cli": "cli",
    "flashinfer.core": "core",
    "flashinfer.integrations": "integrations",
    "flashinfer.jit": "jit",
    "flashinfer.kv.format": "format",
    "flashinfer.kv.negotiate": "format",
    "flashinfer.ops": "ops",
    "flashinfer.testing": "testing",
}
MAY_IMPORT = {
    "core": {"core"},
    "format": {"core", "format"},
    "jit": {"core", "jit"},
    "backends": {"backends", "core", "format", "jit"},
    # An op names its backends in a string and loads the one it uses.
    "ops": {"core", "format", "ops"},
    "public": {"core", "format", "ops", "public"},
    "testing": {"core", "format", "public", "testing"},
    "integrations": {"core", "format", "integrations", "public"},
    "cli": {"backends", "cli", "core", "format", "jit", "ops", "public", "testing"},
}
# Optional packages and the only folder that may import each.
HOME_OF = {
    "aiter": "flashinfer/backends/aiter",
    "nixl": "flashinfer/cli",
    "transformers": "flashinfer/cli",
    "triton": "flashinfer/backends/triton",
    "vllm": "flashinfer/integrations",
}
PACKAGE = python_files("flashinfer")


def layer(module: str) -> str:
    while module not in LAYER_OF:
        module = module.rpartition(".")[0]
    return LAYER_OF[module]


@pytest.mark.parametrize("path", PACKAGE, ids=str)
def test_arrows_point_one_way(path: Path) -> None:
    here = layer(module_name(path))
    wrong = [
        f"{path}:{line}: {here} imports {name} ({layer(name)})"
        for line, name in imports(path)
        if name.split(".")[0] == "flashinfer" and layer(name) not in MAY_IMPORT[here]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", python_files("flashinfer"), ids=str)
def test_a_backend_imports_no_other_backend(path: Path) -> None:
    parts = module_name(path).split(".")
    if parts[:2] != ["flashinfer", "backends"] or len(parts) < 3:
        return
    wrong = [
        f"{path}:{line}: imports {name}"
        for line, name in imports(path)
        if name.startswith("flashinfer.backends.") and name.split(".")[2] != parts[2]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(HOME_OF))
def test_optional_packages_are_imported_in_one_place(package: str) -> None:
    wrong = [
        f"{path}:{line}: imports {name}"
        for path in PACKAGE
        if not str(path).startswith(HOME_OF[package] + "/")
        for line, name in imports(path)
        if name.split(".")[0] == package
    ]
    assert not wrong, "\n".join(wrong)


def includes(path: Path) -> list[tuple[int, str]]:
    found = []
    for number, line in enumerate(read(path).splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
            found.append((number, match.group(1)))
    return found


FRAMEWORK = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|Python\.h)(/|$)")


@pytest.mark.parametrize("path", cpp_files(), ids=str)
def test_device_code_knows_no_framework(path: Path) -> None:
    folder = path.parts[1]
    for line, header in includes(path):
        where = f"{path}:{line}: includes {header}"
        if folder != "shims":
            assert not FRAMEWORK.match(header), where
            assert not header.startswith("shims/"), where
        # The extension header of torch quadruples a shim's compile time.
        assert header != "torch/extension.h", where
        assert not header.endswith((".cu", ".cc")), where
