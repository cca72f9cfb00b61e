# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the fused Triton kernel must get right, on a GPU or in Triton's interpreter.

The interpreter's matrix product knows no bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import flashinfer
from flashinfer.backends.triton import mla_context as fused
from flashinfer.backends.triton.mla_context import tile
from flashinfer.core import faults
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.mla_context.case import FULL, Case

# Tokens of a tile are 128: contexts end at, before and behind its edges.
BATCHES: dict[str, dict[str, Any]] = {
    "page 1": {"lens": [5, 0, 17, 1], "page_size": 1},
    "page 1, flat": {"lens": [5, 0, 17, 1], "page_size": 1, "flat": True},
    "page 3": {"lens": [5, 130, 1], "page_size": 3},
    "page 16": {"lens": [127, 1], "page_size": 16},
    "page 64": {"lens": [129], "page_size": 64},
    "page 128": {"lens": [128, 128, 1], "page_size": 128, "heads": 1},
    "many requests": {"lens": [n % 7 for n in range(90)], "heads": 1},
    "empty": {"lens": [0, 0]},
    "no requests": {"lens": []},
    "one token": {"lens": [1], "heads": 1},
    "deepseek": {"lens": [3, 130], "heads": 2, "page_size": 1, "flat": True, **FULL},
    "rank 64": {"lens": [9], "rank": 64},
    "rank 192": {"lens": [9], "rank": 192},
    "rank 320": {"lens": [9], "rank": 320},
    "wide heads": {"lens": [9], "nope": 192, "v_dim": 256, "heads": 2},
    "unlike heads": {"lens": [9, 4], "nope": 40, "rope": 24, "v_dim": 136, "heads": 5},
    "no rope": {"lens": [9], "rope": 0},
    "int64 indices": {"lens": [5, 0, 17], "index_dtype": torch.int64},
    "fp8 cache": {"lens": [5, 17], "kv_dtype": torch.float8_e4m3fn},
    "fp8 cache, full": {"lens": [5, 17], "kv_dtype": torch.float8_e4m3fn, **FULL},
    "row scales": {"lens": [5, 17], "weight_scale": "row"},
    "block scales": {"lens": [5, 17], "weight_scale": "block", "rank": 256},
    "block scales across heads": {"lens": [5], "weight_scale": "block", "nope": 96, "v_dim": 72, "rank": 192},
    "fp8 all over": {"lens": [5, 17], "weight_scale": "block", "kv_dtype": torch.float8_e4m3fn, "rank": 192},
    "fp8 all over, rows": {"lens": [5, 17], "weight_scale": "row", "kv_dtype": torch.float8_e4m3fn},
}


def plain(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    Case(**arguments, dtype=dtype, device=device).check("triton")


def fewer_tokens_than_rows(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """As in a captured graph: rows that no token has are left alone."""
    case = Case([100, 70], dtype=dtype, device=device)
    for got in case.check("triton", spare=200):
        assert bool(got[case.tokens :].isnan().all())


def parity(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """An FP8 cache with a weight of 16 bits: what a weight cast to FP8 gives is far away, what was asked for is not."""
    case = Case([40], dtype=dtype, device=device, kv_dtype=torch.float8_e4m3fn, **FULL)
    cast = case.weight.cpu().to(torch.float8_e4m3fn).double()
    (k, v), (k_cast, v_cast) = case.expected(), case.expected(cast)
    results = [case.check(backend) for backend in ("triton", "reference")]
    for got, unfused, want, wrong in zip(*results, (k, v), (k_cast, v_cast), strict=True):
        error = (got.cpu().double() - want)[..., :128].abs().mean()
        assert error * 5 < (wrong - want)[..., :128].abs().mean()
        assert_close(got, unfused.cpu())


def a_bad_page(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Tokens of a page that is not there are skipped and reported, others are not."""
    for page in (2**30, -1):
        case = Case([9, 6], dtype=dtype, device=device)
        entry = int(case.table.indptr[1]) + 1
        case.table.indices[entry] = page
        results = case.results()
        fault = torch.zeros(4, dtype=torch.int64, device=device)
        with faults.reported_to(fault):
            flashinfer.gather_kv_b_proj(*case.arguments, *results, backend="triton")
        found = faults.error_in(fault)
        pages = case.table.num_pages
        sentence = f"gather_kv_b_proj: kv_indices[{entry}] must be a page id in [0, {pages}), got {page}"
        assert str(found) == sentence, found
        for got, want in zip(results, case.expected(), strict=True):
            assert_close(got[:13], want[:13])
            assert bool(got[13:].isnan().all())


def a_short_table(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """A token past its request's pages does not get those of the next request."""
    case = Case([9, 6], dtype=dtype, device=device)
    case.table.indptr[1:] -= 1
    results = case.results()
    fault = torch.zeros(4, dtype=torch.int64, device=device)
    with faults.reported_to(fault):
        flashinfer.gather_kv_b_proj(*case.arguments, *results, backend="triton")
    sentence = "gather_kv_b_proj: kv_indptr and kv_indices must give each of the 15 context tokens a page, got none"
    assert str(faults.error_in(fault)) == f"{sentence} for token 8"
    assert bool(results[0][8].isnan().all())


def a_bad_prefix(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Tokens before the first request get no page, and those without a row in the results are reported."""
    no_page = "kv_indptr and kv_indices must give each of the 15 context tokens a page, got none for token 1"
    no_row = "kv_prefix_sum_context_lens[2] must be at most 15, the rows of k_out, got {}"
    # The last is 15 in 32 bits.
    for prefix, sentence, skipped in (
        ([2, 9, 15], no_page, 2),
        ([0, 9, 16], no_row.format(16), 0),
        ([0, 9, 2**32 + 15], no_row.format(2**32 + 15), 0),
    ):
        case = Case([9, 6], dtype=dtype, device=device, index_dtype=torch.int64)
        case.prefix[:] = torch.tensor(prefix)
        results, fault = case.results(), torch.zeros(4, dtype=torch.int64, device=device)
        with faults.reported_to(fault):
            flashinfer.gather_kv_b_proj(*case.arguments, *results, backend="triton")
        assert str(faults.error_in(fault)) == f"gather_kv_b_proj: {sentence}"
        for got, want in zip(results, case.expected(), strict=True):
            assert bool(got[:skipped].isnan().all())
            assert_close(got[9:15], want[9:15])


def a_table_past_32_bits(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """An indptr of 64 bits is not looked at in 32, in which it would be a good one."""
    case = Case([9, 6], dtype=dtype, device=device, index_dtype=torch.int64)
    case.table.indptr.add_(2**32)
    results, fault = case.results(), torch.zeros(4, dtype=torch.int64, device=device)
    with faults.reported_to(fault):
        flashinfer.gather_kv_b_proj(*case.arguments, *results, backend="triton")
    assert str(faults.error_in(fault)).endswith("a page, got none for token 14")
    assert all(bool(got.isnan().all()) for got in results)


def far_apart(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Heads of the keys and rows of a page whose distance times their number is past 2^31 elements."""
    case = Case([3, 2], dtype=dtype, device=device, page_size=3, rank=64)
    step = 2**30 + 8

    def spread(shape: tuple[int, ...], outer: int) -> torch.Tensor:
        # Hardly any of it is touched.
        memory = torch.empty(2 * step + shape[0] * outer, dtype=dtype, device=device)
        return memory.as_strided(shape, (outer, step, 1))

    (k, v), width = case.results(), case.nope + case.rope
    k = spread(tuple(k.shape), width)
    flashinfer.gather_kv_b_proj(*case.arguments, k, v, backend="triton")
    assert_close(k, case.expected()[0])
    del k
    pages, kept = case.cache.size(0), case.cache
    case.cache = spread((pages, 3, 64 + case.rope), 64 + case.rope)
    case.cache.copy_(kept)
    case.check("triton")


def flat_or_not(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """The shortcut for pages of one token changes no bit."""
    both = [
        Case([130, 0, 9], page_size=1, flat=flat, dtype=dtype, device=device).check("triton") for flat in (False, True)
    ]
    for got, want in zip(*both, strict=True):
        assert_equal_bits(got, want)


def half_as_many_tokens(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """The tile that gfx950 has for scales of blocks, on whatever there is: contexts end at and around its edges."""
    with mock.patch.object(fused, "tile", return_value=tile(160 << 10, "block")):
        assert fused.tile(64 << 10, "none").tokens == 64
        Case(**arguments, dtype=dtype, device=device).check("triton")


Check = Callable[[str, torch.dtype, dict[str, Any]], None]
CASES: dict[str, tuple[Check, dict[str, Any]]] = {
    **{name: (plain, arguments) for name, arguments in BATCHES.items()},
    "fewer tokens than rows": (fewer_tokens_than_rows, {}),
    "fp8 cache and wide weight": (parity, {}),
    "half as many tokens": (
        half_as_many_tokens,
        {"lens": [63, 65, 0, 1, 64], "weight_scale": "block", "kv_dtype": torch.float8_e4m3fn, "rank": 192},
    ),
    "a bad page": (a_bad_page, {}),
    "a short table": (a_short_table, {}),
    "a bad prefix": (a_bad_prefix, {}),
    "a table past 32 bits": (a_table_past_32_bits, {}),
    "far apart": (far_apart, {}),
    "flat or not": (flat_or_not, {}),
}
