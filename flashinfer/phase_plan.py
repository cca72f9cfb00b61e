# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a phase-aware batch: what each phase's launches need to know, in one piece of memory."""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass

import torch

from flashinfer.core.checks import fail
from flashinfer.core.chunks import Chunk, plan_chunks
from flashinfer.phases import PhaseSplit, split_checked

# Words to 16 bytes: Triton compiles a kernel anew for a pointer that is aligned to less.
_ALIGNMENT = 4
_NONE = slice(0, 0)


@dataclass(frozen=True)
class ChunkLaunch:
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


@dataclass(frozen=True)
class BatchPlan:
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


@functools.cache
def _gap(words: int) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32)


class _Words:
    """Words of a plan as they come: tensors first, then lists."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.lists = array("i")
        self.lists_begin = 0

    def put_tensor(self, values: torch.Tensor) -> slice:
        at, count = self.lists_begin, values.numel()
        gap = -count % _ALIGNMENT
        self.parts += (values, _gap(gap))
        self.lists_begin = at + count + gap
        return slice(at, at + count)

    def put_list(self, values: list[int]) -> slice:
        at = self.lists_begin + len(self.lists)
        self.lists.extend(values)
        self.lists.extend([0] * (-len(values) % _ALIGNMENT))
        return slice(at, at + len(values))

    def joined(self, pinned: bool) -> torch.Tensor:
        # One call for all tensors. Going through lists took longer than all of the rest of a plan.
        words = torch.empty(self.lists_begin + len(self.lists), dtype=torch.int32, pin_memory=pinned)
        if self.lists:
            self.parts.append(torch.frombuffer(self.lists, dtype=torch.int32))
        return torch.cat(self.parts, out=words)


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
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    for name, first in (("qo_indptr", qo[0]), ("kv_indptr", kv[0])):
        if first:
            fail(op, f"{name}[0]", "0", first)
    queries, computed = _lengths(op, qo_indptr, kv_indptr, last_page_len, page_size)
    split = split_checked(queries, computed, decode_threshold)
    d, e = split.num_decodes, split.num_decodes + split.num_extends
    prefill_row = split.num_decode_tokens + split.num_extend_tokens
    extend_rows = [row - split.num_decode_tokens for row in qo[d : e + 1]]
    chunks = [] if budget is None else plan_chunks(op, computed[d:e], budget, page_size)
    if widen:
        chunks = [_widened(chunk, e - d) for chunk in chunks]
    if launches is not None:
        if len(chunks) > launches:
            fail(op, "the context of extends", f"of {launches} chunks, as captured", len(chunks), "capture it again")
        chunks += [Chunk(0, [0] * (e - d), [0] * (e - d), False)] * (launches - len(chunks))
    words = _Words()
    extend_pages_qo, extend_qo = _phase_qo(words, qo_indptr, d, e, split.num_decode_tokens)
    prefill_pages_qo, prefill_qo = _phase_qo(words, qo_indptr, e, len(queries), prefill_row)
    return BatchPlan(
        split=split,
        kv_indptr=words.put_tensor(kv_indptr),
        last_page_len=words.put_tensor(last_page_len),
        decode_qo=words.put_tensor(qo_indptr[: d + 1]),
        extend_qo=extend_qo,
        prefill_qo=prefill_qo,
        extend_pages_qo=extend_pages_qo,
        prefill_pages_qo=prefill_pages_qo,
        max_q_lens=(max(queries[:d], default=0), max(queries[d:e], default=0), max(queries[e:], default=0)),
        total_q=qo[-1],
        total_pages=kv[-1],
        # A captured launch keeps its shape; on the host there are none, and what is read must be what was fetched.
        chunks=_launches(words, chunks, d, extend_rows, budget if widen and pinned else None),
        words=words.joined(pinned),
    )


def _phase_qo(words: _Words, qo_indptr: torch.Tensor, first: int, last: int, row: int) -> tuple[slice, slice]:
    """Queries of the requests from `first` on, counted from `row`: with all requests before them, which have none in
    this phase, and by themselves."""
    if first == last:
        return _NONE, _NONE
    counted = (qo_indptr[: last + 1] - row).clamp_min_(0)
    return words.put_tensor(counted), words.put_tensor(counted[first:])


def _lengths(
    op: str, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> tuple[list[int], list[int]]:
    """New tokens, and those before them, of each request."""
    new, held = qo_indptr.diff(), kv_indptr.diff()
    cached = last_page_len.sub(new).add_(held, alpha=page_size).sub_(page_size)
    queries, pages, computed, tails = new.tolist(), held.tolist(), cached.tolist(), last_page_len.tolist()
    if not queries:
        return [], []
    if 0 in pages:
        computed = [c if count else -q for c, count, q in zip(computed, pages, queries, strict=True)]
    if min(min(queries), min(pages), min(computed), min(tails), page_size - max(tails)) < 0:
        _refuse(op, queries, pages, tails, computed, page_size)
    return queries, computed


def _launches(
    words: _Words, chunks: list[Chunk], first: int, qo: list[int], tokens: int | None
) -> tuple[ChunkLaunch, ...]:
    """Launches of chunks; `first` is the first extend, `qo` where the extends' queries begin, `tokens` what each launch
    may read if not just what it fetches."""
    found = []
    for chunk in chunks:
        begin, end = chunk.first, chunk.first + len(chunk.lengths)
        rows = slice(qo[begin], qo[end])
        found.append(
            ChunkLaunch(
                requests=slice(first + begin, first + end),
                rows=rows,
                tokens=chunk.tokens if tokens is None else tokens,
                starts=words.put_list(chunk.starts),
                kv_indptr=words.put_list(chunk.indptr),
                qo_indptr=words.put_list([row - rows.start for row in qo[begin : end + 1]]),
            )
        )
    return tuple(found)


def _widened(chunk: Chunk, extends: int) -> Chunk:
    """The chunk with all extends in it, those that take no part with pieces of length 0."""
    before, behind = [0] * chunk.first, [0] * (extends - chunk.first - len(chunk.lengths))
    return Chunk(0, before + chunk.starts + behind, before + chunk.lengths + behind, chunk.continues)


def _refuse(
    op: str, queries: list[int], pages: list[int], tails: list[int], computed: list[int], page_size: int
) -> None:
    """Say which request contradicts itself."""
    for b, (new, count, tail, cached) in enumerate(zip(queries, pages, tails, computed, strict=True)):
        if new < 0:
            fail(op, "qo_indptr", "non-decreasing", f"{new} tokens for request {b}")
        if count < 0:
            fail(op, "kv_indptr", "non-decreasing", f"{count} pages for request {b}")
        if not 0 <= tail <= page_size:
            fail(op, f"kv_last_page_len[{b}]", f"in [0, {page_size}]", tail)
        if cached < 0:
            fail(
                op,
                f"the pages of request {b}",
                f"of at least its {new} new tokens",
                f"{cached + new} tokens",
                "append them before the plan, or give the page table with them",
            )
