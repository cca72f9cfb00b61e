# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What a file must and must not say. Patterns are pieced together so that they do not find themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rocm_tests.conventions.tree import CPP_SUFFIXES, code, cpp_files, python_files, read, scripts, syntax, text_files

SOURCES = python_files() + cpp_files()
LICENCE = (
    "SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors",
    "SPDX-License-Identifier: Apache-2.0",
)


def hits(pattern: str, path: Path, text: Callable[[Path], str] = read) -> list[str]:
    regex = re.compile(pattern)
    lines = enumerate(text(path).splitlines(), 1)
    return [f"{path}:{number}: {line.strip()}" for number, line in lines if regex.search(line)]


def none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("path", [*SOURCES, *scripts()], ids=str)
def test_licence_header(path: Path) -> None:
    mark = "//" if path.suffix in CPP_SUFFIXES else "#"
    lines = [line for line in read(path).splitlines() if not line.startswith("#!")]
    header = [f"{mark} {line}" for line in LICENCE]
    assert lines[:2] in (header, []), f"{path}: the first two lines must be {header}"


@pytest.mark.parametrize("path", text_files(), ids=str)
def test_no_machine_in_the_text(path: Path) -> None:
    paths = r"(?<![\w.$}])/(?:" + "|".join(("work", "farm", "root", "home", "Users")) + r")/[\w.-]+"
    none(hits(paths, path))
    none(hits("index" + r"-url[= ]|https?://[^ ]*/(?:" + "simple|debian)" + r"(?:[/ ]|$)", path))


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_loose_ends_name_an_issue(path: Path) -> None:
    none(hits(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b(?!\(#\d+\))", path))


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_support_is_not_decided_by_catching_everything(path: Path) -> None:
    broad = {"Exception", "BaseException"}
    wrong = []
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {n.id if isinstance(n, ast.Name) else None for n in caught}
            if node.type is None or names & broad:
                wrong.append(f"{path}:{node.lineno}: catches everything")
    none(wrong)


@pytest.mark.parametrize("path", python_files("flashinfer"), ids=str)
def test_user_input_is_not_asserted(path: Path) -> None:
    if path.parts[1] == "testing":
        return
    none(
        [
            f"{path}:{node.lineno}: raise an error of flashinfer.core.errors instead of assert"
            for node in ast.walk(syntax(path))
            if isinstance(node, ast.Assert)
        ]
    )


def test_file_names_say_what_is_inside() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    # FlashInfer's ROCm users know this benchmark by its name, and engines import from this module.
    known = {"bench_mla_hip.py", "flashinfer/utils.py"}
    others = [p for p in SOURCES if p.name not in known and str(p) not in known]
    none([str(p) for p in others if p.stem in vague or p.stem.endswith(("_rocm", "_hip", "_part2"))])


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_platform_branches(path: Path) -> None:
    none(hits(r"\bIS_" + r"(?:HIP|CUDA|ROCM)\b", path))


RUNTIME_NAMES = r"\b(?:hip|cuda)[A-Z]\w*|\bhip/|\bcuda_runtime|<cuda"
# Which compiler is at work, and whether it compiles for the device.
COMPILER_TESTS = r"\b__(?:HIP|CUDA|AMDGCN|gfx)\w*__\b|\bFI_GPU_HIP\b"


@pytest.mark.parametrize("path", [p for p in cpp_files() if p.name != "gpu.h"], ids=str)
def test_only_gpu_h_knows_the_runtime_names(path: Path) -> None:
    none(hits(RUNTIME_NAMES, path, code))


@pytest.mark.parametrize("path", [p for p in cpp_files() if p.parts[2] != "common"], ids=str)
def test_only_common_headers_branch_on_the_compiler(path: Path) -> None:
    none(hits(COMPILER_TESTS, path, code))


@pytest.mark.parametrize("path", [p for p in cpp_files() if p.name != "fp8.h"], ids=str)
def test_only_fp8_h_names_fp8_types(path: Path) -> None:
    none(hits(r"__(?:hip|nv)_fp8|Float8_e|float8_e\d", path, code))


FP8_WORDS = {
    Path("flashinfer/core/dtypes.py"),
    Path("flashinfer/kv/format.py"),  # a page's tag spells the flavour out
    Path("flashinfer/testing/tolerances.py"),  # an oracle's table does not come from what it checks
}


@pytest.mark.parametrize("path", [p for p in python_files("flashinfer") if p not in FP8_WORDS], ids=str)
def test_only_dtypes_py_names_fp8_types(path: Path) -> None:
    words = [
        (node.lineno, node.attr if isinstance(node, ast.Attribute) else str(node.value))
        for node in ast.walk(syntax(path))
        if isinstance(node, (ast.Attribute, ast.Constant))
    ]
    none([f"{path}:{line}: {word}" for line, word in words if word.startswith("float8_e")])
