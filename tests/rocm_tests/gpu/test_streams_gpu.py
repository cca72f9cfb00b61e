# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Every op runs on torch's current stream, can be captured, and launches on the device of its tensors.

thu-ml/SageAttention#371, vllm-project/vllm#53818.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import flashinfer
from flashinfer.kv import PageFormat, convert_kv_pages
from flashinfer.testing.compare import assert_equal_bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Long enough that whatever is launched on another stream meanwhile runs first.
PAUSE_CYCLES = 100_000_000


class Job:
    """An op on inputs that `prepare(step)` writes and whose results `results()` reads, all on the current stream."""

    def __init__(
        self,
        prepare: Callable[[int], None],
        run: Callable[[], None],
        results: Callable[[], list[torch.Tensor]],
    ) -> None:
        self.prepare, self.run, self.results = prepare, run, results


def append_job(kv_layout: str, device: str) -> Job:
    N, H, D = 16, 4, 64
    rows = torch.zeros(2, 40, H, D, dtype=torch.bfloat16, device=device)
    shapes = {"NHD": ((N, H, D),) * 2, "SHUFFLED": ((H, D // 8, N, 8), (H, N // 8, D, 8))}[kv_layout]
    cache = tuple(torch.zeros(4, *shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    batch, positions = torch.zeros(40, dtype=torch.int32, device=device), torch.arange(40, device=device)
    table = torch.zeros(3, dtype=torch.int32, device=device), torch.tensor([0, 3], device=device), batch[:1]

    def prepare(step: int) -> None:
        rows.copy_(torch.arange(rows.numel(), device=device).view(rows.shape) % 251 + step)
        table[0].copy_((torch.arange(3, device=device) + step) % 4)
        for plane in cache:
            plane.zero_()

    def run() -> None:
        flashinfer.append_paged_kv_cache(rows[0], rows[1], batch, positions, cache, *table, kv_layout)

    return Job(prepare, run, lambda: [plane.clone() for plane in cache])


def mla_job(device: str) -> Job:
    rows, pool = torch.zeros(40, 576, device=device), torch.zeros(4, 16, 576, device=device)
    batch, positions = torch.zeros(40, dtype=torch.int32, device=device), torch.arange(40, device=device)
    table = torch.zeros(3, dtype=torch.int32, device=device), torch.tensor([0, 3], device=device), batch[:1]

    def prepare(step: int) -> None:
        rows.copy_(torch.arange(rows.numel(), device=device).view(rows.shape) + step)
        table[0].copy_((torch.arange(3, device=device) + step) % 4)
        pool.zero_()

    def run() -> None:
        halves = pool[..., :512], pool[..., 512:]
        flashinfer.append_paged_mla_kv_cache(rows[:, :512], rows[:, 512:], batch, positions, *halves, *table)

    return Job(prepare, run, lambda: [pool.clone()])


def metadata_job(device: str) -> Job:
    indptr, lens = torch.zeros(4, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    found = [torch.zeros(40, dtype=torch.int32, device=device) for _ in range(2)]
    seq_lens: list[torch.Tensor] = []

    def prepare(step: int) -> None:
        indptr.copy_(torch.arange(4, device=device) * (step + 2))
        lens.copy_(torch.arange(3, device=device) + step + 9)

    def run() -> None:
        flashinfer.get_batch_indices_positions(indptr, lens, 40, *found)
        seq_lens[:] = [flashinfer.get_seq_lens(indptr, lens, 16)]

    return Job(prepare, run, lambda: [t.clone() for t in found + seq_lens])


def convert_job(other: str, H: int, N: int, D: int, device: str) -> Job:
    src, dst = (PageFormat(kind, "bfloat16", H, N, D) for kind in ("standard", other))
    planes = torch.zeros(3, 2, 8, src.page_bytes // 4, dtype=torch.int16, device=device)
    block_ids = torch.zeros(4, dtype=torch.int32, device=device)

    def prepare(step: int) -> None:
        planes.copy_((torch.arange(planes.numel(), device=device) * 7 + step).view(planes.shape) % 30011)
        block_ids.copy_((torch.arange(4, device=device) * 3 + step) % 8)

    def run() -> None:
        convert_kv_pages([(layer[0], layer[1]) for layer in planes.unbind()], block_ids, src, dst)

    return Job(prepare, run, lambda: [planes.clone()])


JOBS: dict[str, Callable[[str], Job]] = {
    "append NHD": lambda device: append_job("NHD", device),
    "append SHUFFLED": lambda device: append_job("SHUFFLED", device),
    "append MLA": mla_job,
    "metadata": metadata_job,
    "convert, fast": lambda device: convert_job("shuffled", 8, 16, 128, device),
    "convert, clusters": lambda device: convert_job("shuffled", 8, 128, 128, device),
    "convert, generic": lambda device: convert_job("split_nhd", 8, 16, 128, device),
}


@pytest.fixture(autouse=True)
def no_reports_left() -> Iterator[None]:
    yield
    flashinfer.check_device_errors()


def expected(job: Job, step: int) -> list[torch.Tensor]:
    """On the default stream, with nothing else going on."""
    job.prepare(step)
    with flashinfer.use_backend("reference"):
        job.run()
    torch.cuda.synchronize()
    return job.results()


def assert_all_equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for got, right in zip(found, want, strict=True):
        assert_equal_bits(got, right)


@pytest.mark.parametrize("name", JOBS)
def test_a_side_stream_is_followed(name: str) -> None:
    """Inputs are written late on the side stream: an op on any other stream would read the old ones."""
    job = JOBS[name](DEVICE)
    want = expected(job, 3)
    job.prepare(1)
    job.run()  # whatever is made on first use is made
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES)
        job.prepare(3)
        job.run()
        done.record()
    # The consumer waits for the event and for nothing else.
    torch.cuda.current_stream().wait_event(done)
    assert_all_equal(job.results(), want)


@pytest.mark.parametrize("name", JOBS)
def test_a_call_does_not_wait_for_the_device(name: str) -> None:
    """Behind a long pause on its own stream, a call returns before the pause is over."""
    job = JOBS[name](DEVICE)
    job.prepare(1)
    job.run()
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    torch.cuda._sleep(5 * PAUSE_CYCLES)
    before.record()
    job.run()
    assert not before.query(), "the call waited for what was queued before it"
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", JOBS)
def test_a_graph_records_the_op(name: str) -> None:
    """Replays on changed inputs equal eager calls: nothing escaped the capture, nothing of it was frozen."""
    job = JOBS[name](DEVICE)
    wanted = {step: expected(job, step) for step in (2, 5)}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        job.prepare(1)
        job.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.run()
    for step in (2, 5, 2):
        job.prepare(step)
        graph.replay()
        torch.cuda.synchronize()
        assert_all_equal(job.results(), wanted[step])


def test_a_replay_reports_too() -> None:
    pool, row = torch.zeros(2, 4, 1, 8, device=DEVICE), torch.ones(1, 1, 8, device=DEVICE)
    zero, page = (torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)

    caches = pool, pool.clone()

    def append() -> None:
        flashinfer.append_paged_kv_cache(row, row, zero, zero, caches, page, indptr, zero)

    append()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append()
    flashinfer.check_device_errors()
    graph.replay()
    flashinfer.check_device_errors()
    page.fill_(77)
    graph.replay()
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"must be a page id in \[0, 2\), got 77"):
        flashinfer.check_device_errors()
    page.fill_(1)
    graph.replay()
    flashinfer.check_device_errors()


def test_conversion_on_its_own_stream_under_traffic() -> None:
    """The default stream keeps appending to other pages of the same pool while a request is converted."""
    src, dst = (PageFormat(kind, "bfloat16", 4, 16, 64) for kind in ("standard", "shuffled"))
    pool = torch.arange(64 * 4 * 16 * 128, device=DEVICE).remainder(30011).to(torch.int16).view(64, 4, 16, 128)
    cache = pool[..., :64], pool[..., 64:]
    received, appended = torch.arange(0, 32, device=DEVICE), torch.arange(32, 64, device=DEVICE)
    rows = torch.full((1, 4, 64), 5, dtype=torch.int16, device=DEVICE)
    want = pool.clone()
    convert_kv_pages([want], received, src, dst, backend="reference")
    want[32:, :, :2] = 5
    zero, one = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES // 10)
        convert_kv_pages([pool], received, src, dst)
        done.record()
    for page in appended.split(1):
        for position in range(2):
            flashinfer.append_paged_kv_cache(rows, rows, zero, zero + position, cache, page, one, zero, "HND")
    torch.cuda.current_stream().wait_event(done)
    assert_equal_bits(pool, want)


@pytest.mark.parametrize("name", JOBS)
def test_the_device_is_that_of_the_tensors(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    job = JOBS[name]("cuda:1")
    assert torch.cuda.current_device() == 0
    want = expected(job, 3)
    job.prepare(3)
    job.run()
    torch.cuda.synchronize("cuda:1")
    assert_all_equal(job.results(), want)
    assert torch.cuda.current_device() == 0
