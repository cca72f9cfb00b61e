# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What kernels report of metadata they could not use, and how it reaches the caller.

A kernel skips a bad row or page and leaves the first report in four int64 words (csrc_rocm/kernels/common/fault.h).
On the CPU the words are read after the call and raise at once. On a GPU they live on the device: reading them takes a
synchronisation, so that is left to `check_device_errors()`, or to `FLASHINFER_CHECK=1` after every call. Who runs
several calls at once and must know which of them failed gives each its own words with `reported_to`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NoReturn

import torch

from flashinfer.core import env
from flashinfer.core.checks import fail
from flashinfer.core.errors import InvalidArgumentError

# FaultCode of csrc_rocm/kernels/common/fault.h.
BATCH_INDEX_RANGE, POSITION_RANGE, PAGE_TABLE_SHORT, PAGE_ID_RANGE = 1, 2, 3, 4
BLOCK_ID_RANGE, BLOCK_ID_TWICE, SOURCE_ID_RANGE = 5, 6, 7
INDPTR_ORDER, APPEND_INDPTR_ORDER, SEQ_LEN_SHORT, SEQ_LEN_RANGE = 8, 9, 10, 11
QO_INDPTR_RANGE, LAST_PAGE_RANGE, KV_INDPTR_RANGE, PIECES_SHORT = 12, 13, 14, 15
OUT_INDPTR_ORDER, OUT_SHORT, TOKEN_RANGE = 20, 21, 22
BLOCK_TABLE_RANGE, BLOCK_TABLE_SHORT, CONTEXT_PAGES, PIECE_REQUEST, CONTEXT_ROWS = 24, 25, 26, 27, 28

# Mirrors the kOp constants of csrc_rocm.
_OPS = {
    1: "append_paged_kv_cache",
    2: "append_paged_mla_kv_cache",
    3: "convert_kv_pages",
    4: "get_batch_indices_positions",
    5: "get_seq_lens",
    6: "gather_paged_kv",
    8: "mla_context_indices",
    9: "gather_kv_b_proj",
    # Of flashinfer/backends/triton.
    16: "paged_attention",
    17: "ragged_attention",
}
_SENTENCES = {
    BATCH_INDEX_RANGE: "batch_indices[{where}] must be in [0, {bound}), a request of kv_indptr, got {value}",
    POSITION_RANGE: "positions[{where}] must be in [0, {bound}), which its request's pages hold, got {value}; "
    "extend the page table before appending",
    PAGE_TABLE_SHORT: "kv_indptr[{where}] must be at most {bound}, the length of kv_indices, got {value}; "
    "the page table is short",
    PAGE_ID_RANGE: "kv_indices[{where}] must be a page id in [0, {bound}), got {value}",
    BLOCK_ID_RANGE: "block_ids[{where}] must be a page id in [0, {bound}), got {value}",
    INDPTR_ORDER: "kv_indptr must start at 0 or above and not decrease, got {value} at [{where}] and then {bound}",
    APPEND_INDPTR_ORDER: "append_indptr must start at 0 or above and not decrease, got {value} at [{where}] "
    "and then {bound}",
    SEQ_LEN_SHORT: "seq_lens[{where}] must be at least {bound}, the tokens that are appended, got {value}",
    SEQ_LEN_RANGE: "kv_indptr and page_size must give lengths of at most {bound}, got {value} at [{where}]",
    QO_INDPTR_RANGE: "qo_indptr must not decrease and stay within q's {bound} rows, got {value} behind request {where}",
    LAST_PAGE_RANGE: "kv_last_page_len[{where}] must be in [0, {bound}], got {value}",
    KV_INDPTR_RANGE: "kv_indptr[{where}] must be at most {bound}, the rows of k, got {value}",
    PIECES_SHORT: "scratch must hold the {value} pieces that split_size makes of the batch, got room for {bound}",
    OUT_INDPTR_ORDER: "out_indptr must start at 0 or above and not decrease, got {value} at [{where}] and then {bound}",
    OUT_SHORT: "out_indptr[{where}] must be at most {bound}, the rows of the output, got {value}",
    TOKEN_RANGE: "starts[{where}] must leave every token below {bound}, those that the request's pages hold, "
    "got token {value}",
    SOURCE_ID_RANGE: "source_ids[{where}] must be a page id in [0, {bound}), got {value}",
    BLOCK_TABLE_RANGE: "block_tables, entry {where} row by row, must be a page id in [0, {bound}), got {value}",
    BLOCK_TABLE_SHORT: "block_tables must have columns for {bound} tokens and more, got token {value} of row {where}",
    CONTEXT_PAGES: "kv_indptr and kv_indices must give each of the {bound} context tokens a page, got none for token "
    "{where}",
    PIECE_REQUEST: "piece_requests[{where}] must be a row of block_tables below {bound}, got {value}",
    CONTEXT_ROWS: "kv_prefix_sum_context_lens[{where}] must be at most {bound}, the rows of k_out, got {value}",
    BLOCK_ID_TWICE: "block_ids must be distinct, got {value} at [{bound}] and [{where}]; convert each page once",
}

_local = threading.local()
_device_words: dict[torch.device, torch.Tensor] = {}
_lock = threading.Lock()
_own_words: ContextVar[torch.Tensor | None] = ContextVar("flashinfer_own_words", default=None)


@contextlib.contextmanager
def reported_to(own: torch.Tensor) -> Iterator[None]:
    """Have calls inside, on the device of `own`, report there; `error_in` later says what, and nothing raises here.

    Parameters
    ----------
    own
        `[4]` int64, zeros. Nobody reads or clears it but the caller.
    """
    token = _own_words.set(own)
    try:
        yield
    finally:
        _own_words.reset(token)


def words(device: torch.device) -> torch.Tensor:
    """Report words for a call on `device`: int64[4], zero unless an earlier report waits there."""
    own = _own_words.get()
    if own is not None and own.device == device:
        return own
    found = _device_words.get(device)
    if found is not None:
        return found
    if device.type == "cpu":
        mine: torch.Tensor | None = getattr(_local, "words", None)
        if mine is None:
            mine = _local.words = _zeros(device)
        return mine
    with _lock:
        found = _device_words.get(device)
        if found is None:
            found = _zeros(device)
            # Calls on other streams use the words from now on: they must be zero by then. While a graph is being
            # captured this fails, and rightly: the words would be zeroed at each replay and not before.
            torch.cuda.current_stream(device).synchronize()
            _device_words[device] = found
    return found


def _zeros(device: torch.device) -> torch.Tensor:
    # Kept for later calls: born in inference mode they could not be cleared outside of it.
    with torch.inference_mode(False):
        return torch.zeros(4, dtype=torch.int64, device=device)


def settle(fault: torch.Tensor) -> None:
    """Raise what the call just made has reported: always on the CPU, on a GPU only under FLASHINFER_CHECK=1."""
    # On a GPU this is asked at every call, and words of one's own are rare.
    if (fault.is_cpu or env.check.at_first_use) and fault is not _own_words.get():
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
        nothing was written outside the named pages. Also if `device` is no GPU of this machine.
    """
    wanted = None if device is None else _gpu(device)
    for found, fault in list(_device_words.items()):
        if wanted is None or found == wanted or (wanted.index is None and found.type == wanted.type):
            _raise(fault)


def _gpu(device: torch.device | str | int) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    count = torch.cuda.device_count()
    if found is None or found.type != "cuda" or (found.index or 0) >= count:
        fail("check_device_errors", "device", f"a GPU, of which torch finds {count}", repr(str(device)))
    return found


def _raise(fault: torch.Tensor) -> None:
    found = error_in(fault)
    if found is not None:
        fault.zero_()
        raise found


def error_in(fault: torch.Tensor) -> InvalidArgumentError | None:
    """What report words say, or None if they are zero."""
    code, where, value, bound = fault.tolist()
    return error(_OPS[code >> 8], code & 0xFF, where, value, bound) if code else None


def error(op: str, code: int, where: int, value: int, bound: int) -> InvalidArgumentError:
    """The sentence of a fault code."""
    return InvalidArgumentError(f"{op}: {_SENTENCES[code].format(where=where, value=value, bound=bound)}")


def refuse(op: str, code: int, where: int, value: int, bound: int) -> NoReturn:
    """Raise the sentence of a fault code, as if a kernel had reported it."""
    raise error(op, code, where, value, bound)
