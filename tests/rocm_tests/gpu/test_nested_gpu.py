# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Re-encoding, nested formats and pool-to-pool conversion on a GPU: bit for bit what the CPU does."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashinfer
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.kv import KINDS, PageFormat, convert_kv_pages, convert_kv_pages_into

pytestmark = pytest.mark.gpu

NAMES = [str(d).removeprefix("torch.") for d in (OCP, FNUZ)]
SMALL, MIDDLE, LARGE = (1, 16, 64), (8, 16, 128), (9, 64, 128)


def pool(page: PageFormat, pages: int = 5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (pages, page.page_bytes), dtype=torch.uint8, generator=generator)


def in_place(page: torch.Tensor, src: PageFormat, dst: PageFormat, device: str) -> torch.Tensor:
    dtype = getattr(torch, src.dtype)
    mine = page.clone().to(device).view(dtype)
    ids = torch.tensor([3, 0, 2], device=device)
    convert_kv_pages([mine], ids, src, dst, allow_inexact=True)
    return mine.view(torch.uint8).cpu()


@pytest.mark.parametrize("geometry", [SMALL, MIDDLE, LARGE], ids=str)
@pytest.mark.parametrize("scale_mode", [None, "per_tensor"])
@pytest.mark.parametrize(("src", "dst"), itertools.permutations(NAMES, 2))
@pytest.mark.parametrize(
    ("kind", "other"), [("standard", "shuffled"), ("shuffled", "standard"), ("standard", "x_packed")]
)
def test_recoding(
    kind: str, other: str, src: str, dst: str, scale_mode: str | None, geometry: tuple[int, int, int]
) -> None:
    formats = PageFormat(kind, src, *geometry, scale_mode), PageFormat(other, dst, *geometry, scale_mode)
    page = pool(formats[0])
    assert torch.equal(in_place(page, *formats, "cuda"), in_place(page, *formats, "cpu"))
    flashinfer.check_device_errors()


@pytest.mark.parametrize("dtype", ["bfloat16", NAMES[0], "float32"])
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_blocks_and_pieces(pieces: int, tokens: int, dtype: str) -> None:
    for kind, other in [*itertools.permutations(KINDS, 2), ("split_hnd", "split_hnd")]:
        little, large = PageFormat(kind, dtype, 8 // pieces, 16, 64), PageFormat(other, dtype, 8, tokens, 64)
        page = pool(large)
        for formats in ((little, large), (large, little)):
            assert torch.equal(in_place(page, *formats, "cuda"), in_place(page, *formats, "cpu")), formats


@pytest.mark.parametrize("geometry", [SMALL, MIDDLE, LARGE, (3, 8, 72)], ids=str)
@pytest.mark.parametrize(
    ("kind", "other"), [("standard", "shuffled"), ("shuffled", "standard"), ("x_packed", "split_nhd")]
)
def test_from_pool_to_pool(kind: str, other: str, geometry: tuple[int, int, int]) -> None:
    for dtype in ("bfloat16", "float32"):
        src, dst = PageFormat(kind, dtype, *geometry), PageFormat(other, dtype, *geometry)
        results = []
        for device in ("cuda", "cpu"):
            source, target = (pool(f, seed=i).to(device).view(getattr(torch, dtype)) for i, f in enumerate((src, dst)))
            ids = torch.tensor([4, 1, 4], device=device), torch.tensor([0, 4, 2], dtype=torch.int32, device=device)
            convert_kv_pages_into([source], ids[0], [target], ids[1], src, dst)
            results.append((source.view(torch.uint8).cpu(), target.view(torch.uint8).cpu()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    flashinfer.check_device_errors()


def test_a_bad_source_id_is_reported_and_skipped() -> None:
    src, dst = PageFormat("standard", "bfloat16", *MIDDLE), PageFormat("shuffled", "bfloat16", *MIDDLE)
    source, target = (pool(f, seed=i).cuda().view(torch.bfloat16) for i, f in enumerate((src, dst)))
    before = target.clone()
    ids = torch.tensor([1, 7], device="cuda")
    convert_kv_pages_into([source], ids, [target], torch.tensor([3, 2], device="cuda"), src, dst)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 5\), got 7"):
        flashinfer.check_device_errors()
    assert torch.equal(target[2].view(torch.uint8), before[2].view(torch.uint8))
    assert not torch.equal(target[3].view(torch.uint8), before[3].view(torch.uint8))
