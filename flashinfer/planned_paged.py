# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the planned attention wrappers over a paged KV cache have in common."""

from __future__ import annotations

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, integer
from flashinfer.core.metadata import on_host
from flashinfer.host_batch import HostBatch
from flashinfer.ops import attention as ops
from flashinfer.page import split_cache
from flashinfer.planned import PlannedAttention
from flashinfer.run_options import Options, Results


class PlannedPagedAttention(PlannedAttention):
    """A plan over pages, for queries of any lengths."""

    _name = "PlannedPagedAttention"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        last_page_len: torch.Tensor | None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len

    def _fix_batch(self, names: tuple[str, str, str], qo_indptr: tuple[str, torch.Tensor | None] | None = None) -> None:
        """Check a graph's buffers, whose names are those of kv_indptr, kv_indices and last_page_len."""
        last = self._paged_kv_last_page_len_buf
        batch = last.numel() if isinstance(last, torch.Tensor) else 0
        buffers = {
            names[2]: (last, None),
            names[0]: (self._paged_kv_indptr_buf, batch + 1),
            names[1]: (self._paged_kv_indices_buf, None),
        }
        if qo_indptr is not None:
            buffers[qo_indptr[0]] = (qo_indptr[1], batch + 1)
        self._check_buffers(batch, buffers)
        self._fixed_batch_size = batch

    def _keep_shape(self, batch: int, heads: int, kv_heads: int, dims: tuple[int, int], page_size: int) -> None:
        for name, value in (("num_qo_heads", heads), ("num_kv_heads", kv_heads), ("page_size", page_size)):
            integer(self._name, name, value, 1, INT32_MAX)
        self._batch_size, self._num_qo_heads, self._num_kv_heads = batch, heads, kv_heads
        self._head_dim_qk, self._head_dim_vo = dims

    def _host_batch(
        self,
        qo: torch.Tensor | int,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        kv_name: str,
    ) -> HostBatch:
        """A batch whose queries begin as `qo` says, or have that length each; waits once if any is on a device."""
        given = [kv_indptr, last_page_len] if isinstance(qo, int) else [qo, kv_indptr, last_page_len]
        away = any(t.device != self.device for t in given)
        *queries, kv, last = on_host(*given)
        return self._measure(queries[0] if queries else qo, kv, last, page_size, kv_name, away)

    def _keep_pages(
        self,
        batch: HostBatch,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        indices_name: str,
    ) -> None:
        """Fill a graph's buffers; without a graph, use the caller's tensors where kernels can."""
        total_pages = batch.total_pages
        if kv_indices.numel() < total_pages:
            fail(self._name, indices_name, f"of at least the {total_pages} entries named", kv_indices.numel())
        qo = None if qo_indptr is None else self._placed(qo_indptr, batch, 0)
        kv, last = self._placed(kv_indptr, batch, 1), self._placed(last_page_len, batch, 2)
        if not self._use_cuda_graph:
            self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf = kv, last
            self._paged_kv_indices_buf = self._on_device(kv_indices)
            self._qo_indptr_buf = self._qo_indptr_buf if qo is None else qo
            return
        into = self._paged_kv_indices_buf
        if into is not None and total_pages > into.numel():
            fail(self._name, indices_name, f"of at most {into.numel()} pages, as the graph's buffer", total_pages)
        indices = self._on_device(kv_indices[:total_pages])
        for buffer, t in (
            (self._paged_kv_indptr_buf, kv),
            (None if into is None else into[:total_pages], indices),
            (self._paged_kv_last_page_len_buf, last),
            (self._qo_indptr_buf, qo),
        ):
            # An engine may plan with what it has written into the buffers itself.
            if buffer is not None and t is not None and buffer.data_ptr() != t.data_ptr():
                buffer.copy_(t, non_blocking=True)

    def _run_pages(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        options: Options,
        scales: tuple[float, float, float],
        sinks: torch.Tensor | None,
        results: Results,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self._require_plan("run()")
        k_cache, v_cache = split_cache(self._name, paged_kv_cache, self._kv_layout)
        self._check_run({"q": q, "k_cache": k_cache, "v_cache": v_cache}, ("k_cache", "v_cache"))
        if k_cache.dim() == (5 if self._kv_layout == "SHUFFLED" else 4):
            _, page_size, _ = ops.cache_geometry(k_cache, self._kv_layout)
            if page_size != self._page_size:
                fail(
                    *(self._name, "paged_kv_cache", f"of the planned page_size {self._page_size}"),
                    f"{page_size} in {describe(k_cache)}",
                )
        pages = (
            *(self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf),
            *(self._paged_kv_last_page_len_buf, self._kv_layout),
        )
        tensors = (k_cache, v_cache, *pages)
        return self._attend(ops.paged_attention, q, tensors, v_cache.size(3), options, scales, sinks, results)
