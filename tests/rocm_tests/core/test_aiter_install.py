# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""AITER is found by its files; code of it never runs."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashinfer.core import aiter_install
from flashinfer.core.aiter_install import (
    AiterInstall,
    find_aiter,
    parse_version,
    why_not_aiter,
    why_not_gpu,
    why_not_here,
)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An import path of the test's own, and a memory of nothing."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in repr(f).lower()])
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    find_aiter.cache_clear()
    yield
    find_aiter.cache_clear()


def install(folder: Path, *, mode: str | None = "install", version: str | None = "0.1.7.post2.dev18") -> Path:
    """A package that must not be executed, and its distribution."""
    package = folder / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    if mode is not None:
        (package / "install_mode").write_text(mode)
    if version is not None:
        info = folder / f"amd_aiter-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n")
    return package


def test_an_installed_package(tmp_path: Path) -> None:
    package = install(tmp_path)
    assert find_aiter() == AiterInstall(package, tmp_path / "aiter_meta", "0.1.7.post2.dev18")
    assert why_not_aiter() is None
    assert "aiter" not in sys.modules


@pytest.mark.parametrize("mode", ["develop", None])
def test_a_checkout(tmp_path: Path, mode: str | None) -> None:
    (tmp_path / "aiter_meta").mkdir()  # left over from making a wheel
    install(tmp_path, mode=mode, version=None)
    found = find_aiter()
    assert found is not None
    assert (found.meta, found.csrc, found.version) == (tmp_path, tmp_path / "csrc", "unknown")


def test_files_that_are_no_text_say_nothing(tmp_path: Path) -> None:
    package = install(tmp_path)
    (package / "install_mode").write_bytes(b"\xff\xfe\xfa")
    info = tmp_path / "amd_aiter-0.1.7.post2.dev18.dist-info"
    (info / "direct_url.json").write_bytes(b"\xff\xfe")
    assert find_aiter() == AiterInstall(package, tmp_path / "aiter_meta", "unknown")
    find_aiter.cache_clear()
    (info / "METADATA").write_bytes(b"\xff\xfe")
    assert find_aiter() == AiterInstall(package, tmp_path / "aiter_meta", "unknown")


def test_the_commit_of_an_install_from_git(tmp_path: Path) -> None:
    install(tmp_path)
    url = tmp_path / "amd_aiter-0.1.7.post2.dev18.dist-info" / "direct_url.json"
    url.write_text(
        json.dumps({"url": "git+https://example/aiter", "vcs_info": {"vcs": "git", "commit_id": "e404" * 10}})
    )
    found = find_aiter()
    assert found is not None
    assert found.commit == "e404" * 10
    assert str(found).startswith("AITER 0.1.7.post2.dev18 (e404e404e404) in ")
    find_aiter.cache_clear()
    url.write_text("not json")
    assert find_aiter() == AiterInstall(found.package, found.meta, found.version, None)


def test_what_is_no_package_is_not_aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_aiter() is None
    assert why_not_aiter() == "needs the package aiter, which is not installed"
    for make in (
        lambda: (tmp_path / "aiter").mkdir(),
        lambda: (tmp_path / "aiter.py").write_text("raise SystemExit\n"),
        lambda: monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter")),
    ):
        make()
        find_aiter.cache_clear()
        assert find_aiter() is None


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.1.13", (0, 1, 13, 0)),
        ("0.1.12.post2+rocm7", (0, 1, 12, 2)),
        ("0.1.7.post2.dev18", (0, 1, 7, 2)),
        ("0.0.0", None),
        ("0.0", None),
        ("unknown", None),
    ],
)
def test_versions_are_numbers(text: str, release: tuple[int, ...] | None) -> None:
    assert parse_version(text) == release
    assert AiterInstall(Path("aiter"), Path("meta"), text).release == release


@pytest.mark.parametrize(
    ("hip", "arch", "reason"),
    [
        (None, "", "needs an AMD GPU, got cuda:0"),
        ("7.2", "gfx942:sramecc+:xnack-", None),
        ("7.2", "gfx950", None),
        ("7.2", "gfx1100", "needs gfx942 or gfx950, got gfx1100"),
        # Longer than the name of one that will do.
        ("7.2", "gfx9420", "needs gfx942 or gfx950, got gfx9420"),
    ],
)
def test_architectures(hip: str | None, arch: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(gcnArchName=arch))
    for device, wanted in ((torch.device("cuda", 0), reason), (torch.device("cpu"), "needs an AMD GPU, got cpu")):
        assert why_not_gpu.__wrapped__(device) == wanted


def test_where_it_has_no_kernels_it_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_install, "find_aiter", lambda: pytest.fail("looked for"))
    assert why_not_here(torch.device("cpu")) == "needs an AMD GPU, got cpu"
