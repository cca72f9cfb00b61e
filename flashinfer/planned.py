# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the planned attention wrappers have in common.

Engines read and write a wrapper's private attributes and replace its methods, so the state of a plan is kept in
attributes of FlashInfer's names, and `run` reads it from nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer.core.attention_work import NO_SPLIT, FixedPieces, scratch_elements
from flashinfer.core.checks import INDEX_DTYPES, INT32_MAX, describe, fail, integer, number, refuse_extras
from flashinfer.core.errors import NotPlannedError
from flashinfer.core.metadata import on_host
from flashinfer.custom_mask import mask_indptr, pack_mask
from flashinfer.host_batch import HostBatch, measure
from flashinfer.ops.page import LAYOUTS
from flashinfer.run_options import Options, Results

# As FlashInfer's.
INT_WORKSPACE_BYTES = 8 << 20
# Names of FlashInfer's backends. Engines pass them, and read them back from `_backend`; here each of them means that
# whichever backend takes a call does.
AUTO_NAMES = ("auto", "fa2", "fa3", "cutlass", "cudnn", "trtllm-gen")
OWN_NAMES = ("aiter", "triton", "reference")
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def dtype_of(where: str, name: str, value: torch.dtype | str) -> torch.dtype:
    """A dtype, also by name as FlashInfer's plans take it."""
    found = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        fail(where, name, "a torch.dtype or the name of one", repr(value))
    return found


def scale_of(where: str, name: str, value: float | torch.Tensor | None) -> float:
    """A scale as a number; None is 1."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            fail(where, name, "a number", describe(value), "one on a device would be waited for in every run")
        value = float(value)
    number(where, name, value)
    if not value > 0:
        fail(where, name, "positive", value)
    return float(value)


def scales_of(where: str, q: Any, k: Any, v: Any) -> tuple[float, float, float]:
    """q_scale, k_scale and v_scale as numbers."""
    return scale_of(where, "q_scale", q), scale_of(where, "k_scale", k), scale_of(where, "v_scale", v)


def refuse_rope(where: str, pos_encoding_mode: str, use_fp16_qk_reduction: bool = False) -> None:
    """Refuse positional encodings inside attention, ALiBi among them, and sums in float16."""
    refuse_extras(
        where,
        {"use_fp16_qk_reduction": use_fp16_qk_reduction},
        {},
        {"pos_encoding_mode": (pos_encoding_mode, "NONE")},
    )


def refuse_items(where: str, prefix_len: object, positions: object, length: int, longest: object) -> None:
    """Refuse the scoring of many items behind one prefix."""
    optional = {"prefix_len_ptr": prefix_len, "token_pos_in_items_ptr": positions, "max_item_len_ptr": longest}
    refuse_extras(where, {}, optional, {"token_pos_in_items_len": (length or 0, 0)})


class CachedModule:
    """What FlashInfer's wrappers keep a compiled module in: engines call its `plan` in place of the wrapper's."""

    def __init__(self, wrapper: PlannedAttention) -> None:
        self._wrapper = wrapper

    def plan(self, *args: Any) -> list[int]:
        """Measure a batch whose metadata the caller has put into the wrapper's buffers.

        Kernels find their work in those buffers, so a graph that is replayed needs nothing else of this.

        Parameters
        ----------
        args
            By position, as FlashInfer's compiled planners take them: float, int and pinned int workspace, then

            - of prefill, and of decode on tensor cores (19 to 21 in all): qo_indptr, kv_indptr, kv_lens, total rows,
              batch size, heads, KV heads, page size, whether for graphs, head dims of keys and of values, causal,
              window_left, fixed_split_size or -1, disable_split_kv, and hints that have no effect;
            - of decode (15 in all): kv_indptr, batch size, heads, KV heads, page size, whether for graphs,
              window_left, soft cap, and head dims and dtypes that have no effect.

            Index tensors are in host memory.

        Returns
        -------
        list of int
            What FlashInfer calls the plan's info; the same for all plans.
        """
        wrapper, rest = self._wrapper, args[3:]
        if len(args) in (19, 20, 21):
            qo_indptr, kv_indptr, _, _, _, _, _, page_size = rest[:8]
            qo, kv = on_host(qo_indptr, kv_indptr)
            wrapper._measure(qo, kv, None, page_size)
            wrapper._keep_splits(*rest[13:15])
        elif len(args) == 15:
            kv_indptr, _, _, _, page_size = rest[:5]
            wrapper._measure(1, on_host(kv_indptr)[0], None, page_size)
        else:
            fail(wrapper._name, "_cached_module.plan's arguments", "15, or 19 to 21", len(args))
        return wrapper._plan_info


class PlannedAttention:
    """A plan and what runs need of it.

    Parameters
    ----------
    float_workspace_buffer
        Memory for partial results, on the device of the queries. Used during `run` only: wrappers may share it.
    kv_layout
        "NHD", "HND" or "SHUFFLED", as in `append_paged_kv_cache`.
    use_cuda_graph
        Whether runs will be captured.
    backend
        One of FlashInfer's names ("auto", "fa2", ...), which all mean "whichever takes the call", or the name of one.
    """

    _name = "PlannedAttention"
    # Queries of a request for which blocks of a fixed size are chosen, where a plan knows them whatever the batch.
    _fixed_q_len = 0

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str
    ) -> None:
        if kv_layout not in LAYOUTS:
            fail(self._name, "kv_layout", f"one of {LAYOUTS}", repr(kv_layout))
        if backend not in (*AUTO_NAMES, *OWN_NAMES):
            fail(self._name, "backend", f"one of {(*AUTO_NAMES, *OWN_NAMES)}", repr(backend))
        self._check_workspace(float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._kv_layout, self._use_cuda_graph, self._backend = kv_layout, use_cuda_graph, backend
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        # Engines hand it back to `_cached_module.plan`; staging memory comes from torch's pinned allocator, which
        # gives none out again before its copy is over.
        self._pin_memory_int_workspace_buffer = torch.empty(0, dtype=torch.uint8)
        self._cached_module = CachedModule(self)
        self._plan_info: list[int] = []
        self._qo_indptr_buf: torch.Tensor | None = None
        self._custom_mask_buf: torch.Tensor | None = None
        self._mask_indptr_buf: torch.Tensor | None = None
        self._fixed_batch_size: int | None = None
        self._planned = False
        self._scratch_of: tuple[torch.Tensor, int, bool, torch.Tensor] | None = None
        self._batch: HostBatch | None = None
        self._split_size = 0
        self._batch_size = self._num_qo_heads = self._num_kv_heads = self._page_size = 0
        self._head_dim_qk = self._head_dim_vo = 0
        self._qo_indptr_last = self._max_q_len = self._max_kv_len = 0
        self._max_total_num_rows: int | None = None
        self._cached_q_data_type: torch.dtype | str = torch.float16
        self._cached_kv_data_type: torch.dtype | str = torch.float16
        self._cached_o_data_type: torch.dtype | str | None = None
        self._block_tables: torch.Tensor | None = None
        self._causal, self._window_left, self._logits_soft_cap = False, -1, 0.0
        self._sm_scale: float | None = None
        self._pos_encoding_mode = "NONE"
        self._rope_scale: float | None = None
        self._rope_theta: float | None = None
        self._prefix_len_ptr = self._token_pos_in_items_ptr = self._max_item_len_ptr = None
        self._token_pos_in_items_len = 0

    def _check_workspace(self, buffer: torch.Tensor) -> None:
        if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous():
            fail(self._name, "float_workspace_buffer", "a contiguous tensor", describe(buffer))
        if buffer.data_ptr() % 16:
            fail(self._name, "float_workspace_buffer", "aligned to 16 bytes", f"address {buffer.data_ptr():#x}")

    def _check_buffers(self, batch: int, buffers: dict[str, tuple[torch.Tensor | None, int | None]]) -> None:
        """Buffers of a graph with their lengths, None for any."""
        for name, (buffer, length) in buffers.items():
            if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.int32 or buffer.dim() != 1:
                fail(self._name, name, "a 1-D int32 buffer with use_cuda_graph", describe(buffer))
            if not buffer.is_contiguous() or buffer.device != self.device:
                fail(self._name, name, f"contiguous and on {self.device}", describe(buffer))
            if length is not None and buffer.numel() != length:
                fail(self._name, name, f"of length {length}, for a batch of {batch}", buffer.numel())

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for graphs."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """The backend asked for; one of FlashInfer's names leaves the choice to each run."""
        return self._backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Take other workspaces, on the same device.

        Parameters
        ----------
        float_workspace_buffer
            The new one. A graph that was captured before keeps using the old one.
        int_workspace_buffer
            For the plan's schedule; the next plan writes it. The old one is kept if None.
        """
        self._check_workspace(float_workspace_buffer)
        for name, buffer in (
            ("float_workspace_buffer", float_workspace_buffer),
            ("int_workspace_buffer", int_workspace_buffer),
        ):
            if buffer is not None and buffer.device != self.device:
                fail(self._name, name, f"on {self.device}", buffer.device)
        self._float_workspace_buffer = float_workspace_buffer
        if int_workspace_buffer is not None:
            self._int_workspace_buffer = int_workspace_buffer.view(-1).view(torch.uint8)

    def workspace_size(self) -> int:
        """Bytes of the float workspace that the present plan needs.

        Raises
        ------
        NotPlannedError
            If there is no plan.
        """
        self._require_plan("workspace_size()")
        return self._workspace_need()

    def _workspace_need(self) -> int:
        if not 0 < self._split_size < NO_SPLIT or self._batch is None:
            return 4 * scratch_elements(self._head_dim_vo, self.device)
        group = max(self._num_qo_heads // max(self._num_kv_heads, 1), 1)
        fixed = FixedPieces.of(group, self._fixed_q_len, self._split_size)
        pieces = fixed.count(group, self._num_kv_heads, self._batch.q_lens(), self._batch.kv_lens())
        return 4 * fixed.scratch_elements(self._head_dim_vo, pieces)

    def _scratch(self) -> torch.Tensor:
        buffer, dim, split = self._float_workspace_buffer, self._head_dim_vo, self._split_size > 0
        # Made anew for each run it would be a fifth of the host's time in this wrapper.
        if self._scratch_of is not None and self._scratch_of[0] is buffer and self._scratch_of[1:3] == (dim, split):
            return self._scratch_of[3]
        need, have = self._check_room(), buffer.numel() * buffer.element_size()
        # How many pieces of a fixed size there are changes from plan to plan, a captured graph's memory does not.
        scratch = buffer.view(-1).view(torch.uint8)[: have // 4 * 4 if split else need].view(torch.float32)
        self._scratch_of = buffer, dim, split, scratch
        return scratch

    def _check_room(self) -> int:
        """Bytes that the plan needs, which must be there."""
        buffer, need = self._float_workspace_buffer, self._workspace_need()
        have = buffer.numel() * buffer.element_size()
        if have < need:
            fail(self._name, "float_workspace_buffer", f"of at least {need} bytes for this plan", have)
        return need

    def end_forward(self) -> None:
        """Do nothing; FlashInfer's wrappers once wanted to be told."""

    def _require_plan(self, what: str) -> None:
        if not self._planned:
            raise NotPlannedError(f"{self._name}: plan() must be called before {what}")

    def _check_metadata(self, named: dict[str, tuple[torch.Tensor, int | None]]) -> None:
        """Index tensors with their lengths, None for any."""
        for name, (t, length) in named.items():
            if not isinstance(t, torch.Tensor) or t.dim() != 1 or t.dtype not in INDEX_DTYPES:
                fail(self._name, name, "a 1-D int32 or int64 tensor", describe(t))
            if t.device.type != "cpu" and t.device != self.device:
                fail(self._name, name, f"on the host or on {self.device}", t.device)
            if length is not None and t.numel() != length:
                fail(self._name, name, f"of length {length}, one more than the batch size", t.numel())

    def _check_batch(self, name: str, batch: int) -> None:
        """A graph's launches are for one batch size."""
        if self._fixed_batch_size is not None and batch != self._fixed_batch_size:
            fail(
                *(self._name, name, f"for a batch of {self._fixed_batch_size}, that of the graph's buffers", batch),
                "pad the batch with requests of length 0",
            )

    def _drop_plan(self) -> None:
        """Begin a plan whose arguments may yet be refused: half of it must not run. A graph keeps what it captured."""
        self._planned = self._planned and self._use_cuda_graph

    def _on_device(self, t: torch.Tensor) -> torch.Tensor:
        """Metadata where kernels read them: themselves if they are there, else copied from memory that is nobody's."""
        if t.device == self.device:
            return t.contiguous()
        # The caller may overwrite pinned tensors once the plan returns, before the copy is over.
        return torch.empty(t.shape, dtype=torch.int32, pin_memory=True).copy_(t).to(self.device, non_blocking=True)

    def _placed(self, given: torch.Tensor, batch: HostBatch, part: int) -> torch.Tensor:
        """A vector of the batch to be read on the device, or copied to a graph's buffer."""
        if given.device == self.device:
            return given.contiguous()
        placed = (batch.host if self._use_cuda_graph else batch.there)[part]
        return self._on_device(given) if placed is None else placed

    def _take_mask_buffers(self, masks: torch.Tensor | None, indptr: torch.Tensor | None) -> None:
        """A graph's buffers of masks; none is no masks."""
        if masks is None and indptr is None:
            return
        if not isinstance(masks, torch.Tensor) or masks.dtype != torch.uint8 or masks.dim() != 1:
            fail(self._name, "custom_mask_buf", "a 1-D uint8 buffer with mask_indptr_buf", describe(masks))
        batch = self._fixed_batch_size or 0
        self._check_buffers(batch, {"mask_indptr_buf": (indptr, batch + 1)})
        self._custom_mask_buf, self._mask_indptr_buf = masks, indptr

    def _bound_rows(self, rows: int) -> None:
        """A graph's launches are for the queries of its first plan at most."""
        if not self._use_cuda_graph:
            return
        if self._max_total_num_rows is None:
            self._max_total_num_rows = rows
        if rows > self._max_total_num_rows:
            fail(self._name, "qo_indptr[-1]", f"at most {self._max_total_num_rows}, the graph's rows", rows)

    def _keep_mask(self, batch: HostBatch, custom_mask: torch.Tensor | None, packed: torch.Tensor | None) -> None:
        """The masks of a plan as bits. A graph keeps its buffers, and masks are its business for life."""
        if custom_mask is None and packed is None:
            if not self._use_cuda_graph:
                self._custom_mask_buf = self._mask_indptr_buf = None
            return
        bits = batch.mask_bits()
        starts = mask_indptr(bits)
        if packed is None and custom_mask is not None:
            packed = pack_mask(self._name, custom_mask, bits, self.device)
        if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.dim() != 1:
            fail(self._name, "packed_custom_mask", "a 1-D uint8 tensor", describe(packed))
        size = int(starts[-1])
        if packed.numel() < size:
            fail(self._name, "packed_custom_mask", f"of {size} bytes", packed.numel())
        into, begins = self._custom_mask_buf, self._mask_indptr_buf
        if not self._use_cuda_graph:
            self._custom_mask_buf = packed.to(self.device)
            self._mask_indptr_buf = starts.int().to(self.device)
            return
        if into is None or begins is None:
            fail(self._name, "custom_mask_buf", "given to a graph's wrapper that is planned with masks", "None")
        if size > into.numel():
            fail(self._name, "custom_mask_buf", f"of at least {size} bytes for this plan", into.numel())
        into[:size].copy_(packed[:size])
        begins.copy_(self._on_device(starts))

    def _measure(
        self,
        qo: torch.Tensor | int,
        kv: torch.Tensor,
        last: torch.Tensor | None,
        page_size: int,
        kv_name: str = "kv_indptr",
        away: bool = False,
    ) -> HostBatch:
        """Check a batch, and keep what helps kernels to cut it. A graph's batches are not known when it is captured.

        `away` says that the device has not all of it yet.
        """
        there = self.device if away and not self._use_cuda_graph else None
        batch = measure(self._name, qo, kv, last, page_size, kv_name, away, there)
        self._page_size, self._qo_indptr_last = page_size, batch.total_q
        self._max_q_len, self._max_kv_len = batch.max_q_len, 0 if self._use_cuda_graph else batch.max_kv_len
        self._batch = batch
        return batch

    def _keep_options(
        self,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> None:
        integer(self._name, "window_left", window_left, -1, INT32_MAX)
        self._causal, self._window_left, self._sm_scale = causal, window_left, sm_scale
        # Engines compare it with their own, of which they say 0.0 for none.
        self._logits_soft_cap = logits_soft_cap or 0.0
        self._keep_splits(fixed_split_size, disable_split_kv)

    def _keep_splits(self, fixed_split_size: int | None, disable_split_kv: bool) -> None:
        """Keys of a piece; 0 for what suits the device. A captured graph is compiled for them."""
        pages = -1 if fixed_split_size is None else fixed_split_size
        integer(self._name, "fixed_split_size", pages, -1, INT32_MAX)
        split = NO_SPLIT if disable_split_kv else min(max(pages, 0) * self._page_size, NO_SPLIT)
        if self._use_cuda_graph and self._planned and split != self._split_size:
            fail(
                *(self._name, "fixed_split_size and disable_split_kv", "those of the graph's first plan"),
                f"{fixed_split_size} and {disable_split_kv}",
            )
        self._split_size = split
        if split:
            self._check_room()

    def _keep_dtypes(
        self, q: torch.dtype | str, kv: torch.dtype | str | None, out: torch.dtype | str | None = None
    ) -> None:
        self._cached_q_data_type = dtype_of(self._name, "q_data_type", q)
        self._cached_kv_data_type = dtype_of(self._name, "kv_data_type", q if kv is None else kv)
        self._cached_o_data_type = dtype_of(self._name, "o_data_type", q if out is None else out)
        if self._cached_o_data_type != self._cached_q_data_type:
            fail(self._name, "o_data_type", f"q's, {self._cached_q_data_type}", self._cached_o_data_type)

    @property
    def _options(self) -> Options:
        return Options(self._causal, self._window_left, self._logits_soft_cap, self._sm_scale)

    @property
    def _backend_of_run(self) -> str:
        return "auto" if self._backend in AUTO_NAMES else self._backend

    def _check_run(self, named: dict[str, torch.Tensor], kv: tuple[str, ...]) -> None:
        """What the op cannot know: the plan."""
        for name, t in named.items():
            want = self._cached_kv_data_type if name in kv else self._cached_q_data_type
            want = dtype_of(self._name, name, want)
            if isinstance(t, torch.Tensor) and t.dtype != want:
                fail(self._name, name, f"of the planned {'kv' if name in kv else 'q'}_data_type {want}", t.dtype)
        q = named["q"]
        if not isinstance(q, torch.Tensor) or q.dim() != 3:
            fail(self._name, "q", "[tokens, heads, head_dim]", describe(q))
        if q.size(2) != self._head_dim_qk:
            fail(self._name, "q", f"of the planned head dimension {self._head_dim_qk}", q.size(2))
        # A graph's queries may be followed by padding.
        if q.size(0) != self._qo_indptr_last and (not self._use_cuda_graph or q.size(0) < self._qo_indptr_last):
            fail(self._name, "q", f"of {self._qo_indptr_last} rows as planned", q.size(0))

    def _attend(
        self,
        call: Callable[..., None],
        q: torch.Tensor,
        tensors: tuple[torch.Tensor | str | None, ...],
        dim_vo: int,
        options: Options,
        scales: tuple[float, float, float],
        sinks: torch.Tensor | None,
        results: Results,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run an op. The scale of keys is one of scores, as that of queries; it may stand for no quantisation."""
        q_scale, k_scale, v_scale = scales
        sm_scale = q.size(2) ** -0.5 if options.sm_scale is None else float(options.sm_scale)
        out, lse = results.allocate(q, dim_vo)
        into = [out, lse]
        if self._use_cuda_graph and q.device.type == "cpu":
            # On the host nothing is captured, and what pads the queries of a graph can be left out.
            q, *into = (t[: self._qo_indptr_last] for t in (q, out, lse))
        call(
            *(q, *tensors, options.causal, sm_scale * q_scale * k_scale, options.window_left),
            *(options.logits_soft_cap, 1.0, v_scale, sinks, self._custom_mask_buf, self._mask_indptr_buf),
            *(results.needs_lse, self._fixed_q_len if self._split_size else self._max_q_len, self._max_kv_len),
            *(self._split_size, self._scratch(), *into),
            backend=self._backend_of_run,
        )
        return results.returned(out, lse)
