# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the Triton attention kernels must get right, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core.attention_work import FixedPieces, scratch_elements
from flashinfer.testing.compare import assert_close, assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID
from rocm_tests.attention.case import NAN, Case
from rocm_tests.attention.wrapper_case import Case as WrapperCase

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
DECODE: dict[str, Any] = {"q_lens": [1, 1, 1], "kv_lens": [150, 0, 17], "D": 64}
# Long enough to be cut several times by the six workers of the interpreter.
MIXED: dict[str, Any] = {"q_lens": [1, 5, 17, 0, 1], "kv_lens": [300, 21, 17, 9, 1], "heads": (6, 3), "D": 64}
PREFILL: dict[str, Any] = {"q_lens": [70, 9], "kv_lens": [70, 30], "heads": (4, 1), "D": 64}
# Enough blocks for a program each.
WHOLE: dict[str, Any] = {"q_lens": [70, 33], "kv_lens": [80, 70], "heads": (16, 4), "D": 32}
FEW: dict[str, Any] = {"q_lens": [1, 3, 8, 1], "kv_lens": [300, 21, 140, 0]}
BATCHES: dict[str, dict[str, Any]] = {
    **{
        f"decode, {kv_layout}": {**DECODE, "kv_layout": kv_layout} for kv_layout in ("NHD", "HND", "SHUFFLED", "RAGGED")
    },
    **{f"mixed, {kv_layout}": {**MIXED, "kv_layout": kv_layout} for kv_layout in ("STANDARD", "SHUFFLED", "RAGGED")},
    **{f"whole blocks, {kv_layout}": {**WHOLE, "kv_layout": kv_layout} for kv_layout in ("NHD", "SHUFFLED", "RAGGED")},
    "prefill": PREFILL,
    "prefill, all keys": {**PREFILL, "causal": False},
    "more queries than keys": {**PREFILL, "kv_lens": [40, 0]},
    "group 8": {**DECODE, "heads": (8, 1)},
    "group 16": {**DECODE, "heads": (16, 1)},
    "group 32": {**DECODE, "heads": (32, 1)},
    "group 5": {**DECODE, "heads": (5, 1)},
    "heads of their own": {**DECODE, "heads": (3, 3)},
    "speculation": {"q_lens": [8, 3, 5], "kv_lens": [200, 3, 66], "heads": (8, 2), "D": 64},
    "page 1": {**MIXED, "page_size": 1},
    "page 3": {**MIXED, "page_size": 3},
    "page 64": {**MIXED, "page_size": 64, "kv_layout": "SHUFFLED"},
    "page 24, shuffled": {**MIXED, "page_size": 24, "kv_layout": "SHUFFLED"},
    "page 8, shuffled": {**DECODE, "page_size": 8, "kv_layout": "SHUFFLED"},
    "page 256, shuffled": {**MIXED, "page_size": 256, "kv_layout": "SHUFFLED"},
    "page 1024": {**MIXED, "page_size": 1024},
    "page edges": {"q_lens": [1] * 4, "kv_lens": [15, 16, 17, 128], "D": 32, "kv_layout": "SHUFFLED"},
    "head dim 72": {**DECODE, "D": 72},
    "head dim 80, shuffled": {**DECODE, "D": 80, "kv_layout": "SHUFFLED"},
    "head dim 96": {**DECODE, "D": 96, "kv_layout": "SHUFFLED"},
    "head dim 256": {**DECODE, "D": 256},
    "head dim 8": {**DECODE, "D": 8},
    "head dims 192 and 128": {**MIXED, "D": 192, "E": 128, "kv_layout": "RAGGED"},
    "head dims 64 and 96, pages": {**MIXED, "D": 64, "E": 96, "kv_layout": "SHUFFLED"},
    "window 0": {**MIXED, "window_left": 0},
    "window 30": {**MIXED, "window_left": 30, "kv_layout": "SHUFFLED"},
    "window 100": {**MIXED, "window_left": 100},
    "window, all keys to the right": {**PREFILL, "window_left": 7, "causal": False},
    "window, whole blocks": {**WHOLE, "window_left": 20},
    "window beyond": {**PREFILL, "kv_lens": [300, 5], "window_left": 2**31 - 1},
    "soft cap": {**MIXED, "logits_soft_cap": 0.7},
    "soft cap, negative scale": {**MIXED, "logits_soft_cap": 5.0, "sm_scale": -0.5},
    "scale 0": {**MIXED, "sm_scale": 0.0},
    "negative scale": {**MIXED, "sm_scale": -0.3, "D": 96},
    "sinks": {**MIXED, "sinks": True},
    "sinks without keys": {**DECODE, "sinks": True},
    "sinks, window and cap": {**MIXED, "sinks": True, "window_left": 20, "logits_soft_cap": 2.0},
    "sinks, whole blocks": {**WHOLE, "sinks": True},
    "mask": {**MIXED, "mask": True},
    "mask, whole blocks": {**WHOLE, "mask": True},
    "mask and window": {**MIXED, "mask": True, "window_left": 11, "kv_layout": "SHUFFLED"},
    "mask, ragged": {**PREFILL, "mask": True, "kv_layout": "RAGGED"},
    "fp8": {**MIXED, "kv_dtype": OCP, "k_scale": 0.5, "v_scale": 3.0},
    "fp8, shuffled": {**MIXED, "kv_dtype": OCP, "k_scale": 2.0, "v_scale": 0.25, "kv_layout": "SHUFFLED"},
    "fp8, ragged": {**PREFILL, "kv_dtype": OCP, "k_scale": 2.0, "v_scale": 0.25, "kv_layout": "RAGGED"},
    "int64 metadata": {**MIXED, "index_dtype": torch.int64},
    "no requests": {"q_lens": [], "kv_lens": []},
    "no queries": {"q_lens": [0, 0], "kv_lens": [9, 3]},
    "no keys": {"q_lens": [2, 1], "kv_lens": [0, 0]},
    "many requests": {"q_lens": [1] * 40, "kv_lens": [i % 23 for i in range(40)], "D": 16, "heads": (2, 1)},
}


def right(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    case = Case(**arguments, dtype=dtype, device=device)
    case.compare(case.run(backend="triton"))


def in_place(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """With scratch full of NaN, strided queries, and results that are slices of poisoned buffers; twice the same."""
    case = Case(**arguments, dtype=dtype, device=device)
    tokens, heads, D = case.q.shape
    wide = torch.full((tokens, heads + 1, D + 16), NAN, dtype=dtype, device=device)
    wide[:, 1:, 8:-8] = case.q
    case.q = wide[:, 1:, 8:-8]
    scratch = torch.full((scratch_elements(D, case.q.device),), NAN, device=device)
    out = torch.full((tokens, heads + 2, D + 16), NAN, dtype=dtype, device=device)
    lse = torch.full((tokens, heads + 2), NAN, device=device)
    first = out[:, 1:-1, 8:-8], lse[:, 1:-1]
    case.compare(case.run(backend="triton", out=first[0], lse=first[1], scratch=scratch))
    for got, want in zip(case.run(backend="triton"), first, strict=True):
        assert_equal_bits(got, want.contiguous())
    for t in first:
        t.fill_(NAN)
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


def equal_keys(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Base 2, through merged pieces as well: 2 to the power of 10 equal keys."""
    case = Case([1, 1], [8, 1024], dtype=dtype, device=device)
    case.q.zero_()
    assert case.run(backend="triton")[1].tolist() == [[3.0] * 4, [10.0] * 4]


def hints_change_nothing(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """A longest query that is too short or too long is slower, not wrong."""
    case = Case(**arguments, dtype=dtype, device=device)
    for longest in (1, 5, 4096):
        case.compare(case.run(backend="triton", max_q_len=longest, max_kv_len=longest))


def alone(case: Case, b: int) -> Case:
    """One request of a batch by itself, in the same memory."""
    one = copy.copy(case)
    rows, keys = (slice(*t[b : b + 2].tolist()) for t in (case.qo_indptr, case.kv_indptr))
    first, last = case.table.indptr[b : b + 2].tolist()
    one.q = case.q[rows]
    one.qo_indptr, one.kv_indptr = (t[b : b + 2] - t[b] for t in (case.qo_indptr, case.kv_indptr))
    indptr, tail = case.table.indptr[b : b + 2] - first, case.table.last_page_len[b : b + 1]
    one.table = dataclasses.replace(
        case.table, indptr=indptr, indices=case.table.indices[first:last], last_page_len=tail
    )
    if case.kv_layout == "RAGGED":
        one.cache = case.cache[0][keys], case.cache[1][keys]
    if case.mask_indptr is not None and case.custom_mask is not None:
        begin, end = case.mask_indptr[b : b + 2].tolist()
        one.custom_mask, one.mask_indptr = case.custom_mask[begin:end], case.mask_indptr[b : b + 2] - begin
    return one


def fixed_pieces(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """Whatever else is in the batch, a request has the same result bit by bit."""
    case = Case(**arguments, dtype=dtype, device=device)
    starts = case.qo_indptr.tolist()
    for split in (1, 2**31 - 1):
        options = {"backend": "triton", "split_size": split, "max_q_len": max(case.qo_indptr.diff().tolist())}
        out, lse = case.run(**options)
        case.compare((out, lse))
        for b, (first, last) in enumerate(itertools.pairwise(starts)):
            got = alone(case, b).run(**options)
            assert_equal_bits(got[0], out[first:last].contiguous())
            assert_equal_bits(got[1], lse[first:last].contiguous())


def pieces_without_room(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """More pieces than memory holds are told, and write nowhere else."""
    case = Case([1, 1], [300, 500], dtype=dtype, device=device)
    pieces = FixedPieces.of(2, 1, 128)
    need = pieces.scratch_elements(32, 14)
    assert pieces.count(2, 2, [1, 1], [300, 500]) == 14
    for size, enough in ((need, True), (need - 1, False)):
        memory = torch.full((need + 64,), NAN, device=device)
        options = {"backend": "triton", "split_size": 128, "max_q_len": 1, "scratch": memory[:size]}
        sentence = "scratch must hold the 14 pieces that split_size makes of the batch, got room for 13"
        if enough:
            case.compare(case.run(**options))
        elif device == "cpu":
            told(lambda options=options: case.run(**options), sentence)
        else:
            case.run(**options)
            told(flashinfer.check_device_errors, sentence)
        assert bool(memory[size:].isnan().all())


def bad_metadata(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """What contradicts itself is told and gives 0 and -inf; other requests are served."""

    def spoil(name: str, at: int, value: int) -> Case:
        case = Case([1, 2, 1], [70, 40, 33], dtype=dtype, device=device, D=64)
        target = {"qo_indptr": case.qo_indptr, "kv_indices": case.table.indices, "kv_indptr": case.table.indptr}
        target["kv_last_page_len"] = case.table.last_page_len
        target[name][at] = value
        return case

    for name, at, value, rows, sentence in (
        (
            "kv_indices",
            6,
            UNUSED_PAGE_ID,
            slice(1, 3),
            r"kv_indices\[6\] must be a page id in \[0, 14\), got 1073741824",
        ),
        ("kv_indices", 0, -1, slice(0, 1), r"kv_indices\[0\] must be a page id in \[0, 14\), got -1"),
        ("kv_indptr", 3, 99, slice(3, 4), r"kv_indptr\[3\] must be at most 16, the length of kv_indices, got 99"),
        ("kv_indptr", 0, -1, slice(0, 1), r"kv_indptr must start at 0 or above and not decrease, got -1 at \[0\]"),
        ("kv_last_page_len", 1, 17, slice(1, 3), r"kv_last_page_len\[1\] must be in \[0, 16\], got 17"),
        ("qo_indptr", 3, 9, slice(3, 3), r"qo_indptr must not decrease and stay within q's 4 rows, got 9 behind"),
    ):
        whole = Case([1, 2, 1], [70, 40, 33], dtype=dtype, device=device, D=64)
        case = spoil(name, at, value)
        out, lse = torch.zeros_like(case.q), torch.full(case.q.shape[:2], -math.inf, device=device)
        if device == "cpu":
            told(lambda case=case, out=out, lse=lse: case.run(backend="triton", out=out, lse=lse), sentence)
        else:
            case.run(backend="triton", out=out, lse=lse)
            told(flashinfer.check_device_errors, sentence)
        expected = whole.answer()
        lost = slice(3, 4) if name == "qo_indptr" else rows
        expected[0][lost], expected[1][lost] = 0, -math.inf
        whole.answer = lambda expected=expected: expected  # type: ignore[method-assign]
        whole.compare((out, lse))


def told(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError, match=f"paged_attention: {sentence}"):
        call()


def no_pages(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """An empty pool, and entries that name its pages."""
    case = Case([1], [5], dtype=dtype, device=device)
    case.cache = case.cache[0][:0], case.cache[1][:0]
    if device == "cpu":
        told(lambda: case.run(backend="triton"), r"kv_indices\[0\] must be a page id in \[0, 0\)")
        return
    out, lse = case.run(backend="triton")
    told(flashinfer.check_device_errors, r"kv_indices\[0\] must be a page id in \[0, 0\)")
    assert not out.count_nonzero()
    assert bool((lse == -math.inf).all())


def merging(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """All forms against the reference: strides, states without keys that hold NaN, a mask."""
    tokens, heads, dim, states = (arguments[n] for n in ("tokens", "heads", "dim", "states"))
    rng = torch.Generator().manual_seed(0)
    wide = torch.randn(tokens, states, heads + 1, dim + 8, generator=rng).to(device, dtype)
    v, s = wide[:, :, 1:, :dim], (torch.randn(tokens, states, heads + 1, generator=rng) * 4).to(device)[..., 1:]
    for state, value in ((0, -math.inf), (states - 1, math.inf)):
        s[state::3, state] = value
        v[state::3, state] = NAN
    s[1::4], v[1::4] = -math.inf, NAN
    results = [flashinfer.merge_states(v, s, backend=backend) for backend in ("triton", "reference")]
    if states == 2:
        (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
        results += [flashinfer.merge_state(v_a, s_a, v_b, s_b, backend=b) for b in ("triton", "reference")]
    for merged, lse in results:
        assert_close(merged, results[1][0], name="v")
        assert_close(lse, results[1][1], name="s")
    assert bool((results[0][1][1::4] == -math.inf).all())
    if states == 2:
        for mask in (None, torch.arange(tokens, device=device) % 3 == 0):
            mine, sums = v_a.clone(), s_a.clone()
            flashinfer.merge_state_in_place(mine, sums, v_b, s_b, mask, backend="triton")
            keep = torch.zeros(tokens, dtype=torch.bool) if mask is None else ~mask.cpu()
            assert_close(mine[~keep], results[1][0][~keep], name="v")
            assert_close(sums[~keep], results[1][1][~keep], name="s")
            assert_equal_bits(mine[keep], v_a[keep].contiguous())
            assert_equal_bits(sums[keep], s_a[keep].contiguous())


def forced(device: str, dtype: torch.dtype, _: dict[str, Any]) -> None:
    """Wrappers fetch keys in steps of other backends than attention's; whoever names attention's need not know."""
    place: dict[str, Any] = {"kv_layout": "SHUFFLED", "page_size": 8, "dtype": dtype, "device": device}
    case = WrapperCase([70, 64], [40, 21], heads=(8, 1), **place)
    paged = case.paged()
    case.plan_paged(paged)
    assert paged.gathers_pages
    mixed = WrapperCase([3, 5], [27, 5], **place)
    phases = flashinfer.BatchPhaseAttentionWrapper(mixed.workspace(), "SHUFFLED")
    phases.plan(mixed.qo_indptr, *mixed.pages, *mixed.shape, **mixed.dtypes)
    new = mixed.k[24:], mixed.v[24:]
    for name in ("triton", "reference"):
        with flashinfer.use_backend(name):
            case.compare(paged.run(case.q, case.cache, return_lse=True))
            mixed.compare(phases.run(mixed.q, *new, mixed.cache, return_lse=True), causal=True)


Check = Callable[[str, torch.dtype, dict[str, Any]], None]
CASES: dict[str, tuple[Check, dict[str, Any]]] = {
    **{name: (right, arguments) for name, arguments in BATCHES.items()},
    **{f"{name}, in place": (in_place, BATCHES[name]) for name in ("mixed, SHUFFLED", "whole blocks, NHD", "group 5")},
    **{
        f"{name}, fixed pieces": (fixed_pieces, {**BATCHES[name], **lens})
        for name, lens in (
            ("decode, NHD", {"kv_lens": [260, 0, 129]}),
            ("decode, SHUFFLED", {"kv_lens": [128, 300, 17]}),
            ("mixed, RAGGED", FEW),
            ("window 30", FEW),
            ("sinks, window and cap", FEW),
            ("mask", FEW),
        )
    },
    "pieces without room": (pieces_without_room, {}),
    "hints": (hints_change_nothing, DECODE),
    "equal keys": (equal_keys, {}),
    "bad metadata": (bad_metadata, {}),
    "a backend that steps do not have": (forced, {}),
    "no pages": (no_pages, {}),
    **{
        f"merge {states} states of {dim}": (merging, {"tokens": 9, "heads": heads, "dim": dim, "states": states})
        for states, heads, dim in ((2, 3, 128), (2, 1, 72), (5, 2, 64))
    },
}
