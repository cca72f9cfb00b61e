# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What Triton makes of the fused kernel of an MLA context for AMD GPUs: matrix instructions, memory, LDS."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.jit.toolchain import KNOWN_ARCHES
from rocm_tests.conftest import ROOT

LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
# Vector registers for two waves on a SIMD, so that one multiplies while the other stores.
VGPRS = 256
pytestmark = pytest.mark.triton


@functools.cache
def report(arch: str) -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_triton_context.py")), arch],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
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
    kernels = report(arch)
    assert len(kernels) == 12
    wrong = {
        name: k
        for name, k in kernels.items()
        if k["flat"] or k["lds"] > LDS_BYTES[arch] // 2 or k["vgprs"] > VGPRS or k["scratch"] or k["spills"]
    }
    assert not wrong


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
def test_it_multiplies_on_matrix_cores_and_loads_wide(arch: str) -> None:
    for name, kernel in report(arch).items():
        # Scales of blocks have half as many tokens to a tile on gfx950.
        halved = arch == "gfx950" and "block" in name
        assert kernel["mfma"] >= (16 if halved else 32), (name, kernel)
        if name.startswith("nope 128"):
            # gfx950 loads most of a tile straight into LDS; of FP8 there are half as many bytes.
            least = 1 if halved else 2 if arch == "gfx950" else 4 if "block" in name else 8
            assert kernel["wide_loads"] >= least, (name, kernel)
