# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention through AITER, against a stand-in with AITER's signatures, units and layouts: natural log-sum-exp,
`[heads, tokens]`, and garbage in rows that see no key."""

from __future__ import annotations

import itertools
import math
import sys
import types
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.aiter import entry
from flashinfer.core import aiter_install
from flashinfer.core.errors import BackendUnavailableError
from flashinfer.testing.compare import assert_close
from flashinfer.testing.tolerances import Tolerance
from rocm_tests.attention.wrapper_case import Case, dense, visible

GARBAGE = 7.0
TWICE = Tolerance(2e-2, 2e-2, "rounded to 16 bits by the stand-in and once more by the scale of values")


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    bias: None = None,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    assert softmax_scale is not None
    assert window_size[0] != 0
    assert window_size[1] == (0 if causal else -1)
    out = torch.full((*q.shape[:2], v.size(2)), GARBAGE, dtype=q.dtype)
    lse = torch.full((q.size(1), q.size(0)), GARBAGE)
    qo, kv = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max(b - a for a, b in itertools.pairwise(qo)) <= max_seqlen_q
    assert max(b - a for a, b in itertools.pairwise(kv)) <= max_seqlen_k
    for b in range(len(qo) - 1):
        rows, keys = slice(qo[b], qo[b + 1]), slice(kv[b], kv[b + 1])
        sees = visible(qo[b + 1] - qo[b], kv[b + 1] - kv[b], causal, window_size[0], None)
        result, total = dense(q[rows], k[keys], v[keys], sees, softmax_scale, logits_soft_cap)
        some = sees.any(1)
        out[rows][some] = result[some].to(q.dtype)
        lse[:, rows] = torch.where(some, (total * math.log(2)).t().float(), lse[:, rows])
    return (out, lse) if return_lse else out


def paged_attention_ragged(
    out: torch.Tensor,
    workspace_buffer: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    block_size: int,
    max_num_partitions: int,
    alibi_slopes: None,
    kv_cache_dtype: str,
    kv_cache_layout: str,
    logits_soft_cap: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    fp8_out_scale: None = None,
    partition_size: int = 256,
    mtp: int = 1,
) -> torch.Tensor:
    batch, heads, dim = query.shape
    assert kv_cache_dtype == "auto"
    assert k_scale.item() == v_scale.item() == 1.0
    assert workspace_buffer.numel() == batch * heads * max_num_partitions * (dim * query.element_size() + 8)
    out.fill_(GARBAGE)
    starts = kv_indptr.tolist()
    for b in range(batch):
        pages = kv_page_indices[starts[b] : starts[b + 1]].long()
        length = (len(pages) - 1) * block_size + int(kv_last_page_lens[b])
        if length <= 0:
            continue
        assert length <= max_num_partitions * partition_size
        keys, values = (
            (c[pages] if kv_cache_layout == "NHD" else c[pages].transpose(1, 2)).flatten(0, 1)[:length]
            for c in (key_cache, value_cache)
        )
        sees = torch.ones(1, length, dtype=torch.bool)
        out[b] = dense(query[b : b + 1], keys, values, sees, scale, logits_soft_cap)[0][0].to(out.dtype)
    return out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER on every device, and what a call of it would find."""
    module = types.ModuleType("aiter")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.paged_attention_ragged = paged_attention_ragged  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter", module)
    monkeypatch.setattr(aiter_install, "why_not_here", lambda device: None)
    monkeypatch.setattr(entry, "_functions", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_left": 2}, {"window_left": 3}], ids=str
)
def test_ragged(options: dict[str, Any], dtype: torch.dtype) -> None:
    """The log-sum-exp comes out in base 2 and `[tokens, heads]`, and rows without keys give 0 and -inf."""
    case = Case([5, 2, 0, 3, 1], [3, 0, 4, 9, 1], D=64, dtype=dtype)
    wrapper = case.ragged(backend="aiter")
    case.plan_ragged(wrapper, sm_scale=0.3, logits_soft_cap=2.0, **options)
    got = wrapper.run(case.q, case.k, case.v, return_lse=True)
    case.compare(got, sm_scale=0.3, logits_soft_cap=2.0, **options)
    scaled, lse = wrapper.run(case.q, case.k, case.v, return_lse=True, k_scale=0.5, v_scale=2.0)
    expected = case.answer(sm_scale=0.3, logits_soft_cap=2.0, k_scale=0.5, v_scale=2.0, **options)
    assert_close(scaled, expected[0], tolerance=TWICE)
    assert_close(lse, expected[1], tolerance=Tolerance(1e-4, 1e-4, "natural to base 2 in float32"))


def test_ragged_with_values_of_another_size_into_strided_results() -> None:
    case = Case([4, 1], [9, 5], D=192, dtype=torch.bfloat16)
    wrapper = case.ragged(backend="aiter")
    wrapper.plan(case.qo_indptr, case.kv_indptr, *case.heads, 192, 128, causal=True, **case.dtypes)
    out = torch.zeros(5, 8, 128, dtype=torch.bfloat16)[:, ::2]
    wrapper.run(case.q, case.k, case.v[..., :128].contiguous(), out=out)
    assert_close(out, case.answer(causal=True)[0][..., :128])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 32])
def test_decode(page_size: int, kv_layout: str) -> None:
    """A request without pages gives 0, whatever AITER left there and whatever its last page length says."""
    case = Case([1] * 4, [300, 0, 17, 1], D=64, page_size=page_size, kv_layout=kv_layout, dtype=torch.bfloat16)
    case.table.last_page_len[1] = 1
    wrapper = case.decode(backend="aiter")
    case.plan_decode(wrapper, logits_soft_cap=2.0)
    assert_close(wrapper.run(case.q, case.cache), case.answer(logits_soft_cap=2.0)[0])
    out = torch.full((4, 8, 64), torch.nan, dtype=torch.bfloat16)[:, ::2]
    wrapper.run(case.q, case.cache, out=out, k_scale=0.5, v_scale=2.0)
    expected = case.answer(logits_soft_cap=2.0, k_scale=0.5, v_scale=2.0)[0]
    assert_close(out, expected, tolerance=TWICE)


def test_what_it_declines() -> None:
    """Each by a sentence; "auto" goes elsewhere."""
    case = Case([1, 1], [9, 20], D=64, page_size=16, dtype=torch.bfloat16)
    sinks = torch.zeros(4)
    decode: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, {"return_lse": True}, "has no window and returns no log-sum-exp"),
        ({}, {"window_left": 3}, {}, "has no window and returns no log-sum-exp"),
        ({}, {}, {"sinks": sinks}, "AITER is given no sinks and no custom mask here"),
        ({"page_size": 8}, {}, {}, "AITER needs pages of 16 or 32 tokens, got 8"),
        ({"D": 80}, {}, {}, "AITER needs a head dimension of 64 or 128, got 80"),
        ({"kv_layout": "SHUFFLED"}, {}, {}, "reads NHD and HND pages, got SHUFFLED"),
        ({"dtype": torch.float32}, {}, {}, r"AITER needs q in float16 or bfloat16, got torch\.float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, {}, {}, r"needs keys of q's dtype torch\.bfloat16"),
        ({"index_dtype": torch.int64}, {}, {}, "AITER needs int32 metadata"),
        ({"q_lens": [2, 2]}, {"q_len_per_req": 2}, {}, "AITER takes one query a request, got max_q_len 2"),
    ]
    for changes, plan, run, sentence in decode:
        shape = {"D": 64, "page_size": 16, "dtype": torch.bfloat16, **changes}
        case = Case(shape.pop("q_lens", [1, 1]), [9, 20], **shape)
        wrapper = case.decode(backend="aiter")
        case.plan_decode(wrapper, **plan)
        with pytest.raises(BackendUnavailableError, match=f"aiter: .*{sentence}"):
            wrapper.run(case.q, case.cache, **run)
    case = Case([2, 1], [9, 20], D=64, dtype=torch.bfloat16)
    mask = torch.ones(38, dtype=torch.bool)
    ragged: list[tuple[Any, dict[str, Any], str]] = [
        (case.k, {"window_left": 0}, "AITER takes a window of the query alone for none"),
        (case.k, {"custom_mask": mask}, "AITER is given no sinks and no custom mask here"),
        (torch.cat([case.k, case.k], 2)[..., :64], {}, "AITER would copy k, which is not contiguous"),
    ]
    for k, plan, sentence in ragged:
        wrapper = case.ragged(backend="aiter")
        case.plan_ragged(wrapper, **plan)
        with pytest.raises(BackendUnavailableError, match=f"aiter: {sentence}"):
            wrapper.run(case.q, k, case.v)
    graph = case.ragged(graph=True, backend="aiter")
    case.plan_ragged(graph)
    with pytest.raises(BackendUnavailableError, match="AITER needs max_q_len and max_kv_len on the host, got 2 and 0"):
        graph.run(case.q, case.k, case.v)


def test_without_amds_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = Case([2], [9], D=64, dtype=torch.bfloat16)
    wrapper = case.ragged(backend="aiter")
    case.plan_ragged(wrapper)
    with pytest.raises(BackendUnavailableError, match="aiter: needs an AMD GPU, got cpu"):
        wrapper.run(case.q, case.k, case.v)
    answers = flashinfer.explain(
        *(flashinfer.ragged_attention, case.q, case.k, case.v, case.qo_indptr, case.kv_indptr),
        max_q_len=2,
        max_kv_len=9,
    )
    assert answers["aiter"] == "needs an AMD GPU, got cpu"
