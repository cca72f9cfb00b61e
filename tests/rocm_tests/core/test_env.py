# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Environment variables: read when called, typed, and refused when they make no sense."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flashinfer.core import env
from flashinfer.core.errors import InvalidArgumentError

VALUES = [
    (env.disable_jit, "1", True),
    (env.disable_jit, "0", False),
    (env.disable_jit, "Yes", True),
    (env.check, "off", False),
    (env.backend, "native", "native"),
    (env.cache_dir, "/a/../b", Path("/b")),
    (env.rocm_arch_list, "gfx942, gfx950;gfx942:xnack-", ("gfx942", "gfx950", "gfx942:xnack-")),
    (env.max_jobs, "4", 4),
    (env.cxx, "ccache g++", ("ccache", "g++")),
]


@pytest.mark.parametrize(("variable", "text", "value"), VALUES)
def test_value(variable: env.Variable[Any], text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable.name, text)
    assert variable() == value
    # Later changes count, and empty means unset.
    monkeypatch.setenv(variable.name, "")
    assert variable() == variable.default
    monkeypatch.delenv(variable.name)
    assert variable() == variable.default


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.disable_jit, "maybe"),
        (env.max_jobs, "0"),
        (env.max_jobs, "many"),
        (env.cxx, '"g++'),
        (env.cxx, " "),
        (env.rocm_arch_list, ","),
    ],
)
def test_bad_value_is_named(variable: env.Variable[Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(InvalidArgumentError, match=f"{variable.name} must be .*, got {re.escape(repr(text))}"):
        variable()


def test_variables_lists_each_once() -> None:
    names = [v.name for v in env.variables()]
    assert len(set(names)) == len(names)
    assert {"FLASHINFER_BACKEND", "FLASHINFER_DISABLE_JIT", "FLASHINFER_CACHE_DIR", "MAX_JOBS"} <= set(names)
