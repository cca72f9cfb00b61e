# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the planned attention wrappers over a paged KV cache have in common."""

from __future__ import annotations

import logging

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, integer
from flashinfer.core.errors import NotPlannedError
from flashinfer.core.metadata import on_host
from flashinfer.core.op import STEP
from flashinfer.dense_kv import ALIGNMENT, Gathered, dense_kv, dense_table, worth_gathering, worth_in_a_graph
from flashinfer.host_batch import HostBatch
from flashinfer.ops import attention as ops
from flashinfer.ops import gather as gather_ops
from flashinfer.ops.page import ELEMENT_SIZES
from flashinfer.page import split_cache
from flashinfer.planned import AUTO_NAMES, PlannedAttention, dtype_of
from flashinfer.run_options import Options, Results

logger = logging.getLogger("flashinfer")


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
        self._gathered: Gathered | None = None

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
        self._drop_plan()
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

    @property
    def gathers_pages(self) -> bool:
        """Whether runs of the present plan gather keys and values into the workspace before they attend to them."""
        return self._gathered is not None

    def workspace_size(self) -> int:
        """Bytes of the float workspace that the present plan uses.

        Raises
        ------
        NotPlannedError
            If there is no plan.
        """
        return super().workspace_size() if self._gathered is None else self._gathered.end

    def _measure(
        self,
        qo: torch.Tensor | int,
        kv: torch.Tensor,
        last: torch.Tensor | None,
        page_size: int,
        kv_name: str = "kv_indptr",
        away: bool = False,
    ) -> HostBatch:
        # Pages are read where they are unless the rest of the plan says otherwise.
        self._gathered = None
        return super()._measure(qo, kv, last, page_size, kv_name, away)

    def _page_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """kv_indptr, kv_indices and last_page_len of a plan."""
        table = self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf
        if table[0] is None or table[1] is None or table[2] is None:
            raise NotPlannedError(f"{self._name}: plan() must be called first")
        return table[0], table[1], table[2]

    def _plan_gather(self, batch: HostBatch) -> None:
        """Decide whether runs gather keys and values first.

        In a graph that must not depend on lengths. Of a split size results may not depend on the batch, and other
        backends than these read any page alike.
        """
        dtype = dtype_of(self._name, "q_data_type", self._cached_q_data_type)
        if (
            self._kv_layout != "SHUFFLED"
            or self._backend not in (*AUTO_NAMES, "triton")
            or self._split_size
            or self._head_dim_qk != self._head_dim_vo
            or dtype.itemsize not in ELEMENT_SIZES
        ):
            return
        group = self._num_qo_heads // self._num_kv_heads
        indptr, indices, last = self._page_table()
        if self._use_cuda_graph:
            rows = indices.numel() * self._page_size
            worth = worth_in_a_graph(self._batch_size, self._max_total_num_rows or 0, group)
        else:
            rows = sum(batch.kv_lens())
            causal = self._causal and self._custom_mask_buf is None
            worth = worth_gathering(batch, group, causal, self._window_left)
        if not worth:
            return
        row_bytes = 2 * self._num_kv_heads * self._head_dim_qk * dtype.itemsize
        table = None if self._use_cuda_graph else dense_table(indptr, last, self._page_size)
        begin = -(-self._workspace_need() // ALIGNMENT) * ALIGNMENT
        gathered = Gathered(begin, rows, row_bytes, table)
        have = self._float_workspace_buffer.numel() * self._float_workspace_buffer.element_size()
        if rows > INT32_MAX or have < gathered.end:
            told = "%s: shuffled pages are read where they are: to gather them takes a workspace of %d bytes, got %d"
            logger.debug(told, self._name, gathered.end, have)
            return
        logger.debug("%s: shuffled pages are gathered into the workspace, up to %d tokens", self._name, rows)
        self._gathered = gathered

    def _gather(
        self, gathered: Gathered, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Dense keys and values behind the partial results in the workspace, and where each request's begin."""
        indptr, indices, last = self._page_table()
        table = gathered.table or dense_table(indptr, last, self._page_size)
        workspace = self._float_workspace_buffer.view(-1).view(torch.uint8)
        rows = gathered.rows
        if self._use_cuda_graph and q.device.type == "cpu":
            # On the host nothing is captured, and attention is given the rows that are there.
            rows = int(table.kv_indptr[-1])
        shape = rows, k_cache.size(1), self._head_dim_qk
        need = gathered.begin + 2 * rows * shape[1] * shape[2] * q.dtype.itemsize
        if workspace.numel() < need:
            fail(self._name, "float_workspace_buffer", f"of at least {need} bytes for this plan", workspace.numel())
        k, v = dense_kv(workspace[gathered.begin :], shape, q.dtype)
        gather_ops.gather_paged_kv(
            *(k_cache, v_cache, indices, indptr, table.starts, table.kv_indptr, self._kv_layout, 1.0, 1.0, k, v),
            backend=f"{STEP}{self._backend_of_run}",
        )
        return k, v, table.kv_indptr

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
        # Of other ranks the op says what it wants.
        if k_cache.dim() == (5 if self._kv_layout == "SHUFFLED" else 4):
            _, page_size, _ = ops.cache_geometry(k_cache, self._kv_layout)
            if page_size != self._page_size:
                fail(
                    *(self._name, "paged_kv_cache", f"of the planned page_size {self._page_size}"),
                    f"{page_size} in {describe(k_cache)}",
                )
            if self._gathered is not None:
                k, v, kv_indptr = self._gather(self._gathered, q, k_cache, v_cache)
                dense = k, v, self._qo_indptr_buf, kv_indptr
                return self._attend(ops.ragged_attention, q, dense, self._head_dim_vo, options, scales, sinks, results)
        pages = (
            *(self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf),
            *(self._paged_kv_last_page_len_buf, self._kv_layout),
        )
        tensors = (k_cache, v_cache, *pages)
        return self._attend(ops.paged_attention, q, tensors, v_cache.size(3), options, scales, sinks, results)
