# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Cases of Triton kernels in Triton's interpreter, all of a module in one process.

Triton reads TRITON_INTERPRET when it is imported, so a process is interpreted as a whole or not at all.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import traceback

import pytest
import torch

from rocm_tests.conftest import ROOT


@functools.cache
def _failures(module: str) -> dict[str, str | None]:
    """The traceback of each case of a module, or None where it held."""
    done = subprocess.run(
        [sys.executable, "-m", "rocm_tests.interpreted", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_holds(module: str, name: str) -> None:
    """Fail with the traceback of case `name` of `module`, if it had one in the interpreter."""
    failure = _failures(module)[name]
    assert failure is None, failure


def main(module: str) -> None:
    failures: dict[str, str | None] = {}
    for name, (check, arguments) in importlib.import_module(module).CASES.items():
        failures[name] = None
        try:
            check("cpu", torch.float16, arguments)
        except (AssertionError, RuntimeError, TypeError, ValueError, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(failures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
