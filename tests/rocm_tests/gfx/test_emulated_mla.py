# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA attention as Triton compiles it for gfx942, executed on the CPU, against float64 arithmetic.

Needs a checkout of tinygrad, named by TINYGRAD_SRC, which cannot do the conversions from FP8.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch

from flashinfer.core import mla_plan
from flashinfer.core.mla_plan import Shape
from flashinfer.testing.codeobject import CodeObject
from flashinfer.testing.emulator import Emulator
from rocm_tests.gfx.conftest import triton_code
from rocm_tests.mla.case import NAN, SCALE, Case

SHAPE = Shape(16, 3, 1)
BLOCK = (256, 1, 1)
pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return triton_code("compile_triton.py", tmp_path_factory.mktemp("code"))


def pack(*values: torch.Tensor | int | float) -> list[bytes]:
    return [
        struct.pack("<Q", v.data_ptr())
        if isinstance(v, torch.Tensor)
        else struct.pack("<f" if isinstance(v, float) else "<i", v)
        for v in values
    ]


def run(emulator: Emulator, path: Path, grid: tuple[int, int, int], arguments: list[bytes]) -> None:
    code = CodeObject(path)
    kernel = code.kernel()
    # Triton adds pointers to scratch memory, which these kernels do not use.
    arguments = arguments + [bytes(8)] * (len(kernel.arguments) - len(arguments))
    lds = int(path.with_suffix(".lds").read_text(encoding="ascii"))
    emulator.launch(code, kernel, grid, BLOCK, arguments, dynamic_lds=max(0, lds - kernel.lds_bytes))


CASES = {
    "decode, merged": ([1, 1], [200, 5]),
    "speculation": ([8, 2, 3], [70, 0, 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(emulator: Emulator, folder: Path, name: str) -> None:
    q_lens, kv_lens = CASES[name]
    case = Case(q_lens, kv_lens, heads=2, dtype=torch.bfloat16, causal=True)
    qo, pages, indices, lens = case.metadata
    plan = mla_plan.plan([qo, pages, lens], 2, 4, True, [SHAPE], lens.device)
    schedule = plan.words[plan.schedule_at :].clone()
    merged = int((schedule[SHAPE.workers + 1 : SHAPE.schedule_words].view(-1, 5)[:, 4] > 0).sum())
    assert merged == (name != "speculation")
    tokens = sum(q_lens)
    partial = torch.full((SHAPE.partial_rows, 64), NAN)
    partial_lse = torch.full((SHAPE.partial_rows,), NAN)
    out = torch.full((tokens, 2, 64), NAN, dtype=torch.bfloat16)
    lse = torch.full((tokens, 2), NAN)
    strides = [t.stride(d) for t in (*case.queries, *case.caches, out, lse) for d in (0, 1)]
    scales = SCALE / math.log(2), 1.0, 1.0
    tensors = (*case.queries, *case.caches, indices, schedule, partial, partial_lse, out, lse)
    run(
        *(emulator, folder / "split.hsaco", (SHAPE.workers, 1, 1)),
        pack(*tensors, *strides, 2, SHAPE.workers, *scales),
    )
    run(
        *(emulator, folder / "merge.hsaco", (SHAPE.workers, 4, 1)),
        pack(schedule, partial, partial_lse, out, lse, *strides[-4:], 2, SHAPE.workers),
    )
    case.compare((out, lse))
