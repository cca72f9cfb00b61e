# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of one request, public as `flashinfer.decode` and `flashinfer.prefill`. Signatures follow FlashInfer."""

from __future__ import annotations

import torch

from flashinfer.core.checks import describe, fail, refuse_extras, require_tensor
from flashinfer.custom_mask import pack_mask
from flashinfer.ops import attention as ops
from flashinfer.planned import AUTO_NAMES, refuse_rope, scales_of
from flashinfer.run_options import Options, Results

DECODE = "single_decode_with_kv_cache"
PREFILL = "single_prefill_with_kv_cache"


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query.

    Parameters
    ----------
    q
        `[heads, head_dim]`.
    k, v
        `[kv_len, num_kv_heads, head_dim]` for NHD, `[num_kv_heads, kv_len, head_dim]` for HND; any strides outside the
        last dimension.
    kv_layout
        "NHD" or "HND".
    q_scale, k_scale, v_scale
        What queries, keys and values are to be multiplied with.
    window_left, logits_soft_cap, sm_scale
        As in `paged_attention`.
    pos_encoding_mode
        "NONE"; others are refused.
    use_tensor_cores, rope_scale, rope_theta
        Have no effect.
    return_lse
        Whether to return the log-sum-exp as well.

    Returns
    -------
    torch.Tensor or tuple
        `out` like q, or `(out, lse)` with lse float32 `[heads]` in base 2.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit.
    """
    refuse_rope(DECODE, pos_encoding_mode)
    require_tensor(DECODE, "q", q)
    if q.dim() != 2:
        fail(DECODE, "q", "[heads, head_dim]", describe(q))
    options = Options(False, window_left, logits_soft_cap or 0.0, sm_scale)
    scales = scales_of(DECODE, q_scale, k_scale, v_scale)
    results = Results(DECODE, None, None, return_lse)
    found = _attend(DECODE, q.unsqueeze(0), k, v, kv_layout, options, scales, None, results)
    return (found[0].squeeze(0), found[1].squeeze(0)) if isinstance(found, tuple) else found.squeeze(0)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request's queries.

    Parameters
    ----------
    q
        `[q_len, heads, head_dim]`.
    k, v, kv_layout, window_left, logits_soft_cap, sm_scale, k_scale, v_scale, return_lse
        As in `single_decode_with_kv_cache`; head dimensions of k and v may differ.
    custom_mask
        bool `[q_len, kv_len]`, True where a query sees a key; takes the place of `causal`.
    packed_custom_mask
        The same as uint8, 8 keys to a byte from the lowest bit on; takes the place of `custom_mask`.
    causal
        Whether query i sees only the first `kv_len - q_len + i + 1` keys.
    backend
        "auto", one of FlashInfer's names, which mean the same, or "aiter", "triton" or "reference".
    rope_scale, rope_theta
        Have no effect.
    scale_q, scale_k, scale_v, o_dtype, pos_encoding_mode, use_fp16_qk_reduction, kv_cache_sf
        Refused unless they are None, q's dtype, "NONE" and False.

    Returns
    -------
    torch.Tensor or tuple
        `out [q_len, heads, v's head_dim]`, or `(out, lse)` with lse float32 `[q_len, heads]` in base 2. A query that
        sees no key gives output 0 and lse -inf.

    Raises
    ------
    InvalidArgumentError
        For shapes, dtypes or devices that do not fit.
    """
    refuse_rope(PREFILL, pos_encoding_mode, use_fp16_qk_reduction)
    per_head = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
    refuse_extras(PREFILL, {}, {**per_head, "kv_cache_sf": kv_cache_sf})
    require_tensor(PREFILL, "q", q)
    if o_dtype not in (None, q.dtype):
        fail(PREFILL, "o_dtype", f"q's, {q.dtype}", o_dtype)
    if q.dim() != 3:
        fail(PREFILL, "q", "[q_len, heads, head_dim]", describe(q))
    options = Options(causal, window_left, logits_soft_cap or 0.0, sm_scale)
    scales = scales_of(PREFILL, None, k_scale, v_scale)
    mask = packed_custom_mask
    if mask is None and custom_mask is not None:
        require_tensor(PREFILL, "custom_mask", custom_mask)
        if isinstance(k, torch.Tensor) and k.dim() == 3:
            kv_len = k.size(0 if kv_layout == "NHD" else 1)
            if custom_mask.numel() != q.size(0) * kv_len:
                fail(PREFILL, "custom_mask", f"[{q.size(0)}, {kv_len}]", list(custom_mask.shape))
        mask = pack_mask(PREFILL, custom_mask, torch.tensor([custom_mask.numel()]), q.device)
    results = Results(PREFILL, None, None, return_lse)
    return _attend(PREFILL, q, k, v, kv_layout, options, scales, mask, results, backend)


def _attend(
    where: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    options: Options,
    scales: tuple[float, float, float],
    mask: torch.Tensor | None,
    results: Results,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if kv_layout not in ("NHD", "HND"):
        fail(where, "kv_layout", "'NHD' or 'HND'", repr(kv_layout))
    for name, t in (("k", k), ("v", v)):
        require_tensor(where, name, t)
        if t.dim() != 3:
            shape = "[kv_len, num_kv_heads, head_dim]" if kv_layout == "NHD" else "[num_kv_heads, kv_len, head_dim]"
            fail(where, name, shape, describe(t))
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    q_scale, k_scale, v_scale = scales
    sm_scale = max(q.size(2), 1) ** -0.5 if options.sm_scale is None else float(options.sm_scale)
    out, lse = results.allocate(q, v.size(2))
    # Made on the device: a copy from the host could not be captured.
    ends = torch.arange(2, dtype=torch.int32, device=q.device)
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.numel() < -(-q.size(0) * k.size(0) // 8)):
        fail(where, "custom_mask", f"of {q.size(0)} x {k.size(0)} bits", describe(mask))
    ops.ragged_attention(
        *(q, k, v, ends * q.size(0), ends * k.size(0), options.causal, sm_scale * q_scale * k_scale),
        *(options.window_left, options.logits_soft_cap, 1.0, v_scale, None),
        *(mask, None if mask is None else ends * mask.numel(), results.needs_lse, q.size(0), k.size(0), 0, None),
        *(out, lse),
        backend="auto" if backend in AUTO_NAMES else backend,
    )
    return results.returned(out, lse)
