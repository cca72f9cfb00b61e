# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What Triton makes of the attention kernels for AMD GPUs."""

from __future__ import annotations

import pytest

from flashinfer.jit.toolchain import KNOWN_ARCHES
from rocm_tests.gfx.test_triton import LDS_BYTES, report

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
def test_registers_and_lds_suffice(arch: str) -> None:
    """Of one compute unit of gfx942; gfx950 has more LDS."""
    kernels = report(arch, "attention")
    assert len(kernels) == 19
    wrong = {n: k for n, k in kernels.items() if k["scratch"] or k["spills"] or k["lds"] > LDS_BYTES or k["flat"]}
    assert not wrong


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
def test_two_small_programs_share_a_compute_unit(arch: str) -> None:
    """Of four waves each: 256 registers a wave, and half of the LDS."""
    small = {n: k for n, k in report(arch, "attention").items() if n.startswith(("split 16", "split 32", "fixed 16"))}
    assert len(small) == 6
    assert not {n: k for n, k in small.items() if k["vgprs"] > 256 or k["lds"] > LDS_BYTES // 2}


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
def test_attention_runs_on_matrix_cores_and_loads_wide(arch: str) -> None:
    for name, kernel in report(arch, "attention").items():
        if name.startswith("merge"):
            assert kernel["mfma"] == 0, (name, kernel)
        else:
            assert kernel["mfma"] >= 12, (name, kernel)
            assert kernel["wide_loads"] >= 4, (name, kernel)
