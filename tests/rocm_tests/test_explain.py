# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`flashinfer.explain` on the public functions."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.core.op import OPS
from flashinfer.kv import PageFormat
from rocm_tests.core.environment import set_variable

INDEX = torch.zeros(1, dtype=torch.int32)
INDPTR = torch.tensor([0, 1], dtype=torch.int32)
TABLE = INDEX, INDPTR, INDEX
NATIVE_FIRST = {"native": None, "reference": None}


def append_arguments(device: str = "cpu") -> tuple[tuple[object, ...], torch.Tensor]:
    pool = torch.zeros(2, 4, 1, 8, device=device)
    row, index, indptr = torch.ones(1, 1, 8, device=device), INDEX.to(device), INDPTR.to(device)
    return (row, row, index, index, (pool, pool), index, indptr, index), pool


def test_a_public_function_is_asked_and_not_run() -> None:
    arguments, pool = append_arguments()
    answers = flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments)
    assert list(answers.items()) == list(NATIVE_FIRST.items())
    assert flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments, kv_layout="NHD", backend="reference") == {
        "reference": None
    }
    assert float(pool.sum()) == 0
    flashinfer.append_paged_kv_cache(*arguments)
    assert float(pool.sum()) == 8


def test_every_public_op() -> None:
    """Functions that allocate their result or take a structure answer as well."""
    page, planes = PageFormat("standard", "float32", 1, 4, 8), torch.zeros(2, 64)
    calls = {
        "get_seq_lens": ((INDPTR, INDEX, 4), NATIVE_FIRST),
        "get_batch_indices_positions": ((INDPTR, INDEX, 3), NATIVE_FIRST),
        "convert_kv_pages": (([planes], INDEX, page, PageFormat("shuffled", "float32", 1, 4, 8)), NATIVE_FIRST),
        "append_paged_kv_cache": (append_arguments()[0], NATIVE_FIRST),
        "append_paged_mla_kv_cache": (
            (torch.zeros(1, 8), torch.zeros(1, 2), INDEX, INDEX, *(torch.zeros(2, 4, n) for n in (8, 2)), *TABLE),
            NATIVE_FIRST,
        ),
        "paged_attention": (
            (torch.zeros(1, 1, 8), append_arguments()[0][4], INDPTR, INDPTR, INDEX, INDEX),
            {"reference": None},
        ),
    }
    assert set(calls) == set(OPS), "each public op has a call here"
    for name, (arguments, answers) in calls.items():
        assert flashinfer.explain(getattr(flashinfer, name), *arguments) == answers, name
    assert planes.count_nonzero() == 0


def test_a_name_takes_the_arguments_of_the_schema() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    assert flashinfer.explain("get_seq_lens", INDPTR, INDEX, 4, out) == NATIVE_FIRST
    with pytest.raises(flashinfer.InvalidArgumentError, match="get_seq_lens: page_size must be positive, got 0"):
        flashinfer.explain("get_seq_lens", INDPTR, INDEX, 0, out)


def test_a_device_without_kernels_is_a_sentence() -> None:
    arguments, _ = append_arguments("meta")
    answers = flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments)
    assert "meta" in str(answers["native"])
    with pytest.raises(flashinfer.BackendUnavailableError, match=r"\n  native: .*meta.*\n  inputs: float32\[1, 1, 8\]"):
        flashinfer.append_paged_kv_cache(*arguments, backend="native")


def test_overrides_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = append_arguments()
    with flashinfer.use_backend("reference"):
        assert flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments) == {"reference": None}
    set_variable(monkeypatch, env.backend, "native")
    assert flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments) == {"native": None}


def test_bad_arguments_and_unknown_ops_are_refused() -> None:
    arguments, _ = append_arguments()
    with pytest.raises(flashinfer.InvalidArgumentError, match="append_paged_kv_cache: kv_layout must be one of"):
        flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments, "XYZ")
    for op in ("no_such_op", len):
        with pytest.raises(
            flashinfer.InvalidArgumentError, match=r"explain: op must be one of \['append_paged_kv_cache'"
        ):
            flashinfer.explain(op)


def test_no_public_name_is_that_of_a_module() -> None:
    """Whoever imported `flashinfer.<name>` would find the module where the function was."""
    for name in flashinfer._EXPORTS:
        assert importlib.util.find_spec(f"flashinfer.{name}") is None, name


def test_calls_after_a_refused_question_run_again() -> None:
    arguments, pool = append_arguments()
    with pytest.raises(flashinfer.InvalidArgumentError):
        flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments, "XYZ")
    flashinfer.append_paged_kv_cache(*arguments)
    assert float(pool.sum()) == 8
