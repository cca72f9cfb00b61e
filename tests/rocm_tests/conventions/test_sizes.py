# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Size limits. A file or function at its limit is split by concept, not cut in two."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rocm_tests.conventions.tree import cpp_files, python_files, read, syntax

# The first prefix that fits decides.
LINES = (
    ("csrc_rocm/shims/", 250),
    ("csrc_rocm/", 700),
    ("flashinfer/backends/", 300),
    ("flashinfer/ops/", 300),
    ("", 500),
)
FUNCTION_LINES = 80


def limit(path: Path) -> int:
    return next(lines for prefix, lines in LINES if str(path).startswith(prefix))


@pytest.mark.parametrize("path", python_files() + cpp_files(), ids=str)
def test_a_file_keeps_its_limit(path: Path) -> None:
    lines = len(read(path).splitlines())
    assert lines <= limit(path), f"{path} has {lines} lines, its limit is {limit(path)}"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring: to document an argument must not cost a line of code."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_a_function_keeps_its_limit(path: Path) -> None:
    long = [
        f"{path}:{node.lineno}: {node.name} has {body_lines(node)} lines, the limit is {FUNCTION_LINES}"
        for node in ast.walk(syntax(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and body_lines(node) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)
