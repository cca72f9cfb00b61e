# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`BatchPhaseAttentionWrapper` on a GPU against dense attention in float64; captured runs follow later plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.testing.tolerances import tolerance_of
from rocm_tests.phases.case import Case, Geometry

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MIXED = [(1, 33), (1, 1), (1, 300), (7, 40), (140, 160), (9, 16), (50, 0), (1, 0)]


def workspace(g: Geometry, pages: int) -> torch.Tensor:
    elements = 2 * pages * g.page_size * g.kv_heads * g.dim
    return torch.full((elements,), float("nan"), dtype=g.dtype, device=DEVICE)


def on_device(case: Case, wide: bool = False) -> tuple[Any, ...]:
    table, sizes = case.plan_arguments()[:4], case.plan_arguments()[4:]
    return (*(t.to(DEVICE, torch.int64 if wide else torch.int32) for t in table), *sizes)


def compare(case: Case, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    want, want_lse = case.expected()
    allowed = tolerance_of(case.g.dtype)
    # A context that comes in chunks is rounded once more for each of them.
    torch.testing.assert_close(got[0].double().cpu(), want, rtol=2 * allowed.rtol, atol=2 * allowed.atol)
    torch.testing.assert_close(got[1].double().cpu(), want_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND", "SHUFFLED"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize(("window_left", "shares_kv"), [(-1, False), (20, False), (-1, True)])
def test_every_phase_on_every_pool(layout: str, fp8: bool, window_left: int, shares_kv: bool) -> None:
    arch = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "")
    flavour = FNUZ if arch.startswith("gfx94") else OCP
    geometry = Geometry(
        heads=8,
        kv_heads=2,
        dim=64,
        layout=layout,
        dtype=torch.bfloat16,
        kv_dtype=flavour if fp8 else torch.bfloat16,
        window_left=window_left,
        shares_kv=shares_kv,
        sinks=True,
    )
    case = Case(MIXED, geometry)
    wrapper = flashinfer.BatchPhaseAttentionWrapper(workspace(geometry, 6), layout)
    wrapper.plan(*on_device(case, wide=fp8), **case.plan_options())
    arguments, more = case.run_arguments(DEVICE)
    compare(case, wrapper.run(*arguments, **more, return_lse=True))
    flashinfer.check_device_errors()


def test_a_captured_run_follows_later_plans() -> None:
    """Other contexts, in fewer chunks, with as many tokens to each phase."""
    geometry = Geometry(heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    first = Case([(1, 40), (1, 90), (20, 200), (12, 70), (30, 0)], geometry)
    indices = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.BatchPhaseAttentionWrapper(
        workspace(geometry, 4), use_cuda_graph=True, kv_indices_buffer=indices
    )
    arguments, _ = first.run_arguments(DEVICE)
    pool = tuple(torch.zeros(70, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in first.cache)
    static = [t.clone() for t in arguments[:3]]
    out, lse = torch.zeros_like(static[0]), torch.zeros(static[0].shape[:2], device=DEVICE)

    def load(case: Case) -> None:
        given, _ = case.run_arguments(DEVICE)
        for buffer, t in zip(static, given[:3], strict=True):
            buffer.copy_(t)
        for plane, t in zip(pool, given[3], strict=True):
            plane[: t.size(0)] = t
        wrapper.plan(*case.plan_arguments(), **case.plan_options())

    def run() -> None:
        wrapper.run(*static, (pool[0], pool[1]), out=out, lse=lse)

    load(first)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in (
        first,
        Case([(1, 5), (1, 300), (2, 64), (30, 65), (30, 0)], geometry, seed=1),
        Case([(1, 1), (1, 2), (31, 1), (1, 3), (30, 0)], geometry, seed=2),
    ):
        load(case)
        out.fill_(float("nan"))
        graph.replay()
        compare(case, (out, lse))
    flashinfer.check_device_errors()
    with pytest.raises(
        flashinfer.InvalidArgumentError, match="the context of extends must be of 5 chunks, as captured"
    ):
        load(Case([(1, 5), (1, 3), (20, 300), (12, 70), (30, 0)], geometry))
    with pytest.raises(flashinfer.InvalidArgumentError, match="the batch must be split as the graph's first one"):
        load(Case([(1, 5), (21, 20), (12, 70), (30, 0)], geometry))
