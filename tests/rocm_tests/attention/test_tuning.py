# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A call gets the tile that was measured for its layout: 64 keys of shuffled pages, twice the warps for ragged keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.backends.triton import attention
from flashinfer.core.attention_work import Work

SHARED = 227 << 10


def launched(monkeypatch: pytest.MonkeyPatch, layout: str, q_len: int) -> tuple[int, int, int]:
    """Keys of a tile, warps and stages of the first kernel of a causal call, as on the verification target."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention, "launch", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(attention.device, "shared_bytes", lambda _: SHARED)
    monkeypatch.setattr(Work, "of", staticmethod(lambda rows, *_: Work(128 if rows >= 128 else 16, 2)))
    kv_len, heads = max(q_len, 64), 2
    q = torch.zeros(q_len, heads, 128, dtype=torch.bfloat16)
    indptr, ends = torch.tensor([0, q_len]).int(), torch.tensor([0, kv_len]).int()
    options = True, 1.0, -1, 0.0, 1.0, 1.0, None, None, None, False, q_len, kv_len, 0, None, q, q[..., 0].float()
    if layout == "RAGGED":
        k, v = torch.zeros(2, kv_len, heads, 128, dtype=torch.bfloat16)
        attention.ragged_attention(q, k, v, indptr, ends, *options)
    else:
        pages = kv_len // 16
        shapes = {
            "NHD": ((16, heads, 128),) * 2,
            "HND": ((heads, 16, 128),) * 2,
            "SHUFFLED": ((heads, 16, 16, 8), (heads, 2, 128, 8)),
        }[layout]
        k, v = (torch.zeros(pages, *shape, dtype=torch.bfloat16) for shape in shapes)
        table = indptr, torch.tensor([0, pages]).int(), torch.arange(pages).int(), torch.tensor([16]).int()
        attention.paged_attention(q, k, v, *table, layout, *options)
    constants, warps, stages = calls[0][-3:]
    tile = constants[7]
    return tile, warps, stages


@pytest.mark.parametrize(
    ("layout", "q_len", "want"),
    [
        ("NHD", 1, (128, 4, 2)),
        ("HND", 1, (128, 4, 2)),
        ("SHUFFLED", 1, (64, 4, 3)),
        ("NHD", 1024, (64, 4, 3)),
        ("SHUFFLED", 1024, (64, 4, 3)),
        ("RAGGED", 1024, (64, 8, 3)),
    ],
)
def test_tiles_by_layout(monkeypatch: pytest.MonkeyPatch, layout: str, q_len: int, want: tuple[int, int, int]) -> None:
    assert launched(monkeypatch, layout, q_len) == want
