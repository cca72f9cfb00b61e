# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Where the cache is, what it lists, and what clearing it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer.core.errors import BackendUnavailableError
from flashinfer.jit import cache
from flashinfer.jit.build import build
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.jit.toy import SPEC

CPU = Toolchain("cpu")


def test_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/someone")
    monkeypatch.setenv("FLASHINFER_CACHE_DIR", "~/modules")
    assert cache.cache_root() == Path("/srv/someone/modules")
    monkeypatch.delenv("FLASHINFER_CACHE_DIR")
    assert cache.cache_root() == Path("/srv/someone/.cache/flashinfer")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache.cache_root() == Path("/var/cache/flashinfer")


def test_no_home_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CACHE_DIR")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(BackendUnavailableError, match="set FLASHINFER_CACHE_DIR"):
        cache.cache_root()


def test_csrc_root_holds_the_sources_of_the_checkout() -> None:
    assert (cache.csrc_root() / "kernels").is_dir()


def test_csrc_root_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path / "site-packages" / "flashinfer")
    assert cache.csrc_root() == tmp_path / "site-packages" / "flashinfer" / "data" / "csrc_rocm"


def test_entries_and_clear(csrc: Path) -> None:
    root = cache.cache_root()
    library = build(SPEC, CPU, csrc=csrc)
    (entry,) = cache.entries(root)
    assert (entry.label, entry.name, entry.directory, entry.whole) == ("cpu", "toy", library.parent, True)
    assert entry.size == library.stat().st_size

    leftover = root / "cpu" / ".tmp-toy-0123456789abcdef-01234567"
    leftover.mkdir()
    (leftover / "toy.so").write_text("half")
    theirs = [root / "thesis.txt", root / "cpu" / "notes", root / "photos" / f"toy-{'0' * 16}"]
    for path in theirs:
        path.mkdir(parents=True)
    assert cache.clear(root) == 1
    assert not list((root / "cpu").glob("*toy*"))
    assert all(path.is_dir() for path in theirs)
    assert cache.clear(root) == 0


def test_clear_without_a_cache(tmp_path: Path) -> None:
    assert cache.clear(tmp_path / "none") == 0
