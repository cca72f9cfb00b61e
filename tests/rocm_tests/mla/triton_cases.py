# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels must get right, on a GPU or in Triton's interpreter.

The interpreter's matrix product knows no bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.mla.case import NAN, Case

FULL = (512, 64)
# Name to arguments of a case. Batches are longer than a cut (64 keys) where pieces are to be merged.
BATCHES: dict[str, dict[str, Any]] = {
    "decode": {"q_lens": [1, 1, 1], "kv_lens": [5, 0, 17], "heads": 16, "dims": FULL},
    "long and short": {"q_lens": [1, 1, 1], "kv_lens": [700, 64, 65], "heads": 16},
    "page 1": {"q_lens": [1, 1], "kv_lens": [130, 63], "heads": 8, "page_size": 1},
    "page 3": {"q_lens": [1, 1], "kv_lens": [130, 63], "heads": 8, "page_size": 3},
    "page 64": {"q_lens": [1, 1], "kv_lens": [130, 63], "heads": 8, "page_size": 64},
    "separate caches": {"q_lens": [1, 1], "kv_lens": [70, 9], "heads": 16, "dims": FULL, "layout": "separate"},
    "1 head": {"q_lens": [1, 1], "kv_lens": [70, 9], "heads": 1},
    "6 heads": {"q_lens": [1, 2], "kv_lens": [70, 9], "heads": 6},
    "20 heads": {"q_lens": [1, 1], "kv_lens": [70, 9], "heads": 20},
    "24 heads": {"q_lens": [1, 1], "kv_lens": [70, 9], "heads": 24},
    "96 heads": {"q_lens": [1, 1], "kv_lens": [400, 9], "heads": 96},
    "128 heads": {"q_lens": [1, 1], "kv_lens": [300, 1], "heads": 128, "dims": FULL},
    "speculation, 8 queries": {"q_lens": [8, 8], "kv_lens": [90, 8], "heads": 16, "causal": True},
    "speculation, ragged": {"q_lens": [2, 0, 5, 1], "kv_lens": [300, 9, 5, 70], "heads": 8, "causal": True},
    "128 heads, 3 queries": {"q_lens": [3, 1], "kv_lens": [90, 5], "heads": 128, "causal": True},
    "causal prefill": {"q_lens": [40, 17], "kv_lens": [40, 33], "heads": 4, "causal": True},
    "rows that see nothing": {"q_lens": [5, 2], "kv_lens": [3, 0], "heads": 4, "causal": True},
    "all empty": {"q_lens": [1, 2], "kv_lens": [0, 0], "heads": 16},
    "no requests": {"q_lens": [], "kv_lens": [], "heads": 16},
    "no queries": {"q_lens": [0, 0], "kv_lens": [9, 3], "heads": 16},
    "no rope": {"q_lens": [1], "kv_lens": [70], "heads": 16, "dims": (128, 0)},
    "int64 indices": {"q_lens": [1, 1], "kv_lens": [70, 9], "heads": 16, "index_dtype": torch.int64},
    "fp8": {"q_lens": [1, 2], "kv_lens": [70, 9], "heads": 16, "kv_dtype": torch.float8_e4m3fn, "causal": True},
}


def functional(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    case = Case(**arguments, dtype=dtype, device=device)
    case.compare(case.call("triton"))


def planned(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """With a workspace full of NaN and results that are slices of poisoned buffers."""
    case = Case(**arguments, dtype=dtype, device=device)
    wrapper = case.wrapper("triton", 256 << 20)
    wrapper._float_workspace_buffer.fill_(255)
    case.plan(wrapper)
    tokens, (dim, _) = case.q.size(0), case.dims
    out = torch.full((tokens, case.heads + 2, dim + 16), NAN, dtype=dtype, device=device)
    lse = torch.full((tokens, case.heads + 2), NAN, device=device)
    first = out[:, 1:-1, 8:-8], lse[:, 1:-1]
    case.compare(case.run(wrapper, out=first[0], lse=first[1]))
    again = case.run(wrapper)
    for got, want in zip(again, first, strict=True):
        assert_equal_bits(got, want.contiguous())
    for t in first:
        t.fill_(NAN)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


def equal_keys(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Base 2, through merged pieces as well: 2 to the power of 10 equal keys."""
    case = Case([1, 1], [8, 1024], heads=16, dtype=dtype, device=device)
    case.q.zero_()
    lse = case.call("triton")[1]
    assert lse.tolist() == [[3.0] * 16, [10.0] * 16]


def views_equal_copies(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Two halves of a buffer and two buffers give the same bits; a cache changed between two runs is seen."""
    results = []
    for layout in ("combined", "separate"):
        case = Case([1, 1], [130, 7], heads=16, dtype=dtype, device=device, layout=layout)
        results.append(case.call("triton"))
    for got, want in zip(*results, strict=True):
        assert_equal_bits(got, want)
    case.caches[0][case.table.pages_of(0)[0], 0] += 1
    assert not torch.equal(case.call("triton")[0], results[0][0])


Check = Callable[[str, torch.dtype, dict[str, Any]], None]
CASES: dict[str, tuple[Check, dict[str, Any]]] = {
    **{name: (functional, arguments) for name, arguments in BATCHES.items()},
    **{f"{name}, planned": (planned, BATCHES[name]) for name in ("long and short", "speculation, ragged", "96 heads")},
    "equal keys": (equal_keys, {}),
    "views and copies": (views_equal_copies, {}),
}
