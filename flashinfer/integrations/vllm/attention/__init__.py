# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The attention backend FLASHINFER_ROCM: this package's appends and attention, on pages of a kind that one chooses.

    vllm serve MODEL --attention-backend CUSTOM --block-size 16

CUSTOM is the name that vLLM keeps for backends of other projects. A name of our own could be registered too, but vLLM
hands its configuration to new processes before they load any plug-in, and only the names it brings are known there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashinfer.integrations.vllm.attention.backend import FlashInferRocmBackend

__all__ = ["FlashInferRocmBackend"]


def __getattr__(name: str) -> object:
    # Late: the backend's module needs vLLM's, and pages.py does not.
    if name in __all__:
        from flashinfer.integrations.vllm.attention import backend

        return getattr(backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
