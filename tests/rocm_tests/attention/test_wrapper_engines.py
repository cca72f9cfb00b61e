# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What vLLM and SGLang do with the wrappers: signatures, private attributes, planners put in the place of ours."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import flashinfer
import flashinfer.attention
import flashinfer.cascade
import flashinfer.decode
import flashinfer.prefill
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.attention.wrapper_case import Case

Decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
Paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper
Ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
Sink = flashinfer.BatchAttentionWithAttentionSinkWrapper

# By position, as FlashInfer 0.7.4 has them.
POSITIONAL = {
    Decode: "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
    "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args jit_kwargs",
    Decode.plan: "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size",
    Decode.run: "q paged_kv_cache",
    Decode.forward: "q paged_kv_cache pos_encoding_mode q_scale k_scale v_scale window_left logits_soft_cap sm_scale "
    "rope_scale rope_theta",
    flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper: "workspace_buffer indptr_buffer indices_buffer "
    "last_page_len_buffer kv_layout use_tensor_cores",
    flashinfer.fast_decode_plan: "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale rope_scale rope_theta "
    "non_blocking fixed_split_size disable_split_kv q_len_per_req global_override_indptr_cpu",
    Paged: "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
    "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask "
    "max_total_num_rows",
    Paged.plan: "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
    "head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction "
    "sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking "
    "prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables "
    "max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv uniform_q_len use_token_head_sf",
    Paged.run: "q paged_kv_cache",
    Paged.forward: "q paged_kv_cache causal pos_encoding_mode use_fp16_qk_reduction k_scale v_scale window_left "
    "logits_soft_cap sm_scale rope_scale rope_theta",
    Ragged: "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf custom_mask_buf "
    "mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask",
    Ragged.plan: "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask "
    "packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction window_left logits_soft_cap sm_scale "
    "rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr "
    "token_pos_in_items_len max_item_len_ptr fixed_split_size disable_split_kv seq_lens seq_lens_q "
    "max_token_per_sequence max_sequence_kv v_indptr o_indptr qo_indptr_cpu kv_indptr_cpu uniform_q_len "
    "use_token_head_sf",
    Ragged.run: "q k v",
    flashinfer.single_decode_with_kv_cache: "q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale "
    "v_scale window_left logits_soft_cap sm_scale rope_scale rope_theta return_lse",
    flashinfer.single_prefill_with_kv_cache: "q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask "
    "causal kv_layout pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
    "rope_theta backend return_lse kv_cache_sf k_scale v_scale",
    flashinfer.BatchAttention: "kv_layout device",
    flashinfer.BatchAttention.plan: "qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk "
    "head_dim_vo page_size causal sm_scale logits_soft_cap q_data_type kv_data_type use_profiler",
    flashinfer.BatchAttention.run: "q kv_cache out lse k_scale v_scale logits_soft_cap profiler_buffer kv_cache_sf",
}
KEYWORDS = {
    Decode.plan: "pos_encoding_mode window_left window_right logits_soft_cap q_data_type kv_data_type o_data_type "
    "data_type sm_scale rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv "
    "q_len_per_req is_causal use_token_head_sf",
    Decode.run: "q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks q_len_per_req "
    "skip_softmax_threshold_scale_factor kv_cache_sf",
    Paged.run: "q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl window_left sinks "
    "kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress",
    Ragged.run: "q_scale k_scale v_scale o_scale out lse return_lse lse_base lse_layout enable_pdl kv_cache_sf",
}


@pytest.mark.parametrize("function", POSITIONAL, ids=lambda f: f.__qualname__)
def test_signatures_are_those_of_flashinfer(function: Any) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[positional[0] == "self" and function is not flashinfer.fast_decode_plan :] == (
        POSITIONAL[function].split()
    )
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert set(KEYWORDS.get(function, "").split()) <= set(keywords)


def test_names_where_engines_look_for_them() -> None:
    assert flashinfer.decode.fast_decode_plan is flashinfer.fast_decode_plan
    assert flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper is Decode
    assert flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper is Paged
    assert flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper is Ragged
    assert flashinfer.attention.BatchAttention is flashinfer.BatchAttention
    assert flashinfer.cascade.merge_state is flashinfer.merge_state
    for wrapper in (Decode, Paged, Ragged):
        assert wrapper.begin_forward is wrapper.plan


@pytest.mark.parametrize(
    "function",
    [
        flashinfer.decode.trtllm_batch_decode_with_kv_cache,
        flashinfer.prefill.trtllm_batch_context_with_kv_cache,
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    ],
    ids=lambda f: f.__name__,
)
def test_what_cannot_be_had_says_so_when_called(function: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"^{function.__name__}: not supported, as it is"):
        function(torch.zeros(1), key=1)


def fast_prefill_plan(self: Paged, case: Case, arguments: int, causal: bool = False) -> None:
    """What SGLang does in the place of `begin_forward`: write the buffers, then plan with 19 to 21 arguments."""
    assert self.is_cuda_graph_enabled
    assert self._backend == "fa2"
    assert self._cached_module is not None
    rows = int(case.qo_indptr[-1])
    self._qo_indptr_last, self._max_q_len, self._max_kv_len = rows, max(case.q_lens), max(case.kv_lens)
    if self._max_total_num_rows is None:
        self._max_total_num_rows = rows
    self._batch_size, self._num_qo_heads, self._num_kv_heads = len(case.q_lens), *case.heads
    self._prefix_len_ptr = self._token_pos_in_items_ptr = self._max_item_len_ptr = None
    self._token_pos_in_items_len = 0
    self._qo_indptr_buf.copy_(case.qo_indptr, non_blocking=True)
    self._paged_kv_indptr_buf.copy_(case.table.indptr, non_blocking=True)
    self._paged_kv_last_page_len_buf.copy_(case.table.last_page_len, non_blocking=True)
    self._paged_kv_indices_buf[: len(case.table.indices)].copy_(case.table.indices, non_blocking=True)
    self._cached_q_data_type, self._cached_kv_data_type, self._cached_o_data_type = "float32", torch.float32, None
    self._block_tables = None
    args = [
        *(self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer),
        *(case.qo_indptr.cpu(), case.table.indptr.cpu(), case.table.seq_lens.cpu(), rows, len(case.q_lens)),
        *(*case.heads, case.page_size, True, case.D, case.D, causal, -1, -1, False, 0, 1, 0),
    ]
    self._plan_info = self._cached_module.plan(*args[:arguments])


@pytest.mark.parametrize("arguments", [19, 20, 21])
def test_an_engine_may_replace_begin_forward_of_prefill(arguments: int) -> None:
    first = Case([4, 2], [9, 5])
    wrapper = first.paged(graph_pages=40, backend="fa2")
    first.plan_paged(wrapper)
    info = wrapper._plan_info
    wrapper.begin_forward = functools.partial(fast_prefill_plan, wrapper)
    for case in (Case([4, 2], [30, 2], seed=1), Case([1, 1], [3, 50], seed=2), Case([0, 6], [0, 6], seed=3)):
        wrapper.begin_forward(case, arguments)
        assert wrapper._plan_info == info
        case.compare(wrapper.forward_return_lse(case.q, case.cache, causal=True), causal=True)
    wrapper.vllm_first_call = False  # engines add attributes of their own


def test_queries_of_a_graph_may_be_padded() -> None:
    first = Case([4, 2], [9, 5])
    wrapper = first.paged(graph_pages=40)
    first.plan_paged(wrapper)
    case = Case([1, 2], [9, 5], seed=1)
    case.plan_paged(wrapper)
    q = torch.cat([case.q, case.q])
    out, lse = wrapper.run(q, case.cache, return_lse=True)
    assert out.shape == q.shape
    case.compare((out[:3], lse[:3]))


@pytest.mark.parametrize("override", [True, False])
def test_fast_decode_plan_in_the_place_of_begin_forward(override: bool) -> None:
    """One function object, which engines recognise; a graph's buffers are the engine's business then."""
    first = Case([1, 1], [9, 5])
    wrapper = first.decode(graph_pages=40, backend="fa2", use_tensor_cores=True)
    first.plan_decode(wrapper)
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    wrapper.plan = wrapper.begin_forward
    assert wrapper.begin_forward.func is flashinfer.decode.fast_decode_plan
    buffers = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf
    addresses = [t.data_ptr() for t in (*buffers, wrapper._qo_indptr_buf)]
    for case in (Case([1, 1], [33, 0], seed=1), Case([1, 1], [2, 50], seed=2)):
        indptr, indices, last = case.pages
        used = int(indptr[-1])
        for buffer, t in zip(buffers, (indptr, indices[:used], last), strict=True):
            buffer[: t.numel()] = t
        # SGLang passes none of the batch's pages when it says the indptr itself.
        extra = {"global_override_indptr_cpu": indptr.cpu()} if override else {}
        wrapper.begin_forward(indptr, indices, last, *case.shape, data_type="float32", non_blocking=True, **extra)
        case.compare(wrapper.forward_return_lse(case.q, case.cache))
    assert addresses == [t.data_ptr() for t in (*buffers, wrapper._qo_indptr_buf)]


def test_fast_decode_plan_without_graphs() -> None:
    """As vLLM: one plan with many keywords, then the fast one."""
    case = Case([2, 2], [9, 5])
    wrapper = case.decode(use_tensor_cores=True)
    hints = {"block_tables": None, "seq_lens": case.table.seq_lens, "fixed_split_size": -1, "disable_split_kv": False}
    case.plan_decode(wrapper, pos_encoding_mode="NONE", o_data_type=case.dtype, q_len_per_req=2, **hints)
    wrapper.vllm_first_call = False
    for other in (Case([2, 2], [3, 30], seed=1), Case([2, 2, 2], [2, 3, 4], seed=2)):
        flashinfer.fast_decode_plan(
            *(wrapper, *other.pages, *other.shape),
            window_left=4,
            logits_soft_cap=None,
            sm_scale=0.5,
            q_data_type=torch.float32,
            kv_data_type=torch.float32,
            q_len_per_req=2,
        )
        other.compare(wrapper.run(other.q, other.cache, return_lse=True), causal=True, window_left=4, sm_scale=0.5)
        assert wrapper._window_left == 4
        assert wrapper._logits_soft_cap == 0.0
        assert wrapper._sm_scale == 0.5
        assert wrapper._pos_encoding_mode == "NONE"


def test_decode_planners_of_both_kinds() -> None:
    """15 arguments on CUDA cores, 20 or 21 on tensor cores."""
    case = Case([1, 1], [9, 5])
    wrapper = case.decode(graph_pages=40)
    case.plan_decode(wrapper)
    spaces = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
    indptr = case.table.indptr
    empty = torch.empty(0)
    cuda = (*spaces, indptr, 2, 4, 2, case.page_size, True, -1, 0.0, 32, 32, empty, empty)
    tensor = (*spaces, case.qo_indptr, indptr, case.table.seq_lens, 2, 2, 4, 2, case.page_size, True, 32, 32)
    for args in (cuda, (*tensor, False, -1, -1, False, 0, 1), (*tensor, False, -1, -1, False, 0, 1, 0)):
        assert wrapper._cached_module.plan(*args) == wrapper._plan_info
        case.compare(wrapper.run(case.q, case.cache, return_lse=True))
    with pytest.raises(flashinfer.InvalidArgumentError, match="arguments must be 15, or 19 to 21, got 12"):
        wrapper._cached_module.plan(*cuda[:12])


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_what_vllm_asserts_of_a_plan(kind: str) -> None:
    case = Case([1, 1], [9, 5])
    wrapper = getattr(case, kind)(backend="trtllm-gen")
    plan = getattr(case, f"plan_{kind}")
    plan(wrapper, window_left=7, logits_soft_cap=None, sm_scale=0.25)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (7, 0.0, 0.25)
    assert wrapper._causal is False
    plan(wrapper, logits_soft_cap=30.0, **({} if kind == "decode" else {"causal": True}))
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (-1, 30.0, None)
    assert wrapper._causal is (kind != "decode")
    assert wrapper._backend == wrapper.resolved_backend == "trtllm-gen"


def test_heads_may_be_planned_for_more_than_there_are() -> None:
    case = Case([1, 1], [9, 5])
    for kind, metadata in (("decode", case.pages), ("paged", (case.qo_indptr, *case.pages))):
        wrapper = getattr(case, kind)()
        wrapper.plan(*metadata, 64, 8, case.D, case.page_size, **case.dtypes)
        case.compare(wrapper.run(case.q, case.cache, return_lse=True))


def test_indices_may_be_written_after_the_plan() -> None:
    """MiniCPM's backend fills `kv_indices` behind the plan's back."""
    case = Case([1, 2], [9, 4])
    for kind in ("decode", "paged"):
        case = Case([1, 1], [9, 4])
        wrapper = getattr(case, kind)()
        real = case.table.indices.clone()
        case.table.indices.zero_()
        getattr(case, f"plan_{kind}")(wrapper)
        assert wrapper._paged_kv_indices_buf is case.table.indices
        case.table.indices.copy_(real)
        case.compare(wrapper.run(case.q, case.cache, return_lse=True))


def test_dtypes_by_name_and_by_position() -> None:
    case = Case([1, 1], [9, 4], dtype=torch.bfloat16)
    wrapper = case.decode()
    case.plan_decode(wrapper)
    expected = wrapper.run(case.q, case.cache)
    for positional, keywords in (
        ((), {"q_data_type": "bfloat16"}),
        ((), {"q_data_type": None, "data_type": "bfloat16"}),
        (("NONE", -1, None, "bfloat16", "bfloat16"), {}),
    ):
        wrapper.plan(*case.pages, *case.shape, *positional, **keywords)
        assert_equal_bits(wrapper.run(case.q, case.cache), expected)
    with pytest.raises(flashinfer.InvalidArgumentError, match="arguments after kv_data_type must be given by keyword"):
        wrapper.plan(*case.pages, *case.shape, "NONE", -1, None, "bfloat16", "bfloat16", None)


def test_end_forward_does_nothing() -> None:
    case = Case([1], [9])
    wrapper = case.decode()
    wrapper.begin_forward(*case.pages, *case.shape, **case.dtypes)
    wrapper.end_forward()
    case.compare(wrapper.run_return_lse(case.q, case.cache))
