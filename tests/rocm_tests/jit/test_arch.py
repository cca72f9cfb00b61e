# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Architectures: read when used, one directory each, unknown ones refused. A script stands in for hipcc."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashinfer.cli.build import architectures
from flashinfer.core.errors import BackendUnavailableError, InvalidArgumentError
from flashinfer.jit.build import build, namespace_of
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.jit.toy import SPEC


def held_arches(library: Path) -> list[bytes]:
    return re.findall(rb"arch=([^;]+);", library.read_bytes())


# known fault 39
def test_each_arch_of_the_list_has_its_own_module(
    csrc: Path, stand_in_rocm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {}
    for arch in ("gfx942", "gfx950"):
        # In one process, after the import: the variable counts at the moment of use.
        monkeypatch.setenv("FLASHINFER_ROCM_ARCH_LIST", arch)
        (toolchain,) = map(Toolchain.parse, architectures(None))
        built[arch] = build(SPEC, toolchain, csrc=csrc)
    for arch, library in built.items():
        assert library.parent.parent.name == f"hip_{arch}"
        assert held_arches(library) == [arch.encode()]
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        assert "RUNPATH" not in dynamic
        assert "RPATH" not in dynamic
    assert len({library.parent.name for library in built.values()}) == 2
    # Neither build touched the other's module.
    assert [held_arches(p) for p in built.values()] == [[b"gfx942"], [b"gfx950"]]


# known fault 39
def test_several_arches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert architectures(None) == ("cpu",)
    monkeypatch.setenv("FLASHINFER_ROCM_ARCH_LIST", "gfx942;gfx950")
    assert architectures(None) == ("gfx942", "gfx950")
    assert architectures("cpu,gfx950") == ("cpu", "gfx950")


# known fault 39
@pytest.mark.parametrize("arch", ["gfx1100", "gfx9", "sm_70", "", "gfx942:turbo+", "sm_90:xnack+", "hip"])
def test_unknown_arch_is_refused_with_the_list(arch: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"\[.*gfx942, gfx950.*\], got '{re.escape(arch)}'|sm_90\]"):
        Toolchain.parse(arch)


def test_unknown_target_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got 'metal'"):
        Toolchain("metal")
    with pytest.raises(InvalidArgumentError, match="got meta"):
        Toolchain.for_device(torch.device("meta"))


@pytest.mark.parametrize(
    ("device", "hip", "expected"),
    [
        (torch.device("cpu"), None, Toolchain("cpu")),
        (torch.device("cuda", 1), "7.0", Toolchain("hip", "gfx942:sramecc+:xnack-")),
        (torch.device("cuda", 0), None, Toolchain("cuda", "sm_90")),
    ],
)
def test_toolchain_of_a_device(
    device: torch.device, hip: str | None, expected: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert Toolchain.for_device(device) == expected


def test_a_gpu_that_is_not_there_has_no_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BackendUnavailableError, match="cuda:1 must be a GPU of this machine, on which torch finds 1"):
        Toolchain.for_device(torch.device("cuda", 1))


def test_namespace_is_an_identifier_and_tells_arches_apart() -> None:
    arches = ["cpu", "sm_90", "gfx942", "gfx950", "gfx942:xnack-", "gfx942:xnack+", "gfx942:sramecc+:xnack-"]
    namespaces = [namespace_of(SPEC, Toolchain.parse(arch)) for arch in arches]
    assert all(n.isidentifier() for n in namespaces)
    assert len(set(namespaces)) == len(arches)
    assert namespaces[:3] == ["flashinfer_toy_cpu", "flashinfer_toy_cuda_sm_90", "flashinfer_toy_hip_gfx942"]
