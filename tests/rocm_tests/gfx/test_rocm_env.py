# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/rocm_env: how it reads apt's configuration, chooses a suite, and runs things inside."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "rocm_env"


@pytest.fixture(scope="module")
def rocm_env() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("rocm_env", str(SCRIPT))
    spec = importlib.util.spec_from_loader("rocm_env", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rocm_env"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example/proxy/main-archive
 https://second.example/archive
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/company.gpg

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/archive
Suites: bookworm
Components: main
"""

ONE_LINE = """\
# deb http://commented.example/archive bookworm main
deb [arch=amd64] https://vendor.example/apt cloud-bookworm main
deb-src http://source.example/archive bookworm main
deb [ arch=amd64 signed-by=/etc/apt/keyrings/k.gpg ] http://mirror.example/some/path bookworm main non-free # why
"""


def test_deb822(rocm_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "vendor.sources").write_text(DEB822.replace("bookworm", "nodistro"))
    (tmp_path / "sources.list.d" / "z.sources").write_text(DEB822)
    (tmp_path / "sources.list.d" / "ignored.bak").write_text(DEB822)
    sources = rocm_env.apt_sources(tmp_path)
    assert len(sources) == 6
    mirror = rocm_env.debian_mirror(sources, "bookworm")
    assert mirror.uri == "http://mirror.example/proxy/main-archive"
    assert mirror.signed_by == "/usr/share/keyrings/company.gpg"


def test_one_line_sources(rocm_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(ONE_LINE)
    mirror = rocm_env.debian_mirror(rocm_env.apt_sources(tmp_path), "bookworm")
    assert mirror.uri == "http://mirror.example/some/path"
    assert mirror.components == ("main", "non-free")
    assert mirror.signed_by == "/etc/apt/keyrings/k.gpg"


def test_a_mirror_file(rocm_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "mirrors").write_text("https://cloud.example/archive\nhttps://other.example/archive\n")
    (tmp_path / "sources.list").write_text(f"deb mirror+file:{tmp_path}/mirrors trixie main\n")
    assert rocm_env.debian_mirror(rocm_env.apt_sources(tmp_path), "trixie").uri == "https://cloud.example/archive"


def test_no_mirror(rocm_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://archive.example/ubuntu noble main\n")
    with pytest.raises(rocm_env.Stop, match="--mirror") as caught:
        rocm_env.debian_mirror(rocm_env.apt_sources(tmp_path), "noble-but-not-listed")
    assert caught.value.code == 3


def offer(package: str, version: str, suite: str) -> str:
    return f"{package} | {version} | http://mirror.example/archive {suite}/main amd64 Packages\n"


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        (
            offer("hipcc", "7.2.4+dfsg-1~exp1", "experimental")
            + offer("hipcc", "7.0.2+dfsg-3", "sid")
            + offer("libamdhip64-dev", "7.2.4-1~exp2", "experimental")
            + offer("libamdhip64-dev", "6.4.3-5", "sid"),
            ("experimental", "7.2.4+dfsg-1~exp1"),
        ),
        # Both have moved on to sid; experimental has a lone newer hipcc.
        (
            offer("hipcc", "7.4.0-1~exp1", "experimental")
            + offer("hipcc", "1:7.3.0-1", "sid")
            + offer("libamdhip64-dev", "7.3.0-1", "sid"),
            ("sid", "1:7.3.0-1"),
        ),
        # Only the compiler is new enough, somewhere.
        (offer("hipcc", "6.4.0-1", "sid") + offer("hipcc", "7.0.2-1", "forky"), ("forky", "7.0.2-1")),
    ],
)
def test_the_suite_with_both_packages_is_chosen(rocm_env: ModuleType, listing: str, expected: tuple[str, str]) -> None:
    assert rocm_env.choose_suite(listing) == expected


def test_no_suite_is_new_enough(rocm_env: ModuleType) -> None:
    listing = offer("hipcc", "5.7.1-1", "sid") + offer("hipcc", "7.2.0-1", "bookworm")
    with pytest.raises(rocm_env.Stop, match=r"offers hipcc 7 or newer; the mirror offers:\nhipcc \| 5.7.1-1"):
        rocm_env.choose_suite(listing)


def test_nothing_is_deleted_through_a_mount(
    rocm_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "env" / "root"
    tree.mkdir(parents=True)
    read_text = Path.read_text

    def with_a_mount(path: Path, *args: str, **options: str) -> str:
        if str(path) != "/proc/self/mountinfo":
            return read_text(path, *args, **options)
        return f"36 35 98:0 / {str(tree).replace(' ', chr(92) + '040')} rw - ext4 /dev/x rw\n"

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", with_a_mount)
        with pytest.raises(rocm_env.Stop, match="is a mount point"):
            rocm_env.remove_tree(tmp_path / "env")
    assert tree.is_dir()
    rocm_env.remove_tree(tmp_path / "env")
    assert not (tmp_path / "env").exists()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    done = run("--dir", str(tmp_path), "setup")
    assert (done.returncode, done.stdout) == (2, "")
    assert "something else than an environment" in done.stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("command", [["path"], ["exec", "true"], ["python", "-c", "1"], ["status"], ["remove"]])
def test_an_environment_that_is_not_there(tmp_path: Path, command: list[str]) -> None:
    # A ROCm that the machine has itself would be used instead.
    nothing = {"ROCM_HOME": str(tmp_path), "PATH": str(tmp_path), "FLASHINFER_ROCM_ENV": str(tmp_path / "x")}
    if Path("/opt/rocm/bin/hipcc").exists():
        pytest.skip("this machine has a ROCm in /opt/rocm, which `path` would rightly name")
    done = run(*command, **nothing)
    assert done.returncode == 4
    assert "run `scripts/rocm_env setup`" in done.stderr


def test_usage() -> None:
    assert run("nonsense").returncode == 2
    assert run("path", "more").returncode == 2
    assert run("exec").returncode == 2


@pytest.mark.amd_toolchain
def test_paths_and_exit_codes_are_the_same_inside(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("seen\n")
    done = subprocess.run(
        [SCRIPT, "exec", "sh", "-c", "pwd; cat here; exit 7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, f"{tmp_path}\nseen\n")


@pytest.mark.amd_toolchain
def test_no_mount_is_left_behind() -> None:
    before = Path("/proc/self/mountinfo").read_text()
    subprocess.run([SCRIPT, "exec", "true"], check=True)
    assert Path("/proc/self/mountinfo").read_text() == before
