# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`ConversionQueue` on the CPU: many requests, and each answers for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.kv import ConversionHandle, ConversionQueue, PageConverter, PageFormat
from flashinfer.testing.compare import assert_equal_bits
from flashinfer.testing.generators import UNUSED_PAGE_ID, random_bits
from rocm_tests.kv.pages import Layers, converted

SRC, DST = (PageFormat(kind, "bfloat16", 2, 16, 16) for kind in ("standard", "shuffled"))
# Of a thread that ought to run: far beyond what it takes, so that a failure says so instead of hanging.
SECONDS = 60


class Gate:
    """An event of a transfer that has not happened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._open.set()

    def synchronize(self) -> None:
        self.reached.set()
        assert self._open.wait(SECONDS)


@pytest.fixture
def gate() -> Iterator[Any]:
    gate = Gate()
    yield gate
    gate.open()


def queue_of(layers: Layers, **options: Any) -> ConversionQueue:
    return ConversionQueue(layers.caches, SRC, DST, **options)  # type: ignore[arg-type]


def sentence(handle: ConversionHandle) -> str:
    error = handle.exception(SECONDS)
    assert isinstance(error, flashinfer.InvalidArgumentError), error
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        handle.result()
    assert caught.value is error
    return str(error)


def lost(handle: ConversionHandle, words: str) -> None:
    with pytest.raises(flashinfer.PoolLostError, match=words):
        handle.result(SECONDS)


def fine(handle: ConversionHandle) -> None:
    handle.result(SECONDS)
    assert handle.exception(0) is None
    assert handle.done()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("planes", [1, 2])
def test_each_request_converts_its_pages(planes: int, workers: int) -> None:
    layers = Layers(SRC, layers=3, planes=planes, pages=12)
    requests: list[Any] = [
        [3, 11],
        torch.tensor([0, 7, 5], dtype=torch.int32),
        torch.tensor([2]),
        [],
        torch.tensor([], dtype=torch.int32),
        (9,),
        range(6, 3, -2),
    ]
    with queue_of(layers, workers=workers) as queue:
        assert queue.stream is None
        handles = [queue.submit(ids) for ids in requests]
        for handle in handles:
            fine(handle)
    layers.check([3, 11, 0, 7, 5, 2, 9, 6, 4], SRC, DST)


def test_requests_run_in_order_behind_what_they_wait_for(gate: Any) -> None:
    layers = Layers(SRC)
    with queue_of(layers) as queue:
        first, second = queue.submit([1], after=gate), queue.submit([2])
        assert gate.reached.wait(SECONDS)
        for handle in (first, second):
            assert not handle.done()
            assert not handle.wait(0.01)
            with pytest.raises(TimeoutError, match="must be done within 0 s"):
                handle.result(0)
            with pytest.raises(TimeoutError):
                handle.exception(0)
        layers.check_untouched()
        gate.open()
        assert second.wait()
        assert first.done()
    layers.check([1, 2], SRC, DST)


def test_workers_pass_a_request_that_waits(gate: Any) -> None:
    layers = Layers(SRC)
    with queue_of(layers, workers=2) as queue:
        waiting = queue.submit([1], after=gate)
        fine(queue.submit([2]))
        assert not waiting.done()
        layers.check([2], SRC, DST)
        gate.open()
        fine(waiting)


def test_the_ids_are_those_of_the_call(gate: Any) -> None:
    layers = Layers(SRC)
    listed, ids = [1, 2], torch.tensor([3, 4])
    with queue_of(layers) as queue:
        queue.submit([0], after=gate)
        handles = queue.submit(listed), queue.submit(ids)
        listed[0], ids[0] = 5, 5
        gate.open()
        for handle in handles:
            fine(handle)
    layers.check([0, 1, 2, 3, 4], SRC, DST)


@pytest.mark.parametrize("as_ids", [list, torch.tensor])
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([2, 6, 1], "block_ids[1] must be a page id in [0, 6), got 6"),
        ([-1], "block_ids[0] must be a page id in [0, 6), got -1"),
        ([0, UNUSED_PAGE_ID], f"block_ids[1] must be a page id in [0, 6), got {UNUSED_PAGE_ID}"),
        ([4, 1, 4], "block_ids must be distinct, got 4 at [0] and [2]; convert each page once"),
    ],
)
def test_a_bad_id_is_told_by_its_request_alone(
    ids: list[int], expected: str, as_ids: Callable[[list[int]], Any], gate: Any
) -> None:
    layers = Layers(SRC)
    with queue_of(layers) as queue:
        before = queue.submit([5], after=gate)
        bad = queue.submit(as_ids(ids))
        # Its pages are free for others at once.
        after = queue.submit([0, 1, 2, 4])
        gate.open()
        assert sentence(bad) == f"convert_kv_pages: {expected}"
        fine(before)
        fine(after)
    layers.check([5, 0, 1, 2, 4], SRC, DST)


def test_an_error_of_a_conversion_is_told_by_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = PageConverter.__call__

    def fails_at_page_3(self: PageConverter, block_ids: torch.Tensor) -> None:
        if 3 in block_ids:
            raise flashinfer.LaunchError("no luck")
        convert(self, block_ids)

    monkeypatch.setattr(PageConverter, "__call__", fails_at_page_3)
    layers = Layers(SRC)
    with queue_of(layers) as queue:
        handles = [queue.submit(ids) for ids in ([1, 2], [3, 4], [5])]
        with pytest.raises(flashinfer.LaunchError, match="no luck"):
            handles[1].result()
        fine(handles[0])
        fine(handles[2])
    layers.check([1, 2, 5], SRC, DST)


def test_pages_in_flight_are_refused_by_name(gate: Any) -> None:
    layers = Layers(SRC, pages=40)
    with queue_of(layers, workers=2) as queue:
        queue.submit([7, 3], after=gate)
        queue.submit(list(range(10, 40)), after=gate)
        for ids, named in (
            ([1, 3, 7, 9], "[3, 7]"),
            ([8, 7, 11, 2], "[7, 11]"),
            (range(40), "[3, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, ...]"),
        ):
            with pytest.raises(flashinfer.InvalidArgumentError) as caught:
                queue.submit(ids)
            assert str(caught.value) == (
                f"ConversionQueue: block_ids must be of no request in flight, got {named}; "
                "wait for the handle that has them"
            )
        refused_pages = queue.submit([1, 9, 8, 2])
        gate.open()
        fine(refused_pages)
    layers.check([7, 3, *range(10, 40), 1, 9, 8, 2], SRC, DST)


def test_pages_of_a_request_that_is_done_are_free() -> None:
    layers = Layers(SRC)
    with queue_of(layers) as there, ConversionQueue(layers.caches, DST, SRC) as back:  # type: ignore[arg-type]
        for _ in range(3):
            fine(there.submit([1, 4]))
            layers.check([1, 4], SRC, DST)
            fine(back.submit([4, 1]))
            layers.check_untouched()


def test_a_lost_pool_is_told_by_its_requests(gate: Any) -> None:
    pools = [random_bits((4, 2, 16, 32), torch.bfloat16, seed=seed) for seed in range(3)]
    other = random_bits((4, 2, 16, 32), torch.bfloat16, seed=9)
    expected = converted(other[1:2].clone().view(1, -1), SRC, DST).view(2, 16, 32)
    with ConversionQueue(pools, SRC, DST) as queue, ConversionQueue([other], SRC, DST) as unharmed:
        early = queue.submit([3])
        fine(early)
        running, neighbour = queue.submit([1], after=gate), unharmed.submit([1], after=gate)
        pools[1].untyped_storage().resize_(0)
        late = queue.submit([2])
        gate.open()
        lost(running, r"ConversionQueue: the pool must keep its 8192 bytes of storage, got 0")
        lost(late, "got 0")
        fine(early)
        fine(neighbour)
    assert_equal_bits(other[1], expected)


def test_close_waits_for_all_requests(gate: Any) -> None:
    layers = Layers(SRC)
    queue = queue_of(layers)
    handles = [queue.submit([1], after=gate), queue.submit([2])]
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    queue.close()
    assert all(handle.done() for handle in handles)
    layers.check([1, 2], SRC, DST)
    queue.close()
    opener.join()


def test_close_without_waiting_calls_back_what_has_not_begun(gate: Any) -> None:
    layers = Layers(SRC)
    queue = queue_of(layers)
    began, pending = queue.submit([1], after=gate), queue.submit([2])
    assert gate.reached.wait(SECONDS)
    queue.close(wait=False)
    assert not began.done()
    gate.open()
    for handle in (began, pending):
        lost(handle, r"must be open until a request runs, got close\(wait=False\) before")
    lost(queue.submit([3]), r"must be open, got a request after close\(\)")
    layers.check_untouched()


def test_a_block_left_by_an_exception_waits_too() -> None:
    layers = Layers(SRC)
    with pytest.raises(KeyError), queue_of(layers) as queue:  # noqa: PT012
        handle = queue.submit([1])
        raise KeyError
    assert handle.done()
    layers.check([1], SRC, DST)


def test_a_stream_has_nothing_to_wait_for_but_the_host(gate: Any) -> None:
    layers = Layers(SRC)
    with queue_of(layers) as queue:
        handle = queue.submit([1], after=gate)
        threading.Timer(0.05, gate.open).start()
        handle.wait_on(None)  # type: ignore[arg-type]
        assert handle.done()
        layers.check([1], SRC, DST)


def test_the_backend_is_the_one_asked_for_around_the_queue() -> None:
    layers = Layers(SRC)
    with flashinfer.use_backend("nonsense"), pytest.raises(flashinfer.InvalidArgumentError, match="must be one of"):
        queue_of(layers)
    with queue_of(layers) as queue, flashinfer.use_backend("nonsense"):
        fine(queue.submit([1]))
    layers.check([1], SRC, DST)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_pool_of_inference_mode(backend: str) -> None:
    with torch.inference_mode(), flashinfer.use_backend(backend):
        pool = random_bits((3, 2, 16, 32), torch.bfloat16).clone()
        expected = converted(pool[2:].view(1, -1), SRC, DST).view(2, 16, 32)
        with ConversionQueue([pool], SRC, DST) as queue:
            queue.submit([2]).result()
    assert_equal_bits(pool[2], expected)


PLANE = torch.zeros(3, 2, 16, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("caches", "options", "expected"),
    [
        ([], {}, "ConversionQueue: caches must be tensors or (K plane, V plane) tuples, one a layer, got none"),
        ([3], {}, "ConversionQueue: caches must be tensors or (K plane, V plane) tuples, one a layer, got 3"),
        (
            [PLANE.to("meta")],
            {},
            "ConversionQueue: caches must be on a GPU or on the CPU, got bfloat16[3, 2, 16, 32] on m",
        ),
        (PLANE, {}, "convert_kv_pages: caches must be a list with one entry a layer, got bfloat16[3, 2, 16, 32]"),
        ([PLANE, PLANE[:2]], {}, "convert_kv_pages: planes[1] must be of the first plane's 3 pages, got 2"),
        ([PLANE.half().float()], {}, "convert_kv_pages: caches must be of 2-byte elements as bfloat16, got float32"),
        ([PLANE], {"workers": 0}, "ConversionQueue: workers must be an integer from 1 to 1024, got 0"),
        ([PLANE], {"stream": "s"}, "ConversionQueue: stream must be None for a pool on the CPU, got s"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(caches: Any, options: Any, expected: str) -> None:
    with pytest.raises(flashinfer.InvalidArgumentError) as caught:
        ConversionQueue(caches, SRC, DST, **options)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1.5], "block_ids must be integers or a tensor of them, got [1.5]"),
        ("12", "block_ids must be integers or a tensor of them, got '12'"),
        (7, "block_ids must be integers or a tensor of them, got 7"),
        (torch.tensor([1.0]), "block_ids must be int32 or int64, got float32[1] on cpu; pass block_ids.int()"),
        (torch.tensor(1), "block_ids must be 1-D, got int64[] on cpu"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "block_ids must be on cpu, got meta; "),
    ],
)
def test_what_is_no_list_of_ids_is_refused(ids: Any, expected: str) -> None:
    with ConversionQueue([PLANE.clone()], SRC, DST) as queue:
        with pytest.raises(flashinfer.InvalidArgumentError) as caught:
            queue.submit(ids)
        assert str(caught.value).startswith(f"ConversionQueue: {expected}")


def test_submit_is_no_part_of_a_graph() -> None:
    pool = random_bits((3, 2, 16, 32), torch.bfloat16)
    expected = converted(pool[:1].view(1, -1).clone(), SRC, DST).view(2, 16, 32)
    with ConversionQueue([pool], SRC, DST) as queue:

        def step(x: torch.Tensor) -> tuple[torch.Tensor, ConversionHandle]:
            x = x + 1
            handle = queue.submit([0])
            return x * 2, handle

        with pytest.raises(torch._dynamo.exc.Unsupported, match="ConversionQueue is for eager code"):
            torch.compile(step, fullgraph=True, backend="eager")(torch.ones(2))
        doubled, handle = torch.compile(step, backend="eager")(torch.ones(2))
        fine(handle)
    assert doubled.tolist() == [4, 4]
    assert_equal_bits(pool[0], expected)


def test_leave_to_change_values_is_passed_on() -> None:
    src, dst = (
        PageFormat(kind, dtype, 2, 16, 16)
        for kind, dtype in (("standard", "float8_e4m3fn"), ("shuffled", "float8_e4m3fnuz"))
    )
    pool = torch.arange(3 * 1024).remainder(256).to(torch.uint8).view(3, 2, 16, 32)
    expected = pool.clone()
    flashinfer.convert_kv_pages([expected], torch.tensor([1]), src, dst, allow_inexact=True)
    with pytest.raises(flashinfer.InvalidArgumentError, match="allow_inexact"):
        ConversionQueue([pool], src, dst)
    with ConversionQueue([pool], src, dst, allow_inexact=True) as queue:
        fine(queue.submit([1]))
    assert not torch.equal(pool[1], pool[2])
    assert_equal_bits(pool, expected)


def _grown_and_back(pool: torch.Tensor) -> None:
    storage = pool.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    kept.append(torch.empty(size, dtype=torch.uint8))  # so that the old place is taken
    storage.resize_(size)


kept: list[torch.Tensor] = []


@pytest.mark.parametrize(
    "lose",
    [
        _grown_and_back,
        lambda pool: pool.untyped_storage().resize_(64 << 20),
        lambda pool: pool.set_(torch.zeros_like(pool)),
    ],
)
def test_a_pool_in_another_place_is_told_by_its_requests(lose: Any) -> None:
    """The queue knows addresses: a storage that moved must not be written where it was."""
    pool = random_bits((400, 2, 16, 128), torch.bfloat16)
    src, dst = (PageFormat(kind, "bfloat16", 1, 16, 128) for kind in ("standard", "shuffled"))
    with ConversionQueue([pool], src, dst) as queue:
        lose(pool)
        before = pool.clone()
        with pytest.raises(flashinfer.PoolLostError, match="the pool must keep its storage"):
            queue.submit([1]).result()
    assert_equal_bits(pool, before)


def test_something_else_than_an_event_is_refused() -> None:
    with queue_of(Layers(SRC)) as queue, pytest.raises(flashinfer.InvalidArgumentError) as caught:
        queue.submit([1], after=5)  # type: ignore[arg-type]
    assert str(caught.value) == "ConversionQueue: after must be a torch.cuda.Event, got int"
