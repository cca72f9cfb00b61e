# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A skip names what is missing, and where CI sets the thing up itself a skip is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rocm_tests.conventions.tree import ROOT

# What a run sees whose packages and GPUs are hidden.
HIDING = """
import importlib.util
import sys
import types
importlib.util.find_spec = lambda name: None
cuda = types.SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, __version__="2.9")
"""
SENTENCES = {
    "gpu": "gpu: no GPU that torch 2.9 can use",
    "aiter": "aiter: Python package not installed: aiter",
    "vllm": "vllm: Python package not installed: vllm",
    "nixl": "nixl: Python package not installed: nixl, transformers",
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """A run of one test for each marker, under the project's own conftest."""
    conftest = (ROOT / "tests" / "rocm_tests" / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest + HIDING, encoding="utf-8")
    markers = "\n".join(f"  {m}" for m in (*SENTENCES, "amd_toolchain"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}\n", encoding="utf-8")
    test = "@pytest.mark.{0}\ndef test_{0}():\n    pass\n"
    text = "import pytest\n" + "\n".join(test.format(m) for m in SENTENCES)
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")

    def run(**environment: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", str(tmp_path)],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "CI"} | environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def test_a_skip_names_what_is_missing(run: Callable[..., tuple[int, str]]) -> None:
    code, output = run()
    assert code == 0, output
    assert f"{len(SENTENCES)} skipped" in output
    for sentence in SENTENCES.values():
        assert sentence in output


def test_in_ci_a_skip_of_what_was_set_up_is_a_failure(run: Callable[..., tuple[int, str]]) -> None:
    code, output = run(CI="true")
    assert code == 1, output
    assert "3 skipped, 1 error" in output
    assert "in CI this test may not be skipped" in output
    assert SENTENCES["nixl"] in output
