# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA context through AITER's own fused kernel. Tested against a stand-in: no AMD GPU was at hand."""

from __future__ import annotations

import torch

from flashinfer.backends.aiter import entry
from flashinfer.core import aiter_install
from flashinfer.core.dtypes import FP8, fp8_of
from flashinfer.core.mla_project import scale_mode
from flashinfer.core.mla_shape import is_flat

MODULE, NAME = "aiter.ops.triton.gather_kv_b_proj", "gather_kv_b_proj"
# Release that first has the op with each way of scaling the weight.
SINCE = {"block": (0, 1, 12), "row": (0, 1, 13), "none": (0, 1, 14)}
# From here on pages of one token have a kernel of their own, which multiplies in bfloat16. It takes entry `t` of the
# page table for row `t` of the results, for as many rows as there are, and looks at neither indptr.
FLAT_SINCE = (0, 1, 21)
# The kernel is written for four scale blocks of 128 and fails to compile for another rank.
RANK = 512
# Tokens that the kernel takes at once, by bytes of an element of the cache.
CHUNK = {1: 32, 2: 16}


def _flavour(device: torch.device) -> torch.dtype:
    """The FP8 that the device computes with."""
    return fp8_of(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))


def _why_not_version(mode: str | None, nope: int, v_dim: int) -> str | None:
    install = aiter_install.find_aiter()
    if install is None:
        return aiter_install.why_not_aiter()
    version = install.release
    if version is None:
        return f"needs to know AITER's version, as scales depend on it, got {install.version}"
    since = SINCE[mode or "none"]
    if version < since:
        return f"needs AITER {'.'.join(map(str, since))} for weight scales of kind {mode!r}, got {install.version}"
    if version < (0, 1, 13) and nope != v_dim:
        return f"needs AITER 0.1.13 for a nope_dim unlike the v_dim, got {install.version} with {nope} and {v_dim}"
    return None


def _why_not_dtypes(kv_cache: torch.Tensor, weight: torch.Tensor, k_out: torch.Tensor) -> str | None:
    if k_out.dtype != torch.bfloat16:
        return f"needs results in bfloat16, got {k_out.dtype}"
    for name, t in (("kv_cache", kv_cache), ("kv_b_proj_weight", weight)):
        if t.dtype in FP8 and t.dtype != (flavour := _flavour(kv_cache.device)):
            return f"needs {name} in the device's own FP8, {flavour}, got {t.dtype}"
    if kv_cache.dtype in FP8 and weight.dtype not in FP8 and not _has_flat_kernel(kv_cache):
        return (
            "needs an FP8 weight with an FP8 cache, or pages of one token and AITER 0.1.21: others are multiplied in "
            f"FP8, to which the kernel casts a weight of {weight.dtype} without a scale"
        )
    return None


def _has_flat_kernel(kv_cache: torch.Tensor) -> bool:
    install = aiter_install.find_aiter()
    version = install.release if install is not None else None
    return kv_cache.size(1) == 1 and version is not None and version >= FLAT_SINCE


def why_not_gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> str | None:
    if reason := entry.why_not(kv_cache.device, MODULE, NAME):
        return reason
    rank, page_size = kv_b_proj_weight.size(1), kv_cache.size(1)
    nope = k_out.size(2) - (kv_cache.size(2) - rank)
    if reason := _why_not_version(scale_mode(kv_b_proj_weight, weight_scale), nope, v_out.size(2)):
        return reason
    if rank != RANK:
        return f"needs kv_lora_rank {RANK}, got {rank}"
    if reason := _why_not_dtypes(kv_cache, kv_b_proj_weight, k_out):
        return reason
    if _has_flat_kernel(kv_cache):
        if not is_flat(kv_cache, kv_indptr, kv_prefix_sum_context_lens):
            return "needs one tensor for kv_indptr and kv_prefix_sum_context_lens with pages of one token, got two"
        if kv_indices.size(0) != k_out.size(0):
            return (
                f"needs as many kv_indices as k_out has rows with pages of one token, got {kv_indices.size(0)} and "
                f"{k_out.size(0)}"
            )
    chunk = CHUNK[kv_cache.element_size()]
    if chunk % page_size:
        return f"needs a page_size that divides {chunk} with a cache of {kv_cache.dtype}, got {page_size}"
    if weight_scale is not None and kv_b_proj_weight.size(0) % 128:
        return f"needs a scaled weight of a multiple of 128 rows, got {kv_b_proj_weight.size(0)}"
    for name, t in (
        ("kv_indptr", kv_indptr),
        ("kv_indices", kv_indices),
        ("kv_prefix_sum_context_lens", kv_prefix_sum_context_lens),
    ):
        if t.dtype != torch.int32:
            return f"needs {name} in int32, got {t.dtype}"
    for name, t in (("kv_cache", kv_cache), ("kv_b_proj_weight", kv_b_proj_weight), ("k_out", k_out), ("v_out", v_out)):
        if not t.is_contiguous():
            return f"needs {name} contiguous, got stride {t.stride()}"
    return None


def ready_gather_kv_b_proj(*args: object) -> None:
    """Import AITER; nothing to do after the first time."""
    entry.entry_point(MODULE, NAME)


def gather_kv_b_proj(
    kv_cache: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_prefix_sum_context_lens: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    if k_out.size(0) == 0:
        return
    entry.entry_point(MODULE, NAME)(
        kv_cache,
        # Not looked at for a cache of 16 bits, but Triton wants a pointer.
        kv_cache if kv_scale is None else kv_scale,
        kv_indptr,
        kv_indices,
        kv_prefix_sum_context_lens,
        kv_b_proj_weight,
        weight_scale,
        k_out,
        v_out,
    )
