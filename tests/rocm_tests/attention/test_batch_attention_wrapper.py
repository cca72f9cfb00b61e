# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`BatchAttention`: mixed batches, lengths in place of last page lengths, and a workspace of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.errors import NotPlannedError
from rocm_tests.attention.wrapper_case import NAN, Case


def plan(case: Case, wrapper: flashinfer.BatchAttention, causal: bool = False, **options: Any) -> None:
    Hq, H = case.heads
    dims = case.D, case.D, case.page_size
    metadata = case.qo_indptr, case.table.indptr, case.table.indices, case.table.seq_lens
    wrapper.plan(*metadata, Hq, H, *dims, causal, **{**case.dtypes, **options})


@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED"])
@pytest.mark.parametrize("causal", [True, False])
def test_decode_extend_and_prefill_in_one_batch(causal: bool, kv_layout: str) -> None:
    wrapper = flashinfer.BatchAttention(kv_layout, "cpu")
    for case in (
        Case([1, 5, 17, 0, 1], [33, 21, 17, 9, 0], kv_layout=kv_layout, page_size=8, dtype=torch.bfloat16),
        Case([3], [4], kv_layout=kv_layout, page_size=4, D=64),
        Case([], [], kv_layout=kv_layout),
    ):
        plan(case, wrapper, causal)
        case.compare(wrapper.run(case.q, case.cache), causal=causal)
        out, lse = torch.full_like(case.q, NAN), torch.full(case.q.shape[:2], NAN)
        found = wrapper.run(case.q, case.cache, out, lse, 0.5, 2.0)
        assert found[0] is out
        assert found[1] is lse
        case.compare(found, causal=causal, k_scale=0.5, v_scale=2.0)


def test_where_it_runs() -> None:
    """By default on the GPU if there is one; a GPU that is not there is named."""
    assert flashinfer.BatchAttention().device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    count = torch.cuda.device_count()
    sentence = (
        rf"BatchAttention: device must be the CPU or a GPU of this machine, got 'cuda:{count}'; torch finds {count}"
    )
    with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
        flashinfer.BatchAttention(device=f"cuda:{count}")
    for name in ("gpu", 1.5):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"device must be a device of torch's, got {name!r}"):
            flashinfer.BatchAttention("NHD", name)  # type: ignore[arg-type]


def test_soft_cap_and_scale() -> None:
    case = Case([3], [9])
    wrapper = flashinfer.BatchAttention(device="cpu")
    plan(case, wrapper, sm_scale=0.5, logits_soft_cap=1.0)
    for run_time in ({}, {"logits_soft_cap": 1.0}):
        case.compare(wrapper.run(case.q, case.cache, **run_time), sm_scale=0.5, logits_soft_cap=1.0)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"logits_soft_cap must be 1\.0 as planned, got 2\.0"):
        wrapper.run(case.q, case.cache, logits_soft_cap=2.0)


def test_what_contradicts_itself_is_named() -> None:
    case = Case([1, 2], [18, 4])
    wrapper = flashinfer.BatchAttention(device="cpu")
    with pytest.raises(NotPlannedError, match=r"BatchAttention: plan\(\) must be called before run"):
        wrapper.run(case.q, case.cache)
    lens = case.table.seq_lens
    for wrong, sentence in (
        (lens + 3, r"kv_len_arr\[0\] must be the tokens of its pages, 5 of 4, got 21"),
        (-lens, r"kv_len_arr\[0\] must be the tokens of its pages, 5 of 4, got -18"),
        (lens[:1], "qo_indptr must be of length 2, one more than the batch size, got 3"),
    ):
        object.__setattr__(case.table, "seq_lens", wrong)
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"BatchAttention: {sentence}"):
            plan(case, wrapper)
    object.__setattr__(case.table, "seq_lens", lens)
    with pytest.raises(flashinfer.InvalidArgumentError, match="use_profiler must be False, as it is not supported"):
        plan(case, wrapper, use_profiler=True)
    plan(case, wrapper)
    for name in ("profiler_buffer", "kv_cache_sf"):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"{name} must be None, as it is not supported"):
            wrapper.run(case.q, case.cache, **{name: torch.zeros(1)})
