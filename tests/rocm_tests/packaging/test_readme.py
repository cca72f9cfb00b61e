# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The README's examples run, and its tables list what there is."""

from __future__ import annotations

import re
from pathlib import Path

from flashinfer import cli
from flashinfer.core import env
from rocm_tests.conventions.tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_examples_run_one_after_the_other() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["kv_cache"][5, 0].eq(names["key"][:16]).all()  # type: ignore[index]
    assert names["kv_cache"][2, 1, :3].eq(names["value"][20:]).all()  # type: ignore[index]


def test_every_command_is_listed() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", section("Command line"), re.MULTILINE)
    assert listed == list(cli.COMMANDS)


def test_every_variable_is_listed() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Environment variables"), re.MULTILINE)
    listed = re.findall(r"`([A-Z_]+)`", " ".join(rows))
    assert sorted(listed) == sorted(v.name for v in env.variables())


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_the_picture_is_what_the_command_draws(tmp_path: Path) -> None:
    match = re.search(r"`python -m flashinfer (layout [^`]*)`", README)
    assert match is not None
    drawn = tmp_path / "drawn.svg"
    assert cli.main([*match[1].split(), "--output", str(drawn)]) == 0
    shown = ROOT / "docs" / "images" / "standard-to-shuffled.svg"
    assert drawn.read_text(encoding="utf-8") == shown.read_text(encoding="utf-8")
