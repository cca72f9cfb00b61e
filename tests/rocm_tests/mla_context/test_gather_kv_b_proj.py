# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`gather_kv_b_proj` by plain torch on the CPU, against float64; kernels are held against both elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.testing.compare import assert_close
from rocm_tests.mla_context.case import FULL, Case
from rocm_tests.mla_context.triton_cases import BATCHES

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch(name: str) -> None:
    Case(**BATCHES[name], dtype=torch.bfloat16).check("reference")


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 5, 16, 64, 128])
def test_pages_and_dtypes(page_size: int, dtype: torch.dtype) -> None:
    """Contexts of none, one and whole pages, and one token more and less."""
    lens = [0, 1, page_size, page_size + 1, max(page_size - 1, 0), 2 * page_size]
    Case(lens, page_size=page_size, dtype=dtype).check("reference")


@pytest.mark.parametrize("fp8", [OCP, FNUZ], ids=str)
@pytest.mark.parametrize("weight_scale", ["none", "row", "block"])
@pytest.mark.parametrize("rank", [64, 192, 512])
def test_scales(rank: int, weight_scale: str, fp8: torch.dtype) -> None:
    case = Case([7, 3], rank=rank, weight_scale=weight_scale, fp8=fp8, kv_dtype=fp8, dtype=torch.bfloat16, heads=5)
    case.check("reference")


def test_an_fp8_cache_keeps_a_wide_weight() -> None:
    """What a weight cast to the cache's FP8 gives is further away than the result by more than five times."""
    case = Case([40], kv_dtype=OCP, dtype=torch.bfloat16, **FULL)
    k, _ = case.check("reference")
    (want, _), (cast, _) = case.expected(), case.expected(case.weight.to(OCP).double())
    error = (k.double() - want)[..., : case.nope].abs().mean()
    assert error * 5 < (cast - want)[..., : case.nope].abs().mean()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_one_scale_of_any_shape(shape: tuple[int, ...]) -> None:
    case = Case([7, 3], kv_dtype=OCP, dtype=torch.bfloat16)
    case.kv_scale = torch.full(shape, 0.5)
    case.check("reference")


def test_a_weight_that_is_a_parameter() -> None:
    case = Case([5, 9])
    case.weight = torch.nn.Parameter(case.weight)
    assert not any(t.requires_grad for t in case.check("reference"))


def test_results_in_memory_that_is_read_or_written_are_refused() -> None:
    """Values that begin inside the keys, and either inside the cache; side by side they are taken."""
    case = Case([5, 9])
    both = torch.empty(14, 3, 80)
    case.cache = case.cache.contiguous()
    inside = case.cache.view(-1)
    keys, values = (14, 3, 48), (14, 3, 32)
    for k, v, sentence in (
        (both[..., :48], both[..., 40:72], "v_out must be outside of k_out"),
        (inside[: 14 * 144].view(keys), torch.empty(values), "kv_cache must be outside of k_out"),
        (torch.empty(keys), inside[-14 * 96 :].view(values), "kv_cache must be outside of v_out"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"gather_kv_b_proj: {sentence}"):
            flashinfer.gather_kv_b_proj(*case.arguments, k, v)  # type: ignore[arg-type]
    k, v = both[..., :48], both[..., 48:]
    flashinfer.gather_kv_b_proj(*case.arguments, k, v)  # type: ignore[arg-type]
    for got, want in zip((k, v), case.expected(), strict=True):
        assert_close(got, want)


def test_more_rows_than_tokens() -> None:
    case = Case([5, 9])
    for got in case.check("reference", spare=6):
        assert bool(got[case.tokens :].isnan().all())


def test_the_parts_are_where_they_belong() -> None:
    """By hand: latent 2 in one place, rope 7; keys' rows of the weight 3, values' 5."""
    cache = torch.zeros(2, 1, 64 + 2)
    cache[1, 0, 0], cache[1, 0, 64:] = 2.0, 7.0
    weight = torch.zeros(2 * (1 + 1), 64)
    weight[:, 0] = torch.tensor([3.0, 5.0, 30.0, 50.0])
    indptr, index = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    k, v = torch.empty(1, 2, 3), torch.empty(1, 2, 1)
    flashinfer.gather_kv_b_proj(cache, None, indptr, index, indptr, weight, None, k, v)
    assert k.tolist() == [[[6.0, 7.0, 7.0], [60.0, 7.0, 7.0]]]
    assert v.tolist() == [[[10.0], [100.0]]]


def spoiled(change: str, value: Any) -> Case:
    case = Case([9, 6])
    if change == "page":
        case.table.indices[4] = value
    elif change == "table":
        case.table.indptr[1:] += value
    else:
        case.prefix[:] = torch.tensor(value)
    return case


@pytest.mark.parametrize(
    ("change", "value", "sentence"),
    [
        ("page", 2**30, "kv_indices[4] must be a page id in [0, 8), got 1073741824"),
        ("page", -1, "kv_indices[4] must be a page id in [0, 8), got -1"),
        ("table", -1, "kv_indptr and kv_indices must give each of the 15 context tokens a page, got none for token 8"),
        ("prefix", [0, 9, 8], "kv_prefix_sum_context_lens must start at 0 and not fall, got 9 and 8 at [1]"),
        ("prefix", [0, 9, 16], "end at most at k_out's rows 15, got 0 and 16"),
        ("prefix", [1, 9, 15], "kv_prefix_sum_context_lens must begin with 0"),
    ],
)
def test_bad_metadata_is_refused(change: str, value: Any, sentence: str) -> None:
    case = spoiled(change, value)
    results = case.results()
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.gather_kv_b_proj(*case.arguments, *results, backend="reference")  # type: ignore[arg-type]
    assert str(caught.value).startswith("gather_kv_b_proj: ")
    assert sentence in str(caught.value)
    assert all(bool(t.isnan().all()) for t in results)


def test_int64_metadata_of_unlike_kinds() -> None:
    case = Case([5, 9], index_dtype=torch.int64)
    case.prefix = case.prefix.int()
    case.check("reference")


def test_the_reference_agrees_with_itself_in_float64() -> None:
    """The 16-bit result is the rounded float64 one: nothing is lost in between."""
    case = Case([30], dtype=torch.bfloat16, **FULL)
    k, v = case.check("reference")
    for got, want in zip((k, v), case.expected(), strict=True):
        assert_close(got, want.bfloat16())
