# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Metadata of a GPU in host memory: what the current stream had written by then, whole, and in memory of their own."""

from __future__ import annotations

import threading

import pytest
import torch

from flashinfer.core.metadata import on_host

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("sizes", [(1, 1, 0), (257, 257, 256), (100_003, 5, 70_000)])
def test_every_element_arrives(sizes: tuple[int, ...]) -> None:
    wanted = [torch.arange(n, dtype=(torch.int32, torch.int64)[i % 2]) * 3 - 7 for i, n in enumerate(sizes)]
    found = on_host(*(t.to(DEVICE) for t in wanted))
    for t, want in zip(found, wanted, strict=True):
        assert t.dtype == want.dtype
        assert t.is_cpu
        assert torch.equal(t, want)


def test_numbers_beyond_32_bits_strides_and_host_tensors() -> None:
    far = torch.tensor([2**40, -(2**40), 1], device=DEVICE)
    apart, here = torch.arange(600, dtype=torch.int32, device=DEVICE)[::3], torch.arange(4)
    found = on_host(far, here, apart[1:], far)
    assert [t.tolist() for t in found] == [
        [2**40, -(2**40), 1],
        [0, 1, 2, 3],
        list(range(3, 600, 3)),
        [2**40, -(2**40), 1],
    ]
    assert found[1] is here


@pytest.mark.parametrize("is_side", [False, True])
def test_the_current_stream_is_waited_for(is_side: bool) -> None:
    """A write that comes late on the stream is seen; the default stream need not be idle for another's."""
    t = torch.zeros(300, dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if is_side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        t.fill_(5)
        (found,) = on_host(t)
    assert found.tolist() == [5] * 300


def test_results_stay_when_others_are_fetched() -> None:
    first = on_host(torch.full((64,), 1, dtype=torch.int32, device=DEVICE))
    for value in range(2, 40):
        on_host(torch.full((64,), value, dtype=torch.int32, device=DEVICE))
    assert first[0].tolist() == [1] * 64


def test_threads_do_not_meet() -> None:
    wrong = []

    def fetch(value: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(50):
                want = value * 1000 + i
                (found,) = on_host(torch.full((129,), want, dtype=torch.int64, device=DEVICE))
                wrong.extend([] if found.tolist() == [want] * 129 else [want])

    threads = [threading.Thread(target=fetch, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_torch_sees_that_it_waits() -> None:
    t = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    on_host(t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            on_host(t)
        assert on_host(torch.zeros(3))[0].is_cpu
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    tensors = [torch.arange(9, device=f"cuda:{i}") for i in (1, 0, 1)]
    assert [t.tolist() for t in on_host(*tensors)] == [list(range(9))] * 3
    assert torch.cuda.current_device() == 0
