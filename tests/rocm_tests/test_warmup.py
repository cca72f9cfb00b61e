# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`flashinfer.warmup`: afterwards no call compiles or loads anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer.backends import native
from flashinfer.jit import build, load, toolchain
from rocm_tests.backends.aiter_standin import found, install

DECLINED = "needs an AMD GPU, got cpu"


def modules() -> set[str]:
    return {spec.name for spec in native.specs() if spec.exists_for("cpu")}


def test_every_module_is_ready_or_says_why_not() -> None:
    answers = flashinfer.warmup("cpu")
    assert answers.pop("page_aiter") == DECLINED
    assert answers == dict.fromkeys(modules())
    assert flashinfer.warmup(torch.device("cpu", 0)) == flashinfer.warmup("cpu")


def test_a_gpu_gets_the_host_code_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners of batches on a GPU: their modules exist for the CPU only."""
    loaded: dict[str, str] = {}
    monkeypatch.setattr(load, "load_module", lambda spec, device: loaded.update({spec.name: str(device)}))
    monkeypatch.setattr(toolchain.Toolchain, "for_device", lambda device: toolchain.Toolchain("hip", "gfx942"))
    answers = native.prepare_all(torch.device("cuda", 0))
    assert answers == dict.fromkeys(loaded)
    assert {name for name, device in loaded.items() if device == "cpu"} == {"mla", "plan"}
    assert loaded["page"] == "cuda:0"


def test_the_first_call_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, row, zero = torch.zeros(2, 2, 4, 1, 8), torch.ones(1, 1, 8), torch.zeros(1, dtype=torch.int32)
    with found(install("own_typed", tmp_path)):
        assert flashinfer.warmup("cpu")["page_aiter"] is None

        def unwanted(*args: object, **options: object) -> None:
            raise AssertionError("a call looked for a module")

        for module, name in ((load, "obtain"), (build, "build"), (subprocess, "Popen")):
            monkeypatch.setattr(module, name, unwanted)
        for backend in ("native", "aiter"):
            flashinfer.append_paged_kv_cache(
                row, row, zero, zero, pool, zero, torch.tensor([0, 1]), zero, backend=backend
            )
        assert float(pool.sum()) == 16


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    header = install("own_typed", tmp_path) / "aiter_meta/csrc/include/cache.h"
    text = header.read_text()
    with found(tmp_path):
        header.write_text("// nothing\n")
        reason = flashinfer.warmup("cpu")["page_aiter"]
        assert reason is not None
        assert "got no reshape_and_cache_flash" in reason
        header.write_text(text)
        assert flashinfer.warmup("cpu")["page_aiter"] is None


@pytest.mark.parametrize(
    ("device", "got"),
    [("meta", "the CPU or a GPU, got 'meta'"), ("nothing", "the CPU or a GPU, got 'nothing'"), ([], r"got \[\]")],
)
def test_other_devices_are_refused(device: object, got: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError, match=f"warmup: device must be .*{got}"):
        flashinfer.warmup(device)  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(flashinfer.InvalidArgumentError, match="warmup: device must be a GPU, of which torch finds"):
        flashinfer.warmup("cuda:99")


@pytest.mark.gpu
def test_the_current_gpu_is_the_default() -> None:
    answers = flashinfer.warmup()
    assert all(answers[spec.name] is None for spec in native.specs() if spec.exists_for("cuda") or spec.is_host_code)
    assert torch.device("cuda", 0) in load._by_device["page"]


def test_a_process_of_its_own() -> None:
    """Nothing of this process's memory helps."""
    program = "import flashinfer; print(sorted(flashinfer.warmup('cpu')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted({*modules(), "page_aiter"}))
