# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention and merging as Triton compiles them for gfx942, executed on the CPU, against float64 arithmetic.

Everything but the launch is what runs on a GPU: the public function, the choice of tiles and kernels, and the machine
code. Needs a checkout of tinygrad, named by TINYGRAD_SRC.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.triton import attention, device, merge
from flashinfer.core.attention_work import scratch_elements
from flashinfer.testing.compare import assert_close
from flashinfer.testing.emulator import Emulator
from flashinfer.testing.generators import UNUSED_PAGE_ID
from rocm_tests.attention.case import NAN, Case
from rocm_tests.gfx.emulated_triton import EmulatedLaunch

pytestmark = pytest.mark.triton
SPLIT, WHOLE = ["attention_split", "attention_merge"], ["attention_whole"]
# Of three compute units; the first request is cut.
DECODE: dict[str, Any] = {"q_lens": [1, 1, 1], "kv_lens": [150, 0, 17], "D": 64}
MIXED: dict[str, Any] = {"q_lens": [1, 5, 17, 0, 1], "kv_lens": [200, 21, 17, 9, 1], "heads": (6, 3), "D": 64}
# Two blocks of rows, the first of which sees a whole tile of keys; and a request that sees none.
PREFILL: dict[str, Any] = {"q_lens": [33, 7], "kv_lens": [100, 7], "heads": (16, 4), "D": 32}
SHUFFLED = {"kv_layout": "SHUFFLED"}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "decode, shuffled, page 64": (SPLIT, {**DECODE, **SHUFFLED, "page_size": 64}),
    "decode, shuffled, head dim 80": (SPLIT, {**DECODE, **SHUFFLED, "D": 80}),
    "decode, page 3, int64": (SPLIT, {**DECODE, "page_size": 3, "index_dtype": torch.int64}),
    "mixed": (SPLIT, MIXED),
    "mixed, shuffled, window, sinks and cap": (
        SPLIT,
        {**MIXED, **SHUFFLED, "window_left": 20, "sinks": True, "logits_soft_cap": 2.0},
    ),
    "mixed, mask": (SPLIT, {**MIXED, "mask": True}),
    "mixed, ragged": (SPLIT, {**MIXED, "kv_layout": "RAGGED", "D": 96, "E": 64}),
    "prefill, shuffled, window": (
        WHOLE,
        {**PREFILL, **SHUFFLED, "q_lens": [70, 33], "kv_lens": [80, 70], "window_left": 20},
    ),
}


@pytest.fixture(scope="module")
def launch(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> EmulatedLaunch:
    return EmulatedLaunch(emulator, tmp_path_factory.mktemp("code"))


@pytest.fixture(autouse=True)
def on_the_emulator(launch: EmulatedLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.launched.clear()
    monkeypatch.setattr(device, "why_not", lambda _: None)
    for backend in (attention, merge):
        monkeypatch.setattr(backend, "launch", launch)


def check(launch: EmulatedLaunch, case: Case, kernels: list[str], **options: Any) -> None:
    """Results go into slices of poisoned buffers, partial results through poisoned memory."""
    tokens, heads, _ = case.q.shape
    dim = case.values[0].size(2)
    scratch = torch.full((scratch_elements(dim, case.q.device),), NAN)
    out = torch.full((tokens + 2, heads, dim), NAN, dtype=case.q.dtype)
    lse = torch.full((tokens + 2, heads), NAN)
    into = out[1:-1], lse[1:-1]
    case.compare(case.run(backend="triton", scratch=scratch, out=into[0], lse=into[1], **options))
    assert launch.launched == kernels
    assert bool(out[[0, -1]].isnan().all())
    assert bool(lse[[0, -1]].isnan().all())


@pytest.mark.parametrize("name", CASES)
def test_attention(launch: EmulatedLaunch, name: str) -> None:
    kernels, arguments = CASES[name]
    check(launch, Case(**arguments, dtype=torch.bfloat16), kernels)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "SHUFFLED", "RAGGED"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_head_dims(launch: EmulatedLaunch, head_dim: int, kv_layout: str, kind: str) -> None:
    """Each layout with each head dimension; float16 and bfloat16 in turns, so that each layout has both."""
    kernels, arguments = (SPLIT, DECODE) if kind == "decode" else (WHOLE, PREFILL)
    is_half = (head_dim % 64 == 0) == (kv_layout in ("NHD", "SHUFFLED"))
    dtype = torch.float16 if is_half else torch.bfloat16
    case = Case(**{**arguments, "D": head_dim, "kv_layout": kv_layout}, dtype=dtype)
    check(launch, case, kernels, max_q_len=max(arguments["q_lens"]))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED", "RAGGED"])
def test_fp8(launch: EmulatedLaunch, kv_layout: str, kind: str) -> None:
    """Caches of gfx942's own flavour, with scales."""
    kernels, arguments = (SPLIT, DECODE) if kind == "decode" else (WHOLE, PREFILL)
    changes = {"D": 64, "kv_layout": kv_layout, "kv_dtype": torch.float8_e4m3fnuz, "k_scale": 0.5, "v_scale": 1.5}
    case = Case(**{**arguments, **changes}, dtype=torch.bfloat16)
    check(launch, case, kernels, max_q_len=max(arguments["q_lens"]))


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED"])
def test_fixed_pieces(launch: EmulatedLaunch, kv_layout: str) -> None:
    """Three pieces and one; then everything in one."""
    case = Case(**{**DECODE, "kv_layout": kv_layout, "kv_lens": [300, 0, 17]}, dtype=torch.bfloat16)
    for split, kernels in ((100, ["attention_fixed", "attention_fixed_merge"]), (2**31 - 1, ["attention_whole"])):
        launch.launched.clear()
        case.compare(case.run(backend="triton", split_size=split, max_q_len=1))
        assert launch.launched == kernels


@pytest.mark.parametrize("kv_layout", ["NHD", "SHUFFLED"])
@pytest.mark.parametrize(
    ("target", "at", "value", "lost", "sentence"),
    [
        ("indices", 6, UNUSED_PAGE_ID, 1, r"kv_indices\[6\] must be a page id in \[0, 14\), got 1073741824"),
        ("indices", 0, -1, 0, r"kv_indices\[0\] must be a page id in \[0, 14\), got -1"),
        ("indptr", 3, 99, 2, r"kv_indptr\[3\] must be at most 16, the length of kv_indices, got 99"),
        ("last_page_len", 1, 17, 1, r"kv_last_page_len\[1\] must be in \[0, 16\], got 17"),
    ],
)
def test_bad_metadata(target: str, at: int, value: int, lost: int, sentence: str, kv_layout: str) -> None:
    """What contradicts itself is told and gives 0 and -inf, without a read out of bounds; other requests are served."""
    case = Case([1, 1, 1], [70, 40, 33], dtype=torch.bfloat16, D=64, kv_layout=kv_layout)
    expected = case.answer()
    getattr(case.table, target)[at] = value
    out, lse = torch.full_like(case.q, NAN), torch.full(case.q.shape[:2], NAN)
    with pytest.raises(flashinfer.InvalidArgumentError, match=f"paged_attention: {sentence}"):
        case.run(backend="triton", out=out, lse=lse)
    expected[0][lost], expected[1][lost] = 0, -math.inf
    assert_close(out, expected[0], name="out")
    assert_close(lse, expected[1], name="lse")


@pytest.mark.parametrize("states", [2, 3])
def test_merging(launch: EmulatedLaunch, states: int) -> None:
    """Against the reference; some states have no keys and hold NaN."""
    rng = torch.Generator().manual_seed(states)
    v = torch.randn(7, states, 4, 72, generator=rng).bfloat16()[:, :, 1:]
    s = (torch.randn(7, states, 4, generator=rng) * 4)[..., 1:]
    s[::3, 0], v[::3, 0] = -math.inf, NAN
    s[1], v[1] = -math.inf, NAN
    expected = flashinfer.merge_states(v, s, backend="reference")
    assert bool((expected[1][1] == -math.inf).all())
    found = [flashinfer.merge_states(v, s, backend="triton")]
    assert launch.launched == ["merge_many"]
    if states == 2:
        (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
        found.append(flashinfer.merge_state(v_a, s_a, v_b, s_b, backend="triton"))
        mine = v_a.clone(), s_a.clone()
        mask = torch.arange(7) % 2 == 0
        flashinfer.merge_state_in_place(*mine, v_b, s_b, mask, backend="triton")
        assert launch.launched[1:] == ["merge_two", "merge_two"]
        for got, kept, want in zip(mine, (v_a, s_a), expected, strict=True):
            assert_close(got[mask], want[mask], name="in place")
            torch.testing.assert_close(got[~mask], kept[~mask], rtol=0, atol=0, equal_nan=True)
    for merged, lse in found:
        assert_close(merged, expected[0], name="v")
        assert_close(lse, expected[1], name="s")
