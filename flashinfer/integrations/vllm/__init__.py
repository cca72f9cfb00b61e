# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Plug-in for vLLM, loaded by its `vllm.general_plugins` entry point."""

from __future__ import annotations

_BACKEND = "flashinfer.integrations.vllm.attention.backend.FlashInferRocmBackend"
_CPU_PLATFORM = "flashinfer.integrations.vllm.cpu.platform"
_CONNECTORS = {
    "FlashInferNixlConnector": "NixlConnector",
    "FlashInferNixlPushConnector": "NixlPushConnector",
}


def register() -> None:
    """Make the attention backend and the connectors known to vLLM, which calls this in each of its processes.

    The backend is `CUSTOM`, the connectors have names of their own. On the platform without a GPU, NIXL is told to let
    the engines have the cores.

    Naming the module in `kv_connector_module_path` needs no registration, and is the better way: vLLM has rules for a
    connector called `NixlConnector`, which then also hold for ours.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # Another plug-in may have been first; only --attention-backend CUSTOM makes use of it.
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    for name, class_name in _CONNECTORS.items():
        # A process may run its plug-ins more than once, and vLLM refuses a name that it knows.
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "flashinfer.integrations.vllm.nixl", class_name)
    if current_platform.__class__.__module__ == _CPU_PLATFORM:
        from flashinfer.integrations.vllm.cpu.transfers import let_progress_threads_sleep

        let_progress_threads_sleep()
