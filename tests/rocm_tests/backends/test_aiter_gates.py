# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Ops that call AITER's Python functions, with an AITER that is absent, broken, too old or for another GPU:
"auto" goes on without it, and `backend="aiter"` says which gate it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.aiter import entry
from flashinfer.core import aiter_install
from flashinfer.core.errors import BackendUnavailableError, BuildError
from flashinfer.core.op import OPS, Op
from rocm_tests.backends.aiter_standin import found

BF16 = torch.bfloat16
INDPTR = torch.tensor([0, 1], dtype=torch.int32)
INDEX = torch.zeros(1, dtype=torch.int32)
ONE = torch.ones(1, dtype=torch.int32)


def rows(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=BF16)


def ragged() -> tuple[Any, ...]:
    q = rows(1, 2, 64)
    scales = True, 0.5, -1, 0.0, 1.0, 1.0
    return (q, q, q, INDPTR, INDPTR, *scales, None, None, None, False, 1, 1, 0, None, rows(1, 2, 64), torch.ones(1, 2))


def paged() -> tuple[Any, ...]:
    q, cache = rows(1, 2, 64), rows(2, 16, 2, 64)
    scales = True, 0.5, -1, 0.0, 1.0, 1.0
    table = INDPTR, INDPTR, INDEX, ONE, "NHD"
    results = rows(1, 2, 64), torch.ones(1, 2)
    return (q, cache, cache, *table, *scales, None, None, None, False, 1, 1, 0, None, *results)


def mla() -> tuple[Any, ...]:
    pool = rows(2, 1, 576)
    table = INDPTR, INDPTR, INDEX, ONE
    results = rows(1, 16, 512), torch.ones(1, 16)
    call = False, 0.5, 1.0, 1.0, False, 1, True, None, 0, 0, None
    return (rows(1, 16, 512), rows(1, 16, 64), pool[..., :512], pool[..., 512:], *table, *call, *results)


def context() -> tuple[Any, ...]:
    return (rows(2, 1, 576), None, INDPTR, INDEX, INDPTR, rows(256, 512), None, rows(1, 1, 192), rows(1, 1, 128))


@dataclass(frozen=True)
class Family:
    op: str
    arguments: Callable[[], tuple[Any, ...]]
    function: str
    module: str
    # A release that is too old for the call, and what is said of it; attention asks for none.
    old: tuple[str, str] | None = None

    def reason(self) -> str | None:
        return flashinfer.explain(self.op, *self.arguments())["aiter"]

    def run(self, backend: str = "auto") -> list[torch.Tensor]:
        """What the call writes."""
        op: Op = OPS[self.op]
        arguments = self.arguments()
        op(*arguments, backend=backend)
        return [arguments[i] for i in op._written if arguments[i] is not None]


FAMILIES = {
    "ragged": Family("ragged_attention", ragged, "flash_attn_varlen_func", "aiter"),
    "paged": Family("paged_attention", paged, "paged_attention_ragged", "aiter"),
    "mla": Family(
        "mla_paged_attention",
        mla,
        "mla_decode_fwd",
        "aiter.mla",
        ("0.1.7.post2", "needs AITER 0.1.7.post5 or newer, got AITER 0.1.7.post2 in "),
    ),
    "context": Family(
        "gather_kv_b_proj",
        context,
        "gather_kv_b_proj",
        "aiter.ops.triton.gather_kv_b_proj",
        ("0.1.13", "needs AITER 0.1.14 for weight scales of kind 'none', got 0.1.13"),
    ),
}
IMPORTED = "with open(__file__ + '.imports', 'a') as f: f.write('x')\n"


def install(folder: Path, version: str = "0.1.20", init: str = "", without: str = "") -> Path:
    """A package with all of these functions, which must not be called, but one; it counts how often it is imported."""
    called = "    raise AssertionError('called')\n"
    functions = {
        "aiter": ["flash_attn_varlen_func(**_)", "paged_attention_ragged(**_)"],
        "aiter.mla": ["mla_decode_fwd(num_kv_splits_indptr, return_lse=False, **_)", "mla_prefill_fwd(q)"],
        "aiter.ops": [],
        "aiter.ops.triton": [],
        "aiter.ops.triton.gather_kv_b_proj": ["gather_kv_b_proj(*_)"],
    }
    packages = {"aiter", "aiter.ops", "aiter.ops.triton"}
    for module, signatures in functions.items():
        path = folder / module.replace(".", "/")
        path = path / "__init__.py" if module in packages else path.with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        text = "".join(f"def {s}:\n{called}" for s in signatures)
        path.write_text(text.replace(f"def {without}(", f"def no_{without}("))
    path = folder / "aiter" / "__init__.py"
    path.write_text(f"{IMPORTED}{init}\n{path.read_text()}")
    info = folder / "amd_aiter-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n")
    return folder


def imports(folder: Path) -> int:
    path = folder / "aiter" / "__init__.py.imports"
    return len(path.read_text()) if path.exists() else 0


def assert_auto_goes_on(family: Family) -> None:
    for got, want in zip(family.run(), family.run("reference"), strict=True):
        assert torch.equal(got, want)


def assert_declined(family: Family, sentence: str) -> None:
    reason = family.reason()
    assert reason is not None
    assert reason.startswith(sentence)
    with pytest.raises(BackendUnavailableError) as caught:
        family.run("aiter")
    assert f"\n  aiter: {reason}\n" in str(caught.value)
    assert_auto_goes_on(family)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_a_whole_one_would_be_called(family: Family, tmp_path: Path) -> None:
    """Without this, all others could pass for a reason of their own."""
    with found(install(tmp_path)):
        assert family.reason() is None
        assert imports(tmp_path) == 0, "nothing is imported to answer a question"
        with pytest.raises(AssertionError, match="called"):
            family.run("aiter")
        assert imports(tmp_path) == 1


def test_absent(family: Family) -> None:
    with found(None):
        assert_declined(family, "needs the package aiter, which is not installed")


def test_for_another_gpu(family: Family, tmp_path: Path) -> None:
    with found(install(tmp_path)), pytest.MonkeyPatch.context() as patch:
        sentence = "needs gfx942 or gfx950, got gfx1100"
        patch.setattr(aiter_install, "why_not_gpu", lambda device: sentence)
        assert_declined(family, sentence)
        assert imports(tmp_path) == 0


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.old])
def test_too_old(name: str, tmp_path: Path) -> None:
    version, sentence = FAMILIES[name].old or ("", "")
    with found(install(tmp_path, version)):
        assert_declined(FAMILIES[name], sentence)
        assert imports(tmp_path) == 0


BROKEN = {
    "SystemExit: no hipcc": "raise SystemExit('no hipcc')",
    "RuntimeError: no build": "raise RuntimeError('no build')",
    "ModuleNotFoundError: No module named 'no_such_module'": "import no_such_module",
    "KeyError: 'gfx000'": "raise KeyError('gfx000')",
    "ZeroDivisionError: ": "1 / 0",
    "AssertionError": "assert 1 == 0",
    "SyntaxError: ": "def broken(:",
    "CalledProcessError: ": "import subprocess; subprocess.run(['false'], check=True)",
}


@pytest.mark.parametrize("text", BROKEN)
def test_an_import_that_fails(family: Family, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with found(install(tmp_path, init=BROKEN[text])), caplog.at_level(logging.WARNING, "flashinfer"):
        assert family.reason() is None
        for _ in range(3):
            assert_auto_goes_on(family)
        assert imports(tmp_path) == (0 if text == "SyntaxError: " else 1), "a failure is remembered"
        sentence = f"aiter cannot be imported: {text}"
        assert_declined(family, sentence)
        (record,) = caplog.records
        assert record.message == f"AITER is not used: {family.reason()}"
        # Asked by name at once, the error is the failure itself.
        entry.forget()
        with pytest.raises(BuildError, match=sentence.replace("(", r"\(")):
            family.run("aiter")


def test_a_function_that_is_missing(family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in releases that go on where a part of them does not compile; other functions are not the worse for it."""
    with found(install(tmp_path, without=family.function)), caplog.at_level(logging.WARNING, "flashinfer"):
        if family.op == "mla_paged_attention":  # whose parameters are read in the file
            assert_declined(family, "needs mla_decode_fwd and mla_prefill_fwd in aiter/mla.py, which AITER 0.1.20 in ")
            return
        assert family.reason() is None
        assert_auto_goes_on(family)
        place = f"{family.function} in {family.module}"
        assert_declined(family, f"AITER 0.1.20 in {tmp_path / 'aiter'} has no {place}")
        assert len(caplog.records) == 1
        for other in FAMILIES.values():
            assert (other.reason() is None) == (other is not family)


def test_one_failure_of_the_package_is_that_of_all_families(tmp_path: Path) -> None:
    with found(install(tmp_path, init="raise SystemExit")):
        for family in FAMILIES.values():
            assert_auto_goes_on(family)
        assert imports(tmp_path) == 1
        assert {family.reason() for family in FAMILIES.values()} == {"aiter cannot be imported: SystemExit"}
