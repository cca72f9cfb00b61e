# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Reports of kernels: their words, when they are read, and that each blames its own call only."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch

import flashinfer
from flashinfer.core import env, faults
from flashinfer.core.op import OPS
from flashinfer.selection import find_op
from rocm_tests.conftest import ROOT
from rocm_tests.core.environment import set_variable

KERNELS = ROOT / "csrc_rocm" / "kernels"
CPU = torch.device("cpu")


def one_token(page: int = 0) -> Callable[[], None]:
    """An append of one token to `page` of a pool of two."""
    pool = torch.zeros(2, 4, 1, 8)
    row, zero = torch.ones(1, 1, 8), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([page], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), zero + 1
    return lambda: flashinfer.append_paged_kv_cache(row, row, zero, zero, (pool, pool.clone()), *table)


def test_codes_and_ops_are_those_of_the_kernels() -> None:
    text = (KERNELS / "common" / "fault.h").read_text(encoding="utf-8")
    codes = {name: int(code) for name, code in re.findall(r"^\s*k(\w+) = (\d+),", text, re.MULTILINE)}
    assert codes.pop("NoFault") == 0
    mirrored = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): code for name, code in codes.items()}
    assert mirrored == {name: getattr(faults, name) for name in mirrored}
    assert set(faults._SENTENCES) == set(codes.values())
    found = {}
    for header in KERNELS.rglob("*.h"):
        found |= dict(re.findall(r"kOp(\w+) = (\d+);", header.read_text(encoding="utf-8")))
    assert {int(code) for code in found.values()} == set(faults._OPS)
    find_op("append_paged_kv_cache")
    assert set(faults._OPS.values()) <= set(OPS)


def test_a_report_becomes_a_sentence_and_is_cleared() -> None:
    words = torch.tensor([(3 << 8) | 5, 7, 99, 50])
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        faults.settle(words)
    assert str(caught.value) == "convert_kv_pages: block_ids[7] must be a page id in [0, 50), got 99"
    assert words.tolist() == [0, 0, 0, 0]
    faults.settle(words)


def test_a_call_on_the_cpu_answers_for_itself_only() -> None:
    for _ in range(2):
        with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 2\), got 9"):
            one_token(page=9)()
        one_token()()
    assert faults.words(CPU).tolist() == [0, 0, 0, 0]


def test_words_first_asked_for_in_inference_mode_serve_outside_of_it() -> None:
    """Words on the CPU are a thread's own, so a thread meets them for the first time."""
    errors: list[str] = []

    def in_a_thread() -> None:
        with torch.inference_mode():
            one_token()()
        try:
            one_token(page=9)()
        except flashinfer.InvalidArgumentError as e:
            errors.append(str(e))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert errors == ["append_paged_kv_cache: kv_indices[0] must be a page id in [0, 2), got 9"]


def test_own_words_take_the_place_of_the_devices() -> None:
    own = torch.zeros(4, dtype=torch.int64)
    with faults.reported_to(own):
        assert faults.words(CPU) is own
        one_token()()
        assert faults.error_in(own) is None
        one_token(page=9)()
        one_token(page=8)()
    assert str(faults.error_in(own)) == "append_paged_kv_cache: kv_indices[0] must be a page id in [0, 2), got 9"
    assert faults.words(CPU) is not own
    one_token()()
    with pytest.raises(flashinfer.InvalidArgumentError, match="got 7"):
        one_token(page=7)()


def test_threads_do_not_share_words() -> None:
    """Sixteen threads, good and bad calls in turn: each sees its own page id and nobody else's."""
    wrong: list[str] = []
    start = threading.Barrier(16)

    def work(number: int) -> None:
        good, bad = one_token(), one_token(page=100 + number)
        start.wait()
        for _ in range(50):
            good()
            try:
                bad()
                wrong.append(f"thread {number}: no report")
            except flashinfer.InvalidArgumentError as e:
                if not str(e).endswith(f"got {100 + number}"):
                    wrong.append(f"thread {number}: {e}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "\n".join(wrong[:5])


class DeviceWords:
    """Words that say they are on a GPU, and count how often they are read."""

    def __init__(self, values: list[int], device: str) -> None:
        self.values, self.device, self.reads = values, torch.device(device), 0
        self.is_cpu = self.device.type == "cpu"

    def tolist(self) -> list[int]:
        self.reads += 1
        return list(self.values)

    def zero_(self) -> None:
        self.values = [0, 0, 0, 0]


REPORT = [(1 << 8) | 4, 2, -5, 64]


def test_a_gpu_is_waited_for_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variable(monkeypatch, env.check, "")
    words = DeviceWords(REPORT, "cuda:0")
    faults.settle(words)  # type: ignore[arg-type]
    assert words.reads == 0
    set_variable(monkeypatch, env.check, "1")
    with pytest.raises(
        flashinfer.InvalidArgumentError, match=r"append_paged_kv_cache: kv_indices\[2\] must be .* got -5"
    ):
        faults.settle(words)  # type: ignore[arg-type]
    faults.settle(words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "seen"),
    [(None, {0, 1}), ("cuda", {0, 1}), ("cuda:1", {1}), (torch.device("cuda", 0), {0}), ("cuda:2", set())],
)
def test_check_device_errors_looks_at_the_devices_asked_for(
    asked: object, seen: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [DeviceWords(REPORT, f"cuda:{i}") for i in range(2)]
    monkeypatch.setattr(faults, "_device_words", {w.device: w for w in words})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for _ in seen:
        with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 64\), got -5"):
            flashinfer.check_device_errors(asked)  # type: ignore[arg-type]
    flashinfer.check_device_errors(asked)  # type: ignore[arg-type]
    assert {i for i, w in enumerate(words) if w.reads} == seen
    assert {i for i, w in enumerate(words) if w.values == REPORT} == {0, 1} - seen


@pytest.mark.parametrize("device", ["foo", "cpu", 7, "cuda:7", torch.device("cuda", 7), 1.5])
def test_check_device_errors_refuses_what_is_no_gpu_of_the_machine(
    device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        flashinfer.check_device_errors(device)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"check_device_errors: device must be a GPU, of which torch finds 1, got {str(device)!r}"
    )
