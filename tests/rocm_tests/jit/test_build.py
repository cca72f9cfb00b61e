# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What `build` publishes, what it refuses, and how it says so."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashinfer.core.errors import BackendUnavailableError, BuildError
from flashinfer.jit import cache, ninja
from flashinfer.jit.build import build, steps
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.jit.toy import SPEC, script

CPU = Toolchain("cpu")


def test_publishes_a_module_and_nothing_else(csrc: Path, capfd: pytest.CaptureFixture[str]) -> None:
    library = build(SPEC, CPU, csrc=csrc)
    assert ctypes.CDLL(str(library)).toy_answer() == 42
    assert sorted(p.name for p in library.parent.iterdir()) == ["manifest.json", "toy.so"]
    assert library.parent.parent == cache.cache_root() / "cpu"
    others = [p.name for p in library.parent.parent.iterdir() if p != library.parent]
    assert others == [f"{library.parent.name}.lock"]
    # Standard error is not a terminal here, so nothing is said.
    assert capfd.readouterr() == ("", "")


def test_second_build_runs_nothing(csrc: Path, ninja_runs: Path) -> None:
    assert build(SPEC, CPU, csrc=csrc) == build(SPEC, CPU, csrc=csrc)
    assert ninja_runs.read_text().count("run") == 1


def test_a_define_makes_another_module(csrc: Path) -> None:
    other = dataclasses.replace(SPEC, defines=(("TOY_BASE", "50"),))
    first, second = build(SPEC, CPU, csrc=csrc), build(other, CPU, csrc=csrc)
    assert [ctypes.CDLL(str(p)).toy_answer() for p in (first, second)] == [42, 52]


def test_max_jobs_reaches_ninja(csrc: Path, ninja_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    build(SPEC, CPU, csrc=csrc)
    assert "-j 3" in ninja_runs.read_text()


def test_broken_source(csrc: Path) -> None:
    source = csrc / "kernels_cpu/toy.cc"
    text = source.read_text()
    source.write_text(text + "this is not C++;\n")
    with pytest.raises(BuildError) as caught:
        build(SPEC, CPU, csrc=csrc)
    # The command is that of the compiler, whole, so that it can be repeated; the log is that of this file.
    assert str(source) in caught.value.command
    assert "-fvisibility=hidden" in caught.value.command
    assert "toy.cc" in caught.value.log_tail
    assert "error:" in caught.value.log_tail
    assert list(cache.cache_root().glob("cpu/*.log")), "the whole log is kept"
    assert not list(cache.entries(cache.cache_root()))
    assert not list(cache.cache_root().glob("cpu/.tmp*"))
    source.write_text(text)
    assert ctypes.CDLL(str(build(SPEC, CPU, csrc=csrc))).toy_answer() == 42


def test_source_edited_while_it_compiles(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first compilation of the kernel changes a header that it has read, as an editor may.
    header, done = csrc / "kernels/common/bonus.h", csrc.parent / "edited"
    edit = f'[ -e "{done}" ] || case "$*" in *-c*) touch "{done}"; sed -i s/2/3/ "{header}";; esac'
    monkeypatch.setenv("CXX", str(script(csrc.parent / "editor", f'g++ "$@" || exit\n{edit}')))
    monkeypatch.setenv("MAX_JOBS", "1")
    library = build(SPEC, CPU, csrc=csrc)
    assert ctypes.CDLL(str(library)).toy_answer() == 43
    assert cache.find(SPEC, CPU, csrc) == (CPU, library)
    assert len(list(cache.entries(cache.cache_root()))) == 1


def test_relative_folders(csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    library = build(SPEC, CPU, csrc=Path(csrc.name), root=Path("out"))
    assert library.is_relative_to(tmp_path / "out")


def test_undefined_launcher_is_a_build_error(csrc: Path) -> None:
    (csrc / "kernels_cpu/toy.cc").write_text("// defines nothing\n")
    with pytest.raises(BuildError, match="toy_kernel"):
        build(SPEC, CPU, csrc=csrc)


def test_killed_compiler_is_a_build_error(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = '[ "$1" = --version ] && exec g++ "$@"\nkill -KILL $$'
    monkeypatch.setenv("CXX", str(script(csrc.parent / "doomed", body)))
    with pytest.raises(BuildError, match="doomed"):
        build(SPEC, CPU, csrc=csrc)
    assert not list(cache.entries(cache.cache_root()))


def truncate(library: Path) -> None:
    library.write_bytes(b"")


def cut(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-1])


def blank_a_block(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[4096:8192] = bytes(4096)
    library.write_bytes(content)


def lose_library(library: Path) -> None:
    library.unlink()


def lose_manifest(library: Path) -> None:
    (library.parent / cache.MANIFEST).unlink()


def spoil_manifest(library: Path) -> None:
    (library.parent / cache.MANIFEST).write_text('{"name": "to')


def replace_by_file(library: Path) -> None:
    for path in library.parent.iterdir():
        path.unlink()
    library.parent.rmdir()
    library.parent.write_text("")


# known fault 40
@pytest.mark.parametrize(
    "damage", [truncate, cut, blank_a_block, lose_library, lose_manifest, spoil_manifest, replace_by_file]
)
def test_damaged_module_is_rebuilt(damage: Callable[[Path], None], csrc: Path) -> None:
    library = build(SPEC, CPU, csrc=csrc)
    damage(library)
    assert cache.find(SPEC, CPU, csrc) is None
    assert build(SPEC, CPU, csrc=csrc) == library
    assert ctypes.CDLL(str(library)).toy_answer() == 42
    assert not list(library.parent.parent.glob(".tmp*"))


# known fault 40
@pytest.mark.parametrize("place", ["under a file", "read-only file system"])
def test_unwritable_cache_names_the_variable(
    place: str, csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # /proc refuses new folders to root as well, as a read-only file system does.
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache" if place == "under a file" else Path("/proc/flashinfer")
    monkeypatch.setenv("FLASHINFER_CACHE_DIR", str(folder))
    with pytest.raises(BackendUnavailableError, match=rf"{folder}; set FLASHINFER_CACHE_DIR to"):
        build(SPEC, CPU, csrc=csrc)


def test_read_only_home_names_the_variable(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_CACHE_DIR")
    monkeypatch.setenv("HOME", "/proc")
    with pytest.raises(BackendUnavailableError, match=r"/proc/\.cache/flashinfer; set FLASHINFER_CACHE_DIR to"):
        build(SPEC, CPU, csrc=csrc)


def test_missing_compiler_names_the_variable(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendUnavailableError, match=r"tried no-such-compiler; .* set CXX"):
        build(SPEC, CPU, csrc=csrc)
    monkeypatch.setenv("ROCM_HOME", "/no-such-rocm")
    with pytest.raises(BackendUnavailableError, match=r"set HIPCC or ROCM_HOME"):
        Toolchain("hip", "gfx942").kernel_compiler()


def test_ninja_comes_from_the_package_when_it_is_off_path(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("ninja", reason="Python package not installed: ninja")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert Path(ninja.executable()).parent == Path(package.BIN_DIR)
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BackendUnavailableError, match="pip install ninja"):
        ninja.executable()


def test_module_without_kernels_for_the_target(csrc: Path) -> None:
    gpu_only = dataclasses.replace(SPEC, kernels_cpu=())
    with pytest.raises(BackendUnavailableError, match="'toy' has no kernels for the target cpu"):
        build(gpu_only, CPU, csrc=csrc)


def test_kernels_never_see_torch(csrc: Path, stand_in_rocm: Path) -> None:
    for chain in (CPU, Toolchain("hip", "gfx950")):
        kernel, shim, link = (" ".join(s.command) for s in steps(SPEC, chain, csrc))
        assert "-isystem" not in kernel
        assert "FI_NAMESPACE" not in kernel
        assert "torch/include" in shim
        assert f"-DFI_NAMESPACE=flashinfer_toy_{chain.label}" in shim
        assert "rpath" not in link


def test_progress_is_one_line_on_a_terminal(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        build(SPEC, CPU, csrc=csrc)
    shown = ""
    with contextlib.suppress(OSError):  # how a pseudo-terminal says that its other end is closed
        while part := os.read(reader, 4096):
            shown += part.decode()
    os.close(reader)
    assert "module toy for cpu: compiling" in shown
    assert "module toy for cpu: compiled 3 of 3 files" in shown
    assert shown.count("\n") == 1
