# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What `BatchMLAPagedAttentionWrapper` and its plans are given: what is refused, and forms that are kept."""

from __future__ import annotations

import itertools

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, integer, number

# Of a workspace: its memory is seen as float32.
_ALIGNMENT = 4


def check_planned(
    op: str,
    num_heads: int,
    head_dim_ckv: int,
    head_dim_kpe: int,
    page_size: int,
    causal: bool,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
) -> None:
    """Refuse what is not of its kind, before it is kept and a run stumbles over it."""
    for name, value, least in (
        ("num_heads", num_heads, 1),
        ("head_dim_ckv", head_dim_ckv, 1),
        ("head_dim_kpe", head_dim_kpe, 0),
        ("page_size", page_size, 1),
    ):
        integer(op, name, value, least, INT32_MAX)
    if not isinstance(causal, bool):
        fail(op, "causal", "True or False", repr(causal))
    for name, dtype in (("q_data_type", q_data_type), ("kv_data_type", kv_data_type)):
        if not isinstance(dtype, torch.dtype):
            fail(op, name, "a torch.dtype", repr(dtype))


def score_scale(op: str, sm_scale: float) -> float:
    """The scale of the scores as a float."""
    number(op, "sm_scale", sm_scale)
    return float(sm_scale)


def page_ids(kv_indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page ids as contiguous int32 on the device: the tensor itself, where it is that."""
    if kv_indices.dtype == torch.int64:
        # An id beyond 32 bits must not become another page's.
        kv_indices = kv_indices.clamp(-INT32_MAX, INT32_MAX)
    return kv_indices.to(device, torch.int32, non_blocking=True).contiguous()


def check_workspace(op: str, buffer: torch.Tensor) -> None:
    """Refuse a float workspace that cannot be seen as float32."""
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous():
        fail(op, "float_workspace_buffer", "a contiguous tensor", describe(buffer))
    if buffer.storage_offset() * buffer.element_size() % _ALIGNMENT:
        fail(op, "float_workspace_buffer", f"aligned to {_ALIGNMENT} bytes", f"address {buffer.data_ptr():#x}")


def check_buffers(op: str, buffers: dict[str, torch.Tensor | None], device: torch.device) -> None:
    """Refuse a graph's buffers of metadata that plans cannot be copied into."""
    found: dict[str, torch.Tensor] = {}
    for name, buffer in buffers.items():
        is_vector = isinstance(buffer, torch.Tensor) and buffer.dtype == torch.int32 and buffer.dim() == 1
        if not is_vector or buffer is None or not buffer.is_contiguous():
            fail(op, name, "a contiguous 1-D int32 buffer with use_cuda_graph", describe(buffer))
        if buffer.device != device:
            fail(op, name, f"on {device}", buffer.device)
        found[name] = buffer
    batch = found["kv_len_arr"].numel()
    for name in ("qo_indptr", "kv_indptr"):
        if found[name].numel() != batch + 1:
            fail(op, name, f"of length {batch + 1}, one more than kv_len_arr", found[name].numel())
    for (name, a), (other, b) in itertools.combinations(found.items(), 2):
        begin, start = a.data_ptr(), b.data_ptr()
        if begin < start + b.nbytes and start < begin + a.nbytes:
            fail(op, other, f"of memory of its own, apart from {name}", "memory that both have")
