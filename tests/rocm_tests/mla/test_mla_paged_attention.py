# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`mla_paged_attention` against float64 arithmetic in pools whose unused tokens are NaN."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID
from rocm_tests.mla.case import NAN, Case


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["combined", "separate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decode_speculation_and_prefill_in_one_batch(dtype: torch.dtype, layout: str, causal: bool) -> None:
    case = Case([1, 5, 17, 0, 1], [33, 21, 17, 9, 1], layout=layout, dtype=dtype, causal=causal)
    case.compare(case.call())


@pytest.mark.parametrize("dims", [(512, 64), (64, 0), (7, 3)], ids=str)
def test_widths(dims: tuple[int, int]) -> None:
    case = Case([2, 1], [9, 5], dims=dims)
    case.compare(case.call())


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20, 24, 96, 128])
def test_head_counts(heads: int) -> None:
    """vllm-project/vllm#38615: also those that fit no tile; results as slices of poisoned buffers."""
    case = Case([1, 2, 1], [9, 4, 30], heads=heads)
    out = torch.full((4, heads + 2, 128), NAN)
    lse = torch.full((4, heads + 2), NAN)
    case.compare(case.call(out=out[:, 1:-1, 32:96], lse=lse[:, 1:-1]))
    out[:, 1:-1, 32:96], lse[:, 1:-1] = NAN, NAN
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_page_edges_with_a_tight_table(page_size: int, over: int) -> None:
    """flashinfer-ai/flashinfer#941, ROCm/rocm-libraries#6932: neither NaN behind the last token nor what follows the
    table shows."""
    case = Case([1, 1, 2], [page_size + over, 4 * page_size + over, 13], page_size=page_size)
    expected = case.call()
    case.compare(expected)
    used = int(case.table.indptr[-1])
    assert case.table.indices[used:].tolist() == [UNUSED_PAGE_ID] * 5
    object.__setattr__(case.table, "indices", case.table.indices[:used].clone())
    for got, want in zip(case.call(), expected, strict=True):
        assert_equal_bits(got, want)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_requests_without_keys_and_rows_that_see_none(index_dtype: torch.dtype) -> None:
    """flashinfer-ai/flashinfer#4975 and #4452: 0 and -inf are written into the caller's buffers."""
    case = Case([2, 3, 5], [5, 0, 3], index_dtype=index_dtype, causal=True)
    out, lse = torch.full((10, 4, 64), NAN), torch.full((10, 4), NAN)
    returned = case.call(out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    case.compare(returned)
    assert bool((out[2:7] == 0).all())
    assert bool((lse[2:7] == -math.inf).all())


def test_empty_batches() -> None:
    for case in (Case([1, 2], [0, 0]), Case([], []), Case([0, 0], [9, 0])):
        case.compare(case.call())


def test_eight_equal_keys_have_an_lse_of_exactly_three() -> None:
    """vllm-project/vllm#47079: base 2."""
    case = Case([1, 8], [8, 8])
    case.q.zero_()
    assert case.call()[1].tolist() == [[3.0] * 4] * 9


def test_two_halves_merge_to_the_whole() -> None:
    parts = []
    for count, value in ((2, 0.0), (8, 10.0)):
        case = Case([1], [count], page_size=8)
        case.q.zero_()
        case.caches[0][case.table.pages_of(0)[0], :count] = value
        parts.append(case.call())
    weights = torch.exp2(torch.stack([lse for _, lse in parts])).unsqueeze(-1)
    merged = sum(w * out for w, (out, _) in zip(weights, parts, strict=True)) / weights.sum(0)
    assert_close(merged, torch.full_like(merged, 8.0))


@pytest.mark.parametrize("scale", [1.0, 64**-0.5, 0.01, -0.3, 0.0])
def test_scale_is_that_of_the_call(scale: float) -> None:
    """sgl-project/sglang#38754."""
    case = Case([3, 1], [20, 6])
    case.compare(case.call(sm_scale=scale), scale)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_fp8_caches_and_their_scales(kv_dtype: torch.dtype) -> None:
    case = Case([1, 2], [20, 6], dtype=torch.bfloat16, kv_dtype=kv_dtype)
    case.compare(case.call())


def test_a_cache_changed_between_two_calls_is_seen() -> None:
    case = Case([1], [6])
    before = case.call()[0].clone()
    case.caches[0][case.table.pages_of(0)[0], 0] += 1.0
    assert not torch.equal(case.call()[0], before)


def test_bad_metadata_is_named() -> None:
    case = Case([1, 2], [18, 4])
    qo, kv, indices, lens = case.metadata
    bad_page = indices.clone()
    bad_page[1] = UNUSED_PAGE_ID
    for changes, sentence in (
        ({"kv_indices": bad_page}, rf"kv_indices must be page ids in \[0, 9\), got .*{UNUSED_PAGE_ID}.* for request 0"),
        ({"kv_indices": indices[:2]}, "kv_indices must be of the 6 entries that kv_indptr names, got 2"),
        ({"qo_indptr": qo.clamp(max=2)}, r"qo_indptr\[-1\] must be 3, q's rows, got 2"),
        ({"qo_indptr": torch.tensor([0, 4, 3])}, "qo_indptr must not fall, got 3 after 4 at request 1"),
        ({"qo_indptr": qo + 1}, r"qo_indptr\[0\] must be 0, got 1"),
        ({"kv_indptr": kv + 1}, r"kv_indptr\[0\] must be 0, got 1"),
        ({"kv_indptr": torch.tensor([0, 7, 6])}, r"got 7 pages for the 18 tokens of request 0"),
        ({"kv_len_arr": torch.tensor([18, -4])}, "kv_len_arr must not be negative, got -4 for request 1"),
        ({"kv_len_arr": torch.tensor([18, 5])}, "got 1 pages for the 5 tokens of request 1"),
        ({"kv_len_arr": torch.tensor([18, 0])}, "got 1 pages for the 0 tokens of request 1"),
    ):
        table = {"qo_indptr": qo, "kv_indptr": kv, "kv_indices": indices, "kv_len_arr": lens, **changes}
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"^mla_paged_attention: .*{sentence}"):
            flashinfer.mla_paged_attention(*case.queries, *case.caches, *table.values(), causal=False, sm_scale=1.0)


def test_scales_that_are_no_numbers_are_named() -> None:
    case = Case([1], [5])
    for change, sentence in (
        ({"sm_scale": None}, "sm_scale must be a number, got None"),
        ({"ckv_scale": "x"}, "ckv_scale must be a number, got 'x'"),
        ({"kpe_scale": torch.ones(2)}, "kpe_scale must be a number, got float32"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"^mla_paged_attention: {sentence}"):
            case.call(**change)
