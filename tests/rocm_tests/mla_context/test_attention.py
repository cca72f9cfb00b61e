# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`MlaContextAttention` on the CPU: new tokens and chunks of context as one sequence, and which way a step goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.triton import mla_context as fused_backend
from flashinfer.core.dtypes import OCP
from flashinfer.core.errors import NotPlannedError
from flashinfer.mla_context import MlaContextAttention, MlaShape
from flashinfer.selection import find_op
from rocm_tests.mla_context.prefill import Prefill

BF16 = torch.bfloat16
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "one chunk": ([3, 2], [5, 4]),
    "edges": ([1, 2, 3], [12, 11, 13]),
    "over three chunks": ([2, 1], [30, 3]),
    "some without context": ([3, 0, 2, 5, 1], [9, 4, 0, 30, 1]),
    "no context": ([3, 2], [0, 0]),
    "no requests": ([], []),
    "context and no new tokens": ([0, 0], [5, 9]),
}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "page 1": {"page_size": 1},
    "rank 64": {"rank": 64},
    "fp8 cache": {"kv_dtype": OCP},
    "row scales": {"weight_scale": "row"},
    "fp8 all over": {"weight_scale": "block", "kv_dtype": OCP, "rank": 192},
}


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch in the place of the fused kernel, which takes no CPU: the route is what is tested."""

    def run(*args: Any) -> None:
        flashinfer.gather_kv_b_proj(*args, backend="reference")

    op = find_op("gather_kv_b_proj")
    loaded = (lambda *args: None, run)
    monkeypatch.setitem(op._loaded, "triton", loaded)
    assert fused_backend.why_not_gather_kv_b_proj is not loaded[0]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_unfused(kind: str, batch: str) -> None:
    prefill = Prefill(*BATCHES[batch], **{"dtype": BF16, **KINDS[kind]})
    attention = prefill.attention(12, "unfused")
    prefill.plan(attention)
    assert not attention.fused
    prefill.compare(prefill.run(attention))


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_fused(kind: str, batch: str) -> None:
    prefill = Prefill(*BATCHES[batch], **{"dtype": BF16, **KINDS[kind]})
    attention = prefill.attention(12, "fused")
    prefill.plan(attention)
    assert attention.fused
    prefill.compare(prefill.run(attention))


def test_steps_do_not_have_the_backend_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and its merging have it, which plain torch stands in for; lookups and concatenation do not."""
    for name in ("ragged_attention", "merge_state_in_place"):
        monkeypatch.setitem(find_op(name)._loaded, "triton", find_op(name).functions("reference"))
    prefill = Prefill([2, 3, 1], [21, 0, 43], dtype=BF16)
    attention = prefill.attention(12, "unfused")
    with flashinfer.use_backend("triton"):
        prefill.plan(attention)
        prefill.compare(prefill.run(attention))


@pytest.mark.parametrize("budget", [4, 5, 8, 63, 64, 65])
def test_budgets(budget: int) -> None:
    """However the contexts are cut, and whatever the workspace held before."""
    prefill = Prefill([2, 3, 1], [21, 0, 43], dtype=BF16)
    attention = prefill.attention(budget, "unfused")
    plan = prefill.plan(attention)
    assert max(chunk.tokens for chunk in plan.chunks) <= budget
    prefill.compare(prefill.run(attention))


def test_results_may_be_given() -> None:
    prefill = Prefill([2, 3], [21, 5], dtype=BF16)
    attention = prefill.attention(64, "unfused")
    prefill.plan(attention)
    out = torch.full((5, 5, 40), float("nan"), dtype=BF16)
    lse = torch.full((5, 5), float("nan"))
    given = out[:, 1:4, 4:36], lse[:, 1:4]
    found = prefill.run(attention, out=given[0], lse=given[1])
    assert all(got is want for got, want in zip(found, given, strict=True))
    prefill.compare(found)


def test_a_plan_serves_every_layer() -> None:
    """Two layers with caches and weights of their own, one plan."""
    first, second = (Prefill([2, 3], [21, 5], dtype=BF16, seed=seed) for seed in (0, 0))
    second.cache += 1
    second.case.rows = [rows + 1 for rows in second.case.rows]
    attention = first.attention(12, "unfused")
    first.plan(attention)
    first.compare(first.run(attention))
    second.compare(second.run(attention))


def explained(prefill: Prefill, q_data_type: torch.dtype, way: str = "auto") -> dict[str, str | None]:
    attention = prefill.attention(64, way)
    return attention.explain(prefill.cache, prefill.case.weight, prefill.case.dtype, q_data_type, **prefill.layer)


@pytest.mark.usefixtures("fused_on_cpu")
def test_the_dtype_of_attention_decides_and_not_that_of_the_queries() -> None:
    """Queries of bf16 that attention will run in something else: keys that a fused kernel writes would not fit them."""
    prefill = Prefill([2], [5], dtype=BF16)
    assert prefill.q.dtype == BF16
    assert explained(prefill, BF16) == {"fused": None, "unfused": None}
    answers = explained(prefill, torch.float16)
    assert answers == {
        "fused": "needs attention in torch.bfloat16, in which keys and values are written, got q_data_type "
        "torch.float16",
        "unfused": None,
    }
    attention = prefill.attention(64, "auto")
    prefill.plan(attention, torch.float16)
    assert not attention.fused
    out, lse = prefill.run(attention)
    assert out.dtype == torch.float16
    prefill.compare((out.bfloat16(), lse))


@pytest.mark.usefixtures("fused_on_cpu")
def test_fp8_queries_are_taken_neither_way() -> None:
    prefill = Prefill([2], [5], dtype=BF16)
    answers = explained(prefill, OCP)
    assert str(answers["fused"]).startswith("needs attention in torch.bfloat16, in which keys and values are written")
    sentence = "needs attention in 16 bits or more, as no backend takes queries of torch.float8_e4m3fn"
    assert answers["unfused"] == sentence
    with pytest.raises(flashinfer.BackendUnavailableError) as caught:
        prefill.plan(prefill.attention(64, "auto"), OCP)
    assert str(caught.value).splitlines()[0] == "MlaContextAttention: no way takes this step"
    assert f"  unfused: {sentence}" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "way", "fused", "unfused"),
    [
        ({}, "auto", "aiter needs an AMD GPU, got cpu; triton needs a GPU, got cpu", None),
        (
            {},
            "fused",
            "aiter needs an AMD GPU, got cpu; triton needs",
            "this MlaContextAttention was made with way='fused'",
        ),
        ({}, "unfused", "this MlaContextAttention was made with way='unfused'", None),
        ({"dtype": torch.float32}, "auto", "aiter needs", "needs keys in 16 bits, which concat_mla_k takes, got"),
        ({"nope": 20, "v_dim": 20}, "auto", "aiter", "needs a qk_nope_head_dim that is a multiple of 8, got 20"),
        ({"rope": 0}, "auto", "aiter", "needs a qk_rope_head_dim that is a multiple of 8, got 0"),
    ],
)
def test_why_not(kind: dict[str, Any], way: str, fused: str, unfused: str | None) -> None:
    answers = explained(prefill := Prefill([2], [5], **{"dtype": BF16, **kind}), prefill.case.dtype, way)
    assert str(answers["fused"]).startswith(fused)
    assert answers["unfused"] == unfused or (unfused is not None and str(answers["unfused"]).startswith(unfused))


def test_pages_apart_are_declined() -> None:
    prefill = Prefill([2], [9], dtype=BF16)
    prefill.cache = prefill.case.cache
    answers = explained(prefill, BF16)
    assert answers["fused"] == answers["unfused"]
    assert str(answers["unfused"]).startswith("needs a cache without gaps between pages, got stride")


def test_a_workspace_that_holds_no_page_is_refused() -> None:
    prefill = Prefill([2], [9], dtype=BF16)
    with pytest.raises(flashinfer.InvalidArgumentError, match="chunk_tokens must be at least a page, 4 tokens, got 3"):
        prefill.plan(prefill.attention(3, "unfused"))


WORKSPACE = torch.empty(1 << 12, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"way": "both"}, "way must be one of ('auto', 'fused', 'unfused'), got 'both'"),
        (
            {"workspace": WORKSPACE[1:]},
            "workspace must be a tensor, contiguous and on a multiple of 16 bytes, got uint8",
        ),
        ({"workspace": None}, "workspace must be a tensor, contiguous and on a multiple of 16 bytes, got NoneType"),
        ({"shape": (3, 128, 32, 16, 32)}, "shape must be an MlaShape, got tuple"),
        ({"sm_scale": float("nan")}, "sm_scale must be finite, got nan"),
        ({"sm_scale": "1"}, "sm_scale must be a number, got '1'"),
        ({"attention_backend": "native"}, "attention_backend must be one of ('auto', 'triton', 'aiter', 'reference')"),
    ],
)
def test_a_constructor_that_is_refused(change: dict[str, Any], sentence: str) -> None:
    arguments = {"workspace": WORKSPACE, "shape": MlaShape(3, 128, 32, 16, 32), "page_size": 4, **change}
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        MlaContextAttention(**arguments)
    assert str(caught.value).startswith(f"MlaContextAttention: {sentence}")


def test_what_the_planner_refuses_is_refused_early() -> None:
    with pytest.raises(flashinfer.InvalidArgumentError, match="dcp_world_size must be 1"):
        MlaContextAttention(WORKSPACE, MlaShape(3), 4, dcp_world_size=2)
    with pytest.raises(flashinfer.InvalidArgumentError, match="page_size must be an integer from 1"):
        MlaContextAttention(WORKSPACE, MlaShape(3), 0)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_heads": 0}, "num_heads must be an integer from 1 to 2147483647, got 0"),
        ({"num_heads": 4.0}, "num_heads must be an integer, got 4.0"),
        ({"num_heads": 4, "qk_rope_head_dim": -1}, "qk_rope_head_dim must be an integer from 0 to 2147483647, got -1"),
    ],
)
def test_sizes_that_no_layer_has(sizes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        MlaShape(**sizes)
    assert str(caught.value) == f"MlaShape: {sentence}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"kv_cache": torch.zeros(3, 8, 144).bfloat16()},
            "MlaContextAttention: kv_cache must be [pages, 4, 144], got bfloat16[3, 8, 144]",
        ),
        ({"kv_cache": None}, "MlaContextAttention: kv_cache must be [pages, 4, 144], got NoneType"),
        (
            {"kv_b_proj_weight": torch.zeros(192, 64).bfloat16()},
            "MlaContextAttention: kv_b_proj_weight must be [192, 128], got bfloat16[192, 64]",
        ),
        ({"kv_scale": torch.ones(1)}, "gather_kv_b_proj: kv_scale must be None with values of torch.bfloat16"),
        ({"model_dtype": "bf16"}, "MlaContextAttention: model_dtype must be a torch.dtype, got 'bf16'"),
        ({"q_data_type": "fp8"}, "MlaContextAttention: q_data_type must be a torch.dtype, got 'fp8'"),
    ],
)
def test_a_layer_that_is_refused(change: dict[str, Any], sentence: str) -> None:
    """Before a way is chosen, also where attention will run in another dtype."""
    prefill = Prefill([2], [9], dtype=BF16)
    for q_data_type in (BF16, torch.float16):
        arguments = {
            "qo_indptr": [0, 2],
            "context_lens": [9],
            "block_tables": prefill.case.table.block_table,
            "kv_cache": prefill.cache,
            "kv_b_proj_weight": prefill.case.weight,
            "model_dtype": BF16,
            "q_data_type": q_data_type,
            **change,
        }
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            prefill.attention(64, "unfused").plan(**arguments)
        assert str(caught.value).startswith(sentence)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("way", ["fused", "unfused"])
@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("q", lambda t: t.half(), "of the step's dtype torch.bfloat16 and of shape [2, 3, 48], got float16[2, 3, 48]"),
        ("q", lambda t: t[1:], "of the step's dtype torch.bfloat16 and of shape [2, 3, 48], got bfloat16[1, 3, 48]"),
        ("q", lambda t: None, "of the step's dtype torch.bfloat16 and of shape [2, 3, 48], got NoneType"),
        ("k", lambda t: t.float(), "of the step's dtype torch.bfloat16 and of shape [2, 3, 48], got float32[2, 3, 48]"),
        (
            "v",
            lambda t: t[..., :8],
            "of the step's dtype torch.bfloat16 and of shape [2, 3, 32], got bfloat16[2, 3, 8]",
        ),
        (
            "kv_cache",
            lambda t: t[1:],
            "torch.bfloat16[6, 4, 144] on cpu, as in the plan, got bfloat16[5, 4, 144] on cpu",
        ),
        ("kv_cache", lambda t: t.half(), "torch.bfloat16[6, 4, 144] on cpu, as in the plan, got float16[6, 4, 144] on"),
        (
            "kv_b_proj_weight",
            lambda t: t[:96],
            "torch.bfloat16[192, 128] on cpu, as in the plan, got bfloat16[96, 128]",
        ),
        ("kv_b_proj_weight", lambda t: t.float(), "torch.bfloat16[192, 128] on cpu, as in the plan, got float32[192,"),
        ("kv_scale", lambda t: torch.ones(1), "None, as in the plan, got float32[1] on cpu"),
        ("weight_scale", lambda t: torch.ones(192), "None, as in the plan, got float32[192] on cpu"),
    ],
)
def test_a_run_unlike_its_plan_is_refused(way: str, name: str, change: Any, sentence: str) -> None:
    """Both ways: unfused, a scale that nobody planned for would be applied."""
    prefill = Prefill([2], [9], dtype=BF16)
    attention = prefill.attention(64, way)
    with pytest.raises(NotPlannedError, match="MlaContextAttention: plan\\(\\) must be called first"):
        prefill.run(attention)
    prefill.plan(attention)
    arguments = {"q": prefill.q, "k": prefill.k, "v": prefill.v, "kv_cache": prefill.cache}
    arguments |= {"kv_b_proj_weight": prefill.case.weight, "kv_scale": None, "weight_scale": None}
    arguments[name] = change(arguments[name])
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        attention.run(**arguments)
    assert str(caught.value).startswith(f"MlaContextAttention: {name} must be {sentence}")


def test_pages_of_another_layer_that_lie_apart_are_declined() -> None:
    prefill = Prefill([2], [9], dtype=BF16)
    attention = prefill.attention(64, "unfused")
    prefill.plan(attention)
    prefill.cache = prefill.case.cache
    with pytest.raises(flashinfer.BackendUnavailableError, match="no way takes this layer: needs a cache without gaps"):
        prefill.run(attention)
    prefill.cache = torch.zeros(6, 4, 288, dtype=BF16)[..., ::2]
    with pytest.raises(flashinfer.BackendUnavailableError, match="needs a cache contiguous in its last dimension, got"):
        prefill.run(attention)


def test_results_where_something_else_is_needed_are_refused() -> None:
    """A result in the queries would be read by the next chunk, one in the workspace overwritten by it."""
    prefill = Prefill([2, 3], [21, 5], dtype=BF16)
    workspace = torch.empty(1 << 16, dtype=torch.uint8)
    attention = MlaContextAttention(workspace, prefill.shape, 4, way="unfused")
    prefill.plan(attention)
    there = workspace[256 : 256 + 5 * 3 * 32 * 2].view(BF16).view(5, 3, 32)
    lse = torch.empty(5, 3, requires_grad=True)
    for given, sentence in (
        ({"out": prefill.q[..., :32]}, "q must be outside of out, which is written while it is read"),
        ({"out": there}, "out must be outside of the workspace, which is written while it is needed"),
        ({"lse": there.view(-1)[:30].view(torch.float32).view(5, 3)}, "lse must be outside of the workspace"),
        ({"lse": lse}, "lse must be without requires_grad"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"MlaContextAttention: {sentence}"):
            prefill.run(attention, **given)
    prefill.q = workspace[: 5 * 3 * 48 * 2].view(BF16).view(5, 3, 48)
    with pytest.raises(flashinfer.InvalidArgumentError, match="q must be outside of the workspace"):
        prefill.run(attention)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_parameters_need_no_mode_of_their_own(way: str) -> None:
    """A layer's weight, and what was made from others, outside of `torch.no_grad`."""
    prefill = Prefill([2, 3], [21, 5], dtype=BF16)
    prefill.case.weight = torch.nn.Parameter(prefill.case.weight)
    for t in (prefill.q, prefill.k, prefill.v):
        t.requires_grad_()
    attention = prefill.attention(12, way)
    prefill.plan(attention)
    results = prefill.run(attention)
    assert not any(t.requires_grad for t in results)
    with torch.no_grad():
        prefill.compare(results)


def test_a_step_is_compiled_whole() -> None:
    prefill = Prefill([2, 3], [21, 5], dtype=BF16)
    attention = prefill.attention(12, "unfused")
    prefill.plan(attention)
    run = torch.compile(attention.run, fullgraph=True, backend="aot_eager")
    prefill.compare(run(prefill.q, prefill.k, prefill.v, prefill.cache, prefill.case.weight))


def test_fused_takes_less_workspace() -> None:
    """DeepSeek's on one GPU, and on each of eight: bytes of a token, by hand."""
    for heads in (16, 128):
        shape = MlaShape(heads)
        assert shape.bytes_per_token(BF16, fused=True) == heads * (192 + 128) * 2
        assert shape.bytes_per_token(BF16, fused=False) == 576 * 2 + heads * (256 + 192) * 2
