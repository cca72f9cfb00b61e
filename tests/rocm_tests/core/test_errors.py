# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions: whom each one blames, what it carries, and that it survives the way to another process."""

from __future__ import annotations

import pickle

import pytest
import torch

import flashinfer
from flashinfer.core import errors
from flashinfer.core.checks import describe, fail, index_vector
from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(name="page", ops=("append",), shims=("shims/page.cc",))
MACHINE = ("BackendUnavailableError", "BuildError", "MissingJITCacheError", "LaunchError")


def test_whom_an_error_blames() -> None:
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert not issubclass(errors.InvalidArgumentError, RuntimeError)
    for name in MACHINE:
        assert issubclass(getattr(errors, name), RuntimeError), name
        assert not issubclass(getattr(errors, name), ValueError), name
    for name in (*MACHINE, "InvalidArgumentError"):
        assert issubclass(getattr(errors, name), errors.FlashInferError), name
        assert getattr(flashinfer, name) is getattr(errors, name), f"flashinfer.{name} must be the same class"


def test_a_build_error_says_what_was_run_and_how_it_ended() -> None:
    error = errors.BuildError("page", "g++ -c page.cc", "page.cc:1: error: no")
    assert (error.name, error.command, error.log_tail) == ("page", "g++ -c page.cc", "page.cc:1: error: no")
    assert str(error) == "build of module 'page' failed\ncommand: g++ -c page.cc\npage.cc:1: error: no"


def test_a_missing_module_carries_its_spec_and_the_remedy() -> None:
    error = errors.MissingJITCacheError(SPEC, "looked in here")
    assert error.spec is SPEC
    assert "FLASHINFER_DISABLE_JIT is set; looked in here; " in str(error)
    remedy = "env -u FLASHINFER_DISABLE_JIT python -m flashinfer build --arch {} page"
    assert str(error).endswith(f"build it with: {remedy.format('cpu')}")
    assert str(errors.MissingJITCacheError(SPEC, "here", "gfx942")).endswith(remedy.format("gfx942"))


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgumentError("op: x must be y, got z"),
        errors.BackendUnavailableError("no backend"),
        errors.BuildError("page", "g++", "tail"),
        errors.MissingJITCacheError(SPEC, "here"),
        errors.LaunchError("code 1"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_reach_another_process_whole(error: errors.FlashInferError) -> None:
    """A worker's exception is pickled on its way to the main process."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_wording_of_a_refusal() -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        fail("op", "x", "positive", -1)
    assert str(caught.value) == "op: x must be positive, got -1"
    with pytest.raises(errors.InvalidArgumentError) as caught:
        fail("op", "x", "contiguous", "stride (2,)", "pass x.contiguous()")
    assert str(caught.value) == "op: x must be contiguous, got stride (2,); pass x.contiguous()"


def test_what_a_refusal_shows_of_an_argument() -> None:
    assert describe(torch.zeros(2, 0, dtype=torch.float8_e4m3fn)) == "float8_e4m3fn[2, 0] on cpu"
    assert describe(torch.zeros((), dtype=torch.int64, device="meta")) == "int64[] on meta"
    assert describe([1, 2]) == "list"


def test_index_vectors() -> None:
    cpu = torch.device("cpu")
    for good in (torch.zeros(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), torch.arange(6)[2:4]):
        index_vector("op", "x", good, cpu)
    for bad, sentence in (
        (torch.zeros(1, 1, dtype=torch.int32), "1-D, got int32[1, 1] on cpu"),
        (torch.zeros((), dtype=torch.int32), "1-D, got int32[] on cpu"),
        (torch.zeros(1), "int32 or int64, got float32[1] on cpu; pass x.int()"),
        (torch.zeros(1, dtype=torch.uint8), "int32 or int64, got uint8[1] on cpu; pass x.int()"),
        (torch.arange(6)[::2], "contiguous, got stride (2,); pass x.contiguous()"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), "on cpu, got meta; pass x.to('cpu')"),
    ):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            index_vector("op", "x", bad, cpu)
        assert str(caught.value) == f"op: x must be {sentence}"
