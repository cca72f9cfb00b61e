# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The route to AITER's kernel: which calls it gets by version, and what it is given. A stand-in plays AITER."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.aiter import entry
from flashinfer.backends.aiter import mla_context as route
from flashinfer.core import aiter_install
from flashinfer.core.aiter_install import AiterInstall
from flashinfer.core.dtypes import FNUZ, OCP
from rocm_tests.mla_context.case import FULL, Case

BF16 = torch.bfloat16


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """AITER of a version on an AMD GPU of FNUZ, as far as the route can tell."""
    found = None if version is None else AiterInstall(Path("aiter"), Path("meta"), version)
    monkeypatch.setattr(aiter_install, "find_aiter", lambda: found)
    monkeypatch.setattr(aiter_install, "why_not_gpu", lambda device: None)
    monkeypatch.setattr(entry, "_functions", {})
    monkeypatch.setattr(entry, "_failures", {})
    monkeypatch.setattr(route, "_flavour", lambda device: FNUZ)


def case(**changes: Any) -> Case:
    """A call that every version since 0.1.14 takes."""
    changes = {"page_size": 1, **changes}
    flat = changes["page_size"] == 1
    made = Case(**{"lens": [5, 9], "flat": flat, "dtype": BF16, "fp8": FNUZ, **FULL, **changes})
    made.cache, made.weight = made.cache.contiguous(), made.weight.contiguous()
    made.table = dataclasses.replace(made.table, indices=made.table.indices[: int(made.table.indptr[-1])])
    return made


def why_not(made: Case, results: tuple[torch.Tensor, torch.Tensor] | None = None) -> str | None:
    if results is None:
        results = tuple(t.contiguous() for t in made.results())  # type: ignore[assignment]
    return flashinfer.explain("gather_kv_b_proj", *made.arguments, *results)["aiter"]


@pytest.mark.parametrize(
    ("version", "mode", "reason"),
    [
        ("0.1.11", "block", "needs AITER 0.1.12 for weight scales of kind 'block', got 0.1.11"),
        ("0.1.12", "block", None),
        ("0.1.12", "row", "needs AITER 0.1.13 for weight scales of kind 'row', got 0.1.12"),
        ("0.1.13", "row", None),
        ("0.1.13", "none", "needs AITER 0.1.14 for weight scales of kind 'none', got 0.1.13"),
        ("0.1.14", "none", None),
        ("0.1.20.post1", "none", None),
        ("1.0.0", "none", None),
        ("unknown", "none", "needs to know AITER's version, as scales depend on it, got unknown"),
        (None, "none", "needs the package aiter, which is not installed"),
    ],
)
def test_versions(version: str | None, mode: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert why_not(case(weight_scale=mode)) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 256}, "needs kv_lora_rank 512, got 256"),
        ({"page_size": 16}, None),
        ({"page_size": 32}, "needs a page_size that divides 16 with a cache of torch.bfloat16, got 32"),
        ({"page_size": 3}, "needs a page_size that divides 16 with a cache of torch.bfloat16, got 3"),
        ({"page_size": 32, "kv_dtype": FNUZ, "weight_scale": "row"}, None),
        (
            {"page_size": 64, "kv_dtype": FNUZ, "weight_scale": "row"},
            "needs a page_size that divides 32 with a cache of torch.float8_e4m3fnuz, got 64",
        ),
        (
            {"kv_dtype": OCP, "weight_scale": "row"},
            "needs kv_cache in the device's own FP8, torch.float8_e4m3fnuz, got torch.float8_e4m3fn",
        ),
        ({"dtype": torch.float16}, "needs results in bfloat16, got torch.float16"),
        ({"index_dtype": torch.int64}, "needs kv_indptr in int32, got torch.int64"),
        ({"weight_scale": "row", "heads": 1, "nope": 64, "v_dim": 32}, "needs a scaled weight of a multiple of 128"),
    ],
    ids=lambda v: str(v)[:50],
)
def test_calls(changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.1.20.post1")
    found = why_not(case(**changes))
    assert found == reason or (reason is not None and str(found).startswith(reason))


def test_heads_of_unlike_parts_need_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(weight_scale="block", v_dim=64, heads=2)
    install(monkeypatch, "0.1.12")
    assert why_not(made) == "needs AITER 0.1.13 for a nope_dim unlike the v_dim, got 0.1.12 with 128 and 64"
    install(monkeypatch, "0.1.13")
    assert why_not(made) is None


def test_a_wide_weight_is_not_cast_to_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm/aiter's kernel for pages casts the weight to the cache's dtype; the one for tokens does not."""
    sentence = "needs an FP8 weight with an FP8 cache, or pages of one token and AITER 0.1.21: others are multiplied in"
    for version, page_size, taken in (("0.1.20.post1", 1, False), ("0.1.21", 1, True), ("0.1.21", 16, False)):
        install(monkeypatch, version)
        found = why_not(case(kv_dtype=FNUZ, page_size=page_size))
        assert found is None if taken else str(found).startswith(sentence), (version, page_size, found)


def test_pages_of_one_token_are_taken_where_the_table_is_one_entry_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm/aiter's kernel for them takes entry `t` for row `t`, whatever the indptrs say and however many entries."""
    for version, reasons in (("0.1.20.post1", (None, None)), ("0.1.21", ("one tensor for", "as many kv_indices as"))):
        install(monkeypatch, version)
        assert why_not(case()) is None
        apart, spare = case(flat=False), case()
        results = tuple(t.contiguous() for t in spare.results(spare=2))
        for found, reason in zip((why_not(apart), why_not(spare, results)), reasons, strict=True):  # type: ignore[arg-type]
            assert found is None if reason is None else str(found).startswith(f"needs {reason}"), (version, found)


@pytest.mark.parametrize("name", ["kv_cache", "kv_b_proj_weight", "k_out", "v_out"])
def test_strides_are_declined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.1.20")
    made, strided = case(), Case([5, 9], page_size=1, dtype=BF16, **FULL)
    results = [t.contiguous() for t in made.results()]
    if name == "kv_cache":
        made.cache = strided.cache
    elif name == "kv_b_proj_weight":
        made.weight = strided.weight
    else:
        results[name == "v_out"] = made.results()[name == "v_out"]
    assert str(why_not(made, (results[0], results[1]))).startswith(f"needs {name} contiguous, got stride")


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A module `aiter` with this op alone; what it is called with."""
    calls: list[tuple[Any, ...]] = []

    def gather_kv_b_proj(
        k_buffer: Any,
        k_scale: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_prefix_sum_context_lens: Any,
        kv_proj_weight: Any,
        kv_proj_scale: Any,
        k_prefix: Any,
        v_prefix: Any,
        weight_preshuffle: bool = False,
    ) -> None:
        calls.append((k_buffer, k_scale, kv_proj_weight, kv_proj_scale, weight_preshuffle))
        flashinfer.gather_kv_b_proj(
            k_buffer,
            k_scale if k_buffer.dtype != k_prefix.dtype else None,
            *(kv_indptr, kv_indices, kv_prefix_sum_context_lens, kv_proj_weight, kv_proj_scale, k_prefix, v_prefix),
            backend="reference",
        )

    names = route.MODULE.split(".")
    for i in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:i]), types.ModuleType(".".join(names[:i])))
    sys.modules[route.MODULE].gather_kv_b_proj = gather_kv_b_proj  # type: ignore[attr-defined]
    return calls


@pytest.mark.parametrize("changes", [{}, {"page_size": 16}, {"kv_dtype": FNUZ, "weight_scale": "row"}], ids=str)
def test_what_the_kernel_is_given(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    install(monkeypatch, "0.1.20.post1")
    made = case(**changes)
    k, v = (t.contiguous() for t in made.results())
    flashinfer.gather_kv_b_proj(*made.arguments, k, v)  # type: ignore[arg-type]
    ((cache, kv_scale, weight, weight_scale, preshuffled),) = calls
    assert cache is made.cache
    assert weight is made.weight
    assert weight_scale is made.weight_scale
    # Triton takes no None for a pointer that a branch not taken would read.
    assert kv_scale is (made.cache if made.kv_scale is None else made.kv_scale)
    assert preshuffled is False
    expected = torch.empty_like(k), torch.empty_like(v)
    flashinfer.gather_kv_b_proj(*made.arguments, *expected, backend="reference")  # type: ignore[arg-type]
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])


def test_nothing_to_do_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 0 programs is an error to the driver."""
    calls = stand_in(monkeypatch)
    install(monkeypatch, "0.1.20.post1")
    made = case(lens=[0])
    flashinfer.gather_kv_b_proj(*made.arguments, *(t.contiguous() for t in made.results()))  # type: ignore[arg-type]
    assert calls == []


def test_without_an_amd_gpu_aiter_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_install, "find_aiter", lambda: pytest.fail("looked for"))
    assert why_not(case()) == "needs an AMD GPU, got cpu"
    assert "aiter" not in sys.modules
