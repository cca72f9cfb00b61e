# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the MLA functions of the installed AITER can be asked for, read from its files and its version.

Parameters came and moved between releases: they are passed by name, and only those that the function has.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from flashinfer.core.aiter_install import AiterInstall, Version, find_aiter

MODULE = "aiter.mla"
DECODE, PREFILL = "mla_decode_fwd", "mla_prefill_fwd"
# Before it, the number of pieces that is passed is not the one used, and a tensor of the first GPU is used on all.
FIRST_VERSION = (0, 1, 7, 5)
# Before it, the LSE that is returned is memory that nobody wrote.
FIRST_VERSION_WITH_LSE = (0, 1, 13, 0)
# What the kernel that joins pieces is told from that version on, and only from then.
_LSE_MARK = "HAS_FINAL_LSE"


@dataclass(frozen=True)
class Interface:
    """One AITER's MLA functions."""

    text: str
    decode: frozenset[str]
    prefill: frozenset[str]
    version: Version | None
    marks_lse: bool

    @property
    def has_lse(self) -> bool:
        """Whether a decode writes the LSE that it returns."""
        if "return_lse" not in self.decode:
            return False
        return self.marks_lse if self.version is None else self.version >= FIRST_VERSION_WITH_LSE

    def why_not(self) -> str | None:
        """A sentence if this AITER is too old."""
        if not self.decode or not self.prefill:
            return f"needs {DECODE} and {PREFILL} in aiter/mla.py, which {self.text} has not"
        # A version that says nothing is judged by what came two releases later.
        old = "return_lse" not in self.decode if self.version is None else self.version < FIRST_VERSION
        if old or "num_kv_splits_indptr" not in self.decode:
            return f"needs AITER 0.1.7.post5 or newer, got {self.text}"
        return None


@functools.lru_cache(maxsize=4)
def read_interface(install: AiterInstall) -> Interface:
    """Read aiter/mla.py without running it."""
    file = install.package / "mla.py"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = dict.fromkeys((DECODE, PREFILL), frozenset[str]())
    try:
        body = ast.parse(text).body
    except SyntaxError:
        body = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in found:
            found[node.name] = frozenset(a.arg for a in (*node.args.args, *node.args.kwonlyargs))
    return Interface(str(install), found[DECODE], found[PREFILL], install.release, _LSE_MARK in text)


def interface() -> Interface | None:
    """That of the AITER on the import path."""
    install = find_aiter()
    return None if install is None else read_interface(install)
