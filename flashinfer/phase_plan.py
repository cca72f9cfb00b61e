# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a phase-aware batch: what each phase's launches need to know, in one piece of memory."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch

from flashinfer.core.checks import INT32_MAX, fail
from flashinfer.phases import PhaseSplit

# csrc_rocm/kernels/phase_plan.h, as csrc_rocm/shims/phase_plan.cc flattens it.
_REPORT, _SIZES, _SPANS, _LAUNCH_NUMBERS = 4, 11, 7, 11
_QO_START, _KV_START, _QO_FALLS, _KV_FALLS, _TAIL, _PAGES, _BUDGET, _LAUNCHES, _RANGE = range(1, 10)


class ChunkLaunch(NamedTuple):
    """One fetch, and the attention over what it brought.

    Attributes
    ----------
    requests
        The extends that take part, numbered among the batch's requests.
    rows
        Their query rows, numbered among those of the extends.
    tokens
        Rows of the workspace that the launch may read.
    starts, kv_indptr, qo_indptr
        Where the metadata are among the plan's words; `kv_indptr` counts rows of the workspace.
    """

    requests: slice
    rows: slice
    tokens: int
    starts: slice
    kv_indptr: slice
    qo_indptr: slice


class BatchPlan(NamedTuple):
    """A plan in host memory; slices say where things are in `words`.

    Attributes
    ----------
    words
        int32, to be copied to the device in one piece.
    split
        The phases.
    kv_indptr, last_page_len
        The page table of the whole batch.
    decode_qo, extend_qo, prefill_qo
        Each phase's queries, counted from its own first row.
    extend_pages_qo, prefill_pages_qo
        The same with the requests before the phase as requests without queries, for attention that goes through the
        page table: a page table begins with entry 0.
    max_q_lens
        Longest query of decodes, extends and prefills.
    total_q, total_pages
        Rows of queries, and entries of the page table.
    chunks
        How the extends' context is fetched.
    """

    words: torch.Tensor
    split: PhaseSplit
    kv_indptr: slice
    last_page_len: slice
    decode_qo: slice
    extend_qo: slice
    prefill_qo: slice
    extend_pages_qo: slice
    prefill_pages_qo: slice
    max_q_lens: tuple[int, int, int]
    total_q: int
    total_pages: int
    chunks: tuple[ChunkLaunch, ...]


def plan_batch(
    op: str,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    decode_threshold: int,
    budget: int | None,
    *,
    widen: bool = False,
    launches: int | None = None,
    pinned: bool = False,
) -> BatchPlan:
    """Plan a batch.

    Parameters
    ----------
    op
        Who is speaking in an error.
    qo_indptr, kv_indptr, last_page_len
        As in `flashinfer.paged_attention`, on the host.
    page_size
        Tokens to a page.
    decode_threshold
        New tokens that a decode may have.
    budget
        Tokens of context that the workspace holds; None if none is to be fetched.
    widen
        Whether each launch takes all extends and the whole workspace, whatever it fetches, as in a captured graph.
    launches
        Launches that there must be, those that fetch nothing included; as many as there are chunks if None.
    pinned
        Whether the words will be copied to a GPU.

    Raises
    ------
    InvalidArgumentError
        If lengths contradict each other, naming the request; if the workspace holds no page; if a graph has too few
        launches.
    """
    numbers, words = _native()(
        *(qo_indptr, kv_indptr, last_page_len, page_size, decode_threshold),
        *(-1 if budget is None else budget, -1 if launches is None else launches, widen, pinned),
    )
    if numbers[0]:
        _refuse(op, page_size, *numbers[:_REPORT])
    spans_at, launches_at = _REPORT + _SIZES, _REPORT + _SIZES + 2 * _SPANS
    *sizes, total_q, total_pages = numbers[_REPORT:spans_at]
    # A captured launch keeps its shape; on the host there are none, and what is read must be what was fetched.
    tokens = budget if widen and pinned else None
    chunks = [
        _launch(numbers[at : at + _LAUNCH_NUMBERS], tokens) for at in range(launches_at, len(numbers), _LAUNCH_NUMBERS)
    ]
    kv, last, decode, extend, prefill, extend_pages, prefill_pages = _slices(numbers[spans_at:launches_at])
    return BatchPlan(
        words=words,
        split=PhaseSplit(*sizes[:6]),
        kv_indptr=kv,
        last_page_len=last,
        decode_qo=decode,
        extend_qo=extend,
        prefill_qo=prefill,
        extend_pages_qo=extend_pages,
        prefill_pages_qo=prefill_pages,
        max_q_lens=(sizes[6], sizes[7], sizes[8]),
        total_q=total_q,
        total_pages=total_pages,
        chunks=tuple(chunks),
    )


def _slices(ends: list[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in zip(ends[::2], ends[1::2], strict=True)]


def _launch(numbers: list[int], tokens: int | None) -> ChunkLaunch:
    *before, fetched = numbers[:5]
    (requests, rows), (starts, kv, qo) = _slices(before), _slices(numbers[5:])
    return ChunkLaunch(requests, rows, fetched if tokens is None else tokens, starts, kv, qo)


def _refuse(op: str, page_size: int, fault: int, where: int, value: int, bound: int) -> NoReturn:
    """Say which request contradicts itself, or what does not fit."""
    if fault in (_QO_START, _KV_START):
        fail(op, "qo_indptr[0]" if fault == _QO_START else "kv_indptr[0]", "0", value)
    if fault == _QO_FALLS:
        fail(op, "qo_indptr", "non-decreasing", f"{value} tokens for request {where}")
    if fault == _KV_FALLS:
        fail(op, "kv_indptr", "non-decreasing", f"{value} pages for request {where}")
    if fault == _TAIL:
        fail(op, f"kv_last_page_len[{where}]", f"in [0, {page_size}]", value)
    if fault == _BUDGET:
        fail(op, "the chunk budget", f"at least a page, {page_size} tokens", value, "pass a larger workspace")
    if fault == _LAUNCHES:
        fail(op, "the context of extends", f"of {bound} chunks, as captured", value, "capture it again")
    if fault == _RANGE:
        fail(op, f"counts of queries, pages and tokens up to request {where}", f"at most {INT32_MAX}", value)
    remedy = "append them before the plan, or give the page table with them"
    fail(op, f"the pages of request {where}", f"of at least its {bound} new tokens", f"{value} tokens", remedy)


@functools.cache
def _native() -> Callable[..., tuple[list[int], torch.Tensor]]:
    """By name, as an op loads its backends: this layer imports none."""
    found: Callable[..., tuple[list[int], torch.Tensor]]
    found = importlib.import_module("flashinfer.backends.native.plan").planner("phase_plan")
    return found
