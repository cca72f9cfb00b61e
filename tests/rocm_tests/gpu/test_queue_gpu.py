# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`ConversionQueue` on a GPU: beside the main stream, behind the transfer, and never in the host's way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.core import env
from flashinfer.kv import ConversionHandle, ConversionQueue, PageConverter, PageFormat
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, random_bits
from rocm_tests.core.environment import set_variable
from rocm_tests.kv.pages import Layers, converted

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Long enough that whatever is launched on another stream meanwhile runs first.
PAUSE_CYCLES = 500_000_000
SRC, DST = (PageFormat(kind, "bfloat16", 4, 16, 64) for kind in ("standard", "shuffled"))
# The three kernels: rows in registers, pages of several workgroups, and through scratch pages.
SHAPES = {"fast": ("shuffled", 8, 16, 128), "clusters": ("shuffled", 8, 128, 256), "generic": ("x_packed", 4, 16, 32)}


@pytest.fixture(autouse=True)
def no_reports_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A request's report is its own: none of these tests may leave one among the device's words."""
    set_variable(monkeypatch, env.check, "")
    flashinfer.check_device_errors()
    yield
    torch.cuda.synchronize()
    flashinfer.check_device_errors()


@contextlib.contextmanager
def host_never_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pause(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """Keep a stream busy; the event is recorded when it is free."""
    stream = stream or torch.cuda.current_stream()
    free = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES)
        free.record()
    return free


def queue_of(layers: Layers, src: PageFormat = SRC, dst: PageFormat = DST, **options: Any) -> ConversionQueue:
    queue = ConversionQueue(layers.caches, src, dst, **options)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    return queue


def as_ids(kind: str, ids: list[int]) -> Any:
    return {
        "list": lambda: ids,
        "cpu": lambda: torch.tensor(ids, dtype=torch.int32),
        "gpu": lambda: torch.tensor(ids, dtype=torch.int32, device=DEVICE),
        "gpu wide": lambda: torch.tensor(ids, dtype=torch.int64, device=DEVICE),
    }[kind]()


@pytest.mark.parametrize("ids", ["list", "cpu", "gpu", "gpu wide"])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_in_flight(shape: str, ids: str) -> None:
    other, *geometry = SHAPES[shape]
    src, dst = (PageFormat(kind, "bfloat16", *geometry) for kind in ("standard", other))  # type: ignore[arg-type]
    layers = Layers(src, layers=3, pages=12, device=DEVICE)
    requests = [[3, 11], [0, 7, 5], [2], [9, 1, 6, 10]]
    with queue_of(layers, src, dst) as queue:
        listed = [as_ids(ids, request) for request in requests]
        with host_never_waits():
            handles = [queue.submit(request) for request in listed]
        for handle in handles:
            handle.result()
            assert handle.done()
            assert handle.exception() is None
    layers.check([page for request in requests for page in request], src, dst)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_blocked_main_stream_blocks_no_conversion(shape: str) -> None:
    """Not even a queue's very first request, for which nothing is loaded or allocated any more."""
    other, *geometry = SHAPES[shape]
    src, dst = (PageFormat(kind, "bfloat16", *geometry) for kind in ("standard", other))  # type: ignore[arg-type]
    layers = Layers(src, layers=4, pages=40, device=DEVICE)
    queue = queue_of(layers, src, dst)
    free = pause()
    with host_never_waits():
        handles = [queue.submit(list(range(10 * i, 10 * i + 9))) for i in range(4)]
        assert not free.query(), "submit waited for the main stream"
        for handle in handles:
            assert handle.wait(30)
            assert handle.exception(0) is None
        assert not free.query(), "a conversion waited for the main stream"
    queue.close()
    assert not free.query(), "close waited for the main stream"
    torch.cuda.synchronize()
    layers.check([i for i in range(40) if i % 10 != 9], src, dst)


def test_a_blocked_queue_blocks_nobody() -> None:
    layers = Layers(SRC, device=DEVICE)
    with queue_of(layers) as queue:
        assert queue.stream is not None
        work = torch.ones(1000, device=DEVICE)
        work += 1  # the step's own kernel is loaded: a first launch may wait for all that runs
        torch.cuda.synchronize()
        free = pause(queue.stream)
        with host_never_waits():
            handle = queue.submit([1, 4])
            work += 1
            stepped = torch.cuda.Event()
            stepped.record()
        stepped.synchronize()
        assert not handle.done()
        assert not handle.wait(0.001)
        with pytest.raises(TimeoutError):
            handle.result(0)
        assert not free.query(), "the host or the main stream waited for the queue"
        handle.result()
        assert free.query()
    layers.check([1, 4], SRC, DST)


def test_a_stream_that_waits_for_the_handle_sees_the_pages() -> None:
    layers = Layers(SRC, layers=1, planes=1, device=DEVICE)
    pool = layers.pools[0].pages
    with queue_of(layers) as queue:
        assert queue.stream is not None
        free = pause(queue.stream)
        with host_never_waits():
            handle = queue.submit([1, 4])
            consumer = torch.cuda.Stream()
            handle.wait_on(consumer)
            with torch.cuda.stream(consumer):
                seen = pool.clone()
        assert not free.query(), "the host waited"
        consumer.synchronize()
        assert handle.done()
    assert_equal_bits(seen, pool)
    layers.check([1, 4], SRC, DST)


@pytest.mark.parametrize("ids", ["list", "gpu"])
def test_a_conversion_follows_its_transfer(ids: str) -> None:
    """The pages, and ids on the GPU, are written late on the transfer's stream."""
    pool = torch.zeros(6, 4, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    arriving = random_bits((2, 4, 16, 128), torch.bfloat16).to(DEVICE)
    block_ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    right_ids = torch.tensor([5, 2], device=DEVICE)
    expected = pool.clone()
    expected[[5, 2]] = converted(arriving.view(2, -1), SRC, DST).view(arriving.shape)
    transfer, done = torch.cuda.Stream(), torch.cuda.Event()
    with ConversionQueue([pool], SRC, DST) as queue:
        torch.cuda.synchronize()
        with torch.cuda.stream(transfer):
            pause(transfer)
            block_ids.copy_(right_ids)
            pool.index_copy_(0, right_ids, arriving)
            done.record()
        main_blocked = pause()
        with host_never_waits():
            handle = queue.submit([5, 2] if ids == "list" else block_ids, after=done)
        assert not handle.done()
        handle.result()
        assert done.query()
    main_blocked.synchronize()
    assert_equal_bits(pool, expected)


def test_ids_on_the_gpu_follow_the_current_stream() -> None:
    """Without `after`, ids that the caller's stream has yet to write are waited for."""
    layers = Layers(SRC, device=DEVICE)
    block_ids = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    right_ids = torch.tensor([5, 2], dtype=torch.int32, device=DEVICE)
    with queue_of(layers) as queue:
        writer = torch.cuda.Stream()
        with torch.cuda.stream(writer):
            pause(writer)
            block_ids.copy_(right_ids)
            with host_never_waits():
                handle = queue.submit(block_ids)
        handle.result()
    layers.check([5, 2], SRC, DST)


@pytest.mark.parametrize("make", [lambda ids: ids, lambda ids: torch.tensor(ids)], ids=["list", "cpu"])
def test_ids_on_the_host_are_those_of_the_call(make: Callable[[list[int]], Any]) -> None:
    """What the caller does to them afterwards, and to the memory they came in, changes nothing."""
    layers = Layers(SRC, pages=64, device=DEVICE)
    with queue_of(layers) as queue:
        assert queue.stream is not None
        pause(queue.stream)
        ids = make(list(range(30)))
        handles = [queue.submit(ids)]
        for i in range(30):
            ids[i] = 63
        handles += [queue.submit([page]) for page in range(30, 60)]
        scribble = [torch.full((4096,), 63, dtype=torch.int64, pin_memory=True) for _ in range(40)]
        gc.collect()
        for handle in handles:
            handle.result()
        del scribble
    layers.check(range(60), SRC, DST)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [6, -1, UNUSED_PAGE_ID])
@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize("kind", ["list", "cpu", "gpu", "gpu wide"])
def test_a_bad_id_is_told_by_its_request_alone(
    kind: str, check: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variable(monkeypatch, env.check, check)
    layers = Layers(SRC, device=DEVICE)
    with queue_of(layers) as queue:
        listed = [as_ids(kind, ids) for ids in ([5], [4, bad, 0], [1, 2])]
        with host_never_waits():
            handles = [queue.submit(ids) for ids in listed]
        handles[0].result()
        handles[2].result()
        error = handles[1].exception()
        assert isinstance(error, flashinfer.InvalidArgumentError)
        assert str(error) == f"convert_kv_pages: block_ids[1] must be a page id in [0, 6), got {bad}"
        with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 6\)"):
            handles[1].result()
        flashinfer.check_device_errors()
    # Ids that the host knows are looked at first; on the device the others of the request are converted.
    layers.check([5, 1, 2, 4, 0] if kind.startswith("gpu") else [5, 1, 2], SRC, DST)


def test_a_direct_call_still_reports_to_the_device() -> None:
    layers = Layers(SRC, device=DEVICE)
    with queue_of(layers) as queue:
        handle = queue.submit([1])
        flashinfer.convert_kv_pages(layers.caches, torch.tensor([7], device=DEVICE), SRC, DST)  # type: ignore[arg-type]
        handle.result()
        with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 6\), got 7"):
            flashinfer.check_device_errors()


def test_pages_in_flight_are_refused_by_name() -> None:
    layers = Layers(SRC, device=DEVICE)
    with queue_of(layers) as queue:
        assert queue.stream is not None
        pause(queue.stream)
        first = queue.submit([3, 5])
        with host_never_waits(), pytest.raises(flashinfer.InvalidArgumentError) as caught:
            queue.submit(torch.tensor([0, 5, 1, 3]))
        assert str(caught.value) == (
            "ConversionQueue: block_ids must be of no request in flight, got [3, 5]; wait for the handle that has them"
        )
        second = queue.submit([0, 1])
        first.result()
        second.result()
        layers.check([3, 5, 0, 1], SRC, DST)
    with ConversionQueue(layers.caches, DST, SRC) as back:  # type: ignore[arg-type]
        back.submit([3, 5]).result()
        back.submit([0, 1]).result()
    layers.check_untouched()


def test_an_error_of_a_launch_is_told_by_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = PageConverter.__call__
    layers = Layers(SRC, device=DEVICE)
    calls: list[int] = []

    def fails_second(self: PageConverter, block_ids: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise flashinfer.LaunchError("no luck")
        convert(self, block_ids)

    with queue_of(layers) as queue:
        assert queue.stream is not None
        monkeypatch.setattr(PageConverter, "__call__", fails_second)
        pause(queue.stream)
        handles = [queue.submit(ids) for ids in ([1], [2], [3])]
        assert not handles[1].done(), "its pages are the stream's until what was launched is over"
        with pytest.raises(flashinfer.LaunchError, match="no luck"):
            handles[1].result()
        handles[0].result()
        handles[2].result()
    layers.check([1, 3], SRC, DST)


def lost(handle: ConversionHandle, words: str) -> None:
    with pytest.raises(flashinfer.PoolLostError, match=words):
        handle.result()


def test_a_lost_pool_is_told_by_its_requests() -> None:
    pools = [random_bits((4, 4, 16, 128), torch.bfloat16, seed=seed).to(DEVICE) for seed in range(2)]
    other = random_bits((4, 4, 16, 128), torch.bfloat16, seed=9).to(DEVICE)
    expected = converted(other[1:2].view(1, -1).clone(), SRC, DST).view(4, 16, 128)
    # Of a pool's size, and of bytes that a conversion would move.
    size = pools[1].untyped_storage().nbytes()
    pattern = random_bits((size,), torch.uint8, seed=5).to(DEVICE)
    with ConversionQueue(pools, SRC, DST) as queue, ConversionQueue([other], SRC, DST) as unharmed:
        torch.cuda.synchronize()
        early = queue.submit([3])
        early.result()
        pause(queue.stream)
        running, neighbour = queue.submit([1]), unharmed.submit([1])
        pools[1].untyped_storage().resize_(0)
        # Who gets memory of that size now must not find the conversion in it.
        new = [pattern.clone() for _ in range(4)]
        late = queue.submit([2])
        lost(late, "got 0")
        lost(running, f"ConversionQueue: the pool must keep its {size} bytes of storage, got 0")
        early.result()
        neighbour.result()
    torch.cuda.synchronize()
    for t in new:
        assert_equal_bits(t, pattern)
    assert_equal_bits(other[1], expected)


def test_what_runs_ends_after_close() -> None:
    layers = Layers(SRC, device=DEVICE)
    queue = queue_of(layers)
    free = pause(queue.stream)
    handle = queue.submit([1])
    queue.close(wait=False)
    assert not free.query()
    assert not handle.done()
    lost(queue.submit([2]), r"must be open, got a request after close\(\)")
    handle.result()
    layers.check([1], SRC, DST)


def test_close_waits_for_all_requests() -> None:
    layers = Layers(SRC, device=DEVICE)
    with queue_of(layers) as queue:
        pause(queue.stream)
        handles = [queue.submit([1]), queue.submit([2])]
    assert all(handle.done() for handle in handles)
    layers.check([1, 2], SRC, DST)


def test_a_stream_of_the_caller() -> None:
    layers = Layers(SRC, device=DEVICE)
    stream, wait = torch.cuda.Stream(), torch.cuda.Event()
    with queue_of(layers, stream=stream) as queue:
        assert queue.stream is stream
        pause(stream)
        handle = queue.submit([1])
        wait.record(stream)
        assert not handle.done()
        wait.synchronize()
        assert handle.done()
    layers.check([1], SRC, DST)


def test_what_does_not_fit_is_refused() -> None:
    layers = Layers(SRC, device=DEVICE)
    with queue_of(layers) as queue:
        for after, message in (
            (torch.cuda.Event(), "after must be a recorded event, got one that was never recorded; record it first"),
            (torch.cuda.Stream(), "after must be a torch.cuda.Event, got Stream"),
        ):
            with pytest.raises(flashinfer.InvalidArgumentError) as caught:
                queue.submit([1], after=after)
            assert str(caught.value) == f"ConversionQueue: {message}"
        with pytest.raises(flashinfer.InvalidArgumentError, match=r"block_ids must be 1-D, got int64\[1, 1\] on cuda"):
            queue.submit(torch.ones(1, 1, dtype=torch.int64, device=DEVICE))
        # Refused, they left nothing in flight.
        queue.submit([1]).result()
    layers.check([1], SRC, DST)
    if torch.cuda.device_count() > 1:
        with pytest.raises(flashinfer.InvalidArgumentError, match="stream must be on cuda:0, got cuda:1"):
            queue_of(layers, stream=torch.cuda.Stream("cuda:1"))
