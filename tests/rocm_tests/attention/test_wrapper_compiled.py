# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of planned wrappers inside a compiled function: one graph, each op one node in it, results as without."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.attention.wrapper_case import Case
from rocm_tests.phases.case import Case as PhaseCase
from rocm_tests.phases.case import Geometry

Program = Callable[..., Any]
KINDS = ("decode", "paged", "ragged", "mixed", "single")


def programs(kind: str, case: Case) -> tuple[Program, str]:
    """A run and a forward of other options, and the op that each is."""
    if kind == "mixed":
        both = flashinfer.BatchAttention(case.kv_layout, "cpu")
        (Hq, H), metadata = case.heads, (case.qo_indptr, case.table.indptr, case.table.indices, case.table.seq_lens)
        both.plan(*metadata, Hq, H, case.D, case.D, case.page_size, True, **case.dtypes)
        return lambda: [*both.run(case.q, case.cache), *both.run(case.q, case.cache, v_scale=2.0)], "paged_attention"
    if kind == "single":
        options = {"causal": True, "return_lse": True}
        single = flashinfer.single_prefill_with_kv_cache, flashinfer.single_decode_with_kv_cache
        return lambda: [
            *single[0](case.q, case.k, case.v, **options),
            *single[1](case.q[0], case.k, case.v, return_lse=True),
        ], "ragged_attention"
    wrapper = getattr(case, kind)()
    getattr(case, f"plan_{kind}")(wrapper, window_left=5)
    inputs = (case.q, case.k, case.v) if kind == "ragged" else (case.q, case.cache)

    def program() -> list[torch.Tensor]:
        out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
        wrapper.run(*inputs, out=out, lse=lse, k_scale=0.5)
        return [out, lse, *wrapper.forward_return_lse(*inputs, logits_soft_cap=3.0)]

    return program, "ragged_attention" if kind == "ragged" else "paged_attention"


def compiled(program: Program) -> tuple[Program, collections.Counter[str]]:
    """The program as one graph, and how often it calls which op of this package."""
    found: collections.Counter[str] = collections.Counter()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        assert graphs == 1
        found.update(str(n.target).split(".")[1] for n in graph.graph.nodes if str(n.target).startswith("flashinfer."))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(program, fullgraph=True, backend=backend), found


@pytest.mark.parametrize("kind", KINDS)
def test_each_op_of_a_wrapper_is_one_node(kind: str) -> None:
    case = Case([1, 1] if kind == "decode" else [3], [9, 20] if kind == "decode" else [9])
    program, op = programs(kind, case)
    expected = [t.clone() for t in program()]
    fast, nodes = compiled(program)
    for _ in "twice":
        for got, want in zip(fast(), expected, strict=True):
            assert_equal_bits(got, want)
    assert nodes == {op: 2}


def test_a_gather_is_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.dense_kv.ROWS_WORTH", 1)
    case = Case([3], [9], kv_layout="SHUFFLED")
    program, _ = programs("paged", case)
    expected = [t.clone() for t in program()]
    fast, nodes = compiled(program)
    for _ in "twice":
        for got, want in zip(fast(), expected, strict=True):
            assert_equal_bits(got, want)
    assert nodes == {"gather_paged_kv": 2, "ragged_attention": 2}


@pytest.mark.parametrize(
    ("geometry", "nodes"),
    [
        (
            Geometry(sinks=True),
            # Prefill and the extends' new tokens once; three chunks of context of two pages.
            {"paged_attention": 1, "ragged_attention": 5, "gather_paged_kv": 3, "merge_state_in_place": 3},
        ),
        (Geometry(window_left=7, layout="SHUFFLED"), {"paged_attention": 2, "ragged_attention": 1}),
        (Geometry(shares_kv=True, layout="HND"), {"paged_attention": 3}),
    ],
    ids=["chunks", "window", "shared"],
)
def test_each_op_of_a_phase_is_one_node(geometry: Geometry, nodes: dict[str, int]) -> None:
    case = PhaseCase([(1, 40), (3, 70), (2, 20), (9, 0)], geometry)
    workspace = torch.empty(2 * 2 * geometry.page_size * geometry.kv_heads * geometry.dim, dtype=torch.float32)
    wrapper = flashinfer.BatchPhaseAttentionWrapper(workspace, geometry.layout)
    wrapper.plan(*case.plan_arguments(), **case.plan_options())
    arguments, options = case.run_arguments()

    def program() -> list[torch.Tensor]:
        out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
        wrapper.run(*arguments, **options, out=out, lse=lse)
        return [out, lse]

    expected, (fast, found) = case.expected(), compiled(program)
    for _ in "twice":
        for got, eager, want in zip(fast(), program(), expected, strict=True):
            assert_equal_bits(got, eager)
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
    assert found == nodes
