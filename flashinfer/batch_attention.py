# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of mixed batches, public as `flashinfer.attention.BatchAttention`. Signatures follow FlashInfer 0.7.4."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.core.checks import fail, refuse_extras
from flashinfer.core.metadata import on_host
from flashinfer.core.op import explained_as
from flashinfer.ops import attention as ops
from flashinfer.planned import refuse_rope, scales_of
from flashinfer.planned_paged import PlannedPagedAttention
from flashinfer.prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.run_options import Options, Results

WRAPPER = "BatchAttention"
SINK_WRAPPER = "BatchAttentionWithAttentionSinkWrapper"


class BatchAttention(PlannedPagedAttention):
    """Attention of a batch of decodes, extends and prefills over a paged KV cache, with a workspace of its own.

    Parameters
    ----------
    kv_layout
        "NHD", "HND" or "SHUFFLED", as in `append_paged_kv_cache`.
    device
        Where queries and cache are; by default the current GPU, or the CPU where torch has no GPU.

    Raises
    ------
    InvalidArgumentError
        If `device` is not of this machine.
    """

    _name = WRAPPER

    def __init__(self, kv_layout: str = "NHD", device: torch.device | str | None = None) -> None:
        found = f"torch finds {torch.cuda.device_count()} GPUs"
        try:
            place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        except (RuntimeError, TypeError):
            fail(WRAPPER, "device", "a device of torch's", repr(device), found)
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            fail(WRAPPER, "device", "the CPU or a GPU of this machine", repr(str(place)), found)
        workspace = torch.empty(0, dtype=torch.uint8, device=place)
        super().__init__(workspace, kv_layout, False, "auto", None, None, None)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = torch.bfloat16,
        kv_data_type: torch.dtype | str = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Take a batch and check it; waits once for metadata on the device.

        Parameters
        ----------
        qo_indptr, kv_indptr, kv_indices
            As `qo_indptr`, `paged_kv_indptr` and `paged_kv_indices` in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        kv_len_arr
            `[batch_size]` int32 or int64, tokens of each request, its new ones included.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal, sm_scale, logits_soft_cap, \
q_data_type, kv_data_type
            As there.
        use_profiler
            Refused unless False.

        Raises
        ------
        InvalidArgumentError
            If a request contradicts its pages; names the request.
        """
        refuse_extras(f"{WRAPPER}.plan", {"use_profiler": use_profiler}, {})
        self._check_metadata({"kv_len_arr": (kv_len_arr, None)})
        batch = kv_len_arr.numel()
        self._check_metadata(
            {
                "qo_indptr": (qo_indptr, batch + 1),
                "kv_indptr": (kv_indptr, batch + 1),
                "kv_indices": (kv_indices, None),
            }
        )
        self._keep_shape(batch, num_qo_heads, num_kv_heads, (head_dim_qk, head_dim_vo), page_size)
        self._keep_dtypes(q_data_type, kv_data_type)
        qo, kv, host_lens = on_host(qo_indptr, kv_indptr, kv_len_arr)
        lens = host_lens.tolist()
        last = torch.tensor([(n - 1) % page_size + 1 if n > 0 else 0 for n in lens], dtype=torch.int32)
        # Nobody has the last page lengths on the device.
        measured = self._measure(qo, kv, last, page_size, away=self.device.type != "cpu")
        for b, (length, pages) in enumerate(zip(lens, measured.pages(), strict=True)):
            if length < 0 or pages != -(-length // page_size):
                fail(WRAPPER, f"kv_len_arr[{b}]", f"the tokens of its pages, {pages} of {page_size}", length)
        self._keep_pages(measured, qo_indptr, kv_indptr, kv_indices, last, "kv_indices")
        self._keep_options(causal, -1, logits_soft_cap, sm_scale, None, False)
        self._planned = True
        if self._float_workspace_buffer.numel() < self.workspace_size():
            self._float_workspace_buffer = torch.empty(self.workspace_size(), dtype=torch.uint8, device=self.device)

    @explained_as(ops.PAGED)
    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch; waits for nothing.

        Parameters
        ----------
        q, kv_cache, out, lse, k_scale, v_scale
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        logits_soft_cap
            What was planned, or 0.0, which means the same.
        profiler_buffer, kv_cache_sf
            Refused unless None.

        Returns
        -------
        tuple
            `(out, lse)`, as of `BatchPrefillWithPagedKVCacheWrapper.run`.

        Raises
        ------
        NotPlannedError
            Before the first plan.
        InvalidArgumentError
            If the tensors are not what was planned.
        """
        refuse_extras(f"{WRAPPER}.run", {}, {"profiler_buffer": profiler_buffer, "kv_cache_sf": kv_cache_sf})
        self._require_plan("run()")
        if logits_soft_cap and logits_soft_cap != self._logits_soft_cap:
            fail(f"{WRAPPER}.run", "logits_soft_cap", f"{self._logits_soft_cap} as planned", logits_soft_cap)
        scales = scales_of(WRAPPER, None, k_scale, v_scale)
        found = self._run_pages(q, kv_cache, self._options, scales, None, Results(WRAPPER, out, lse, True))
        return found[0], found[1]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose `run` takes sinks and the scale of scores by position.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, \
paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend
        As there.
    pos_encoding_mode, use_fp16_qk_reduction
        Refused unless "NONE" and False.
    q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left
        Have no effect: a plan says them.
    """

    _name = SINK_WRAPPER

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype | str = torch.bfloat16,
        kv_data_type: torch.dtype | str = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        refuse_rope(SINK_WRAPPER, pos_encoding_mode, use_fp16_qk_reduction)
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        super().__init__(
            *(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, custom_mask_buf, mask_indptr_buf, backend)
        )

    def _by_position(self, args: tuple[Any, ...], sinks: torch.Tensor | None) -> tuple[torch.Tensor | None, Options]:
        """`run(q, paged_kv_cache, sinks, sm_scale)`."""
        if len(args) > 2 or (args and sinks is not None):
            fail(f"{SINK_WRAPPER}.run", "arguments by position", "q, paged_kv_cache, sinks, sm_scale", len(args) + 2)
        options = self._options
        if len(args) == 2:
            options = options._replace(sm_scale=args[1])
        return (args[0] if args else sinks), options
