# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions of received pages, beside the engine's steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv import PageFormat, convert_kv_pages

Planes = Sequence[tuple[torch.Tensor, torch.Tensor]]

KNOB = "convert_kv_pages"


def knob(value: object) -> bool | str:
    """The knob's value: off, on (a side stream on a GPU, a thread on the CPU), or "sync" for the step's own stream."""
    if isinstance(value, bool) or value == "sync":
        return value if isinstance(value, bool) else "sync"
    raise InvalidArgumentError(
        f'kv_connector_extra_config: "{KNOB}" must be true, false or "sync", got {value!r}; correct or remove it'
    )


@dataclasses.dataclass
class Conversion:
    """One request's pages on their way to another format."""

    pages: int
    page_bytes: int
    future: Future[torch.cuda.Event | None]
    started: float = dataclasses.field(default_factory=time.perf_counter)

    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From the end of the transfer to when the end of the conversion was seen."""
        return self.ended - self.started

    def done(self) -> bool:
        """Whether it has ended, well or not; never waits."""
        if not self.future.done():
            return False
        if self.future.exception() is None:
            event = self.future.result()
            if event is not None and not event.query():
                return False
        self.ended = self.ended or time.perf_counter()
        return True

    def wait(self) -> None:
        """Return when it has ended, well or not."""
        if self.future.exception() is None:
            event = self.future.result()
            if event is not None:
                event.synchronize()

    def error(self) -> BaseException | None:
        """What went wrong in a conversion that is done."""
        return self.future.exception()


def planes_of(caches: Sequence[torch.Tensor], pieces: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K plane and V plane of each piece of each layer.

    Parameters
    ----------
    caches
        vLLM's view of each layer's cache, `[pages, 2, N, H * D]`.
    pieces
        Equal parts of a page, each from another rank of the peer; a part of the K plane's block and the same part of
        the V plane's block hold what that rank sent.
    """
    pairs = []
    for cache in caches:
        # A page's slot is dense, only pages have a stride of their own.
        slots = [cache[:, slot].flatten(1).unflatten(1, (pieces, -1)) for slot in (0, 1)]
        pairs += [(slots[0][:, piece], slots[1][:, piece]) for piece in range(pieces)]
    return pairs


class ConversionQueue:
    """Runs conversions in order, one after the other, on a thread of its own and, on a GPU, on a side stream.

    Parameters
    ----------
    device
        Where the pages are.
    in_step
        Convert on the stream of the caller and before it goes on, instead.
    """

    def __init__(self, device: torch.device, *, in_step: bool) -> None:
        self._device = device
        self._in_step = in_step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flashinfer-convert")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and not in_step else None

    def start(
        self, planes: Planes, block_ids: Sequence[int], src: PageFormat, dst: PageFormat, page_bytes: int
    ) -> Conversion:
        """Convert the listed pages of all layers in one call."""
        stream = self._side
        if self._in_step and self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        future = self._thread.submit(self._run, stream, planes, list(block_ids), src, dst)
        conversion = Conversion(len(block_ids), page_bytes, future)
        if self._in_step or not block_ids:
            # The launch is what has to come before the step's next kernel; stream order does the rest.
            future.exception()
        return conversion

    def _run(
        self, stream: torch.cuda.Stream | None, planes: Planes, block_ids: list[int], src: PageFormat, dst: PageFormat
    ) -> torch.cuda.Event | None:
        if stream is None:
            convert_kv_pages(planes, torch.tensor(block_ids, dtype=torch.int32), src, dst)
            return None
        with torch.cuda.stream(stream):
            ids = torch.tensor(block_ids, dtype=torch.int32, device=self._device)
            convert_kv_pages(planes, ids, src, dst)
            # Freed on another thread than the one that reads it: the allocator must know of the stream.
            ids.record_stream(stream)
            if self._in_step:
                return None
            event = torch.cuda.Event()
            event.record(stream)
            return event

    def close(self) -> None:
        """Return when nothing is being converted any more; the pages may then be freed. May be called again."""
        self._thread.shutdown(wait=True)
        if self._side is not None:
            self._side.synchronize()
