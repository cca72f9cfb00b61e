# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of the attention wrappers: one after the other, into a graph's buffers, and what they refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.attention_work import scratch_elements
from flashinfer.core.errors import NotPlannedError
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.attention.wrapper_case import Case

KINDS = ("decode", "paged", "ragged")


def inputs(kind: str, case: Case) -> tuple[Any, ...]:
    return (case.q, case.k, case.v) if kind == "ragged" else (case.q, case.cache)


def plan(kind: str, case: Case, wrapper: Any, **options: Any) -> None:
    getattr(case, f"plan_{kind}")(wrapper, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_an_earlier_plan_is_left(kind: str) -> None:
    """flashinfer-ai/flashinfer#1028: masks, shapes, dtypes and options change from plan to plan."""
    wrapper = getattr(Case([], []), kind)()
    square = Case([4, 2], [9, 5])
    mask = torch.cat([m.flatten() for m in square.masks()])
    steps: list[tuple[Case, dict[str, Any]]] = [
        (square, {"custom_mask": mask}),
        (square, {"causal": True}),
        (square, {"causal": False}),
        (Case([3, 1], [4, 7], seed=1), {"custom_mask": torch.ones(19, dtype=torch.bool)}),
        (Case([2], [4], D=64, heads=(6, 3)), {"window_left": 1}),
        (Case([2, 1, 1], [4, 5, 6], dtype=torch.bfloat16, page_size=8), {"logits_soft_cap": 1.0}),
        (square, {"sm_scale": 1.0}),
        (Case([], []), {}),
        (square, {}),
    ]
    if kind == "decode":
        steps = [(Case([1] * len(c.kv_lens), c.kv_lens, D=c.D, page_size=c.page_size), {}) for c, _ in steps]
    for case, options in steps:
        fresh = getattr(case, kind)()
        for w in (wrapper, fresh):
            plan(kind, case, w, **options)
        expected = fresh.run(*inputs(kind, case), return_lse=True)
        for got, want in zip(wrapper.run(*inputs(kind, case), return_lse=True), expected, strict=True):
            assert_equal_bits(got, want)


def test_a_shared_workspace_carries_nothing_over() -> None:
    """Each run leaves the workspace to whoever comes next, and takes it as it finds it."""
    case = Case([1, 1], [40, 3])
    workspace = case.workspace()
    wrappers = {kind: getattr(case, kind)() for kind in KINDS}
    for kind, wrapper in wrappers.items():
        wrapper.reset_workspace_buffer(workspace)
        plan(kind, case, wrapper)
    expected = {kind: wrapper.run(*inputs(kind, case)) for kind, wrapper in wrappers.items()}
    for kind, wrapper in wrappers.items():
        workspace.fill_(255)
        assert_equal_bits(wrapper.run(*inputs(kind, case)), expected[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_wrapper_holds_all_it_needs(kind: str) -> None:
    """flashinfer-ai/flashinfer#564, alibaba/rtp-llm#1084: padded rows, lengths that grow and shrink, and callers who
    overwrite what they planned with. Nothing that a captured run reads moves."""
    first = Case([1] * 4, [1, 1, 1, 1])
    wrapper = first.ragged(graph=True) if kind == "ragged" else getattr(first, kind)(graph_pages=60)
    plan(kind, first, wrapper)
    names = [n for n in vars(wrapper) if n.endswith(("_buf", "_buffer")) and torch.is_tensor(getattr(wrapper, n))]
    assert len(names) >= 4
    addresses = {n: getattr(wrapper, n).data_ptr() for n in names}
    for lens in ([97, 3, 0, 64], [9, 8, 0, 0], [0, 0, 0, 0], [2, 1, 5, 4]):
        case = Case([1] * 4, lens, seed=sum(lens))
        plan(kind, case, wrapper)
        data = inputs(kind, case)
        for t in (case.qo_indptr, case.kv_indptr, case.table.indptr, case.table.indices, case.table.last_page_len):
            t.fill_(2**30)
        case.compare(wrapper.run(*data, return_lse=True))
    assert addresses == {n: getattr(wrapper, n).data_ptr() for n in names}


def test_a_graphs_masks() -> None:
    """The wrapper that has buffers for masks uses them in every run."""
    cases = [Case([4, 3], [9, 6], seed=s) for s in (1, 2)]
    buffers = {"custom_mask_buf": torch.full((99,), 255, dtype=torch.uint8), "mask_indptr_buf": cases[0].buffer(3)}
    wrappers = {"paged": cases[0].paged(graph_pages=9, **buffers), "ragged": cases[0].ragged(graph=True, **buffers)}
    for kind, wrapper in wrappers.items():
        for case in cases:
            masks = case.masks(seed=case.q.numel())
            plan(kind, case, wrapper, custom_mask=torch.cat([m.flatten() for m in masks]))
            assert wrapper._custom_mask_buf is buffers["custom_mask_buf"]
            case.compare(wrapper.forward_return_lse(*inputs(kind, case), causal=True), masks=masks)
            plan(kind, case, wrapper)
            case.compare(wrapper.run(*inputs(kind, case), return_lse=True), masks=masks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_wrapper_keeps_what_was_captured(kind: str) -> None:
    case = Case([1, 1], [5, 6])
    wrapper = case.ragged(graph=True) if kind == "ragged" else getattr(case, kind)(graph_pages=4)
    plan(kind, case, wrapper)
    batch = "for a batch of 2, that of the graph's buffers, got {}; pad the batch"
    wrong: list[tuple[Case, dict[str, Any], str]] = [
        (Case([1], [5]), {}, batch.format(1)),
        (Case([1, 1, 1], [5, 1, 1]), {}, batch.format(3)),
    ]
    if kind != "ragged":
        wrong.append((Case([1, 1], [15, 3]), {}, "of at most 4 pages, as the graph's buffer, got 5"))
    if kind == "decode":
        wrong.append((Case([2, 2], [5, 6]), {"q_len_per_req": 2}, "q_len_per_req must be 1, as in the graph's first"))
    else:
        wrong.append((Case([1, 2], [5, 6]), {}, r"qo_indptr\[-1\] must be at most 2, the graph's rows, got 3"))
        masks = torch.ones(11, dtype=torch.bool)
        wrong.append((case, {"custom_mask": masks}, "custom_mask_buf must be given to a graph's wrapper"))
    for other, options, sentence in wrong:
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            plan(kind, other, wrapper, **options)


def test_rows_of_a_graph_that_were_said_beforehand() -> None:
    case = Case([1, 1], [5, 6])
    wrapper = case.paged(graph_pages=9, max_total_num_rows=8)
    case.plan_paged(wrapper)
    more = Case([3, 5], [5, 6])
    more.plan_paged(wrapper)
    more.compare(wrapper.run(more.q, more.cache, return_lse=True))
    with pytest.raises(flashinfer.InvalidArgumentError, match="must be at most 8, the graph's rows, got 9"):
        Case([4, 5], [5, 6]).plan_paged(wrapper)


def test_graph_buffers_by_position() -> None:
    case = Case([1, 1], [5, 6])
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        case.workspace(), case.buffer(3), case.buffer(9), case.buffer(2)
    )
    assert wrapper.is_cuda_graph_enabled
    case.plan_decode(wrapper)
    case.compare(wrapper.run(case.q, case.cache, return_lse=True))


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_plan(kind: str) -> None:
    case = Case([1], [5])
    wrapper = getattr(case, kind)()
    for call in (wrapper.run, wrapper.forward):
        with pytest.raises(NotPlannedError, match=r"plan\(\) must be called before"):
            call(*inputs(kind, case))
    with pytest.raises(NotPlannedError, match=r"plan\(\) must be called before workspace_size"):
        wrapper.workspace_size()


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_a_refused_plan_does_not_run(kind: str) -> None:
    case, other = Case([1, 1], [9, 6]), Case([1, 1], [5, 7], seed=1)
    wrapper = getattr(case, kind)()
    plan(kind, case, wrapper)
    with pytest.raises(flashinfer.InvalidArgumentError, match="window_left must be an integer from -1"):
        plan(kind, other, wrapper, window_left=-7)
    with pytest.raises(NotPlannedError, match=r"plan\(\) must be called before run\(\)"):
        wrapper.run(*inputs(kind, case))
    plan(kind, case, wrapper)
    case.compare(wrapper.run(*inputs(kind, case), return_lse=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_workspace_is_as_large_as_it_says(kind: str) -> None:
    case = Case([1, 1], [5, 60])
    wrapper = getattr(case, kind)()
    plan(kind, case, wrapper)
    need = wrapper.workspace_size()
    assert need == 4 * scratch_elements(case.D, case.q.device)
    wrapper.reset_workspace_buffer(torch.empty(need // 4, dtype=torch.int32), torch.empty(4096, dtype=torch.uint8))
    case.compare(wrapper.run(*inputs(kind, case), return_lse=True))
    wrapper.reset_workspace_buffer(torch.empty(need - 1, dtype=torch.int8))
    with pytest.raises(flashinfer.InvalidArgumentError, match=f"must be of at least {need} bytes for this plan, got"):
        wrapper.run(*inputs(kind, case))
    with pytest.raises(flashinfer.InvalidArgumentError, match="float_workspace_buffer must be aligned to 16 bytes"):
        wrapper.reset_workspace_buffer(torch.empty(need, dtype=torch.int8)[1:])


def test_pages_of_another_size_than_planned_are_refused() -> None:
    """flashinfer-ai/flashinfer#3778: both are in the sentence."""
    case = Case([1, 1], [5, 60], page_size=16)
    k, v = case.cache
    for kind in ("decode", "paged"):
        wrapper = getattr(case, kind)()
        plan(kind, case, wrapper)
        for cache, got in (
            ((k[:, :8], v[:, :8]), 8),
            ((k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1)), 1),
        ):
            with pytest.raises(flashinfer.InvalidArgumentError, match=f"the planned page_size 16, got {got} in"):
                wrapper.run(case.q, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_planned_is_refused(kind: str) -> None:
    case = Case([1, 1], [5, 6])
    wrapper = getattr(case, kind)()
    plan(kind, case, wrapper)
    q, *rest = inputs(kind, case)
    halves = [t.half() if torch.is_tensor(t) else tuple(c.half() for c in t) for t in rest]
    k_name = "k" if kind == "ragged" else "k_cache"
    for arguments, sentence in (
        ((q.half(), *rest), "q must be of the planned q_data_type torch.float32, got torch.float16"),
        ((q, *halves), f"{k_name} must be of the planned kv_data_type torch.float32, got torch.float16"),
        ((q[:1], *rest), "q must be of 2 rows as planned, got 1"),
        ((q[..., :16], *rest), "q must be of the planned head dimension 32, got 16"),
        ((q[0], *rest), r"q must be \[tokens, heads, head_dim\], got float32\[4, 32\]"),
        ((q[:, :3], *rest), "q must be of heads divisible by"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            wrapper.run(*arguments)


def test_bad_plans_are_named() -> None:
    case = Case([1, 2], [18, 4])
    indptr, indices, last = case.pages
    for metadata, sentence in (
        ((indptr + 1, indices, last), r"paged_kv_indptr\[0\] must be 0, got 1"),
        (
            (torch.tensor([0, 7, 6]), indices, last),
            r"paged_kv_indptr must be non-decreasing, got 7 at \[1\] and then 6",
        ),
        # flashinfer-ai/flashinfer#320.
        ((indptr, indices, last + 3), r"last_page_len\[0\] must be in \[0, 4\], got 5"),
        ((indptr, indices, -last), r"last_page_len\[0\] must be in \[0, 4\], got -2"),
        ((indptr, indices[:3], last), "paged_kv_indices must be of at least the 6 entries named, got 3"),
        ((indptr[:2], indices, last), "paged_kv_indptr must be of length 3, one more than the batch size, got 2"),
        ((indptr.float(), indices, last), "paged_kv_indptr must be a 1-D int32 or int64 tensor, got float32"),
        ((indptr, indices.view(-1, 1), last), "paged_kv_indices must be a 1-D int32 or int64 tensor"),
        ((indptr, indices, last.tolist()), "paged_kv_last_page_len must be a 1-D int32 or int64 tensor, got list"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"PagedKVCacheWrapper: {sentence}"):
            case.paged().plan(case.qo_indptr, *metadata, *case.shape, **case.dtypes)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"qo_indptr must be non-decreasing, got 5 at \[1\]"):
        case.paged().plan(torch.tensor([0, 5, 3]), *case.pages, *case.shape, **case.dtypes)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"kv_indptr must be non-decreasing, got 18 at \[1\]"):
        case.ragged().plan(case.qo_indptr, torch.tensor([0, 18, 4]), 4, 2, 32)
    for position, name in enumerate(("num_qo_heads", "num_kv_heads", "head_dim", "page_size")):
        shape = list(case.shape)
        shape[position] = 0
        if name != "head_dim":
            with pytest.raises(flashinfer.InvalidArgumentError, match=f"{name} must be an integer from 1"):
                case.decode().plan(*case.pages, *shape)
    for mask, sentence in (
        (torch.ones(25, dtype=torch.bool), "custom_mask must be of 26 elements, the sum of q_len . kv_len, got 25"),
        (torch.ones(26), "custom_mask must be a bool tensor, got float32"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            case.plan_paged(case.paged(), custom_mask=mask)
    with pytest.raises(flashinfer.InvalidArgumentError, match="packed_custom_mask must be of 4 bytes, got 3"):
        case.plan_paged(case.paged(), packed_custom_mask=torch.ones(3, dtype=torch.uint8))
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"q_data_type must be a torch\.dtype or the name of one"):
        case.plan_paged(case.paged(), q_data_type="halves")


ONES = torch.ones(1)
EXTRAS: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, "plan", {"pos_encoding_mode": "ALIBI"}) for kind in KINDS),
    *((kind, "plan", {"pos_encoding_mode": "ROPE_LLAMA"}) for kind in KINDS),
    *((kind, "forward", {"pos_encoding_mode": "ALIBI"}) for kind in KINDS),
    *((kind, "plan", {"use_token_head_sf": True}) for kind in KINDS),
    *((kind, "plan", {"o_data_type": torch.float16}) for kind in KINDS),
    *((kind, "plan", {"fixed_split_size": -2}) for kind in KINDS),
    *((kind, "run", {"kv_cache_sf": ONES}) for kind in KINDS),
    *((kind, "run", {"k_scale": 0.0}) for kind in KINDS),
    *((kind, "run", {"v_scale": torch.ones(2)}) for kind in KINDS),
    *((kind, "plan", {"use_fp16_qk_reduction": True}) for kind in KINDS[1:]),
    *((kind, "plan", {"prefix_len_ptr": ONES}) for kind in KINDS[1:]),
    *((kind, "plan", {"token_pos_in_items_len": 3}) for kind in KINDS[1:]),
    *((kind, "plan", {"max_item_len_ptr": ONES}) for kind in KINDS[1:]),
    *((kind, "run", {"lse_base": "log10"}) for kind in KINDS[1:]),
    *((kind, "run", {"lse_layout": "NHD"}) for kind in KINDS[1:]),
    *((kind, "run", {"window_left": 3}) for kind in KINDS[:2]),
    *((kind, "run", {"skip_softmax_threshold_scale_factor": 1.0}) for kind in KINDS[:2]),
    *((kind, "plan", {"window_left": -2}) for kind in KINDS),
    ("decode", "plan", {"window_right": 3}),
    ("decode", "plan", {"q_len_per_req": 0}),
    ("decode", "run", {"q_len_per_req": 2}),
    ("paged", "run", {"use_fp16_softmax": True}),
    ("paged", "run", {"uses_spcompress": True}),
    ("ragged", "plan", {"v_indptr": ONES}),
    ("ragged", "plan", {"o_indptr": ONES}),
    ("ragged", "run", {"o_scale": 2.0}),
]


@pytest.mark.parametrize(("kind", "method", "extra"), EXTRAS, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_what_is_not_there_is_refused_by_name(kind: str, method: str, extra: dict[str, Any]) -> None:
    case = Case([1], [5])
    wrapper = getattr(case, kind)()
    name = next(iter(extra))
    call = functools.partial(plan, kind, case, wrapper, **extra)
    if method != "plan":
        plan(kind, case, wrapper)
        call = functools.partial(getattr(wrapper, method), *inputs(kind, case), **extra)
    with pytest.raises(flashinfer.InvalidArgumentError, match=rf"Wrapper.*: .*{name}.* must be "):
        call()


def test_positional_extras_and_variants_are_refused() -> None:
    case = Case([1], [5])
    for kind in KINDS:
        wrapper = getattr(case, kind)()
        plan(kind, case, wrapper)
        with pytest.raises(flashinfer.InvalidArgumentError, match="args must be False"):
            wrapper.run(*inputs(kind, case), torch.zeros(4))
        with pytest.raises(flashinfer.InvalidArgumentError, match="jit_args must be None"):
            getattr(case, kind)(jit_args=[1])
    sink = flashinfer.BatchAttentionWithAttentionSinkWrapper(case.workspace())
    case.plan_paged(sink)
    with pytest.raises(flashinfer.InvalidArgumentError, match="q, paged_kv_cache, sinks, sm_scale, got 5"):
        sink.run(case.q, case.cache, None, 1.0, 2.0)


def test_backends_by_name() -> None:
    case = Case([1], [5])
    for kind in KINDS:
        for name in ("auto", "fa2", "fa3", "cutlass", "cudnn", "trtllm-gen", "reference"):
            wrapper = getattr(case, kind)(backend=name)
            assert wrapper._backend == name
            plan(kind, case, wrapper)
            case.compare(wrapper.run(*inputs(kind, case), return_lse=True))
        with pytest.raises(flashinfer.InvalidArgumentError, match=r"backend must be one of .*, got 'fa4'"):
            getattr(case, kind)(backend="fa4")


def test_graph_buffers_are_checked() -> None:
    case = Case([1, 1], [5, 6])
    good = {n: case.buffer(3) for n in ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf")}
    masks = torch.zeros(9, dtype=torch.uint8)
    last = {"paged_kv_last_page_len_buf": case.buffer(2)}
    for change, sentence in (
        ({}, "paged_kv_last_page_len_buf must be a 1-D int32 buffer with use_cuda_graph, got NoneType"),
        ({"paged_kv_last_page_len_buf": torch.zeros(2)}, "paged_kv_last_page_len_buf must be a 1-D int32 buffer"),
        ({"paged_kv_last_page_len_buf": case.buffer(5)}, "paged_kv_indptr_buf must be of length 6, for a batch of 5"),
        ({**last, "custom_mask_buf": masks}, "mask_indptr_buf must be a 1-D int32 buffer"),
        ({**last, "mask_indptr_buf": case.buffer(3)}, "custom_mask_buf must be a 1-D uint8 buffer"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            case.paged(use_cuda_graph=True, **{**good, **change})
