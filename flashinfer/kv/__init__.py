# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""KV page formats: what a page's bytes mean, what two peers agree on, and conversion in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashinfer.kv.format import KINDS, PageFormat
from flashinfer.kv.negotiate import (
    BIT_EXACT,
    DEFAULT,
    ConversionPlan,
    Convert,
    Reject,
    Same,
    Scope,
    negotiate,
)

if TYPE_CHECKING:
    from flashinfer.kv.convert import convert_kv_pages

__all__ = [
    "BIT_EXACT",
    "DEFAULT",
    "KINDS",
    "ConversionPlan",
    "Convert",
    "PageFormat",
    "Reject",
    "Same",
    "Scope",
    "convert_kv_pages",
    "negotiate",
]


def __getattr__(name: str) -> object:
    # Late, so that formats and negotiation can be had without the ops.
    if name == "convert_kv_pages":
        from flashinfer.kv.convert import convert_kv_pages

        return convert_kv_pages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
