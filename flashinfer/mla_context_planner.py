# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The chunks of a step's contexts, public as `flashinfer.mla_context.MlaContextPlanner`."""

from __future__ import annotations

import functools
import importlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from flashinfer.core.checks import INDEX_DTYPES, INT32_MAX, describe, fail, integer
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.core.metadata import on_host
from flashinfer.core.op import STEP
from flashinfer.ops import mla_context as ops

PLANNER = "MlaContextPlanner"
_LENGTHS = "a list, or a 1-D int32 or int64 tensor"
# csrc_rocm/shims/mla_context_plan.cc: numbers of a plan, and which of a chunk's is a truth value.
_PLAN_NUMBERS, _CONTINUES = 9, 3
_SENTENCES = {
    1: "context_lens must not be negative, got {value} for request {where}",
    2: "qo_indptr[0] must be 0, got {value}",
    3: "qo_indptr must not fall, got {value} after {bound} at request {where}",
    4: "chunk_tokens must be at least a page, {bound} tokens, got {value}; pass a larger workspace",
    5: "context_lens must sum up to at most {bound} tokens, got {value}; give fewer requests to a step",
    6: "qo_indptr must be at most {bound}, got {value} at request {where}",
}

Record = TypeVar("Record", bound=tuple[Any, ...])


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
    """

    first: int
    requests: int
    tokens: int
    continues: bool
    q_begin: int
    q_end: int
    max_q_len: int
    max_kv_len: int


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


class MlaContextPlan(NamedTuple):
    """The chunks of one step, for all of its layers. Made by `MlaContextPlanner.plan`.

    Attributes
    ----------
    steps
        In the order in which they are to be attended to; empty if no request has a context.
    qo_indptr
        int32 `[requests + 1]` on the device, where the queries of all requests begin.
    batch, queries, tokens, max_q_len
        Requests, their new tokens, those of their contexts, and the longest query.
    page_size, num_pages
        Of the caches that the plan is for.
    """

    steps: tuple[MlaContextStep, ...]
    qo_indptr: torch.Tensor
    batch: int
    queries: int
    tokens: int
    max_q_len: int
    page_size: int
    num_pages: int

    @property
    def chunks(self) -> tuple[MlaContextChunk, ...]:
        """What each step holds."""
        return tuple(step.chunk for step in self.steps)


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
        named = ("qo_indptr", qo_indptr), ("context_lens", context_lens)
        qo, lens = on_host(*(_lengths(name, values, self.device) for name, values in named))
        batch = lens.numel()
        if qo.numel() != batch + 1:
            fail(PLANNER, "qo_indptr", f"of length {batch + 1}, one more than context_lens", qo.numel())
        self._check_tables(block_tables, batch)
        integer(PLANNER, "num_pages", num_pages, 0, INT32_MAX)
        numbers, parts = _native()(qo, lens, self.chunk_tokens, self.page_size, self.device)
        fault, where, value, bound, _, tokens, longest, max_q_len, queries = numbers[:_PLAN_NUMBERS]
        if fault:
            _refuse(fault, where, value, bound)
        self._check_columns(block_tables, longest)
        there, requests, starts, indptr, rows, *of_chunks = parts
        if tokens:
            sizes = num_pages, self.page_size
            ops.mla_context_indices(block_tables, requests, starts, indptr, *sizes, rows, backend=f"{STEP}auto")
        steps = _made(MlaContextStep, _chunks(numbers), of_chunks[::3], of_chunks[1::3], of_chunks[2::3])
        return MlaContextPlan(tuple(steps), there, batch, queries, tokens, max_q_len, self.page_size, num_pages)

    def _check_tables(self, block_tables: torch.Tensor, batch: int) -> None:
        if not isinstance(block_tables, torch.Tensor) or block_tables.dim() != 2 or block_tables.size(0) < batch:
            fail(PLANNER, "block_tables", f"[>= {batch}, columns], a row for each request", describe(block_tables))
        if block_tables.device != self.device:
            fail(PLANNER, "block_tables", f"on {self.device}", block_tables.device)

    def _check_columns(self, block_tables: torch.Tensor, longest: int) -> None:
        columns = -(-longest // self.page_size)
        if block_tables.size(1) < columns:
            want = f"of {columns} columns at least, for a context of {longest} tokens"
            fail(PLANNER, "block_tables", want, block_tables.size(1))


def _lengths(name: str, values: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in INDEX_DTYPES:
            fail(PLANNER, name, _LENGTHS, describe(values))
        if not values.is_cpu and values.device != device:
            fail(PLANNER, name, f"on the host or on {device}", values.device)
        return values.contiguous()
    # The array would take them for its memory.
    if isinstance(values, (bytes, bytearray)):
        fail(PLANNER, name, _LENGTHS, describe(values))
    try:
        # Takes integers only, and a third of the time that torch's own conversion does.
        listed = array("q", values)
    except (OverflowError, TypeError) as e:
        raise InvalidArgumentError(f"{PLANNER}: {name} must be {_LENGTHS}, got {type(values).__name__}: {e}") from e
    # On the host, whatever device is the default.
    return torch.frombuffer(listed, dtype=torch.int64) if listed else torch.empty(0, dtype=torch.int64, device="cpu")


def _chunks(numbers: list[int]) -> Iterator[MlaContextChunk]:
    """From the plan's numbers, which have them by columns."""
    count = (len(numbers) - _PLAN_NUMBERS) // len(MlaContextChunk._fields)
    if not count:
        return iter(())
    columns: list[Iterable[int]] = [numbers[at : at + count] for at in range(_PLAN_NUMBERS, len(numbers), count)]
    columns[_CONTINUES] = map(bool, columns[_CONTINUES])
    return _made(MlaContextChunk, *columns)


def _made(kind: type[Record], *columns: Iterable[Any]) -> Iterator[Record]:
    """Named tuples from their columns, at a third of what calls of the class take: a plan has dozens of them."""
    return map(functools.partial(tuple.__new__, kind), zip(*columns, strict=True))


def _refuse(fault: int, where: int, value: int, bound: int) -> NoReturn:
    raise InvalidArgumentError(f"{PLANNER}: {_SENTENCES[fault].format(where=where, value=value, bound=bound)}")


@functools.cache
def _native() -> Callable[..., tuple[list[int], list[torch.Tensor]]]:
    """By name, as an op loads its backends: this layer imports none."""
    found: Callable[..., tuple[list[int], list[torch.Tensor]]]
    found = importlib.import_module("flashinfer.backends.native.plan").planner("mla_context_plan")
    return found
