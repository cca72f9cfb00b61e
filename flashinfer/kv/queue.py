# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions beside the running step: a queue with its own stream, and a handle for each request."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from flashinfer.core import faults
from flashinfer.core.checks import describe, fail, index_vector, integer
from flashinfer.core.errors import InvalidArgumentError, PoolLostError
from flashinfer.kv.format import PageFormat
from flashinfer.kv.lanes import OP, Caches, ConversionHandle, DeviceLane, HostLane, Pool, failed

__all__ = ["ConversionHandle", "ConversionQueue"]

_NAMED_IDS = 16
_MOST_WORKERS = 1024


class ConversionQueue:
    """Converts pages of one pool from `src` to `dst`, request by request, beside whatever else runs.

    In place, or with `sources` from another pool.

    On a GPU the requests run on a stream of the queue's own, in the order of submission, and nothing that `submit` does
    blocks the host or any other stream. On the CPU they run on threads of the queue's own. A request ends for itself:
    what goes wrong with it is told by its handle and by no other.

    Use as a context manager, or call `close()`.

    Parameters
    ----------
    caches, src, dst, allow_inexact
        As `PageConverter` takes them. Checked here, once; the backend is chosen, and what has to be compiled or loaded
        is. The pool must outlive the queue.
    stream
        Where the conversions run, for a pool on a GPU; a new stream by default.
    workers
        Threads, for a pool on the CPU. With one, requests run in the order of submission.
    sources
        The pool to read, as `convert_kv_pages_into` takes it; None to convert in place. It must outlive the queue too.

    Attributes
    ----------
    stream
        The stream in use; None on the CPU.

    Raises
    ------
    InvalidArgumentError
        If formats, tensors, stream or workers do not fit each other.

    Notes
    -----
    For eager code: under `torch.compile`, `submit` is a break in the graph. A GPU's queue uses the native backend
    whatever backend is asked for around it, for the reference backend reads the page ids on the host, which would have
    to wait for the device.

    Examples
    --------
    >>> with ConversionQueue(caches, standard, shuffled) as queue:
    ...     handle = queue.submit(received_block_ids, after=transfer_done)
    ...     ...  # steps of other requests
    ...     if handle.done():
    ...         handle.result()  # raises what went wrong
    """

    def __init__(
        self,
        caches: Caches,
        src: PageFormat,
        dst: PageFormat,
        *,
        allow_inexact: bool = False,
        stream: torch.cuda.Stream | None = None,
        workers: int = 1,
        sources: Caches | None = None,
    ) -> None:
        self._device = _device_of(caches)
        integer(OP, "workers", workers, 1, _MOST_WORKERS)
        self._lane: HostLane | DeviceLane
        if self._device.type != "cpu":
            self._lane = DeviceLane(self._device, stream)
        elif stream is None:
            self._lane = HostLane(workers)
        else:
            fail(OP, "stream", "None for a pool on the CPU", stream)
        self._pool: Pool | None = self._lane.prepare(caches, src, dst, allow_inexact, sources)
        self._lock = threading.Lock()
        self._in_flight: list[tuple[ConversionHandle, frozenset[int]]] = []
        self.stream = self._lane.stream
        # Streams, events and threads are no part of a graph. Here, for it loads the compiler; unbound, for a bound
        # method would keep the queue alive.
        self._eager_submit: Callable[..., ConversionHandle] = torch.compiler.disable(
            ConversionQueue._submit, reason="ConversionQueue is for eager code"
        )

    def submit(
        self,
        block_ids: Sequence[int] | torch.Tensor,
        *,
        after: torch.cuda.Event | None = None,
        source_ids: Sequence[int] | torch.Tensor | None = None,
    ) -> ConversionHandle:
        """Queue the conversion of some pages, which are the queue's until the handle is done.

        Parameters
        ----------
        block_ids
            Distinct ids of the pages: integers, or `[n]` int32 or int64 on the CPU or on the pool's device. On the host
            they are copied, and looked at. On a GPU they are not looked at, for that would wait for the device: the
            tensor must stay as it is until the handle is done, an id out of range is skipped and told by the handle,
            and an id that is listed twice or that another request in flight has is the caller's fault, unseen.
        after
            A recorded event, of the transfer that fills the pages: they are converted once it has happened. Without it,
            the pages must be complete at the call, or what fills them be on the queue's stream. Ids on a GPU must be
            complete with `after` too; without it the request waits for what is now on the current stream.
        source_ids
            Of a queue with `sources`, the page there that becomes each of `block_ids`. Both are on the host then, and
            the pages that are read stay as they are until the handle is done.

        Returns
        -------
        ConversionHandle
            Also of a request that cannot be carried out, which it tells: with an id on the host out of range or listed
            twice, with a pool whose memory was released (`PoolLostError`), or with a closed queue (the same), nothing
            is converted.

        Raises
        ------
        InvalidArgumentError
            If an argument is of the wrong kind, or pages are those of a request in flight; they are named.
        """
        return self._eager_submit(self, block_ids, after, source_ids)

    def _submit(
        self,
        block_ids: Sequence[int] | torch.Tensor,
        after: torch.cuda.Event | None,
        source_ids: Sequence[int] | torch.Tensor | None,
    ) -> ConversionHandle:
        ids = self._ids("block_ids", block_ids)
        with self._lock:
            pool = self._pool
            if pool is None:
                return failed(PoolLostError(f"{OP}: the queue must be open, got a request after close()"))
            listed: frozenset[int] = frozenset()
            if isinstance(ids, list):
                listed = frozenset(ids)
                wrong = _error_in_ids(ids, listed, pool.num_pages)
                if wrong is not None:
                    return failed(wrong)
            read = None
            if pool.num_sources is not None or source_ids is not None:
                read = self._source_ids(source_ids, ids, pool.num_sources)
                bad = [where for where, page in enumerate(read) if not 0 <= page < (pool.num_sources or 0)]
                if bad:
                    where = bad[0]
                    error = (faults.SOURCE_ID_RANGE, where, read[where], pool.num_sources or 0)
                    return failed(faults.error("convert_kv_pages_into", *error))
            self._in_flight = [entry for entry in self._in_flight if not entry[0].done()]
            self._refuse_overlap(listed)
            handle = self._lane.run(pool, ids, after, read)
            self._in_flight.append((handle, listed))
        return handle

    def close(self, wait: bool = True) -> None:
        """Take no more requests and let go of the pool.

        Parameters
        ----------
        wait
            Block until every request has ended. Else requests that wait for a thread end with `PoolLostError`; what
            runs, and all that is on a stream, cannot be called back and ends in its own time.
        """
        with self._lock:
            pool, self._pool = self._pool, None
            in_flight, self._in_flight = self._in_flight, []
        if pool is not None and not wait:
            pool.abandoned = True
        if wait:
            for handle, _ in in_flight:
                handle.wait()
        self._lane.close(wait)

    def __enter__(self) -> ConversionQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _source_ids(
        self, source_ids: Sequence[int] | torch.Tensor | None, ids: list[int] | torch.Tensor, pages: int | None
    ) -> list[int]:
        if source_ids is None or pages is None:
            fail(OP, "source_ids", "given if and only if the queue has sources", describe(source_ids))
        read = self._ids("source_ids", source_ids)
        if not isinstance(ids, list) or not isinstance(read, list):
            fail(OP, "source_ids", "on the host, and block_ids too", f"on {self._device}")
        if len(read) != len(ids):
            fail(OP, "source_ids", f"of block_ids' length {len(ids)}", len(read))
        return read

    def _ids(self, name: str, block_ids: Sequence[int] | torch.Tensor) -> list[int] | torch.Tensor:
        """Ids on the host as a list of our own, ids on a GPU as they are."""
        if isinstance(block_ids, torch.Tensor):
            index_vector(OP, name, block_ids, torch.device("cpu") if block_ids.is_cpu else self._device)
            listed: list[int] = block_ids.tolist() if block_ids.is_cpu else []
            return listed if block_ids.is_cpu else block_ids
        try:
            return list(map(operator.index, block_ids))
        except TypeError:
            fail(OP, name, "integers or a tensor of them", repr(block_ids)[:80])

    def _refuse_overlap(self, ids: frozenset[int]) -> None:
        taken: set[int] = set()
        for _, theirs in self._in_flight:
            if not ids.isdisjoint(theirs):
                taken |= ids & theirs
        if taken:
            named = ", ".join(map(str, sorted(taken)[:_NAMED_IDS])) + (", ..." if len(taken) > _NAMED_IDS else "")
            fail(OP, "block_ids", "of no request in flight", f"[{named}]", "wait for the handle that has them")


def _device_of(caches: Caches) -> torch.device:
    if caches is None:
        fail(OP, "caches", "a list with one entry a layer", None)
    first: object = caches[0] if len(caches) else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if not isinstance(first, torch.Tensor):
        fail(OP, "caches", "tensors or (K plane, V plane) tuples, one a layer", "none" if first is None else first)
    if first.device.type not in ("cpu", "cuda"):
        fail(OP, "caches", "on a GPU or on the CPU", describe(first))
    return first.device


def _error_in_ids(ids: list[int], distinct: frozenset[int], num_pages: int) -> InvalidArgumentError | None:
    """What a kernel would report of ids on the CPU."""
    if ids and (min(ids) < 0 or max(ids) >= num_pages):
        where = next(i for i, block in enumerate(ids) if not 0 <= block < num_pages)
        return faults.error("convert_kv_pages", faults.BLOCK_ID_RANGE, where, ids[where], num_pages)
    if len(distinct) != len(ids):
        first_at: dict[int, int] = {}
        for where, block in enumerate(ids):
            if first_at.setdefault(block, where) != where:
                return faults.error("convert_kv_pages", faults.BLOCK_ID_TWICE, where, block, first_at[block])
    return None
