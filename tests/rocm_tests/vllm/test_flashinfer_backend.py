# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's backend for FlashInfer imports all it wants from this package, and its own planner drives our wrappers."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

import flashinfer
from rocm_tests.attention.wrapper_case import Case

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def backend() -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return importlib.import_module("vllm.v1.attention.backends.flashinfer")


def test_its_names_are_ours(backend: Any) -> None:
    for name in (
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "fast_decode_plan",
    ):
        assert getattr(backend, name) is getattr(flashinfer, name)
    with pytest.raises(NotImplementedError, match="FP4Tensor: not supported"):
        backend.FP4Tensor()
    with pytest.raises(NotImplementedError, match="get_trtllm_gen_multi_ctas_kv_counter_bytes: not supported"):
        backend.get_trtllm_gen_multi_ctas_kv_counter_bytes(1)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("q_len", [1, 3])
def test_its_decode_planner(backend: Any, q_len: int, graph: bool) -> None:
    """With graphs: our plan once, then `fast_decode_plan` on buffers that vLLM has written."""
    cases = [Case([q_len] * 3, lens, seed=s) for s, lens in enumerate(([9, 5, 3], [30, 0, 4], [3, 50, 7]))]
    wrapper = cases[0].decode(graph_pages=40 if graph else None, backend="fa2", use_tensor_cores=True)
    for case in cases:
        indptr, indices, last = case.pages
        used = indices[: int(indptr[-1])]
        if graph:
            wrapper._paged_kv_indptr_buf.copy_(indptr)
            wrapper._paged_kv_last_page_len_buf.copy_(last)
            wrapper._paged_kv_indices_buf[: len(used)] = used
        backend.fast_plan_decode(
            wrapper,
            indptr_cpu=indptr,
            indices=used,
            last_page_len_cpu=last,
            seq_lens_cpu=case.table.seq_lens,
            num_qo_heads=case.heads[0],
            num_kv_heads=case.heads[1],
            head_dim=case.D,
            page_size=case.page_size,
            window_left=20,
            logits_soft_cap=None,
            q_data_type=case.dtype,
            kv_data_type=case.kv_dtype,
            o_data_type=case.dtype,
            sm_scale=0.2,
            q_len_per_req=q_len,
        )
        assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (20, 0.0, 0.2)
        # As vLLM hands its pool over: split on the last axis, permuted.
        k, v = torch.cat(case.cache, dim=-1).transpose(1, 2).contiguous().transpose(1, 2).split(case.D, dim=-1)
        out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
        wrapper.run(case.q, (k, v), k_scale=1.0, v_scale=1.0, out=out, lse=lse, return_lse=True, q_len_per_req=q_len)
        case.compare((out, lse), causal=True, window_left=20, sm_scale=0.2)
