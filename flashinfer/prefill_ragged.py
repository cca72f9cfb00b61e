# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill over ragged K and V, public as `flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper`."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.core.checks import fail, refuse_extras
from flashinfer.core.metadata import on_host
from flashinfer.core.op import explained_as
from flashinfer.host_batch import HostBatch
from flashinfer.ops import attention as ops
from flashinfer.planned import PlannedAttention, refuse_items, refuse_rope, scales_of
from flashinfer.run_options import Options, Results

WRAPPER = "BatchPrefillWithRaggedKVCacheWrapper"


class BatchPrefillWithRaggedKVCacheWrapper(PlannedAttention):
    """Attention of a batch of queries over keys and values that lie one request after the other.

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph, custom_mask_buf, mask_indptr_buf, backend
        As in `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout
        "NHD", or "HND" for keys and values with the axis of heads first.
    qo_indptr_buf, kv_indptr_buf
        For graphs: int32 buffers that plans copy the metadata into.
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
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse_extras(
            WRAPPER, {"variant_owns_mask": variant_owns_mask}, {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        )
        if kv_layout not in ("NHD", "HND"):
            fail(WRAPPER, "kv_layout", "'NHD' or 'HND'", repr(kv_layout))
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._kv_rows = 0
        if use_cuda_graph:
            batch = qo_indptr_buf.numel() - 1 if isinstance(qo_indptr_buf, torch.Tensor) else 0
            self._check_buffers(
                batch, {"qo_indptr_buf": (qo_indptr_buf, None), "kv_indptr_buf": (kv_indptr_buf, batch + 1)}
            )
            self._fixed_batch_size = batch
            self._take_mask_buffers(custom_mask_buf, mask_indptr_buf)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take a batch and check it.

        With metadata on the device this waits for it once; with metadata on the host, or copies of it there, it waits
        for nothing.

        Parameters
        ----------
        qo_indptr, kv_indptr
            `[batch_size + 1]` int32 or int64, where each request's queries, and its keys and values, begin. A graph's
            buffers get a copy; without graphs, tensors on the device are used themselves.
        qo_indptr_cpu, kv_indptr_cpu
            The same in host memory, if the caller has them there.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, custom_mask, packed_custom_mask, causal, window_left, \
logits_soft_cap, sm_scale, q_data_type, kv_data_type, fixed_split_size, disable_split_kv
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        non_blocking, seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv, uniform_q_len, rope_scale, \
rope_theta
            Have no effect.
        pos_encoding_mode, use_fp16_qk_reduction, o_data_type, prefix_len_ptr, token_pos_in_items_ptr, \
token_pos_in_items_len, max_item_len_ptr, v_indptr, o_indptr, use_token_head_sf
            Refused unless they are "NONE", False, q's dtype, None and 0.

        Raises
        ------
        InvalidArgumentError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        refuse_rope(f"{WRAPPER}.plan", pos_encoding_mode, use_fp16_qk_reduction)
        refuse_items(
            f"{WRAPPER}.plan", prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        refuse_extras(
            *(f"{WRAPPER}.plan", {"use_token_head_sf": use_token_head_sf}),
            {"v_indptr": v_indptr, "o_indptr": o_indptr},
        )
        self._check_metadata({"qo_indptr": (qo_indptr, None)})
        size = qo_indptr.numel()
        self._check_metadata({"kv_indptr": (kv_indptr, size)})
        self._check_batch("qo_indptr", size - 1)
        self._drop_plan()
        self._batch_size, self._num_qo_heads, self._num_kv_heads = size - 1, num_qo_heads, num_kv_heads
        self._head_dim_qk, self._head_dim_vo = head_dim_qk, head_dim_vo or head_dim_qk
        self._keep_dtypes(q_data_type, kv_data_type, o_data_type)
        given = {"qo_indptr_cpu": qo_indptr_cpu, "kv_indptr_cpu": kv_indptr_cpu}
        self._check_metadata({name: (t, size) for name, t in given.items() if t is not None})
        qo, kv = on_host(
            qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu, kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu
        )
        away = qo_indptr.device != self.device or kv_indptr.device != self.device
        measured = self._measure(qo, kv, None, 1, away=away)
        self._bound_rows(measured.total_q)
        self._keep_indptr(measured, qo_indptr, kv_indptr)
        self._keep_mask(measured, custom_mask, packed_custom_mask)
        self._keep_options(causal, window_left, logits_soft_cap, sm_scale, fixed_split_size, disable_split_kv)
        self._rope_scale, self._rope_theta, self._planned = rope_scale, rope_theta, True

    begin_forward = plan

    def _keep_indptr(self, batch: HostBatch, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        qo, kv = self._placed(qo_indptr, batch, 0), self._placed(kv_indptr, batch, 1)
        if not self._use_cuda_graph:
            self._qo_indptr_buf, self._kv_indptr_buf = qo, kv
            return
        for buffer, t in ((self._qo_indptr_buf, qo), (self._kv_indptr_buf, kv)):
            if buffer is not None and buffer.data_ptr() != t.data_ptr():
                buffer.copy_(t, non_blocking=True)

    @explained_as(ops.RAGGED)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch; waits for nothing and may be captured.

        Parameters
        ----------
        q
            `[tokens, heads, head_dim_qk]` of the planned dtype.
        k, v
            `[kv_tokens, num_kv_heads, head_dim_qk]` and `[kv_tokens, num_kv_heads, head_dim_vo]`, or with the first two
            axes swapped for HND; any strides outside the last dimension.
        q_scale, k_scale, v_scale, out, lse, return_lse, lse_base, lse_layout, sinks
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        enable_pdl
            Has no effect: a launch hint of NVIDIA's.
        args, o_scale, kv_cache_sf
            For other kernels of FlashInfer; refused if given.

        Returns
        -------
        torch.Tensor or tuple
            As `BatchPrefillWithPagedKVCacheWrapper.run`.

        Raises
        ------
        NotPlannedError, InvalidArgumentError
            As `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        refuse_extras(f"{WRAPPER}.run", {"args": bool(args)}, {"o_scale": o_scale, "kv_cache_sf": kv_cache_sf})
        scales = scales_of(WRAPPER, q_scale, k_scale, v_scale)
        results = Results(WRAPPER, out, lse, return_lse, lse_base, lse_layout)
        return self._run_ragged(q, k, v, self._options, scales, sinks, results)

    def run_return_lse(self, *args: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`run` with `return_lse`. Compilers do not see through a `functools.partialmethod`."""
        return self.run(*args, **{"return_lse": True, **options})

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`run` with options that count in place of the plan's, for this call, their defaults included."""
        refuse_rope(f"{WRAPPER}.forward", pos_encoding_mode, use_fp16_qk_reduction)
        options = Options(causal, window_left, logits_soft_cap or 0.0, sm_scale)
        scales = scales_of(WRAPPER, None, k_scale, v_scale)
        return self._run_ragged(q, k, v, options, scales, None, Results(WRAPPER, None, None, return_lse))

    def forward_return_lse(self, *args: Any, **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`forward` with `return_lse`. Compilers do not see through a `functools.partialmethod`."""
        return self.forward(*args, **{"return_lse": True, **options})

    def _run_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Options,
        scales: tuple[float, float, float],
        sinks: torch.Tensor | None,
        results: Results,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self._require_plan("run()")
        self._check_run({"q": q, "k": k, "v": v}, ("k", "v"))
        if isinstance(v, torch.Tensor) and v.dim() == 3 and v.size(2) != self._head_dim_vo:
            fail(WRAPPER, "v", f"of the planned head_dim_vo {self._head_dim_vo}", v.size(2))
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        tensors = k, v, self._qo_indptr_buf, self._kv_indptr_buf
        return self._attend(ops.ragged_attention, q, tensors, self._head_dim_vo, options, scales, sinks, results)
