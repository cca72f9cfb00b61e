# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What engines import from FlashInfer's module of this name, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.unsupported import unsupported

__all__ = ["FP4Tensor", "get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"]

get_trtllm_gen_multi_ctas_kv_counter_bytes = unsupported(
    "get_trtllm_gen_multi_ctas_kv_counter_bytes", "of a kernel of NVIDIA's"
)


def get_device_sm_count(device: torch.device) -> int:
    """Compute units of a GPU.

    Parameters
    ----------
    device
        A GPU.
    """
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class FP4Tensor:
    """Raise NotImplementedError when made: NVFP4 is a format of NVIDIA's.

    Parameters
    ----------
    args, kwargs
        Whatever FlashInfer's takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("FP4Tensor: not supported, as it is for NVFP4, a format of NVIDIA's")
