# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""An MLA context multiplied up as Triton compiles it for gfx942, executed on the CPU, against float64 arithmetic.

Needs a checkout of tinygrad, named by TINYGRAD_SRC. It can do neither the conversions from FP8 (caches and weights are
bfloat16, also those with scales) nor the loads past registers that gfx950 has.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from flashinfer.core import faults
from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.conftest import triton_code
from rocm_tests.mla_context.case import NAN, Case

TILE, THREADS = 128, {"none": 256, "block": 512}
pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return triton_code("compile_triton_context.py", tmp_path_factory.mktemp("code"))


def pack(value: torch.Tensor | int | None) -> bytes:
    if isinstance(value, int):
        return struct.pack("<i", value)
    return struct.pack("<Q", 0 if value is None else value.data_ptr())


class Run:
    """Results of one launch, and what it reported."""

    def __init__(self, emulator: Emulator, folder: Path, mode: str, case: Case) -> None:
        tokens, heads, requests = case.tokens, case.heads, len(case.lens)
        self.k = torch.full((tokens, heads, case.nope + case.rope), NAN, dtype=torch.bfloat16)
        self.v = torch.full((tokens, heads, case.v_dim), NAN, dtype=torch.bfloat16)
        self.fault = torch.zeros(4, dtype=torch.int64)
        table, scale_row = case.table, 0 if case.weight_scale is None else case.weight_scale.stride(0)
        tensors = (case.cache, case.kv_scale, table.indptr, table.indices, case.prefix, case.weight, case.weight_scale)
        sizes = (table.indices.numel(), case.cache.size(0), *case.cache.stride()[:2], case.weight.stride(0), scale_row)
        strides = (*self.k.stride()[:2], *self.v.stride()[:2])
        values = (
            *tensors,
            self.k,
            self.v,
            self.fault,
            *sizes,
            *strides,
            tokens,
            heads,
            requests,
            requests.bit_length(),
        )
        arguments = [pack(value) for value in values]
        code = CodeObject(folder / f"{mode}.hsaco")
        kernel = code.kernel()
        # Triton adds pointers to scratch memory, which this kernel does not use.
        explicit = sum(not a.kind.startswith("hidden_") for a in kernel.arguments)
        arguments += [bytes(8)] * (explicit - len(arguments))
        columns = heads * (-(-case.nope // TILE) + -(-case.v_dim // TILE))
        lds = int((folder / f"{mode}.lds").read_text(encoding="ascii"))
        grid, dynamic = (-(-tokens // TILE) * columns, 1, 1), max(0, lds - kernel.lds_bytes)
        emulator.launch(code, kernel, grid, (THREADS[mode], 1, 1), arguments, dynamic_lds=dynamic)


def context(lens: list[int], mode: str) -> Case:
    """Scales of blocks, and of the cache, with values of 16 bits."""
    case = Case(lens, heads=1, dtype=torch.bfloat16, seed=3)
    if mode == "block":
        case.kv_scale, case.weight_scale = torch.tensor([0.5]), torch.tensor([[0.75]])
        case.exact_weight = case.exact_weight * 0.75
    return case


@pytest.mark.parametrize("mode", ["none", "block"])
def test_keys_and_values(emulator: Emulator, folder: Path, mode: str) -> None:
    """More than one tile of tokens, and a request without any."""
    case = context([113, 0, 24], mode)
    found = Run(emulator, folder, mode, case)
    for got, want, name in zip((found.k, found.v), case.expected(), ("k_out", "v_out"), strict=True):
        assert_close(got, want, name=name)
    assert found.fault.tolist() == [0] * 4


def test_a_page_that_is_not_there_is_skipped_and_reported(emulator: Emulator, folder: Path) -> None:
    case = context([9, 6], "none")
    case.table.indices[4] = 2**30
    found = Run(emulator, folder, "none", case)
    pages = case.table.num_pages
    sentence = f"gather_kv_b_proj: kv_indices[4] must be a page id in [0, {pages}), got {2**30}"
    assert str(faults.error_in(found.fault)) == sentence
    for got, want in zip((found.k, found.v), case.expected(), strict=True):
        assert_close(got[:13], want[:13])
        assert bool(got[13:].isnan().all())
