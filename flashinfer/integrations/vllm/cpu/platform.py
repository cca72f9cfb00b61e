# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with torch in the place of its C++ extension."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashinfer.integrations.vllm.cpu import ops

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class TorchCpuPlatform(CpuPlatform):
    """What differs from vLLM's `CpuPlatform`, and why."""

    @classmethod
    def import_kernels(cls) -> None:
        """The wheel's extensions need CUDA's libraries; the few ops that are called by name come from torch."""
        ops.register()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: AttentionBackendEnum | None, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The backend that was asked for, or ours: vLLM's platform knows only those written in C++."""
        return str((selected_backend or AttentionBackendEnum.CUSTOM).get_path())

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Without its extension, vLLM's layers take their torch versions, and attention is ours unless it was named."""
        super().apply_config_platform_defaults(vllm_config)
        if vllm_config.attention_config.backend is None:
            vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
        chosen = vllm_config.compilation_config.custom_ops
        if "all" not in chosen and "none" not in chosen:
            chosen.append("none")

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """One rank stays in the engine's process: a further one competes for cores and took up to 25 s a request.

        Further ranks are started as `VLLM_WORKER_MULTIPROC_METHOD` says, and spawned without it, as vLLM's CPU platform
        always does: each then imports vLLM again.
        """
        method = os.environ.get(_METHOD)
        parallel = vllm_config.parallel_config
        in_process = parallel.distributed_executor_backend == "uni" and parallel.world_size == 1
        super().check_and_update_config(vllm_config)
        if in_process:
            parallel.distributed_executor_backend = "uni"
        if method is not None:
            os.environ[_METHOD] = method

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """None known: vLLM's NIXL connector would pin the whole engine to one of these cores."""
        return []
