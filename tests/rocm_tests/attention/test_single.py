# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`single_decode_with_kv_cache` and `single_prefill_with_kv_cache` against float64 arithmetic row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.attention.wrapper_case import Case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode(kv_layout: str, dtype: torch.dtype) -> None:
    case = Case([1], [19], dtype=dtype, heads=(6, 3))
    k, v = (t if kv_layout == "NHD" else t.transpose(0, 1).contiguous() for t in (case.k, case.v))
    for options in (
        {},
        {"window_left": 4},
        {"logits_soft_cap": 0.5, "sm_scale": 0.3},
        {"k_scale": 0.5, "v_scale": 2.0},
    ):
        out, lse = flashinfer.single_decode_with_kv_cache(case.q[0], k, v, kv_layout, return_lse=True, **options)
        assert out.shape == (6, 32)
        case.compare((out.unsqueeze(0), lse.unsqueeze(0)), **options)
        assert_equal_bits(flashinfer.single_decode_with_kv_cache(case.q[0], k, v, kv_layout, **options), out)
    scaled = flashinfer.single_decode_with_kv_cache(case.q[0], k, v, kv_layout, q_scale=0.5)
    assert_close(scaled, case.answer(k_scale=0.5)[0][0])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("lens", [(7, 12), (12, 7), (3, 0), (1, 1), (0, 4)], ids=str)
def test_prefill(lens: tuple[int, int], kv_layout: str) -> None:
    case = Case([lens[0]], [lens[1]])
    k, v = (t if kv_layout == "NHD" else t.transpose(0, 1) for t in (case.k, case.v))
    for options in ({}, {"causal": True}, {"causal": True, "window_left": 2}, {"logits_soft_cap": 1.0}):
        got = flashinfer.single_prefill_with_kv_cache(
            case.q, k, v, kv_layout=kv_layout, return_lse=True, backend="fa2", **options
        )
        case.compare(got, **options)


def test_masks() -> None:
    case = Case([5], [7])
    mask = case.masks()[0]
    bits = mask.flatten().tolist()
    packed = [sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, 35, 8)]
    for options in (
        {"custom_mask": mask},
        {"custom_mask": mask, "causal": True},
        {"packed_custom_mask": torch.tensor(packed, dtype=torch.uint8)},
    ):
        got = flashinfer.single_prefill_with_kv_cache(case.q, case.k, case.v, return_lse=True, **options)
        case.compare(got, masks=[mask])


def test_value_heads_of_another_size() -> None:
    case = Case([5], [7], D=48)
    out = flashinfer.single_prefill_with_kv_cache(case.q, case.k, case.v[..., :32], causal=True)
    assert_close(out, case.answer(causal=True)[0][..., :32])


def test_bad_arguments_are_named() -> None:
    case = Case([1], [5])
    q, k, v = case.q, case.k, case.v
    decode: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, k, v), {}, r"q must be \[heads, head_dim\], got float32\[1, 4, 32\]"),
        ((q[0], k[0], v), {}, r"k must be \[kv_len, num_kv_heads, head_dim\], got float32\[2, 32\]"),
        ((q[0], k, v[0]), {"kv_layout": "HND"}, r"v must be \[num_kv_heads, kv_len, head_dim\]"),
        ((q[0], k, v), {"kv_layout": "SHUFFLED"}, "kv_layout must be 'NHD' or 'HND', got 'SHUFFLED'"),
        ((q[0], k, v), {"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode must be 'NONE', as nothing else"),
        ((q[0].tolist(), k, v), {}, "q must be a tensor, got list"),
    ]
    for arguments, options, sentence in decode:
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"single_decode_with_kv_cache: {sentence}"):
            flashinfer.single_decode_with_kv_cache(*arguments, **options)
    ones = torch.ones(1)
    prefill: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q[0], k, v), {}, r"q must be \[q_len, heads, head_dim\]"),
        ((q, k, v), {"scale_q": ones}, "scale_q must be None, as it is not supported"),
        ((q, k, v), {"kv_cache_sf": ones}, "kv_cache_sf must be None, as it is not supported"),
        ((q, k, v), {"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction must be False"),
        ((q, k, v), {"o_dtype": torch.float16}, r"o_dtype must be q's, torch\.float32, got torch\.float16"),
        ((q, k, v), {"custom_mask": torch.ones(2, 5, dtype=torch.bool)}, r"custom_mask must be \[1, 5\], got \[2, 5\]"),
        ((q, k, v), {"packed_custom_mask": ones[:0].byte()}, "custom_mask must be of 1 x 5 bits, got uint8"),
    ]
    for arguments, options, sentence in prefill:
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"single_prefill_with_kv_cache: {sentence}"):
            flashinfer.single_prefill_with_kv_cache(*arguments, **options)
