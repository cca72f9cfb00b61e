# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What a conversion must do: where each element lies, said with views of a counted page, and guarded layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashinfer.kv import PageFormat
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import GuardedPool, random_bits


def places(page: PageFormat) -> torch.Tensor:
    """`[2, H, N, D]`: the index in a page of each element of K and V."""
    H, N, D, x = page.num_kv_heads, page.page_size, page.head_dim, 16 // page.element_size
    count = torch.arange(2 * H * N * D)
    if page.kind == "standard":
        return count.view(H, N, 2, D).permute(2, 0, 1, 3)
    k, v = count.chunk(2)
    if page.kind == "split_hnd":
        return torch.stack([k.view(H, N, D), v.view(H, N, D)])
    if page.kind == "split_nhd":
        return torch.stack([k.view(N, H, D), v.view(N, H, D)]).transpose(1, 2)
    key = k.view(H, D // x, N, x).permute(0, 2, 1, 3).reshape(H, N, D)
    if page.kind == "shuffled":
        return torch.stack([key, v.view(H, N // x, D, x).permute(0, 1, 3, 2).reshape(H, N, D)])
    assert page.kind == "x_packed"
    return torch.stack([key, v.view(H, D, N).permute(0, 2, 1)])


def converted(pages: torch.Tensor, src: PageFormat, dst: PageFormat) -> torch.Tensor:
    """`[M, elements]` pages of `src` as pages of `dst`."""
    new = torch.empty_like(pages)
    new[:, places(dst).flatten().to(pages.device)] = pages[:, places(src).flatten().to(pages.device)]
    return new


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


class Layers:
    """Layers of guarded pages full of arbitrary bits, and what they held at first."""

    def __init__(
        self,
        page: PageFormat,
        *,
        layers: int = 2,
        planes: int = 2,
        pages: int = 6,
        gap_bytes: int | Sequence[int] = 64,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        dtype = getattr(torch, page.dtype)
        shape = (page.page_bytes // page.element_size // planes,)
        gaps = [gap_bytes] * layers if isinstance(gap_bytes, int) else gap_bytes
        self.pools = [
            GuardedPool(pages, shape, dtype, planes=planes, gap_bytes=gap, device=device, poison=False) for gap in gaps
        ]
        for i, pool in enumerate(self.pools):
            for j, plane in enumerate(pool.planes):
                bits(plane).copy_(bits(random_bits(plane.shape, dtype, seed=seed + 2 * i + j)))
            pool.remember()
        self.caches: list[torch.Tensor | tuple[torch.Tensor, ...]] = [
            pool.planes if planes == 2 else pool.pages for pool in self.pools
        ]
        self.before = [self.of(i) for i in range(layers)]

    def of(self, layer: int) -> torch.Tensor:
        """All pages of a layer, `[P, elements]`, as integers: bits are what counts."""
        return torch.cat([bits(plane) for plane in self.pools[layer].planes], dim=1)

    def check(self, ids: Sequence[int], src: PageFormat, dst: PageFormat) -> None:
        """Pages `ids` went from `src` to `dst` and not a byte else changed."""
        for layer, pool in enumerate(self.pools):
            expected = self.before[layer].clone()
            expected[list(ids)] = converted(expected[list(ids)], src, dst)
            assert_equal_bits(self.of(layer), expected, name=f"layer {layer}")
            pool.check_only_changed(ids)
            pool.check_guards()

    def check_untouched(self) -> None:
        for pool in self.pools:
            pool.check_only_changed([])
