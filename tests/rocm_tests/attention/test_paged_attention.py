# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` against float64 arithmetic, key by key, in pools whose unused tokens are NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, GuardedPool, PageTable, ragged_page_table

NAN = float("nan")


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """One request in float64: `q [q_len, Hq, D]`, `k, v [kv_len, H, D]`."""
    (q_len, Hq, D), (kv_len, H) = q.shape, k.shape[:2]
    out, lse = torch.zeros(q_len, Hq, D, dtype=torch.float64), torch.full((q_len, Hq), -math.inf, dtype=torch.float64)
    for i in range(q_len):
        seen = max(0, min(kv_len, kv_len - q_len + i + 1)) if causal else kv_len
        for h in range(Hq) if seen else ():
            keys, values = (t[:seen, h // (Hq // H)].double() for t in (k, v))
            weights = torch.exp2((keys @ q[i, h].double()) * scale * math.log2(math.e))
            out[i, h] = weights @ values / weights.sum()
            lse[i, h] = weights.sum().log2()
    return out, lse


class Case:
    """A batch in a poisoned pool of the layout, and its answer."""

    def __init__(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        kv_layout: str = "NHD",
        page_size: int = 16,
        heads: tuple[int, int] = (4, 2),
        D: int = 32,
        dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype = torch.int32,
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        (Hq, H), N, x = heads, page_size, 16 // dtype.itemsize
        self.kv_layout, self.kv_lens = kv_layout, kv_lens
        self.table: PageTable = ragged_page_table(kv_lens, N, seed=seed, index_dtype=index_dtype)
        self.qo_indptr = torch.tensor([0, *q_lens], dtype=index_dtype).cumsum(0, dtype=index_dtype)
        self.q = torch.randn(sum(q_lens), Hq, D, generator=rng).to(dtype)
        self.keys = [torch.randn(n, H, D, generator=rng).to(dtype) for n in kv_lens]
        self.values = [torch.randn(n, H, D, generator=rng).to(dtype) for n in kv_lens]
        P = self.table.num_pages
        if kv_layout == "SHUFFLED":
            first, second = GuardedPool(P, (H * N * D,), dtype, planes=2, gap_bytes=512).planes
            self.cache = first.unflatten(1, (H, D // x, N, x)), second.unflatten(1, (H, N // x, D, x))
        elif kv_layout == "STANDARD":
            pool = torch.full((P, H, N, 2 * D), NAN, dtype=dtype)
            self.cache, self.kv_layout = (pool[..., :D], pool[..., D:]), "HND"
        else:
            self.cache = GuardedPool(P, (N, H, D) if kv_layout == "NHD" else (H, N, D), dtype, planes=2).planes
        for b, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            pages = self.table.pages_of(b)
            for position in range(len(k)):
                page, n = pages[position // N], position % N
                if kv_layout == "NHD":
                    self.cache[0][page, n], self.cache[1][page, n] = k[position], v[position]
                elif kv_layout == "SHUFFLED":
                    self.cache[0][page, :, :, n] = k[position].view(H, D // x, x)
                    self.cache[1][page, :, n // x, :, n % x] = v[position]
                else:
                    self.cache[0][page, :, n], self.cache[1][page, :, n] = k[position], v[position]

    def run(self, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        table = (self.table.indptr, self.table.indices, self.table.last_page_len)
        return flashinfer.paged_attention(
            self.q, self.cache, self.qo_indptr, *table, self.kv_layout, return_lse=True, **options
        )

    def answer(self, causal: bool = True, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.q.size(-1) ** -0.5 if scale is None else scale
        rows = self.q.split(self.qo_indptr.diff().tolist())
        parts = [dense(q, k, v, causal, scale) for q, k, v in zip(rows, self.keys, self.values, strict=True)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def check(self, causal: bool = True, scale: float | None = None) -> None:
        out, lse = self.run(causal=causal, sm_scale=scale)
        assert out.dtype == self.q.dtype
        assert out.shape == self.q.shape
        assert lse.dtype == torch.float32
        expected = self.answer(causal, scale)
        assert_close(out, expected[0], name="out")
        assert_close(lse, expected[1], name="lse")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED", "STANDARD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decode_extend_and_prefill_in_one_batch(dtype: torch.dtype, kv_layout: str, causal: bool) -> None:
    case = Case([1, 5, 17, 0, 1], [33, 21, 17, 9, 1], kv_layout=kv_layout, dtype=dtype, heads=(6, 3))
    case.check(causal)


@pytest.mark.parametrize("D", [64, 72, 80, 96, 112, 128, 192, 256])
def test_head_sizes(D: int) -> None:
    """flashinfer-ai/flashinfer#4299: later rows count too."""
    Case([15, 1], [127, 3], D=D, heads=(2, 1)).check()


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (9, 3), (7, 1), (5, 5)], ids=str)
def test_odd_heads_and_groups(heads: tuple[int, int]) -> None:
    Case([2, 3], [20, 3], heads=heads, kv_layout="SHUFFLED", dtype=torch.bfloat16).check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_page_edges_with_a_tight_table(page_size: int, over: int) -> None:
    """NaN in the unused tail of the last page never shows (flashinfer-ai/flashinfer#941), nor does what follows a
    table that ends with its last page (ROCm/rocm-libraries#6932)."""
    lens = [page_size + over, 4 * page_size + over, 13]
    case = Case([1, 2, 3], lens, page_size=page_size)
    case.check()
    used = int(case.table.indptr[-1])
    assert case.table.indices[used:].tolist() == [UNUSED_PAGE_ID] * 5
    expected = case.run()
    object.__setattr__(case.table, "indices", case.table.indices[:used].clone())
    for got, want in zip(case.run(), expected, strict=True):
        assert_equal_bits(got, want)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_requests_without_keys_and_rows_that_see_none(index_dtype: torch.dtype) -> None:
    """flashinfer-ai/flashinfer#4975 and #4452: 0 and -inf are written into the caller's buffers."""
    case = Case([2, 3, 5], [5, 0, 3], index_dtype=index_dtype)
    out, lse = torch.full_like(case.q, NAN), torch.full(case.q.shape[:2], NAN)
    returned = case.run(out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    for rows in (slice(2, 5), slice(5, 7)):
        assert bool((out[rows] == 0).all())
        assert bool((lse[rows] == -math.inf).all())
    expected = case.answer()
    assert_close(out, expected[0], name="out")
    assert_close(lse, expected[1], name="lse")


def test_empty_batches() -> None:
    Case([1, 2], [0, 0]).check()
    for case in (Case([], []), Case([0, 0], [9, 0])):
        out, lse = case.run()
        assert out.shape == (0, 4, 32)
        assert lse.shape == (0, 4)


def test_eight_equal_keys_have_an_lse_of_exactly_three() -> None:
    """Base 2 (vllm-project/vllm#47079): ln would give 2.079."""
    case = Case([1, 8], [8, 8])
    case.q.zero_()
    _, lse = case.run()
    assert lse[0].tolist() == [3.0] * 4
    # Causal rows see one key more each.
    assert_close(lse[1:], torch.arange(1, 9).double().log2().unsqueeze(1).expand(8, 4))


def test_two_halves_merge_to_the_whole() -> None:
    """Ten equal keys, two with value 0 and eight with value 10: by LSE in base 2 the halves weigh 0.2 and 0.8."""
    parts = []
    for count, value in ((2, 0.0), (8, 10.0)):
        case = Case([1], [count])
        case.q.zero_()
        case.cache[1][case.table.pages_of(0)[0], :count] = value
        parts.append(case.run())
    weights = torch.exp2(torch.stack([lse for _, lse in parts]))
    merged = sum(w.unsqueeze(-1) * out for w, (out, _) in zip(weights, parts, strict=True)) / weights.sum(0).unsqueeze(
        -1
    )
    assert_close(merged, torch.full_like(merged, 8.0))


def test_scale_is_that_of_the_call() -> None:
    case = Case([3], [20])
    for scale in (0.0, 0.3, -1.0, 5.0):
        case.check(scale=scale)


def test_the_usual_layouts_agree() -> None:
    """One pool as a tuple, as one tensor, permuted, and of page size 1 with its axis left out."""
    case = Case([1, 4], [18, 4])
    expected = case.run()
    k, v = case.cache
    for cache, kv_layout in (
        (torch.stack([k, v], dim=1), "NHD"),
        (torch.stack([k, v], dim=1).transpose(2, 3).contiguous(), "HND"),
        ((k.transpose(1, 2), v.transpose(1, 2).contiguous()), "HND"),
    ):
        case.cache, case.kv_layout = cache, kv_layout
        for got, want in zip(case.run(), expected, strict=True):
            assert_close(got, want)
    one = Case([2], [9], page_size=1)
    expected = one.run()
    one.cache = one.cache[0].squeeze(1), one.cache[1].squeeze(1)
    assert_equal_bits(one.run()[0], expected[0])


def test_strided_queries_and_results() -> None:
    case = Case([2, 3], [20, 3])
    expected = case.run()
    case.q = torch.cat([case.q, case.q + 1], dim=1)[:, :4]
    out = torch.zeros(5, 8, 32)[:, ::2]
    case.run(out=out)
    assert_equal_bits(out, expected[0])


def test_bad_metadata_is_named() -> None:
    case = Case([1, 2], [18, 4])
    indptr, indices, last = case.table.indptr, case.table.indices, case.table.last_page_len
    bad_page = indices.clone()
    bad_page[1] = UNUSED_PAGE_ID
    for changes, sentence in (
        ({"indices": bad_page}, rf"kv_indices must be page ids in \[0, 6\), got .*{UNUSED_PAGE_ID}"),
        ({"indices": indices[:2]}, r"kv_indices must be as long as kv_indptr\[-1\] = 3 says, got length 2"),
        # flashinfer-ai/flashinfer#320.
        ({"last_page_len": last + 15}, r"kv_last_page_len\[0\] must be in \[0, 16\], got 17"),
        ({"indptr": indptr.flip(0)}, r"kv_indptr\[0\] must be 0, got 3"),
        ({"indptr": torch.tensor([0, 4, 3])}, r"kv_indptr must be non-decreasing, got 4 at \[1\] and then 3"),
        ({"last_page_len": -last}, r"kv_last_page_len\[0\] must be in \[0, 16\], got -2"),
    ):
        table = {"indptr": indptr, "indices": indices, "last_page_len": last, **changes}
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"paged_attention: {sentence}"):
            flashinfer.paged_attention(case.q, case.cache, case.qo_indptr, *table.values())
    with pytest.raises(
        flashinfer.InvalidArgumentError, match=r"qo_indptr must be running from 0 to q.s 3 rows, got 0\.\.2$"
    ):
        flashinfer.paged_attention(case.q, case.cache, case.qo_indptr.clamp(max=2), indptr, indices, last)
    for wrong, sentence in (
        ([1, 1, 3], r"qo_indptr\[0\] must be 0, got 1"),
        ([0, 5, 3], r"qo_indptr must be non-decreasing, got 5 at \[1\] and then 3"),
        ([0, -1, 3], r"qo_indptr must be non-decreasing, got 0 at \[0\] and then -1"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"paged_attention: {sentence}"):
            flashinfer.paged_attention(case.q, case.cache, torch.tensor(wrong), indptr, indices, last)


def without(case: Case, **changes: object) -> None:
    arguments = {
        "q": case.q,
        "paged_kv_cache": case.cache,
        "qo_indptr": case.qo_indptr,
        "kv_indptr": case.table.indptr,
        "kv_indices": case.table.indices,
        "kv_last_page_len": case.table.last_page_len,
    }
    flashinfer.paged_attention(**{**arguments, **changes})  # type: ignore[arg-type]


def test_bad_arguments_are_named() -> None:
    case = Case([1, 2], [18, 4])
    k, v = case.cache
    for changes, message in (
        ({"q": case.q[0]}, "q must be [tokens, heads, head_dim], got float32[4, 32] on cpu"),
        ({"q": case.q.tolist()}, "q must be a tensor, got list"),
        ({"q": case.q[..., :0]}, "q must be of at least one head, and rows that are not empty, got [3, 4, 0]"),
        ({"paged_kv_cache": [k, v]}, "paged_kv_cache must be a tensor or a tuple of two, got list"),
        ({"paged_kv_cache": (k, 7)}, "paged_kv_cache must be a tensor or a tuple of two, got a tuple of float32"),
        ({"out": case.q.tolist()}, "out must be a tensor, got list"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"sm_scale": "x"}, "sm_scale must be a number, got 'x'"),
        ({"sm_scale": math.nan}, "sm_scale must be finite, got nan"),
        ({"sm_scale": 10**400}, "sm_scale must be finite, got 1000"),
        ({"q": case.q.int()}, "q must be a floating-point tensor of 16 bits or more, got int32[3, 4, 32] on cpu"),
        ({"q": case.q[:, :3]}, "q must be of heads divisible by the cache's 2, got 3"),
        ({"q": case.q[..., :16]}, "k_cache must be of q's head dimension 16, got 32"),
        ({"paged_kv_cache": k}, "paged_kv_cache must be a tuple of K and V, or [pages, 2, ...] of 4 or 5 dimensions"),
        (
            {"paged_kv_cache": (k, v.half())},
            "v_cache must be of q's dtype torch.float32 or FP8 (E4M3), got torch.float16",
        ),
        ({"paged_kv_cache": (k, v[:, :8])}, "v_cache must be [6, 16, 2, head_dim_vo], got [6, 8, 2, 32]"),
        ({"kv_layout": "DNH"}, "kv_layout must be one of ('NHD', 'HND', 'SHUFFLED'), got 'DNH'"),
        ({"kv_layout": "SHUFFLED"}, "k_cache must be 5-D for SHUFFLED, got float32[6, 16, 2, 32] on cpu"),
        ({"qo_indptr": case.qo_indptr[:2]}, "qo_indptr must be of length 3, one more than kv_last_page_len, got 2"),
        ({"kv_indptr": case.table.indptr.float()}, "kv_indptr must be int32 or int64, got float32[3] on cpu"),
        ({"out": case.q.half()}, "out must be float32[3, 4, 32] on cpu, got float16[3, 4, 32] on cpu"),
        ({"lse": torch.zeros(4, 3)}, "lse must be float32[3, 4] on cpu, got float32[4, 3] on cpu"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            without(case, **changes)
        assert str(caught.value).startswith(f"paged_attention: {message}")
