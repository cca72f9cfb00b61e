# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Page conversion on a GPU against counted pages: the fast kernel, its clusters, and the generic one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.kv import KINDS, PageFormat, convert_kv_pages
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, random_bits
from rocm_tests.core.environment import set_variable
from rocm_tests.kv.pages import Layers, converted

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BOTH_WAYS = [("standard", "shuffled"), ("shuffled", "standard")]


@pytest.fixture(autouse=True)
def no_reports_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_variable(monkeypatch, env.check, "")
    yield
    flashinfer.check_device_errors()


def formats(src: str, dst: str, dtype: str, H: int, N: int, D: int) -> tuple[PageFormat, PageFormat]:
    return PageFormat(src, dtype, H, N, D), PageFormat(dst, dtype, H, N, D)


def there_and_back(
    layers: Layers, ids: list[int], src: PageFormat, dst: PageFormat, *, dtype: torch.dtype = torch.int32
) -> None:
    block_ids = torch.tensor(ids, dtype=dtype, device=DEVICE)
    convert_kv_pages(layers.caches, block_ids, src, dst)
    layers.check(ids, src, dst)
    convert_kv_pages(layers.caches, block_ids, dst, src)
    layers.check_untouched()


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("kind", "other"), list(itertools.combinations(KINDS, 2)))
def test_every_pair(kind: str, other: str, planes: int) -> None:
    for H, dtype in ((3, "bfloat16"), (1, "float8_e4m3fnuz"), (2, "float32")):
        src, dst = formats(kind, other, dtype, H, 16, 64)
        layers = Layers(src, planes=planes, device=DEVICE)
        there_and_back(layers, [4, 0, 3], src, dst, dtype=torch.int64)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("N", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("H", [1, 2, 3, 5, 8])
def test_fast_shapes(H: int, N: int, D: int) -> None:
    """From several pages to a workgroup (H=1, N=16, D=64) to several workgroups to a page (H=8, N=128, D=256)."""
    for planes, dtype in ((1, "bfloat16"), (2, "bfloat16"), (1, "float8_e4m3fn"), (2, "float8_e4m3fnuz")):
        src, dst = formats("standard", "shuffled", dtype, H, N, D)
        layers = Layers(src, layers=2, planes=planes, pages=7, device=DEVICE)
        there_and_back(layers, [6, 0, 3, 5, 1], src, dst)


@pytest.mark.parametrize(("N", "D", "pages"), [(64, 128, 300), (128, 128, 160), (64, 256, 150), (128, 256, 80)])
def test_more_large_pages_than_clusters(N: int, D: int, pages: int) -> None:
    """Each cluster takes several pages, and the last ones are not as many as there are clusters."""
    src, dst = formats("standard", "shuffled", "float16", 8, N, D)
    layers = Layers(src, layers=1, pages=pages + 2, device=DEVICE)
    ids = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(0))[:pages].tolist()
    there_and_back(layers, ids, src, dst)


def test_more_large_pages_than_counters() -> None:
    """Workgroups that share a page meet at a counter of a ring of 4095: here the ring goes round more than twice."""
    src, dst = formats("standard", "shuffled", "bfloat16", 9, 16, 128)
    layers, pages = 20, 450
    pool = torch.randint(-(2**15), 2**15, (pages, layers, src.page_bytes // 2), dtype=torch.int16, device=DEVICE)
    before, ids = pool.clone(), torch.randperm(pages, device=DEVICE)
    planes = list(pool.unbind(1))
    convert_kv_pages(planes, ids, src, dst)
    assert_equal_bits(pool.flatten(0, 1), converted(before.flatten(0, 1), src, dst))
    convert_kv_pages(planes, ids, dst, src)
    assert torch.equal(pool, before)


def test_a_request_of_a_real_model() -> None:
    """36 layers of 8 heads, 40 pages."""
    src, dst = formats("standard", "shuffled", "bfloat16", 8, 16, 128)
    layers = Layers(src, layers=36, pages=48, device=DEVICE)
    there_and_back(layers, list(range(47, 7, -1)), src, dst)


def test_more_layers_than_one_launch_takes() -> None:
    for dtype, D in (("bfloat16", 64), ("uint8", 16)):
        src, dst = formats("standard", "shuffled", dtype, 1, 16, D)
        there_and_back(Layers(src, layers=300, pages=3, device=DEVICE), [2, 0], src, dst)


def test_layers_of_unlike_strides() -> None:
    src, dst = formats("standard", "shuffled", "bfloat16", 2, 16, 64)
    there_and_back(Layers(src, layers=5, gap_bytes=[64, 32, 32, 64, 6], device=DEVICE), [0, 5], src, dst)


@pytest.mark.parametrize("gap_bytes", [2, 4, 8, 16])
def test_planes_at_any_alignment(gap_bytes: int) -> None:
    for kind, other in itertools.combinations(KINDS, 2):
        src, dst = formats(kind, other, "bfloat16", 2, 16, 64)
        there_and_back(Layers(src, gap_bytes=gap_bytes, device=DEVICE), [4, 0, 3], src, dst)


def test_sizes_that_fit_no_vector() -> None:
    for kind, other in itertools.permutations(("standard", "split_hnd", "split_nhd"), 2):
        for dtype, N, D in (("bfloat16", 5, 7), ("uint8", 1, 3), ("float32", 3, 1), ("float16", 16, 72)):
            src, dst = formats(kind, other, dtype, 3, N, D)
            there_and_back(Layers(src, planes=1, gap_bytes=12, device=DEVICE), [5, 1], src, dst)
    src, dst = formats("standard", "x_packed", "bfloat16", 3, 5, 24)
    there_and_back(Layers(src, device=DEVICE), [5, 1], src, dst)


def test_more_pages_than_scratch_pages() -> None:
    """The generic kernel's workgroups take several pages each."""
    src, dst = formats("standard", "x_packed", "bfloat16", 2, 16, 16)
    there_and_back(Layers(src, layers=3, pages=500, device=DEVICE), list(range(500)), src, dst)


def test_nothing_to_do_changes_nothing() -> None:
    src, dst = formats("standard", "shuffled", "bfloat16", 2, 16, 64)
    layers = Layers(src, device=DEVICE)
    convert_kv_pages(layers.caches, torch.tensor([], dtype=torch.int32, device=DEVICE), src, dst)
    convert_kv_pages(layers.caches, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE), src, src)
    layers.check_untouched()


@pytest.mark.parametrize("bad", [6, -1, UNUSED_PAGE_ID])
@pytest.mark.parametrize(
    ("other", "N", "D"), [("shuffled", 16, 64), ("shuffled", 128, 256), ("x_packed", 16, 64)], ids=str
)
def test_a_bad_id_is_skipped_and_reported(other: str, N: int, D: int, bad: int) -> None:
    """In all three kernels: the other pages are converted."""
    src, dst = formats("standard", other, "bfloat16", 8, N, D)
    layers = Layers(src, layers=3, device=DEVICE)
    convert_kv_pages(layers.caches, torch.tensor([4, bad, 0], dtype=torch.int32, device=DEVICE), src, dst)
    layers.check([4, 0], src, dst)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.check_device_errors()
    assert str(caught.value) == f"convert_kv_pages: block_ids[1] must be a page id in [0, 6), got {bad}"


def test_reference_backend_agrees() -> None:
    for kind, other in BOTH_WAYS:
        src, dst = formats(kind, other, "bfloat16", 8, 64, 128)
        results = []
        for backend in ("native", "reference"):
            layers = Layers(src, device=DEVICE)
            convert_kv_pages(layers.caches, torch.tensor([5, 2], device=DEVICE), src, dst, backend=backend)
            results.append(torch.cat([layers.of(i) for i in range(2)]))
        assert_equal_bits(results[0], results[1])


@pytest.mark.slow
@pytest.mark.parametrize(("other", "N"), [("shuffled", 16), ("shuffled", 128), ("x_packed", 16)])
def test_offsets_past_32_bits(other: str, N: int) -> None:
    """ROCm/aiter#2893: page id times stride past 2^31 and past 2^32 bytes, in all three kernels."""
    src, dst = formats("standard", other, "bfloat16", 8, N, 128)
    stride = 8 << 20
    pool = torch.zeros(600, stride // 2, dtype=torch.bfloat16, device=DEVICE)
    plane = pool[:, : src.page_bytes // 2]
    ids = [1, 300, 599]
    pages = random_bits((3, src.page_bytes // 2), torch.bfloat16).to(DEVICE)
    plane[ids] = pages
    convert_kv_pages([plane], torch.tensor(ids, device=DEVICE), src, dst)
    assert_equal_bits(plane[ids], converted(pages, src, dst))
    plane[ids] = 0
    assert int(pool.view(torch.int64).count_nonzero()) == 0
