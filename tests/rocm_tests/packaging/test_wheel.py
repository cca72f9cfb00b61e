# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An installed wheel is complete: it builds its modules outside the checkout, from the sources it carries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from rocm_tests.conventions.tree import ROOT, cpp_files

pytestmark = pytest.mark.slow

SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "csrc_rocm", "flashinfer", "pyproject.toml", "setup.py")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHINFER_", "PYTHONPATH"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(where: Path, **environment: str) -> Path:
    """Build from a copy: a build folder in the checkout is then neither made nor used."""
    source = where / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", where / "dist", source, cwd=where, **environment)
    (wheel,) = (where / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_package_and_its_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"flashinfer/data/{p.as_posix()}" for p in cpp_files()}
    assert len(sources) > 5
    assert sources <= names, sorted(sources - names)
    assert "flashinfer/py.typed" in names
    assert any(n.endswith("/licenses/LICENSE") for n in names)
    outside = {n for n in names if not n.startswith(("flashinfer/", "flashinfer_rocm-"))}
    assert not outside


def test_the_metadata_lets_a_rocm_torch_stay(wheel: Path) -> None:
    data = metadata(wheel)
    assert data["Name"] == "flashinfer-rocm"
    assert data["License-Expression"] == "Apache-2.0"
    assert set(data["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    required = [r for r in data.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert "torch>=2.9" in required
    assert not any(r.startswith(("triton", "amd-aiter", "vllm", "nvidia")) for r in required)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_modules_built_ahead_of_time_bind_the_wheel_to_a_platform(tmp_path: Path) -> None:
    aot = tmp_path / "compiled"
    (aot / "cpu" / "page-0123456789abcdef").mkdir(parents=True)
    (aot / "cpu" / "page-0123456789abcdef" / "page.so").write_bytes(b"\x7fELF")
    wheel = build(tmp_path, FLASHINFER_WHEEL_AOT_DIR=str(aot))
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "flashinfer/data/aot/cpu/page-0123456789abcdef/page.so" in archive.namelist()


APPEND = """
    import pathlib, sys
    import torch
    import flashinfer

    here = pathlib.Path(flashinfer.__file__)
    assert here.is_relative_to(sys.prefix), f"imported {here}, not the installed package"
    k, v = torch.randn(2, 5, 3, 64).unbind()
    cache = torch.zeros(4, 2, 4, 3, 64)
    ids = dict(dtype=torch.int32)
    flashinfer.append_paged_kv_cache(
        k, v, torch.zeros(5, **ids), torch.arange(5, **ids), cache,
        torch.tensor([2, 1], **ids), torch.tensor([0, 2], **ids), torch.tensor([1], **ids),
        backend="native",
    )
    assert torch.equal(torch.cat([cache[2, 0], cache[1, 0, :1]]), k)
    assert torch.equal(torch.cat([cache[2, 1], cache[1, 1, :1]]), v)
    assert not cache[0].any() and not cache[3].any()
    print("appended")
"""


def test_an_installed_wheel_builds_its_modules_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=tmp_path)
    # Lends torch and ninja to the fresh environment. Path files inside a lent folder are not read, so the
    # editable install of this checkout stays out of reach.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    (Path(site) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    script = tmp_path / "append.py"
    script.write_text(textwrap.dedent(APPEND), encoding="utf-8")
    cache = tmp_path / "cache"
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    output = run(python, script, cwd=tmp_path, PATH=path, FLASHINFER_CACHE_DIR=str(cache))
    assert output.strip().endswith("appended")
    assert list(cache.rglob("*.so")), "the module was not built into the cache that was named"
