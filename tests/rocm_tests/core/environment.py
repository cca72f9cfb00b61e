# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a test: some are read at their first use and kept."""

from __future__ import annotations

from typing import Any

import pytest

from flashinfer.core import env


def set_variable(monkeypatch: pytest.MonkeyPatch, variable: env.Variable[Any], text: str) -> None:
    """As if the process had been started with `variable` set to `text` (empty: unset), until the test ends."""
    monkeypatch.setenv(variable.name, text)
    kept = vars(variable)
    # Set and removed again: that way the test's end puts back what was there, or nothing.
    monkeypatch.setitem(kept, "at_first_use", None)
    del kept["at_first_use"]
