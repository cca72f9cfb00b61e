# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The planned form of MLA attention, public as `flashinfer.mla.BatchMLAPagedAttentionWrapper`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashinfer import mla_arguments
from flashinfer.core import aiter_install, mla_plan
from flashinfer.core.checks import INDEX_DTYPES, describe, fail, refuse_extras
from flashinfer.core.errors import NotPlannedError
from flashinfer.core.metadata import Fetch, on_host
from flashinfer.core.mla_plan import HostPlan, Shape
from flashinfer.core.op import explained_as
from flashinfer.ops import mla as ops
from flashinfer.planned import scale_of

WRAPPER = "BatchMLAPagedAttentionWrapper"
# As FlashInfer's. 8 words an item: a plan of more than 250,000 items needs more, and gets it unless a graph holds it.
INT_WORKSPACE_BYTES = 8 << 20
# FlashInfer's name for "no particular generation"; engines pass it, and read it back from `_backend`.
AUTO_NAMES = ("auto", "fa2")


def results(
    q_nope: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors to write into."""
    if not isinstance(q_nope, torch.Tensor) or q_nope.dim() != 3:
        fail(mla_plan.OP, "q_nope", "[tokens, heads, head_dim_ckv]", describe(q_nope))
    if out is None:
        out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    if lse is None:
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)
    return out, lse


class _Planned(NamedTuple):
    """What `plan` was told, besides the metadata."""

    heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    causal: bool
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


def _queries(host: HostPlan, causal: bool) -> tuple[int, bool]:
    """The longest query and whether all are as long; 0 where some of several queries see no key."""
    if causal and host.max_q_len > 1 and host.has_unseen:
        return 0, False
    return host.max_q_len, host.is_uniform


class _CachedModule:
    """What FlashInfer's wrappers keep a compiled module in: engines call its `plan` in place of the wrapper's."""

    def __init__(self, wrapper: BatchMLAPagedAttentionWrapper) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_int_workspace: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> None:
        """Cut a batch anew; everything that a captured graph reads is in the wrapper's int workspace."""
        self._wrapper._plan_again(on_host(qo_indptr, kv_indptr, kv_len_arr), num_heads, causal)


class BatchMLAPagedAttentionWrapper:
    """MLA attention of a batch, planned once and run for each layer.

    Parameters
    ----------
    float_workspace_buffer
        Memory for partial results, on the device of the queries; `workspace_size()` says how much a plan needs. Used
        during `run` only: wrappers may share it.
    use_cuda_graph
        Whether runs will be captured. A graph then replays what the latest plan says, without being captured again.
        The batch size is that of the buffers.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr
        For graphs: int32 buffers that plans copy the metadata into. `kv_indices` bounds the pages of a batch.
    backend
        "auto" or "fa2": whichever takes the call; or the name of one.

    Notes
    -----
    `plan` and `run` may be called from one thread at a time. A plan made while a graph of this wrapper is running
    takes its turn behind it, if both are on one stream.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        known = (*AUTO_NAMES, *ops.mla_paged_attention.backends)
        if backend not in known:
            fail(WRAPPER, "backend", f"one of {known}", repr(backend))
        mla_arguments.check_workspace(WRAPPER, float_workspace_buffer)
        self._backend = backend
        self._use_cuda_graph = use_cuda_graph
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        # Engines hand it back to `_cached_module.plan`; the memory that plans use is torch's pinned allocator's, which
        # gives none out again before its copy is over.
        self._pin_memory_int_workspace_buffer = torch.empty(0, dtype=torch.uint8)
        self._cached_module = _CachedModule(self)
        buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        if use_cuda_graph:
            mla_arguments.check_buffers(WRAPPER, buffers, self.device)
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self._fixed_batch_size = kv_len_arr.numel() if use_cuda_graph and kv_len_arr is not None else None
        self._planned: _Planned | None = None
        self._shape: Shape | None = None
        self._host: HostPlan | None = None
        self._views: tuple[torch.Tensor, ...] = ()
        # Batch size and buffer that they belong to.
        self._views_of: tuple[int, torch.Tensor | None] = -1, None
        # Views of workspaces, each with what it is of, kept as making one costs as much as a copy.
        self._copied_to_of, self._copied_to = self._int_workspace_buffer, self._int_workspace_buffer[:0]
        self._scratch_of = float_workspace_buffer, torch.empty(0)
        self._queries = 0, False
        self._sm_scale = 0.0

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for graphs."""
        return self._use_cuda_graph

    def workspace_size(self) -> int:
        """Bytes of the float workspace that the present plan needs.

        Raises
        ------
        NotPlannedError
            If there is no plan.
        """
        planned, shape = self._planned, self._shape
        if planned is None or shape is None:
            raise NotPlannedError(f"{WRAPPER}: plan() must be called before workspace_size()")
        return 4 * shape.scratch_elements(planned.head_dim_ckv)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor) -> None:
        """Take another float workspace, on the same device.

        Parameters
        ----------
        float_workspace_buffer
            The new one. A graph that was captured before keeps using the old one.
        """
        mla_arguments.check_workspace(WRAPPER, float_workspace_buffer)
        if float_workspace_buffer.device != self.device:
            fail(WRAPPER, "float_workspace_buffer", f"on {self.device}", float_workspace_buffer.device)
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
        *,
        metadata: object = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: object = None,
        kv_cache_layout: object = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Take a batch: check it, cut it into pieces of equal cost, and bring the result to the device.

        With metadata on the device this waits for it once; with metadata on the host it waits for nothing.

        Parameters
        ----------
        qo_indptr, kv_indptr, kv_len_arr
            As in `mla_paged_attention`; host or device, copied.
        kv_indices
            `[>= kv_indptr[-1]]`. Without graphs the tensor itself is used if it is int32 on the device and contiguous,
            and may be written after the plan.
        num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type
            Of the attention.
        enable_pdl
            Has no effect: a launch hint of NVIDIA's.
        use_profiler, metadata, cum_seq_lens_q, block_tables, seq_lens, max_q_len, query_layout, kv_cache_layout, \
lse_mode, output_dtype, output_scale, scale_mode, skip_softmax, use_sinks
            For other backends of FlashInfer; refused unless they have their defaults.

        Raises
        ------
        InvalidArgumentError
            If a request contradicts its pages, naming the request; if a graph's batch, or what its kernels were
            captured for, changes; if the workspace is too small.
        """
        lists = qo_indptr, kv_indptr, kv_len_arr
        self._check_kinds(*lists, kv_indices)
        fetch = Fetch(*lists)
        # What needs no values is done while the device sends them.
        try:
            refuse_extras(
                f"{WRAPPER}.plan",
                {"use_profiler": use_profiler, "skip_softmax": skip_softmax, "use_sinks": use_sinks},
                {
                    "metadata": metadata,
                    "cum_seq_lens_q": cum_seq_lens_q,
                    "block_tables": block_tables,
                    "seq_lens": seq_lens,
                    "max_q_len": max_q_len,
                    "query_layout": query_layout,
                    "kv_cache_layout": kv_cache_layout,
                },
                {"lse_mode": (lse_mode, "none"), "output_scale": (output_scale, "none")},
                {"scale_mode": (scale_mode, "default"), "output_dtype": (output_dtype or q_data_type, q_data_type)},
            )
            planned = _Planned(num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, q_data_type, kv_data_type)
            self._check_sizes(*lists, planned)
            indices = mla_arguments.page_ids(kv_indices, self.device)
        finally:
            values = fetch.wait()
        host = self._cut(values, planned, kv_indices.numel())
        self._take(host, planned, mla_arguments.score_scale(WRAPPER, sm_scale))
        self._keep_metadata(indices)

    def _check_kinds(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_len_arr: torch.Tensor, kv_indices: torch.Tensor
    ) -> None:
        """Refuse what cannot be metadata."""
        named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        for name, t in named.items():
            if not isinstance(t, torch.Tensor) or t.dim() != 1 or t.dtype not in INDEX_DTYPES:
                fail(WRAPPER, name, "a 1-D int32 or int64 tensor", describe(t))
            if not t.is_cpu and t.device != self.device:
                fail(WRAPPER, name, f"on the host or on {self.device}", t.device)

    def _check_sizes(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_len_arr: torch.Tensor, planned: _Planned
    ) -> None:
        """Refuse metadata of unlike lengths, and for a graph another plan than its first."""
        batch = kv_len_arr.numel()
        for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            if t.numel() != batch + 1:
                fail(WRAPPER, name, f"of length {batch + 1}, one more than kv_len_arr", t.numel())
        if planned != self._planned:
            mla_arguments.check_planned(WRAPPER, *planned)
        if self._fixed_batch_size is not None and batch != self._fixed_batch_size:
            fail(
                *(WRAPPER, "kv_len_arr", f"of length {self._fixed_batch_size}, that of the graph's buffer", batch),
                "pad the batch with requests of length 0",
            )
        if self._use_cuda_graph and self._planned is not None and planned != self._planned:
            fail(WRAPPER, "plan's arguments", f"those of the graph's first plan, {self._planned}", planned)

    def _cut(self, metadata: list[torch.Tensor], planned: _Planned, indices: int | None) -> HostPlan:
        """Check a batch and cut it. A graph's kernels were compiled and launched for the first plan's shape."""
        shape = self._shape if self._use_cuda_graph else None
        shapes = mla_plan.shapes_for(planned.heads, self.device) if shape is None else (shape,)
        arguments = planned.heads, planned.page_size, planned.causal
        host = mla_plan.plan(metadata, *arguments, shapes, self.device, op=WRAPPER)
        if indices is not None:
            mla_plan.require(host.total_q, host.total_pages, host.total_q, indices, WRAPPER)
        into = self._kv_indices_buf
        if self._use_cuda_graph and into is not None and host.total_pages > into.numel():
            fail(WRAPPER, "kv_indices", f"of at most {into.numel()} pages, as the graph's buffer", host.total_pages)
        return host

    def _plan_again(self, metadata: list[torch.Tensor], heads: int, causal: bool) -> None:
        """Another batch of the kind that was planned."""
        planned = self._planned
        if planned is None:
            raise NotPlannedError(f"{WRAPPER}: plan() must be called once before its planner")
        if self._use_cuda_graph and (heads, causal) != (planned.heads, planned.causal):
            first = f"those of the graph's first plan, {planned.heads} and {planned.causal}"
            fail(WRAPPER, "num_heads and causal", first, f"{heads} and {causal}")
        planned = planned._replace(heads=heads, causal=causal)
        indices = None if self._kv_indices_buf is None else self._kv_indices_buf.numel()
        host = self._cut(metadata, planned, indices)
        if self._fixed_batch_size not in (None, host.batch):
            fail(WRAPPER, "kv_len_arr", f"of length {self._fixed_batch_size}, that of the graph's buffer", host.batch)
        self._take(host, planned, self._sm_scale)

    def _take(self, host: HostPlan, planned: _Planned, sm_scale: float) -> None:
        """Make a plan the present one, and queue its copy to the int workspace."""
        queries = _queries(host, planned.causal)
        if self._use_cuda_graph and self._planned is not None:
            self._keep_queries(queries)
            queries = self._queries
        else:
            need = 4 * host.shape.scratch_elements(planned.head_dim_ckv)
            have = self._float_workspace_buffer.numel() * self._float_workspace_buffer.element_size()
            if have < need:
                fail(WRAPPER, "float_workspace_buffer", f"of at least {need} bytes for this plan", have)
        self._send(host.memory)
        self._planned, self._shape, self._queries, self._sm_scale = planned, host.shape, queries, sm_scale
        self._host = host
        buffer = self._int_workspace_buffer
        if self._views_of[0] != host.batch or self._views_of[1] is not buffer:
            self._views, self._views_of = host.split(buffer.view(torch.int32)), (host.batch, buffer)

    def _send(self, words: torch.Tensor) -> None:
        """Queue the copy of a plan to the beginning of the int workspace."""
        size, have = words.numel(), self._int_workspace_buffer.numel()
        if 4 * size > have:
            if self._use_cuda_graph:
                fail(WRAPPER, "the batch", f"small enough for a schedule of {have} bytes", 4 * size)
            self._int_workspace_buffer = torch.empty(8 * size, dtype=torch.uint8, device=self.device)
        buffer = self._int_workspace_buffer
        if self._copied_to.numel() != size or self._copied_to_of is not buffer:
            self._copied_to_of, self._copied_to = buffer, buffer.view(torch.int32)[:size]
        self._copied_to.copy_(words, non_blocking=True)

    def _keep_queries(self, queries: tuple[int, bool]) -> None:
        """AITER's kernels are captured for one query length, ours for all."""
        by_choice = self._backend in AUTO_NAMES and aiter_install.why_not_here(self.device) is None
        if self._queries[0] and queries != self._queries and (by_choice or self._backend == "aiter"):
            fail(
                WRAPPER,
                "the queries of a graph's plans",
                f"as in the first, at most {self._queries[0]} a request",
                f"at most {queries[0]}, or other numbers of them",
                "pad the batch, or choose backend='triton'",
            )

    def _keep_metadata(self, indices: torch.Tensor) -> None:
        """Fill a graph's buffers; without a graph, point to what the plan holds."""
        qo_indptr, kv_indptr, kv_len, *_ = self._views
        buffers = (self._qo_indptr_buf, self._kv_indptr_buf, self._kv_len_arr_buf)
        if not self._use_cuda_graph:
            self._qo_indptr_buf, self._kv_indptr_buf, self._kv_len_arr_buf = qo_indptr, kv_indptr, kv_len
            self._kv_indices_buf = indices
            return
        for buffer, view in zip(buffers, (qo_indptr, kv_indptr, kv_len), strict=True):
            if buffer is not None and buffer.data_ptr() != view.data_ptr():
                buffer.copy_(view)
        into, host = self._kv_indices_buf, self._host
        if into is not None and host is not None and into.data_ptr() != indices.data_ptr():
            into[: host.total_pages].copy_(indices[: host.total_pages], non_blocking=True)

    @explained_as(mla_plan.OP)
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: torch.Tensor | None = None,
        kv_cache: torch.Tensor | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch; waits for nothing and may be captured.

        Parameters
        ----------
        q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, ckv_scale, kpe_scale
            As in `mla_paged_attention`. A given `lse` is written also without `return_lse`.
        return_lse_base_on_e
            Whether the LSE is a natural logarithm and not one of base 2.
        profiler_buffer, kv_len, page_table, o_scale, query, kv_cache, ckv_scale_arr, sinks, \
skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale
            For other backends of FlashInfer; refused unless None.

        Returns
        -------
        torch.Tensor or tuple
            `out`, or `(out, lse)`, as `mla_paged_attention`.

        Raises
        ------
        NotPlannedError
            Before the first plan.
        InvalidArgumentError
            If the tensors are not what was planned.
        """
        refuse_extras(
            f"{WRAPPER}.run",
            {},
            {
                "profiler_buffer": profiler_buffer,
                "kv_len": kv_len,
                "page_table": page_table,
                "o_scale": o_scale,
                "query": query,
                "kv_cache": kv_cache,
                "ckv_scale_arr": ckv_scale_arr,
                "sinks": sinks,
                "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
                "bmm1_scale": bmm1_scale,
                "bmm2_scale": bmm2_scale,
            },
        )
        planned, shape, indices = self._planned, self._shape, self._kv_indices_buf
        if planned is None or shape is None or indices is None:
            raise NotPlannedError(f"{WRAPPER}: plan() must be called before run()")
        needs_lse = return_lse or lse is not None
        scales = scale_of(WRAPPER, "ckv_scale", ckv_scale), scale_of(WRAPPER, "kpe_scale", kpe_scale)
        out, lse = results(q_nope, out, lse)
        self._check_run(planned, q_nope, q_pe, ckv_cache, kpe_cache)
        qo_indptr, kv_indptr, lens, _, schedule = self._views
        ops.mla_paged_attention(
            *(q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, indices, lens),
            *(planned.causal, self._sm_scale, *scales, needs_lse),
            *self._queries,
            *(schedule, shape.rows_per_item, shape.workers, self._scratch(shape, planned)),
            *(out, lse),
            backend="auto" if self._backend in AUTO_NAMES else self._backend,
        )
        if return_lse_base_on_e:
            lse.mul_(math.log(2))
        return (out, lse) if return_lse else out

    def _scratch(self, shape: Shape, planned: _Planned) -> torch.Tensor:
        buffer, size = self._float_workspace_buffer, shape.scratch_elements(planned.head_dim_ckv)
        if self._scratch_of[0] is not buffer or self._scratch_of[1].numel() != size:
            self._scratch_of = buffer, buffer.view(-1).view(torch.uint8)[: 4 * size].view(torch.float32)
        return self._scratch_of[1]

    def _check_run(
        self,
        planned: _Planned,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
    ) -> None:
        """What the op cannot know: the plan. Shapes that contradict each other are left to the op."""
        for name, t, shape, dtype in (
            ("q_nope", q_nope, (planned.heads, planned.head_dim_ckv), planned.q_dtype),
            ("q_pe", q_pe, (planned.heads, planned.head_dim_kpe), planned.q_dtype),
            ("ckv_cache", ckv_cache, (planned.page_size, planned.head_dim_ckv), planned.kv_dtype),
            ("kpe_cache", kpe_cache, (planned.page_size, planned.head_dim_kpe), planned.kv_dtype),
        ):
            if not isinstance(t, torch.Tensor):
                fail(WRAPPER, name, "a tensor", describe(t))
            if t.dim() == 4:
                fail(WRAPPER, name, "3-D", describe(t), f"pass {name}.squeeze() of the axis of length 1")
            if t.dim() != 3 or t.shape[1:] != shape:
                fail(WRAPPER, name, f"of shape [*, {shape[0]}, {shape[1]}] as planned", list(t.shape))
            if t.dtype != dtype:
                fail(WRAPPER, name, f"of the planned dtype {dtype}", t.dtype)
        # A captured graph's planner may have been called since; the graph itself fixes the rows.
        if not self._use_cuda_graph and self._host is not None and q_nope.size(0) != self._host.total_q:
            fail(WRAPPER, "q_nope", f"of {self._host.total_q} rows as planned", q_nope.size(0))
