# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Plug-in for vLLM, loaded by its `vllm.general_plugins` entry point."""

from __future__ import annotations

_BACKEND = "flashinfer.integrations.vllm.attention.backend.FlashInferRocmBackend"
_CONNECTORS = {
    "FlashInferNixlConnector": "NixlConnector",
    "FlashInferNixlPushConnector": "NixlPushConnector",
}


def register() -> None:
    """Make the attention backend and the connectors known to vLLM, which calls this in each of its processes.

    The backend is `CUSTOM`, the connectors have names of their own.

    Naming the module in `kv_connector_module_path` needs no registration, and is the better way: vLLM has rules for a
    connector called `NixlConnector`, which then also hold for ours.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Another plug-in may have been first; only --attention-backend CUSTOM makes use of it.
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    for name, class_name in _CONNECTORS.items():
        # A process may run its plug-ins more than once, and vLLM refuses a name that it knows.
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "flashinfer.integrations.vllm.nixl", class_name)
