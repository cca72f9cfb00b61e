# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The project's files, as the convention tests see them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (".ci", "benchmarks", "csrc_rocm", "docs", "examples", "flashinfer", "scripts", "tests")
CPP_SUFFIXES = (".h", ".cc", ".cu")


def _is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()[:4096]


@functools.cache
def text_files() -> tuple[Path, ...]:
    """Every text file of the project relative to its root: not .venv, builds or caches."""
    found = [p for p in ROOT.iterdir() if p.is_file()]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return tuple(sorted(p.relative_to(ROOT) for p in found if _is_text(p)))


def is_python(path: Path) -> bool:
    return path.suffix == ".py" or (path.suffix == "" and read(path).startswith("#!/usr/bin/env python3\n"))


def python_files(*folders: str) -> list[Path]:
    """Python modules and scripts, of the whole project or of some of its folders."""
    return [p for p in text_files() if is_python(p) and (not folders or p.parts[0] in folders)]


def scripts() -> list[Path]:
    """Programs in other languages than Python."""
    return [p for p in text_files() if p.suffix == "" and read(p).startswith("#!") and not is_python(p)]


def cpp_files() -> list[Path]:
    return [p for p in text_files() if p.parts[0] == "csrc_rocm" and p.suffix in CPP_SUFFIXES]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code(path: Path) -> str:
    """A C++ file without its comments, line for line."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), read(path), flags=re.DOTALL)
    return re.sub(r"//.*", "", text)


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(read(path), filename=str(path))


def module_name(path: Path) -> str:
    """`flashinfer/core/op.py` -> `flashinfer.core.op`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    only_types = isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )
    for child in node.orelse if isinstance(node, ast.If) and only_types else ast.iter_child_nodes(node):
        yield from _run_time_nodes(child)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import that can run, inside functions too; `from a import b` is `a.b`."""
    for node in _run_time_nodes(syntax(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
