# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What Triton makes of the kernels for AMD GPUs, none of which is needed: matrix instructions, memory, LDS."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.jit.toolchain import KNOWN_ARCHES

ROOT = Path(__file__).resolve().parents[3]
LDS_BYTES = 64 << 10
pytestmark = pytest.mark.triton


@functools.cache
def report(arch: str, family: str = "triton") -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(f"compile_{family}.py")), arch],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "TRITON_INTERPRET": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
def test_registers_and_lds_suffice(arch: str) -> None:
    """Of one compute unit of gfx942; gfx950 has more LDS."""
    kernels = report(arch)
    assert len(kernels) == 12
    wrong = {
        n: k
        for n, k in kernels.items()
        if k["scratch"] or k["spills"] or k["scalar_spills"] or k["lds"] > LDS_BYTES or k["flat"]
    }
    assert not wrong


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
def test_attention_runs_on_matrix_cores_and_loads_wide(arch: str) -> None:
    for name, kernel in report(arch).items():
        if name.startswith("mla_split"):
            assert kernel["mfma"] >= 20, (name, kernel)
            assert kernel["wide_loads"] >= 8, (name, kernel)
        else:
            assert kernel["mfma"] == 0, (name, kernel)
