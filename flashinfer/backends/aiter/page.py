# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append through AITER's `reshape_and_cache_flash`, called from compiled code (csrc_rocm/shims/page_aiter.cc).

AITER takes a slot per token and NHD pages that are dense but for one page stride, the same for K and V, which it keeps
in 32 bits. Whatever is otherwise is declined here, by the same sentences for `backend="aiter"` and for "auto".
"""

from __future__ import annotations

import threading

import torch

from flashinfer.core import faults
from flashinfer.core.checks import INT32_MAX
from flashinfer.core.op import checks_arguments
from flashinfer.jit import aiter_lib

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
# A launch counts its threads in 32 bits; AITER gives a workgroup of up to this many to each row.
_THREADS_PER_ROW, _MOST_THREADS = 512, 2**32 - 1

_units: dict[torch.device, torch.Tensor] = {}
_lock = threading.Lock()


def why_not_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
) -> str | None:
    # Asked at every call, and tensors answer slowly: the usual case in as few questions as tell it from all others.
    nnz, heads, dim = append_key.shape
    row, page = append_key.stride(), k_cache.stride()
    dense = heads * dim
    if (
        row == append_value.stride() == (row[0], dim, 1)
        and page == v_cache.stride() == (page[0], dense, dim, 1)
        and max(row[0], page[0]) <= INT32_MAX
        and nnz * _THREADS_PER_ROW <= _MOST_THREADS
        and append_key.dtype in _DTYPES
        and k_cache.dtype == append_key.dtype
        and kv_layout == "NHD"
    ):
        return aiter_lib.why_not_cache_module(append_key.device)
    if kv_layout != "NHD":
        return f"AITER writes NHD pages, got {kv_layout}"
    if append_key.dtype not in _DTYPES:
        return f"AITER takes rows of float32, float16 or bfloat16, got {append_key.dtype}"
    if k_cache.dtype != append_key.dtype:
        return f"needs rows of the cache's dtype {k_cache.dtype}, got {append_key.dtype}"
    return (
        _why_not_rows("append_key", append_key)
        or _why_not_rows("append_value", append_value)
        or _why_not_caches(k_cache, v_cache)
        or aiter_lib.why_not_cache_module(append_key.device)
    )


def _why_not_rows(name: str, rows: torch.Tensor) -> str | None:
    nnz, heads, dim = rows.shape
    token, head, _ = rows.stride()
    if heads > 1 and head != dim:
        return f"AITER needs the heads of a row of {name} side by side, a stride of {dim}, got {head}"
    if token > INT32_MAX or nnz > INT32_MAX:
        return f"AITER counts rows of {name} and the elements between them in 32 bits, got {nnz} and {token}"
    if nnz * min(heads * dim, _THREADS_PER_ROW) > _MOST_THREADS:
        return f"AITER launches a workgroup a row, more threads than a launch may have for {nnz} rows"
    return None


def _why_not_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> str | None:
    heads, dim = k_cache.shape[2:]
    dense = (heads * dim, dim, 1)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        page, *inside = cache.stride()
        # The stride of an axis of one element says nothing.
        if any(size > 1 and got != want for size, got, want in zip(cache.shape[1:], inside, dense, strict=True)):
            return f"AITER needs {name} dense inside a page, strides [..., {dense[0]}, {dense[1]}, 1], got {inside}"
        if page > INT32_MAX:
            return f"AITER keeps the elements between pages of {name} in 32 bits, got {page}"
    if k_cache.stride(0) != v_cache.stride(0):
        return f"AITER takes one page stride for K and V, got {k_cache.stride(0)} and {v_cache.stride(0)}"
    return None


def ready_append_paged_kv_cache(append_key: torch.Tensor, *args: object) -> None:
    """Build what the call needs; nothing to do after the first on a device."""
    if append_key.device not in _units:
        prepare_device(append_key.device)


def prepare_device(device: torch.device) -> None:
    """Load the module, and put the scale on the device that AITER reads even where it scales nothing."""
    aiter_lib.cache_module(device)
    with _lock, torch.inference_mode(False):
        if device not in _units:
            unit = torch.ones(1, device=device)
            if device.type == "cuda":
                # Other streams read it from now on. While a graph is being captured this fails, and rightly.
                torch.cuda.current_stream(device).synchronize()
            _units[device] = unit


@checks_arguments
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str,
    k_scale: float,
    v_scale: float,
) -> None:
    device = append_key.device
    fault = faults.words(device)
    aiter_lib.cache_module(device).append_paged_kv_cache(
        append_key,
        append_value,
        batch_indices,
        positions,
        k_cache,
        v_cache,
        kv_indices,
        kv_indptr,
        k_scale,
        v_scale,
        _units[device],
        fault,
    )
    faults.settle(fault)
