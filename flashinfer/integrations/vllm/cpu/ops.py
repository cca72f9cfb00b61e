# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The ops that vLLM's CPU worker and sampler call by name, `torch.ops._C.*`, written in torch.

What they compute is stated in vLLM by their callers: `v1/worker/cpu_worker.py`, `utils/cpu_triton_utils.py` and
`v1/sample/ops/topk_topp_sampler.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Binds memory to NUMA nodes there; nothing depends on it."""


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1).view(-1)


def _fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Samples a token of each row: `argmax(logits + g)` with `g = -log(e)`, e exponential, from the row's own seed."""
    chosen = torch.empty(logits.size(0), dtype=torch.int64)
    for row, seed in enumerate(seeds.tolist()):
        exponential = torch.empty_like(logits[row]).exponential_(generator=torch.Generator().manual_seed(seed))
        chosen[row] = (logits[row] - exponential.log()).argmax()
    return chosen


def _compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Slot of each new token, `block * block_size + offset`; -1 behind the last."""
    tokens = int(query_start_loc[-1])
    requests = torch.repeat_interleave(torch.arange(query_start_loc.numel() - 1), query_start_loc.diff().long())
    where = positions[:tokens].long()
    blocks = block_table[requests, where // block_size].long()
    slot_mapping[:tokens] = blocks * block_size + where % block_size
    slot_mapping[tokens:] = -1


_OPS: dict[str, Callable[..., torch.Tensor | None]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": _init_cpu_memory_env,
    "greedy_argmax(Tensor logits) -> Tensor": _greedy_argmax,
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": _fused_gumbel_argmax,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()": _compute_slot_mapping,
}


@functools.cache
def register() -> torch.library.Library:
    """Define those ops that nothing else has defined; the result must be kept, and is, for them to stay."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, implementation in _OPS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, implementation, "CompositeExplicitAutograd")
    return library
