# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions of received pages: beside the engine's steps on `flashinfer.kv.ConversionQueue`, or in them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.integrations.vllm.nixl.agreement import Agreement
from flashinfer.integrations.vllm.nixl.staging import Staging
from flashinfer.kv import ConversionHandle, ConversionQueue, PageConverter, PageFormat

Planes = list[tuple[torch.Tensor, torch.Tensor]]

KNOB = "convert_kv_pages"

# What goes wrong with one request's pages, or its launch, is that request's failure. Anything else is a defect.
_ERRORS = (IndexError, RuntimeError, ValueError)


def knob(value: object) -> bool | str:
    """The knob's value: off, on (a side stream on a GPU, a thread on the CPU), or "sync" for the step's own stream."""
    if isinstance(value, bool) or value == "sync":
        return value if isinstance(value, bool) else "sync"
    raise InvalidArgumentError(
        f'kv_connector_extra_config: "{KNOB}" must be true, false or "sync", got {value!r}; correct or remove it'
    )


@dataclasses.dataclass
class Conversion:
    """One request's pages on their way to another format.

    Parameters
    ----------
    pages, page_bytes
        How many pages of all layers, and their bytes.
    handle
        Of the queue; None if the conversion ended at once.
    failure
        What went wrong before anything was queued, or in the step.
    moves
        Whether the format stays, and pages only go to their planes.
    event
        Behind the last byte that is read from staging, or cleared there, on whichever stream.
    """

    pages: int
    page_bytes: int
    handle: ConversionHandle | None = None
    failure: BaseException | None = None
    moves: bool = False
    event: torch.cuda.Event | None = None
    started: float = dataclasses.field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From the end of the transfer to when the end of the conversion was seen."""
        return self.ended - self.started

    def done(self) -> bool:
        """Whether it has ended, well or not; never waits."""
        if self.handle is not None and not self.handle.done():
            return False
        if self.event is not None and not self.event.query():
            return False
        self.ended = self.ended or time.perf_counter()
        return True

    def wait(self) -> None:
        """Return when it has ended, well or not."""
        if self.handle is not None:
            self.handle.wait()
        if self.event is not None:
            self.event.synchronize()

    def error(self) -> BaseException | None:
        """What went wrong in a conversion that is done."""
        return self.failure if self.handle is None else self.handle.exception()


def planes_of(caches: Sequence[torch.Tensor], pieces: int) -> Planes:
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


class Conversions:
    """Conversions in one engine's caches, for as many pairs of formats as its peers need.

    Parameters
    ----------
    caches
        vLLM's view of each layer's cache, two slots to a page; they keep their memory.
    page_bytes
        Bytes of one page of all layers.
    in_step
        Convert on the stream of the caller and before it goes on, instead of beside it.
    """

    def __init__(self, caches: Sequence[torch.Tensor], page_bytes: int, *, in_step: bool) -> None:
        self._caches, self._page_bytes, self._in_step = list(caches), page_bytes, in_step
        self._device = self._caches[0].device
        # One for all queues: requests then end in the order in which they arrived.
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" and not in_step else None
        self.by_agreement: dict[Agreement, tuple[Planes, ConversionQueue | PageConverter]] = {}
        # ... of pages that land in staging, whose halves take the place of the planes here.
        self.from_staging: dict[Agreement, tuple[Planes, ConversionQueue | PageConverter]] = {}

    def prepare(self, agreement: Agreement) -> None:
        """Look at the planes once, and compile and load the kernel now, and not when a request has arrived.

        Raises
        ------
        InvalidArgumentError
            If the caches cannot be converted so.
        """
        if agreement in self.by_agreement or agreement.src is None or agreement.dst is None:
            return
        self.by_agreement[agreement] = self._made(agreement, agreement.src, agreement.dst, None)

    def prepare_staged(self, agreement: Agreement, staging: Staging) -> None:
        """The same for pages that land in `staging`; both formats are given."""
        if agreement in self.from_staging or agreement.src is None or agreement.dst is None:
            return
        self.from_staging[agreement] = self._made(
            agreement, agreement.src, agreement.dst, staging.sources(agreement.pieces)
        )

    def _made(
        self, agreement: Agreement, src: PageFormat, dst: PageFormat, sources: list[torch.Tensor] | None
    ) -> tuple[Planes, ConversionQueue | PageConverter]:
        """Where pages of the peer land, and what converts them."""
        planes = planes_of(self._caches, agreement.pieces)
        landing = planes
        if sources is not None:
            landing = [(source[:, : source.shape[1] // 2], source[:, source.shape[1] // 2 :]) for source in sources]
        # On vLLM's handshake thread nobody has chosen a device.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            if not self._in_step:
                return landing, ConversionQueue(planes, src, dst, stream=self._side, sources=sources)
            converter = PageConverter(planes, src, dst, sources=sources)
            no_page = torch.empty(0, dtype=torch.int64, device=self._device)
            converter(*[no_page] * (1 if sources is None else 2))
        return landing, converter

    def start(
        self, agreement: Agreement, pages: Sequence[tuple[int, int]], slots: Sequence[int] | None = None
    ) -> Conversion:
        """Convert pages of all layers.

        Parameters
        ----------
        agreement
            One that was prepared.
        pages
            Ids, and how many of the peer's pages arrived in each. Where there are fewer than make a page, the rest is
            cleared: vLLM left that to whoever fills the page.
        slots
            Where in staging each page is; None for pages that were read into their place.
        """
        landing, converter = (self.by_agreement if slots is None else self.from_staging)[agreement]
        ids = [page for page, _ in pages]
        lists = [ids] if slots is None else [ids, list(slots)]
        conversion = Conversion(len(ids), len(ids) * self._page_bytes, moves=agreement.src == agreement.dst)
        try:
            with torch.cuda.stream(self._side):
                _clear(agreement, landing, list(zip(lists[-1], (filled for _, filled in pages), strict=True)))
            if isinstance(converter, ConversionQueue):
                conversion.handle = converter.submit(ids, source_ids=None if slots is None else lists[1])
            else:
                # Stream order puts it before whatever the step launches next.
                converter(*map(self._ids, lists))
        except _ERRORS as error:
            conversion.failure = error
        if slots is not None and self._device.type == "cuda":
            # The next transfer into these slots is in no stream's order, and after a failed start they may be being
            # cleared.
            conversion.event = torch.cuda.Event()
            conversion.event.record(self._side)
        return conversion

    def _ids(self, ids: list[int]) -> torch.Tensor:
        on_gpu = self._device.type == "cuda"
        return torch.tensor(ids, dtype=torch.int64, pin_memory=on_gpu).to(self._device, non_blocking=True)

    def close(self) -> None:
        """Return when nothing is being converted any more; the pages may then be freed. May be called again."""
        for _, converter in [*self.by_agreement.values(), *self.from_staging.values()]:
            if isinstance(converter, ConversionQueue):
                converter.close()


def _clear(agreement: Agreement, planes: Planes, pages: Sequence[tuple[int, int]]) -> None:
    """Zero what no page of the peer fills, in its order: then it is one run of bytes."""
    rest = []
    for page, filled in pages:
        if filled == agreement.ratio:
            continue
        for first, second in planes:
            half = first.shape[1]
            begin = 2 * half * filled // agreement.ratio
            rest += [first[page, min(begin, half) :], second[page, max(0, begin - half) :]]
    rest = [part for part in rest if part.numel()]
    if rest:
        # In one launch for all layers.
        torch._foreach_zero_(rest)
