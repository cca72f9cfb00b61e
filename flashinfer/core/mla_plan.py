# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of an MLA batch: its work cut into pieces of about equal cost, on the host, in one piece of memory.

The cutting itself is csrc_rocm/kernels_cpu/mla_plan.cc, which also says what is in a schedule.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from flashinfer.core.checks import fail
from flashinfer.core.errors import InvalidArgumentError

OP = "mla_paged_attention"
_ANY = 2**62
_SENTENCES = {
    1: "qo_indptr[0] must be 0, got {value}",
    2: "qo_indptr must not fall, got {value} after {bound} at request {where}",
    3: "kv_indptr[0] must be 0, got {value}",
    4: "kv_indptr must not fall, got {value} after {bound} at request {where}",
    5: "kv_len_arr must not be negative, got {value} for request {where}",
    6: "kv_indptr must give each request ceil(kv_len / page_size) pages, got {bound} pages for the {value} tokens of "
    "request {where}",
    7: "the schedule must fit into {value} words, got {bound}; give fewer requests to a plan",
    8: "qo_indptr, kv_indptr and kv_len_arr must be numbers of 32 bits, got {value}",
}


class Shape(NamedTuple):
    """How a batch is cut: rows (query tokens times heads) of an item, and lists of items.

    `parts` programs, one for each block of rows that the heads of a token fill, walk a worker's list together: they
    read the same keys at the same time, and all but one find them in the cache.
    """

    rows_per_item: int
    workers: int
    parts: int

    @property
    def schedule_words(self) -> int:
        """Words of a schedule without items."""
        return self.workers + 1 + 5 * self.workers

    @property
    def partial_rows(self) -> int:
        """Rows of partial results: a cut makes two slots at most."""
        return 2 * self.workers * self.parts * self.rows_per_item

    def scratch_elements(self, head_dim: int) -> int:
        """float32 elements of partial results and their LSE."""
        return self.partial_rows * (head_dim + 1)


@functools.cache
def shapes_for(heads: int, device: torch.device) -> tuple[Shape, ...]:
    """How to cut batches on a device, from those of few rows to all; the programs of all workers fill it once."""
    found = []
    for rows in (16, 32, 64):
        parts = -(-heads // rows)
        # Two small programs share a compute unit: one loads while the other computes. Measured on an H200, 32 heads,
        # batch 32 of 32k keys: 405 us instead of 474.
        per_unit = 1 if rows == 64 else 2
        found.append(Shape(rows, max(1, per_unit * _programs(device) // parts), parts))
    return tuple(found)


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that a device runs at once, one on a compute unit; in the interpreter, enough to have cuts."""
    if device.type != "cuda":
        return 6
    return torch.cuda.get_device_properties(device).multi_processor_count


class HostPlan(NamedTuple):
    """A plan in host memory, ready for one copy.

    Attributes
    ----------
    memory, size
        int32 words that the plan is at the beginning of, and how many it is: qo_indptr, kv_indptr, kv_len and last
        page lengths, then the schedule. Pinned if it goes to a GPU; whole blocks of 256 words, so that the plans of a
        server, which differ little, are copied as one size.
    schedule_at
        Where the schedule begins.
    total_q, total_pages, total_kv, max_q_len
        Sums and the maximum over the batch.
    shape
        How the batch is cut.
    has_unseen
        Whether a request has more queries than keys.
    """

    memory: torch.Tensor
    size: int
    batch: int
    schedule_at: int
    total_q: int
    total_pages: int
    total_kv: int
    max_q_len: int
    shape: Shape
    has_unseen: bool

    @property
    def words(self) -> torch.Tensor:
        """The plan alone."""
        return self.memory.narrow(0, 0, self.size)

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have as many queries."""
        return self.total_q == self.batch * self.max_q_len

    @staticmethod
    def schedule_offset(batch: int) -> int:
        """Where the schedule of a batch begins: behind the metadata, on a multiple of 64 bytes."""
        return -(-(4 * batch + 2) // 16) * 16

    def split(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`(qo_indptr, kv_indptr, kv_len, last_page_len, schedule)` as views of the plan, or of a copy of it.

        Apart from the end of the schedule, which nobody asks for, they depend on the size of the batch alone.
        """
        batch, at = self.batch, self.schedule_at
        gap = at - 4 * batch - 2
        parts = words.split_with_sizes((batch + 1, batch + 1, batch, batch, gap, words.numel() - at))
        return (*parts[:4], parts[5])


def plan(
    metadata: Sequence[torch.Tensor],
    heads: int,
    page_size: int,
    causal: bool,
    shapes: Sequence[Shape],
    device: torch.device,
    *,
    op: str = OP,
) -> HostPlan:
    """Check a batch and cut it.

    Parameters
    ----------
    metadata
        qo_indptr, kv_indptr and kv_len in host memory.
    heads, page_size, causal
        Of the attention.
    shapes
        Ways to cut: the first whose one item holds all rows of a request is taken, else the last.
    device
        Where the plan will be copied.
    op
        Who is speaking in an error.

    Raises
    ------
    InvalidArgumentError
        If a request contradicts its pages, naming the request, or a number does not fit.
    """
    batch = metadata[2].numel()
    at = HostPlan.schedule_offset(batch)
    # Enough for one query a request; for others the planner takes what it then needs.
    flat, room = _flat(tuple(shapes))
    numbers, memory = _native().planner()(
        *(*metadata, heads, page_size, causal, flat, at, 8 * batch + room, device.type == "cuda")
    )
    fault, where, value, bound, used, max_q_len, total_kv, total_q, total_pages, index, unseen = numbers
    if fault:
        _refuse(op, fault, where, value, bound)
    totals = total_q, total_pages, total_kv, max_q_len
    return HostPlan(memory, at + used, batch, at, *totals, shapes[index], unseen > 0)


@functools.cache
def _flat(shapes: tuple[Shape, ...]) -> tuple[list[int], int]:
    """As csrc_rocm/kernels/mla_plan.h has them, and the words that a schedule by any of them needs besides requests."""
    most = [s.rows_per_item for s in shapes[:-1]] + [_ANY]
    flat = [n for m, s in zip(most, shapes, strict=True) for n in (m, s.rows_per_item * s.parts, s.workers)]
    return flat, max(s.schedule_words + 16 * s.workers for s in shapes)


def check(qo_indptr: Sequence[int], kv_indptr: Sequence[int], kv_len: Sequence[int], page_size: int) -> None:
    """The rules of csrc_rocm/kernels_cpu/mla_plan.cc, for who has no plan."""
    for fault, indptr in ((1, qo_indptr), (3, kv_indptr)):
        if indptr[0] != 0:
            _refuse(OP, fault, 0, indptr[0], 0)
    for b, length in enumerate(kv_len):
        pages = kv_indptr[b + 1] - kv_indptr[b]
        if qo_indptr[b + 1] < qo_indptr[b]:
            _refuse(OP, 2, b, qo_indptr[b + 1], qo_indptr[b])
        if pages < 0:
            _refuse(OP, 4, b, kv_indptr[b + 1], kv_indptr[b])
        if length < 0:
            _refuse(OP, 5, b, length, 0)
        if pages != -(-length // page_size):
            _refuse(OP, 6, b, length, pages)


def require(total_q: int, total_pages: int, rows: int, indices: int, op: str = OP) -> None:
    """Refuse metadata of other queries than `rows`, or of more pages than `indices`."""
    if total_q != rows:
        fail(op, "qo_indptr[-1]", f"{rows}, q's rows", total_q)
    if total_pages > indices:
        fail(op, "kv_indices", f"of the {total_pages} entries that kv_indptr names", indices)


def _refuse(op: str, fault: int, where: int, value: int, bound: int) -> NoReturn:
    raise InvalidArgumentError(f"{op}: {_SENTENCES[fault].format(where=where, value=value, bound=bound)}")


@functools.cache
def _native() -> Any:
    """By name, as an op loads its backends: this layer imports none."""
    return importlib.import_module("flashinfer.backends.native.mla")


# Looked up once: the view is wanted at every call.
_is_compiling = torch.compiler.is_compiling
_OUTSIDE = "the call must be outside of torch.compile(fullgraph=True), as the answer depends on where the caches lie"
_view_op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None


def mla_kv_view(ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> torch.Tensor | None:
    """One view of two adjacent caches, or None; see `flashinfer.mla.mla_kv_view`."""
    global _view_op
    if _is_compiling():
        # Nothing that a graph is guarded on says whether two of its inputs are one buffer. To the compiler this is
        # where a graph ends; the call is then made between two of them.
        raise InvalidArgumentError(f"mla_kv_view: {_OUTSIDE}")
    op = _view_op
    if op is None:
        # A global and not a cached function: the compiler traces into those, and cannot import a module.
        op = _view_op = _native().mla_kv_view_op()
    return op(ckv_cache, kpe_cache)
