# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`BatchMLAPagedAttentionWrapper`: plans, buffers, and what engines do with its insides."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch

import flashinfer
from flashinfer.core.errors import NotPlannedError
from flashinfer.testing.compare import assert_close, assert_equal_bits
from rocm_tests.mla.case import NAN, SCALE, Case

Wrapper = flashinfer.BatchMLAPagedAttentionWrapper
PLAN = (
    "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale "
    "q_data_type kv_data_type use_profiler"
)
RUN = (
    "q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table return_lse_base_on_e o_scale"
)


def graph_wrapper(batch: int, pages: int, workspace: int = 64 << 20) -> Wrapper:
    """With graph buffers, which also mean something without a graph: plans copy into them."""
    sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_indices": pages, "kv_len_arr": batch}
    buffers = {name: torch.full((size,), 2**30, dtype=torch.int32) for name, size in sizes.items()}
    return Wrapper(torch.empty(workspace, dtype=torch.uint8), use_cuda_graph=True, **buffers)


def test_signatures_are_those_of_flashinfer() -> None:
    positional = [
        [p.name for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        for f in (Wrapper.plan, Wrapper.run)
    ]
    assert positional == [PLAN.split(), RUN.split()]
    # vLLM looks for this one.
    assert inspect.signature(Wrapper.run).parameters["ckv_scale_arr"].kind is inspect.Parameter.KEYWORD_ONLY
    assert flashinfer.mla.BatchMLAPagedAttentionWrapper is Wrapper


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_a_planned_batch(graph: bool, causal: bool) -> None:
    case = Case([1, 5, 0, 2], [33, 21, 9, 0], causal=causal)
    wrapper = graph_wrapper(4, 99) if graph else case.wrapper()
    case.plan(wrapper)
    case.compare(case.run(wrapper))
    out, lse = torch.full((8, 4, 64), NAN), torch.full((8, 4), NAN)
    assert wrapper.run(*case.queries, *case.caches, out, lse) is out
    case.compare((out, lse))


def test_one_wrapper_many_plans() -> None:
    """flashinfer-ai/flashinfer#1028: nothing of an earlier plan is left."""
    wrapper = Case([], []).wrapper()
    for case in (
        Case([1, 1], [5, 70], heads=8),
        Case([3], [4], heads=24, causal=True),
        Case([1, 2, 3], [9, 9, 9], page_size=16, dims=(32, 8)),
        Case([], []),
        Case([1], [8], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    ):
        case.plan(wrapper)
        case.compare(case.run(wrapper))


def test_the_int_workspace_may_be_replaced() -> None:
    """Engines let wrappers share one; what a plan points to is in the present one."""
    wrapper, case = Case([], []).wrapper(), Case([1, 1], [5, 70])
    for seed in range(2):
        case = Case([1, 1], [5, 70 + seed], seed=seed)
        case.plan(wrapper)
        wrapper._int_workspace_buffer.fill_(0xFF)
        wrapper._int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        case.plan(wrapper)
        case.compare(case.run(wrapper))


def test_natural_logarithm_where_asked_for() -> None:
    case = Case([1], [8])
    case.q.zero_()
    wrapper = case.wrapper()
    case.plan(wrapper)
    assert case.run(wrapper)[1].tolist() == [[3.0] * 4]
    assert_close(case.run(wrapper, return_lse_base_on_e=True)[1], torch.full((1, 4), math.log(8)))


def test_plan_copies_the_metadata_and_aliases_the_indices() -> None:
    """flashinfer-ai/flashinfer#564, and engines that write kv_indices after the plan."""
    case = Case([1, 2], [9, 4])
    wrapper, indices = case.wrapper(), case.table.indices.clone()
    case.plan(wrapper)
    expected = case.run(wrapper)
    for t in (case.qo_indptr, case.table.indptr, case.table.seq_lens):
        t.fill_(2**30)
    assert_equal_bits(case.run(wrapper)[0], expected[0])
    case.table.indices.fill_(int(indices[0]))
    assert not torch.equal(case.run(wrapper)[0], expected[0])


def test_a_graph_wrapper_holds_all_it_needs() -> None:
    """flashinfer-ai/flashinfer#564, alibaba/rtp-llm#1084: neither the caller's tensors nor old contents matter."""
    wrapper = graph_wrapper(2, 30)
    buffers = [getattr(wrapper, f"_{n}_buf") for n in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")]
    addresses = [t.data_ptr() for t in (*buffers, wrapper._int_workspace_buffer)]
    views = None
    for case in (Case([1, 1], [40, 3]), Case([1, 1], [2, 64], seed=1), Case([1, 1], [7, 0], seed=2)):
        case.plan(wrapper)
        for t in case.metadata:
            t.fill_(2**30)
        case.compare(case.run(wrapper))
        now = [t.data_ptr() for t in wrapper._views]
        assert views in (None, now)
        views = now
    assert [t.data_ptr() for t in (*buffers, wrapper._int_workspace_buffer)] == addresses
    assert buffers[3].tolist() == [7, 0]


def test_a_graph_wrapper_keeps_what_was_captured() -> None:
    wrapper = graph_wrapper(2, 10)
    Case([1, 1], [5, 6]).plan(wrapper)
    for case, sentence in (
        (Case([1], [5]), "kv_len_arr must be of length 2, that of the graph's buffer, got 1; pad the batch"),
        (Case([1, 1, 1], [5, 1, 1]), "kv_len_arr must be of length 2, that of the graph's buffer, got 3"),
        (Case([1, 1], [5, 6], heads=8), "plan's arguments must be those of the graph's first plan"),
        (Case([1, 1], [5, 6], page_size=2), "plan's arguments must be those of the graph's first plan"),
        (Case([1, 1], [40, 1]), "kv_indices must be of at most 10 pages, as the graph's buffer, got 11"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            case.plan(wrapper)


def test_a_graph_keeps_its_plan_when_another_is_refused() -> None:
    """A graph that is replayed after the refusal reads the old schedule with the old page ids."""
    case = Case([1, 1], [5, 6])
    wrapper = graph_wrapper(2, 10)
    case.plan(wrapper)
    expected = case.run(wrapper)
    held = [t.clone() for t in (wrapper._int_workspace_buffer, wrapper._kv_indices_buf, wrapper._kv_len_arr_buf)]
    workspaces = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, torch.empty(0)
    for other, heads, sentence in (
        (Case([1, 1], [40, 1]), 4, "kv_indices must be of .*got 1[01]"),
        (Case([1], [5]), 4, "kv_len_arr must be of length 2, that of the graph's buffer, got 1"),
        (case, 8, "num_heads and causal must be those of the graph's first plan, 4 and False, got 8 and False"),
    ):
        qo, kv, _, lens = other.metadata
        calls = [functools.partial(wrapper._cached_module.plan, *workspaces, qo, kv, lens, heads, 64, False)]
        if heads == 4:
            calls.append(functools.partial(other.plan, wrapper))
        for call in calls:
            with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
                call()
        now = (wrapper._int_workspace_buffer, wrapper._kv_indices_buf, wrapper._kv_len_arr_buf)
        for got, want in zip(now, held, strict=True):
            assert_equal_bits(got, want)
        assert_equal_bits(case.run(wrapper)[0], expected[0])


def test_page_ids_of_any_integer_tensor() -> None:
    """Strided ones are copied; of 64 bits 2^32 + 5 is not page 5, and behind the batch anything may be."""
    case = Case([1, 2], [18, 4])
    qo, kv, indices, lens = case.metadata
    shape = 4, 64, 16, 4, False, SCALE, torch.float32, torch.float32
    wrapper, used = case.wrapper(), int(kv[-1])
    beyond = torch.cat((indices[:used].long(), torch.tensor([2**40, -(2**40)])))
    for given in (indices.repeat_interleave(2)[::2], beyond):
        wrapper.plan(qo, kv, given, lens, *shape)
        case.compare(case.run(wrapper))
    wrapper.plan(qo, kv, indices.long() + 2**32, lens, *shape)
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"kv_indices must be page ids in \[0, 9\), got"):
        case.run(wrapper)


def test_an_engine_may_replace_plan_by_the_modules_planner() -> None:
    """SGLang calls `_cached_module.plan` with 9 positional arguments, drops what it returns, and runs on."""

    def fast_plan(self: Wrapper, qo: torch.Tensor, kv: torch.Tensor, lens: torch.Tensor) -> None:
        workspaces = self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer
        self._cached_module.plan(*workspaces, qo, kv, lens, 4, 64, False)

    wrapper = graph_wrapper(2, 30)
    Case([1, 1], [5, 6]).plan(wrapper)
    wrapper.plan = functools.partial(fast_plan, wrapper)  # type: ignore[method-assign]
    assert isinstance(wrapper.plan, functools.partial)
    for case in (Case([1, 1], [33, 1], seed=3), Case([1, 1], [2, 50], seed=4)):
        used = int(case.table.indptr[-1])
        wrapper._kv_indices_buf[:used] = case.table.indices[:used]
        wrapper.plan(case.qo_indptr, case.table.indptr, case.table.seq_lens)
        case.compare(case.run(wrapper))
    wrapper.vllm_first_call = True  # engines add attributes of their own


def test_before_the_first_plan() -> None:
    case = Case([1], [5])
    wrapper = case.wrapper()
    for call in (functools.partial(case.run, wrapper), wrapper.workspace_size):
        with pytest.raises(NotPlannedError, match=r"plan\(\) must be called before"):
            call()


def test_the_workspace_is_as_large_as_it_says() -> None:
    case = Case([1, 2], [9, 200])
    wrapper = case.wrapper()
    case.plan(wrapper)
    need = wrapper.workspace_size()
    exact = case.wrapper(workspace=need)
    case.plan(exact)
    case.compare(case.run(exact))
    exact.reset_workspace_buffer(torch.empty(need, dtype=torch.int8))
    case.compare(case.run(exact))
    with pytest.raises(flashinfer.InvalidArgumentError, match=f"must be of at least {need} bytes for this plan, got"):
        case.plan(case.wrapper(workspace=need - 1))


def test_what_was_not_planned_is_refused() -> None:
    """flashinfer-ai/flashinfer#3778: both shapes are in the sentence."""
    case = Case([1, 2], [18, 4], page_size=16)
    wrapper = case.wrapper()
    case.plan(wrapper)
    (q, qr), (ckv, kpe) = case.queries, case.caches
    P = ckv.size(0)
    for arguments, sentence in (
        (
            (q, qr, ckv.reshape(P * 16, 1, 64), kpe),
            rf"ckv_cache must be of shape \[\*, 16, 64\] .*got \[{P * 16}, 1, 64\]",
        ),
        ((q, None, ckv, kpe), "q_pe must be a tensor, got NoneType"),
        ((q, qr, ckv, [kpe]), "kpe_cache must be a tensor, got list"),
        ((q, qr, ckv[:, :8], kpe), rf"ckv_cache must be of shape \[\*, 16, 64\] as planned, got \[{P}, 8, 64\]"),
        ((q, qr, ckv, kpe[..., :8]), rf"kpe_cache must be of shape \[\*, 16, 16\] as planned, got \[{P}, 16, 8\]"),
        ((q, qr, ckv, kpe[1:]), rf"kpe_cache must be of ckv_cache's pages \[{P}, 16\], got \[{P - 1}, 16\]"),
        ((q, qr, ckv.unsqueeze(2), kpe), r"ckv_cache must be 3-D, got float32.*; pass ckv_cache.squeeze\(\)"),
        ((q[:2], qr[:2], ckv, kpe), "q_nope must be of 3 rows as planned, got 2"),
        ((q[:, :2], qr[:, :2], ckv, kpe), r"q_nope must be of shape \[\*, 4, 64\] as planned, got \[3, 2, 64\]"),
        ((q.half(), qr, ckv, kpe), "q_nope must be of the planned dtype torch.float32, got torch.float16"),
        ((q, qr, ckv.half(), kpe), "ckv_cache must be of the planned dtype torch.float32, got torch.float16"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            wrapper.run(*arguments)
    for scale, sentence in (
        ({"ckv_scale": 0.0}, "ckv_scale must be positive, got 0.0"),
        ({"kpe_scale": "1"}, "kpe_scale must be a number, got '1'"),
        ({"kpe_scale": torch.ones(2)}, r"kpe_scale must be a number, got float32\[2\] on cpu"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"Wrapper: {sentence}"):
            wrapper.run(*case.queries, *case.caches, **scale)


def test_bad_plans_are_named() -> None:
    case = Case([1, 2], [18, 4])
    shape = 4, 64, 16, 4, False, SCALE, torch.float32, torch.float32
    qo, kv, indices, lens = case.metadata
    for metadata, sentence in (
        ((qo, kv, indices, lens + 3), "kv_indptr must give each request .* got 5 pages for the 21 tokens of request 0"),
        ((qo, kv, indices[:3], lens), "kv_indices must be of the 6 entries that kv_indptr names, got 3"),
        ((qo[:2], kv, indices, lens), "qo_indptr must be of length 3, one more than kv_len_arr, got 2"),
        ((qo.float(), kv, indices, lens), "qo_indptr must be a 1-D int32 or int64 tensor, got float32"),
        ((qo, kv, indices.view(-1, 1), lens), "kv_indices must be a 1-D int32 or int64 tensor"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"BatchMLAPagedAttentionWrapper: {sentence}"):
            case.wrapper().plan(*metadata, *shape)
    for at, value, sentence in (
        (0, 0, "num_heads must be an integer from 1 to 2147483647, got 0"),
        (0, 4.0, "num_heads must be an integer, got 4.0"),
        (1, "64", "head_dim_ckv must be an integer, got '64'"),
        (2, -1, "head_dim_kpe must be an integer from 0 to 2147483647, got -1"),
        (3, None, "page_size must be an integer, got None"),
        (4, "causal", "causal must be True or False, got 'causal'"),
        (5, None, "sm_scale must be a number, got None"),
        (5, NAN, "sm_scale must be finite, got nan"),
        (6, "float32", "q_data_type must be a torch.dtype, got 'float32'"),
        (7, None, "kv_data_type must be a torch.dtype, got None"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"BatchMLAPagedAttentionWrapper: {sentence}"):
            case.wrapper().plan(*case.metadata, *shape[:at], value, *shape[at + 1 :])


@pytest.mark.parametrize(
    ("method", "extra"),
    [
        ("plan", {"use_profiler": True}),
        ("plan", {"block_tables": torch.zeros(1)}),
        ("plan", {"lse_mode": "basee"}),
        ("plan", {"output_dtype": torch.float64}),
        ("plan", {"use_sinks": True}),
        ("run", {"profiler_buffer": torch.zeros(1)}),
        ("run", {"ckv_scale_arr": torch.zeros(1)}),
        ("run", {"sinks": torch.zeros(1)}),
        ("run", {"bmm1_scale": 1.0}),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_what_other_backends_of_flashinfer_take_is_refused_by_name(method: str, extra: dict[str, object]) -> None:
    case = Case([1], [5])
    wrapper = case.wrapper()
    case.plan(wrapper)
    arguments = {
        "plan": (*case.metadata, 4, 64, 16, 4, False, SCALE, torch.float32, torch.float32),
        "run": (*case.queries, *case.caches),
    }
    name = next(iter(extra))
    with pytest.raises(flashinfer.InvalidArgumentError, match=rf"Wrapper\.{method}: {name} must be .*supported"):
        getattr(wrapper, method)(*arguments[method], **extra)


def test_backends_by_name() -> None:
    case = Case([1], [5])
    for name in ("auto", "fa2", "reference"):
        wrapper = case.wrapper(name)
        # Engines compare it with what they passed.
        assert wrapper._backend == name
        case.plan(wrapper)
        case.compare(case.run(wrapper))
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"backend must be one of .*, got 'cutlass'"):
        case.wrapper("cutlass")


def test_graph_buffers_are_checked() -> None:
    good = {n: torch.zeros(3, dtype=torch.int32) for n in ("qo_indptr", "kv_indptr", "kv_indices")}
    workspace = torch.empty(64, dtype=torch.uint8)
    for change, sentence in (
        ({"kv_len_arr": None}, "kv_len_arr must be a contiguous 1-D int32 buffer with use_cuda_graph, got NoneType"),
        ({"kv_len_arr": torch.zeros(2)}, "kv_len_arr must be a contiguous 1-D int32 buffer"),
        ({"kv_len_arr": [0, 0]}, "kv_len_arr must be a contiguous 1-D int32 buffer with use_cuda_graph, got list"),
        ({"kv_len_arr": good["kv_indptr"][1:]}, "kv_len_arr must be of memory of its own, apart from kv_indptr"),
        ({"kv_len_arr": torch.zeros(5, dtype=torch.int32)}, "qo_indptr must be of length 6, one more than kv_len_arr"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=sentence):
            Wrapper(workspace, use_cuda_graph=True, **good, **change)


@pytest.mark.parametrize(
    ("buffer", "sentence"),
    [
        (None, "a contiguous tensor, got NoneType"),
        (torch.empty(4096, 64).t(), r"a contiguous tensor, got float32\[64, 4096\]"),
        (torch.empty(1 << 20, dtype=torch.uint8)[1:], "aligned to 4 bytes, got address 0x"),
    ],
    ids=["none", "transposed", "odd"],
)
def test_workspaces_that_cannot_be_used_are_refused_at_once(buffer: torch.Tensor, sentence: str) -> None:
    for take in (Wrapper, Case([], []).wrapper().reset_workspace_buffer):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"float_workspace_buffer must be {sentence}"):
            take(buffer)
