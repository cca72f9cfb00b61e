# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Memory in which whole pages of a peer land before they are put into planes. Addresses and slots, no vLLM.

Where a decoder keeps K and V in planes of their own, each page of a peer goes to two places, and NIXL can join neither
the two halves nor neighbouring pages. Here a page lands in one piece and a run of pages in one more, and is put into
the planes from here, converted or as it is.
"""

from __future__ import annotations

import dataclasses
import operator

import numpy as np
import numpy.typing as npt
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.integrations.vllm.nixl.agreement import Agreement
from flashinfer.integrations.vllm.nixl.landing import Rows

KNOB = "stage_kv_pages"
# A request of 4096 tokens with 36 layers of 8 heads of 128 bfloat16 has 0.6 GiB. Smaller pages, for which staging
# matters more, are staged for as many more tokens.
_DEFAULT_MIB = 1024


def knob(value: object, *, convert: bool) -> int:
    """The knob's value in bytes; unset, there is memory for staging where pages are to be converted."""
    if value is None:
        return _DEFAULT_MIB << 20 if convert else 0
    try:
        mib = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        mib = -1
    if mib < 0:
        raise InvalidArgumentError(
            f'kv_connector_extra_config: "{KNOB}" must be a number of MiB, or 0 for none, got {value!r}; correct or '
            "remove it"
        )
    return mib << 20


class Slots:
    """Which slots are free, as runs in ascending order."""

    def __init__(self, count: int) -> None:
        self.count = self.free = count
        self._runs = [range(count)] if count else []

    def take(self, count: int) -> list[int] | None:
        """That many free slots, in one run if there is one; None if there are too few."""
        if count > self.free:
            return None
        fitting = [run for run in self._runs if len(run) >= count]
        taken: list[int] = []
        # The smallest that fits, or from the largest down, for the fewest runs.
        for run in [min(fitting, key=len)] if fitting else sorted(self._runs, key=len, reverse=True):
            part = run[: count - len(taken)]
            taken += part
            where = self._runs.index(run)
            self._runs[where : where + 1] = [run[len(part) :]] if len(part) < len(run) else []
            if len(taken) == count:
                break
        self.free -= count
        return taken

    def give_back(self, slots: list[int]) -> None:
        """Slots that were taken, and that nobody reads or writes any more."""
        self.free += len(slots)
        runs = sorted([*self._runs, *(range(slot, slot + 1) for slot in slots)], key=operator.attrgetter("start"))
        self._runs = []
        for run in runs:
            if self._runs and self._runs[-1].stop == run.start:
                self._runs[-1] = range(self._runs[-1].start, run.stop)
            else:
                self._runs.append(run)


@dataclasses.dataclass
class Read:
    """One request that is being read or converted.

    Parameters
    ----------
    agreement
        What arrives, and what it becomes; like formats where pages only move. It is the read's own, for the peer may be
        forgotten before the read ends, and agreed with anew.
    slots
        Of staging, one for each local page, in order: the transfer's, then the conversion's. None of a request that is
        read straight into its pages.
    """

    agreement: Agreement
    slots: list[int] | None = None


class Staging:
    """Slots of one page of each layer, and how they are listed for NIXL and for the converter.

    Parameters
    ----------
    cache
        A layer's cache, for dtype and device.
    layers
        How many layers.
    page_bytes
        Bytes of a page of one layer.
    slots
        How many slots.
    """

    def __init__(self, cache: torch.Tensor, layers: int, page_bytes: int, slots: int) -> None:
        self.page_bytes, self.slots = page_bytes, Slots(slots)
        shape = (layers, slots, page_bytes // cache.element_size())
        # A layer's pages follow each other, as a prefill's do: runs of pages are joined on both sides.
        self.memory = torch.empty(shape, dtype=cache.dtype, device=cache.device)

    def sources(self, pieces: int) -> list[torch.Tensor]:
        """What the converter reads: `[slots, elements]` of each piece of each layer, in the order of `planes_of`."""
        cut = self.memory.unflatten(2, (pieces, -1))
        return [layer[:, piece] for layer in cut for piece in range(pieces)]

    def rows(self, ratio: int, pieces: int, piece: int, device: int) -> Rows:
        """Descriptors of one piece of every slot, each of `ratio` smaller pages; `(address, length, device, ...)`."""
        layers, slots, _ = self.memory.shape
        base, page = self.memory.data_ptr(), self.page_bytes
        length = page // pieces // ratio
        rows: list[tuple[int, ...]] = []
        for layer in range(layers):
            address = base + layer * slots * page + piece * ratio * length
            if pieces == 1:
                rows.append((address, length, device, length, slots * ratio))
            else:
                rows += [(address + small * length, length, device, page, slots) for small in range(ratio)]
        return np.array(rows, dtype=np.uint64).reshape(-1, 5)

    def small_ids(self, slots: npt.NDArray[np.int64], ratio: int, pieces: int) -> npt.NDArray[np.int64]:
        """Where among a layer's descriptors the smaller pages of slots are, in the order of their tokens."""
        small = np.arange(ratio)
        ids = slots[:, None] * ratio + small if pieces == 1 else slots[:, None] + small * self.memory.shape[1]
        return ids.reshape(-1).astype(np.int64)


def whole_pages(rows: Rows) -> Rows | None:
    """Descriptors of whole pages from those of their halves, first and second in turn; None if halves lie apart.

    What is taken of a peer's page is one run of bytes if the second half begins where the first ends, in every layer.
    """
    first, second = rows[::2], rows[1::2]
    if len(first) != len(second) or not (
        np.array_equal(first[:, 0] + first[:, 1], second[:, 0]) and np.array_equal(first[:, 1:], second[:, 1:])
    ):
        return None
    whole: Rows = first.copy()
    whole[:, 1] *= 2
    return whole
