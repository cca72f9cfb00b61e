# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Merging of attention states against float64 arithmetic."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_close, assert_equal_bits

NAN, INF = math.nan, math.inf
SHAPES = [(5, 2, 3, 64), (1, 7, 1, 8), (0, 2, 2, 16), (4, 1, 5, 3)]


def states(tokens: int, count: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    v, s = torch.randn(tokens, count, heads, dim, generator=rng), torch.randn(tokens, count, heads, generator=rng) * 5
    return v.to(dtype), s


def expected(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.exp2(s.double())
    return (v.double() * weights.unsqueeze(-1)).sum(1) / weights.sum(1).unsqueeze(-1), weights.sum(1).log2()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "heads", "dim"), [(5, 2, 3, 64), (1, 7, 1, 8), (0, 2, 2, 16), (4, 1, 5, 3)]
)
def test_states_merge(tokens: int, count: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    v, s = states(tokens, count, heads, dim, dtype)
    merged, lse = flashinfer.merge_states(v, s)
    assert (merged.dtype, lse.dtype) == (dtype, torch.float32)
    assert_close(merged, expected(v, s)[0])
    assert_close(lse, expected(v, s)[1])
    if count == 2:
        (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
        pair = flashinfer.merge_state(v_a, s_a, v_b, s_b)
        for got, want in zip(pair, (merged, lse), strict=True):
            assert_equal_bits(got, want)
        mine, sums = v_a.clone(), s_a.clone()
        assert flashinfer.merge_state_in_place(mine, sums, v_b, s_b) is None
        assert_equal_bits(mine, merged)
        assert_equal_bits(sums, lse)


def test_states_without_keys_are_not_looked_at() -> None:
    """Whatever stands in them; neither has keys: 0 and -inf (flashinfer-ai/flashinfer#4452)."""
    v = torch.tensor([[1.0, NAN], [NAN, 2.0], [NAN, NAN], [NAN, 3.0], [INF, 4.0]]).view(5, 2, 1, 1)
    s = torch.tensor([[0.5, -INF], [-INF, 1.5], [-INF, -INF], [INF, 2.5], [-INF, 0.0]]).view(5, 2, 1)
    merged, lse = flashinfer.merge_states(v, s)
    assert merged.flatten().tolist() == [1.0, 2.0, 0.0, 3.0, 4.0]
    assert lse.flatten().tolist() == [0.5, 1.5, -INF, 2.5, 0.0]


def test_no_states_at_all() -> None:
    merged, lse = flashinfer.merge_states(torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3))
    assert merged.tolist() == torch.zeros(2, 3, 4).tolist()
    assert bool((lse == -INF).all())


def test_large_and_small_sums() -> None:
    """Only differences of the log-sum-exp may be raised to a power."""
    for at in (-1000.0, 1000.0):
        v, s = torch.tensor([0.0, 10.0]).view(1, 2, 1, 1), torch.tensor([at, at + 2]).view(1, 2, 1)
        merged, lse = flashinfer.merge_states(v, s)
        assert merged.item() == 8.0
        assert_close(lse.flatten(), torch.tensor([at + math.log2(5)]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_a_mask_keeps_tokens(dtype: torch.dtype) -> None:
    v, s = states(4, 2, 2, 8, torch.float32)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    mask = torch.tensor([1, 0, 0, 1]).to(dtype)
    mine, sums = v_a.clone(), s_a.clone()
    mine[1] = NAN
    flashinfer.merge_state_in_place(mine, sums, v_b, s_b, mask)
    whole = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    for got, merged, old in ((mine, whole[0], v_a), (sums, whole[1], s_a)):
        assert_equal_bits(got[[0, 3]], merged[[0, 3]])
        assert_equal_bits(got[2], old[2].contiguous())
    assert bool(mine[1].isnan().all())


def test_left_to_right_into_a_slice() -> None:
    """Chunks of a context merged one by one into rows of a larger tensor."""
    v, s = states(3, 4, 2, 16, torch.float32)
    out, lse = torch.full((7, 2, 16), NAN), torch.full((7, 2), NAN)
    out[2:5], lse[2:5] = v[:, 0], s[:, 0]
    for i in range(1, 4):
        flashinfer.merge_state_in_place(out[2:5], lse[2:5], v[:, i], s[:, i])
    assert_close(out[2:5], expected(v, s)[0])
    assert_close(lse[2:5], expected(v, s)[1])
    assert bool(out[[0, 1, 5, 6]].isnan().all())


def test_other_floats_than_float32() -> None:
    """Read they may be; written in place they would be a copy, so that is refused."""
    v, s = states(3, 2, 2, 8, torch.float32)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    got = flashinfer.merge_state(v_a, s_a.double(), v_b, s_b.double())
    for g, w in zip(got, flashinfer.merge_state(v_a, s_a, v_b, s_b), strict=True):
        assert_close(g, w)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"_in_place: s must be float32\[3, 2\] on cpu"):
        flashinfer.merge_state_in_place(v_a.clone(), s_a.double(), v_b, s_b)


def test_signatures_are_those_of_flashinfer() -> None:
    for function, names in (
        (flashinfer.merge_state, "v_a s_a v_b s_b"),
        (flashinfer.merge_state_in_place, "v s v_other s_other mask"),
        (flashinfer.merge_states, "v s"),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()
