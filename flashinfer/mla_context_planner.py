# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The chunks of a step's contexts, public as `flashinfer.mla_context.MlaContextPlanner`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from flashinfer.core import mla_plan
from flashinfer.core.checks import INDEX_DTYPES, INT32_MAX, describe, fail, integer
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.ops import mla_context as ops

PLANNER = "MlaContextPlanner"
# csrc_rocm/kernels/mla_context_plan.h
_CHUNK_WORDS, _REPORT_WORDS, _SHORT = 10, 10, 6
_SENTENCES = {
    1: "context_lens must not be negative, got {value} for request {where}",
    2: "qo_indptr[0] must be 0, got {value}",
    3: "qo_indptr must not fall, got {value} after {bound} at request {where}",
    4: "chunk_tokens must be at least a page, {bound} tokens, got {value}; pass a larger workspace",
    5: "context_lens must sum up to at most {bound} tokens, got {value}; give fewer requests to a step",
}


class MlaContextChunk(NamedTuple):
    """Pieces of the contexts of consecutive requests that are multiplied up and attended to together.

    Attributes
    ----------
    first, requests
        The first request, and how many there are; those between that have no context have an empty piece.
    tokens
        Of all pieces; at most the planner's `chunk_tokens`.
    continues
        Whether the first request's piece continues that of the chunk before: the rows of its queries hold a result
        already. All other pieces are the first of their requests.
    q_begin, q_end
        Rows of the queries of these requests.
    max_q_len, max_kv_len
        The longest query and the longest piece.
    indptrs_at, token_begin
        Where in the plan's memory its index tensors begin, and its tokens among those of all chunks.
    """

    first: int
    requests: int
    tokens: int
    continues: bool
    q_begin: int
    q_end: int
    max_q_len: int
    max_kv_len: int
    indptrs_at: int
    token_begin: int


class MlaContextStep(NamedTuple):
    """A chunk with the index tensors that its kernels read, on the device.

    Attributes
    ----------
    chunk
        What it holds.
    qo_indptr, kv_indptr
        int32 `[requests + 1]`: where each request's queries begin, counted from `chunk.q_begin`, and where its piece.
    kv_indices
        int32 `[tokens]`: rows of the cache, which are page ids if it is viewed as pages of one token.
    """

    chunk: MlaContextChunk
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor


class MlaContextPlan:
    """The chunks of one step, for all of its layers. Made by `MlaContextPlanner.plan`.

    Attributes
    ----------
    chunks
        In the order in which they are to be attended to; empty if no request has a context.
    qo_indptr
        int32 `[requests + 1]` on the device, where the queries of all requests begin.
    batch, tokens, max_q_len
        Requests, context tokens and the longest query of the step.
    page_size, num_pages
        Of the caches that the plan is for.
    """

    def __init__(
        self,
        chunks: tuple[MlaContextChunk, ...],
        qo_indptr: torch.Tensor,
        words: torch.Tensor,
        kv_indices: torch.Tensor,
        geometry: tuple[int, int],
        max_q_len: int,
    ) -> None:
        self.chunks = chunks
        self.qo_indptr = qo_indptr
        self.batch = qo_indptr.numel() - 1
        self.tokens = kv_indices.numel()
        self.max_q_len = max_q_len
        self.page_size, self.num_pages = geometry
        self._words, self._kv_indices = words, kv_indices

    @functools.cached_property
    def steps(self) -> tuple[MlaContextStep, ...]:
        """The chunks with their index tensors, which are views of what the plan brought to the device."""
        if not self.chunks:
            return ()
        # One call for all views: one by one they would cost more than the cutting.
        sizes = [size for chunk in self.chunks for size in (chunk.requests + 1, chunk.requests + 1)]
        indptrs = self._words[self.chunks[0].indptrs_at :].split_with_sizes(sizes)
        indices = self._kv_indices.split_with_sizes([chunk.tokens for chunk in self.chunks])
        return tuple(map(MlaContextStep, self.chunks, indptrs[::2], indptrs[1::2], indices))


class MlaContextPlanner:
    """Cuts the contexts of a step into chunks that fit a workspace and finds their rows in the cache, for all layers.

    Whole contexts are packed into a chunk while they fit; what does not fit is cut at a multiple of the page size.

    Parameters
    ----------
    chunk_tokens
        Context tokens that the workspace holds.
    page_size
        Tokens of a page.
    device
        Where attention runs.
    dcp_world_size
        Ranks that share a context under decode context parallelism. Only 1 is supported.

    Raises
    ------
    InvalidArgumentError
        For sizes that are not positive, and for a `dcp_world_size` other than 1.
    """

    def __init__(
        self, chunk_tokens: int, page_size: int, device: torch.device | str, *, dcp_world_size: int = 1
    ) -> None:
        integer(PLANNER, "chunk_tokens", chunk_tokens, 0, INT32_MAX)
        integer(PLANNER, "page_size", page_size, 1, INT32_MAX)
        if dcp_world_size != 1:
            fail(
                PLANNER,
                "dcp_world_size",
                "1: with more, a rank's cache holds a part of each context, interleaved, and keys are gathered from "
                "all ranks before they are attended to",
                dcp_world_size,
                "keep the engine's own path",
            )
        self.chunk_tokens, self.page_size = int(chunk_tokens), int(page_size)
        # With its index: "cuda" is no tensor's device.
        self.device = torch.empty(0, device=device).device

    def plan(
        self,
        qo_indptr: torch.Tensor | Sequence[int],
        context_lens: torch.Tensor | Sequence[int],
        block_tables: torch.Tensor,
        num_pages: int,
    ) -> MlaContextPlan:
        """Cut a step's contexts; waits for nothing if lengths are on the host.

        Parameters
        ----------
        qo_indptr
            `[batch_size + 1]`, where each request's new tokens begin; a tensor, int32 or int64, or a list.
        context_lens
            `[batch_size]`, tokens of each request that are in the cache already; likewise.
        block_tables
            `[batch_size, columns]` int32 or int64 on the device, page ids of each request; entries behind its pages are
            not looked at. May be longer than the batch.
        num_pages
            Of the cache.

        Returns
        -------
        MlaContextPlan
            The chunks, with the device's part of them on its way.

        Raises
        ------
        InvalidArgumentError
            For lengths that make no batch, block tables without a row for each request or a column for each page, a
            context that is to be cut where `chunk_tokens` is less than a page, and more rows than int32 counts. A page
            id out of range is reported as by `mla_context_indices`.
        """
        qo, lens = _lengths("qo_indptr", qo_indptr), _lengths("context_lens", context_lens)
        if qo.numel() != lens.numel() + 1:
            fail(PLANNER, "qo_indptr", f"of length {lens.numel() + 1}, one more than context_lens", qo.numel())
        metadata = mla_plan.on_host(qo, lens)
        batch = lens.numel()
        words, table, report = self._cut(metadata)
        _, _, _, _, used, chunks, pieces, tokens, longest, max_q_len = report
        self._check_tables(block_tables, batch, longest)
        there = words[:used].to(self.device, non_blocking=True)
        kv_indices = torch.empty(tokens, dtype=torch.int32, device=self.device)
        if tokens:
            _, *parts = there[: batch + 2 + 3 * pieces].split_with_sizes((batch + 1, pieces, pieces, pieces + 1))
            ops.mla_context_indices(block_tables, *parts, num_pages, self.page_size, kv_indices)
        rows = table[: _CHUNK_WORDS * chunks].view(chunks, _CHUNK_WORDS).tolist()
        geometry = self.page_size, num_pages
        return MlaContextPlan(tuple(map(_chunk, rows)), there[: batch + 1], there, kv_indices, geometry, max_q_len)

    def _cut(self, metadata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """`(words, chunks, report)` of csrc_rocm/kernels/mla_context_plan.h."""
        batch = metadata.numel() // 2
        report = torch.empty(_REPORT_WORDS, dtype=torch.int64)
        # Enough for 64 chunks, else what the first try asks for.
        words_size, chunks_size = 6 * batch + 512, 64
        for _ in range(2):
            words = torch.empty(words_size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            chunks = torch.empty(_CHUNK_WORDS * chunks_size, dtype=torch.int64)
            _native().planner().mla_context_plan(metadata, self.chunk_tokens, self.page_size, words, chunks, report)
            found = report.tolist()
            if found[0] != _SHORT:
                break
            words_size, chunks_size = found[4], found[5]
        if found[0]:
            _refuse(found)
        return words, chunks, found

    def _check_tables(self, block_tables: torch.Tensor, batch: int, longest: int) -> None:
        if not isinstance(block_tables, torch.Tensor) or block_tables.dim() != 2 or block_tables.size(0) < batch:
            fail(PLANNER, "block_tables", f"[>= {batch}, columns], a row for each request", describe(block_tables))
        if block_tables.device != self.device:
            fail(PLANNER, "block_tables", f"on {self.device}", block_tables.device)
        columns = -(-longest // self.page_size)
        if block_tables.size(1) < columns:
            want = f"of {columns} columns at least, for a context of {longest} tokens"
            fail(PLANNER, "block_tables", want, block_tables.size(1))


def _lengths(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in INDEX_DTYPES:
            fail(PLANNER, name, "a list, or a 1-D int32 or int64 tensor", describe(values))
        return values
    return torch.tensor(values, dtype=torch.int32)


def _chunk(row: list[int]) -> MlaContextChunk:
    first, requests, tokens, continues, *rest = row
    return MlaContextChunk(first, requests, tokens, bool(continues), *rest)


def _refuse(report: list[int]) -> NoReturn:
    fault, where, value, bound, *_ = report
    raise InvalidArgumentError(f"{PLANNER}: {_SENTENCES[fault].format(where=where, value=value, bound=bound)}")


@functools.cache
def _native() -> Any:
    """By name, as an op loads its backends: this layer imports none."""
    return importlib.import_module("flashinfer.backends.native.mla")
