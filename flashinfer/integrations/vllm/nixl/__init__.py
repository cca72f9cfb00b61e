# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's NIXL connector with page formats that are negotiated, and converted where that was agreed on.

    --kv-transfer-config '{"kv_connector": "NixlConnector",
                           "kv_connector_module_path": "flashinfer.integrations.vllm.nixl", ...}'

Everything is done by subclassing; `internals.py` lists what of vLLM is leaned on, and is checked at start-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashinfer.integrations.vllm.nixl.connector import NixlConnector, NixlPullConnector, NixlPushConnector

__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]


def __getattr__(name: str) -> object:
    # Late: vLLM asks this module for a class by name, and a half-loaded vLLM must not be loaded further by us.
    if name in __all__:
        from flashinfer.integrations.vllm.nixl import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
