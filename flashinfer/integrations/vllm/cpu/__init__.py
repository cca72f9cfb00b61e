# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM as it is on PyPI, run on a machine without a GPU and without vLLM's compiled CPU kernels.

For tests and demonstrations: slow, and only what a dense decoder needs.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flashinfer.core import env

# Their drivers make these, also in a container that was given a GPU.
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")


def register_platform() -> str | None:
    """The platform's class, for vLLM's entry point `vllm.platform_plugins`; None leaves the choice to vLLM.

    A platform of a plug-in goes before all of vLLM's own. So this one wants to be asked for, with
    `FLASHINFER_VLLM_CPU=1`, and stays away from a machine that has a GPU even then.
    """
    if not env.vllm_cpu():
        return None
    found = [node for node in _GPU_NODES if Path(node).exists()]
    if found:
        logging.getLogger("vllm.flashinfer.cpu").warning(
            "%s is set and %s is there: the CPU platform is for machines without a GPU, vLLM chooses its own",
            env.vllm_cpu.name,
            found[0],
        )
        return None
    return "flashinfer.integrations.vllm.cpu.platform.TorchCpuPlatform"
