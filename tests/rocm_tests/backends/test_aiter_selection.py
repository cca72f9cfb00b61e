# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with AITER, "auto" goes on without it, and `backend="aiter"` says what it is.

`auto` asks AITER first here: in the order of the package the native kernel takes every call before it is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.core.aiter_install import find_aiter
from flashinfer.core.errors import BackendUnavailableError, BuildError, InvalidArgumentError, MissingJITCacheError
from flashinfer.jit import aiter_lib
from flashinfer.ops import page as ops
from rocm_tests.backends.aiter_standin import found, install

INDEX = torch.zeros(1, dtype=torch.int32)
INDPTR = torch.tensor([0, 1], dtype=torch.int32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def aiter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.append_paged_kv_cache, "backends", ("aiter", "native", "reference"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    folder = install("own_typed", tmp_path / "site")
    with found(folder):
        yield folder


def arguments(**changes: Any) -> list[Any]:
    """A call that AITER takes, with some arguments of the op replaced."""
    values = {
        "append_key": torch.ones(1, 2, 8),
        "append_value": torch.ones(1, 2, 8),
        "batch_indices": INDEX,
        "positions": INDEX,
        "k_cache": torch.zeros(3, 4, 2, 8),
        "v_cache": torch.zeros(3, 4, 2, 8),
        "kv_indices": INDEX,
        "kv_indptr": INDPTR,
        "kv_layout": "NHD",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    assert set(changes) <= set(values)
    return list((values | changes).values())


def run(backend: str = "auto", **changes: Any) -> torch.Tensor:
    """Run a call and return its K cache."""
    args = arguments(**changes)
    ops.append_paged_kv_cache(*args, backend=backend)
    return args[4]


def why(**changes: Any) -> str | None:
    return ops.append_paged_kv_cache.reasons(arguments(**changes), "auto")["aiter"]


FAR = 2**31
REFUSALS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "layout": (
        lambda: {"kv_layout": "HND", "k_cache": torch.zeros(3, 2, 4, 8), "v_cache": torch.zeros(3, 2, 4, 8)},
        "AITER writes NHD pages, got HND",
    ),
    "dtype": (
        lambda: {
            name: torch.zeros(shape, dtype=torch.int16)
            for name, shape in (
                ("append_key", (1, 2, 8)),
                ("append_value", (1, 2, 8)),
                ("k_cache", (3, 4, 2, 8)),
                ("v_cache", (3, 4, 2, 8)),
            )
        },
        "AITER takes rows of float32, float16 or bfloat16, got torch.int16",
    ),
    "FP8 cache": (
        lambda: {name: torch.zeros(3, 4, 2, 8).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")},
        "needs rows of the cache's dtype torch.float8_e4m3fn, got torch.float32",
    ),
    "heads of a key row apart": (
        lambda: {"append_key": torch.ones(1, 2, 16)[..., :8]},
        "AITER needs the heads of a row of append_key side by side, a stride of 8, got 16",
    ),
    "heads of a value row apart": (
        lambda: {"append_value": torch.ones(1, 2, 16)[..., :8]},
        "AITER needs the heads of a row of append_value side by side, a stride of 8, got 16",
    ),
    "K tokens apart": (
        lambda: {"k_cache": torch.zeros(3, 4, 3, 8)[:, :, :2], "v_cache": torch.zeros(3, 4, 3, 8)[:, :, :2]},
        "AITER needs k_cache dense inside a page, strides [..., 16, 8, 1], got [24, 8, 1]",
    ),
    "V heads outside tokens": (
        lambda: {"v_cache": torch.zeros(3, 2, 4, 8).transpose(1, 2)},
        "AITER needs v_cache dense inside a page, strides [..., 16, 8, 1], got [8, 32, 1]",
    ),
    "unlike pages": (
        lambda: {"v_cache": torch.zeros(6, 4, 2, 8)[::2]},
        "AITER takes one page stride for K and V, got 64 and 128",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_gate_is_the_same_for_auto_and_by_name(site: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, sentence = REFUSALS[name]
    assert why(**change()) == sentence
    with pytest.raises(BackendUnavailableError) as caught:
        run("aiter", **change())
    assert f"\n  aiter: {sentence}\n" in str(caught.value)
    monkeypatch.setattr(ops.append_paged_kv_cache, "_getting_ready", {"aiter": _unwanted})
    run(**change())


def _unwanted(*args: object) -> None:
    raise AssertionError("AITER was to be made ready for a call that it does not take")


@pytest.mark.parametrize(
    ("what", "changes", "sentence"),
    [
        (
            "page stride",
            {"k_cache": ((2, 1, 1, 1), (FAR, 1, 1, 1)), "v_cache": ((2, 1, 1, 1), (FAR, 1, 1, 1))},
            f"AITER keeps the elements between pages of k_cache in 32 bits, got {FAR}",
        ),
        (
            "row stride",
            {"append_key": ((2, 1, 1), (FAR, 1, 1)), "append_value": ((2, 1, 1), (1, 1, 1))},
            f"AITER counts rows of append_key and the elements between them in 32 bits, got 2 and {FAR}",
        ),
        (
            "threads",
            {"append_key": ((2**23, 512, 1), (0, 1, 1)), "append_value": ((2**23, 512, 1), (0, 1, 1))},
            "AITER launches a workgroup a row, more threads than a launch may have for 8388608 rows",
        ),
    ],
)
def test_sizes_beyond_32_bits(site: Path, what: str, changes: Any, sentence: str) -> None:
    """On the meta device, which has room for them; the gates look at no memory."""
    tensors = {n: torch.empty_strided(size, stride, device="meta") for n, (size, stride) in changes.items()}
    assert why(**tensors) == sentence


def test_nothing_is_wrong_with_what_is_just_within(site: Path) -> None:
    for changes in (
        {n: torch.empty_strided((2, 1, 1, 1), (FAR - 1, 1, 1, 1), device="meta") for n in ("k_cache", "v_cache")},
        {n: torch.empty_strided((2**23 - 1, 512, 1), (0, 1, 1), device="meta") for n in ("append_key", "append_value")},
        {"append_key": torch.ones(1, 1, 16)[..., ::2].new_ones(1, 1, 8), "append_value": torch.ones(1, 1, 8)},
    ):
        assert "device type" in (why(**changes) or "device type")  # only the meta device is declined


def test_absent(tmp_path: Path) -> None:
    with found(None):
        assert float(run().sum()) == 16
        assert why() == "needs the package aiter, which is not installed"
        with pytest.raises(BackendUnavailableError, match="aiter: needs the package aiter, which is not installed"):
            run("aiter")


def broken_header(site: Path) -> None:
    (site / "aiter_meta/csrc/include/cache.h").write_text(
        "namespace aiter { void reshape_and_cache_flash(Other& key); }"
    )


def broken_kernel(site: Path) -> None:
    (site / "aiter_meta/csrc/kernels/cache_kernels.cu").write_text('#error "this is broken"\n')


def other_parameters(site: Path) -> None:
    header = site / "aiter_meta/csrc/include/cache.h"
    header.write_text(header.read_text().replace("aiter_tensor_t& v_scale", "aiter_tensor_t& v_scale, int more"))


def no_sources(site: Path) -> None:
    (site / "aiter_meta/csrc/kernels/cache_kernels.cu").unlink()


@pytest.mark.parametrize(
    ("damage", "error", "sentence"),
    [
        (broken_header, BackendUnavailableError, "got reshape_and_cache_flash(Other&, ...)"),
        (broken_kernel, BuildError, "this is broken"),
        (other_parameters, BuildError, "error: "),
        (no_sources, BackendUnavailableError, "must be a readable file"),
    ],
)
def test_broken(
    site: Path,
    damage: Callable[[Path], None],
    error: type[Exception],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(site)
    tries = []
    original = aiter_lib.cache_spec
    monkeypatch.setattr(aiter_lib, "cache_spec", lambda install: tries.append(install) or original(install))
    assert why() is None, "nothing is built to answer a question"
    with caplog.at_level(logging.WARNING, "flashinfer"):
        for _ in range(3):
            assert float(run().sum()) == 16
    assert len(tries) == 1, "a failure is remembered"
    assert [r.message for r in caplog.records if "AITER's cache kernels are not used on cpu" in r.message] != []
    assert len(caplog.records) == 1
    reason = why()
    assert reason is not None
    assert reason.startswith(f"{find_aiter()} could not be made ready for cpu: ")
    assert sentence in reason
    assert flashinfer.explain("append_paged_kv_cache", *arguments())["aiter"] == reason
    with pytest.raises(BackendUnavailableError) as caught:
        run("aiter")
    assert reason in str(caught.value)
    # Asked by name at once, the error is the failure itself.
    aiter_lib.forget()
    with pytest.raises(error) as first:
        run("aiter")
    assert sentence in str(first.value)


def test_disabled_compilation_goes_through_and_is_not_remembered(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = site / "aiter_meta/csrc/kernels/cache_kernels.cu"
    kernel.write_text(f"{kernel.read_text()}\n// of this test: {tmp_path}\n")  # not built by any other
    monkeypatch.setenv(env.disable_jit.name, "1")
    for backend in ("auto", "aiter"):
        with pytest.raises(MissingJITCacheError, match="build --arch cpu page_aiter"):
            run(backend)
    with pytest.raises(MissingJITCacheError):
        flashinfer.warmup("cpu")
    monkeypatch.delenv(env.disable_jit.name)
    assert why() is None


def test_bad_arguments_are_said_first(site: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="k_cache must be of the rows' dtype"):
        run("aiter", k_cache=torch.zeros(3, 4, 2, 8, dtype=torch.float64))
    with pytest.raises(InvalidArgumentError, match="v_cache must be of shape"):
        run("aiter", v_cache=torch.zeros(3, 4, 2, 9))
    with pytest.raises(InvalidArgumentError, match=r"k_scale must be 1\.0"):
        run("aiter", k_scale=2.0)
