# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What kernels report of metadata they could not use, and how it reaches the caller.

A kernel skips a bad row or page and leaves the first report in four int64 words (csrc_rocm/kernels/common/fault.h).
On the CPU the words are read after the call and raise at once. On a GPU they live on the device: reading them takes a
synchronisation, so that is left to `check_device_errors()`, or to `FLASHINFER_CHECK=1` after every call.
"""

from __future__ import annotations

import threading

import torch

from flashinfer.core import env
from flashinfer.core.errors import InvalidArgumentError

# Mirrors FaultCode and the kOp constants of csrc_rocm.
_OPS = {1: "append_paged_kv_cache", 2: "append_paged_mla_kv_cache", 3: "convert_kv_pages"}
_SENTENCES = {
    1: "batch_indices[{where}] must be below the {bound} requests of kv_indptr, got {value}",
    2: "positions[{where}] must be below {bound}, the tokens that its request's pages hold, got {value}; "
    "extend the page table before appending",
    3: "kv_indptr[{where}] must be at most {bound}, the length of kv_indices, got {value}; the page table is short",
    4: "kv_indices[{where}] must be a page id below {bound}, got {value}",
    5: "block_ids[{where}] must be a page id below {bound}, got {value}",
    6: "block_ids must be distinct, got {value} at [{bound}] and [{where}]; convert each page once",
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
            found = _device_words.setdefault(device, torch.zeros(4, dtype=torch.int64, device=device))
    return found


def settle(fault: torch.Tensor) -> None:
    """Raise what the call just made has reported: always on the CPU, on a GPU only under FLASHINFER_CHECK=1."""
    if fault.device.type == "cpu" or env.check():
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
    sentence = _SENTENCES[code & 0xFF].format(where=where, value=value, bound=bound)
    raise InvalidArgumentError(f"{_OPS[code >> 8]}: {sentence}")
