# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`PageConverter`: one pool, many requests."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer.kv import KINDS, PageConverter, PageFormat
from flashinfer.testing.generators import UNUSED_PAGE_ID
from rocm_tests.kv.pages import Layers, converted

SRC, DST = (PageFormat(kind, "bfloat16", 3, 16, 64) for kind in ("standard", "shuffled"))
BACKENDS = ["native", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("planes", [1, 2])
def test_request_after_request(planes: int, backend: str) -> None:
    layers = Layers(SRC, planes=planes)
    convert = PageConverter(layers.caches, SRC, DST, backend=backend)  # type: ignore[arg-type]
    for ids in (torch.tensor([4, 0]), torch.tensor([], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)):
        convert(ids)
    layers.check([4, 0, 3], SRC, DST)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(list(itertools.permutations(KINDS, 2))), st.permutations(range(6)), st.integers(0, 6))
def test_any_split_of_any_request(pair: tuple[str, str], ids: list[int], first: int) -> None:
    src, dst = (PageFormat(kind, "bfloat16", 3, 16, 64) for kind in pair)
    layers = Layers(src)
    convert = PageConverter(layers.caches, src, dst)  # type: ignore[arg-type]
    convert(torch.tensor(ids[:first], dtype=torch.int64))
    convert(torch.tensor(ids[first:], dtype=torch.int64))
    layers.check(ids, src, dst)


def test_more_layers_than_a_launch_takes_and_unlike_strides() -> None:
    layers = Layers(SRC, layers=131, pages=2, gap_bytes=[64] * 40 + [128] * 91)
    PageConverter(layers.caches, SRC, DST)(torch.tensor([1]))  # type: ignore[arg-type]
    layers.check([1], SRC, DST)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_ids_change_nothing(backend: str) -> None:
    layers = Layers(SRC)
    convert = PageConverter(layers.caches, SRC, DST, backend=backend)  # type: ignore[arg-type]
    for ids, expected in (
        ([1, UNUSED_PAGE_ID], f"block_ids[1] must be a page id in [0, 6), got {UNUSED_PAGE_ID}"),
        ([-1], "block_ids[0] must be a page id in [0, 6), got -1"),
        ([2, 1, 2], "block_ids must be distinct, got 2 at [0] and [2]; convert each page once"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            convert(torch.tensor(ids))
        assert str(caught.value) == f"convert_kv_pages: {expected}"
    layers.check_untouched()
    convert(torch.tensor([2]))
    layers.check([2], SRC, DST)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1], "must be a tensor, got list"),
        (None, "must be a tensor, got NoneType"),
        (torch.tensor(1), "must be 1-D, got int64[] on cpu"),
        (torch.tensor([1.0]), "must be int32 or int64, got float32[1] on cpu; pass block_ids.int()"),
        (torch.tensor([1, 2, 3])[::2], "must be contiguous, got stride (2,); pass block_ids.contiguous()"),
        (torch.tensor([1], device="meta"), "must be on cpu, got meta; pass block_ids.to('cpu')"),
    ],
    ids=str,
)
def test_what_is_no_list_of_ids_is_refused(ids: torch.Tensor, expected: str) -> None:
    layers = Layers(SRC)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        PageConverter(layers.caches, SRC, DST)(ids)  # type: ignore[arg-type]
    assert str(caught.value).endswith(f": block_ids {expected}")
    layers.check_untouched()


def test_bad_layers_are_refused_at_once() -> None:
    plane = torch.zeros(3, 2, 16, 64, dtype=torch.bfloat16)
    with pytest.raises(flashinfer.InvalidArgumentError, match="PageConverter: caches must be of one layer or more"):
        PageConverter([], SRC, DST)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"convert_kv_pages: planes\[0\] must be of 12288 bytes"):
        PageConverter([plane], SRC, DST)
    with pytest.raises(flashinfer.BackendUnavailableError, match="no backend takes this call"):
        PageConverter(Layers(SRC).caches, SRC, DST, backend="triton")  # type: ignore[arg-type]


def test_in_a_compiled_function() -> None:
    """One graph, which changes the pool."""
    layers = Layers(SRC)
    convert = PageConverter(layers.caches, SRC, DST)  # type: ignore[arg-type]

    def step(ids: torch.Tensor) -> torch.Tensor:
        convert(ids)
        return ids + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([4, 2])).tolist() == [5, 3]
    layers.check([4, 2], SRC, DST)


def test_the_pool_is_kept_alive() -> None:
    pool = torch.arange(2 * SRC.page_bytes // 2, dtype=torch.int16).view(2, -1).view(torch.bfloat16)
    expected = converted(pool.view(torch.int16).clone(), SRC, DST)
    convert = PageConverter([pool], SRC, DST)
    del pool
    convert(torch.tensor([0, 1]))
    assert torch.equal(convert.planes[0].view(torch.int16), expected)
