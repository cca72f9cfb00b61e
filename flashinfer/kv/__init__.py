# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""KV page formats: what a page's bytes mean, what two peers agree on, and conversion in place, at once or queued."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flashinfer.kv.format import KINDS, PageFormat
from flashinfer.kv.negotiate import (
    BIT_EXACT,
    DEFAULT,
    EXACT,
    ConversionPlan,
    Convert,
    Reject,
    Same,
    Scope,
    negotiate,
)

if TYPE_CHECKING:
    from flashinfer.kv.convert import convert_kv_pages, convert_kv_pages_into, scale_factor
    from flashinfer.kv.converter import PageConverter
    from flashinfer.kv.queue import ConversionHandle, ConversionQueue

# Loaded late, so that formats and negotiation can be had without the ops.
_LATE = {
    "ConversionHandle": "queue",
    "ConversionQueue": "queue",
    "PageConverter": "converter",
    "convert_kv_pages": "convert",
    "convert_kv_pages_into": "convert",
    "scale_factor": "convert",
}

__all__ = [
    "BIT_EXACT",
    "DEFAULT",
    "EXACT",
    "KINDS",
    "ConversionHandle",
    "ConversionPlan",
    "ConversionQueue",
    "Convert",
    "PageConverter",
    "PageFormat",
    "Reject",
    "Same",
    "Scope",
    "convert_kv_pages",
    "convert_kv_pages_into",
    "negotiate",
    "scale_factor",
]


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"flashinfer.kv.{_LATE[name]}"), name)
    return value
