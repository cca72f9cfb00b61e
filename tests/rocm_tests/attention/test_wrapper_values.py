# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the attention wrappers compute, against float64 arithmetic row by row, in pools whose unused tokens are NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.attention.wrapper_case import LSE, NAN, Case

Run = Callable[..., Any]
FP8 = torch.float8_e4m3fn


def planned(kind: str, case: Case, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """A planned wrapper of each kind, and what its runs begin with."""
    wrapper = getattr(case, kind)()
    getattr(case, f"plan_{kind}")(wrapper, **options)
    return wrapper, (case.q, case.k, case.v) if kind == "ragged" else (case.q, case.cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED"])
def test_decode(kv_layout: str, dtype: torch.dtype) -> None:
    case = Case([1] * 5, [33, 1, 0, 16, 47], kv_layout=kv_layout, page_size=16, dtype=dtype)
    wrapper, inputs = planned("decode", case)
    case.compare(wrapper.run(*inputs, return_lse=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED"])
def test_prefill(kv_layout: str, dtype: torch.dtype, causal: bool) -> None:
    case = Case([5, 1, 0, 17, 3], [33, 1, 9, 17, 2], kv_layout=kv_layout, page_size=8, dtype=dtype)
    for kind in ("paged", "ragged"):
        wrapper, inputs = planned(kind, case, causal=causal)
        case.compare(wrapper.run(*inputs, return_lse=True), causal=causal)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (14, 2), (9, 3), (6, 6)], ids=str)
@pytest.mark.parametrize("D", [64, 80, 112, 128])
def test_heads_and_head_sizes(heads: tuple[int, int], D: int) -> None:
    """flashinfer-ai/flashinfer#2684 and #4299; results are slices of a tensor whose other heads are not touched."""
    case = Case([15, 1], [20, 3], heads=heads, D=D)
    Hq = heads[0]
    for kind in ("paged", "ragged"):
        wrapper, inputs = planned(kind, case, causal=True)
        out, lse = torch.full((16, Hq + 2, D), NAN), torch.full((16, Hq + 2), NAN)
        wrapper.run(*inputs, out=out[:, 1:-1], lse=lse[:, 1:-1])
        case.compare((out[:, 1:-1], lse[:, 1:-1]), causal=True)
        for t in (out, lse):
            assert bool(t[:, [0, -1]].isnan().all())


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_page_edges(page_size: int, over: int) -> None:
    lens = [page_size + over, 3 * page_size + over, 7]
    for kind in ("decode", "paged"):
        case = Case([1, 1, 1], lens, page_size=page_size)
        wrapper, inputs = planned(kind, case)
        case.compare(wrapper.run(*inputs, return_lse=True))


OPTIONS = [
    {"window_left": 0},
    {"window_left": 5},
    {"logits_soft_cap": 0.5},
    {"sm_scale": 1.0},
    {"sm_scale": 0.01, "logits_soft_cap": 2.0, "window_left": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_at_plan_and_at_forward(options: dict[str, Any]) -> None:
    """sgl-project/sglang#31501: a window that only the run knows hides the same keys. A forward's defaults count too,
    and leave the plan as it was."""
    for kind, causal in (("decode", False), ("paged", True), ("ragged", True)):
        q_lens, extra = ([1, 1, 1], {}) if kind == "decode" else ([3, 25, 4], {"causal": True})
        case = Case(q_lens, [20, 25, 2], page_size=8)
        wrapper, inputs = planned(kind, case, **options, **extra)
        expected = wrapper.run(*inputs, return_lse=True)
        case.compare(expected, causal=causal, **options)
        bare, _ = planned(kind, case)
        for got, want in zip(bare.forward_return_lse(*inputs, **options, **extra), expected, strict=True):
            assert_equal_bits(got, want)
        assert_equal_bits(bare.forward(*inputs, **options, **extra), expected[0])
        case.compare(wrapper.forward_return_lse(*inputs))
        assert_equal_bits(wrapper.run(*inputs), expected[0])


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 17])
def test_a_window_keeps_one_key_more_than_it_says(window_left: int, kind: str) -> None:
    """lightseekorg/tokenspeed#578: each key in the window has the same weight, told apart by one-hot values."""
    lens = [1, 16, 17, 31]
    case = Case([1] * 4, lens, page_size=16, heads=(1, 1), D=32)
    case.q.zero_()
    case.v.zero_()
    for b, length in enumerate(lens):
        rows = case.v[int(case.kv_indptr[b]) :][:length, 0]
        rows.fill_diagonal_(1.0)
    case._store(1)
    wrapper, inputs = planned(kind, case, window_left=window_left)
    out, _ = wrapper.run(*inputs, return_lse=True)
    for b, length in enumerate(lens):
        seen = min(length, window_left + 1)
        expected = torch.zeros(32)
        expected[length - seen : length] = 1 / seen
        assert_close(out[b, 0], expected)


def flat(masks: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([m.flatten() for m in masks])


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_custom_masks(kind: str) -> None:
    """A mask takes the place of `causal`; a window holds besides it; what follows the masks is not looked at."""
    case = Case([3, 1, 5, 0], [7, 8, 3, 4])
    masks = case.masks()
    tail = torch.ones(9, dtype=torch.bool)
    for options in ({}, {"causal": True}, {"window_left": 2}):
        wrapper, inputs = planned(kind, case, custom_mask=torch.cat([flat(masks), tail]), **options)
        got = wrapper.run(*inputs, return_lse=True)
        case.compare(got, masks=masks, window_left=options.get("window_left", -1))
        case.compare(wrapper.forward_return_lse(*inputs, causal=True), masks=masks)
    # By hand: little-endian, each request from a byte of its own on.
    packed = []
    for mask in masks:
        bits = mask.flatten().tolist()
        packed += [sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]
    wrapper, inputs = planned(kind, case, packed_custom_mask=torch.tensor(packed, dtype=torch.uint8))
    assert wrapper._custom_mask_buf.tolist() == packed
    assert wrapper._mask_indptr_buf.tolist() == [0, 3, 4, 6, 6]
    case.compare(wrapper.run(*inputs, return_lse=True), masks=masks)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_masks_of_whole_bytes(kind: str) -> None:
    case = Case([4, 2], [6, 12])
    masks = case.masks()
    wrapper, inputs = planned(kind, case, custom_mask=flat(masks))
    case.compare(wrapper.run(*inputs, return_lse=True), masks=masks)


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
def test_scales_count_once_in_every_spelling(kind: str, kv_dtype: torch.dtype) -> None:
    """flashinfer-ai/flashinfer#1023 and #4979: k_scale is in the LSE, v_scale is not."""
    case = Case([1, 1], [9, 20], page_size=16, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    scales = {"k_scale": 0.5, "v_scale": 0.25}
    wrapper, inputs = planned(kind, case)
    first = wrapper.run(*inputs, return_lse=True, **scales)
    case.compare(first, **scales)
    for again in (
        wrapper.run(*inputs, return_lse=True, **scales),
        wrapper.run_return_lse(*inputs, **scales),
        wrapper.forward_return_lse(*inputs, **scales),
        wrapper.run(*inputs, return_lse=True, k_scale=torch.tensor(0.5), v_scale=torch.tensor([0.25])),
        wrapper.run(*inputs, return_lse=True, q_scale=0.25, k_scale=2.0, v_scale=0.25),
    ):
        for got, want in zip(again, first, strict=True):
            assert_equal_bits(got, want)
    assert_equal_bits(wrapper.forward(*inputs, **scales), first[0])


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED"])
def test_sinks_count_once(kv_layout: str) -> None:
    """ROCm/rocm-libraries#12227: a sink of -inf is none, and one without keys is all there is."""
    case = Case([1, 1, 1], [0, 1, 40], page_size=16, kv_layout=kv_layout)
    sinks = torch.tensor([1.0, -math.inf, 0.0, 3.0])
    for kind in ("decode", "paged"):
        wrapper, inputs = planned(kind, case, window_left=16, logits_soft_cap=1.0)
        got = wrapper.run(*inputs, return_lse=True, sinks=sinks)
        case.compare(got, sinks=sinks, window_left=16, logits_soft_cap=1.0)
    sink = flashinfer.BatchAttentionWithAttentionSinkWrapper(case.workspace(), kv_layout, window_left=16)
    case.plan_paged(sink, window_left=16)
    out = torch.empty_like(case.q)
    assert sink.run(*inputs, sinks, 0.3, v_scale=2.0, out=out) is out
    expected = case.answer(sinks=sinks, window_left=16, sm_scale=0.3, v_scale=2.0)
    assert_close(out, expected[0])
    # Both may be left to the plan and to the keyword.
    assert_equal_bits(sink.run(*inputs, sinks), sink.run(*inputs, sinks=sinks))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_lse_as_asked_for(kind: str) -> None:
    """vllm-project/vllm#47079: base 2 and [tokens, heads] unless the caller says otherwise."""
    case = Case([3, 2], [8, 5])
    wrapper, inputs = planned(kind, case)
    out, plain = wrapper.run(*inputs, return_lse=True)
    for base, factor in (("log2", 1.0), ("ln", math.log(2))):
        for layout in ("NH", "HN"):
            got = wrapper.run(*inputs, return_lse=True, lse_base=base, lse_layout=layout)
            expected = plain * factor
            assert_equal_bits(got[0], out)
            assert_close(got[1], expected.t() if layout == "HN" else expected)
            lse = torch.full_like(got[1], NAN)
            assert wrapper.run(*inputs, lse=lse, lse_base=base, lse_layout=layout) is not lse
            assert_equal_bits(lse.contiguous(), got[1].contiguous())
            assert wrapper.run(*inputs, lse=lse, return_lse=True, lse_base=base, lse_layout=layout)[1] is lse


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_eight_equal_keys_have_an_lse_of_exactly_three(kind: str) -> None:
    case = Case([1], [8])
    case.q.zero_()
    wrapper, inputs = planned(kind, case)
    assert wrapper.run(*inputs, return_lse=True)[1].tolist() == [[3.0] * 4]


def test_a_prefix_in_pages_and_fresh_tokens_merge_to_the_whole() -> None:
    """As engines extend: new tokens causally among themselves, the context not causally, then `merge_state`."""
    whole = Case([5, 3], [12, 3], heads=(4, 2))
    context = Case([5, 3], [7, 0], heads=(4, 2))
    starts = whole.kv_indptr.tolist()
    for t, source in ((context.k, whole.k), (context.v, whole.v)):
        t.copy_(source[:7])
    context._store(2)
    paged, _ = planned("paged", context)
    fresh = torch.cat([torch.arange(starts[0] + 7, starts[1]), torch.arange(starts[1], starts[2])])
    ragged = whole.ragged()
    ragged.plan(whole.qo_indptr, whole.qo_indptr, 4, 2, 32, q_data_type=torch.float32)
    parts = (
        *ragged.forward_return_lse(whole.q, whole.k[fresh], whole.v[fresh], causal=True),
        *paged.forward_return_lse(whole.q, context.cache, causal=False),
    )
    whole.compare(flashinfer.merge_state(*parts), causal=True)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_rows_that_see_no_key(kind: str) -> None:
    """flashinfer-ai/flashinfer#4452 and #4975: 0 and -inf, into whatever the caller's buffers held."""
    case = Case([5, 2, 0], [3, 0, 4])
    wrapper, inputs = planned(kind, case, causal=True)
    out, lse = torch.full_like(case.q, NAN), torch.full((7, 4), NAN)
    case.compare(wrapper.run(*inputs, out=out, lse=lse, return_lse=True), causal=True)
    for rows in (slice(0, 2), slice(5, 7)):
        assert bool((out[rows] == 0).all())
        assert bool((lse[rows] == -math.inf).all())


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_empty_batches(kind: str) -> None:
    for case in (Case([], []), Case([1, 1], [0, 0])):
        wrapper, inputs = planned(kind, case)
        case.compare(wrapper.run(*inputs, return_lse=True))


def test_value_heads_of_another_size() -> None:
    """As MLA prefill: keys of 192, values of 128."""
    case = Case([4, 1], [9, 5], heads=(4, 2), D=48)
    wrapper = case.ragged(backend="cutlass")
    v = case.v[..., :32]
    metadata = case.qo_indptr, case.kv_indptr
    wrapper.plan(*metadata, num_qo_heads=4, num_kv_heads=2, head_dim_qk=48, head_dim_vo=32, causal=True, **case.dtypes)
    out = torch.empty(5, 4, 32)
    assert wrapper.run(q=case.q, k=case.k, v=v, out=out) is out
    assert_close(out, case.answer(causal=True)[0][..., :32])


def test_heads_first() -> None:
    case = Case([4, 1], [9, 5])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(case.workspace(), "HND")
    case.plan_ragged(wrapper)
    case.compare(wrapper.run(case.q, case.k.transpose(0, 1), case.v.transpose(0, 1).contiguous(), return_lse=True))


def test_caches_in_every_form() -> None:
    """vLLM's views are split on the last axis of one pool and permuted; SGLang's have no axis for a page size of 1."""
    case = Case([2, 1], [9, 20], page_size=4)
    expected = case.answer()
    k, v = case.cache
    joined = torch.cat([k, v], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    halves = joined[..., :32], joined[..., 32:]
    assert not halves[0].is_contiguous()
    forms = [
        (torch.stack([k, v], dim=1), "NHD"),
        (halves, "NHD"),
        ((halves[0].transpose(1, 2), halves[1].transpose(1, 2)), "HND"),
    ]
    for cache, kv_layout in forms:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(case.workspace(), kv_layout)
        case.plan_paged(wrapper)
        assert_close(wrapper.run(case.q, cache), expected[0])
    one = Case([1, 1], [9, 3], page_size=1)
    wrapper, _ = planned("decode", one)
    cache = one.cache[0].squeeze(1), one.cache[1].squeeze(1)
    one.compare(wrapper.run(one.q, cache, return_lse=True))


def test_several_queries_of_a_decode() -> None:
    """Speculative decoding: causal among themselves unless the plan says otherwise."""
    case = Case([3, 3, 3], [20, 3, 7])
    for options, causal in (({}, True), ({"is_causal": True}, True), ({"is_causal": False}, False)):
        wrapper, inputs = planned("decode", case, q_len_per_req=3, **options)
        case.compare(wrapper.run(*inputs, return_lse=True, q_len_per_req=3), causal=causal)
        assert wrapper._causal is causal


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(index_dtype: torch.dtype) -> None:
    case = Case([1, 1], [9, 3], index_dtype=index_dtype)
    for kind in ("decode", "paged", "ragged"):
        wrapper, inputs = planned(kind, case)
        case.compare(wrapper.run(*inputs, return_lse=True))


def test_decode_equals_prefill() -> None:
    """Also with a request without pages: indptr [0, 0, 9], last_page_len 0."""
    case = Case([1, 1], [0, 34], page_size=4)
    results = []
    for kind in ("decode", "paged"):
        wrapper, inputs = planned(kind, case)
        results.append(wrapper.run(*inputs, return_lse=True))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, tolerance=LSE)
