# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Decode attention: few queries for each request. Signatures follow FlashInfer 0.7.4."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.core.checks import INT32_MAX, fail, integer, refuse_extras
from flashinfer.core.metadata import on_host
from flashinfer.core.op import explained_as
from flashinfer.ops import attention as ops
from flashinfer.planned import dtype_of, refuse_rope, scales_of
from flashinfer.planned_paged import PlannedPagedAttention
from flashinfer.run_options import Options, Results
from flashinfer.single import single_decode_with_kv_cache
from flashinfer.unsupported import unsupported

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]

WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"
# What plans once took by position after page_size, as far as all versions of FlashInfer agree.
_ONCE_POSITIONAL = ("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type")

trtllm_batch_decode_with_kv_cache = unsupported("trtllm_batch_decode_with_kv_cache", "a kernel of NVIDIA's")


class BatchDecodeWithPagedKVCacheWrapper(PlannedPagedAttention):
    """Decode attention of a batch over a paged KV cache, planned once and run for each layer.

    Parameters
    ----------
    float_workspace_buffer
        Memory for partial results, on the device of the queries. Used during `run` only: wrappers may share it.
    kv_layout
        "NHD", "HND" or "SHUFFLED", as in `append_paged_kv_cache`.
    use_cuda_graph
        Whether runs will be captured. A graph then replays what the latest plan says, without being captured again;
        the batch size is that of the buffers, and the queries of a request are those of the first plan.
    use_tensor_cores
        Has no effect: kernels choose for themselves.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        For graphs: int32 buffers that plans copy the page table into. The second bounds the pages of a batch.
    backend
        "auto", or one of FlashInfer's names, "fa2" and others, which all mean that whichever backend takes a call does;
        or "aiter", "triton" or "reference", which mean that one.
    jit_args, jit_kwargs
        For variants compiled by the caller; refused unless None.
    """

    _name = WRAPPER

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        refuse_extras(WRAPPER, {}, {"jit_args": jit_args, "jit_kwargs": jit_kwargs})
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, *buffers)
        self._use_tensor_cores, self._q_len_per_req = use_tensor_cores, 1
        self._is_causal: bool | None = None
        if use_cuda_graph:
            self._fix_batch(
                ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
            )

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was told."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional: Any,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take a batch and check it.

        With metadata on the device this waits for it once; with metadata on the host it waits for nothing.

        Parameters
        ----------
        indptr, last_page_len
            `[batch_size + 1]` and `[batch_size]` int32 or int64: where each request's pages begin in `indices`, and the
            tokens in its last page, as in `paged_attention`. A graph's buffers get a copy; without graphs, tensors on
            the device are used themselves.
        indices
            `[>= indptr[-1]]` page ids. Without graphs a tensor on the device is used itself, and may be written after
            the plan.
        num_qo_heads, num_kv_heads
            May be more than those of a layer.
        head_dim, page_size, sm_scale, window_left, logits_soft_cap
            Of the attention, as in `paged_attention`.
        q_data_type, kv_data_type, data_type
            Of queries and of the cache: dtypes or their names. `kv_data_type` is `data_type`, or else that of queries;
            `data_type` stands for whichever of both is None.
        q_len_per_req
            Queries of each request; more than one see the keys causally, unless `is_causal` is False.
        fixed_split_size, disable_split_kv
            Pages after which a request's sums begin anew (in whole tiles of 128 keys), or that they never do. Either
            makes the result of a request the same, bit by bit, in every batch. Pieces take memory of the workspace:
            `workspace_size` says how much. A graph's plans must all say the same.
        non_blocking, block_tables, seq_lens, rope_scale, rope_theta
            Have no effect.
        pos_encoding_mode, window_right, o_data_type, use_token_head_sf
            Refused unless they are "NONE", 0, q's dtype and False.
        deprecated_positional
            `pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type`.

        Raises
        ------
        InvalidArgumentError
            If the metadata contradict each other, naming the request; if a graph's batch changes or outgrows its
            buffers.
        """
        if len(deprecated_positional) > len(_ONCE_POSITIONAL):
            fail(f"{WRAPPER}.plan", "arguments after kv_data_type", "given by keyword", len(deprecated_positional))
        if deprecated_positional:
            given = (pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type)
            merged = (*deprecated_positional, *given[len(deprecated_positional) :])
            pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type = merged
        refuse_rope(f"{WRAPPER}.plan", pos_encoding_mode)
        refuse_extras(
            f"{WRAPPER}.plan", {"use_token_head_sf": use_token_head_sf}, {}, {"window_right": (window_right, 0)}
        )
        q_data_type, kv_data_type = _dtypes(q_data_type, kv_data_type, data_type)
        self._plan_impl(
            *(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
            q_len_per_req=q_len_per_req,
        )
        self._keep_dtypes(q_data_type, kv_data_type, o_data_type)
        self._is_causal = is_causal
        self._keep_options(
            self._sees_causally, window_left, logits_soft_cap, sm_scale, fixed_split_size, disable_split_kv
        )
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        self._planned = True

    begin_forward = plan

    @property
    def _sees_causally(self) -> bool:
        return self._q_len_per_req > 1 if self._is_causal is None else self._is_causal

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_len_per_req: int,
        indptr_host: torch.Tensor | None = None,
        buffers_are_written: bool = False,
    ) -> None:
        """Take a batch; `indptr_host` is a copy of `indptr` if the caller has one, and then nothing is waited for."""
        integer(WRAPPER, "q_len_per_req", q_len_per_req, 1, INT32_MAX)
        self._check_metadata({"last_page_len": (last_page_len, None)})
        batch = last_page_len.numel()
        self._check_metadata({"indptr": (indptr, batch + 1), "indices": (indices, None)})
        self._check_batch("last_page_len", batch)
        if self._use_cuda_graph and self._planned and q_len_per_req != self._q_len_per_req:
            fail(WRAPPER, "q_len_per_req", f"{self._q_len_per_req}, as in the graph's first plan", q_len_per_req)
        self._keep_shape(batch, num_qo_heads, num_kv_heads, (head_dim, head_dim), page_size)
        if indptr_host is None:
            measured = self._host_batch(q_len_per_req, indptr, last_page_len, page_size, "indptr")
        else:
            self._check_metadata({"global_override_indptr_cpu": (indptr_host, batch + 1)})
            (kv,) = on_host(indptr_host)
            measured = self._measure(q_len_per_req, kv, None, page_size, "global_override_indptr_cpu")
        if not buffers_are_written:
            self._keep_pages(measured, None, indptr, indices, last_page_len, "indices")
        self._fixed_q_len = q_len_per_req
        if (
            self._qo_indptr_buf is None
            or q_len_per_req != self._q_len_per_req
            or self._qo_indptr_buf.numel() != batch + 1
        ):
            self._qo_indptr_buf = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * q_len_per_req
        self._q_len_per_req = q_len_per_req

    @explained_as(ops.PAGED)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch; waits for nothing and may be captured.

        Parameters
        ----------
        q
            `[batch_size * q_len_per_req, heads, head_dim]` of the planned dtype.
        paged_kv_cache
            A tuple of K and V or one tensor, as in `append_paged_kv_cache`; any strides outside the last dimension.
        q_scale, k_scale, v_scale
            What queries, keys and values are to be multiplied with; numbers, or tensors of one on the host.
        out, lse, return_lse
            As in `paged_attention`. A given `lse` is written also without `return_lse`.
        sinks
            float32 `[heads]`: a score for each head that takes part in the softmax and has the value 0.
        window_left, q_len_per_req
            What was planned, or None.
        enable_pdl
            Has no effect: a launch hint of NVIDIA's.
        args, skip_softmax_threshold_scale_factor, kv_cache_sf
            For other kernels of FlashInfer; refused if given.

        Returns
        -------
        torch.Tensor or tuple
            `out` like q, or `(out, lse)` with lse float32 `[tokens, heads]` in base 2. A query that sees no key gives
            output 0 and lse -inf.

        Raises
        ------
        NotPlannedError
            Before the first plan.
        InvalidArgumentError
            If the tensors are not what was planned.
        """
        refuse_extras(
            f"{WRAPPER}.run",
            {"args": bool(args)},
            {
                "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
                "kv_cache_sf": kv_cache_sf,
            },
        )
        self._require_plan("run()")
        for name, value, planned in (
            ("window_left", window_left, self._window_left),
            ("q_len_per_req", q_len_per_req, self._q_len_per_req),
        ):
            if value is not None and value != planned:
                fail(f"{WRAPPER}.run", name, f"{planned} as planned", value)
        scales = scales_of(WRAPPER, q_scale, k_scale, v_scale)
        return self._run_pages(q, paged_kv_cache, self._options, scales, sinks, Results(WRAPPER, out, lse, return_lse))

    def run_return_lse(self, *args: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`run` with `return_lse`. Compilers do not see through a `functools.partialmethod`."""
        return self.run(*args, **{"return_lse": True, **options})

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        refuse_rope(f"{WRAPPER}.forward", pos_encoding_mode)
        options = Options(self._causal, window_left, logits_soft_cap or 0.0, sm_scale)
        scales = scales_of(WRAPPER, q_scale, k_scale, v_scale)
        return self._run_pages(q, paged_kv_cache, options, scales, None, Results(WRAPPER, None, None, return_lse))

    def forward_return_lse(self, *args: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`forward` with `return_lse`. Compilers do not see through a `functools.partialmethod`."""
        return self.forward(*args, **{"return_lse": True, **options})


def _dtypes(
    q: torch.dtype | str | None, kv: torch.dtype | str | None, data_type: torch.dtype | str | None
) -> tuple[torch.dtype, torch.dtype]:
    q_dtype = dtype_of(WRAPPER, "q_data_type", q or data_type or "float16")
    return q_dtype, dtype_of(WRAPPER, "kv_data_type", kv or data_type or q_dtype)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True)`, its buffers by position.

    Parameters
    ----------
    workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout, use_tensor_cores
        As there.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = indptr_buffer, indices_buffer, last_page_len_buffer
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
    data_type: torch.dtype | str | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """A decode wrapper's plan for engines that have already written a graph's buffers: it copies nothing into them.

    Engines put `functools.partial(fast_decode_plan, wrapper)` in the place of the wrapper's own `plan` or
    `begin_forward`, after one plan of its own.

    Parameters
    ----------
    self
        The wrapper. Without graphs it uses the tensors given.
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, \
logits_soft_cap, q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta, non_blocking, \
fixed_split_size, disable_split_kv, q_len_per_req
        As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
    global_override_indptr_cpu
        `indptr` in host memory, if the caller has it there: nothing is waited for then.

    Raises
    ------
    InvalidArgumentError
        As `plan`.
    """
    refuse_rope("fast_decode_plan", pos_encoding_mode)
    self._plan_impl(
        *(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size),
        q_len_per_req=q_len_per_req,
        indptr_host=global_override_indptr_cpu,
        buffers_are_written=self.is_cuda_graph_enabled,
    )
    self._keep_dtypes(*_dtypes(q_data_type, kv_data_type, data_type))
    self._keep_options(self._sees_causally, window_left, logits_soft_cap, sm_scale, fixed_split_size, disable_split_kv)
    self._pos_encoding_mode, self._rope_scale, self._rope_theta = pos_encoding_mode, rope_scale, rope_theta
    self._planned = True
