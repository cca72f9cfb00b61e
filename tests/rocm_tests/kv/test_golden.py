# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""PageFormat and the reference converter against pools that AITER's own writers left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flashinfer.backends.reference.page_convert import convert_kv_pages
from flashinfer.kv.format import PageFormat
from flashinfer.testing.compare import assert_equal_bits

GOLDEN = Path(__file__).parent / "data" / "aiter_cache_golden.npz"
# Kind of page that each writer leaves.
KIND_OF = {"bf16": "shuffled", "flash_bf16": "split_nhd"}
CASES = [
    ("bf16", 3, 16, 64),
    ("bf16", 8, 16, 128),
    ("bf16", 1, 32, 128),
    ("flash_bf16", 3, 16, 64),
    ("flash_bf16", 2, 5, 128),
]
FILL = 0xA5


def load(writer: str, H: int, N: int, D: int) -> dict[str, torch.Tensor]:
    names = ("key", "value", "slots", "kcache", "vcache")
    with np.load(GOLDEN) as file:
        arrays = {name: file[f"{writer}_h{H}_n{N}_d{D}_{name}"] for name in names}
    return {
        name: torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
        for name, array in arrays.items()
    }


def pages_as_bytes(case: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[P, page_bytes]`: the K plane's block, then the V plane's."""
    planes = [case[name].flatten(1).view(torch.uint8) for name in ("kcache", "vcache")]
    return torch.cat(planes, dim=1)


def test_every_case_of_the_file_is_used() -> None:
    with np.load(GOLDEN) as file:
        assert {name.rpartition("_")[0] for name in file.files} == {f"{w}_h{H}_n{N}_d{D}" for w, H, N, D in CASES}


@pytest.mark.parametrize(("writer", "H", "N", "D"), CASES)
def test_offset_is_where_the_writer_writes(writer: str, H: int, N: int, D: int) -> None:
    case = load(writer, H, N, D)
    expected = pages_as_bytes(case)
    page = PageFormat(KIND_OF[writer], torch.bfloat16, H, N, D)
    assert page.page_bytes == expected.shape[1]
    actual = torch.full_like(expected, FILL)
    written = 0
    for token, slot in enumerate(case["slots"].tolist()):
        if slot < 0:
            continue
        written += 1
        for kv, name in enumerate(("key", "value")):
            for h in range(H):
                row = case[name][token, h].view(torch.uint8)
                for d in range(D):
                    at = page.offset(kv, h, slot % N, d)
                    actual[slot // N, at : at + 2] = row[2 * d : 2 * d + 2]
    assert 0 < written < len(case["slots"])
    assert_equal_bits(actual, expected)


@pytest.mark.parametrize(("writer", "H", "N", "D"), CASES)
def test_standard_pages_convert_to_what_the_writer_leaves(writer: str, H: int, N: int, D: int) -> None:
    case = load(writer, H, N, D)
    expected = pages_as_bytes(case)
    # The same rows in a standard pool, written by torch indexing.
    standard = torch.full((expected.shape[0], expected.shape[1]), FILL, dtype=torch.uint8).view(torch.int16)
    tokens = standard.view(-1, H, N, 2, D)
    for token, slot in enumerate(case["slots"].tolist()):
        if slot >= 0:
            tokens[slot // N, :, slot % N, 0] = case["key"][token]
            tokens[slot // N, :, slot % N, 1] = case["value"][token]
    ids = torch.arange(expected.shape[0])
    convert_kv_pages([standard], 1, ids, "standard", H, N, KIND_OF[writer], H, N, D, 0)
    assert_equal_bits(standard.view(torch.uint8), expected)
