# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer clear-cache`: free the space; never needed for correctness."""

from __future__ import annotations

import argparse

from flashinfer.jit import cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Delete the cache's modules; those built ahead of time stay."""
    root = cache.cache_root()
    print(f"{cache.clear(root)} modules deleted from {root}")
    return 0
