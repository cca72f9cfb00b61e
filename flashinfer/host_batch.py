# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A batch's metadata in host memory, where plans check and measure it: csrc_rocm/shims/attention_batch.cc does."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from operator import sub
from typing import NoReturn

import torch

from flashinfer.core.checks import fail

_GOOD, _RANGE, _START, _FALLS = range(4)


@dataclass(frozen=True)
class HostBatch:
    """A checked batch, in memory of its own.

    Attributes
    ----------
    host, there
        qo_indptr, kv_indptr and last_page_len, as far as they were given: int32 on the host, and copies on the device
        if it was to have them.
    q_len
        Queries of each request, where no qo_indptr was given.
    total_q, total_pages, max_q_len, max_kv_len
        Sums and maxima over the batch; `max_kv_len` is a bound if last page lengths are not known.
    """

    host: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]
    there: tuple[torch.Tensor | None, ...]
    q_len: int
    page_size: int
    total_q: int
    total_pages: int
    max_q_len: int
    max_kv_len: int

    def q_lens(self) -> list[int]:
        """Queries of each request."""
        qo, kv, _ = self.host
        return [self.q_len] * (kv.numel() - 1) if qo is None else _lengths(qo)

    def pages(self) -> list[int]:
        """Pages of each request."""
        return _lengths(self.host[1])

    def kv_lens(self) -> list[int]:
        """Keys of each request, a bound if last page lengths are not known."""
        pages, tails = self.pages(), self.host[2]
        last = [self.page_size] * len(pages) if tails is None else tails.tolist()
        return [(p - 1) * self.page_size + t if p else 0 for p, t in zip(pages, last, strict=True)]

    def mask_bits(self) -> torch.Tensor:
        """Bits of each request's mask, `q_len * kv_len`, int64."""
        return torch.tensor(self.q_lens(), dtype=torch.int64) * torch.tensor(self.kv_lens(), dtype=torch.int64)


def _lengths(indptr: torch.Tensor) -> list[int]:
    listed: list[int] = indptr.tolist()
    return list(map(sub, itertools.islice(listed, 1, None), listed))


def measure(
    where: str,
    qo: torch.Tensor | int,
    kv: torch.Tensor,
    last: torch.Tensor | None,
    page_size: int,
    kv_name: str,
    pinned: bool = False,
    device: torch.device | None = None,
) -> HostBatch:
    """Check and measure a batch in pages; pages of one token make a ragged one.

    Parameters
    ----------
    where
        Who is speaking in an error.
    qo, kv
        `[batch_size + 1]` int32 or int64 on the host, where each request's queries and pages begin; or the queries of
        each request.
    last
        `[batch_size]`, tokens in each request's last page; None if nobody knows.
    page_size
        Tokens of a page.
    kv_name
        What the caller knows `kv` as.
    pinned
        Whether copies to a GPU will be made of what is returned.
    device
        That is to have copies at once.

    Raises
    ------
    InvalidArgumentError
        If `qo` or `kv` starts elsewhere than at 0 or falls, a last page cannot hold its tokens, or a number does not
        fit into 32 bits; names the request.
    """
    if not kv.numel():
        fail(where, kv_name, "of length batch size + 1", 0)
    qo_indptr, q_len = (None, qo) if isinstance(qo, int) else (qo, 0)
    numbers, host, there = _native()(qo_indptr, q_len, kv, last, page_size, pinned, device)
    fault, part, at, value, bound, total_q, total_pages, max_q_len, max_pages = numbers
    if fault:
        name = ("qo_indptr", kv_name, "last_page_len")[part]
        _refuse(where, fault, name, at, value, bound, page_size)
    return HostBatch(
        *(_three(qo_indptr, host, last), _three(qo_indptr, there, last) if there else (None, None, None)),
        *(q_len, page_size, total_q, total_pages, max_q_len, max_pages * page_size),
    )


def _three(
    qo: torch.Tensor | None, parts: list[torch.Tensor], last: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """What was given at its place, None for what was not."""
    kv = 0 if qo is None else 1
    return parts[0] if kv else None, parts[kv], None if last is None else parts[kv + 1]


def _refuse(where: str, fault: int, name: str, at: int, value: int, bound: int, page_size: int) -> NoReturn:
    if fault == _RANGE:
        fail(where, f"{name}[{at}]", "a number of 32 bits", value)
    if fault == _START:
        fail(where, f"{name}[0]", "0", value)
    if fault == _FALLS:
        fail(where, name, "non-decreasing", f"{value} at [{at}] and then {bound}")
    fail(where, f"{name}[{at}]", f"in [0, {page_size}]", value)


@functools.cache
def _native() -> Callable[..., tuple[list[int], list[torch.Tensor], list[torch.Tensor]]]:
    """By name, as an op loads its backends: this layer imports none."""
    found: Callable[..., tuple[list[int], list[torch.Tensor], list[torch.Tensor]]]
    found = importlib.import_module("flashinfer.backends.native.plan").planner("attention_batch")
    return found
