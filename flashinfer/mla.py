# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) over a paged cache. Signatures follow FlashInfer 0.7.4."""

from __future__ import annotations

import torch

from flashinfer.core import mla_plan
from flashinfer.core.checks import require_tensor
from flashinfer.mla_arguments import score_scale
from flashinfer.mla_wrapper import BatchMLAPagedAttentionWrapper, results
from flashinfer.ops import mla as ops
from flashinfer.planned import scale_of

__all__ = ["BatchMLAPagedAttentionWrapper", "mla_kv_view", "mla_paged_attention"]


def mla_kv_view(ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> torch.Tensor | None:
    """One view of two caches that are adjacent halves of one buffer, without a copy; None if they are not.

    Adjacent are the results of `torch.split(buffer, [ckv_dim, kpe_dim], dim=-1)`, also for one layer of a larger
    buffer. Not adjacent are separate allocations, halves in reversed order, rows with padding, pages with gaps, and
    halves of unlike dtype.

    Parameters
    ----------
    ckv_cache, kpe_cache
        `[pages, page_size, ckv_dim]` and `[pages, page_size, kpe_dim]`.

    Returns
    -------
    torch.Tensor or None
        `[pages, page_size, ckv_dim + kpe_dim]` on the memory of both.

    Raises
    ------
    InvalidArgumentError
        For what is no tensor.

    Notes
    -----
    No graph of `torch.compile` holds this: which caches are one buffer is known when it is called, and two pairs of the
    same shapes and strides may differ in it. A graph ends before the call and another begins behind it; with
    `fullgraph=True` the compiler raises, quoting a sentence of this package's.
    """
    try:
        view = mla_plan.mla_kv_view(ckv_cache, kpe_cache)
    except RuntimeError:
        # What is no tensor torch refuses in words of its own. Looked at afterwards: the answer costs 2 us.
        _require_caches(ckv_cache, kpe_cache)
        raise
    if view is None:
        _require_caches(ckv_cache, kpe_cache)
    return view


def _require_caches(ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> None:
    for name, cache in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        require_tensor("mla_kv_view", name, cache)


def mla_paged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    *,
    causal: bool,
    sm_scale: float,
    ckv_scale: float = 1.0,
    kpe_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA attention in one call: `out = softmax((q_nope ckv^T + q_pe kpe^T) * sm_scale) ckv`.

    Plans each call anew, which reads the metadata on the host: `BatchMLAPagedAttentionWrapper` plans once for all
    layers.

    Parameters
    ----------
    q_nope, q_pe
        `[tokens, heads, head_dim_ckv]` and `[tokens, heads, head_dim_kpe]`, the requests one after the other.
    ckv_cache, kpe_cache
        `[pages, page_size, head_dim_ckv]` and `[pages, page_size, head_dim_kpe]` of q's dtype or FP8 (E4M3), each with
        its own strides: two halves of one buffer, or two buffers.
    qo_indptr, kv_indptr
        `[batch_size + 1]` int32 or int64, where each request's queries, and its pages in `kv_indices`, begin.
    kv_indices
        `[>= kv_indptr[-1]]` int32 or int64, page ids. The reference refuses one out of range; kernels take them as they
        are, and read other memory there.
    kv_len_arr
        `[batch_size]` int32 or int64, tokens of each request, its new ones included.
    causal
        Whether query i of a request of `q_len` sees only its first `kv_len - q_len + i + 1` keys.
    sm_scale
        Scale of the scores.
    ckv_scale, kpe_scale
        What the stored FP8 values of each cache are to be multiplied with.
    out, lse
        Tensors to write into; allocated if None.
    return_lse
        Whether to return the log-sum-exp as well.
    backend
        "auto", or the name of one.

    Returns
    -------
    torch.Tensor or tuple
        `out` like q_nope, or `(out, lse)` with lse float32 `[tokens, heads]` in base 2. A query that sees no key gives
        output 0 and lse -inf.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit, or a request that contradicts its pages.
    """
    needs_lse = return_lse or lse is not None
    scales = scale_of(mla_plan.OP, "ckv_scale", ckv_scale), scale_of(mla_plan.OP, "kpe_scale", kpe_scale)
    out, lse = results(q_nope, out, lse)
    ops.mla_paged_attention(
        *(q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, kv_len_arr),
        *(causal, score_scale(mla_plan.OP, sm_scale), *scales, needs_lse),
        *(0, False),
        *(None, 0, 0, None),
        *(out, lse),
        backend=backend,
    )
    return (out, lse) if return_lse else out
