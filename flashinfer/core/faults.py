# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What kernels report of metadata they could not use, and how it reaches the caller.

A kernel skips a bad row or page and leaves the first report in four int64 words (csrc_rocm/kernels/common/fault.h).
On the CPU the words are read after the call and raise at once. On a GPU they live on the device: reading them takes a
synchronisation, so that is left to `check_device_errors()`, or to `FLASHINFER_CHECK=1` after every call.
"""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from flashinfer.core import env
from flashinfer.core.errors import InvalidArgumentError

# FaultCode of csrc_rocm/kernels/common/fault.h.
BATCH_INDEX_RANGE, POSITION_RANGE, PAGE_TABLE_SHORT, PAGE_ID_RANGE, BLOCK_ID_RANGE, BLOCK_ID_TWICE = range(1, 7)

# Mirrors the kOp constants of csrc_rocm.
_OPS = {1: "append_paged_kv_cache", 2: "append_paged_mla_kv_cache", 3: "convert_kv_pages"}
_SENTENCES = {
    BATCH_INDEX_RANGE: "batch_indices[{where}] must be below the {bound} requests of kv_indptr, got {value}",
    POSITION_RANGE: "positions[{where}] must be below {bound}, the tokens that its request's pages hold, got {value}; "
    "extend the page table before appending",
    PAGE_TABLE_SHORT: "kv_indptr[{where}] must be at most {bound}, the length of kv_indices, got {value}; "
    "the page table is short",
    PAGE_ID_RANGE: "kv_indices[{where}] must be a page id below {bound}, got {value}",
    BLOCK_ID_RANGE: "block_ids[{where}] must be a page id below {bound}, got {value}",
    BLOCK_ID_TWICE: "block_ids must be distinct, got {value} at [{bound}] and [{where}]; convert each page once",
}

_local = threading.local()
_device_words: dict[torch.device, torch.Tensor] = {}
_lock = threading.Lock()


def words(device: torch.device) -> torch.Tensor:
    """Report words for a call on `device`: int64[4], zero unless an earlier report waits there."""
    if device.type == "cpu":
        mine: torch.Tensor | None = getattr(_local, "words", None)
        if mine is None:
            mine = _local.words = torch.zeros(4, dtype=torch.int64)
        return mine
    found = _device_words.get(device)
    if found is None:
        with _lock:
            found = _device_words.get(device)
            if found is None:
                found = torch.zeros(4, dtype=torch.int64, device=device)
                # Calls on other streams use the words from now on: they must be zero by then. While a graph is being
                # captured this fails, and rightly: the words would be zeroed at each replay and not before.
                torch.cuda.current_stream(device).synchronize()
                _device_words[device] = found
    return found


def settle(fault: torch.Tensor) -> None:
    """Raise what the call just made has reported: always on the CPU, on a GPU only under FLASHINFER_CHECK=1."""
    if fault.device.type == "cpu" or env.check.at_first_use:
        _raise(fault)


def check_device_errors(device: torch.device | str | int | None = None) -> None:
    """Raise the first report that kernels left on a device since the last call, and clear it.

    Synchronises with the device.

    Parameters
    ----------
    device
        A GPU; all that were used by default.

    Raises
    ------
    InvalidArgumentError
        Naming the op, the element that was out of range, its value and the bound. The row or page was skipped:
        nothing was written outside the named pages.
    """
    wanted = None if device is None else torch.device(device)
    for found, fault in list(_device_words.items()):
        if wanted is None or found == wanted or (wanted.index is None and found.type == wanted.type):
            _raise(fault)


def _raise(fault: torch.Tensor) -> None:
    code, where, value, bound = fault.tolist()
    if code == 0:
        return
    fault.zero_()
    refuse(_OPS[code >> 8], code & 0xFF, where, value, bound)


def refuse(op: str, code: int, where: int, value: int, bound: int) -> NoReturn:
    """Raise the sentence of a fault code, as if a kernel had reported it."""
    raise InvalidArgumentError(f"{op}: {_SENTENCES[code].format(where=where, value=value, bound=bound)}")
