# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Windows, soft caps, sinks, masks, scales and unlike head dimensions, on the CPU, against float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.attention.case import NAN, Case, packed
from rocm_tests.attention.triton_cases import BATCHES, FNUZ


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch(name: str) -> None:
    case = Case(**BATCHES[name])
    case.compare(case.run(backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED", "RAGGED"])
def test_everything_at_once(kv_layout: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and kv_layout == "SHUFFLED":
        dtype = torch.float32
    options = {"sinks": True, "mask": True, "window_left": 9, "logits_soft_cap": 3.0, "k_scale": 0.5, "v_scale": 2.0}
    case = Case([3, 0, 20, 1], [40, 7, 20, 0], kv_layout=kv_layout, dtype=dtype, D=48, E=16, **options)
    case.compare(case.run())


@pytest.mark.parametrize("kv_layout", ["HND", "SHUFFLED", "RAGGED"])
def test_the_other_fp8(kv_layout: str) -> None:
    case = Case([2, 1], [20, 5], kv_layout=kv_layout, kv_dtype=FNUZ, k_scale=0.25, v_scale=4.0)
    case.compare(case.run())


def test_a_window_counts_the_keys_to_the_left() -> None:
    """As FlashInfer's: window_left 2 is the token itself and two before it; -1 is all, 0 the token alone."""
    case = Case([6], [6])
    case.q.zero_()
    for window, seen in ((-1, [1, 2, 3, 4, 5, 6]), (0, [1] * 6), (2, [1, 2, 3, 3, 3, 3]), (5, [1, 2, 3, 4, 5, 6])):
        lse = case.run(window_left=window)[1]
        assert_close(lse[:, 0], torch.tensor(seen).double().log2())


def test_a_mask_stands_in_for_causal() -> None:
    """The mask of the causal triangle gives the causal result, whatever `causal` says."""
    case = Case([5, 3], [9, 3])
    triangles = [torch.ones(m, n).tril(n - m).bool() for m, n in ((5, 9), (3, 3))]
    bits, starts = packed(triangles)
    assert starts == [0, 6, 8]
    expected = case.run(causal=True)
    for causal in (True, False):
        got = case.run(causal=causal, custom_mask=bits, mask_indptr=torch.tensor(starts))
        for g, w in zip(got, expected, strict=True):
            assert_equal_bits(g, w)


def test_a_sink_is_a_key_without_value() -> None:
    """Counted once: 3 equal keys and a sink of the same score weigh a quarter each."""
    case = Case([1], [3], heads=(1, 1))
    case.q.zero_()
    out, lse = case.run(sinks=torch.zeros(1))
    assert lse.item() == 2.0
    assert_close(out, case.run()[0] * 0.75)
    empty = Case([1], [0], heads=(2, 1))
    out, lse = empty.run(sinks=torch.tensor([1.0, -2.0]))
    assert not out.count_nonzero()
    assert_close(lse[0], torch.tensor([1.0, -2.0]) / math.log(2))


def test_parts_with_one_sink_merge_to_the_whole() -> None:
    """New tokens with the sink, context without: applied exactly once."""
    whole = Case([4], [20], kv_layout="RAGGED", sinks=True)
    k, v = whole.cache
    context = torch.tensor([0, 16]), torch.tensor([0, 4])
    fresh = flashinfer.ragged_attention(
        whole.q, k[16:], v[16:], context[1], context[1], sinks=whole.sinks, return_lse=True
    )
    old = flashinfer.ragged_attention(whole.q, k[:16], v[:16], context[1], context[0], causal=False, return_lse=True)
    for got, want in zip(flashinfer.merge_state(*old, *fresh), whole.run(), strict=True):
        assert_close(got, want)


def test_bad_masks_are_named() -> None:
    case = Case([2, 3], [9, 5], mask=True)
    for starts, sentence in (
        ([0, 2, 5], r"mask_indptr must be giving request 0 its 3 bytes, got 2"),
        ([0, 3, 9], r"mask_indptr must be non-decreasing, within custom_mask's 5 bytes, got \[0, 3, 9\]"),
        ([1, 0, 5], r"mask_indptr must be non-decreasing, within custom_mask's 5 bytes, got \[1, 0, 5\]"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"paged_attention: {sentence}"):
            case.run(mask_indptr=torch.tensor(starts))


def test_bad_ragged_metadata_is_named() -> None:
    case = Case([2, 3], [9, 5], kv_layout="RAGGED")
    for name, value, sentence in (
        ("qo_indptr", [0, 2, 4], "qo_indptr must be running from 0 to q's 5 rows, got 0..4"),
        ("kv_indptr", [0, 9, 15], "kv_indptr must be running from 0 to k's 14 rows, got 0..15"),
        ("kv_indptr", [0, 15, 14], r"kv_indptr must be non-decreasing, got 15 at \[1\] and then 14"),
        ("kv_indptr", [1, 9, 14], r"kv_indptr\[0\] must be 0, got 1"),
    ):
        good = getattr(case, name)
        setattr(case, name, torch.tensor(value))
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"ragged_attention: {sentence}"):
            case.run()
        setattr(case, name, good)


def test_ragged_queries_and_results_may_be_strided() -> None:
    case = Case([3, 2], [7, 2], kv_layout="RAGGED", D=32, E=24)
    expected = case.run()
    case.q = torch.cat([case.q, case.q + NAN], dim=1)[:, :4]
    out, lse = torch.full((5, 8, 24), NAN)[:, ::2], torch.full((4, 5), NAN).T
    returned = case.run(out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert_equal_bits(out.contiguous(), expected[0])
    assert_equal_bits(lse.contiguous(), expected[1])
