# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Sliding windows, soft caps and sinks reach the kernels, in each phase and on each kind of page."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError
from rocm_tests.vllm.layer_case import DIM, HEADS, KV_HEADS, PAGE_SIZE, cache_of, dense, layer, step_of

pytestmark = pytest.mark.vllm

# Before and behind the edge of a page, and one token.
WINDOWS = (None, 1, PAGE_SIZE, PAGE_SIZE + 1, 200)
TABLES = [[5, 2, 7], [8, 3, 6], [1, 4]]
# Each request's new tokens, step by step: prefills, an extend of many tokens beside decodes, decodes alone.
STEPS = ([20, 16, 0], [1, 17, 5], [1, 1, 16], [1, 1, 1])


class Requests:
    """Requests over several steps, and what attention over all of their tokens gives."""

    def __init__(self, engines: Any, **options: Any) -> None:
        torch.manual_seed(7)
        self.options = options
        _, self.cache = cache_of(engines)
        # vLLM's block 0: no request's own, entries that fell out of a window name it.
        self.cache[0] = 1e30
        self.lengths = [0] * len(TABLES)
        self.kept: list[list[torch.Tensor]] = [[] for _ in TABLES]
        self.layer = layer(
            sliding_window=options.get("window"), logits_soft_cap=options.get("cap"), sinks=options.get("sinks")
        )
        self.layer.process_weights_after_loading(torch.float32)

    def step(self, new: list[int], order: tuple[int, ...] = (0, 1, 2), **how: Any) -> Any:
        """One step of the requests in this order, held against the oracle; its metadata."""
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        counts = [new[request] for request in order]
        query = torch.randn(sum(counts), HEADS, DIM)
        key, value = torch.randn(2, sum(counts), KV_HEADS, DIM).unbind()
        output = torch.empty_like(query)
        tables = [self.table(request, new[request]) for request in order]
        step = step_of(tables, [self.lengths[request] for request in order], counts, **how)
        self.layer.forward(None, query, key, value, self.cache, step, output)
        for request, (first, last) in zip(
            order, itertools.pairwise(itertools.accumulate(counts, initial=0)), strict=True
        ):
            self.kept[request].append(torch.stack((key[first:last], value[first:last])))
            k, v = torch.cat(self.kept[request], dim=1).unbind()
            expected = dense(query[first:last], k, v, **self.options)
            torch.testing.assert_close(output[first:last].double(), expected, rtol=1e-5, atol=1e-5)
        return step

    def table(self, request: int, new: int) -> list[int]:
        """Pages of a request. vLLM names block 0 where all tokens are behind the windows of a step's queries."""
        window = self.options.get("window")
        first_seen = 0 if window is None else max(0, self.lengths[request] - new - window + 1)
        pages = TABLES[request][: -(-self.lengths[request] // PAGE_SIZE)]
        return [0 if (i + 1) * PAGE_SIZE <= first_seen else page for i, page in enumerate(pages)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cap", [0.0, 0.5])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_against_dense_attention(engines: Any, pages: str, window: int | None, cap: float, with_sinks: bool) -> None:
    sinks = torch.linspace(-2, 3, HEADS) if with_sinks else None
    requests = Requests(engines, window=window, cap=cap, sinks=sinks)
    for new in STEPS:
        requests.step(new)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_every_order_of_phases(engines: Any, pages: str, order: tuple[int, ...]) -> None:
    requests = Requests(engines, window=None, cap=0.5)
    for new in STEPS:
        requests.step(new, order)


def test_phases_have_kernels_of_their_own(engines: Any, pages: str) -> None:
    """[decode : extend : prefill], as vLLM's reordering makes it; layers that are alike share the plan."""
    requests = Requests(engines)
    requests.step([20, 16, 0])
    step = requests.step([1, 17, 5])
    (wrapper,) = step._planned.values()
    phases = wrapper.phases
    assert (phases.num_decodes, phases.num_extends, phases.num_prefills) == (1, 1, 1)
    assert (phases.num_decode_tokens, phases.num_extend_tokens, phases.num_prefill_tokens) == (1, 17, 5)
    assert step.planned(layer()._attention) is wrapper
    assert step.planned(layer(sliding_window=3)._attention) is not wrapper


def test_context_in_pieces(engines: Any, pages: str) -> None:
    """An extend whose context is longer than what is fetched at once."""
    requests = Requests(engines, sinks=torch.ones(HEADS))
    requests.step([33, 16, 0])
    step = requests.step([9, 17, 0], max_model_len=1)
    assert step.context_tokens == PAGE_SIZE


def test_the_device_is_asked_where_the_host_knows_too_much(engines: Any, pages: str) -> None:
    requests = Requests(engines)
    requests.step([20, 16, 0], drafts=2)
    step = requests.step([3, 17, 5], drafts=2)
    (wrapper,) = step._planned.values()
    assert wrapper.phases.num_decodes == 1, "drafts are verified by decodes"


def test_sinks_in_the_dtype_of_the_model(engines: Any, pages: str) -> None:
    """They are a parameter of the model, loaded after the layer is made."""
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.bfloat16))
    attention = layer(sinks=sinks)
    with torch.no_grad():
        sinks += 2
    attention.process_weights_after_loading(torch.float32)
    assert attention.sinks.dtype == torch.float32
    assert attention.sinks.tolist() == [2.0] * HEADS


def test_what_a_step_may_not_be(engines: Any, pages: str) -> None:
    for causal in (False, torch.tensor([True])):
        with pytest.raises(InvalidArgumentError, match="vLLM backend: causal must be True"):
            step_of([[1]], [3], [3], causal=causal)
