# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The name of a module's directory changes with everything that shapes the code, and with nothing else."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.jit import cache, toolchain
from flashinfer.jit.spec import JitSpec, read_sources
from flashinfer.jit.toolchain import Toolchain
from rocm_tests.jit.toy import SPEC, script

CPU = Toolchain("cpu")


def directory(csrc: Path, spec: JitSpec = SPEC, chain: Toolchain = CPU) -> str:
    key = cache.module_key(spec, chain, csrc)
    return str(key.directory(Path("root"), chain.compiler_identity()))


def append(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with (csrc / name).open("a") as file:
            file.write("// changed\n")

    return change


def set_flags(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = getattr(toolchain, name)
        after = {k: (*v, "-DX") for k, v in before.items()} if isinstance(before, dict) else (*before, "-DX")
        monkeypatch.setattr(toolchain, name, after)

    return change


def torch_version(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "99.0.0")


def torch_abi(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = not torch.compiled_with_cxx11_abi()
    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: other)


def other_compiler(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Prints the same version text: another installation may still have other headers.
    monkeypatch.setenv("CXX", str(script(csrc.parent / "other-g++", 'exec g++ "$@"')))


CHANGES = {
    "kernel source": append("kernels_cpu/toy.cc"),
    "shim": append("shims/toy.cc"),
    "header": append("kernels/toy.h"),
    "header of a header": append("kernels/common/bonus.h"),
    "kernel flag": set_flags("_KERNEL_FLAGS"),
    "shim flag": set_flags("_SHIM_FLAGS"),
    "link flag": set_flags("_LINK_FLAGS"),
    "torch version": torch_version,
    "torch ABI": torch_abi,
    "compiler": other_compiler,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_with(
    change: Callable[[Path, pytest.MonkeyPatch], None], csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = directory(csrc)
    assert directory(csrc) == before
    change(csrc, monkeypatch)
    assert directory(csrc) != before


def test_changes_with_generated_constants(csrc: Path) -> None:
    other = dataclasses.replace(SPEC, defines=(("TOY_BASE", "41"),))
    assert directory(csrc, other) != directory(csrc)


def test_changes_when_the_compiler_is_upgraded_in_place(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(version: str) -> Path:
        return script(csrc.parent / "g++", f'[ "$1" = --version ] && echo {version} && exit\nexec g++ "$@"')

    monkeypatch.setenv("CXX", str(install("1.0")))
    before = directory(csrc)
    install("1.0.1")
    assert directory(csrc) != before


def test_changes_with_target_and_arch_and_feature_flags(csrc: Path, stand_in_rocm: Path) -> None:
    chains = [Toolchain.parse(a) for a in ("cpu", "gfx942", "gfx950", "gfx942:xnack-", "gfx942:xnack+")]
    digests = {Path(directory(csrc, chain=chain)).name for chain in chains}
    assert len(digests) == len(chains)


def test_does_not_change_with_unrelated_files_or_the_place_of_the_sources(csrc: Path) -> None:
    before = directory(csrc)
    (csrc / "shims/unrelated.cc").write_text("// changed\n")
    (csrc / "kernels/unrelated.h").write_text("// new\n")
    assert directory(csrc) == before
    moved = shutil.move(csrc, csrc.with_name("moved"))
    assert directory(moved) == before


def test_a_new_header_that_shadows_another_counts(csrc: Path) -> None:
    (csrc / "common").mkdir()
    (csrc / "common/late.h").write_text("// from the root\n")
    (csrc / "kernels/toy.h").write_text('#include "common/late.h"\nint toy_kernel();\n')
    before = directory(csrc)
    assert "common/late.h" in read_sources(csrc, SPEC.shims)
    (csrc / "kernels/common/late.h").write_text("// beside the including file\n")
    assert "kernels/common/late.h" in read_sources(csrc, SPEC.shims)
    assert directory(csrc) != before


def test_scanner_follows_quotes_only_and_survives_cycles(csrc: Path) -> None:
    (csrc / "kernels/a.h").write_text('#include <vector>\n  #  include "b.h"\n#include "fi_config.h"\n')
    (csrc / "kernels/b.h").write_text('#include "../kernels/a.h"\n#include "not_there.h"\n')
    assert list(read_sources(csrc, ["kernels/a.h"])) == ["kernels/a.h", "kernels/b.h"]


def test_missing_source_is_named(csrc: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"source shims/none\.cc must be a readable file"):
        read_sources(csrc, ["shims/none.cc"])


def test_name_must_be_an_identifier() -> None:
    with pytest.raises(InvalidArgumentError, match="got 'Toy-1'"):
        JitSpec("Toy-1", ("toy",))
