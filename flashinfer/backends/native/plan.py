# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Host planners in C++ whose results go to a device: of attention, contexts of an MLA prefill, batches of mixed phases.

They look at host memory only, so there is one module, that of the CPU, for all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashinfer.jit.load import load_module
from flashinfer.jit.spec import JitSpec

SPEC = JitSpec(
    name="plan",
    # None that only writes its arguments: these have results.
    ops=(),
    shims=("shims/attention_batch.cc", "shims/mla_context_plan.cc", "shims/phase_plan.cc"),
    kernels_cpu=("kernels_cpu/context_chunks.cc", "kernels_cpu/mla_context_plan.cc", "kernels_cpu/phase_plan.cc"),
)


@functools.cache
def planner(name: str) -> Callable[..., Any]:
    """The torch op itself: a Python function around it would cost as much as it does."""
    module = load_module(SPEC, torch.device("cpu"))
    op: Callable[..., Any] = getattr(getattr(torch.ops, module.namespace), name).default._op
    return op
