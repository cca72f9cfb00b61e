# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What names a module with AITER's kernels: several AITERs and architectures side by side, never one for another."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashinfer.core.aiter_install import AiterInstall, find_aiter
from flashinfer.jit import aiter_lib, cache
from flashinfer.jit.build import namespace_of, steps
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.backends.aiter_standin import INTERFACES, found, install

GFX942 = Toolchain("hip", "gfx942")


def installed(interface: str, folder: Path, version: str = "0.0.1") -> AiterInstall:
    with found(install(interface, folder, version)):
        aiter = find_aiter()
    assert aiter is not None
    assert aiter.version == version
    return aiter


def key(aiter: AiterInstall, toolchain: Toolchain = GFX942, csrc: Path | None = None) -> str:
    return cache.module_key(aiter_lib.cache_spec(aiter), toolchain, csrc or cache.csrc_root()).portable


@pytest.mark.parametrize("interface", INTERFACES)
def test_where_it_is_does_not_matter(interface: str, tmp_path: Path) -> None:
    here, there = (installed(interface, tmp_path / name) for name in ("here", "there"))
    assert key(here) == key(there)
    assert str(tmp_path) not in cache.module_key(aiter_lib.cache_spec(here), GFX942, cache.csrc_root()).inputs
    specs = [aiter_lib.cache_spec(aiter) for aiter in (here, there)]
    assert namespace_of(specs[0], GFX942) == namespace_of(specs[1], GFX942)
    assert specs[0] == specs[1]


def edit(name: str) -> Callable[[AiterInstall], AiterInstall]:
    def change(aiter: AiterInstall) -> AiterInstall:
        path = aiter.meta / name
        path.write_text(path.read_text() + "\n// edited\n")
        return aiter

    return change


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(
    "change",
    [
        edit("csrc/kernels/cache_kernels.cu"),
        edit("csrc/include/cache.h"),
        edit("csrc/include/standin.h"),
        lambda aiter: AiterInstall(aiter.package, aiter.meta, "0.0.2"),
        lambda aiter: AiterInstall(aiter.package, aiter.meta, aiter.version, "0123456789abcdef"),
    ],
    ids=["kernel", "header", "header of a header", "version", "commit"],
)
def test_another_aiter_is_another_module(
    interface: str, change: Callable[[AiterInstall], AiterInstall], tmp_path: Path
) -> None:
    aiter = installed(interface, tmp_path)
    before = key(aiter)
    assert key(change(aiter)) != before


def test_what_is_not_compiled_does_not_matter(tmp_path: Path) -> None:
    aiter = installed("own_typed", tmp_path)
    before = key(aiter)
    (aiter.csrc / "include" / "other.h").write_text("// nobody includes this\n")
    (aiter.csrc / "kernels" / "other.cu").write_text("// nor this\n")
    assert key(aiter) == before


def test_a_header_that_appears_earlier_on_the_path(tmp_path: Path) -> None:
    aiter = installed("own_typed", tmp_path)
    before = key(aiter)
    (aiter.csrc / "kernels" / "standin.h").write_text("// found first, beside the kernel\n")
    assert key(aiter) != before


def test_architectures_and_our_own_sources(tmp_path: Path) -> None:
    aiter = installed("own_typed", tmp_path / "site")
    arches = ("gfx942", "gfx950", "gfx942:sramecc+:xnack-")
    assert len({key(aiter, Toolchain("hip", arch)) for arch in arches}) == 3
    csrc = tmp_path / "csrc"
    shutil.copytree(cache.csrc_root(), csrc)
    before = key(aiter, csrc=csrc)
    assert before == key(aiter)
    (csrc / "aiter" / "entry.h").write_text((csrc / "aiter" / "entry.h").read_text() + "\n")
    assert key(aiter, csrc=csrc) != before


def test_torch_matters_as_far_as_it_is_compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aiters = {name: installed(name, tmp_path / name) for name in INTERFACES}
    before = {name: key(aiter) for name, aiter in aiters.items()}
    monkeypatch.setattr(torch.version, "git_version", "another build of the same version")
    assert key(aiters["torch_typed"]) != before["torch_typed"]
    assert key(aiters["own_typed"]) == before["own_typed"]


def test_both_interfaces_in_one_process(tmp_path: Path) -> None:
    specs = [aiter_lib.cache_spec(installed(name, tmp_path / name)) for name in INTERFACES]
    assert len({namespace_of(spec, GFX942) for spec in specs}) == 2
    assert dict(specs[0].defines) == {"FI_AITER_TORCH": "1", "FI_AITER_STREAM": "0", "FI_AITER_CAN_THROW": "0"}
    assert dict(specs[1].defines) == {"FI_AITER_TORCH": "0", "FI_AITER_STREAM": "1", "FI_AITER_CAN_THROW": "1"}


def test_torch_headers_only_where_aiter_takes_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPCC", "/bin/true")
    monkeypatch.setattr(Toolchain, "link_paths", lambda self: ())
    for name in INTERFACES:
        spec = aiter_lib.cache_spec(installed(name, tmp_path / name))
        lines = {step.output: " ".join(step.command) for step in steps(spec, GFX942, cache.csrc_root(), "lib.so")}
        for output in ("aiter.entry.cc.o", "foreign.csrc.kernels.cache_kernels.cu.o"):
            assert ("/torch/include" in lines[output]) == (name == "torch_typed"), (name, output)
            assert "--offload-arch=gfx942" in lines[output]
            assert "-fvisibility=hidden" in lines[output]


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_module_shows_one_symbol_under_a_name_of_its_own(interface: str, tmp_path: Path) -> None:
    with found(install(interface, tmp_path / "site")):
        path = aiter_lib.cache_module(torch.device("cpu")).path
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == [aiter_lib.ENTRY]
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert f"[lib{path.parent.name}.so]" in dynamic
    assert "SYMBOLIC" in dynamic
    manifest = json.loads((path.parent / cache.MANIFEST).read_text())
    assert manifest["inputs"]["foreign"]["identity"] == {"aiter": "0.0.1", "commit": "unknown"}


def test_an_upgrade_is_picked_up(tmp_path: Path) -> None:
    """By the next process: this one pretends to be a new one each time."""
    paths = []
    for version in ("0.0.1", "0.0.2"):
        with found(install("own_typed", tmp_path / version, version)):
            paths.append(aiter_lib.cache_spec(find_aiter() or pytest.fail("not found")))
    keys = [cache.module_key(spec, GFX942, cache.csrc_root()) for spec in paths]
    assert keys[0].directory(tmp_path, "one compiler") != keys[1].directory(tmp_path, "one compiler")
