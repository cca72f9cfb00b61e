# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Good calls of the attention and merge ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rocm_tests.contract.sample import INDEX, PAGES, D, H, N, Sample, randn, rows
from rocm_tests.page.oracle import make_batch

ROWS = ("q", "qo_indptr", "kv_indptr", "out", "lse")


def options(n: int, variant: int, q: torch.Tensor, kv_lens: list[int], dim_vo: int = D) -> dict[str, Any]:
    """What both ops end with: variant 1 has all that is optional."""
    bits = [-(-2 * length // 8) for length in kv_lens]
    optional = {
        "sinks": randn(3 * H, seed=5),
        "custom_mask": torch.arange(sum(bits)).mul(37).bitwise_and(255).to(torch.uint8),
        "mask_indptr": torch.tensor([0, *bits]).cumsum(0, dtype=INDEX[variant]),
    }
    return {
        "causal": variant == 0,
        "sm_scale": 0.25,
        "window_left": (-1, 5)[variant],
        "logits_soft_cap": (0.0, 30.0)[variant],
        "k_scale": (1.0, 0.5)[variant],
        "v_scale": (1.0, 2.0)[variant],
        **(optional if variant else dict.fromkeys(optional)),
        "needs_lse": True,
        "max_q_len": 2 * variant,
        "max_kv_len": 0,
        "split_size": 256 * variant,
        "scratch": None,
        "out": torch.full((*q.shape[:2], dim_vo), 7.0, dtype=q.dtype),
        "lse": torch.full(q.shape[:2], 7.0),
    }


def queries(n: int, variant: int) -> torch.Tensor:
    dtype = (torch.float32, torch.bfloat16)[variant]
    return rows((randn(2 * n, 3 * H, 2 * D, dtype=dtype)[..., :D],))[0]


def paged(n: int, variant: int) -> Sample:
    q, lens = queries(n, variant), [17 + b for b in range(n)]
    batch = make_batch(lens, [2] * n, N, index_dtype=INDEX[variant])
    pool = randn(PAGES, H, N, 2 * D, seed=1, dtype=q.dtype)
    kv_layout, caches = (("NHD", randn(2, PAGES, N, H, D).unbind()), ("HND", (pool[..., :D], pool[..., D:])))[variant]
    arguments = {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "qo_indptr": torch.arange(n + 1, dtype=INDEX[variant]) * 2,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_last_page_len": batch.last_page_len,
        "kv_layout": kv_layout,
        **options(n, variant, q, lens),
    }
    masks = ("custom_mask", "mask_indptr") if variant else ()
    return Sample(arguments, (*ROWS, "kv_indices", "kv_last_page_len", *masks), ("scratch",))


def ragged(n: int, variant: int) -> Sample:
    q, lens = queries(n, variant), [5 + b for b in range(n)]
    fused = randn(sum(lens), H, 2 * D, seed=1, dtype=q.dtype)
    k, v = rows((fused[..., :D], fused[..., D : D + 24]))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "qo_indptr": torch.arange(n + 1, dtype=INDEX[variant]) * 2,
        "kv_indptr": torch.tensor([0, *lens]).cumsum(0, dtype=INDEX[variant]),
        **options(n, variant, q, lens, 24),
    }
    masks = ("custom_mask", "mask_indptr") if variant else ()
    return Sample(arguments, (*ROWS, "k", "v", *masks), ("scratch",))


def states(n: int, count: int, variant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` states of `n` tokens; some have no keys."""
    dtype = (torch.float32, torch.bfloat16)[variant]
    s = randn(n, count, H, seed=1)
    s[: n // 2, 0, 0] = -torch.inf
    return randn(n, count, H, D, dtype=dtype), s


def merge_state(n: int, variant: int) -> Sample:
    v, s = states(n, 2, variant)
    (v_a, v_b), (s_a, s_b) = rows(v.unbind(1)), rows(s.unbind(1))
    out, s_out = torch.full((n, H, D), 7.0, dtype=v.dtype), torch.full((n, H), 7.0)
    arguments = {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b, "out": out, "s_out": s_out}
    return Sample(arguments, tuple(arguments))


def merge_in_place(n: int, variant: int) -> Sample:
    made = merge_state(n, variant).arguments
    arguments = {
        "v": made["v_a"].clone(),
        "s": made["s_a"].clone(),
        "v_other": made["v_b"],
        "s_other": made["s_b"],
        "mask": torch.arange(n) % 2 == 0 if variant else None,
    }
    return Sample(arguments, tuple(a for a, t in arguments.items() if t is not None))


def merge_states(n: int, variant: int) -> Sample:
    v, s = states(n, 3, variant)
    arguments = {"v": v, "s": s, "out": torch.full((n, H, D), 7.0, dtype=v.dtype), "s_out": torch.full((n, H), 7.0)}
    return Sample(arguments, tuple(arguments))


ATTENTION_SAMPLES: dict[str, tuple[Callable[[int, int], Sample], int]] = {
    "paged_attention": (paged, 2),
    "ragged_attention": (ragged, 2),
    "merge_state": (merge_state, 2),
    "merge_state_in_place": (merge_in_place, 2),
    "merge_states": (merge_states, 2),
}
