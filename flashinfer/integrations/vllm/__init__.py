# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Plug-in for vLLM, loaded by its `vllm.general_plugins` entry point."""

from __future__ import annotations

_CONNECTORS = {
    "FlashInferNixlConnector": "NixlConnector",
    "FlashInferNixlPushConnector": "NixlPushConnector",
}


def register() -> None:
    """Make the connectors known to vLLM under names of their own; vLLM calls this in each of its processes.

    Naming the module in `kv_connector_module_path` needs no registration, and is the better way: vLLM has rules for a
    connector called `NixlConnector`, which then also hold for ours.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, class_name in _CONNECTORS.items():
        # A process may run its plug-ins more than once, and vLLM refuses a name that it knows.
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "flashinfer.integrations.vllm.nixl", class_name)
