# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles this project's kernels on first use: `load_module(SPEC, device).<op>(...)`."""

from __future__ import annotations

from flashinfer.jit.load import Module, load_module
from flashinfer.jit.spec import JitSpec

__all__ = ["JitSpec", "Module", "load_module"]
