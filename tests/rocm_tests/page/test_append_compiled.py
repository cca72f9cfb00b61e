# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Appends under `torch.compile` with dynamic shapes: one node each, one graph for all lengths, no write lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import flashinfer
from flashinfer.testing.compare import assert_equal_bits

H, N, D, PAGES = 2, 16, 16, 6
OCP = torch.float8_e4m3fn


class Graphs:
    """A compiler backend that keeps the graphs, before and after writes are made explicit, and runs them."""

    def __init__(self) -> None:
        self.traced: list[torch.fx.GraphModule] = []
        self.functional: list[torch.fx.GraphModule] = []
        self.compile = aot_autograd(fw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.functional.append(graph)
        return graph.forward

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.traced.append(graph)
        return self.compile(graph, inputs)


def nodes(graph: torch.fx.GraphModule, op: Any) -> int:
    """Calls of an op: by itself, or handed to the operator that makes its writes explicit."""
    return sum(node.target is op or (bool(node.args) and node.args[0] is op) for node in graph.graph.nodes)


Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pool(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, PAGES * N * H * D * dtype.itemsize, dtype=torch.uint8)


def planes(memory: torch.Tensor, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = 16 // dtype.itemsize
    shapes = {
        "NHD": ((PAGES, N, H, D),) * 2,
        "HND": ((PAGES, H, N, D),) * 2,
        "SHUFFLED": ((PAGES, H, D // x, N, x), (PAGES, H, N // x, D, x)),
    }[layout]
    k, v = (half.view(dtype).view(shape) for half, shape in zip(memory.unbind(), shapes, strict=True))
    return k, v


def append_twice(layout: str, dtype: torch.dtype) -> Program:
    scales = {} if dtype == torch.bfloat16 else {"k_scale": 0.5, "v_scale": 2.0}

    def program(rows: torch.Tensor, batch: torch.Tensor, positions: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        cache, table = planes(memory, layout, dtype), (INDICES, INDPTR, LAST)
        flashinfer.append_paged_kv_cache(rows, rows + 1, batch, positions, cache, *table, layout, **scales)
        between = memory.clone()
        flashinfer.append_paged_kv_cache(rows + 2, rows + 3, batch, positions + 1, cache, *table, layout, **scales)
        return between

    return program


def append_mla_twice(
    rows: torch.Tensor, batch: torch.Tensor, positions: torch.Tensor, memory: torch.Tensor
) -> torch.Tensor:
    ckv, kpe = rows.flatten(1).split((24, 8), dim=1)
    cache = memory[0].view(torch.bfloat16).view(PAGES, N, 32).split((24, 8), dim=2)
    table = INDICES, INDPTR, LAST
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, batch, positions, *cache, *table)
    between = memory.clone()
    flashinfer.append_paged_mla_kv_cache(ckv + 2, kpe + 2, batch, positions + 1, *cache, *table)
    return between


INDICES, INDPTR, LAST = (torch.tensor(t, dtype=torch.int32) for t in ([4, 1, 5, 0, 2, 3], [0, 4, 6], [1, 1]))
OPS = torch.ops.flashinfer
PROGRAMS = {
    "NHD": (append_twice("NHD", torch.bfloat16), "append_paged_kv_cache", torch.bfloat16),
    "HND": (append_twice("HND", torch.bfloat16), "append_paged_kv_cache", torch.bfloat16),
    "SHUFFLED": (append_twice("SHUFFLED", torch.bfloat16), "append_paged_kv_cache", torch.bfloat16),
    "SHUFFLED FP8": (append_twice("SHUFFLED", OCP), "append_paged_kv_cache", OCP),
    "MLA": (append_mla_twice, "append_paged_mla_kv_cache", torch.bfloat16),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_lengths_and_one_node_an_append(name: str) -> None:
    program, op_name, dtype = PROGRAMS[name]
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=graphs)
    for n in (5, 17, 33):
        rows = torch.randn(n, H, D, generator=torch.Generator().manual_seed(n)).bfloat16()
        batch = torch.arange(n, dtype=torch.int32) % 3 - 1  # every third row is padding
        positions = torch.arange(n, dtype=torch.int32) // 3
        memories = [pool(dtype) for _ in range(2)]
        eager, inside = program(rows, batch, positions, memories[0]), compiled(rows, batch, positions, memories[1])
        assert eager.count_nonzero(), "the first append is seen by what comes between"
        assert not torch.equal(eager, memories[0]), "and the second is not"
        assert_equal_bits(inside, eager)
        assert_equal_bits(memories[1], memories[0])
    assert len(graphs.functional) == 1, "no length has a graph of its own"
    op = getattr(OPS, op_name).default
    # Tracing may begin anew, so the last trace counts.
    assert [nodes(g, op) for g in (graphs.traced[-1], *graphs.functional)] == [2, 2]
