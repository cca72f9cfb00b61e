# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What a conversion queue runs on, threads or a stream, and the handles of the requests there."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Sequence

import torch

from flashinfer.core import faults
from flashinfer.core.checks import fail
from flashinfer.core.errors import PoolLostError
from flashinfer.kv.converter import PageConverter
from flashinfer.kv.format import PageFormat

OP = "ConversionQueue"

Caches = Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]

_FAULT_WORDS = 4
# Words of a request's page-locked buffer. The caching allocator keeps such buffers by size: with one size for requests
# of up to 4092 pages, those made at construction serve them all.
_STAGING_WORDS = 4096
_BUFFERS_AT_FIRST = 8
_POLL_SECONDS = 2e-4


class ConversionHandle(abc.ABC):
    """One request of a `ConversionQueue`.

    Once `done()`, the pages are the caller's again, whether or not the conversion succeeded: `exception()` tells.
    """

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the request has ended, well or badly. Never blocks."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until the request has ended, at most `timeout` seconds; return `done()`."""

    @abc.abstractmethod
    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Let what is queued on `stream` from now on run after the request; the host goes on at once.

        Says nothing of success. For a queue on the CPU, whose work no stream can wait for, the host waits.
        """

    @abc.abstractmethod
    def _outcome(self) -> BaseException | None:
        """What went wrong in a request that is done."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `wait` does and return what went wrong with this request, or None.

        Raises
        ------
        TimeoutError
            If the request has not ended in time.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{OP}: a conversion must be done within {timeout} s, got none; wait longer")
        return self._outcome()

    def result(self, timeout: float | None = None) -> None:
        """Wait as `wait` does and raise what went wrong with this request, if anything did.

        Raises
        ------
        TimeoutError
            If the request has not ended in time.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error


class Pool:
    """The layers' memory, whether it is still there, and what is done to it.

    Parameters
    ----------
    caches, src, dst, allow_inexact, backend
        As `convert_kv_pages` takes them.
    no_page
        Block ids to call it with at once, so that arguments are checked and whatever is made at first use is made.
    sources
        The pool to read; None to convert in place.
    """

    def __init__(
        self,
        caches: Caches,
        src: PageFormat,
        dst: PageFormat,
        allow_inexact: bool,
        backend: str,
        no_page: torch.Tensor,
        sources: Caches | None = None,
    ) -> None:
        self._convert = PageConverter(caches, src, dst, allow_inexact=allow_inexact, backend=backend, sources=sources)
        self._convert(no_page, *([] if sources is None else [no_page]))
        read = self._convert.sources
        self.planes = [*self._convert.planes, *read]
        self.num_pages = self.planes[0].size(0)
        self.num_sources = read[0].size(0) if read else None
        self.abandoned = False
        # Layers may share a storage; each is looked at once a request.
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.planes}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._addresses = [t.data_ptr() for t in self.planes]

    def lost(self) -> PoolLostError | None:
        """Why nothing can be converted any more."""
        for storage, size in self._storages:
            if storage.nbytes() < size:
                return PoolLostError(f"{OP}: the pool must keep its {size} bytes of storage, got {storage.nbytes()}")
        # Also of a storage that was allocated anew.
        for i, (plane, address) in enumerate(zip(self.planes, self._addresses, strict=True)):
            if plane.data_ptr() != address:
                return PoolLostError(f"{OP}: the pool must keep its storage, got another one in plane {i}")
        return None

    def convert(self, block_ids: torch.Tensor, *source_ids: torch.Tensor) -> None:
        # A kernel would follow the pointer of a released storage.
        lost = self.lost()
        if lost is not None:
            raise lost
        self._convert(block_ids, *source_ids)


class HostHandle(ConversionHandle):
    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        return bool(concurrent.futures.wait([self._future], timeout).done)

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        self.wait()

    def _outcome(self) -> BaseException | None:
        return self._future.exception()


def failed(error: Exception) -> ConversionHandle:
    """Handle of a request of which nothing was started."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_exception(error)
    return HostHandle(future)


class HostLane:
    """Threads that convert."""

    stream = None

    def __init__(self, workers: int) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="flashinfer-convert")

    def prepare(
        self,
        caches: Caches,
        src: PageFormat,
        dst: PageFormat,
        allow_inexact: bool,
        sources: Caches | None,
    ) -> Pool:
        return Pool(caches, src, dst, allow_inexact, "auto", torch.empty(0, dtype=torch.int64), sources)

    def run(
        self,
        pool: Pool,
        ids: list[int] | torch.Tensor,
        after: torch.cuda.Event | None,
        source_ids: list[int] | None,
    ) -> ConversionHandle:
        if after is not None and not callable(getattr(after, "synchronize", None)):
            fail(OP, "after", "a torch.cuda.Event", type(after).__name__)
        listed = [torch.tensor(some, dtype=torch.int64) for some in (ids, source_ids) if some is not None]
        return HostHandle(self._threads.submit(_convert, pool, listed, after))

    def close(self, wait: bool) -> None:
        self._threads.shutdown(wait)


def _convert(pool: Pool, listed: list[torch.Tensor], after: torch.cuda.Event | None) -> None:
    if after is not None:
        after.synchronize()
    if pool.abandoned:
        raise PoolLostError(f"{OP}: the queue must be open until a request runs, got close(wait=False) before")
    pool.convert(*listed)


class DeviceHandle(ConversionHandle):
    """The event is recorded on the queue's stream behind all that belongs to the request."""

    def __init__(self, pool: Pool) -> None:
        # `blocking`: a waiting host thread sleeps.
        self.event = torch.cuda.Event(blocking=True)
        self.report: torch.Tensor | None = None  # page-locked, written on the queue's stream before the event
        self.error: Exception | None = None
        self._pool: Pool | None = pool
        self._lock = threading.Lock()

    def done(self) -> bool:
        with self._lock:
            if self._pool is None:
                return True
            try:
                if not self.event.query():
                    return False
            except RuntimeError as error:  # the device is lost, and the pool with it
                self.error = self.error or error
            if self.error is None and self.report is not None:
                self.error = faults.error_in(self.report)
            self.error = self.error or self._pool.lost()
            self._pool = self.report = None
            return True

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            # An error of the device is met again by `done`, which keeps it.
            with contextlib.suppress(RuntimeError):
                self.event.synchronize()
        deadline = time.monotonic() + (timeout or 0)
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self.event)

    def _outcome(self) -> BaseException | None:
        return self.error


class DeviceLane:
    """A stream on which conversions run, in order."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if stream is None else stream
        if self.stream.device != device:
            fail(OP, "stream", f"on {device}", self.stream.device)

    def prepare(
        self,
        caches: Caches,
        src: PageFormat,
        dst: PageFormat,
        allow_inexact: bool,
        sources: Caches | None,
    ) -> Pool:
        with torch.cuda.stream(self.stream):
            # Nothing is to be made at the first request, behind other work. Page-locked and device memory is in its
            # cache from here on, and the kernel, which is loaded when first launched, was launched: it skips the page,
            # which no pool has, and reports it to nobody.
            buffers = [_staging(0) for _ in range(_BUFFERS_AT_FIRST)]
            own = buffers[0][:_FAULT_WORDS].zero_().to(self._device)
            no_page = torch.full((1,), -1, dtype=torch.int64, device=self._device)
            with faults.reported_to(own):
                # The reference backend would read the ids on the host, and wait for the device to have them.
                pool = Pool(caches, src, dst, allow_inexact, "native", no_page, sources)
        # Should the pool be released too early, others do not get its memory while the stream works on it.
        for plane in pool.planes:
            plane.record_stream(self.stream)
        return pool

    def run(
        self,
        pool: Pool,
        ids: list[int] | torch.Tensor,
        after: torch.cuda.Event | None,
        source_ids: list[int] | None,
    ) -> ConversionHandle:
        if after is not None and not isinstance(after, torch.cuda.Event):
            fail(OP, "after", "a torch.cuda.Event", type(after).__name__)
        if after is not None and not after.cuda_event:
            # To wait for it is to wait for nothing: the pages would be converted before they are there.
            fail(OP, "after", "a recorded event", "one that was never recorded", "record it first")
        current = torch.cuda.current_stream(self._device) if after is None and isinstance(ids, torch.Tensor) else None
        handle = DeviceHandle(pool)
        try:
            with torch.cuda.stream(self.stream):
                try:
                    if after is not None:
                        self.stream.wait_event(after)
                    elif current is not None:
                        self.stream.wait_stream(current)
                    handle.report = self._launch(pool, ids, source_ids)
                finally:
                    # Behind half a request too: until then its pages are the stream's.
                    handle.event.record(self.stream)
        except (RuntimeError, ValueError) as error:
            handle.error = error
        return handle

    def _launch(self, pool: Pool, ids: list[int] | torch.Tensor, source_ids: list[int] | None) -> torch.Tensor:
        """Convert on the current stream; return the words that hold the request's report once that has run."""
        # One copy brings the report words, zero, and the ids.
        listed = torch.tensor([some for some in (ids, source_ids) if isinstance(some, list)], dtype=torch.int64)
        words = _FAULT_WORDS + listed.numel()
        staging = _staging(words)
        staging[:_FAULT_WORDS] = 0
        if listed.numel():
            # In ascending order, as neighbours in memory are converted faster together: long requests by 2.5%.
            staging[_FAULT_WORDS:words] = listed[:, listed[0].argsort()].flatten()
        buffer = torch.empty(words, dtype=torch.int64, device=self._device)
        buffer.copy_(staging[:words], non_blocking=True)
        on_device = list(buffer[_FAULT_WORDS:].view(listed.shape)) if len(listed) else []
        if isinstance(ids, torch.Tensor):
            ids.record_stream(self.stream)
            on_device = [ids]
        own, report = buffer[:_FAULT_WORDS], staging[:_FAULT_WORDS]
        with faults.reported_to(own):
            pool.convert(*on_device)
        report.copy_(own, non_blocking=True)
        return report

    def close(self, wait: bool) -> None:
        """Nothing to do: what is on the stream ends by itself."""


def _staging(words: int) -> torch.Tensor:
    """Page-locked memory, not cleared. Its allocator uses it again only after the copies from it and to it."""
    return torch.empty(max(words, _STAGING_WORDS), dtype=torch.int64, pin_memory=True)
