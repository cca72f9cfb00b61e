# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Who chooses the layout of the KV cache: the backend for two-slot pages, vLLM's connector for all others.

Decided from configuration alone: vLLM asks for it in processes that have no attention layers.
"""

from __future__ import annotations

from typing import Any

from flashinfer.integrations.vllm.attention.pages import SHUFFLED, configured_kind
from flashinfer.integrations.vllm.nixl.local_pages import KNOB


def backend_chooses(vllm_config: Any) -> bool:
    """Whether the connector must not ask for a layout.

    A backend with two-slot pages lists the layout that its kernels are fast in first. vLLM's connector asks for blocks
    outside of head slots, which shuffled decode refuses; half-page regions make either layout fit for a transfer.
    """
    import vllm.envs as envs

    kind = vllm_config.kv_transfer_config.get_from_extra_config(KNOB, None)
    if kind is not None:
        return bool(kind != "standard")
    name = getattr(vllm_config.attention_config.backend, "name", None)
    if name == "CUSTOM":
        return configured_kind() == SHUFFLED
    # Unset means that the platform picks one, which is the shuffling backend where shuffling is switched on.
    return bool(envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT) and name in (None, "ROCM_AITER_FA")
