# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA through AITER, with a stand-in for it: what is asked of which release, and what comes of it."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.aiter import entry, mla_interface
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.mla import aiter_standin
from rocm_tests.mla.case import NAN, SCALE, Case
from rocm_tests.mla.test_wrapper import graph_wrapper

NEW = "0.1.20+rocm7"
FULL = {"dims": (512, 64), "dtype": torch.bfloat16}


@pytest.fixture
def aiter(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    aiter_standin.install(tmp_path, getattr(request, "param", NEW))
    with aiter_standin.found(tmp_path):
        yield tmp_path


def case_of(q_lens: list[int], kv_lens: list[int], **options: Any) -> Case:
    return Case(q_lens, kv_lens, **{"heads": 16, "page_size": 1, **FULL, **options})


def planned(case: Case, backend: str = "aiter", **options: Any) -> tuple[torch.Tensor, ...]:
    wrapper = case.wrapper(backend)
    case.plan(wrapper)
    results: tuple[torch.Tensor, ...] = case.run(wrapper, **options)
    return results


def reasons(case: Case, needs_lse: bool = False) -> dict[str, str | None]:
    wrapper = case.wrapper()
    case.plan(wrapper)
    return flashinfer.explain(wrapper.run, *case.queries, *case.caches, return_lse=needs_lse)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["combined", "separate"])
@pytest.mark.parametrize("heads", [1, 6, 16, 20, 128])
@pytest.mark.filterwarnings("ignore:.*not adjacent halves")
def test_a_decode(aiter: Path, heads: int, layout: str, page_size: int) -> None:
    """Requests of no keys included, which AITER answers with 0 / 0."""
    case = case_of([1] * 4, [33, 0, 5, 16], heads=heads, layout=layout, page_size=page_size)
    case.compare(planned(case))
    ((name, asked),) = aiter_standin.calls()
    assert name == "decode"
    assert asked["q"].size(1) == (16 if heads <= 16 else 128)
    assert (asked["max_seqlen_q"], asked["causal"], asked["return_lse"], asked["work_meta_data"]) == (
        1,
        True,
        True,
        None,
    )
    assert asked["sm_scale"] == SCALE
    assert (asked["page_size"], asked["nhead_kv"]) == (1, 1)
    splits = asked["num_kv_splits"]
    assert splits >= 2
    assert asked["num_kv_splits_indptr"].tolist() == [splits * b for b in range(5)]
    # Nothing to copy where the halves are one buffer: AITER reads the pool itself.
    assert (asked["kv_buffer"].data_ptr() == case.pool.data_ptr()) == (layout == "combined")


@pytest.mark.parametrize("layout", ["combined", "separate"])
@pytest.mark.filterwarnings("ignore:.*not adjacent halves")
def test_results_may_be_slices(aiter: Path, layout: str) -> None:
    case = case_of([1, 1], [33, 0], layout=layout)
    out = torch.full((2, 18, 528), NAN, dtype=torch.bfloat16)
    lse = torch.full((2, 18), NAN)
    case.compare(planned(case, out=out[:, 1:-1, 8:-8], lse=lse[:, 1:-1]))
    out[:, 1:-1, 8:-8], lse[:, 1:-1] = NAN, NAN
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@pytest.mark.filterwarnings("ignore:.*not adjacent halves")
def test_views_and_copies_give_the_same_bits(aiter: Path) -> None:
    results = []
    for layout in ("combined", "separate"):
        case = case_of([1, 1], [33, 7], page_size=4, layout=layout)
        wrapper = case.wrapper("aiter")
        case.plan(wrapper)
        results.append(case.run(wrapper))
        case.caches[0][case.table.pages_of(0)[0], 0] += 1
        assert not torch.equal(case.run(wrapper)[0], results[-1][0])
    for got, want in zip(*results, strict=True):
        assert_equal_bits(got, want)


def test_a_copy_is_of_the_batch_and_warned_of_once(aiter: Path) -> None:
    case = case_of([1, 1], [33, 7], page_size=4, layout="separate")
    case.caches = tuple(torch.cat((t, torch.full((90, *t.shape[1:]), NAN, dtype=t.dtype))) for t in case.caches)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="not adjacent halves of one buffer, so that backend 'aiter' copies the rows"):
        case.compare(planned(case))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.compare(planned(case))
    rows = aiter_standin.calls()[0][1]["kv_buffer"].size(0)
    assert rows == 4 * case.table.indices.numel()


@pytest.mark.parametrize("q_len", [2, 5, 8])
def test_speculation_is_a_decode(aiter: Path, q_len: int) -> None:
    case = case_of([q_len] * 2, [33, 8], causal=True)
    case.compare(planned(case))
    assert [(n, f["max_seqlen_q"]) for n, f in aiter_standin.calls()] == [("decode", q_len)]


@pytest.mark.parametrize("q_lens", [[9, 9], [3, 1]], ids=str)
def test_longer_and_unlike_queries_are_a_prefill(aiter: Path, q_lens: list[int]) -> None:
    case = case_of(q_lens, [33, 9], causal=True, heads=20)
    out = planned(case, return_lse=False)
    case.compare((out, case.answer()[1].float()))
    assert [(n, f["max_seqlen_q"]) for n, f in aiter_standin.calls()] == [("prefill", max(q_lens))]
    assert reasons(case, needs_lse=True)["aiter"] == "AITER's prefill returns no LSE"


@pytest.mark.parametrize(
    ("aiter", "runs", "lse"),
    [
        ("0.1.7.post2.dev18", False, False),
        ("0.1.7.post5", True, False),
        ("0.1.10", True, False),
        ("0.1.12.post2", True, False),
        ("0.1.13", True, True),
        (NEW, True, True),
    ],
    indirect=["aiter"],
)
def test_releases(aiter: Path, runs: bool, lse: bool) -> None:
    """An LSE is asked for, and taken, from those only that write one; parameters by name, as they moved."""
    case = case_of([1, 1], [33, 0])
    without, with_lse = (reasons(case, needs_lse)["aiter"] for needs_lse in (False, True))
    if not runs:
        assert without is not None
        assert without.startswith("needs AITER 0.1.7.post5 or newer, got AITER 0.1.7.post2.dev18 in ")
        return
    assert without is None
    case.compare((planned(case, return_lse=False), case.answer()[1].float()))
    assert not aiter_standin.calls()[0][1].get("return_lse")
    if lse:
        case.compare(planned(case))
    else:
        assert with_lse is not None
        assert with_lse.startswith("needs AITER 0.1.13 or newer for the LSE")
        with pytest.raises(flashinfer.BackendUnavailableError, match="for the LSE"):
            planned(case)
        # "auto" goes on to one that can.
        case.compare(planned(case, "auto"))
        assert len(aiter_standin.calls()) == 1


@pytest.mark.parametrize(
    ("release", "reason"),
    [("0.1.7.post5", "needs AITER 0.1.7.post5 or newer"), ("0.1.12.post2", "needs AITER 0.1.13"), ("0.1.13", None)],
)
def test_a_version_that_says_nothing_is_read_from_the_file(tmp_path: Path, release: str, reason: str | None) -> None:
    aiter_standin.install(tmp_path, "0.0", release)
    with aiter_standin.found(tmp_path):
        got = reasons(case_of([1], [5]), needs_lse=True)["aiter"]
    assert got is None if reason is None else got is not None and got.startswith(reason)


DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "129 heads": ({"heads": 129}, "needs at most 128 heads, got 129"),
    "half": ({"dtype": torch.float16}, "called for bfloat16, got torch.float16 and caches of torch.float16"),
    "fp8": ({"kv_dtype": torch.float8_e4m3fn}, "called for bfloat16, got torch.bfloat16 and caches of torch.float8"),
    "widths": ({"dims": (256, 64)}, r"are for widths of \(512, 64\), got \(256, 64\)"),
    "not causal": ({"q_lens": [2, 2]}, "several queries are causal, got 2 queries that are not"),
    "no query": ({"q_lens": [1, 0]}, "needs as many queries in every request"),
    "no key": ({"q_lens": [3, 3], "causal": True, "kv_lens": [9, 2]}, "in a causal batch keys for every query"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_it_is_not_called_for(aiter: Path, name: str) -> None:
    changes, sentence = DECLINED[name]
    case = case_of(**{"q_lens": [1, 1], "kv_lens": [33, 5], **changes})
    got = reasons(case)
    assert got["aiter"] is not None
    assert re.search(sentence, got["aiter"])
    assert got["reference"] is None


def test_no_plan(aiter: Path) -> None:
    case = case_of([1], [5])
    arguments = *case.queries, *case.caches, *case.metadata
    got = flashinfer.explain(flashinfer.mla_paged_attention, *arguments, causal=False, sm_scale=1.0)
    assert got["aiter"] is not None
    assert got["aiter"].startswith("needs a plan")


def test_an_lse_that_does_not_come_is_an_error(aiter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([1], [5])
    planned(case)
    key = mla_interface.MODULE, mla_interface.DECODE
    monkeypatch.setitem(entry._functions, key, lambda **_: (None, None))
    with pytest.raises(flashinfer.BackendUnavailableError, match=r"0.1.20\+rocm7 in .* returned no LSE, got None"):
        planned(case)


@pytest.mark.parametrize("backend", ["aiter", "auto"])
def test_a_graph_is_captured_for_one_query_length(aiter: Path, backend: str) -> None:
    wrapper = graph_wrapper(2, 60)
    wrapper._backend = backend
    for lens in ([33, 1], [0, 50]):
        case = case_of([1, 1], lens)
        case.plan(wrapper)
        case.compare(case.run(wrapper))
    assert [f["max_seqlen_q"] for _, f in aiter_standin.calls()] == [1, 1]
    with pytest.raises(flashinfer.InvalidArgumentError, match="queries of a graph's plans must be as in the first"):
        case_of([2, 0], [9, 9]).plan(wrapper)
    wrapper._backend = "reference"
    case_of([2, 0], [9, 9]).plan(wrapper)


def test_empty_batches(aiter: Path) -> None:
    for case in (case_of([1, 1], [0, 0]), case_of([], [])):
        wrapper = case.wrapper()
        case.plan(wrapper)
        out, lse = case.run(wrapper)
        assert bool((out == 0).all())
        assert bool((lse == -math.inf).all())
