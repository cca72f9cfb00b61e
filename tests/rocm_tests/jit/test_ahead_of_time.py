# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Modules built ahead of time go first, need no compiler, and are all there is when compiling is disabled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashinfer.core.errors import MissingJITCacheError
from flashinfer.jit import cache
from flashinfer.jit.build import build, obtain
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.jit.toy import SPEC, script

CPU = Toolchain("cpu")


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears as soon as anyone runs the C++ compiler, be it for its version."""
    file = tmp_path / "compiler-was-run"
    monkeypatch.setenv("CXX", str(script(tmp_path / "witness", f'touch "{file}"\nexec g++ "$@"')))
    return file


def test_disabled_raises_before_anything_is_run(
    csrc: Path, witness: Path, ninja_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    for attempt in (obtain, build):
        with pytest.raises(MissingJITCacheError, match="python -m flashinfer build --arch cpu toy") as caught:
            attempt(SPEC, CPU, csrc=csrc)
        assert caught.value.spec is SPEC
    assert not witness.exists()
    assert not ninja_runs.read_text()
    assert not cache.cache_root().exists()


def test_ahead_of_time_goes_first_and_asks_no_compiler(
    csrc: Path, witness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(SPEC, CPU, csrc=csrc)
    ahead = build(SPEC, CPU, csrc=csrc, root=cache.aot_root())
    assert (ahead.parent.name, ahead.parent.parent.name) == (built.parent.name, "cpu")
    witness.unlink()
    assert obtain(SPEC, CPU, csrc=csrc) == (CPU, ahead)
    assert not witness.exists()
    # Nor does it have to be the compiler of this machine, or to exist.
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert obtain(SPEC, CPU, csrc=csrc) == (CPU, ahead)


def test_cache_serves_when_disabled_and_when_there_is_no_compiler(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(SPEC, CPU, csrc=csrc)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert obtain(SPEC, CPU, csrc=csrc) == (CPU, built)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert obtain(SPEC, CPU, csrc=csrc) == (CPU, built)


def test_module_for_another_torch_is_not_used(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(SPEC, CPU, csrc=csrc, root=cache.aot_root())
    assert cache.find(SPEC, CPU, csrc) is not None
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    assert cache.find(SPEC, CPU, csrc) is None


def test_damaged_module_is_not_used(csrc: Path) -> None:
    ahead = build(SPEC, CPU, csrc=csrc, root=cache.aot_root())
    ahead.write_bytes(ahead.read_bytes()[:100])
    _, library = obtain(SPEC, CPU, csrc=csrc)
    assert library.is_relative_to(cache.cache_root())


def test_module_without_feature_flags_serves_a_device_with_them(csrc: Path, stand_in_rocm: Path) -> None:
    plain, device = Toolchain("hip", "gfx942"), Toolchain("hip", "gfx942:sramecc+:xnack-")
    ahead = build(SPEC, plain, csrc=csrc, root=cache.aot_root())
    assert obtain(SPEC, device, csrc=csrc) == (plain, ahead)
    assert cache.find(SPEC, Toolchain("hip", "gfx950"), csrc) is None
    # The reverse does not hold: code made for one setting may not run with the other.
    build(SPEC, device, csrc=csrc)
    assert cache.find(SPEC, Toolchain("hip", "gfx942:xnack+"), csrc) == (plain, ahead)
