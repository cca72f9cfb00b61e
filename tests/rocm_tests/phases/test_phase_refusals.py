# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What `BatchPhaseAttentionWrapper` refuses, and in which words; plans for graphs on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.errors import NotPlannedError
from rocm_tests.phases.case import Case, Geometry

WRAPPER = flashinfer.BatchPhaseAttentionWrapper
REQUESTS = [(1, 20), (4, 20), (3, 0)]


def planned(**changes: Any) -> tuple[Any, Case]:
    case = Case(REQUESTS, Geometry())
    wrapper = WRAPPER(torch.zeros(2 * 64 * 2 * 16))
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    arguments = dict(zip(names, case.plan_arguments(), strict=False))
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim", "page_size"), case.plan_arguments()[4:], strict=True))
    wrapper.plan(**{**arguments, **sizes, **case.plan_options(), **changes})
    return wrapper, case


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((None,), {}, "workspace_buffer must be a contiguous tensor, got NoneType"),
        ((torch.zeros(4, 4).T,), {}, "workspace_buffer must be a contiguous tensor, got float32[4, 4] on cpu"),
        ((torch.zeros(4), "NDH"), {}, "kv_layout must be one of ('NHD', 'HND', 'SHUFFLED'), got 'NDH'"),
        (
            (torch.zeros(4),),
            {"backend": "native"},
            "backend must be one of ('auto', 'triton', 'aiter', 'reference'), got 'native'",
        ),
        (
            (torch.zeros(4),),
            {"use_cuda_graph": True, "kv_indices_buffer": torch.zeros(4)},
            "kv_indices_buffer must be contiguous int32[pages] on cpu, got float32[4] on cpu",
        ),
    ],
)  # fmt: skip
def test_constructor(arguments: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        WRAPPER(*arguments, **options)
    assert str(caught.value) == f"BatchPhaseAttentionWrapper: {sentence}"


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qo_indptr": [0, 1]}, "qo_indptr must be a 1-D int32 or int64 tensor, got list"),
        ({"qo_indptr": torch.zeros(4)}, "qo_indptr must be a 1-D int32 or int64 tensor, got float32[4] on cpu"),
        ({"kv_indptr": index(0, 1)}, "kv_indptr must be of length 4, one more than kv_last_page_len, got 2"),
        ({"kv_indices": torch.zeros(4, device="meta").int()}, "kv_indices must be on the host or on cpu, got meta"),
        ({"kv_indices": index(1, 2)}, "kv_indices must be of the 5 entries that kv_indptr names, got 2"),
        ({"qo_indptr": index(1, 1, 5, 8)}, "qo_indptr[0] must be 0, got 1"),
        ({"qo_indptr": index(0, 4, 1, 8)}, "qo_indptr must be non-decreasing, got -3 tokens for request 1"),
        ({"kv_indptr": index(0, 4, 2, 5)}, "kv_indptr must be non-decreasing, got -2 pages for request 1"),
        ({"kv_last_page_len": index(5, 17, 3)}, "kv_last_page_len[1] must be in [0, 16], got 17"),
        (
            {"qo_indptr": index(0, 1, 5, 9)},
            "the pages of request 2 must be of at least its 4 new tokens, got 3 tokens; "
            "append them before the plan, or give the page table with them",
        ),
        ({"num_qo_heads": 3}, "num_qo_heads must be divisible by num_kv_heads = 2, got 3"),
        ({"page_size": 0}, "page_size must be an integer from 1 to 2147483647, got 0"),
        ({"decode_threshold": 0}, "decode_threshold must be an integer from 1 to 2147483647, got 0"),
        ({"window_left": -2}, "window_left must be an integer from -1 to 2147483647, got -2"),
        (
            {"q_data_type": torch.float64},
            "q_data_type must be one of (torch.float16, torch.bfloat16, torch.float32), got torch.float64",
        ),
        (
            {"kv_data_type": torch.float16},
            "kv_data_type must be q_data_type torch.float32 or one of (torch.float8_e4m3fn, torch.float8_e4m3fnuz), "
            "got torch.float16",
        ),
        # Rows too wide for the workspace to hold a page of them.
        ({"num_kv_heads": 4, "head_dim": 64}, "the chunk budget must be at least a page, 16 tokens, got 0; "
         "pass a larger workspace"),
    ],
)  # fmt: skip
def test_plan(changes: dict[str, Any], sentence: str) -> None:
    if "head_dim" in changes:
        changes = {**changes, "num_qo_heads": 4, "num_kv_heads": 4, "head_dim": 512}
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        planned(**changes)
    assert str(caught.value) == f"BatchPhaseAttentionWrapper: {sentence}"


def test_a_workspace_that_nobody_needs_may_be_empty() -> None:
    for requests, window_left in (([(1, 20), (3, 0)], -1), ([(4, 20)], 7)):
        case = Case(requests, Geometry(window_left=window_left))
        wrapper = WRAPPER(torch.zeros(0))
        wrapper.plan(*case.plan_arguments(), **case.plan_options())
        arguments, _ = case.run_arguments()
        out = wrapper.run(*arguments)
        torch.testing.assert_close(out.double(), case.expected()[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": torch.zeros(7, 4, 16)}, "q must be of shape [8, 4, 16] as planned, got [7, 4, 16]"),
        ({"q": torch.zeros(8, 4, 16).half()}, "q must be of the planned dtype torch.float32, got torch.float16"),
        ({"k": torch.zeros(8, 4, 16)}, "k must be of shape [8, 2, 16] as planned, got [8, 4, 16]"),
        ({"v": None}, "k and v must be given together, or both None, got float32[8, 2, 16] on cpu and NoneType"),
        ({"k_scale": 2.0}, "k_scale must be 1 for a cache of torch.float32, got 2.0"),
        ({"v_scale": "x"}, "v_scale must be a number, got 'x'"),
        (
            {"paged_kv_cache": torch.zeros(3, 2, 16, 2, 16).half()},
            "paged_kv_cache must be of the planned dtype torch.float32, got torch.float16",
        ),
    ],
)
def test_run(changes: dict[str, Any], sentence: str) -> None:
    wrapper, case = planned()
    arguments, _ = case.run_arguments()
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        wrapper.run(**{**dict(zip(("q", "k", "v", "paged_kv_cache"), arguments, strict=True)), **changes})
    assert str(caught.value) == f"BatchPhaseAttentionWrapper: {sentence}"


def test_no_plan() -> None:
    wrapper = WRAPPER(torch.zeros(4))
    with pytest.raises(NotPlannedError, match=r"BatchPhaseAttentionWrapper: plan\(\) must be called first"):
        wrapper.run(torch.zeros(1, 1, 1), None, None, torch.zeros(1))
    with pytest.raises(NotPlannedError):
        _ = wrapper.phases


def test_plans_for_a_graph_keep_their_shape() -> None:
    """Launches that fetch nothing fill up; what a graph cannot follow is refused."""
    wrapper = WRAPPER(torch.zeros(2 * 16 * 2 * 16), use_cuda_graph=True, kv_indices_buffer=torch.zeros(9).int())
    assert wrapper.is_cuda_graph_enabled

    def check(requests: list[tuple[int, int]], seed: int) -> None:
        case = Case(requests, Geometry(), seed)
        wrapper.plan(*case.plan_arguments(), **case.plan_options())
        arguments, _ = case.run_arguments()
        out = wrapper.run(*arguments)
        torch.testing.assert_close(out.double(), case.expected()[0], rtol=2e-5, atol=2e-5)

    check([(1, 20), (4, 20), (3, 17)], 0)
    words = wrapper._words
    check([(1, 3), (2, 1), (5, 33)], 1)
    assert wrapper._words is words
    for requests, sentence in (
        ([(1, 3), (2, 40), (5, 33)], "the context of extends must be of 4 chunks, as captured, got 6; "),
        ([(1, 3), (2, 1), (6, 3)], "the batch must be split as the graph's first one, PhaseSplit"),
        ([(1, 150), (2, 1), (5, 3)], "the batch must be of at most 9 pages, the length of kv_indices_buffer, got 12"),
    ):  # fmt: skip
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"BatchPhaseAttentionWrapper: {sentence}"):
            check(requests, 2)
