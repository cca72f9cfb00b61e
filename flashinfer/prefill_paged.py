# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill over a paged cache, public as `flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper`."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.core.checks import fail, refuse_extras
from flashinfer.core.op import explained_as
from flashinfer.ops import attention as ops
from flashinfer.planned import refuse_items, refuse_rope, scales_of
from flashinfer.planned_paged import PlannedPagedAttention
from flashinfer.run_options import Options, Results

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


class BatchPrefillWithPagedKVCacheWrapper(PlannedPagedAttention):
    """Attention of a batch of queries over a paged KV cache, planned once and run for each layer.

    Parameters
    ----------
    float_workspace_buffer
        Memory for partial results, on the device of the queries. Used during `run` only: wrappers may share it. Of
        SHUFFLED pages that many queries see, keys and values are gathered behind the partial results and attended to
        there, which is faster, if the workspace has room for those of the batch (of a graph: of all pages that its
        buffer can name): `2 * num_kv_heads * head_dim` elements of the queries' dtype for a token. If not, or with a
        fixed split size, pages are read where they are. `gathers_pages` and the debug log say which.
    kv_layout
        "NHD", "HND" or "SHUFFLED", as in `append_paged_kv_cache`.
    use_cuda_graph
        Whether runs will be captured. A graph then replays what the latest plan says, without being captured again;
        the batch size is that of the buffers.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        For graphs: int32 buffers that plans copy the metadata into. The third bounds the pages of a batch.
    custom_mask_buf, mask_indptr_buf
        For graphs with custom masks: uint8 and int32 buffers for the masks' bits and for where each request's begin.
        A wrapper that has them uses them in every run.
    backend
        "auto", or one of FlashInfer's names, "fa2" and others, which all mean that whichever backend takes a call does;
        or "aiter", "triton" or "reference", which mean that one.
    max_total_num_rows
        For graphs: the most queries of a batch; those of the first plan if None.
    jit_args, jit_kwargs, variant_owns_mask
        For variants compiled by the caller; refused unless None and False.
    """

    _name = WRAPPER

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        refuse_extras(
            WRAPPER, {"variant_owns_mask": variant_owns_mask}, {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        )
        pages = paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, *pages)
        self._qo_indptr_buf, self._max_total_num_rows = qo_indptr_buf, max_total_num_rows
        if use_cuda_graph:
            self._fix_batch(
                ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"),
                ("qo_indptr_buf", qo_indptr_buf),
            )
            self._take_mask_buffers(custom_mask_buf, mask_indptr_buf)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take a batch and check it.

        With metadata on the device this waits for it once; with metadata on the host it waits for nothing.

        Parameters
        ----------
        qo_indptr
            `[batch_size + 1]` int32 or int64, where each request's queries begin.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            Page table as in `paged_attention`. A graph's buffers get a copy; without graphs, tensors on the device are
            used themselves, so that the indices may be written after the plan.
        num_qo_heads, num_kv_heads
            May be more than those of a layer.
        head_dim_qk, head_dim_vo, page_size, causal, sm_scale, window_left, logits_soft_cap
            Of the attention, as in `paged_attention`.
        custom_mask
            bool, the requests' masks `[q_len, kv_len]` flattened one after the other, True where a query sees a key;
            takes the place of `causal`, while `window_left` still holds.
        packed_custom_mask
            The same as uint8, 8 keys to a byte from the lowest bit on, each request from a byte of its own on; takes
            the place of `custom_mask`.
        q_data_type, kv_data_type
            Of queries and of the cache, as dtypes or their names; of the cache as of queries if None.
        fixed_split_size, disable_split_kv
            As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        non_blocking, seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv, uniform_q_len, \
rope_scale, rope_theta
            Have no effect.
        pos_encoding_mode, use_fp16_qk_reduction, o_data_type, prefix_len_ptr, token_pos_in_items_ptr, \
token_pos_in_items_len, max_item_len_ptr, use_token_head_sf
            Refused unless they are "NONE", False, q's dtype, None and 0.

        Raises
        ------
        InvalidArgumentError
            If the metadata contradict each other, naming the request; if a graph's batch changes or outgrows its
            buffers.
        """
        refuse_rope(f"{WRAPPER}.plan", pos_encoding_mode, use_fp16_qk_reduction)
        refuse_items(
            f"{WRAPPER}.plan", prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        refuse_extras(f"{WRAPPER}.plan", {"use_token_head_sf": use_token_head_sf}, {})
        self._check_metadata({"paged_kv_last_page_len": (paged_kv_last_page_len, None)})
        batch = paged_kv_last_page_len.numel()
        self._check_metadata(
            {
                "qo_indptr": (qo_indptr, batch + 1),
                "paged_kv_indptr": (paged_kv_indptr, batch + 1),
                "paged_kv_indices": (paged_kv_indices, None),
            }
        )
        self._check_batch("paged_kv_last_page_len", batch)
        self._keep_shape(batch, num_qo_heads, num_kv_heads, (head_dim_qk, head_dim_vo or head_dim_qk), page_size)
        self._keep_dtypes(q_data_type, kv_data_type, o_data_type)
        pages = paged_kv_indptr, paged_kv_last_page_len
        measured = self._host_batch(qo_indptr, *pages, page_size, "paged_kv_indptr")
        self._bound_rows(measured.total_q)
        where = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._keep_pages(measured, qo_indptr, *where, "paged_kv_indices")
        self._keep_mask(measured, custom_mask, packed_custom_mask)
        self._keep_options(causal, window_left, logits_soft_cap, sm_scale, fixed_split_size, disable_split_kv)
        self._plan_gather(measured)
        self._rope_scale, self._rope_theta, self._planned = rope_scale, rope_theta, True

    begin_forward = plan

    @explained_as(ops.PAGED)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch; waits for nothing and may be captured.

        Parameters
        ----------
        q
            `[tokens, heads, head_dim_qk]` of the planned dtype, the requests one after the other. With graphs, rows may
            follow that no request owns; what their output is is not said.
        paged_kv_cache
            A tuple of K and V or one tensor, as in `append_paged_kv_cache`; any strides outside the last dimension.
        q_scale, k_scale, v_scale
            What queries, keys and values are to be multiplied with; numbers, or tensors of one on the host.
        out, lse, return_lse
            As in `paged_attention`. A given `lse` is written also without `return_lse`.
        lse_base
            "log2", or "ln" for a natural logarithm.
        lse_layout
            "NH" for `[tokens, heads]`, "HN" for `[heads, tokens]`.
        window_left
            What was planned, or None.
        sinks
            float32 `[heads]`: a score for each head that takes part in the softmax and has the value 0.
        enable_pdl
            Has no effect: a launch hint of NVIDIA's.
        args, kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress
            For other kernels of FlashInfer; refused if given.

        Returns
        -------
        torch.Tensor or tuple
            `out [tokens, heads, head_dim_vo]`, or `(out, lse)` with lse float32. A query that sees no key gives output
            0 and lse -inf.

        Raises
        ------
        NotPlannedError
            Before the first plan.
        InvalidArgumentError
            If the tensors are not what was planned.
        """
        refuse_extras(
            f"{self._name}.run",
            {
                "use_fp16_softmax": bool(use_fp16_softmax),
                "uses_spcompress": bool(uses_spcompress),
            },
            {
                "kv_cache_sf": kv_cache_sf,
                "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
            },
        )
        self._require_plan("run()")
        if window_left is not None and window_left != self._window_left:
            fail(f"{self._name}.run", "window_left", f"{self._window_left} as planned", window_left)
        scales = scales_of(self._name, q_scale, k_scale, v_scale)
        results = Results(self._name, out, lse, return_lse, lse_base, lse_layout)
        sinks, options = self._by_position(args, sinks)
        return self._run_pages(q, paged_kv_cache, options, scales, sinks, results)

    def _by_position(self, args: tuple[Any, ...], sinks: torch.Tensor | None) -> tuple[torch.Tensor | None, Options]:
        """What `run` was given by position besides q and the cache: nothing, here."""
        refuse_extras(f"{self._name}.run", {"args": bool(args)}, {})
        return sinks, self._options

    def run_return_lse(self, *args: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`run` with `return_lse`. Compilers do not see through a `functools.partialmethod`."""
        return self.run(*args, **{"return_lse": True, **options})

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`run` with options that count in place of the plan's, for this call, their defaults included."""
        refuse_rope(f"{WRAPPER}.forward", pos_encoding_mode, use_fp16_qk_reduction)
        options = Options(causal, window_left, logits_soft_cap or 0.0, sm_scale)
        scales = scales_of(WRAPPER, None, k_scale, v_scale)
        return self._run_pages(q, paged_kv_cache, options, scales, None, Results(WRAPPER, None, None, return_lse))

    def forward_return_lse(self, *args: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`forward` with `return_lse`. Compilers do not see through a `functools.partialmethod`."""
        return self.forward(*args, **{"return_lse": True, **options})
