# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Calls that every op must refuse alike: things of another kind, and memory that must not be written. As in bad.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

APPEND, MLA, ATTENTION = "append_paged_kv_cache", "append_paged_mla_kv_cache", "paged_attention"
POSITIONS, LENS = "get_batch_indices_positions", "get_seq_lens"


def nested(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([t[:1], t[:2]])


def watched(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_()


NESTED = "must be a tensor that is not nested, got a nested one; pass {0}.values() or a padded tensor"
WATCHED = (
    "must be without requires_grad, as it is written behind autograd's back, got requires_grad=True; "
    "pass {0}.detach() or call under torch.no_grad()"
)
# The first tensor of each op, and one that it writes.
ENDS = {
    APPEND: ("append_key", "k_cache"),
    MLA: ("append_ckv", "kpe_cache"),
    ATTENTION: ("q", "out"),
}
BAD_KINDS: list[tuple[str, dict[str, Any], str]] = [
    (op, {name: value}, f"{name} must be a tensor, got {kind}")
    for op, names in ENDS.items()
    for name in names
    for value, kind in (([1, 2], "list"), (None, "NoneType"), (7, "int"), (np.zeros(3), "ndarray"))
]
for _op, _names in ENDS.items():
    BAD_KINDS += [(_op, {name: nested}, f"{name} {NESTED.format(name)}") for name in _names]
BAD_KINDS += [
    (POSITIONS, {"append_indptr": [0, 2]}, "append_indptr must be a tensor, got list"),
    (POSITIONS, {"positions": None}, "positions must be a tensor, got NoneType"),
    (LENS, {"kv_indptr": [0, 2]}, "kv_indptr must be a tensor, got list"),
    (LENS, {"seq_lens": 3}, "seq_lens must be a tensor, got int"),
    (APPEND, {"kv_layout": None}, "kv_layout must be a string, got None"),
]
# What is one memory under two names, as far as that can be seen without looking at values.
BAD_MEMORY: list[tuple[str, dict[str, Any], str]] = [
    (APPEND, {"k_cache": watched}, f"k_cache {WATCHED.format('k_cache')}"),
    (MLA, {"kpe_cache": watched}, f"kpe_cache {WATCHED.format('kpe_cache')}"),
    (ATTENTION, {"out": watched}, f"out {WATCHED.format('out')}"),
    (
        APPEND,
        {"v_cache": lambda t: t[:1].expand(40, 16, 2, 32)},
        "v_cache must be of elements that each have memory of their own, "
        "got float32[40, 16, 2, 32] on cpu of stride (0, 64, 32, 1)",
    ),
    (
        MLA,
        {"ckv_cache": lambda t: t[:, :1].contiguous().expand(40, 16, 64)},
        "ckv_cache must be of elements that each have memory of their own, "
        "got float32[40, 16, 64] on cpu of stride (64, 0, 1)",
    ),
    (
        ATTENTION,
        {"lse": torch.zeros(1, 6).expand(6, 6)},
        "lse must be of elements that each have memory of their own, got float32[6, 6] on cpu of stride (0, 1)",
    ),
    (
        APPEND,
        dict.fromkeys(("k_cache", "v_cache"), torch.zeros(40, 16, 2, 32)),
        "v_cache must be of memory of its own, not that of k_cache, got v_cache.data_ptr() == k_cache.data_ptr()",
    ),
    (
        MLA,
        dict.fromkeys(("append_kpe", "append_ckv"), torch.zeros(7, 64))
        | dict.fromkeys(("ckv_cache", "kpe_cache"), torch.zeros(40, 16, 64)),
        "kpe_cache must be of memory of its own, not that of ckv_cache, "
        "got kpe_cache.data_ptr() == ckv_cache.data_ptr()",
    ),
    (
        POSITIONS,
        dict.fromkeys(("batch_indices", "positions"), torch.zeros(9, dtype=torch.int32)),
        "positions must be of memory of its own, not that of batch_indices, "
        "got positions.data_ptr() == batch_indices.data_ptr()",
    ),
]
