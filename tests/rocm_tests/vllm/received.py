# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Caches as they are when a peer's pages have landed in them, cut in every way; needs no vLLM."""

from __future__ import annotations

import torch

from flashinfer.integrations.vllm.nixl.agreement import Agreement
from flashinfer.integrations.vllm.nixl.landing import covered
from flashinfer.integrations.vllm.nixl.staging import Staging
from flashinfer.kv import PageFormat
from rocm_tests.vllm.formats import joined, places

# Small pages in a page, pieces of a page from ranks of the peer, and small pages that the last pages are short of.
CUTS = [(1, 1, 0), (1, 3, 0), (2, 1, 0), (2, 1, 1), (4, 1, 1), (4, 1, 3), (4, 1, 5), (2, 3, 1)]

LAYERS, PAGES, HEADS, TOKENS, DIM = 2, 6, 3, 64, 16
LOCAL, REST = [4, 0, 2], [1, 3, 5]
POISON = 7


class Received:
    """Two layers with three pages of standard bytes, which are to become shuffled ones."""

    def __init__(self, ratio: int, pieces: int, missing: int, device: torch.device) -> None:
        heads, tokens, count = HEADS // pieces, TOKENS // ratio, len(LOCAL) * ratio - missing
        self.ratio = ratio
        src = PageFormat("standard", "bfloat16", heads, tokens, DIM)
        self.agreement = Agreement(src, PageFormat("shuffled", "bfloat16", heads, TOKENS, DIM), pieces)
        self.pages = list(covered(LOCAL, range(count), ratio))
        generator = torch.Generator().manual_seed(0)
        shape = (LAYERS, count, 2, HEADS, tokens, DIM)
        self.values = torch.randint(-30000, 30000, shape, dtype=torch.int16, generator=generator)
        caches = [torch.full((PAGES, 2, TOKENS, HEADS * DIM), POISON, dtype=torch.int16) for _ in range(LAYERS)]
        at = places("standard", heads, tokens, DIM, 2).flatten()
        for layer, cache in enumerate(caches):
            for small in range(count):
                page = cache[LOCAL[small // ratio]].view(2, pieces, -1)
                for piece in range(pieces):
                    part = self.values[layer, small, :, piece * heads : (piece + 1) * heads]
                    sent = torch.empty(at.numel(), dtype=torch.int16)
                    sent[at] = part.reshape(-1)
                    # A piece of the first half and the same piece of the second are one run of bytes.
                    run = page[:, piece].reshape(-1)
                    run[small % ratio * at.numel() :][: at.numel()] = sent
                    page[:, piece] = run.view(2, -1)
        self.caches = [cache.to(device) for cache in caches]

    def staged(self, slots: list[int]) -> Staging:
        """The pages in slots of a staging memory, whose pieces follow each other, and no more in the caches."""
        staging = Staging(self.caches[0], LAYERS, 2 * TOKENS * HEADS * DIM * 2, max(slots) + 2)
        staging.memory.fill_(POISON)
        for layer, cache in enumerate(self.caches):
            for (page, _), slot in zip(self.pages, slots, strict=True):
                halves = cache[page].view(2, self.agreement.pieces, -1)
                staging.memory[layer, slot] = halves.transpose(0, 1).reshape(-1)
                cache[page] = POISON
        return staging

    def check(self) -> None:
        """Compare every byte of every page."""
        index = places("shuffled", HEADS, TOKENS, DIM, 2)
        caches = [cache.cpu() for cache in self.caches]
        pages = torch.stack([cache[LOCAL].flatten(1)[:, index.flatten()] for cache in caches])
        assert torch.equal(pages.view(LAYERS, len(LOCAL), *index.shape), joined(self.values, self.ratio, len(LOCAL)))
        assert all((cache[REST] == POISON).all() for cache in caches), "pages of other requests were written"
