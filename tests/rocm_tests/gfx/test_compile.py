# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Every device source compiles for every AMD architecture; every module links and loads with the AMD runtime."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer.backends.native import specs
from flashinfer.jit.cache import csrc_root
from flashinfer.jit.toolchain import KNOWN_ARCHES
from flashinfer.testing.codeobject import CodeObject

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(str(path.relative_to(csrc_root())) for path in csrc_root().rglob("*.cu"))

pytestmark = pytest.mark.amd_toolchain


def test_there_are_sources() -> None:
    assert "kernels/page.cu" in SOURCES
    assert "kernels/page_convert.cu" in SOURCES


@pytest.mark.parametrize("arch", KNOWN_ARCHES["hip"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_compiles(source: str, arch: str, code_objects: Any) -> None:
    code: CodeObject = code_objects(source, arch)
    assert code.arch == arch
    assert code.kernels


@functools.cache
def loaded() -> dict[str, Any]:
    """Report of load_modules.py, run where the AMD runtime can be loaded."""
    command = [ROOT / "scripts" / "rocm_env", "--python", sys.executable, "python"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("load_modules.py")), "gfx942"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_modules_load_with_the_real_runtime() -> None:
    report = loaded()
    assert [m["name"] for m in report["modules"]] == [s.name for s in specs() if s.exists_for("hip")]
    assert len(report["runtime"]) == 1, "one libamdhip64 must be loaded"
    assert "libamdhip64.so.7" in report["runtime"][0]


@pytest.mark.parametrize("spec", [s for s in specs() if s.exists_for("hip")], ids=lambda s: s.name)
def test_a_module_carries_its_kernels_and_its_fakes(spec: Any) -> None:
    module = next(m for m in loaded()["modules"] if m["name"] == spec.name)
    assert b"hipv4-amdgcn-amd-amdhsa--gfx942" in Path(module["path"]).read_bytes()
    assert sorted(module["ops"]) == sorted(spec.ops)
    for name, op in module["ops"].items():
        assert op["returned"] is None, name
        assert op["mutates"], f"{name}: an op that returns nothing must mark what it writes"
