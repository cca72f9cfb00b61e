# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`build`, `module-status`, `clear-cache` and `show-config`, on the toy module of the JIT tests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path

import pytest

from flashinfer.cli import COMMANDS, build, main, module_status, show_config
from flashinfer.core import env
from flashinfer.jit import cache
from flashinfer.jit.spec import JitSpec
from flashinfer.version import __version__
from rocm_tests.backends.aiter_standin import found, install
from rocm_tests.jit.toy import SOURCES, SPEC

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def toy_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as if the toy were its only module, with folders of the test's own."""
    for name, text in SOURCES.items():
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).write_text(text)
    monkeypatch.setattr(cache, "csrc_root", lambda: tmp_path / "csrc")
    for module in (build, module_status):
        monkeypatch.setattr(module, "native_specs", lambda: [SPEC])
    for variable in env.variables():
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("FLASHINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))


def test_build_status_clear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["module-status"]) == 0
    assert "not built" in capsys.readouterr().out
    assert main(["build"]) == 0
    library = Path(capsys.readouterr().out.strip())
    assert library.is_file()
    assert library.is_relative_to(cache.cache_root() / "cpu")
    assert main(["module-status"]) == 0
    shown = capsys.readouterr().out
    assert str(library) in shown
    assert f"cpu/{library.parent.name}  current" in shown
    library.write_bytes(b"")
    assert main(["module-status"]) == 0
    assert f"cpu/{library.parent.name}  damaged" in capsys.readouterr().out
    assert main(["clear-cache"]) == 0
    assert capsys.readouterr().out.startswith("1 modules deleted")
    assert not library.exists()


def test_build_for_the_ahead_of_time_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--arch", "cpu", "--out", str(tmp_path / "aot"), "toy"]) == 0
    library = Path(capsys.readouterr().out.strip())
    assert cache.find(SPEC, build.Toolchain("cpu")) == (build.Toolchain("cpu"), library)
    assert not cache.cache_root().exists()


def test_host_code_is_built_once_and_for_every_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planners run on the host of a GPU, also of one for which nothing else is wanted."""
    built: list[tuple[str, str]] = []

    def note(spec: JitSpec, toolchain: build.Toolchain, root: Path | None = None) -> str:
        built.append((spec.name, toolchain.arch or toolchain.target))
        return "path"

    host = dataclasses.replace(SPEC, name="host", kernels=())
    monkeypatch.setattr(build, "native_specs", lambda: [SPEC, host])
    monkeypatch.setattr(build, "build", note)
    assert main(["build", "--arch", "gfx942"]) == 0
    assert built == [("toy", "gfx942"), ("host", "cpu")]
    built.clear()
    assert main(["build", "--arch", "cpu,gfx942,gfx950"]) == 0
    assert built == [("toy", "cpu"), ("host", "cpu"), ("toy", "gfx942"), ("toy", "gfx950")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "gfx1100"], "architecture must be one of [cpu, gfx942, gfx950, sm_90], got 'gfx1100'"),
        (["--arch", ""], "build: --arch must be a list such as gfx942,gfx950, got ''"),
        (["--arch", ","], "build: --arch must be a list such as gfx942,gfx950, got ','"),
        (["nothing"], "module must be one of ['toy'], got 'nothing'"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_built(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", *words]) == 1
    assert message in capsys.readouterr().err
    assert not cache.cache_root().exists()


def test_the_module_with_aiter_is_built_where_aiter_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone and among all others, and found by a process that must not compile."""
    monkeypatch.setattr(cache, "csrc_root", lambda: ROOT / "csrc_rocm")
    monkeypatch.setattr(build, "native_specs", list)
    words = ["build", "--arch", "cpu", "--out", str(tmp_path / "aot")]
    with found(None):
        assert main([*words, "page_aiter"]) == 1
        assert "module 'page_aiter' needs the package aiter, which is not installed" in capsys.readouterr().err
        assert main(words) == 0
        assert capsys.readouterr().out == ""
    with found(install("own_typed", tmp_path / "site"), anywhere=False):
        assert main([*words, "page_aiter"]) == 0
        assert capsys.readouterr().out == "", "AITER has no kernels for the CPU"
    with found(tmp_path / "site"):
        for names in (["page_aiter"], []):
            assert main([*words, *names]) == 0
            library = Path(capsys.readouterr().out.strip())
            assert library.is_relative_to(tmp_path / "aot" / "cpu")
        monkeypatch.setattr(module_status, "native_specs", list)
        assert main(["module-status"]) == 0
        assert f"page_aiter       cpu          {library}" in capsys.readouterr().out
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
        assert cache.find(build.aiter_specs()[0], build.Toolchain("cpu")) == (build.Toolchain("cpu"), library)


def test_a_broken_aiter_stops_no_other_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = install("own_typed", tmp_path / "site")
    (site / "aiter_meta" / "csrc" / "include" / "cache.h").unlink()
    with found(site):
        assert main(["build", "--arch", "cpu", "--out", str(tmp_path / "aot"), "toy"]) == 0
        library = Path(capsys.readouterr().out.strip())
        assert library.is_file()
        assert main(["build", "--arch", "cpu", "--out", str(tmp_path / "aot"), "page_aiter"]) == 1
        assert "csrc/include/cache.h must be a readable file" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_show_config_warns_of_the_other_flashinfer(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if installed and name == "flashinfer-python":
            return "0.7.2"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["show-config"]) == 0
    out, err = capsys.readouterr()
    assert ("flashinfer-python 0.7.2 is installed too" in err) == installed
    assert f"{cache.cache_root()}" in out
    assert all(variable.name in out for variable in env.variables())


def test_show_config_survives_a_bare_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("ROCM_HOME", "/nonexistent")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert main(["show-config"]) == 0
    assert capsys.readouterr().out.count("must be installed") == 4


@pytest.mark.parametrize(
    ("name", "text"), [("FLASHINFER_CHECK", "maybe"), ("FLASHINFER_BACKEND", "foo"), ("MAX_JOBS", "0")]
)
def test_show_config_names_values_that_make_no_sense(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, text)
    assert main(["show-config"]) == 1
    out, err = capsys.readouterr()
    assert (
        f"error: environment: {name} must be one of" in err or f"error: environment: {name} must be a positive" in err
    )
    assert f"got {text!r}; correct or unset it" in err
    assert env.variables()[-1].name in out, "all is shown nevertheless"


def test_a_folder_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--out", "/proc/nowhere"]) == 1
    err = capsys.readouterr().err
    assert "error: jit: the folder for modules must be writable, got" in err
    assert err.rstrip().endswith("; name another")
    assert main(["layout", "--output", "/proc/nowhere/a.svg"]) == 1
    assert "error: layout: --output must be writable, got" in capsys.readouterr().err


def test_a_compiler_that_produces_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "true")
    assert main(["build"]) == 1
    err = capsys.readouterr().err
    assert "error: build of module 'toy' failed\ncommand: " in err
    assert ".o: no compiler?" in err


def test_an_interrupted_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "run", interrupted)
    assert main(["build"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"flashinfer-rocm {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert show_config.__name__ in {module for module, _ in COMMANDS.values()}
