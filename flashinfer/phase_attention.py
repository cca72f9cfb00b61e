# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch in which requests decode, extend and prefill, each on the path that suits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer.core.checks import INDEX_DTYPES, INT32_MAX, describe, fail, integer, number
from flashinfer.core.dtypes import FP8
from flashinfer.core.errors import NotPlannedError
from flashinfer.core.metadata import on_host
from flashinfer.core.op import STEP, explained_as
from flashinfer.dense_kv import dense_kv
from flashinfer.ops import attention as attention_ops
from flashinfer.ops import gather as gather_ops
from flashinfer.ops import merge as merge_ops
from flashinfer.ops.page import LAYOUTS
from flashinfer.page import split_cache
from flashinfer.phase_plan import BatchPlan, ChunkLaunch, plan_batch
from flashinfer.phases import PhaseSplit

WRAPPER = "BatchPhaseAttentionWrapper"
_QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class _Options(NamedTuple):
    """What `plan` was told, besides the batch. A captured graph is compiled for it."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    sm_scale: float
    window_left: int
    logits_soft_cap: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class _Call:
    """The tensors of one run."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[float, float]
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    needs_lse: bool


class BatchPhaseAttentionWrapper:
    """Causal attention of a mixed batch over a paged KV cache, planned once and run for each layer.

    Each phase has its own path, and all write into slices of one tensor, [decode : extend : prefill]:

    - *decode* reads the pages where they are; nothing is fetched,
    - *prefill* reads the new keys and values alone, never the pages,
    - *extend* attends to its new tokens, then fetches its cached context in chunks that fit the workspace, one launch
      of attention for each, and merges the results by their log-sum-exp from left to right.

    With a sliding window, which bounds what is read, extends read the pages where they are; so do extends and prefills
    of a layer that has no keys of its own and shares another's.

    Parameters
    ----------
    workspace_buffer
        Memory for fetched context, on the device of the queries: `2 * num_kv_heads * head_dim` elements of the
        queries' dtype for a token. One page at least if a request has a context and more new tokens than a decode.
        Used during `run` only: wrappers may share it.
    kv_layout
        "NHD", "HND" or "SHUFFLED", as in `append_paged_kv_cache`.
    use_cuda_graph
        Whether runs will be captured. A graph then replays what the latest plan says. Later plans must have as many
        requests and tokens in each phase as the first one, and no more chunks.
    kv_indices_buffer
        For graphs: int32 memory that plans copy page ids into; its length bounds the pages of a batch.
    backend
        Of the attention: "auto", or the name of one.

    Notes
    -----
    Keys and values of the batch's new tokens must have been appended before a run in which requests decode, have a
    sliding window, or share their keys. `flashinfer.phases.reorder_batch` brings a batch into the order in which each
    request gets its own path; in other orders results are the same, and slower.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        kv_indices_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if not isinstance(workspace_buffer, torch.Tensor) or not workspace_buffer.is_contiguous():
            fail(WRAPPER, "workspace_buffer", "a contiguous tensor", describe(workspace_buffer))
        if kv_layout not in LAYOUTS:
            fail(WRAPPER, "kv_layout", f"one of {LAYOUTS}", repr(kv_layout))
        known = ("auto", *attention_ops.paged_attention.backends)
        if backend not in known:
            fail(WRAPPER, "backend", f"one of {known}", repr(backend))
        self.device = workspace_buffer.device
        buffer = kv_indices_buffer
        if use_cuda_graph and (
            not isinstance(buffer, torch.Tensor)
            or buffer.dtype != torch.int32
            or buffer.dim() != 1
            or not buffer.is_contiguous()
            or buffer.device != self.device
        ):
            fail(WRAPPER, "kv_indices_buffer", f"contiguous int32[pages] on {self.device}", describe(buffer))
        self._workspace = workspace_buffer.view(-1).view(torch.uint8)
        self._kv_layout = kv_layout
        self._backend = backend
        self._use_cuda_graph = use_cuda_graph
        self._indices = buffer if use_cuda_graph else None
        self._options: _Options | None = None
        self._plan: BatchPlan | None = None
        self._words: torch.Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for graphs."""
        return self._use_cuda_graph

    @property
    def phases(self) -> PhaseSplit:
        """How the planned batch was split.

        Raises
        ------
        NotPlannedError
            If there is no plan.
        """
        return self._planned()[0].split

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        decode_threshold: int = 1,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Take a batch: split it into phases, cut the extends' context into chunks, bring the result to the device.

        With metadata on the device this waits for it once; with metadata on the host it waits for nothing.

        Parameters
        ----------
        qo_indptr
            `[batch_size + 1]` int32 or int64, where each request's queries begin; host or device, copied.
        kv_indptr, kv_last_page_len
            Page table as in `paged_attention`, the batch's new tokens included; host or device, copied. What it has
            beyond a request's queries is that request's context.
        kv_indices
            `[>= kv_indptr[-1]]` int32 or int64. Without graphs the tensor itself is used if it is on the device, and
            may be written after the plan.
        num_qo_heads, num_kv_heads, head_dim, page_size
            Of the attention; K and V have one head dimension.
        decode_threshold
            New tokens that a decode may have.
        sm_scale
            Scale of the scores, `head_dim ** -0.5` by default.
        window_left
            How many keys before its own place a query sees besides it; -1 for all.
        logits_soft_cap
            If positive, scores become `cap * tanh(score / cap)`.
        q_data_type, kv_data_type
            Of queries and pages; the latter may be FP8 and is the former by default.

        Raises
        ------
        InvalidArgumentError
            If a request contradicts its pages, naming the request; if the workspace holds no page and one is needed;
            if a graph's batch changes its size.
        """
        options = self._take_options(
            *(num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale, window_left, logits_soft_cap),
            *(q_data_type, kv_data_type or q_data_type),
        )
        integer(WRAPPER, "decode_threshold", decode_threshold, 1, INT32_MAX)
        self._check_metadata(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
        row = 2 * num_kv_heads * head_dim * q_data_type.itemsize
        budget = self._workspace.numel() // row // page_size * page_size if window_left < 0 else None
        graph = self._use_cuda_graph
        launches = len(self._plan.chunks) if graph and self._plan is not None else None
        qo, kv, last = on_host(qo_indptr, kv_indptr, kv_last_page_len)
        plan = plan_batch(
            WRAPPER,
            qo,
            kv,
            last,
            page_size,
            decode_threshold,
            budget,
            widen=graph,
            launches=launches,
            pinned=self.device.type != "cpu",
        )
        if plan.total_pages > kv_indices.numel():
            fail(WRAPPER, "kv_indices", f"of the {plan.total_pages} entries that kv_indptr names", kv_indices.numel())
        if graph:
            self._check_captured(options, plan)
        self._keep(options, plan, kv_indices)

    def _take_options(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> _Options:
        sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
        for name, value in sizes.items():
            integer(WRAPPER, name, value, 1, INT32_MAX)
        if heads % kv_heads:
            fail(WRAPPER, "num_qo_heads", f"divisible by num_kv_heads = {kv_heads}", heads)
        integer(WRAPPER, "window_left", window_left, -1, INT32_MAX)
        cap = 0.0 if logits_soft_cap is None else logits_soft_cap
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        number(WRAPPER, "sm_scale", scale)
        number(WRAPPER, "logits_soft_cap", cap)
        if q_dtype not in _QUERY_DTYPES:
            fail(WRAPPER, "q_data_type", f"one of {_QUERY_DTYPES}", q_dtype)
        if kv_dtype != q_dtype and kv_dtype not in FP8:
            fail(WRAPPER, "kv_data_type", f"q_data_type {q_dtype} or one of {FP8}", kv_dtype)
        return _Options(heads, kv_heads, head_dim, page_size, float(scale), window_left, float(cap), q_dtype, kv_dtype)

    def _check_metadata(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> None:
        named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
        for name, t in {**named, "kv_last_page_len": last_page_len}.items():
            if not isinstance(t, torch.Tensor) or t.dim() != 1 or t.dtype not in INDEX_DTYPES:
                fail(WRAPPER, name, "a 1-D int32 or int64 tensor", describe(t))
            if t.device.type != "cpu" and t.device != self.device:
                fail(WRAPPER, name, f"on the host or on {self.device}", t.device)
        batch = last_page_len.numel()
        for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
            if t.numel() != batch + 1:
                fail(WRAPPER, name, f"of length {batch + 1}, one more than kv_last_page_len", t.numel())

    def _check_captured(self, options: _Options, plan: BatchPlan) -> None:
        """A graph's launches were captured for the first plan's shapes."""
        if self._options is not None and options != self._options:
            fail(WRAPPER, "plan's arguments", f"those of the graph's first plan, {self._options}", options)
        if self._plan is not None and plan.split != self._plan.split:
            fail(WRAPPER, "the batch", f"split as the graph's first one, {self._plan.split}", plan.split)
        room = 0 if self._indices is None else self._indices.numel()
        if plan.total_pages > room:
            fail(WRAPPER, "the batch", f"of at most {room} pages, the length of kv_indices_buffer", plan.total_pages)

    def _keep(self, options: _Options, plan: BatchPlan, kv_indices: torch.Tensor) -> None:
        """Queue the plan's copy to the device."""
        # Torch's pinned memory is not handed out again before the copy is over.
        if self._use_cuda_graph and self._words is not None:
            self._words.copy_(plan.words, non_blocking=True)
        else:
            self._words = plan.words.to(self.device, non_blocking=True)
        if self._use_cuda_graph and self._indices is not None:
            self._indices[: plan.total_pages].copy_(kv_indices[: plan.total_pages], non_blocking=True)
        else:
            self._indices = kv_indices.to(self.device, non_blocking=True).contiguous()
        self._options, self._plan = options, plan

    def _planned(self) -> tuple[BatchPlan, _Options, torch.Tensor, torch.Tensor]:
        if self._plan is None or self._options is None or self._words is None or self._indices is None:
            raise NotPlannedError(f"{WRAPPER}: plan() must be called first")
        return self._plan, self._options, self._words, self._indices

    @explained_as(attention_ops.PAGED)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch. Waits for nothing, and can be captured.

        Parameters
        ----------
        q
            `[tokens, num_qo_heads, head_dim]`, the requests one after the other.
        k, v
            `[tokens, num_kv_heads, head_dim]`, keys and values of the same tokens, of q's dtype, rows and heads strided
            at will. None, both, for a layer that shares another layer's cache: they are then read from the pages.
        paged_kv_cache
            As in `append_paged_kv_cache`.
        k_scale, v_scale
            What the elements of an FP8 cache are multiplied by. Not applied to `k` and `v`.
        sinks
            float32 `[num_qo_heads]`, as in `paged_attention`; counted once, whatever the number of chunks.
        out, lse
            Tensors to write into; allocated if None.
        return_lse
            Whether to return the log-sum-exp as well.

        Returns
        -------
        torch.Tensor or tuple
            `out` like q, or `(out, lse)` with lse float32 `[tokens, num_qo_heads]` in base 2.

        Raises
        ------
        InvalidArgumentError
            For tensors that are not what was planned.
        NotPlannedError
            If there is no plan.
        """
        plan, options, *_ = self._planned()
        self._check_run(plan, options, q, k, v, (k_scale, v_scale))
        caches = split_cache(WRAPPER, paged_kv_cache, self._kv_layout)
        if caches[0].dtype != options.kv_dtype:
            fail(WRAPPER, "paged_kv_cache", f"of the planned dtype {options.kv_dtype}", caches[0].dtype)
        needs_lse = return_lse or lse is not None
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        fresh = None if k is None or v is None else (k, v)
        call = _Call(q, caches, (float(k_scale), float(v_scale)), sinks, out, lse, needs_lse)
        split = plan.split
        if split.num_decode_tokens:
            requests = slice(0, split.num_decodes)
            self._paged(call, split.decode_rows, plan.decode_qo, requests, plan.max_q_lens[0])
        if split.num_extend_tokens:
            if fresh is None or options.window_left >= 0:
                requests = slice(0, split.num_decodes + split.num_extends)
                self._paged(call, split.extend_rows, plan.extend_pages_qo, requests, plan.max_q_lens[1])
            else:
                self._extend(call, fresh)
        if split.num_prefill_tokens:
            if fresh is None:
                requests = slice(0, split.num_decodes + split.num_extends + split.num_prefills)
                self._paged(call, split.prefill_rows, plan.prefill_pages_qo, requests, plan.max_q_lens[2])
            else:
                self._fresh(call, fresh, split.prefill_rows, plan.prefill_qo, plan.max_q_lens[2], call.needs_lse)
        return (out, lse) if return_lse else out

    def _check_run(
        self,
        plan: BatchPlan,
        options: _Options,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        scales: tuple[float, float],
    ) -> None:
        """What the ops cannot know: the plan."""
        if (k is None) != (v is None):
            fail(WRAPPER, "k and v", "given together, or both None", f"{describe(k)} and {describe(v)}")
        heads = {"q": (q, options.heads), "k": (k, options.kv_heads), "v": (v, options.kv_heads)}
        for name, (t, count) in heads.items():
            if t is None and name != "q":
                continue
            shape = (plan.total_q, count, options.head_dim)
            if not isinstance(t, torch.Tensor) or tuple(t.shape) != shape:
                got = list(t.shape) if isinstance(t, torch.Tensor) else describe(t)
                fail(WRAPPER, name, f"of shape {list(shape)} as planned", got)
            if t.dtype != options.q_dtype:
                fail(WRAPPER, name, f"of the planned dtype {options.q_dtype}", t.dtype)
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            number(WRAPPER, name, scale)
            if scale != 1 and options.kv_dtype not in FP8:
                fail(WRAPPER, name, f"1 for a cache of {options.kv_dtype}", scale)

    def _paged(self, call: _Call, rows: slice, qo: slice, requests: slice, max_q_len: int) -> None:
        """Attention of some rows straight from the pages of the requests up to theirs."""
        plan, options, words, indices = self._planned()
        table = words[plan.kv_indptr][: requests.stop + 1]
        attention_ops.paged_attention(
            *(call.q[rows], *call.caches, words[qo], table, indices),
            *(words[plan.last_page_len][requests], self._kv_layout, True, options.sm_scale, options.window_left),
            *(options.logits_soft_cap, *call.scales, call.sinks, None, None, call.needs_lse, max_q_len, 0, 0, None),
            *(call.out[rows], call.lse[rows]),
            backend=self._backend,
        )

    def _fresh(
        self,
        call: _Call,
        fresh: tuple[torch.Tensor, torch.Tensor],
        rows: slice,
        qo: slice,
        max_q_len: int,
        needs_lse: bool,
    ) -> None:
        """Causal attention of some rows over their own keys."""
        _, options, words, _ = self._planned()
        k, v = fresh
        attention_ops.ragged_attention(
            *(call.q[rows], k[rows], v[rows], words[qo], words[qo], True, options.sm_scale, options.window_left),
            *(options.logits_soft_cap, 1.0, 1.0, call.sinks, None, None, needs_lse, max_q_len, max_q_len, 0, None),
            *(call.out[rows], call.lse[rows]),
            backend=self._backend,
        )

    def _extend(self, call: _Call, fresh: tuple[torch.Tensor, torch.Tensor]) -> None:
        """New tokens first, with the sinks; then what was fetched, chunk by chunk."""
        plan, *_ = self._planned()
        rows = plan.split.extend_rows
        needs_lse = call.needs_lse or bool(plan.chunks)
        self._fresh(call, fresh, rows, plan.extend_qo, plan.max_q_lens[1], needs_lse)
        out, lse = call.out[rows], call.lse[rows]
        for chunk in plan.chunks:
            self._merge_chunk(call, chunk, call.q[rows][chunk.rows], out[chunk.rows], lse[chunk.rows])

    def _merge_chunk(
        self, call: _Call, chunk: ChunkLaunch, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        plan, options, words, indices = self._planned()
        shape = (chunk.tokens, options.kv_heads, options.head_dim)
        k, v = dense_kv(self._workspace, shape, options.q_dtype)
        table = words[plan.kv_indptr][chunk.requests.start : chunk.requests.stop + 1]
        gather_ops.gather_paged_kv(
            *(*call.caches, indices, table),
            *(words[chunk.starts], words[chunk.kv_indptr], self._kv_layout, *call.scales, k, v),
            backend=f"{STEP}{self._backend}",
        )
        part = torch.empty_like(q, memory_format=torch.contiguous_format)
        part_lse = lse.new_empty(lse.shape)
        # Keys that all queries see: the scale of FP8 was applied on the way.
        attention_ops.ragged_attention(
            *(q, k, v, words[chunk.qo_indptr], words[chunk.kv_indptr], False, options.sm_scale, -1),
            *(options.logits_soft_cap, 1.0, 1.0, None, None, None, True, plan.max_q_lens[1], 0, 0, None),
            *(part, part_lse),
            backend=self._backend,
        )
        merge_ops.merge_state_in_place(out, lse, part, part_lse, None, backend=f"{STEP}{self._backend}")
