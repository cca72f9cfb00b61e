# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The append through AITER, from the public function to the entry, with a stand-in for AITER behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.backends.aiter import page
from flashinfer.core.op import _OBJECTIONS
from flashinfer.jit import aiter_lib
from rocm_tests.backends.aiter_standin import INTERFACES, found, install
from rocm_tests.contract.bad import BAD
from rocm_tests.contract.test_contract import spoiled
from rocm_tests.page.oracle import append_by_loop, assert_same_memory, make_batch, random_on

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=INTERFACES)
def standin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    folder = install(request.param, tmp_path / "site")
    with found(folder):
        yield folder


def pools(P: int, N: int, H: int, D: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """NHD caches of every stride that AITER can take."""
    joined = random_on((P, 2, N, H, D), dtype, "cpu", 1)
    return {
        "two pools": (random_on((P, N, H, D), dtype, "cpu", 2), random_on((P, N, H, D), dtype, "cpu", 3)),
        "one pool": (joined[:, 0], joined[:, 1]),
        "every other page": (
            random_on((2 * P, N, H, D), dtype, "cpu", 4)[::2],
            random_on((2 * P, N, H, D), dtype, "cpu", 5)[1::2],
        ),
    }


def copies(cache: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same views of copies of all that lies behind them."""
    storages = {c.untyped_storage().data_ptr(): c.untyped_storage().clone() for c in cache}
    return tuple(
        torch.empty(0, dtype=c.dtype).set_(
            storages[c.untyped_storage().data_ptr()], c.storage_offset(), c.size(), c.stride()
        )
        for c in cache
    )


def append(batch: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, **options: Any) -> None:
    flashinfer.append_paged_kv_cache(
        key,
        value,
        batch.batch_indices,
        batch.positions,
        cache,
        batch.kv_indices,
        batch.kv_indptr,
        batch.last_page_len,
        **{"backend": "aiter", **options},
    )


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "H", "D"), [(16, 8, 128), (1, 1, 64), (5, 3, 7), (4, 1, 1)])
def test_rows_go_where_the_loop_puts_them(
    standin: Path, N: int, H: int, D: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    batch = make_batch((2 * N + 1, N, 0, N - 1, 33), (N + 1, 1, 0, N - 1, 20), N, padding=3, index_dtype=index_dtype)
    rows = random_on((batch.nnz, H, 3, D), dtype, "cpu", 6)  # rows with a gap after every head ...
    key = random_on((batch.nnz, 2, H, D), dtype, "cpu", 7)[:, 0]  # ... which AITER cannot read, and after every row
    value = rows[:, :, 1].contiguous()
    for cache in pools(batch.num_pages, N, H, D, dtype).values():
        expected = copies(cache)
        append_by_loop(key, value, **batch.lists, cache=expected, kv_layout="NHD")
        append(batch, key, value, cache)
        assert_same_memory(cache, expected)


def test_int32_and_padding_and_no_rows(standin: Path) -> None:
    batch = make_batch((5,), (0,), 4)
    cache = pools(batch.num_pages, 4, 2, 8, torch.float32)["two pools"]
    before = [c.clone() for c in cache]
    empty = torch.empty(0, 2, 8)
    append(batch, empty, empty, cache)
    padded = make_batch((5,), (0,), 4, padding=6)
    append(padded, torch.ones(6, 2, 8), torch.ones(6, 2, 8), cache)
    assert all(torch.equal(c.view(torch.int32), b.view(torch.int32)) for c, b in zip(cache, before, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_indices", 10**9, r"kv_indices\[\d+\] must be a page id in \[0, 5\), got 1000000000"),
        ("kv_indices", -1, r"kv_indices\[\d+\] must be a page id in \[0, 5\), got -1"),
        ("positions", 10**6, r"positions\[0\] must be in \[0, \d+\)"),
        ("batch_indices", 2, r"batch_indices\[0\] must be in \[0, 2\)"),
        ("kv_indptr", 10**6, r"kv_indptr\[1\] must be at most \d+|not decrease"),
    ],
)
def test_bad_metadata_is_reported_by_the_slot_mapping(standin: Path, field: str, value: int, message: str) -> None:
    batch = make_batch((9, 9), (9, 9), 4)
    cache = pools(5, 4, 2, 8, torch.float32)["two pools"]
    before = [c.clone() for c in cache]
    column = getattr(batch, field)
    column[1 if field == "kv_indptr" else slice(None) if field == "kv_indices" else 0] = value
    with pytest.raises(flashinfer.InvalidArgumentError, match=message):
        append(batch, torch.ones(18, 2, 8), torch.ones(18, 2, 8), cache)
    assert all(torch.equal(c.view(torch.int32), b.view(torch.int32)) for c, b in zip(cache, before, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"), [b[1:] for b in BAD if b[0] == "append_paged_kv_cache"], ids=lambda b: str(b)[:40]
)
def test_bad_arguments_reach_neither_kernel(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused in the op's words when asked by name, and by the shim where nothing was asked before."""
    op, call = spoiled("append_paged_kv_cache", changes)
    monkeypatch.setenv("FLASHINFER_STANDIN_LOG", str(tmp_path / "log"))
    with found(install("own_typed", tmp_path / "site")):
        page.prepare_device(torch.device("cpu"))
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            op(*call.arguments.values(), backend="aiter")
        assert str(caught.value) == f"append_paged_kv_cache: {message}"
        with pytest.raises(_OBJECTIONS) as objected:
            page.append_paged_kv_cache(*call.arguments.values())
        assert not str(objected.value).startswith("append_paged_kv_cache:"), "a kernel has run"
    assert not (tmp_path / "log").exists()


def test_what_aiter_refuses_is_an_error_and_not_the_end_of_the_process(
    standin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch((9,), (9,), 4)
    cache = pools(batch.num_pages, 4, 2, 8, torch.float32)["two pools"]
    rows = torch.ones(9, 2, 8)
    append(batch, rows, rows, cache)
    monkeypatch.setenv("FLASHINFER_STANDIN_REFUSE", "1")
    with pytest.raises(RuntimeError, match=r"AITER refused the call: .*the stand-in was told to refuse"):
        append(batch, rows, rows, cache)
    monkeypatch.setenv("FLASHINFER_STANDIN_REFUSE", "")
    append(batch, rows, rows, cache)


def test_the_log_of_a_call(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch((9,), (7,), 4, padding=2)
    cache = pools(batch.num_pages, 4, 2, 8, torch.float32)["two pools"]
    monkeypatch.setenv("FLASHINFER_STANDIN_LOG", str(tmp_path / "log"))
    append(batch, torch.ones(9, 2, 8), torch.ones(9, 2, 8), cache)
    can_throw = 1 if (standin / "aiter_meta/csrc/include/aiter_stream.h").exists() else -1
    assert (tmp_path / "log").read_text() == f"rows=9 device=-1 stream=0 can_throw={can_throw}\n"


def test_the_public_function_compiles_to_one_node(standin: Path) -> None:
    batch = make_batch((9,), (9,), 4)
    cache = pools(batch.num_pages, 4, 2, 8, torch.float32)["two pools"]
    expected = [c.clone() for c in cache]
    rows = torch.randn(2, 9, 2, 8)
    append_by_loop(rows[0], rows[1], **batch.lists, cache=tuple(expected), kv_layout="NHD")
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(append, backend=keep, fullgraph=True)(batch, rows[0], rows[1], cache)
    assert [str(n.target) for n in graphs[0].graph.nodes if "flashinfer" in str(n.target)] == [
        "flashinfer.append_paged_kv_cache.default"
    ]
    assert_same_memory(cache, tuple(expected))


def test_other_devices_than_amd_gpus_are_declined(tmp_path: Path) -> None:
    batch = make_batch((9,), (9,), 4)
    cache = pools(batch.num_pages, 4, 2, 8, torch.float32)["two pools"]
    rows = torch.ones(9, 2, 8)
    with found(install("own_typed", tmp_path), anywhere=False):
        with pytest.raises(flashinfer.BackendUnavailableError, match="aiter: needs an AMD GPU, got cpu"):
            append(batch, rows, rows, cache)
        append(batch, rows, rows, cache, backend="auto")
        assert not aiter_lib._modules
