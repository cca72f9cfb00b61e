# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`flashinfer.explain` on the public functions."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer import dense_kv
from flashinfer.core import env
from flashinfer.core.op import OPS
from flashinfer.kv import PageFormat
from flashinfer.ops import page as ops
from rocm_tests.attention.wrapper_case import Case
from rocm_tests.core.environment import set_variable

INDEX = torch.zeros(1, dtype=torch.int32)
INDPTR = torch.tensor([0, 1], dtype=torch.int32)
TABLE = INDEX, INDPTR, INDEX
NATIVE_FIRST = {"native": None, "reference": None}
APPEND = {"native": None, "aiter": "needs an AMD GPU, got cpu", "reference": None}


def append_arguments(device: str = "cpu") -> tuple[tuple[object, ...], torch.Tensor]:
    pool = torch.zeros(2, 4, 1, 8, device=device)
    row, index, indptr = torch.ones(1, 1, 8, device=device), INDEX.to(device), INDPTR.to(device)
    return (row, row, index, index, (pool, pool.clone()), index, indptr, index), pool


def test_a_public_function_is_asked_and_not_run() -> None:
    arguments, pool = append_arguments()
    answers = flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments)
    assert list(answers.items()) == list(APPEND.items())
    assert flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments, kv_layout="NHD", backend="reference") == {
        "reference": None
    }
    assert float(pool.sum()) == 0
    flashinfer.append_paged_kv_cache(*arguments)
    assert float(pool.sum()) == 8


def mla_context_calls() -> dict[str, tuple[tuple[object, ...], dict[str, str | None]]]:
    half = torch.zeros(1, 1, 16, dtype=torch.float16)
    rows = half[..., :8].clone(), half[..., :8].clone()
    cache, weight = torch.zeros(2, 1, 72), torch.zeros(16, 64)
    declined = {"aiter": "needs an AMD GPU, got cpu", "triton": "needs a GPU, got cpu", "reference": None}
    results = torch.zeros(1, 1, 16), torch.zeros(1, 1, 8)
    return {
        "concat_mla_k": ((half, *rows), NATIVE_FIRST),
        "gather_kv_b_proj": ((cache, None, INDPTR, INDEX, INDPTR, weight, None, *results), declined),
        "mla_context_indices": ((INDEX[None], INDEX, INDEX, INDPTR, 2, 4, INDEX.clone()), NATIVE_FIRST),
    }


def test_every_public_op() -> None:
    """Functions that allocate their result or take a structure answer as well."""
    page, planes = PageFormat("standard", "float32", 1, 4, 8), torch.zeros(2, 64)
    calls = {
        "get_seq_lens": ((INDPTR, INDEX, 4), NATIVE_FIRST),
        "get_batch_indices_positions": ((INDPTR, INDEX, 3), NATIVE_FIRST),
        "convert_kv_pages": (([planes], INDEX, page, PageFormat("shuffled", "float32", 1, 4, 8)), NATIVE_FIRST),
        "append_paged_kv_cache": (append_arguments()[0], APPEND),
        "append_paged_mla_kv_cache": (
            (torch.zeros(1, 8), torch.zeros(1, 2), INDEX, INDEX, *(torch.zeros(2, 4, n) for n in (8, 2)), *TABLE),
            NATIVE_FIRST,
        ),
        "gather_paged_kv": ((append_arguments()[0][4], *TABLE[:2], INDEX, INDPTR, 1), NATIVE_FIRST),
        "paged_attention": (
            (torch.zeros(1, 1, 8), append_arguments()[0][4], INDPTR, INDPTR, INDEX, INDEX),
            {"reference": None},
        ),
        "ragged_attention": ((*(torch.zeros(1, 1, 8),) * 3, INDPTR, INDPTR), {"reference": None}),
        "merge_state": ((torch.zeros(1, 1, 8), torch.zeros(1, 1)) * 2, {"reference": None}),
        "merge_state_in_place": (
            (*(torch.zeros(1, 1, *n) for n in ((8,), (), (8,), ())),),
            {"reference": None},
        ),
        "merge_states": ((torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1)), {"reference": None}),
        "convert_kv_pages_into": (
            ([planes], INDEX, [planes.clone()], INDEX, page, PageFormat("shuffled", "float32", 1, 4, 8)),
            NATIVE_FIRST,
        ),
        "mla_paged_attention": (
            (
                *(torch.zeros(1, 1, n) for n in (8, 2)),
                *(torch.zeros(2, 4, n) for n in (8, 2)),
                INDPTR,
                INDPTR,
                *TABLE[::2],
            ),
            {"reference": None},
        ),
    }
    calls |= mla_context_calls()
    assert set(calls) == set(OPS), "each public op has a call here"
    options: dict[str, dict[str, object]] = {
        name: {"backend": "reference"} for name, (_, answers) in calls.items() if answers == {"reference": None}
    }
    options["mla_paged_attention"] = {"causal": True, "sm_scale": 1.0, "backend": "reference"}
    plain = {"backend": "reference"}
    options = {"mla_paged_attention": {"causal": True, "sm_scale": 1.0, **plain}}
    options |= dict.fromkeys(("paged_attention", "ragged_attention"), plain)
    options |= dict.fromkeys(("merge_state", "merge_state_in_place", "merge_states"), plain)
    for name, (arguments, answers) in calls.items():
        assert flashinfer.explain(getattr(flashinfer, name), *arguments, **options.get(name, {})) == answers, name
    assert planes.count_nonzero() == 0


def test_a_name_takes_the_arguments_of_the_schema() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    assert flashinfer.explain("get_seq_lens", INDPTR, INDEX, 4, out) == NATIVE_FIRST
    with pytest.raises(flashinfer.InvalidArgumentError, match="get_seq_lens: page_size must be an integer from 1 to"):
        flashinfer.explain("get_seq_lens", INDPTR, INDEX, 0, out)


def test_a_name_takes_keywords_too() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    assert flashinfer.explain("get_seq_lens", INDPTR, INDEX, seq_lens=out, page_size=4) == NATIVE_FIRST
    assert flashinfer.explain(ops.get_seq_lens, INDPTR, INDEX, seq_lens=out, page_size=4) == NATIVE_FIRST


@pytest.mark.parametrize(
    ("arguments", "more", "what"),
    [
        ((INDPTR, INDEX, 4), {}, "missing a required argument: 'seq_lens'"),
        ((INDPTR, INDEX, 4, INDEX), {"page_sise": 4}, "got an unexpected keyword argument 'page_sise'"),
        ((INDPTR, INDEX, 4, INDEX), {"page_size": 4}, "multiple values for argument 'page_size'"),
        ((INDPTR, INDEX, 4, INDEX, INDEX), {}, "too many positional arguments"),
    ],
)
def test_arguments_that_make_no_call_are_refused(arguments: tuple[Any, ...], more: dict[str, Any], what: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.explain("get_seq_lens", *arguments, **more)
    names = "kv_indptr, kv_last_page_len, page_size, seq_lens"
    assert str(caught.value) == f"explain: arguments must be those of get_seq_lens: {names}, got {what}"
    with pytest.raises(flashinfer.InvalidArgumentError, match="those of get_seq_lens: kv_indptr, kv_last_page_len, pa"):
        flashinfer.explain(flashinfer.get_seq_lens, INDPTR, INDEX, 4, page_sise=4)


def test_a_call_with_nothing_to_do_is_no_answer() -> None:
    page = PageFormat("standard", "float32", 1, 4, 8)
    with pytest.raises(flashinfer.InvalidArgumentError, match="arguments must be those of a call with something to do"):
        flashinfer.explain(flashinfer.convert_kv_pages, [], INDEX, page, page)


def test_tensors_without_memory_are_refused() -> None:
    arguments, _ = append_arguments("meta")
    for run in (
        functools.partial(flashinfer.explain, flashinfer.append_paged_kv_cache),
        functools.partial(flashinfer.append_paged_kv_cache, backend="native"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match="tensors must be on a CPU or GPU, got meta"):
            run(*arguments)


def test_a_gpu_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with FakeTensorMode():
        arguments = (torch.empty(n, dtype=torch.int32, device="cuda:5") for n in (2, 1, 1))
        indptr, last, out = arguments
        answers = flashinfer.explain("get_seq_lens", indptr, last, 4, out)
    assert answers == {
        "native": "jit: cuda:5 must be a GPU of this machine, on which torch finds 0",
        "reference": None,
    }


def test_overrides_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = append_arguments()
    with flashinfer.use_backend("reference"):
        assert flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments) == {"reference": None}
    set_variable(monkeypatch, env.backend, "native")
    assert flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments) == {"native": None}


def test_the_run_of_a_planned_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention it comes to; other steps, as the gather of shuffled pages, have other backends."""
    monkeypatch.setattr(dense_kv, "ROWS_WORTH", 1)
    case = Case([1, 1], [21, 12], kv_layout="SHUFFLED", dtype=torch.float16, page_size=8)
    decode, paged, ragged = case.decode(), case.paged(), case.ragged()
    case.plan_decode(decode)
    case.plan_paged(paged, causal=True)
    case.plan_ragged(ragged)
    assert paged.gathers_pages
    mixed = flashinfer.BatchAttention("SHUFFLED", "cpu")
    lens, shape = case.table.seq_lens, (*case.heads, case.D, case.D, case.page_size)
    mixed.plan(case.qo_indptr, *case.pages[:2], lens, *shape, **case.dtypes)
    phases = flashinfer.BatchPhaseAttentionWrapper(case.workspace(), "SHUFFLED")
    longer = Case([3, 1], [21, 12], kv_layout="SHUFFLED", dtype=torch.float16, page_size=8)
    phases.plan(longer.qo_indptr, *longer.pages, *longer.shape, **longer.dtypes)
    new = longer.k[:4], longer.v[:4]
    for run, arguments in (
        (decode.run, (case.q, case.cache)),
        (paged.run, (case.q, case.cache)),
        (ragged.run, (case.q, case.k, case.v)),
        (mixed.run, (case.q, case.cache)),
        (phases.run, (longer.q, *new, longer.cache)),
    ):
        answers = flashinfer.explain(run, *arguments)
        assert list(answers) == ["triton", "aiter", "reference"]
        assert answers["aiter"] is not None
        assert answers["reference"] is None


def test_bad_arguments_and_unknown_ops_are_refused() -> None:
    arguments, _ = append_arguments()
    with pytest.raises(flashinfer.InvalidArgumentError, match="append_paged_kv_cache: kv_layout must be one of"):
        flashinfer.explain(flashinfer.append_paged_kv_cache, *arguments, "XYZ")
    for op in ("no_such_op", len):
        with pytest.raises(
            flashinfer.InvalidArgumentError, match=r"explain: op must be one of \['append_paged_kv_cache'"
        ):
            flashinfer.explain(op)
    with pytest.raises(flashinfer.InvalidArgumentError, match="or a function of that name, got a partial"):
        flashinfer.explain(functools.partial(flashinfer.get_seq_lens, INDPTR), INDEX, 4)


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
